"""Tools of causal attention in chunks: cutting a sequence into chunks, and sums over earlier chunks."""

import torch
from torch import Tensor
from torch.nn import functional as F

#: Default number of tokens that the causal form of a linear mechanism computes at once.
CHUNK_SIZE = 64
#: Up to this many chunks, running sums over chunks are a matrix product: on a CPU, and with decay.
_FEW_CHUNKS = 32


def chunk_length(chunk_size: int, length: int) -> int:
    """Tokens of a chunk: C, or the whole input if that is not longer.

    Not min(): torch.compile would keep it as a symbol in every shape, which makes compilation slow.
    """
    return chunk_size if length > chunk_size else length


def chunk_count(length: int, chunk_size: int) -> int:
    """G = ceil(n / C). Written so that torch.compile sees one chunk as the number 1, whatever the length is.

    As ceil(n / C) it would be a symbol with the value 1, for which inductor (torch 2.14) computes wrong products: it
    treats a dimension of this size as one of size 64 to broadcast.
    """
    # Not -(-n // C), with which torch.compile needs much longer to verify shapes.
    return 1 if length <= chunk_size else (length + chunk_size - 1) // chunk_size


def split_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """(B, H, n, ...) -> (B, H, G, C, ...) with G = ceil(n / C), zeros appended to fill the last chunk."""
    length = x.shape[2]
    groups = chunk_count(length, chunk_size)
    missing = groups * chunk_size - length
    if missing:
        x = F.pad(x, [0, 0] * (x.dim() - 3) + [0, missing])
    if torch.jit.is_tracing():  # a reshape to all sizes would fix the batch size of the example
        return x.unflatten(2, (groups, chunk_size))
    # Not unflatten: torch.autograd.grad cannot batch its gradient.
    return x.reshape(*x.shape[:2], groups, chunk_size, *x.shape[3:])


def reverse_cumsum(x: Tensor) -> Tensor:
    """Sums over the last dimension from each position to the end, (..., C) -> (..., C)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def carry_sums(chunk_sums: Tensor, initial: Tensor | None, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Running sums over chunks: (B, H, G, ...) -> sums before each chunk (B, H, G, ...) and over all (B, H, ...).

    ``initial`` (B, H, ...) is the sum over everything before the first chunk, zero when None. With ``reverse``, sums
    run from the last chunk to the first: the result is the sum after each chunk, and ``initial`` is after the last.
    """
    groups = chunk_sums.shape[2]
    if chunk_sums.device.type == "cpu" and not torch.compiler.is_compiling() and groups <= _FEW_CHUNKS:
        return _carry_few_sums(chunk_sums, initial, reverse)
    if reverse:
        carried, total = carry_sums(chunk_sums.flip(2), initial)
        return carried.flip(2), total
    first = torch.zeros_like(chunk_sums[:, :, :1]) if initial is None else initial.to(chunk_sums.dtype).unsqueeze(2)
    inclusive = torch.cat([first, chunk_sums], dim=2).cumsum(2)  # (B, H, 1 + G, ...)
    return inclusive[:, :, :-1], inclusive[:, :, -1].clone()  # a state, which would keep the memory of all


def _carry_few_sums(chunk_sums: Tensor, initial: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    """``carry_sums`` as a product with a triangle of ones, in a third of the time on a CPU; O(G²)."""
    batch, heads, groups = chunk_sums.shape[:3]
    triangle = chunk_sums.new_ones(groups, groups)
    triangle = (triangle.triu(1) if reverse else triangle.tril(-1)).expand(batch * heads, -1, -1)
    sums = chunk_sums.flatten(3).flatten(0, 1)  # (B H, G, ...)
    carried = torch.bmm(triangle, sums)
    if initial is not None:
        carried.add_(initial.flatten(2).flatten(0, 1).unsqueeze(1))  # (B, H, ...) -> (B H, 1, ...)
    carried, last = carried.view_as(chunk_sums), 0 if reverse else -1
    return carried, carried[:, :, last] + chunk_sums[:, :, last]


def carry_decayed_sums(chunk_sums: Tensor, initial: Tensor | None, log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """``carry_sums`` with decay: R_g = exp(log_decay_g) R_(g-1) + sum_g, for ``log_decay`` of at most 0; O(G).

    (B, H, G, ...) -> R before each chunk (B, H, G, ...) and after all (B, H, ...), with ``initial`` before the first.
    ``log_decay`` is (B, H, G), or (B, H, G, f) for sums (B, H, G, f, e): each row of a sum decays as a head does.
    """
    if log_decay.dim() == 4:
        heads, features = chunk_sums.shape[1], chunk_sums.shape[3]
        rows, gates = (x.transpose(2, 3).flatten(1, 2) for x in (chunk_sums, log_decay.unsqueeze(-1)))
        first = None if initial is None else initial.flatten(1, 2)
        carried, total = carry_decayed_sums(rows, first, gates.squeeze(-1))  # (B, H f, G, e), (B, H f, e)
        return carried.unflatten(1, (heads, features)).transpose(2, 3), total.unflatten(1, (heads, features))
    first = torch.zeros_like(chunk_sums[:, :, :1]) if initial is None else initial.unsqueeze(2)
    sums = torch.cat([first, chunk_sums], dim=2)  # (B, H, 1 + G, ...)
    carried = _decayed_scan(sums.flatten(3), F.pad(log_decay, (1, 0))).reshape(sums.shape)
    return carried[:, :, :-1], carried[:, :, -1].clone()  # as in ``carry_sums``


def decay_between(log_decay: Tensor) -> Tensor:
    """exp(Σ log_decay_t over j < t <= i) for i >= j, otherwise 0: (..., C) -> (..., C, C); O(C²).

    Each sum is formed separately, since a difference of two running sums would lose small decays after a large one.
    """
    size = log_decay.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril(-1)
    return log_decay.unsqueeze(-1).masked_fill(~below, 0.0).cumsum(-2).exp().tril()


def _decayed_scan(sums: Tensor, log_decay: Tensor) -> Tensor:
    """R_g = exp(log_decay_g) R_(g-1) + sums_g: (B, H, G, c) -> (B, H, G, c), for ``log_decay`` (B, H, G).

    A few chunks are one product; more chunks are computed in parts of that many, whose ends are summed in the same way.
    """
    length = sums.shape[2]
    if length <= _FEW_CHUNKS:
        return decay_between(log_decay) @ sums
    sums, log_decay = split_chunks(sums, _FEW_CHUNKS), split_chunks(log_decay, _FEW_CHUNKS)  # (B, H, parts, few, ...)
    inside = decay_between(log_decay) @ sums
    ends = _decayed_scan(inside[:, :, :, -1], log_decay.sum(-1))  # (B, H, parts, c)
    before = F.pad(ends[:, :, :-1], (0, 0, 1, 0))
    carried = inside + log_decay.cumsum(-1).exp().unsqueeze(-1) * before.unsqueeze(3)
    return carried.flatten(2, 3)[:, :, :length]
