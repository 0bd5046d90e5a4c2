"""Settings every test runs under: one thread, fixed seeds, repeatable hypothesis examples; the option ``--quick``."""

import gc
import logging
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.quick import QUICK, ROOT, is_on_the_way, is_quick, place_of

# Tensors are small, and threads that wait for each other on a busy machine cost many times what they save. Processes
# that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# pytest listens to every logger that does not propagate. To a listener torch tells each step of a compilation, with
# its graphs in words, which takes as long as the step.
_TRACE = logging.getLogger("torch.__trace")
_TRACE.handlers.clear()
_TRACE.propagate = True

HAS_GPU = torch.cuda.is_available()

# A shared machine may stall any single example; a failure must come back in the next run.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of every run."""
    parser.addoption("--quick", action="store_true", help="what one runs before each commit, in less than two minutes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``--quick``, files in which there is nothing for it."""
    return True if config.getoption("--quick") and not is_on_the_way(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--quick``, leave out what is not for it; of each place something must be left."""
    if not config.getoption("--quick"):
        return
    kept = [item for item in items if is_quick(item.path, item.name)]
    empty = {place_of(item.path) for item in items} - {place_of(item.path) for item in kept}
    if empty := empty | {place for place in QUICK if not (ROOT / place).exists()}:
        raise pytest.UsageError(f"tests/quick.py names no test of {', '.join(sorted(empty))}")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Let the garbage collector look more rarely, and not at what is there before the first test and stays to the end.

    It took a tenth of the time of tests that compile.
    """
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, whatever ran before it.

    torch.manual_seed writes down the whole stack for GPUs that are not there, which takes longer than a small test.
    """
    torch.default_generator.manual_seed(0)
    if HAS_GPU:
        torch.cuda.manual_seed_all(0)
