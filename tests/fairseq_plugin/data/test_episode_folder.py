"""Episodes on disk: statistics of the training episodes, and errors raised before anything is written."""

import json
from pathlib import Path

import numpy as np
import pytest

from common.files.json_files import read
from fairseq_plugin.data.episode_folder import Episode, read_description, read_split, write_folder
from tests.fairseq_plugin.helpers.episodes import ACTION, LONGEST, STATE, episodes


def changed(index: int, **arrays) -> dict[str, list[Episode]]:
    """A train split with other ``arrays`` in one episode."""
    train = episodes(5)
    train[index] = train[index]._replace(**arrays)
    return {"train": train}


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    """Episodes are read back as float32; statistics are computed from the training episodes only."""
    splits = {"train": episodes(5), "valid": episodes(3, seed=2)}
    description = write_folder(tmp_path, splits, "toy", "Toy-v0")
    for name, split_episodes in splits.items():
        for episode, restored in zip(split_episodes, read_split(tmp_path, name), strict=True):
            assert all(np.array_equal(x.astype(np.float32), y) for x, y in zip(episode, restored))
    states = np.concatenate([episode.states for episode in splits["train"]])
    assert read_description(tmp_path) == description
    assert np.allclose(description.mean, states.mean(0)) and np.allclose(description.std, states.std(0))
    assert (description.state_size, description.action_size, description.longest) == (STATE, ACTION, LONGEST)
    totals = [episode.total for episode in splits["train"]]
    assert (description.lowest, description.average, description.highest) == (min(totals), np.mean(totals), max(totals))
    standardised = description.standardise(states)
    assert np.allclose(standardised.mean(0), 0.0, atol=1e-4) and np.allclose(standardised.std(0), 1.0, atol=1e-4)


def test_actions_are_scaled_from_their_range(tmp_path: Path) -> None:
    """Actions are mapped to [-1, 1] and back, each component by its own range."""
    described = write_folder(tmp_path, {"train": episodes(2)}, "toy", action_range=([-2.0, -1.0], [2.0, 3.0]))
    assert np.allclose(described.scale(np.array([[2.0, -1.0], [0.0, 1.0]])), [[1.0, -1.0], [0.0, 0.0]])
    actions = np.random.default_rng(0).uniform(-1, 1, (5, ACTION))
    assert np.allclose(described.scale(described.unscale(actions)), actions, atol=1e-6)


REFUSED = [
    (lambda: changed(1, actions=np.zeros(4, dtype=np.int64)), "episode 1 of train has discrete actions"),
    (lambda: changed(0, states=np.zeros((3, STATE))), r"episode 0 of train: actions has shape \(12, 2\)"),
    (
        lambda: changed(2, states=np.zeros((4, 7))),
        r"episode 2 of train: states has .*allowed: \(at least 1, 3\)",
    ),
    (lambda: changed(0, rewards=np.zeros((LONGEST, 1))), "episode 0 of train: rewards has shape"),
    (
        lambda: changed(0, rewards=np.full(LONGEST, np.nan)),
        r"episode 0 of train: rewards is nan at \(0,\)",
    ),
    (lambda: changed(0, actions=np.full((LONGEST, 2), 1.5)), "number 0 of the action at step 0 is 1.5; allowed: -1.0"),
    (lambda: changed(0, states=[["a"] * STATE] * LONGEST), "episode 0 of train: states cannot be read as numbers"),
    (lambda: {"train": [Episode(*(np.zeros((0, 2)),) * 2, np.zeros(0))]}, "episode 0 of train: states has shape"),
    (lambda: {"train": []}, "train has 0 episodes; allowed: at least 1"),
    (lambda: {"train": episodes(2), "valid": []}, "valid has 0 episodes; allowed: at least 1"),
    (lambda: {"valid": episodes(2)}, "splits are valid; allowed: 'train'"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_bad_input_is_refused_and_nothing_written(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_folder(tmp_path / "new", make(), "toy")
    assert not (tmp_path / "new").exists()


def test_a_range_that_is_none_is_refused(tmp_path: Path) -> None:
    for bad in (([1.0], [-1.0]), ([-np.inf], [np.inf])):
        with pytest.raises(ValueError, match="range of actions is .*; allowed"):
            write_folder(tmp_path / "new", {"train": episodes(2)}, "toy", action_range=bad)


DAMAGED = [
    ({"lengths": lambda x: x[:-1]}, "states has shape"),
    ({"states": lambda x: x[:, :1]}, "states has shape"),
    ({"actions": lambda x: x.astype(complex)}, "actions .*complex128"),
    ({"rewards": lambda x: np.where(np.arange(len(x)) == 2, np.inf, x)}, r"rewards is inf at \(2,\)"),
]


@pytest.mark.parametrize("change, message", DAMAGED)
def test_a_damaged_split_is_refused(tmp_path: Path, change, message: str) -> None:
    """The error names file and field; test_series_folder.py damages what all such folders have."""
    write_folder(tmp_path, {"train": episodes(3)}, "toy")
    with np.load(tmp_path / "train.npz") as stored:
        arrays = {name: change.get(name, lambda x: x)(stored[name]) for name in stored}
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(ValueError, match=f"train.npz:? ?.*{message}"):
        read_split(tmp_path, "train")


@pytest.mark.parametrize(
    "field, value",
    [
        ("environment", 3),
        ("mean", [float("nan")] * STATE),
        ("std", [-1.0] * STATE),
        ("std", [1.0]),
        ("high", [-2.0] * ACTION),
        ("low", []),
        ("longest", 0),
        ("highest", float("inf")),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, field: str, value) -> None:
    write_folder(tmp_path, {"train": episodes(3)}, "toy")
    description = read(tmp_path / "episodes.json", "it")
    (tmp_path / "episodes.json").write_text(json.dumps({**description, field: value}))
    with pytest.raises(ValueError, match=rf"episodes.json cannot be read: .*{field}.*allowed"):
        read_description(tmp_path)


def test_what_is_infinite_in_float32(tmp_path: Path) -> None:
    """States that overflow float32, also after standardisation, are refused before anything is written."""
    with pytest.raises(ValueError, match=r"states is inf at \(0, 0\)"):
        write_folder(tmp_path / "new", changed(0, states=np.full((LONGEST, STATE), 1e39)), "toy")
    described = write_folder(tmp_path / "new", {"train": episodes(3)}, "toy")
    with pytest.raises(ValueError, match=r"a state is 1e\+39 at \(1, 2\).*float32"):
        described.standardise(np.array([[0.0] * STATE, [0.0] * (STATE - 1) + [1e39]]), "a state")
