"""If one process of a group that shares a sequence fails, the others end too, with a message, within seconds."""

import re
import time
from collections.abc import Iterator

import pytest

from tests.common.parallel.failures import FAILING, one_fails
from tests.common.parallel.processes import Processes

#: A sleeping process is only known not to answer, which takes the timeout.
WAYS = ("sleeps", "is killed", "is killed after its step", "raises")


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Iterator[tuple[float, dict[str, Processes]]]:
    """The time, and a group for each way to fail. All begin together, since they wait for most of the time."""
    begin = time.monotonic()
    groups = {how: Processes(3, tmp_path_factory.mktemp("group"), one_fails, how) for how in WAYS}
    yield begin, groups
    for processes in groups.values():
        processes.wait(0)  # ends those of tests that were not selected


@pytest.mark.parametrize("how", WAYS)
def test_where_one_fails_the_others_end(begun, how):
    begin, groups = begun
    processes = groups[how]
    codes = processes.wait(60)
    assert time.monotonic() - begin < 60
    assert 0 not in codes and None not in codes
    for rank, text in enumerate(processes.printed()):
        if rank != FAILING:
            # The rank is known if one process was waited for, but not if all were; processes are seen to end in a row.
            lost = r"process \d, rank \d of 3 that (hold one sequence|train together), has lost (process \d|one of)"
            assert re.search(lost, text), text
    if how == "is killed after its step":
        assert f"has lost process {FAILING}, which ended" in processes.printed()[0]
    assert how != "raises" or "a mistake of its own" in processes.printed()[FAILING]
