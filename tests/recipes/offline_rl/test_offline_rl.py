"""Offline reinforcement learning: recorded and own data, a quick comparison on Pendulum, and its models acting."""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fairseq import options as fairseq_options

from fairseq_plugin.data.episode_folder import Episode, read_description, read_split, write_folder
from recipes import runs
from recipes.offline_rl import collect, compare, cost, data, evaluate

h5py = pytest.importorskip("h5py")
pytest.importorskip("gymnasium")


@pytest.fixture(scope="module")
def comparison(tmp_path_factory, imported_already):
    """A quick comparison of two models."""
    out = tmp_path_factory.mktemp("comparison")
    compare.main(f"--quick --env Pendulum-v1 --models linear+forget bc --seeds 1 --out {out / 'new'}".split())
    return out / "new"


@pytest.fixture
def checkpoint(comparison):
    return comparison / "runs/linear+forget.1/checkpoints/checkpoint_last.pt"


def act(capsys, *words):
    """The episodes that ``evaluate`` prints."""
    capsys.readouterr()
    evaluate.main([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("minari", [False, True])
def test_recorded_files_become_episodes(minari, tmp_path):
    """Three steps, then two; the last of D4RL's six belongs to an episode without an end, Minari's has 11 groups."""
    states, actions, rewards = np.arange(12.0).reshape(6, 2), np.zeros((6, 1)), np.arange(6.0)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        if minari:
            for i in range(11):
                file[f"episode_{i}/observations"] = np.full((3 + i, 2), i)
                file[f"episode_{i}/actions"], file[f"episode_{i}/rewards"] = np.zeros((2 + i, 1)), np.ones(2 + i)
        else:
            file["observations"], file["actions"], file["rewards"] = states, actions, rewards
            file["terminals"], file["timeouts"] = [0, 0, 1, 0, 0, 0], [[0], [0], [0], [0], [1], [0]]
    words = ["mine", "--file", str(tmp_path / "x.hdf5"), "--out", str(tmp_path / "out")]
    data.main([*words, "--env", "Mine-v0", "--action-range", "-2", "2"])
    episodes, described = read_split(tmp_path / "out", "train"), read_description(tmp_path / "out")
    if minari:
        assert [len(x.states) for x in episodes] == list(range(2, 13)) and episodes[10].states[0, 0] == 10
    else:
        assert [x.rewards.tolist() for x in episodes] == [[0, 1, 2], [3, 4]]
        assert episodes[1].states.tolist() == states[3:5].tolist()
        assert (described.lowest, described.highest) == (3.0, 7.0)
    assert (described.environment, described.low, described.high) == ("Mine-v0", [-2.0], [2.0])
    with pytest.raises(SystemExit, match="a new folder"):
        data.main(words)


def test_a_search_repeats_and_its_data_have_grades(tmp_path, monkeypatch):
    monkeypatch.setitem(collect.SETTINGS, "Pendulum", collect.Settings(4, 2))
    monkeypatch.setattr(collect, "NOISE", 0.0)
    words = "--env Pendulum-v1 --iterations 12 --grades 3 --episodes 2 --out".split()
    for folder in ("first", "second"):
        collect.main([*words, str(tmp_path / folder)])
    first, second = (read_split(tmp_path / folder, "train") for folder in ("first", "second"))
    assert [x.total for x in first] == [x.total for x in second] and len(first) == 6
    assert len({x.states.tobytes() for x in first}) == 6 and len(first[0].states) == 200
    assert first[0].actions.tolist() == [[0.0]] * 200  # the first policy does nothing


class Line:
    """A point of which the action is to be where it is; the return is minus the distance, summed up."""

    observation_space = SimpleNamespace(shape=(1,))
    action_space = SimpleNamespace(shape=(1,), low=np.array([-1.0]), high=np.array([1.0]), dtype=np.float32)

    def reset(self, seed):
        self.rng, self.steps = np.random.default_rng(seed), 0
        self.place = self.rng.uniform(-1, 1, 1)
        return self.place, {}

    def step(self, action):
        reward, self.steps = -abs(float((action - self.place)[0])), self.steps + 1
        self.place = self.rng.uniform(-1, 1, 1)
        return self.place, reward, False, self.steps == 30, {}


def test_the_search_improves():
    policies = collect.search(Line(), collect.Settings(8, 4, 0.1, 0.1), 25)
    assert max(x.total for x in policies) > 0.5 * policies[0].total  # both below 0


def test_the_statistics_of_states_are_those_of_all_that_were_seen(monkeypatch):
    played, play = [], collect.play
    monkeypatch.setattr(collect, "play", lambda *words: played.append(play(*words)) or played[-1])
    policies = collect.search(collect.make("Pendulum-v1"), collect.Settings(2, 2), 2)
    learned = [episode.states for i, episode in enumerate(played) if i not in (0, 5, 10)]  # these are of a new policy
    states = np.concatenate(learned).astype(float)
    np.testing.assert_allclose(policies[-1].mean, states.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(policies[-1].std, states.std(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("name", ["CartPole-v1", "Blackjack-v1"])
def test_environments_that_do_not_fit_are_refused(name, tmp_path):
    with pytest.raises(SystemExit, match=f"--env is {name}, whose .* allowed"):
        collect.main(["--env", name, "--out", str(tmp_path / "new")])
    assert not list(tmp_path.iterdir())


def test_a_comparison_has_results_of_every_target_and_goes_on(comparison, capsys):
    rows = json.loads((comparison / "results.json").read_text())
    assert [row["model"] for row in rows] == ["linear+forget", "bc"] and len(rows[0]["returns"]) == 5
    assert len(rows[0]["errors"]) == 10 and rows[1]["follows"] == 0.0
    log = (comparison / "runs/bc.1/train.log").read_bytes()
    words = f"--quick --env Pendulum-v1 --models bc --seeds 1 --out {comparison}".split()
    compare.main(words)
    assert (comparison / "runs/bc.1/train.log").read_bytes() == log
    assert "which is not D4RL" in capsys.readouterr().out


def test_both_ways_of_acting_give_the_same_episodes(checkpoint, capsys):
    """Computing all 200 steps anew for each action equals decoding with a state; a shorter window differs."""
    words = [checkpoint, "--targets", "-1500", "-300", "--episodes", "1", "--context"]
    anew, state, window = (act(capsys, *words, context) for context in ("200", "full", "10"))
    assert [row["steps"] for row in state] == [200, 200]
    assert [row["total"] for row in state] == pytest.approx([row["total"] for row in anew], rel=1e-3)
    assert [row["total"] for row in window] != [row["total"] for row in state]


def test_episodes_depend_on_target_and_seed_alone(checkpoint, capsys):
    rows = act(capsys, checkpoint, "--targets", "-1500", "-300", "--episodes", "2", "--seed", "5")
    (alone,) = act(capsys, checkpoint, "--targets", "-300", "--episodes", "1", "--seed", "6")
    assert [(row["target"], row["seed"]) for row in rows] == [(t, s) for t in (-1500, -300) for s in (5, 6)]
    assert alone["total"] == pytest.approx(rows[3]["total"], rel=1e-4) and rows[0]["total"] != rows[1]["total"]


def test_a_module_that_a_file_names_is_not_imported(checkpoint, tmp_path, monkeypatch, capsys):
    """Only the user can name it, by --env."""
    (tmp_path / "stranger.py").write_text("raise SystemError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    load = evaluate.DecisionModel.from_pretrained

    def described(*words):
        hub = load(*words)
        object.__setattr__(hub.described, "environment", "stranger:Mine-v0")
        return hub

    monkeypatch.setattr(evaluate.DecisionModel, "from_pretrained", described)
    with pytest.raises(SystemExit):
        evaluate.main([str(checkpoint)])
    assert "--env stranger:Mine-v0" in capsys.readouterr().err and "stranger" not in sys.modules


def test_scores_and_targets_of_the_papers_data_are_d4rls(tmp_path):
    episode = Episode(np.zeros((2, 1)), np.zeros((2, 1)), np.ones(2))
    for name, scores in (("hopper-medium-v2", (0.0, 100.0, 3600.0)), ("mine", (0.0, 0.0, 2.0))):
        described = write_folder(tmp_path / name, {"train": [episode]}, name)
        low, high, targets = evaluate.scale(described)
        found = evaluate.score(described, low), evaluate.score(described, high), targets[0]
        assert found == pytest.approx(scores)


def test_fairseq_takes_the_command_of_every_model(monkeypatch, comparison):
    planned = []
    monkeypatch.setattr(runs, "train_all", lambda plan, *_: planned.extend(plan) or exit())
    names = ["softmax", "flowformer+forget+short_conv", "cosformer+forget", "rfa_gate", "gated_delta", "bc", "awac"]
    with pytest.raises(SystemExit):
        compare.main(["--quick", "--env", "Pendulum-v1", "--seeds", "1", "--out", str(comparison), "--models", *names])
    for one in planned:
        words = list(map(str, one.command[2:]))
        parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
        assert parsed.arch == one.model.partition("+")[0] + "_decision"
        assert parsed.max_update == (100 if one.model in ("bc", "awac") else 10)
        assert parsed.criterion == ("awac" if one.model == "awac" else "action_mse")
    assert parsed.lr == [0.0003] and [one.model for one in planned] == names


def test_cost(capsys):
    cost.main("--models linear softmax --steps 2 25 --context 3".split())
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 6 and all(float(row[-2]) > 0 for row in rows[2:])
