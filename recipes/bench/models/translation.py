"""One decoding step of a beam by an encoder-decoder, far into a target; its state is computed at once."""

from collections.abc import Callable, Sequence

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from ..harness.memory import storage_bytes
from .decoding import State, cache

#: The encoder's output, as fairseq's generator passes it on.
EncoderOut = dict[str, list[Tensor]]


@torch.no_grad()
def encode(model: nn.Module, source: Tensor, beam: int) -> EncoderOut:
    """The encoder's output for ``source`` (1, S), with a row for each of ``beam`` hypotheses."""
    lengths = torch.tensor([source.shape[1]], device=source.device)
    return model.encoder.reorder_encoder_out(model.encoder(source, lengths), torch.zeros_like(lengths).repeat(beam))


@torch.no_grad()
def read_source(model: nn.Module, tokens: Tensor, encoder_out: EncoderOut) -> State:
    """The state of cross-attention after the first of ``tokens`` (beam, n): the part that depends on the source."""
    state: State = {}
    model.decoder(tokens[:, :1], encoder_out, state)
    source_state: State = {}
    for layer in model.decoder.layers:
        layer.encoder_attn._set_input_buffer(source_state, layer.encoder_attn._get_input_buffer(state))
    return source_state


@torch.no_grad()
def read_target(model: nn.Module, inputs: Sequence[Tensor]) -> State:
    """The state of self-attention after n tokens; ``inputs`` are those of the layers, (n, beam, C) each."""
    state: State = {}
    for layer, x in zip(model.decoder.layers, inputs, strict=True):
        if type(layer.self_attn) is MultiheadAttention:
            cache(layer.self_attn, x, state)
        else:
            layer.self_attn(x, incremental_state=state)
    return state


@torch.no_grad()
def joined(model: nn.Module, source: State, target: State, inputs: Sequence[Tensor]) -> State:
    """The state after the n tokens of ``inputs``, joined from ``read_source`` and ``read_target``."""
    state = {name: dict(entry) for name, entry in {**source, **target}.items()}
    for layer, x in zip(model.decoder.layers, inputs, strict=True):
        if type(layer.encoder_attn) is not MultiheadAttention:  # our cross-attention counts the target's tokens
            layer.encoder_attn(x[1:], None, None, incremental_state=state)
    return state


def beam_step(
    model: nn.Module, tokens: Tensor, order: Tensor, encoder_out: EncoderOut, state: State
) -> Callable[[], list[Tensor]]:
    """A function that does a step of fairseq's generator except the choice of words; it returns the logits.

    The step first reorders the rows of the beam by ``order``. ``tokens`` (beam, n) are the rows after that; ``state``
    holds all but the last token of each.
    """

    @torch.no_grad()
    def step() -> list[Tensor]:
        # A step replaces tensors of the state and never changes them, so a shallow copy suffices.
        copy = {name: dict(entry) for name, entry in state.items()}
        model.decoder.reorder_incremental_state_scripting(copy, order)
        reordered = model.encoder.reorder_encoder_out(encoder_out, order)
        logits, _ = model.decoder(tokens, reordered, copy)
        return [logits[:, -1]]

    return step


def state_bytes(state: State) -> int:
    """Bytes of all tensors of a decoding state."""
    return storage_bytes([x for entry in state.values() for x in entry.values() if x is not None])


@torch.no_grad()
def layer_inputs(model: nn.Module, tokens: Tensor, encoder_out: EncoderOut) -> tuple[list[Tensor], Tensor]:
    """The inputs (n, beam, C) of the decoder's layers, and the logits after the last of ``tokens`` (beam, n)."""
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for layer in model.decoder.layers
    ]
    try:
        logits, _ = model.decoder(tokens, encoder_out)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs, logits[:, -1]
