"""Encoder-decoders: one decoding step of a beam, by the length of the source and the position in the target."""

from collections.abc import Iterator
from functools import cache

import torch
from torch import nn

from common.attention import ATTENTIONS

from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.packages import missing
from ..harness.work import Absent, Candidate, Case, Comparison, Settings

STOCK = "transformer"
#: The attentions of a decoder to the encoder that sum over the source once.
LINEAR = tuple(name for name, attention in ATTENTIONS.items() if "source" in attention.supports)
#: Candidate -> its architecture and its attention to the encoder.
FORMS = {
    STOCK: (STOCK, "softmax"),
    "softmax": ("softmax", "softmax"),
    **{f"flowformer + {cross}": ("flowformer", cross) for cross in ("softmax", *LINEAR)},
}
#: Lengths of the source, timed in the same rounds because they are compared with each other.
SOURCES, QUICK_SOURCES = (128, 1024, 4096, 16384), (128, 1024)
TARGETS, QUICK_TARGETS = (128, 1024, 4096), (128,)
BEAM, WIDTH, LAYERS = 5, 512, 2
#: The row that each row of the beam goes on from: two hypotheses of the step before have two successors.
_ORDER = (1, 0, 0, 3, 3)
#: Tokens of the source and of the target in the comparison with the decoder's full forward.
_CHECK = (37, 29)


def at_position(position: int) -> str:
    """The name of a run: a step after ``position`` tokens of the target."""
    return f"at target position {position:,}"


def decoding(
    settings: Settings, size: int, width: int = WIDTH, layers: int = LAYERS, targets: tuple[int, ...] | None = None
) -> list[Candidate | Absent]:
    """Every form with every source of up to ``size`` tokens, at every position in the target."""
    sources = [source for source in SOURCES if source < size] + [size]
    targets = targets or (QUICK_TARGETS if settings.quick else TARGETS)
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, source, reason) for source in sources for name in FORMS]
    encoded: dict = {}
    return [one for name in FORMS for one in _candidates(name, settings, sources, targets, width, layers, encoded)]


def _candidates(
    name: str,
    settings: Settings,
    sources: list[int],
    targets: tuple[int, ...],
    width: int,
    layers: int,
    encoded: dict[tuple[type, int], dict],
) -> Iterator[Candidate]:
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models import fairseq_models, translation

    longest = (max(*sources, _CHECK[0]), max(*targets, _CHECK[1]) + 1)
    model = fairseq_models.build_translator(*FORMS[name], width, layers, *longest, settings)
    check = cache(lambda: _check(model, settings))
    order = torch.tensor(_ORDER, device=settings.device)
    inputs = settings.to(torch.randn(longest[1], BEAM, width, generator=torch.Generator().manual_seed(3)))
    at = {position: [inputs[:position]] * layers for position in targets}
    of_target = {position: translation.read_target(model, at[position]) for position in targets}
    tokens = fairseq_models.random_tokens(settings, longest[1], BEAM)
    for source in sources:
        kind = (type(model.encoder), source)
        if kind not in encoded:  # equal for all models with such an encoder, whose seed is the same
            encoded[kind] = translation.encode(model, fairseq_models.random_tokens(settings, source), BEAM)
        of_source = translation.read_source(model, tokens, encoded[kind])
        for position in targets:
            state = translation.joined(model, of_source, of_target[position], at[position])
            step = translation.beam_step(model, tokens[:, : position + 1], order, encoded[kind], state)
            kept = translation.state_bytes(state)
            yield Candidate(name, source, 1, {at_position(position): step}, check, kept)


def _check(model: nn.Module, settings: Settings) -> list[Comparison]:
    """Compare a step after a reorder with the decoder's full forward over the reordered rows."""
    from ..models import fairseq_models, translation

    source, position = _CHECK
    order = torch.tensor(_ORDER, device=settings.device)
    before = fairseq_models.random_tokens(settings, position, BEAM)
    after = torch.cat([before[order], fairseq_models.random_tokens(settings, BEAM).T], dim=1)
    encoder_out = translation.encode(model, fairseq_models.random_tokens(settings, source), BEAM)
    inputs, _ = translation.layer_inputs(model, before, encoder_out)
    _, expected = translation.layer_inputs(model, after, encoder_out)
    of_source = translation.read_source(model, before, encoder_out)
    state = translation.joined(model, of_source, translation.read_target(model, inputs), inputs)
    (logits,) = translation.beam_step(model, after, order, encoder_out, state)()
    return [compare("logits", logits, expected, MODEL_TOLERANCES[settings.dtype])]


CASES = (
    Case(
        "translation_decoding",
        "One decoding step of a beam, from a source",
        "tokens",
        "source tokens",
        SOURCES[-1:],
        QUICK_SOURCES[-1:],
        decoding,
        plotted=False,
        inputs="state",
        note=f"a beam of {BEAM} for one sentence, reordered before the step as fairseq's generator does; width {WIDTH}, "
        f"{LAYERS} layers, 1,000 words; the state is that of the decoder, without the encoder's output",
    ),
)
