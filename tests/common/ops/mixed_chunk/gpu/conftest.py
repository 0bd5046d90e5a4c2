"""Fixtures of the tests of kernels."""

from tests.common.ops.shared.gpu.device import (
    collect_ignore_glob,
    kernels_alone,
    language_prepared_once,
    small_tiles,
    split,
    with_pytorch,
)

__all__ = [
    "collect_ignore_glob",
    "kernels_alone",
    "language_prepared_once",
    "small_tiles",
    "split",
    "with_pytorch",
]
