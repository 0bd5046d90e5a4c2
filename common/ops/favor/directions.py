"""The random directions of FAVOR+: orthogonal in blocks, each distributed as a Gaussian vector."""

import torch
from torch import Generator, Tensor

#: Length of a direction: that of a Gaussian vector, for an unbiased kernel, or √d, the paper's regularised variant.
LENGTHS = ("gaussian", "sqrt_d")


def draw_directions(count: int, channels: int, lengths: str, generator: Generator | None = None) -> Tensor:
    """(r, d) from torch's generator or ``generator``: blocks of at most d rows that are orthogonal; O(r d²)."""
    device = None if generator is None else generator.device  # not torch's default device, which may differ
    blocks = []
    for begin in range(0, count, channels):
        gaussian = torch.randn(channels, channels, generator=generator, device=device)
        rotation, triangle = torch.linalg.qr(gaussian)
        # These signs make all rotations equally likely.
        blocks.append((rotation * triangle.diagonal().sign()).T[: count - begin])
    if lengths == "sqrt_d":
        return torch.cat(blocks) * channels**0.5
    gaussian = torch.randn(count, channels, generator=generator, device=device)
    return torch.cat(blocks) * gaussian.norm(dim=1, keepdim=True)
