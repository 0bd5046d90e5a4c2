"""Arguments of the operators of Flow-Attention, and these in the form that kernels take: numbers and addresses."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...shared.cpu.tensors import number
from ...shared.feature_maps import FEATURE_MAPS
from ...shared.padding import real_first
from ..options import COMPETITIONS, FlowForm, FlowOptions

#: The arguments after the tensors, in PyTorch's language of schemas.
SCHEMA = "int phi, int competition, int allocation, float eps, float outer_eps, float clamp"
#: The numbers of phi in ``fours``, and of competition and allocation in ``kernels``.
_MAPS = {phi: 1 + i for i, phi in enumerate(FEATURE_MAPS)}
_KINDS = {kind: i for i, kind in enumerate(COMPETITIONS)}


def constants_of(options: FlowOptions) -> tuple[int, int, int, float, float, float]:
    """The options as arguments of an operator, without ``rescale``, which causal attention does not read."""
    form, clamp, phi, competition, allocation = options
    return _MAPS[phi], _KINDS[competition], _KINDS[allocation], form.eps, form.outer_eps, clamp


def options_of(constants: Sequence[float], rescale: bool = False) -> FlowOptions:
    """The inverse of ``constants_of``."""
    phi, competing, allocating, eps, outer_eps, clamp = constants
    form, kinds = FlowForm(eps, outer_eps, rescale), list(_KINDS)
    return FlowOptions(form, clamp, FEATURE_MAPS[phi - 1], kinds[competing], kinds[allocating])


@functools.lru_cache
def kernel_options(constants: tuple, dtype: torch.dtype) -> tuple:
    """The options as kernels get them, which are compiled for the dtype of the numbers."""
    like = torch.empty(0, dtype=dtype)
    return (*constants[:3], *(number(x, like) for x in constants[3:6]), *constants[6:])


def addresses(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Addresses of contiguous tensors, 0 for None."""
    return tuple([0 if x is None else x.data_ptr() for x in tensors])


def real_tokens(padding: Tensor | None) -> list[Tensor | None]:
    """The positions of all tokens (B, n), real ones first, and the numbers of real ones (B,); None without padding."""
    return [None, None] if padding is None else [real_first(padding), (~padding).sum(1)]
