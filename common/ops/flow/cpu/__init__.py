"""Causal Flow-Attention on a CPU as kernels: ``causal`` is called from PyTorch; the others are compiled by Numba."""

#: Numbers of each token and head that the backward pass needs: I, O, Ô, competition and allocation.
KEPT = 5


def whole_fours(tokens: int) -> int:
    """The number of tokens, rounded up to a multiple of four."""
    return (tokens + 3) // 4 * 4
