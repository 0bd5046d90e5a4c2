"""Keeping memory that temporary tensors leave behind, for what goes through a CPU piece by piece."""

from functools import lru_cache

import torch

# The largest block, but for a page, after which the GNU C library still adapts what it keeps.
_BYTES = 2**25 - 2**12


@lru_cache(maxsize=None)
def keep_freed_memory() -> None:
    """Once in a process, free a large block that was never touched.

    Of what lies free at the end of its heap the GNU C library keeps twice the largest block freed so far, at first 256
    KiB, and gives the rest back to the system, whose zeroed pages then cost more at their next use than what is done
    with them: half of a forward and backward pass of causal Flow-Attention at 2,048 tokens. Most programs free such a
    block sooner or later; other C libraries do not mind.
    """
    torch.empty(_BYTES, dtype=torch.uint8, device="cpu")
