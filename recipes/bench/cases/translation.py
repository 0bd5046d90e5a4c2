"""Encoder-decoders: one decoding step of a beam, by the length of the source and the position in the target."""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from common.attention import ATTENTIONS

from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.packages import missing
from ..harness.work import Absent, Candidate, Case, Comparison, Settings

STOCK = "transformer"
#: Cross-attentions that sum over the source once.
_LINEAR = tuple(name for name, attention in ATTENTIONS.items() if "source" in attention.supports)
#: Candidate -> its architecture and its attention to the encoder.
FORMS = {
    STOCK: (STOCK, "softmax"),
    "softmax": ("softmax", "softmax"),
    **{f"flowformer + {cross}": ("flowformer", cross) for cross in ("softmax", *_LINEAR)},
}
#: Candidates whose cost does not depend on the source's length.
FLAT = tuple(name for name, (_, cross) in FORMS.items() if cross in _LINEAR)
#: Lengths of the source, timed in the same rounds because they are compared with each other.
NEAR, FAR, QUICK_FAR = 128, 16384, 1024
SOURCES = (NEAR, 1024, 4096, FAR)
POSITIONS, QUICK_POSITIONS = (128, 1024, 4096), (128,)
BEAM, WIDTH, LAYERS = 5, 512, 2
#: The row that each row of the beam continues: two hypotheses of the step before have two successors.
_ORDER = (1, 0, 0, 3, 3)
#: Tokens of the source and of the target in the comparison with the decoder's full forward.
_CHECK = (37, 29)


def at_position(position: int) -> str:
    """The name of a run: a step after ``position`` tokens of the target."""
    return f"at target position {position:,}"


def decoding(
    settings: Settings, size: int, width: int = WIDTH, layers: int = LAYERS, positions: tuple[int, ...] | None = None
) -> list[Candidate | Absent]:
    """Every candidate for every source of up to ``size`` tokens, at every position in the target."""
    sources = [source for source in SOURCES if source < size] + [size]
    positions = positions or (QUICK_POSITIONS if settings.quick else POSITIONS)
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, source, reason) for name in FORMS for source in sources]
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models.fairseq_models import build_translator

    candidates, encoded = [], {}
    longest = (max(*sources, _CHECK[0]), max(*positions, _CHECK[1]) + 1)
    for name, form in FORMS.items():
        model = build_translator(*form, width, layers, *longest, settings)
        candidates += _candidates(name, model, settings, sources, positions, encoded)
    return candidates


def _candidates(
    name: str,
    model: nn.Module,
    settings: Settings,
    sources: Sequence[int],
    positions: Sequence[int],
    encoded: dict[tuple[type, int], dict[str, list[Tensor]]],
) -> Iterator[Candidate]:
    """A step of ``model`` for each source and position; ``encoded`` holds the output of each kind of encoder."""
    from ..models import translation
    from ..models.fairseq_models import random_tokens

    check = cache(lambda: _check(model, settings))
    order = torch.tensor(_ORDER, device=settings.device)
    tokens = random_tokens(settings, max(positions) + 1, BEAM)
    shape = (max(positions), BEAM, model.decoder.embed_dim)
    x = settings.to(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    inputs = {position: [x[:position]] * len(model.decoder.layers) for position in positions}
    target_states = {position: translation.read_target(model, inputs[position]) for position in positions}
    for source in sources:
        kind = (type(model.encoder), source)
        if kind not in encoded:  # models with the same kind of encoder have the same weights, from one seed
            encoded[kind] = translation.encode(model, random_tokens(settings, source), BEAM)
        source_state = translation.read_source(model, tokens, encoded[kind])
        for position in positions:
            state = translation.joined(model, source_state, target_states[position], inputs[position])
            step = translation.beam_step(model, tokens[:, : position + 1], order, encoded[kind], state)
            yield Candidate(name, source, 1, {at_position(position): step}, check, translation.state_bytes(state))


def _check(model: nn.Module, settings: Settings) -> list[Comparison]:
    """Compare a step after a reorder with the decoder's full forward over the reordered rows."""
    from ..models import translation
    from ..models.fairseq_models import random_tokens

    source, position = _CHECK
    order = torch.tensor(_ORDER, device=settings.device)
    before = random_tokens(settings, position, BEAM)
    after = torch.cat([before[order], random_tokens(settings, BEAM).T], dim=1)
    encoder_out = translation.encode(model, random_tokens(settings, source), BEAM)
    inputs, _ = translation.layer_inputs(model, before, encoder_out)
    _, expected = translation.layer_inputs(model, after, encoder_out)
    source_state = translation.read_source(model, before, encoder_out)
    state = translation.joined(model, source_state, translation.read_target(model, inputs), inputs)
    (logits,) = translation.beam_step(model, after, order, encoder_out, state)()
    return [compare("logits", logits, expected, MODEL_TOLERANCES[settings.dtype])]


CASES = (
    Case(
        "translation_decoding",
        "One decoding step of a beam, from a source",
        "tokens",
        "source tokens",
        (FAR,),
        (QUICK_FAR,),
        decoding,
        plotted=False,
        inputs="state",
        note=f"a beam of {BEAM} for one sentence, reordered before the step as by fairseq's generator; width {WIDTH}, "
        f"{LAYERS} layers, 1,000 words; the state is the decoder's, without the encoder's output",
    ),
)
