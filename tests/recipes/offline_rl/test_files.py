"""HDF5 files of D4RL and Minari: reading, and errors; the nine data sets of D4RL."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription, read_description, read_split
from recipes.offline_rl import prepare
from recipes.offline_rl.d4rl import ROBOTS, score
from recipes.offline_rl.hdf5_files import read_hdf5
from recipes.offline_rl.published import MODELS, TABLE
from recipes.shared.scripts import RecipeFailed
from recipes.shared.sources import D4RL

h5py = pytest.importorskip("h5py")
STATE, ACTION, STEPS = 11, 3, 30
#: Last steps of the first two episodes, one by each signal; the steps after them have no end.
TERMINAL, TIMEOUT = 9, 24


def arrays(steps: int = STEPS) -> dict[str, np.ndarray]:
    """The arrays of a file in D4RL's layout."""
    rng = np.random.default_rng(0)
    number = np.arange(steps)
    return {
        "observations": rng.normal(size=(steps, STATE)).astype(np.float32),
        "next_observations": rng.normal(size=(steps, STATE)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (steps, ACTION)).astype(np.float32),
        "rewards": rng.normal(size=steps).astype(np.float32),
        "terminals": number == TERMINAL,
        "timeouts": number == TIMEOUT,
    }


def write(path: Path, **changes) -> Path:
    """Write a file in D4RL's layout; ``changes`` replace arrays, None omits one."""
    with h5py.File(path, "w") as file:
        for name, values in {**arrays(), **changes}.items():
            if values is not None:
                file[name] = values
        file["metadata/algorithm"] = "none"
    return path


def write_minari(path: Path, lengths=(4, 7), **changes) -> Path:
    """Write a file in Minari's layout with episodes of given lengths; ``changes`` as in ``write``, for the last."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for i, steps in enumerate(lengths):
            values = {
                "observations": np.full((steps + 1, STATE), float(i)),
                "actions": rng.uniform(-1, 1, (steps, ACTION)),
                "rewards": np.full(steps, float(i)),
                "terminations": np.zeros(steps, dtype=bool),
                "truncations": np.arange(steps) == steps - 1,
                **(changes if i == len(lengths) - 1 else {}),
            }
            for name, array in values.items():
                if array is not None:
                    file[f"episode_{i}/{name}"] = array
    return path


def write_huge(path: Path) -> None:
    """Write a file that declares a terabyte of states and stores none."""
    with h5py.File(write(path, observations=None), "a") as file:
        file.create_dataset("observations", shape=(2**37, 2), dtype="f4", chunks=(2**10, 2))


def write_minari_with(path: Path, name: str) -> None:
    """Write a file in Minari's layout with an additional group."""
    with h5py.File(write_minari(path), "a") as file:
        file.create_group(name)


def write_linked(path: Path) -> None:
    """Write a file whose states are a link to another file."""
    write(path.with_name("other.hdf5"))
    with h5py.File(write(path, observations=None), "a") as file:
        file["observations"] = h5py.ExternalLink("other.hdf5", "/observations")


def test_d4rl(tmp_path: Path) -> None:
    """Episodes end at terminals or timeouts; steps after the last end are dropped."""
    episodes, expected = read_hdf5(write(tmp_path / "a.hdf5")), arrays()
    assert [len(episode.rewards) for episode in episodes] == [TERMINAL + 1, TIMEOUT - TERMINAL]
    for name, key in (("observations", "states"), ("actions", "actions"), ("rewards", "rewards")):
        joined = np.concatenate([getattr(episode, key) for episode in episodes])
        assert np.array_equal(joined, expected[name][: TIMEOUT + 1])


def test_minari(tmp_path: Path) -> None:
    """Episodes in numerical order, without the observation after the last action."""
    lengths = (3, 4, 2, 2, 2, 2, 2, 2, 2, 2, 6, 5)
    episodes = read_hdf5(write_minari(tmp_path / "main_data.hdf5", lengths))
    assert tuple(len(episode.rewards) for episode in episodes) == lengths
    assert [episode.states[0, 0] for episode in episodes] == list(range(12)) and episodes[1].states.shape == (4, STATE)


REFUSED = [
    (lambda path: write(path, timeouts=None), "a.hdf5 lacks timeouts; allowed: D4RL's layout"),
    (lambda path: write(path, observations=None), "a.hdf5 lacks observations; allowed"),
    (lambda path: write(path, rewards=np.zeros(7)), "a.hdf5 has arrays of .*rewards 7"),
    (lambda path: write(path, actions=np.zeros(STEPS, dtype=np.int64)), "a.hdf5: episode 0 has discrete actions"),
    (lambda path: write(path, rewards=np.full(STEPS, np.nan)), r"a.hdf5: episode 0: rewards is nan at \(0,\)"),
    (lambda path: write(path, **dict.fromkeys(("terminals", "timeouts"), np.zeros(STEPS))), "no episode that ends"),
    (lambda path: write_minari(path, truncations=None), "a.hdf5 lacks episode_1/truncations; allowed"),
    (lambda path: write_minari(path, rewards=np.zeros(3)), "a.hdf5: episode_1 has arrays of .*rewards 3"),
    (lambda path: write_minari(path, observations=None, **{"observations/xy": [1.0]}), "episode_1/observations is a"),
    (lambda path: write(path, rewards=np.float32(1.0)), r"a.hdf5: rewards has shape \(\); allowed: \(steps,\)"),
    (lambda path: write(path, observations=np.zeros((STEPS, 2, 2))), r"observations has shape \(30, 2, 2\); allowed"),
    (lambda path: write(path, terminals=np.zeros((STEPS, 2))), r"a.hdf5: terminals has shape \(30, 2\); allowed"),
    (lambda path: write(path, actions=np.full((STEPS, ACTION), 1j)), "a.hdf5: actions holds complex128; allowed: real"),
    (lambda path: write(path, rewards=np.full(STEPS, b"x")), r"a.hdf5: rewards holds .*S1; allowed: real"),
    (lambda path: write_huge(path), r"a.hdf5: observations has shape .* bytes; allowed here: at most"),
    (lambda path: write_minari_with(path, "episode_x"), "a.hdf5 has the group episode_x; allowed"),
    (lambda path: write_linked(path), "a.hdf5: observations is a link; allowed: arrays in the file"),
    (lambda path: path.write_bytes(write(path).read_bytes()[:3000]), "a.hdf5 cannot be read: .*allowed: a whole HDF5"),
    (lambda path: path.write_text("no HDF5"), "a.hdf5 cannot be read: .*allowed: a whole HDF5"),
    (lambda path: None, "a.hdf5, which is no file"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_broken_files_are_refused_and_nothing_written(tmp_path: Path, make, message: str) -> None:
    make(tmp_path / "a.hdf5")
    with pytest.raises(ValueError, match=message):
        prepare.prepare("mine", tmp_path / "out", tmp_path / "a.hdf5")
    assert not (tmp_path / "out").exists()


def test_prepare(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Any data set from a file; a name of D4RL determines sizes and environment."""
    file = write(tmp_path / "a.hdf5")
    arguments = ["--dataset", "hopper-medium-v2", "--file", str(file), "--out", str(tmp_path / "out")]
    assert prepare.main(arguments) == 0
    described = read_description(tmp_path / "out")
    assert (described.name, described.environment) == ("hopper-medium-v2", "Hopper-v4")
    assert len(read_split(tmp_path / "out", "train")) == 2
    assert "states of 11 numbers, actions of 3, up to 15 steps" in capsys.readouterr().out
    assert prepare.main(["--dataset", "halfcheetah-medium-v2", *arguments[2:]]) == 1
    assert "states and actions of 11 and 3 numbers; allowed: 17 and 6" in capsys.readouterr().err
    assert prepare.main(["--dataset", "hopper-random-v2"]) == 1
    assert "--dataset is hopper-random-v2; allowed without --file: halfcheetah" in capsys.readouterr().err
    wide = write(file, actions=np.full((STEPS, ACTION), 1.5))
    assert prepare.main(["--dataset", "mine", "--file", str(wide), "--out", str(tmp_path / "wide")]) == 1
    assert "1.5; allowed: -1.0 to 1.0" in capsys.readouterr().err and not (tmp_path / "wide").exists()
    ranged = ["--action-range", "-2", "2", "--env", "Mine-v0"]
    assert prepare.main(["--dataset", "mine", "--file", str(wide), "--out", str(tmp_path / "wide"), *ranged]) == 0
    described = read_description(tmp_path / "wide")
    assert (described.high, described.environment) == ([2.0] * ACTION, "Mine-v0")


def test_the_nine_sets() -> None:
    """Each has a row in the paper's table, and the averages match the paper's."""
    assert set(D4RL) == set(TABLE) and len(D4RL) == 9
    averages = [np.mean([row[i][0] for row in TABLE.values()]) for i in range(len(MODELS))]
    assert np.round(averages, 1).tolist() == [72.2, 64.4, 63.9, 63.8, 67.8, 73.5]


def test_scores() -> None:
    """Scores use D4RL's constants for its own data sets, and the data's returns for others."""
    sizes = ([0.0], [1.0], [-1.0], [1.0])
    described = EpisodeDescription("walker2d-medium-v2", "", *sizes, 1000, 10.0, 20.0, 30.0)
    assert score(described, ROBOTS["walker2d"].random_return) == 0.0
    assert score(described, 4592.3) == pytest.approx(100.0)
    description = EpisodeDescription("mine", "", *sizes, 1000, 10.0, 20.0, 30.0)
    assert score(description, 15.0) == 25.0


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(RecipeFailed, match=r"pip install '\.\[fairseq,rl\]'"):
        read_hdf5(tmp_path / "a.hdf5")


def test_a_return_is_the_sum_of_rewards() -> None:
    assert Episode(np.zeros((3, 1)), np.zeros((3, 1)), np.array([1.0, 2.0, 4.5])).total == 7.5
