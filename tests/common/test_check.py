"""``python -m common.check`` finds each flaw and nothing else; the contract tests these promises of all mechanisms."""

import re

import pytest

from common.check import PROMISES, check, main
from tests.processes import CHECKOUT, Command, Forked

#: A mechanism with kernels, one whose gradient is the paper's lower bound of the slope, which the command says truly,
#: one with a state of all tokens, and one of images alone, for which it makes no input.
FAILS = {"linear": [], "yoso": ["gradients"], "softmax": [], "soft": []}


@pytest.mark.parametrize("name", FAILS)
def test_nothing_else_is_wrong_with_mechanisms(name):
    verdicts = list(check(name, name in ("linear", "softmax")))
    assert [promise for promise, _, _ in verdicts] == list(PROMISES)
    assert [promise for promise, verdict, _ in verdicts if verdict == "FAILS"] == FAILS[name]
    assert name != "soft" or {verdict for _, verdict, _ in verdicts} == {"does not apply"}


def test_each_flaw_is_found_with_the_smallest_input_that_shows_it():
    forked = Forked(Command("common.check", ["tests.common.strangers.flawed"]), cwd=str(CHECKOUT))
    (printed,), status = forked.printed(), forked.wait()
    assert status == 1
    tables = dict(re.findall(r"(?m)^(\w+), causal\n((?:  .*\n)*)", printed))
    assert set(tables) == {*(name.replace(" ", "_") for name in PROMISES), "flawless"}, printed
    for flaw, table in tables.items():
        failed = re.findall(r"(?m)^  (\w[\w ]*?) +FAILS +(.*)$", table)
        first = [name.replace(" ", "_") for name, _ in failed][:1]
        assert first == ([] if flaw == "flawless" else [flaw]), table
        assert all(re.match(r"n = [12]\b|from 1024", reason) for _, reason in failed), table


@pytest.mark.parametrize("given", ["no_such_module", "tests.common.inputs", "missing.py"])
def test_a_mechanism_that_is_not_there_is_one_line(given):
    with pytest.raises(SystemExit, match=rf"mechanism is {given}.*allowed"):
        main([given])
