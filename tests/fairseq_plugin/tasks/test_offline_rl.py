"""The task: training through fairseq's commands, and acting from Python."""

from pathlib import Path

import numpy as np
import pytest

from fairseq_plugin import DecisionTransformer
from fairseq_plugin.data.episode_folder import write_folder
from fairseq_plugin.models.decision_hub_interface import DecisionHubInterface
from tests.fairseq_plugin.helpers.commands import run_in_turn
from tests.fairseq_plugin.helpers.episodes import ACTION, STATE, TASK, episodes, training_command, write_episodes
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.tasks import set_up

LIMIT = 20


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("episodes")
    write_episodes(folder)
    return folder


@pytest.fixture(scope="module")
def outputs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The output of every command, all in one process."""
    runs = tmp_path_factory.mktemp("runs")
    short = ("--max-epoch", "1", "--context", "full", "--batch-size", "64")
    commands = {
        "whole": training_command(data, runs / "whole", "flowformer_decision"),
        "full": training_command(data, runs / "full", "linear_decision", *short),
        "cosformer": training_command(data, runs / "cosformer", "cosformer_decision", "--max-epoch", "1"),
    }
    found = run_in_turn(*(("fairseq_cli.train", command, "") for command in commands.values()))
    return {**dict(zip(commands, found)), "runs": runs}


def load(outputs: dict, run: str) -> DecisionHubInterface:
    """The model that a command has trained."""
    return DecisionTransformer.from_pretrained(str(outputs["runs"] / run), "checkpoint_last.pt")


def act(hub: DecisionHubInterface, context: int | str | None, steps: int = LIMIT) -> np.ndarray:
    """The actions (steps, N, A) of two episodes whose states follow from the actions."""
    rng = np.random.default_rng(0)
    hub.reset([3.0, 12.0], context)
    states, rewards, found = 5.0 + rng.normal(size=(2, STATE)), None, []
    for _ in range(steps):
        found.append(hub.act(states, rewards))
        rewards = found[-1][:, 0]
        states = 5.0 + 0.5 * (states - 5.0) + rng.normal(size=(2, STATE)) + found[-1].sum(1, keepdims=True)
    return np.stack(found)


def test_it_learns(outputs: dict) -> None:
    """That it goes on as if it had never been stopped is in commands/test_resumption.py."""
    first, last = (entries(outputs["whole"], "train")[i]["train_loss"] for i in (0, -1))
    assert last < 0.5 * first


def test_a_higher_target_gives_other_actions(outputs: dict) -> None:
    """In the toy's data the sign of an action is that of a high return."""
    hub = load(outputs, "whole")
    states = np.array([[7.0, 7.0, 5.0], [3.0, 3.0, 5.0]])
    hub.reset([0.0, 0.0])
    low = hub.act(states)
    hub.reset([10.0, 10.0])
    high = hub.act(states)
    signs = np.array([[1.0], [-1.0]])
    assert (high * signs > 0).all() and (low * signs < 0).all()


@pytest.mark.parametrize("run, context", [("full", LIMIT), ("full", None), ("whole", LIMIT), ("whole", "full")])
def test_the_state_gives_the_actions_of_recomputation(outputs: dict, run: str, context: int | str | None) -> None:
    """One step at a time from the state, and all steps anew, where the context holds the whole episode."""
    hub = load(outputs, run)
    assert np.allclose(act(hub, context), act(hub, "full"), atol=1e-5)


def test_a_window_reads_its_last_steps_alone(outputs: dict) -> None:
    """By default as many as in training; the same as a model that is shown nothing before them."""
    hub = load(outputs, "whole")
    short = act(hub, None)
    assert np.array_equal(short, act(hub, 5))
    whole = act(hub, LIMIT)
    assert np.allclose(short[:5], whole[:5], atol=1e-5) and not np.allclose(short[5:], whole[5:], atol=1e-4)


def test_one_episode_and_several(outputs: dict) -> None:
    """A single target takes a single state and gives a single action, that of the same row among several."""
    hub = load(outputs, "whole")
    states = np.array([[7.0, 4.0, 5.0], [3.0, 5.0, 5.0]])
    hub.reset([10.0, 2.0], "full")
    several = hub.act(states), hub.act(states + 1.0, [0.5, 1.0])
    hub.reset(10.0, "full")
    single = hub.act(states[0]), hub.act(states[0] + 1.0, 0.5)
    assert single[0].shape == (ACTION,)
    assert all(np.allclose(one, many[0], atol=1e-6) for one, many in zip(single, several))


#: What ``reset`` and what ``act`` refuse, in a message; states and rewards of the first step.
BAD_RESETS = [
    ((np.nan,), "target is nan"),
    (([],), r"target is \[\]"),
    ((1e300,), r"target is 1e\+300.*float32"),
    ((1.0, 0), "context is 0"),
]
BAD_STEPS = [
    ((np.zeros(STATE + 1), None), r"states have shape \(4,\) at step 0; allowed: \(3,\)"),
    ((np.full(STATE, np.nan), None), "not finite at step 0"),
    ((np.full(STATE, 1e39), None), r"state at step 0 is 1e\+39.*float32"),
    ((np.zeros(STATE), 1.0), "rewards are 1.0 at step 0; allowed: None"),
]
BAD_REWARDS = [
    (None, "rewards are None at step 1; allowed"),
    ([1.0, 2.0], "at step 1; allowed: 1 finite numbers"),
    (1e300, r"return that remains at step 1 is .*float32"),
]


def test_acting_says_what_it_cannot_do(outputs: dict) -> None:
    hub = load(outputs, "whole")
    state = np.zeros(STATE)
    with pytest.raises(ValueError, match="before reset"):
        hub.act(state)
    for bad, named in BAD_RESETS:
        with pytest.raises(ValueError, match=named):
            hub.reset(*bad)
    hub.reset(1.0)
    for bad, named in BAD_STEPS:
        with pytest.raises(ValueError, match=named):
            hub.act(*bad)
    hub.act(state)
    for bad, named in BAD_REWARDS:
        with pytest.raises(ValueError, match=named):
            hub.act(state, bad)
    for _ in range(LIMIT - 1):  # the refused one was no step
        hub.act(state, 0.0)
    with pytest.raises(ValueError, match=f"more than {LIMIT} steps; allowed: {LIMIT}, as --max-episode-length"):
        hub.act(state, 0.0)
    with pytest.raises(ValueError, match=f"'full', {LIMIT} steps; allowed for this attention: at most 5, .*--context"):
        load(outputs, "cosformer").reset(1.0, "full")


def test_episodes_that_are_refused(data: Path, tmp_path: Path) -> None:
    """Longer ones than the model is for, a split that is not there, other sizes; options are in test_every_task.py."""
    command = [*TASK, "--arch", "linear_decision"]
    task, _ = set_up(data, *command, "--max-episode-length", "11")
    with pytest.raises(ValueError, match="episode 0 of train has 12 steps; allowed: at most 11, --max-episode-length"):
        task.load_dataset("train")
    with pytest.raises(ValueError, match="no split valid; allowed: train"):
        task.load_dataset("valid")
    task, _ = set_up(data, *command)
    assert task.description.state_size == STATE  # read, and kept from here on
    write_folder(tmp_path / "other", {"train": [one._replace(states=one.states[:, :1]) for one in episodes(2)]}, "toy")
    task.cfg.data = str(tmp_path / "other")
    with pytest.raises(ValueError, match="states and actions of 1 and 2 numbers; allowed: 3 and 2"):
        task.load_dataset("train")
