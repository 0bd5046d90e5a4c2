"""One decoding step of a language model at a far position; its state is computed without stepping there."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

State = dict[str, dict[str, Tensor | None]]


def decoding_step(model: nn.Module, tokens: Tensor, state: State) -> Callable[[], list[Tensor]]:
    """A function that computes the logits after ``tokens`` (B, n); ``state`` holds all of them but the last.

    Several rows are hypotheses of a beam: each continues the row at the opposite position, as if the search had chosen
    it, and the logits are in the order of ``tokens``.
    """
    order = torch.arange(len(tokens)).flip(0)

    def step() -> list[Tensor]:
        # A step replaces tensors of the state and never changes them, so a shallow copy suffices.
        copy = {name: dict(entry) for name, entry in state.items()}
        with torch.no_grad():
            if len(tokens) > 1:
                model.decoder.reorder_incremental_state_scripting(copy, order)
            logits, _ = model(tokens[order], incremental_state=copy)
        return [logits[order, -1]]

    return step


def beam_generation(model: nn.Module, tokens: Tensor, beam: int) -> tuple[Callable[[], list[Tensor]], Tensor]:
    """A function that reads ``tokens`` (B, n) one by one, and the final sequences (B, n) of its rows.

    Before each token every row continues a random row of its ``beam``, as in fairseq's search. The function returns the
    logits after the last token.
    """
    rows, generator = torch.arange(len(tokens)), torch.Generator().manual_seed(3)
    firsts, sequences, orders = rows - rows % beam, [tokens[:, :1]], []
    for i in range(1, tokens.shape[1]):
        orders.append(firsts + torch.randint(0, beam, firsts.shape, generator=generator))
        sequences.append(torch.cat([sequences[-1][orders[-1]], tokens[:, i : i + 1]], dim=1))

    def generate() -> list[Tensor]:
        state: State = {}
        with torch.no_grad():
            logits, _ = model(sequences[0], incremental_state=state)
            for order, sequence in zip(orders, sequences[1:]):
                model.decoder.reorder_incremental_state_scripting(state, order)
                logits, _ = model(sequence, incremental_state=state)
        return [logits[:, -1]]

    return generate, sequences[-1]


def reach(model: nn.Module, tokens: Tensor, forward: nn.Module | None = None) -> tuple[State, Tensor]:
    """The state after all of ``tokens`` (B, n) but the last, and the logits of the full forward after the last.

    Every layer gets its input from the full forward, all tokens at once. ``forward`` is a model with the same weights
    that computes the full forward if that of ``model`` would need too much memory.
    """
    forward = model if forward is None else forward
    inputs: list[Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        for layer in forward.decoder.layers
    ]
    state: State = {}
    with torch.no_grad():
        try:
            logits = forward(tokens)[0][:, -1]
        finally:
            for hook in hooks:
                hook.remove()
        for layer, x in zip(model.decoder.layers, inputs, strict=True):
            if forward is model:
                layer(x[:-1], incremental_state=state)
            else:
                cache(layer.self_attn, layer.self_attn_layer_norm(x[:-1]), state)
    return state, logits


def cache(attention: nn.Module, x: Tensor, state: State) -> None:
    """Fill the cache of one of fairseq's own self-attentions from its input x (T, B, C)."""

    def heads(projected: Tensor) -> Tensor:  # (T, B, C) -> (B, H, T, d)
        return projected.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3).contiguous()

    keys, values = heads(attention.k_proj(x)), heads(attention.v_proj(x))
    attention._set_input_buffer(state, {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": None})
