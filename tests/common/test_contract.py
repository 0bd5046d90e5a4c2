"""The contract runs over a mechanism that is not in common/attention, as somebody who writes one runs it."""

import re
import subprocess
import sys

from tests.processes import CHECKOUT


def contract(*arguments: str) -> tuple[int, str]:
    """The exit status and the output of ``pytest tests/common/contract``."""
    command = [sys.executable, "-m", "pytest", "tests/common/contract", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_promise_is_kept_by_a_mechanism_that_keeps_them():
    """By no other one: the whole contract of one mechanism takes seconds. Its case, beside its module, is read."""
    status, said = contract("--mechanism", "tests.examples.mean", "-vv")
    assert status == 0, said[-3000:]
    tested = set(re.findall(r"::(\w+)\[", said))
    assert {"test_lengths", "test_extend_is_forward", "test_it_exports", "test_options", "test_states"} <= tested
    assert "[mean-causal-higher]" in said and "[linear" not in said


def test_promises_that_a_mechanism_breaks_are_named():
    arguments = ("--mechanism", "tests.common.strangers.broken", "-k", "independence and not every_option")
    status, said = contract(*arguments)
    assert status == 1, said[-3000:]
    for promise in ("what_stands_in_padding_changes_no_bit", "a_prefix_does_not_depend_on_what_follows"):
        assert re.search(rf"FAILED .*::test_{promise}\[.*broken_stranger-causal\]", said), promise


def test_a_module_without_a_mechanism_is_refused():
    status, said = contract("--mechanism", "tests.common.inputs")
    assert status == 4 and "tests.common.inputs; allowed" in said
