"""One decoding step of a language model at a position, whose state is reached without as many steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

State = dict[str, dict[str, Tensor | None]]


def decoding_step(model: nn.Module, tokens: Tensor, state: State) -> Callable[[], list[Tensor]]:
    """The logits of the token after ``tokens`` (1, n), of which ``state`` holds all but the last, as a function."""

    def step() -> list[Tensor]:
        # Steps put new tensors into the state and leave the old ones as they are.
        copy = {name: dict(entry) for name, entry in state.items()}
        with torch.no_grad():
            logits, _ = model(tokens, incremental_state=copy)
        return [logits[:, -1]]

    return step


def reach(model: nn.Module, tokens: Tensor, forward: nn.Module | None = None) -> tuple[State, Tensor]:
    """The state after all of ``tokens`` (1, n) but the last, and the logits after the last from the full forward.

    ``forward`` is another model with the same weights for the full forward, where the model's own needs too much.
    Every layer is given what the full forward gave it, so that all tokens go through a layer at once.
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
                _cache(layer, x[:-1], state)
    return state, logits


def _cache(layer: nn.Module, x: Tensor, state: State) -> None:
    """Fill the cache of a pre-norm layer of fairseq's own from x (T, B, C)."""
    attention = layer.self_attn
    normed = layer.self_attn_layer_norm(x)

    def heads(projected: Tensor) -> Tensor:  # (T, B, C) -> (B, H, T, d)
        return projected.unflatten(-1, (attention.num_heads, -1)).permute(1, 2, 0, 3).contiguous()

    keys, values = heads(attention.k_proj(normed)), heads(attention.v_proj(normed))
    attention._set_input_buffer(
        state, {"prev_key": keys, "prev_value": values, "prev_key_padding_mask": None}
    )  # fmt: skip
