"""Buckets of tokens, their sorted order, and codes that determine which keys a token finds."""

import torch
from torch import Generator, Tensor

#: The number of codes for each bucket.
_NUMBERS = 1 << 40


def draw_rotations(rounds: int, channels: int, directions: int, generator: Generator | None = None) -> Tensor:
    """(R, d, D) Gaussian, from torch's generator or ``generator``: one random rotation for each round."""
    device = None if generator is None else generator.device  # not torch's default device, which may differ
    return torch.randn(rounds, channels, directions, generator=generator, device=device)


def buckets_of(q: Tensor, rotations: Tensor, padding_mask: Tensor | None) -> Tensor:
    """argmax [q R ; -q R] of q (B, H, n, d) in each round: (B, H, R, n), below 2D, and 2D at padding (B, n).

    O(n R D d).
    """
    rotated = q.detach().unsqueeze(2) @ rotations.to(q.dtype)  # (B, H, R, n, D)
    buckets = torch.cat([rotated, -rotated], dim=-1).argmax(-1)
    if padding_mask is None:
        return buckets
    return buckets.masked_fill(padding_mask[:, None, None, :], 2 * rotations.shape[2])


def sorted_order(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """The order of tokens when sorted by (bucket, position), and the place of each token in it.

    (B, H, R, n) -> both (B, H, R, n); padding comes last. O(n log n).
    """
    n = buckets.shape[-1]
    order = (buckets * n + torch.arange(n, device=buckets.device)).argsort(-1)
    return order, order.argsort(-1)


def codes_of(buckets: Tensor, number: Tensor) -> Tensor:
    """One code for bucket and ``number``, a chunk or a rank (B, H, R, n): close codes are in the same bucket.

    No code is close to 0, the code of an empty slot.
    """
    return (buckets + 1) * _NUMBERS + number


def parts_of_codes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The bucket and the number of each of ``codes``; -1 and 0 for an empty slot."""
    buckets = codes.div(_NUMBERS, rounding_mode="floor")
    return buckets - 1, codes - buckets * _NUMBERS


def finds(code: Tensor, key_code: Tensor, chunk_size: int, causal: bool) -> Tensor:
    """Whether tokens with ``code`` find keys with ``key_code``, of shapes that broadcast.

    Causal codes contain ranks in the bucket: a token finds the last C keys up to itself. Other codes contain chunks: a
    token finds its own chunk, the one before and the one after it.
    """
    if causal:
        return (key_code <= code) & (key_code > code - chunk_size)
    return (key_code <= code + 1) & (key_code >= code - 1)
