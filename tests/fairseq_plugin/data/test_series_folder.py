"""Series on disk: statistics of the training series, missing values, and errors raised before anything is written."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.files.json_files import read
from fairseq_plugin.data.series_folder import Description, fill_missing, read_description, read_split, write_folder
from fairseq_plugin.data.stored_arrays import described_by
from tests.fairseq_plugin.helpers.series import CHANNELS, LIMIT, waves


def splits(**changes):
    """A train and a test split; ``changes`` replace either."""
    return {"train": waves(9, 1), "test": waves(6, 2), **changes}


def changed(split: str, index: int, series=None, label=None):
    """The splits, with one series or label replaced."""
    changed_splits = splits()
    if series is not None:
        changed_splits[split][0][index] = series
    if label is not None:
        changed_splits[split][1][index] = label
    return changed_splits


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    """Series keep full precision, labels are unchanged; statistics are those of the training series only."""
    description, original = write_folder(tmp_path, splits()), splits()
    for name, (series, labels) in original.items():
        restored = read_split(tmp_path, name)
        assert restored.labels == labels
        assert all(np.array_equal(actual, expected) for actual, expected in zip(restored.series, series))
    steps = np.concatenate(original["train"][0])
    assert read_description(tmp_path) == description
    assert np.allclose(description.mean, steps.mean(0)) and np.allclose(description.std, steps.std(0, ddof=1))
    assert (description.channels, description.longest, description.labels) == (
        CHANNELS,
        LIMIT,
        ["Fast", "none", "slow"],
    )
    standardised = np.concatenate([description.standardise(x) for x in original["train"][0]])
    assert np.allclose(standardised.mean(0), 0.0, atol=1e-5) and np.allclose(standardised.std(0, ddof=1), 1.0)


def test_labels_may_be_integers_and_a_channel_constant(tmp_path: Path) -> None:
    """NumPy integers are read back as integers; a constant channel is standardised to 0 without dividing by 0."""
    series = [np.column_stack([np.full(5, 7.0), np.arange(5.0) * i]) for i in (1, 2)]
    described = write_folder(tmp_path, {"train": (series, np.array([4, -1]))})
    assert described.labels == [-1, 4] and read_split(tmp_path, "train").labels == [4, -1]
    assert (described.standardise(series[0])[:, 0] == 0.0).all()


def test_missing_values_are_interpolated() -> None:
    """Linear interpolation per channel; at the ends, the nearest value is used."""
    nan = np.nan
    filled = fill_missing(np.array([[nan, 1.0], [2.0, nan], [nan, nan], [nan, 7.0], [8.0, nan]]))
    assert np.allclose(filled, [[2.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 7.0]])
    with pytest.raises(ValueError, match="channel 1 has no value"):
        fill_missing(np.array([[1.0, nan], [2.0, nan]]))


REFUSED = [
    (lambda: changed("train", 2, np.array([[1.0, np.nan, 2.0]])), r"series 2 of train is nan at \(0, 1\)"),
    (lambda: changed("test", 1, np.array([[1.0, 2.0, -np.inf]])), r"series 1 of test is -inf at \(0, 2\)"),
    (lambda: changed("test", 3, np.zeros((4, 2))), r"series 3 of test has shape \(4, 2\); allowed: .*3"),
    (lambda: changed("train", 3, np.zeros((4, 2))), r"series 3 of train has shape \(4, 2\); allowed: .*3"),
    (lambda: changed("train", 0, np.zeros((0, 3))), r"series 0 of train has shape \(0, 3\); allowed: .*at least 1"),
    (
        lambda: changed("train", 0, np.zeros(5)),
        r"series 0 of train has shape \(5,\); allowed: \(at least 1, at least 1\)",
    ),
    (lambda: changed("train", 4, [["a", "b", "c"]]), "series 4 of train cannot be read as numbers"),
    (
        lambda: changed("test", 5, label="loud"),
        "series 5 of test has the label 'loud'; allowed: 'Fast', 'none', 'slow'",
    ),
    (lambda: changed("train", 5, label=5), "label of series 5 of train is 5; allowed"),
    (lambda: splits(test=([], [])), "test has 0 series and 0 labels"),
    (lambda: splits(test=(waves(3, 1)[0], ["slow"])), "test has 3 series and 1 labels"),
    (lambda: {"test": waves(3, 1)}, "splits are test; allowed: 'train'"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_bad_input_is_refused_and_nothing_written(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_folder(tmp_path / "new", make())
    assert not (tmp_path / "new").exists()


def test_damaged_folders(tmp_path: Path) -> None:
    """A missing or malformed description, a missing split and a truncated file raise an error."""
    with pytest.raises(ValueError, match="lacks series.json; allowed"):
        read_description(tmp_path)
    write_folder(tmp_path, splits())
    with pytest.raises(ValueError, match="no split valid; allowed: test, train"):
        read_split(tmp_path, "valid")
    whole = (tmp_path / "test.npz").read_bytes()
    (tmp_path / "test.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="test.npz cannot be read"):
        read_split(tmp_path, "test")
    for text in ("{", '{"labels": []}', '{"labels": ["a"], "mean": [1.0], "std": [], "longest": 3}'):
        (tmp_path / "series.json").write_text(text)
        with pytest.raises(ValueError, match="series.json .*labels, mean, std, longest"):
            read_description(tmp_path)


def test_a_label_is_found_or_named() -> None:
    described = Description(["a", "b"], [0.0], [1.0], 3)
    assert described.class_of("b", "here") == 1
    with pytest.raises(ValueError, match="series 1 has the label 'c'; allowed: 'a', 'b'"):
        described.class_of("c", "series 1")


def test_what_is_infinite_in_float32() -> None:
    """Overflow is checked after standardisation: a large value is allowed if the deviation is as large."""
    described = Description(["a"], [0.0, 0.0], [1.0, 1e39], 3)
    assert np.isfinite(described.standardise(np.array([[1.0, 1e39]]))).all()
    with pytest.raises(ValueError, match=r"series 4.* is 1e\+39 at \(1, 0\).*float32"):
        described.standardise(np.array([[1.0, 1.0], [1e39, 1.0]]), "series 4")


DAMAGED = [
    ({"lengths": lambda x: x.astype(float)}, "lengths .*float64; allowed: integers"),
    ({"lengths": lambda x: np.append(x[:-2], [-1, x[-2] + x[-1] + 1])}, "lengths has -1; allowed: 1 to"),
    ({"lengths": lambda x: x[:, None]}, r"lengths has shape \(6, 1\)"),
    ({"lengths": lambda x: x[:0], "classes": lambda x: x[:0]}, r"lengths has shape \(0,\)"),
    ({"classes": lambda x: x[:-1]}, "classes has 5 values and lengths 6"),
    ({"lengths": lambda x: np.append(x[:-1], x[-1] - 1)}, "steps has shape"),
    ({"classes": lambda x: x - 3}, "classes has -[123]; allowed: 0 to 2"),
    ({"classes": lambda x: x.astype(float)}, "classes .*float64"),
    ({"lengths": lambda x: x[:-1]}, "steps has shape"),
    ({"steps": lambda x: x.astype(complex)}, "steps .*complex128"),
    ({"steps": lambda x: np.where(x == x[3, 1], np.nan, x)}, r"steps is nan at \(3, 1\)"),
    ({"steps": lambda x: x[0, 0]}, r"steps has shape \(\)"),
    ({"steps": lambda x: x.astype(object)}, "cannot be read"),
]


@pytest.mark.parametrize("change, message", DAMAGED)
def test_a_damaged_split_is_refused(tmp_path: Path, change, message: str) -> None:
    """The error names file and field; an array of objects is not unpickled."""
    write_folder(tmp_path, splits())
    with np.load(tmp_path / "test.npz") as stored:
        arrays = {name: change.get(name, lambda x: x)(stored[name]) for name in stored}
    np.savez(tmp_path / "test.npz", **arrays)
    with pytest.raises(ValueError, match=f"test.npz:? ?.*{message}"):
        read_split(tmp_path, "test")


@pytest.mark.parametrize(
    "field, value",
    [
        ("labels", ["a", 1]),
        ("labels", ["a", "a"]),
        ("labels", "ab"),
        ("mean", [float("nan")] * CHANNELS),
        ("mean", "abc"),
        ("std", [-1.0] * CHANNELS),
        ("std", [0.0] * CHANNELS),
        ("std", [1.0]),
        ("longest", 2.5),
        ("longest", -1),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, field: str, value) -> None:
    write_folder(tmp_path, splits())
    description = read(tmp_path / "series.json", "it")
    (tmp_path / "series.json").write_text(json.dumps({**description, field: value}))
    with pytest.raises(ValueError, match=rf"series.json cannot be read: .*{field}.*allowed"):
        read_description(tmp_path)


def test_a_number_that_is_too_large_for_a_float() -> None:
    """A checkpoint can hold integers of any size, unlike a file of JSON."""
    content = {"labels": ["a"], "mean": [10**400], "std": [1.0], "longest": 3}
    with pytest.raises(ValueError, match="c.pt cannot be read: .*mean, std, longest"):
        described_by(Description, content, "c.pt")
