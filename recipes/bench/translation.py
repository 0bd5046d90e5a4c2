"""Encoder-decoders: one decoding step of a beam, by the length of the source and the position in the target."""

from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from common.attention import ATTENTIONS

from . import models
from .measure import Candidate, Case, Place, error

STOCK = "transformer"
#: Candidate -> its architecture and its attention to the encoder, which sums over the source once if it can.
_CROSS = ("softmax", *(name for name, kind in ATTENTIONS.items() if "source" in kind.supports))
FORMS = {STOCK: (STOCK, "softmax"), "softmax": ("softmax", "softmax")}
FORMS |= {f"flowformer + {cross}": ("flowformer", cross) for cross in _CROSS}
#: The row that each row of the beam continues: two hypotheses of the step before have two successors.
ORDER = (1, 0, 0, 3, 3)
SOURCES, POSITIONS = (128, 1024, 4096), (128, 1024, 4096)
EncoderOut = dict[str, list[Tensor]]


def translator(architecture: str, cross: str, width: int, layers: int, source: int, target: int) -> nn.Module:
    """A model whose encoder has no layers: its output is its embedded tokens, so a long source costs nothing."""
    command = ["--task", "translation", "--arch", architecture, "--encoder-layers", 0, "--decoder-layers", layers]
    command += ["--share-decoder-input-output-embed"]
    command += ["--max-source-positions", source, "--max-target-positions", target]
    for side in ("encoder", "decoder"):
        command += [f"--{side}-embed-dim", width, f"--{side}-ffn-embed-dim", 4 * width]
        command += [f"--{side}-attention-heads", width // 64]
    if architecture != STOCK:
        command += ["--lineartime-cross-attention", cross]
    model = models.built(command)
    model.make_generation_fast_(need_attn=False)  # as fairseq-generate does
    return model


@torch.no_grad()
def encode(model: nn.Module, source: Tensor) -> EncoderOut:
    """The encoder's output for ``source`` (1, S), with a row for each hypothesis of the beam."""
    lengths = torch.tensor([source.shape[1]], device=source.device)
    return model.encoder.reorder_encoder_out(
        model.encoder(source, lengths), torch.zeros_like(lengths).repeat(len(ORDER))
    )


@torch.no_grad()
def state_after(model: nn.Module, words: Tensor, encoder_out: EncoderOut, inputs: Sequence[Tensor]) -> models.State:
    """The state after n tokens: cross-attention's of the source, self-attention's of the layers' inputs (n, B, C)."""
    first: models.State = {}
    model.decoder(words[:, :1], encoder_out, first)
    state: models.State = {}
    for layer, x in zip(model.decoder.layers, inputs, strict=True):
        layer.encoder_attn._set_input_buffer(state, layer.encoder_attn._get_input_buffer(first))
        if type(layer.self_attn) is MultiheadAttention:
            models.fill_cache(layer.self_attn, x, state)
        else:
            layer.self_attn(x, incremental_state=state)
        if type(layer.encoder_attn) is not MultiheadAttention:  # ours counts the target's tokens
            layer.encoder_attn(x[1:], None, None, incremental_state=state)
    return state


def decoding(
    size: int, place: Place, width: int = 512, layers: int = 2, positions: Sequence[int] = ()
) -> list[Candidate]:
    """Every form for every source of up to ``size`` tokens, at every position in the target, in the same rounds."""
    sources = [*(source for source in SOURCES if source < size), size]
    positions = positions or (POSITIONS if size > 1024 else POSITIONS[:1])
    made, encoded, longest = [], {}, (max(*sources, 37), max(*positions, 29) + 1)
    for name, form in FORMS.items():
        model = models.placed(translator(*form, width, layers, *longest), place)
        made += _candidates(name, model, sources, positions, place, encoded)
    return made


def _candidates(
    name: str,
    model: nn.Module,
    sources: Sequence[int],
    positions: Sequence[int],
    place: Place,
    encoded: dict[tuple[type, int], EncoderOut],
) -> Iterator[Candidate]:
    check, order = cache(partial(_check, model, place)), place(torch.tensor(ORDER))
    words = place(models.tokens(max(positions) + 1, len(ORDER)))
    shape = (max(positions), len(ORDER), model.decoder.embed_dim)
    x = place(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    for source in sources:
        kind, runs = (type(model.encoder), source), {}
        if kind not in encoded:  # encoders of one kind have the same weights, from one seed
            encoded[kind] = encode(model, place(models.tokens(source)))
        for position in positions:
            state = state_after(model, words, encoded[kind], [x[:position]] * len(model.decoder.layers))
            reordered = partial(model.encoder.reorder_encoder_out, encoded[kind], order)
            step = models.decoding_step(model.decoder, words[:, : position + 1], order, state, reordered)
            runs[f"at target position {position:,}"] = step
        yield Candidate(name, 1, runs, check, source, is_model=True)


def _check(model: nn.Module, place: Place) -> dict[str, float]:
    """A step after a reorder, and the decoder's full forward over the reordered rows."""
    order = place(torch.tensor(ORDER))
    before = place(models.tokens(29, len(ORDER)))
    after = torch.cat([before[order], place(models.tokens(len(ORDER)).T)], dim=1)
    encoded = encode(model, place(models.tokens(37)))
    inputs, _ = models.layer_inputs(model.decoder, lambda: model.decoder(before, encoded))
    _, expected = models.layer_inputs(model.decoder, lambda: model.decoder(after, encoded))
    state = state_after(model, before, encoded, inputs)
    reordered = partial(model.encoder.reorder_encoder_out, encoded, order)
    return {"logits": error(models.decoding_step(model.decoder, after, order, state, reordered)()[0], expected)}


CASES = {
    "translation_decoding": Case(
        f"One decoding step of a beam of {len(ORDER)}, reordered before it, 2 layers of width 512",
        (16384,),
        decoding,
        STOCK,
        quick=1024,
        axis="source tokens",
    )
}
