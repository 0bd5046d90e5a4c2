"""Settings every test runs under: one thread, fixed seeds, repeatable hypothesis examples without a deadline."""

import os

import hypothesis
import pytest
import torch

# Tensors are small, and threads that wait for each other on a busy machine cost many times what they save. Processes
# that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A shared machine may stall any single example; a failure must come back in the next run.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)
