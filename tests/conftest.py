"""Settings of every test: one thread, fixed seeds, repeatable hypothesis examples; and selections of tests."""

import gc
import logging
import os
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.quick import HELP, ROOT, Selection

# Tensors are small, and on a busy machine threads that wait for each other cost more time than they save. Processes
# that tests start inherit it, whatever the shell has: a process with more threads that is forked can stand still.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

# pytest listens to every logger that does not propagate. If a listener exists, torch logs each compilation step with
# its graphs as text, which takes as long as the step.
_TRACE = logging.getLogger("torch.__trace")
_TRACE.handlers.clear()
_TRACE.propagate = True

HAS_GPU = torch.cuda.is_available()

# A shared machine may delay any example; a failure must be reproduced in the next run.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register the options of every run."""
    for option, text in HELP.items():
        parser.addoption(option, action="append_const", const=option, dest="selections", default=[], help=text)


def _selection(config: pytest.Config) -> Selection | None:
    """The requested selection of tests; None for the whole suite."""
    return next(map(Selection, config.getoption("selections")), None)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files and folders without a selected test."""
    selection = _selection(config)
    return True if selection is not None and not selection.is_on_the_way(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests outside the selection; each of its paths must keep at least one test."""
    selection = _selection(config)
    if selection is None:
        return
    selected = [item for item in items if selection.has(item.path, item.name)]
    empty = {selection.place_of(item.path) for item in items} - {selection.place_of(item.path) for item in selected}
    if empty := empty | {path for path in selection.places if not (ROOT / path).exists()}:
        raise pytest.UsageError(f"tests/quick.py, {selection.option}, names no test of {', '.join(sorted(empty))}")
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    items[:] = selected


def pytest_collectstart() -> None:
    """Turn garbage collection off: nothing is freed while tests are imported and collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Turn garbage collection on, rarer, and without the objects that exist before the first test and are never freed.

    Collection took a tenth of the time of tests that compile.
    """
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state, whatever ran before it.

    For GPUs that do not exist, torch.manual_seed records the whole stack, which takes longer than a small test.
    """
    torch.default_generator.manual_seed(0)
    if HAS_GPU:
        torch.cuda.manual_seed_all(0)
