"""Errors in which a host replaces argument names by what its user typed."""

import pickle

import pytest

from common.ops.shared.checks import ArgumentError, check_positive_int


def test_names_are_bare_or_as_typed() -> None:
    """Only marked names are replaced, not equal words next to them."""
    error = ArgumentError("`heads` is 3; allowed: as many heads as divide `dim`, 8, without `gate=False`")
    assert str(error) == "heads is 3; allowed: as many heads as divide dim, 8, without gate=False"
    names = {"heads": "--heads", "gate=False": "--no-gate"}
    assert error.with_names(names) == "--heads is 3; allowed: as many heads as divide dim, 8, without --no-gate"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_checks_mark_their_argument() -> None:
    """A host can therefore translate every check of an option."""
    with pytest.raises(ValueError, match="^chunk_size is 0; allowed: an integer of at least 1") as caught:
        check_positive_int("chunk_size", 0)
    assert caught.value.with_names({"chunk_size": "--chunk-size"}).startswith("--chunk-size is 0")
