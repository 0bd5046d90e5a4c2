"""Own data: the search resumes, policies of graded returns play, and discrete actions are refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

from fairseq_plugin.data.episode_folder import read_split
from recipes.offline_rl import collect, random_search
from recipes.offline_rl.environments import make
from recipes.offline_rl.random_search import Policy, Search, Settings, play
from recipes.shared.scripts import RecipeFailed
from recipes.shared.working_folder import working_folder

gymnasium = pytest.importorskip("gymnasium")
TINY = Settings(directions=2, best=2)


def search(path: Path, iterations: int, seed: int = 1) -> Search:
    """A search in Pendulum-v1 with the given total of iterations."""
    with working_folder(path.parent, "recipes.some"):
        return iterate(Search(make("Pendulum-v1"), TINY, seed, path), iterations)


def iterate(found: Search, iterations: int) -> Search:
    """Run ``found`` up to the given total of iterations, by setting its time limit."""

    def tell_time(running: Search) -> None:
        running.seconds = 1.0 if len(running.policies) > iterations else 0.0

    found.seconds = 0.0
    found.run(0.5, tell_time)
    return found


def test_a_search_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """A resumed search gives the same policies and statistics; another seed gives different ones."""
    whole = search(tmp_path / "whole.npz", 3)
    search(tmp_path / "parts.npz", 1)
    parts = search(tmp_path / "parts.npz", 3)
    assert len(whole.policies) == len(parts.policies) == 4
    for policy, other in zip(whole.policies, parts.policies):
        assert all(np.array_equal(x, y) for x, y in zip(policy, other))
    other = search(tmp_path / "other.npz", 1, seed=2)
    assert not np.array_equal(whole.policies[1].weights, other.policies[1].weights)


@pytest.mark.parametrize("damage", ["cut off", "no archive", "others' sizes", "too few"])
def test_a_damaged_search_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "search.npz"
    search(path, 1)
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "no archive":
        path.write_text("no archive")
    else:
        with np.load(path) as stored:
            arrays = dict(stored)
        arrays["weights"] = arrays["weights"][:, :, :1] if damage == "others' sizes" else arrays["weights"][:1]
        np.savez(path, **arrays)
    with pytest.raises(ValueError, match=r"search\.npz.*allowed"):
        search(path, 2)


def test_the_statistics_of_states_are_those_of_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def recorded(environment, policy, seed):
        played.append(play(environment, policy, seed))
        return played[-1]

    monkeypatch.setattr(random_search, "play", recorded)
    result = search(tmp_path / "search.npz", 2)
    # The policies themselves are played too.
    tried = [episode for i, episode in enumerate(played) if i not in (0, 5, 10)]
    states = np.concatenate([episode.states for episode in tried]).astype(np.float64)
    assert np.allclose(result.mean, states.mean(0)) and np.allclose(result.squares / result.seen, states.var(0))


class Line:
    """An environment whose return measures how close the actions are to the states."""

    observation_space = action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def reset(self, seed: int):
        self.rng, self.step_number = np.random.default_rng(seed), 0
        self.state = self.rng.uniform(-1, 1, 2)
        return self.state, {}

    def step(self, action):
        reward = -float(np.square(action - self.state).sum())
        self.step_number += 1
        self.state = self.rng.uniform(-1, 1, 2)
        return self.state, reward, False, self.step_number == 20, {}


def test_it_improves_and_grades_are_spread(tmp_path: Path) -> None:
    """The best policy is close to the target; graded policies range from the first to the best."""
    with working_folder(tmp_path, "recipes.some"):
        result = iterate(Search(Line(), Settings(8, 4, 0.1, 0.1), 1, tmp_path / "search.npz"), 25)
    totals = [policy.total for policy in result.policies]
    assert max(totals) > 0.3 * totals[0]  # both below 0
    graded = [policy.total for policy in result.graded(4)]
    assert graded[0] == totals[0] and graded[-1] == max(totals) and graded == sorted(graded)


def test_actions_stay_in_their_range() -> None:
    """Actions in [-1, 1], including noise, are scaled to the environment's range."""
    environment = make("Pendulum-v1")
    policy = Policy(np.full((1, 3), 100.0), np.zeros(3), np.ones(3), 0.0)
    episode = play(environment, policy, 1, noise=0.5, rng=np.random.default_rng(0))
    assert episode.actions.shape == (200, 1) and np.abs(episode.actions).max() == 2.0


def test_the_folder(comparison: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Graded episodes with the range of actions; a run for another environment or seed is refused."""
    episodes = read_split(comparison / "behaviour" / "data", "train")
    assert len(episodes) == 6 and all(len(episode.rewards) == 200 for episode in episodes)
    monkeypatch.setitem(random_search.SETTINGS, "Pendulum", TINY)
    arguments = ["--env", "Pendulum-v1", "--minutes", "1e-6", "--grades", "2", "--episodes", "1"]
    assert collect.main([*arguments, "--out", str(tmp_path / "own")]) == 0
    assert "states of 3 numbers, actions of 1, up to 200 steps" in capsys.readouterr().out
    assert collect.main([*arguments, "--seed", "2", "--out", str(tmp_path / "own")]) == 1
    assert "--seed is 2; allowed in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("CartPole-v1", r"--env is CartPole-v1, whose actions are Discrete\(2\); allowed"),
        ("FrozenLake-v1", "--env is FrozenLake-v1, whose states are Discrete"),
        ("NoSuch-v0", "--env is NoSuch-v0: .*; allowed: an environment of gymnasium"),
    ],
)
def test_environments_that_do_not_fit(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        collect.collect(name, 1.0, tmp_path / "own")
    assert not (tmp_path / "own").exists()


def test_episodes_that_may_never_end_are_refused(tmp_path: Path) -> None:
    gymnasium.register("NoLimit-v0", "gymnasium.envs.classic_control:PendulumEnv")
    try:
        with pytest.raises(ValueError, match="--env is NoLimit-v0, whose episodes may never end; allowed"):
            collect.collect("NoLimit-v0", 1.0, tmp_path / "own")
    finally:
        del gymnasium.registry["NoLimit-v0"]


def test_without_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(RecipeFailed, match=r"pip install '\.\[fairseq,rl\]'"):
        make("Pendulum-v1")


@pytest.mark.parametrize("option, bad", [("--minutes", "0"), ("--grades", "0"), ("--noise", "-1"), ("--seed", "-1")])
def test_options_out_of_range(option: str, bad: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    try:
        assert collect.main(["--env", "Pendulum-v1", "--out", str(tmp_path / "own"), f"{option}={bad}"]) == 1
    except SystemExit as error:  # argparse's error
        assert error.code == 2
    message = capsys.readouterr().err
    assert option in message and bad in message and "allowed" in message and not (tmp_path / "own").exists()
