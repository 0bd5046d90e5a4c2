"""Chunked prefill: run fairseq's decoder on several tokens from a decoding state, not just on one.

If ``extract_features`` gets a state, it only reads the last token. So here it gets none: hooks pass the state to the
layers, and the number of earlier tokens to the position embedding.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from .multihead_attention import IncrementalState


@contextmanager
def layers_after(
    layers: nn.ModuleList, incremental_state: IncrementalState, self_attn_mask: Tensor | None = None
) -> Iterator[None]:
    """Inside, each of ``layers`` of fairseq's decoder continues from ``incremental_state`` and updates it.

    ``self_attn_mask`` (n, earlier tokens + n), added to scores, is for attention that is not itself causal.
    """

    def add_state(layer: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (*args[:3], incremental_state, *args[4:]), {**kwargs, "self_attn_mask": self_attn_mask}

    with ExitStack() as hooks:
        for layer in layers.children():  # with layer drop, iterating over the list itself skips layers at random
            hooks.callback(layer.register_forward_pre_hook(add_state, with_kwargs=True).remove)
        yield


@contextmanager
def positions_after(embed_positions: nn.Module | None, start: Tensor) -> Iterator[None]:
    """Inside, our ``embed_positions`` counts from ``start`` (B,), the number of earlier real tokens; None does nothing.

    ``start`` is (B, n) if positions restart within a row.
    """

    def add_start(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {**kwargs, "start": start}

    with ExitStack() as hooks:
        if embed_positions is not None:
            hooks.callback(embed_positions.register_forward_pre_hook(add_start, with_kwargs=True).remove)
        yield
