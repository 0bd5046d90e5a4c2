"""Biases on scores that depend on the distance of two tokens, without forming their matrix unless it is needed.

A bias for n tokens is a vector (2n-1,), whose entry r + n - 1 belongs to a query r tokens after its key (a Toeplitz
matrix), or any matrix (n, n). Either may have a leading dimension of H heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def check_bias(bias: Tensor | None, tokens: int, heads: int, like: Tensor, length_name: str) -> None:
    """Raise ValueError unless ``bias`` is None or fits; ``length_name`` is the user's name for ``tokens``."""
    if bias is None:
        return
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        dtype = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise ValueError(f"bias has dtype {dtype}; allowed: a floating point tensor")
    shapes = [(2 * tokens - 1,), (tokens, tokens), (heads, 2 * tokens - 1), (heads, tokens, tokens)]
    if tuple(bias.shape) not in shapes:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; allowed for {length_name} = {tokens} and {heads} heads: "
            + ", ".join(str(shape) for shape in shapes)
        )
    if bias.device != like.device:
        raise ValueError(f"bias is on {bias.device}; allowed: the device of the input, {like.device}")


def is_toeplitz(bias: Tensor, tokens: int) -> bool:
    """Whether ``bias`` is a vector over distances, not a matrix."""
    return bias.dim() == 1 or bias.shape[-1] != tokens or (tokens == 1 and bias.dim() == 2)


def bias_rows(bias: Tensor, tokens: int, start: int, stop: int, keys: int) -> Tensor:
    """Rows start..stop-1 and the first ``keys`` columns of the bias of ``tokens`` tokens: (..., stop - start, keys)."""
    if not is_toeplitz(bias, tokens):
        return bias[..., start:stop, :keys]
    if torch.compiler.is_compiling():  # unfold would fix the length, so that each length needs its own graph
        key, query = torch.arange(keys, device=bias.device), torch.arange(start, stop, device=bias.device)
        return bias[..., query[:, None] - key + tokens - 1]
    # Row i is a window of the reversed vector that begins at n-1-i.
    windows = bias.flip(-1)[..., tokens - stop : tokens - 1 - start + keys].unfold(-1, keys, 1)
    return windows.flip(-2)


def bias_matrix(bias: Tensor, tokens: int) -> Tensor:
    """The bias of ``tokens`` tokens as matrices, (1 or H, tokens, tokens)."""
    matrix = bias_rows(bias, tokens, 0, tokens, tokens)
    return matrix if matrix.dim() == 3 else matrix.unsqueeze(0)


def bias_at(bias: Tensor, tokens: int, positions: Tensor) -> Tensor:
    """The rows of queries at ``positions`` (B, n) and all columns: (B, 1, n, tokens), or (B, H, n, tokens)."""
    positions = positions.clamp(max=tokens - 1)
    if is_toeplitz(bias, tokens):
        distance = positions[..., None] - torch.arange(tokens, device=bias.device)  # (B, n, tokens)
        rows = bias[..., distance + tokens - 1]  # (B, n, tokens) or (H, B, n, tokens)
    else:
        rows = bias[..., positions, :]
    return rows.transpose(0, 1) if rows.dim() == 4 else rows.unsqueeze(1)


def bias_so_far(bias: Tensor, tokens: int, position: int) -> Tensor:
    """The row of the query at ``position``, up to its own column: (1, position + 1), or (H, 1, position + 1)."""
    if is_toeplitz(bias, tokens):
        return bias[..., None, tokens - 1 : tokens + position].flip(-1)
    return bias[..., position : position + 1, : position + 1]


def resize_toeplitz(bias: Tensor, tokens: int) -> Tensor:
    """A vector over distances (..., 2N-1) for another number of tokens: its middle, or zeros added on both sides."""
    missing = tokens - (bias.shape[-1] + 1) // 2
    return F.pad(bias, (missing, missing))


def cut_bias(bias: Tensor, tokens: int, fewer: int) -> Tensor:
    """The bias of ``tokens`` tokens, a vector or a matrix, cut to the first ``fewer`` tokens."""
    if is_toeplitz(bias, tokens):
        return bias[..., tokens - fewer : tokens + fewer - 1]
    return bias[..., :fewer, :fewer]
