"""The contract runs over an external mechanism in the way that its author runs it."""

import re
import subprocess
import sys

import pytest

from tests.common.contract.registry import choose
from tests.processes import CHECKOUT


def contract(*arguments: str) -> tuple[int, str]:
    """The exit status and the output of ``pytest tests/common/contract``."""
    command = [sys.executable, "-m", "pytest", "tests/common/contract", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_every_promise_is_kept_by_the_examples_of_the_guide():
    """Only these mechanisms run, since a contract takes seconds. The case next to a module is read."""
    modules = ("--mechanism", "tests.examples.mean", "--mechanism", "tests.examples.pooled")
    status, output = contract(*modules, "-vv")
    assert status == 0, output[-3000:]
    tested = set(re.findall(r"::(\w+)\[", output))
    assert {"test_lengths", "test_extend_is_forward", "test_it_exports", "test_options", "test_states"} <= tested
    assert "[mean-causal-higher]" in output and "[pooled-full]" in output and "[linear" not in output


def test_promises_that_a_mechanism_breaks_are_named():
    arguments = ("--mechanism", "tests.common.strangers.broken", "-k", "independence and not every_option")
    status, output = contract(*arguments)
    assert status == 1, output[-3000:]
    for promise in ("what_stands_in_padding_changes_no_bit", "a_prefix_does_not_depend_on_what_follows"):
        assert re.search(rf"FAILED .*::test_{promise}\[.*broken_stranger-causal\]", output), promise


def test_a_module_without_a_mechanism_is_refused():
    with pytest.raises(ValueError, match="--mechanism is tests.common.inputs; allowed"):
        choose(["tests.common.inputs"])
