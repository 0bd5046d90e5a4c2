"""LoLCATs as a module: a softmax window and learned linear attention under one normaliser."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.lolcats import PARTS, lolcats_attention
from ..ops.lolcats.reference import lolcats_attention_reference
from ..ops.shared.checks import check_choice
from ..ops.shared.learned_features import LEARNED_MAPS
from ._base import OpAttention
from ._options import About, AttentionOptions, causal_chunk_size, choice, count, default_of, number
from ._registry import register_attention


@dataclass(frozen=True)
class LolcatsOptions(AttentionOptions):
    """Options of LoLCATs; see ``common.ops.lolcats_attention``."""

    window: int = count(64, "tokens of the window, in which attention is softmax")
    feature_map: str = choice(
        default_of(lolcats_attention, "feature_map"),
        LEARNED_MAPS,
        "learned features outside of the window: softmax of a map and of its negative (Hedgehog), or relu (T2R)",
    )
    rows: int | None = count(
        None,
        "rows of each head's map, which give as many features, or with softmax twice as many; 0, the default: half of "
        "the channels of a head, or with relu all",
        optional=True,
        setup_only=True,
    )
    window_weight: float = number(
        0.1,
        "weight of the window at first, above 0 and below 1, which then is learned; 0.1 is the authors'",
        setup_only=True,
        below=1.0,
    )
    chunk_size: int = causal_chunk_size(lolcats_attention)


@register_attention("lolcats")
class LolcatsAttention(OpAttention):
    """Softmax in a window and learned linear attention outside of it, under one normaliser.

    Queries and keys of each head have their own maps, ``query_weight`` and ``key_weight`` (H, r, d), initialised to the
    identity; with relu also ``query_bias`` and ``key_bias`` (H, r). The sigmoid of ``window_gate`` (H,) is the weight
    of the window. Self-attention only. Shapes and masks as in ``InnerAttention``; options as in
    ``common.ops.lolcats_attention``.
    """

    about = About(
        "LoLCATs",
        "Zhang et al., ICLR 2025, equation 7",
        "n (w + 2r) d",
        "2r d + 2r + 2d min(n, w)",
        sizes={"r": "rows", "w": "window"},
        url="https://arxiv.org/abs/2410.10254",
    )
    Options = LolcatsOptions
    needs = frozenset({"num_heads", "head_dim"})
    shown_by_weights = frozenset({"rows", "window_weight"})  # from the maps' shape and the learned weight
    weighted_mean = True
    #: The terms of the formula that are computed, one of ``ops.lolcats.PARTS``; see ``only_part``.
    part = PARTS[0]
    op = staticmethod(lolcats_attention)
    reference_op = staticmethod(lolcats_attention_reference)

    def setup(self) -> None:
        heads, channels, relu = self.shape.num_heads, self.shape.head_dim, self.options.feature_map == "relu"
        rows = self.options.rows or (channels if relu else max(1, channels // 2))
        for name in ("query", "key"):
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(heads, rows, channels)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(heads, rows)) if relu else None)
        self.window_gate = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise maps to ``torch.eye(r, d)`` with zero bias, and γ to ``window_weight``."""
        nn.init.constant_(self.window_gate, math.log(self.options.window_weight / (1.0 - self.options.window_weight)))
        for name in ("query", "key"):
            weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
            with torch.no_grad():
                weight.copy_(torch.eye(*weight.shape[1:]))
            if bias is not None:
                nn.init.zeros_(bias)

    def state_tokens(self) -> int:
        """The window."""
        return self.options.window

    def linear_weights(self) -> tuple[str, ...]:
        """The weights of the maps."""
        return ("query_weight", "key_weight")

    def op_kwargs(self) -> dict[str, Any]:
        """The maps, the gate, and the part that is computed."""
        names = ("query_weight", "query_bias", "key_weight", "key_bias", "window_gate", "part")
        return {name: getattr(self, name) for name in names}


@contextmanager
def only_part(model: nn.Module, part: str) -> Iterator[None]:
    """Inside, every LoLCATs attention of ``model`` is its softmax window or its linear attention alone.

    ``part`` is "window", "linear", which then sees the tokens of the window as well, or "both". Works on whole
    sequences, in training and in evaluation. Use it to measure one part of a trained model, or to train the linear part
    alone.

    Raises:
        ValueError: an unknown ``part``, or a ``model`` without LoLCATs attention.
    """
    check_choice("part", part, PARTS)
    modules = [module for module in model.modules() if isinstance(module, LolcatsAttention)]
    if not modules:
        raise ValueError(f"model is a {type(model).__name__} without lolcats attention; allowed: a model that has it")
    originals = [module.part for module in modules]
    for module in modules:
        module.part = part
    try:
        yield
    finally:
        for module, original in zip(modules, originals):
            module.part = original
