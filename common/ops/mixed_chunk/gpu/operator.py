"""Mixed chunk attention of a whole sequence by kernels as an operator of torch.compile."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...shared.gpu import dispatch
from ...shared.gpu.operators import differentiable_operator
from .. import sequence as plain
from ..sequence import MixedChunkOptions, Tokens
from . import sequence


def guarded_sequence(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """Kernels, or plain PyTorch where they fail."""
    arguments = (tokens, bias, options, padding_mask)
    return dispatch.guarded(
        sequence.NAME,
        lambda: sequence.whole_sequence(*arguments),
        lambda: plain.whole_sequence(*arguments),
        sequence.first_use(*arguments),
    )


def whole_sequence(
    tokens: Tokens, bias: Tensor | None, options: MixedChunkOptions, padding_mask: Tensor | None
) -> Tensor:
    """``guarded_sequence`` as one operator."""
    return _attend(*tokens, bias, padding_mask, *options[:7])


def _run(*given: Any) -> Sequence[Tensor]:
    tokens, (bias, padding_mask), options = Tokens(*given[:5]), given[5:7], MixedChunkOptions(*given[7:])
    return (guarded_sequence(tokens, bias, options, padding_mask).to(tokens.v.dtype).contiguous(),)


def _fake(*given: Any) -> tuple[Tensor, ...]:
    v = given[4]
    return (v.new_empty(v.shape),)


_attend = differentiable_operator(
    "mixed_chunk_attention",
    (*Tokens._fields, "bias?", "padding?"),
    "int chunk_size, bool causal, str kernel, bool local, bool linear, bool first_softmax, bool first_to_all",
    1,
    _run,
    _fake,
)
