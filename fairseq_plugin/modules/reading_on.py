"""Chunked prefill: run fairseq's decoder, which takes one token at a time, on several tokens from a decoding state.

Its ``extract_features`` cuts the tokens to the last one where it is given a state. Here it is given none: hooks hand
the state to the layers, and to the position embedding the number of tokens before.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from .multihead_attention import IncrementalState


@contextmanager
def layers_after(
    layers: nn.ModuleList, incremental_state: IncrementalState, self_attn_mask: Tensor | None = None
) -> Iterator[None]:
    """Inside, each of ``layers`` of fairseq's decoder goes on from ``incremental_state`` and fills it.

    ``self_attn_mask`` (n, tokens before + n), added to scores, is for attention that is not causal by itself.
    """

    def give(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (*args[:3], incremental_state, *args[4:]), {**kwargs, "self_attn_mask": self_attn_mask}

    with ExitStack() as hooks:
        for layer in layers.children():  # iterating itself draws which layers are dropped, where there is layer drop
            hooks.callback(layer.register_forward_pre_hook(give, with_kwargs=True).remove)
        yield


@contextmanager
def positions_after(embed_positions: nn.Module | None, start: Tensor) -> Iterator[None]:
    """Inside, ``embed_positions`` of ours counts from ``start`` (B,), the real tokens before; None is no embedding.

    ``start`` is (B, n) where positions begin anew within a row.
    """

    def give(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "start": start}

    with ExitStack() as hooks:
        if embed_positions is not None:
            hooks.callback(embed_positions.register_forward_pre_hook(give, with_kwargs=True).remove)
        yield
