"""Memory that nothing has written yet holds NaN in every test of this folder."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch fills what ``torch.empty`` and its kind return with NaN while its operations are deterministic."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
