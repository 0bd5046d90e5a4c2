"""The contract runs over external mechanisms in the way that their authors run it."""

import re
import subprocess
import sys

import pytest

from tests.common.contract.registry import choose
from tests.processes import CHECKOUT

#: Promises whose errors gated attention units word differently; ``modules/test_gated_attention_unit.py`` tests them.
NOT_OF_UNITS = "what_stands_in_padding or long_sums or test_tensors or test_masks or longest_length"
#: Tests by module: those that run, as an expression of pytest.
CHOSEN = {
    "tests.examples.mean": "mean",
    "tests.examples.pooled": "pooled",
    "tests/examples/nearby.py": "nearby",  # also nearby_learned
    "tests.examples.nearby_learned": "nearby",
    "tests.common.modules.gated_units": f"(unit_ and not ({NOT_OF_UNITS}))",
    "tests.common.strangers.flawed": "(independence and (causality or rows_of_a_batch))",
}


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
    assert {"test_each_row_is_what_it_is_alone_without_padding", "test_dtypes", "test_it_exports"} <= kept
    assert {"test_it_is_copied_pickled_and_loaded"} <= kept
    assert ({"test_lengths", "test_options"} <= kept) == has_formula
    assert ("test_extend_is_forward" in kept) == (name != "pooled")
    cases = {"mean": "mean-causal-higher", "pooled": "pooled-full"}
    assert any(cases.get(name, f"{name}-causal") in test for test in ended) and "[linear" not in "".join(results)


def test_promises_that_a_mechanism_breaks_are_named(results):
    for flaw, promise in (
        ("causality", "test_a_prefix_does_not_depend_on_what_follows"),
        ("rows_of_a_batch", "test_neighbours_in_the_batch_change_nothing"),
    ):
        assert {test: ended for test, ended in of(results, flaw).items() if promise in test} == {
            f"{promise}[{flaw}-causal]": "FAILED"
        }


@pytest.mark.parametrize("module", ["tests.common.inputs", "tests.common.nowhere", "nowhere.at.all"])
def test_a_module_without_a_mechanism_is_refused(module):
    with pytest.raises(ValueError, match=f"--mechanism is {module}.*; allowed"):
        choose([module])
