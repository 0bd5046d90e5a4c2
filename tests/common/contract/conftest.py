"""Uninitialised memory holds NaN in every test of this folder; also defines the option ``--mechanism``."""

from collections.abc import Iterator

import pytest

from common.attention import NoReference
from tests.common.contract.registry import choose
from tests.common.inputs import new_memory_is_nan


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ``pytest tests/common/contract``."""
    help = "a module or a file whose mechanisms alone are tested, such as one outside of this project; more than once"
    parser.addoption("--mechanism", action="append", metavar="MODULE", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mechanisms before the tests are collected, since the tests are parametrised over them."""
    if modules := config.getoption("--mechanism", None):
        try:
            choose(modules)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """With deterministic algorithms, torch fills uninitialised memory (``torch.empty`` and similar) with NaN."""
    with new_memory_is_nan():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that compares with a literal formula is skipped where a mechanism has none."""
    try:
        return (yield)
    except NoReference as error:
        pytest.skip(str(error))
