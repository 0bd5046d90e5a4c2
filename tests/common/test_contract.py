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
    "tests.common.strangers.unfinished": "(unfinished and lengths)",
    "tests.common.modules.gated_units": f"(unit_ and not ({NOT_OF_UNITS}))",
    "tests.common.strangers.broken": "(broken_stranger and independence and not every_option)",
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


@pytest.mark.parametrize("name", ["mean", "pooled", "unit_flash", "unit_quad"])
def test_every_promise_is_kept_by_the_examples_of_the_guide_and_by_gated_attention_units(results, name):
    """Only external mechanisms run. The case next to a module is read."""
    ended = {test: result for test, result in results.items() if re.search(rf"[\[-]{name}[\]-]", test)}
    assert {test: result for test, result in ended.items() if result not in ("PASSED", "SKIPPED")} == {}
    kept = {test.partition("[")[0] for test, result in ended.items() if result == "PASSED"}
    assert {"test_lengths", "test_it_exports", "test_options", "test_it_is_copied_pickled_and_loaded"} <= kept
    assert ({"test_extend_is_forward", "test_states"} <= kept) == (name != "pooled")
    cases = {"mean": "mean-causal-higher", "pooled": "pooled-full"}
    assert any(cases.get(name, f"{name}-causal") in test for test in ended) and "[linear" not in "".join(results)


@pytest.mark.parametrize("name", ["nearby", "nearby_learned"])
def test_every_promise_is_kept_by_functions_without_a_reference(results, name):
    ended = {test: result for test, result in results.items() if re.search(rf"[\[-]{name}[\]-]", test)}
    assert set(ended.values()) == {"PASSED", "SKIPPED"}, ended
    kept = {test.partition("[")[0] for test, result in ended.items() if result == "PASSED"}
    promised = {"test_each_row_is_what_it_is_alone_without_padding", "test_extend_is_forward", "test_dtypes"}
    assert promised | {"test_it_is_copied_pickled_and_loaded", "test_it_exports"} <= kept


def test_what_is_compared_with_a_missing_reference_is_skipped(results):
    assert {result for test, result in results.items() if "test_lengths" in test and "unfinished" in test} == {
        "SKIPPED"
    }


def test_promises_that_a_mechanism_breaks_are_named(results):
    for promise in ("what_stands_in_padding_changes_no_bit", "a_prefix_does_not_depend_on_what_follows"):
        ended = {result for test, result in results.items() if promise in test and "broken_stranger-causal" in test}
        assert ended == {"FAILED"}, promise


@pytest.mark.parametrize("module", ["tests.common.inputs", "tests.common.nowhere", "nowhere.at.all"])
def test_a_module_without_a_mechanism_is_refused(module):
    with pytest.raises(ValueError, match=f"--mechanism is {module}.*; allowed"):
        choose([module])
