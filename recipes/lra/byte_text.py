"""Texts as sequences of bytes: byte b is symbol b and token ``FIRST_TOKEN`` + b."""

import numpy as np

from fairseq_plugin.data.pixels import FIRST_TOKEN


def to_tokens(text: bytes, longest: int, place: str) -> np.ndarray:
    """The first ``longest`` bytes of ``text`` as tokens (T,); error messages name its ``place``.

    Raises:
        ValueError: ``text`` is empty.
    """
    if not text.strip():
        raise ValueError(f"{place} is an empty document; allowed: at least one byte that is no space")
    return np.frombuffer(text[:longest], np.uint8).astype(np.int32) + FIRST_TOKEN
