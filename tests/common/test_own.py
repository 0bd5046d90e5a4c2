"""Mechanisms of a user's own: the contract and ``common.check`` run on them, and what is wrong with one is one line."""

import re
import subprocess
import sys

import pytest
import torch

from common.attention import ATTENTIONS, import_own, register_attention
from common.check import PROMISES, check, main
from tests.common.contract.registry import choose
from tests.processes import CHECKOUT, Command, Forked, run_in_turn

#: Promises whose errors gated attention units word differently; ``modules/test_gated_attention_unit.py`` tests them.
#: They are compiled in one direction alone, since tracing takes seconds.
NOT_OF_UNITS = "what_stands_in_padding or long_sums or test_tensors or test_masks or longest_length"
NOT_OF_UNITS += " or (compile and full) or (one_graph and full)"
#: Tests by module: those that run, as an expression of pytest. What ``nearby`` is made of, ``nearby_learned`` has, too.
CHOSEN = {
    "tests.examples.mean": "mean",
    "tests.examples.pooled": "pooled",
    "tests/examples/nearby.py": "(nearby- and (independence or copies))",
    "tests.examples.nearby_learned": "nearby_learned",
    "tests.common.modules.gated_units": f"(unit_ and not ({NOT_OF_UNITS}))",
    "tests.common.flawed": "(independence and (causality or rows_of_a_batch))",
}


# The contract


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """Tests of the contract by name, and how each ended: in one process, since only its start takes seconds."""
    command = [sys.executable, "-m", "pytest", "tests/common/contract", "-p", "no:cacheprovider", "-vv"]
    command += ["-k", " or ".join(CHOSEN.values()), *(word for module in CHOSEN for word in ("--mechanism", module))]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    found = dict(re.findall(r"^\S+::(\w+\[.*\]) +([A-Z]+) ", done.stdout, re.MULTILINE))
    assert done.returncode == 1 and found, done.stdout[-3000:] + done.stderr
    return found


def of(results: dict[str, str], name: str) -> dict[str, str]:
    """The tests of one mechanism, and how each ended."""
    return {test: ended for test, ended in results.items() if re.search(rf"[\[-]{name}[\]-]", test)}


@pytest.mark.parametrize("name", ["mean", "pooled", "unit_flash", "unit_quad", "nearby", "nearby_learned"])
def test_every_promise_is_kept_by_examples_and_by_gated_attention_units(results, name):
    """Only external mechanisms run. The case next to a module is read; without a literal formula, tests are skipped."""
    ended, has_formula = of(results, name), not name.startswith("nearby")
    assert {test: result for test, result in ended.items() if result not in ("PASSED", "SKIPPED")} == {}
    kept = {test.partition("[")[0] for test, result in ended.items() if result == "PASSED"}
    assert {"test_each_row_is_what_it_is_alone_without_padding", "test_it_is_copied_pickled_and_loaded"} <= kept
    assert ({"test_lengths", "test_options"} <= kept) == has_formula
    assert name == "nearby" or {"test_dtypes", "test_it_exports"} <= kept
    assert name in ("pooled", "nearby") or "test_extend_is_forward" in kept
    cases = {"mean": "mean-causal-higher", "pooled": "pooled-full"}
    assert any(cases.get(name, f"{name}-causal") in test for test in ended) and "[linear" not in "".join(results)


def test_promises_that_a_mechanism_breaks_are_named(results):
    for flaw, promise in (
        ("causality", "test_a_prefix_does_not_depend_on_what_follows"),
        ("rows_of_a_batch", "test_neighbours_in_the_batch_change_nothing"),
    ):
        assert of(results, flaw)[f"{promise}[{flaw}-causal]"] == "FAILED"


# python -m common.check

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
    forked = Forked(Command("common.check", ["tests.common.flawed"]), cwd=str(CHECKOUT))
    (printed,), status = forked.printed(), forked.wait()
    assert status == 1
    tables = dict(re.findall(r"(?m)^(\w+), causal\n((?:  .*\n)*)", printed))
    assert set(tables) == {*(name.replace(" ", "_") for name in PROMISES), "flawless"}, printed
    for flaw, table in tables.items():
        failed = re.findall(r"(?m)^  (\w[\w ]*?) +FAILS +(.*)$", table)
        first = [name.replace(" ", "_") for name, _ in failed][:1]
        assert first == ([] if flaw == "flawless" else [flaw]), table
        assert all(re.match(r"n = [12]\b|from 1024", reason) for _, reason in failed), table


# Files and declarations that are wrong


@pytest.mark.parametrize("module", ["tests.common.inputs", "no_such_module", "missing.py"])
def test_a_mechanism_that_is_not_there_is_one_line(module):
    with pytest.raises(SystemExit, match=rf"mechanism is {module}.*allowed"):
        main([module])
    with pytest.raises(ValueError, match=f"--mechanism is {module}.*; allowed"):
        choose([module])


#: Files by name, and what the message about each says.
WRONG_FILES = {
    "broken.py": ("x = undefined", "NameError"),
    "syntax.py": ("def", "SyntaxError"),
    "json.py": ("", "json is the name of .*allowed: another file name"),
    "taken.py": ("from common.attention import register_attention as r\n@r('flow')\ndef f(v): return v", "flow"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_that_cannot_be_imported_is_named(name, tmp_path):
    content, told = WRONG_FILES[name]
    (tmp_path / name).write_text(content)
    known = set(ATTENTIONS)
    for _ in range(2):  # a file that failed is no module afterwards
        with pytest.raises(ValueError, match=f"^LINEARTIME_MECHANISMS is {tmp_path / name}.*{told}") as caught:
            import_own(str(tmp_path / name))
        assert "\n" not in str(caught.value) and set(ATTENTIONS) == known


WRONG_FUNCTIONS = {
    "only queries": (lambda q: q, {}, "q.*allowed.*v"),
    "wrong order": (lambda v, k: v, {}, "v, k.*allowed"),
    "no default": (lambda v, size: v, {}, "'size'.*allowed"),
    "a host's word": (lambda v, num_heads=3: v, {}, "'num_heads'.*allowed"),
    "a list": (lambda v, sizes=(1,): v, {}, "sizes=.*allowed"),
    "free text": (lambda v, mode="mean": v, {}, "mode='mean'.*allowed.*Literal"),
    "a name": (lambda v: v, {"name": "My idea"}, "name is 'My idea'.*allowed"),
    "cross": (lambda v, causal: v, {"supports": {"cross"}}, "supports.*cross.*allowed"),
    "a parameter": (lambda v: v, {"parameters": lambda h, d: {"rate": torch.ones(h)}}, "'rate'.*allowed"),
}


@pytest.mark.parametrize("label", WRONG_FUNCTIONS)
def test_a_declaration_that_means_nothing_is_refused(label):
    function, given, told = WRONG_FUNCTIONS[label]
    options = {"name": "refused", **given}
    with pytest.raises(ValueError, match=told) as caught:
        register_attention(options.pop("name"), **options)(function)
    assert "\n" not in str(caught.value) and "refused" not in ATTENTIONS


#: Functions that are registered as causal attention, and what the message about each says.
CLAIMS = """
from typing import Literal

import torch

from common.attention import ATTENTIONS, build_attention, register_attention

claims = {
    "another_shape": (lambda v, *, causal: v.sum(2)),
    "no_tensor": (lambda v, *, causal: None),
    "an_error": (lambda q, k, v, *, causal: q @ k),
    "looks_ahead": (lambda v, *, causal: v.mean(2, keepdim=True).expand_as(v)),
    "depends_on_length": (lambda v: v / v.shape[2]),
}
for name, function in claims.items():
    try:
        register_attention(name, supports={"causal"})(function)
    except ValueError as error:
        print(error)
    assert name not in ATTENTIONS


@register_attention("chosen")
def chosen(v, *, causal, power: Literal["one", "two"] = "one", scale=-1.5, shift=0, sign=False):
    return v * scale + shift if power == "one" else v**2


module = build_attention("chosen", True, power="two", scale=0, shift=-3, sign=True)
assert module.options.as_dict() == {"power": "two", "scale": 0.0, "shift": -3, "sign": True}
v = torch.randn(1, 2, 5, 4)
assert torch.equal(module(None, None, v), v**2)
for options in ({"power": "three"}, {"scale": "x"}, {"shift": 0.5}, {"sign": 1}):
    try:
        build_attention("chosen", True, **options)
    except ValueError as error:
        print(error)
"""
TOLD = (
    *("another_shape.*shape", "no_tensor.*NoneType.*allowed"),
    "an_error.*7 or 4 tokens in line .*claims.py: RuntimeError",
    *("causal is True.*looks_ahead.*allowed", "causal is True.*depends_on_length.*allowed"),
    *("power.*'three'.*allowed", "scale.*'x'.*allowed", "shift.*0.5.*allowed", "sign.*1.*allowed"),
)


def test_a_function_is_tried_when_it_is_registered_and_options_are_when_it_is_built(tmp_path):
    """In a process of its own, since hosts would make models of what is registered here."""
    (tmp_path / "claims.py").write_text(CLAIMS)
    (printed,) = run_in_turn(Command(str(tmp_path / "claims.py")))
    for line, told in zip(printed.splitlines(), TOLD, strict=True):
        assert re.search(told, line), f"{line} does not say {told}"
