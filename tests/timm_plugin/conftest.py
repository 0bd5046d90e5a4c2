"""Settings for all tests of this folder."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small are fastest on one thread, and waiting threads cost far more on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
