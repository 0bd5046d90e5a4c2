"""Settings every test runs under: one thread, fixed seeds, repeatable hypothesis examples; parts of the suite."""

import gc
import logging
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.quick import HELP, ROOT, Selection

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
    for option, text in HELP.items():
        parser.addoption(option, action="append_const", const=option, dest="selections", default=[], help=text)


def _selection(config: pytest.Config) -> Selection | None:
    """The part of the suite that is asked for; None for all of it."""
    return next(map(Selection, config.getoption("selections")), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files and folders without a test of the selection."""
    selection = _selection(config)
    return True if selection is not None and not selection.is_on_the_way(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not in the selection; of each of its places something must be left."""
    selection = _selection(config)
    if selection is None:
        return
    kept = [item for item in items if selection.has(item.path, item.name)]
    empty = {selection.place_of(item.path) for item in items} - {selection.place_of(item.path) for item in kept}
    if empty := empty | {place for place in selection.places if not (ROOT / place).exists()}:
        raise pytest.UsageError(f"tests/quick.py, {selection.option}, names no test of {', '.join(sorted(empty))}")
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
