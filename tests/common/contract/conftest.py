"""Memory that nothing has written yet holds NaN in every test of this folder; and the option ``--mechanism``."""

from collections.abc import Iterator

import pytest
import torch

from tests.common.contract.registry import choose


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of ``pytest tests/common/contract``."""
    help = "a module whose mechanisms alone are tested, such as one that is not in common/attention; more than once"
    parser.addoption("--mechanism", action="append", metavar="MODULE", help=help)


def pytest_configure(config: pytest.Config) -> None:
    """Before the tests are collected, which are made of what is registered."""
    if modules := config.getoption("--mechanism", None):
        try:
            choose(modules)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    """torch fills what ``torch.empty`` and its kind return with NaN while its operations are deterministic."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
