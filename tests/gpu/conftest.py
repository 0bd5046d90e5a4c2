"""Tests that need a GPU, beside those of the Triton kernels; without one, nothing here is collected."""

from collections.abc import Iterator

import pytest
import torch

from common.ops.shared.gpu import dispatch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Convolutions of float32 in float32: by default cuDNN rounds their operands to TF32, which has 11 bits."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(autouse=True)
def kernels_do_not_fail() -> Iterator[None]:
    """Kernels that fail are replaced by plain PyTorch with a warning; here that is an error, of the first test."""
    before = set(dispatch.failed)
    yield
    assert dispatch.failed == before
