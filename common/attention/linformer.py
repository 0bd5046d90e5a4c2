"""Linformer's attention as a module."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..ops.linformer import linformer_attention
from ..ops.linformer.reference import linformer_attention_reference
from ..ops.shared.checks import check_table
from ._base import OpAttention
from ._options import About, AttentionOptions, count, flag
from ._registry import register_attention


@dataclass(frozen=True)
class LinformerOptions(AttentionOptions):
    """Options of Linformer; see ``common.ops.linformer_attention``."""

    projected_length: int = count(
        128,
        "sums of keys and of values, the paper's k; the paper has 128 and 256, the Long Range Arena 16 and 32",
        setup_only=True,
    )
    shared: bool = flag(
        False, "one matrix makes the sums of keys and those of values, as in the Long Range Arena", setup_only=True
    )


@register_attention("linformer")
class LinformerAttention(OpAttention):
    """Softmax over learned sums of keys, for at most M = ``max_tokens`` tokens; not causal.

    ``key_rows`` and ``value_rows`` (M, p) are the paper's E and F, one pair for all heads; ``value_rows`` is None if
    they are shared. Shapes and masks as in ``InnerAttention``. Raises ValueError for a longer input.
    """

    about = About(
        "Linformer",
        "Wang et al., 2020",
        "n p d",
        sizes={"p": "projected_length"},
        url="https://arxiv.org/abs/2006.04768",
    )
    Options = LinformerOptions
    supports = frozenset({"bidirectional", "cross"})
    needs = frozenset({"max_tokens"})
    op = staticmethod(linformer_attention)
    reference_op = staticmethod(linformer_attention_reference)

    def setup(self) -> None:
        self.max_tokens = self.shape.max_tokens  # read by hosts
        shape = (self.shape.max_tokens, self.options.projected_length)
        check_table("max_tokens", self.max_tokens, shape)
        self.key_rows = nn.Parameter(torch.empty(shape))
        self.value_rows = None if self.options.shared else nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters uniformly, so that sums of M tokens are about as large as a token."""
        for rows in self.parameters():
            nn.init.xavier_uniform_(rows)

    def op_kwargs(self) -> dict[str, Any]:
        """The projection matrices E and F."""
        return {"key_rows": self.key_rows, "value_rows": self.key_rows if self.options.shared else self.value_rows}
