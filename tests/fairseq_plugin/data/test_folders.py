"""Folders of series and of episodes: what was written comes back; what is no such data is refused before writing."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from common.files.json_files import read
from fairseq_plugin.data import episode_folder, series_folder
from fairseq_plugin.data.episode_folder import Episode
from fairseq_plugin.data.series_folder import Description, fill_missing
from fairseq_plugin.data.stored_arrays import described_by
from tests.fairseq_plugin.helpers.episodes import ACTION, LONGEST, STATE, episodes
from tests.fairseq_plugin.helpers.series import waves

MODULES = {"series": series_folder, "episodes": episode_folder}
WRITE = {"series": series_folder.write_folder, "episodes": partial(episode_folder.write_folder, name="toy")}


def series(split: str = "train", index: int = 0, values=None, label=None, **others):
    """Splits of series, one of which has other values or another label; ``others`` replace a split."""
    splits = {"train": waves(9, 1), "test": waves(6, 2), **others}
    if values is not None:
        splits[split][0][index] = np.array(values)
    if label is not None:
        splits[split][1][index] = label
    return splits


def played(index: int = 0, **arrays):
    """A split of episodes, one of which has other arrays."""
    train = episodes(5)
    train[index] = train[index]._replace(**arrays)
    return {"train": train, "valid": episodes(3, seed=2)}


def test_series_come_back(tmp_path: Path) -> None:
    """At full precision, with statistics of the training series alone."""
    splits = series()
    described = series_folder.write_folder(tmp_path, splits)
    assert series_folder.read_description(tmp_path) == described
    for name, (values, labels) in splits.items():
        found = series_folder.read_split(tmp_path, name)
        assert found.labels == labels and all(map(np.array_equal, found.series, values))
    steps = np.concatenate(splits["train"][0])
    assert described.labels == ["Fast", "none", "slow"] and described.longest == max(map(len, splits["train"][0]))
    standardised = described.standardise(steps)
    assert np.allclose(standardised.mean(0), 0.0, atol=1e-5) and np.allclose(standardised.std(0, ddof=1), 1.0)
    assert np.allclose(
        described.standardise(splits["test"][0][0]),
        (splits["test"][0][0] - steps.mean(0)) / steps.std(0, ddof=1),
        rtol=1e-5,
    )


def test_episodes_come_back(tmp_path: Path) -> None:
    """In float32, with statistics of the training episodes alone."""
    splits = played()
    described = WRITE["episodes"](tmp_path, splits)
    assert episode_folder.read_description(tmp_path) == described
    for name, written in splits.items():
        for one, other in zip(written, episode_folder.read_split(tmp_path, name), strict=True):
            assert all(np.array_equal(x.astype(np.float32), y) for x, y in zip(one, other))
    states, totals = np.concatenate([x.states for x in splits["train"]]), [x.total for x in splits["train"]]
    standardised = described.standardise(states)
    assert np.allclose(standardised.mean(0), 0.0, atol=1e-4) and np.allclose(standardised.std(0), 1.0, atol=1e-4)
    assert (described.state_size, described.action_size, described.longest) == (STATE, ACTION, LONGEST)
    assert (described.lowest, described.average, described.highest) == (min(totals), np.mean(totals), max(totals))


def test_actions_are_scaled_from_their_range_and_back(tmp_path: Path) -> None:
    described = WRITE["episodes"](tmp_path, played(), action_range=([-2.0, -1.0], [2.0, 3.0]))
    assert np.allclose(described.scale(np.array([[2.0, -1.0], [0.0, 1.0]])), [[1.0, -1.0], [0.0, 0.0]])
    assert np.allclose(described.unscale(np.array([[1.0, -1.0], [0.5, 0.0]])), [[2.0, -1.0], [1.0, 1.0]])


def test_labels_may_be_integers_and_a_channel_constant(tmp_path: Path) -> None:
    """A constant channel becomes 0."""
    values = [np.column_stack([np.full(5, 7.0), np.arange(5.0) * i]) for i in (1, 2)]
    described = series_folder.write_folder(tmp_path, {"train": (values, np.array([4, -1]))})
    assert described.labels == [-1, 4] and series_folder.read_split(tmp_path, "train").labels == [4, -1]
    assert (described.standardise(values[0])[:, 0] == 0.0).all()


def test_missing_values_are_interpolated() -> None:
    """Linearly for each channel; at the ends the nearest value."""
    nan = np.nan
    filled = fill_missing(np.array([[nan, 1.0], [2.0, nan], [nan, nan], [nan, 7.0], [8.0, nan]]))
    assert np.allclose(filled, [[2.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 7.0]])
    with pytest.raises(ValueError, match="channel 1 .*allowed"):
        fill_missing(np.array([[1.0, nan], [2.0, nan]]))


#: Splits that are refused, and what the error names.
REFUSED = [
    ("series", lambda: series("train", 2, [[1.0, np.nan, 2.0]]), r"series 2 of train is nan at \(0, 1\)"),
    ("series", lambda: series("test", 1, [[1.0, 2.0, -np.inf]]), r"series 1 of test is -inf at \(0, 2\)"),
    ("series", lambda: series("test", 3, np.zeros((4, 2))), r"series 3 of test .*3"),
    ("series", lambda: series("train", 0, np.zeros((0, 3))), "series 0 of train"),
    ("series", lambda: series("train", 0, np.zeros(5)), "series 0 of train"),
    ("series", lambda: series("train", 4, [["a", "b", "c"]]), "series 4 of train"),
    ("series", lambda: series("test", 5, label="loud"), "series 5 of test .*'loud'; allowed: 'Fast', 'none', 'slow'"),
    ("series", lambda: series("train", 5, label=5), "series 5 of train is 5"),
    ("series", lambda: series(test=([], [])), "test has 0 series"),
    ("series", lambda: series(test=(waves(3, 1)[0], ["slow"])), "test has 3 series and 1 labels"),
    ("series", lambda: {"test": waves(3, 1)}, "splits are test; allowed: 'train'"),
    ("episodes", lambda: played(1, actions=np.zeros(4, dtype=np.int64)), "episode 1 of train has discrete actions"),
    ("episodes", lambda: played(0, states=np.zeros((3, STATE))), "episode 0 of train: actions"),
    ("episodes", lambda: played(2, states=np.zeros((4, 7))), "episode 2 of train: states .*3"),
    ("episodes", lambda: played(0, rewards=np.zeros((LONGEST, 1))), "episode 0 of train: rewards"),
    ("episodes", lambda: played(0, rewards=np.full(LONGEST, np.nan)), r"episode 0 of train: rewards is nan at \(0,\)"),
    ("episodes", lambda: played(0, actions=np.full((LONGEST, 2), 1.5)), "action at step 0 is 1.5; allowed: -1.0"),
    ("episodes", lambda: played(0, states=[["a"] * STATE] * LONGEST), "episode 0 of train: states"),
    ("episodes", lambda: played(0, states=np.full((LONGEST, STATE), 1e39)), r"states is inf at \(0, 0\)"),
    ("episodes", lambda: {"train": [Episode(*(np.zeros((0, 2)),) * 2, np.zeros(0))]}, "episode 0 of train: states"),
    ("episodes", lambda: {"train": episodes(2), "valid": []}, "valid has 0 episodes"),
    ("episodes", lambda: {"valid": episodes(2)}, "splits are valid; allowed: 'train'"),
]


@pytest.mark.parametrize(("kind", "make", "named"), REFUSED)
def test_what_is_refused_leaves_no_folder(kind: str, make, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        WRITE[kind](tmp_path / "new", make())
    assert "allowed: " in str(caught.value) and not (tmp_path / "new").exists()


@pytest.mark.parametrize("bad", [([1.0], [-1.0]), ([-np.inf], [np.inf])])
def test_ranges_of_actions_that_are_refused(bad, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="range of actions is .*; allowed"):
        WRITE["episodes"](tmp_path / "new", played(), action_range=bad)


#: Numbers that no writer gives and that the types of tests/test_damaged_files.py do not cover.
WRONG_FIELDS = [
    ("series", "labels", ["a", 1]),
    ("series", "labels", ["a", "a"]),
    ("series", "mean", [float("nan")] * 3),
    ("series", "std", [0.0] * 3),
    ("series", "std", [1.0]),
    ("series", "longest", -1),
    ("episodes", "std", [-1.0] * STATE),
    ("episodes", "std", [1.0]),
    ("episodes", "high", [-2.0] * ACTION),
    ("episodes", "low", [0.0]),
    ("episodes", "longest", 0),
    ("episodes", "highest", float("inf")),
]


@pytest.mark.parametrize(("kind", "field", "value"), WRONG_FIELDS)
def test_descriptions_that_are_refused(kind: str, field: str, value, tmp_path: Path) -> None:
    WRITE[kind](tmp_path, {"series": series, "episodes": played}[kind]())
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({**read(path, "it"), field: value}))
    with pytest.raises(ValueError, match=rf"{path.name} cannot be read: .*({field}|high).*allowed"):
        MODULES[kind].read_description(tmp_path)


def test_lengths_that_add_up_and_are_none(tmp_path: Path) -> None:
    """Arrays of other types and shapes are in tests/test_damaged_files.py."""
    series_folder.write_folder(tmp_path, series())
    with np.load(tmp_path / "test.npz") as stored:
        arrays = dict(stored)
    arrays["lengths"] = np.append(arrays["lengths"][:-2], [-1, arrays["lengths"][-2:].sum() + 1])
    np.savez(tmp_path / "test.npz", **arrays)
    with pytest.raises(ValueError, match="test.npz: lengths has -1; allowed: 1 to"):
        series_folder.read_split(tmp_path, "test")


def test_what_is_too_large_for_the_model_is_refused(tmp_path: Path) -> None:
    """What is infinite in float32 after standardisation; an integer of a checkpoint beyond a float."""
    described = Description(["a"], [0.0, 0.0], [1.0, 1e39], 3)
    assert np.isfinite(described.standardise(np.array([[1.0, 1e39]]))).all()
    with pytest.raises(ValueError, match=r"series 4.* is 1e\+39 at \(1, 0\).*allowed.*float32"):
        described.standardise(np.array([[1.0, 1.0], [1e39, 1.0]]), "series 4")
    content = {"labels": ["a"], "mean": [10**400], "std": [1.0], "longest": 3}
    with pytest.raises(ValueError, match="c.pt cannot be read: .*mean, std, longest"):
        described_by(Description, content, "c.pt")
