"""Trained models in an environment: both ways of acting, returns by target, and mismatched environments."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options

from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.models.decision_hub_interface import DecisionHubInterface
from recipes.offline_rl import cost, evaluate
from recipes.offline_rl.acting import evaluate as played
from recipes.offline_rl.acting import load
from recipes.offline_rl.compare import SUFFIX, train_arguments
from recipes.offline_rl.environments import make_for
from recipes.shared.architectures import with_suffix
from recipes.shared.variants import additions_of, with_variants

gymnasium = pytest.importorskip("gymnasium")
TARGETS = [-1500.0, -300.0]


@pytest.fixture(scope="module")
def checkpoint(comparison: Path) -> Path:
    return comparison / "flowformer.1" / "checkpoints" / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> DecisionHubInterface:
    return load(checkpoint)


def test_both_ways_of_acting_give_the_same_episodes(hub: DecisionHubInterface) -> None:
    """Recomputing all 200 steps per action equals decoding with a state; a shorter window differs."""
    anew = played(hub, "Pendulum-v1", TARGETS, 1, context=200).episodes
    state = played(hub, "Pendulum-v1", TARGETS, 1, context="full").episodes
    window = played(hub, "Pendulum-v1", TARGETS, 1).episodes
    assert [episode.steps for episode in state] == [200, 200]
    assert [episode.total for episode in state] == pytest.approx([episode.total for episode in anew], rel=1e-3)
    assert [episode.total for episode in window] != [episode.total for episode in state]


def test_episodes_repeat_and_do_not_depend_on_their_neighbours(hub: DecisionHubInterface) -> None:
    """An episode is determined by its target and its seed."""
    episodes = played(hub, "Pendulum-v1", TARGETS, 2, seed=5).episodes
    (alone,) = played(hub, "Pendulum-v1", TARGETS[1:], 1, seed=6).episodes
    assert [(episode.target, episode.seed) for episode in episodes] == [(t, s) for t in TARGETS for s in (5, 6)]
    assert alone.total == pytest.approx(episodes[3].total, rel=1e-4) and episodes[0].total != episodes[1].total


def test_the_command(checkpoint: Path, comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A row per target, also over checkpoints; all episodes as JSON; the data's environment is used."""
    files = [str(checkpoint), str(checkpoint)]
    output = tmp_path / "returns.json"
    assert evaluate.main([*files, "--targets", "-1500,-300", "--episodes", "2", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.strip().startswith(("-1,500", "-300"))]
    assert len(rows) == 2 and rows[0][-1] == "4" and "±" in rows[0]
    assert "the data's own lowest and highest" in printed and "trained on Pendulum-v1, own data" in printed
    content = json.loads(output.read_text())
    assert [episode["target"] for episode in content["episodes"][files[0]]] == [-1500.0, -1500.0, -300.0, -300.0]


@pytest.mark.parametrize("name", with_variants("linear") + ["bc", "awac"])
def test_the_name_of_a_model_has_its_additions(name: str, tmp_path: Path) -> None:
    """What ``compare`` trains as linear+forget is not averaged as linear."""
    parser = options.get_training_parser()
    arguments = [str(x) for x in train_arguments(tmp_path, name, "10", 10, 1)]
    model = options.parse_args_and_arch(parser, input_args=arguments)
    model._name = model.arch
    assert evaluate.model_name(SimpleNamespace(cfg=SimpleNamespace(model=model))) == with_suffix(name, SUFFIX)


def test_other_values_of_an_addition_are_written_out() -> None:
    assert additions_of(Namespace(linear_forget="none", linear_short_conv=3), "--linear-") == "+short_conv_3"


def test_checkpoints_of_two_models(checkpoint: Path, comparison: Path, capsys: pytest.CaptureFixture) -> None:
    other = comparison / "linear.1" / "checkpoints" / "checkpoint_last.pt"
    assert evaluate.main([str(checkpoint), str(other), "--episodes", "1"]) == 1
    assert f"{other} is linear_decision, and {checkpoint} is flowformer_decision" in capsys.readouterr().err


@pytest.mark.parametrize("name, words", [("hopper-medium-replay-v2", ["D4RL's", "Flowformer 75."]), ("mine", ["own"])])
def test_scores_of_the_papers_data_have_its_row_beside_them(name: str, words: list[str]) -> None:
    description = EpisodeDescription(name, "", [0.0], [1.0], [-1.0], [1.0], 200, 0.0, 40.0, 100.0)
    evaluation = SimpleNamespace(milliseconds=1.0, episodes=[SimpleNamespace(target=10.0, total=20.0)])
    notes = evaluate.table(description, [evaluation], [10.0]).notes
    assert len(notes) == 2 + len(words)
    assert words[0] in notes[0] and words[-1] in " ".join(notes)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--env", "CartPole-v1"], "whose actions are Discrete"),
        (["--env", "MountainCarContinuous-v0"], "states of 2 numbers and actions of 1; allowed for this checkpoint: 3"),
        (["--context", "0"], "--context is 0; allowed: full"),
        (["--context", "none"], "--context is none; allowed: full"),
    ],
)
def test_what_does_not_fit(checkpoint: Path, arguments: list[str], message: str, capsys) -> None:
    assert evaluate.main([str(checkpoint), "--episodes", "1", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_numbers_that_no_episode_has(capsys: pytest.CaptureFixture) -> None:
    """Refused before a model is loaded."""
    with pytest.raises(SystemExit):
        evaluate.main(["none.pt", "--targets", "300,nan"])
    assert "300,nan; allowed: finite" in capsys.readouterr().err
    assert evaluate.main(["none.pt", "--seed", "-1"]) == 1
    assert "--seed is -1; allowed: at least 0" in capsys.readouterr().err


def test_a_module_that_a_file_names_is_not_imported(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """gymnasium imports the part before a colon: refused if it comes from a file, accepted if typed."""
    (tmp_path / "foreign_module.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    state, name = torch.load(checkpoint), "foreign_module:Pendulum-v1"
    state["task_state"]["description"]["environment"] = name
    torch.save(state, "foreign.pt")
    assert evaluate.main(["foreign.pt", "--episodes", "1"]) == 1
    assert f"--env is not given, and foreign.pt names '{name}'" in capsys.readouterr().err
    assert not Path("imported").exists()
    assert evaluate.main(["foreign.pt", "--episodes", "1", "--targets=-300", "--env", name]) == 0
    assert Path("imported").exists()


@pytest.mark.parametrize("value", [3, None, [1.0, -1.0], {"a": 1}])
def test_a_description_that_is_none(checkpoint: Path, value, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A checkpoint's description of the data is validated like a folder's."""
    state = torch.load(checkpoint)
    state["task_state"]["description"]["std"] = value
    torch.save(state, tmp_path / "foreign.pt")
    assert evaluate.main([str(tmp_path / "foreign.pt"), "--episodes", "1"]) == 1
    assert "std is " in capsys.readouterr().err


def test_models_of_other_data_are_not_averaged(checkpoint: Path, hub, monkeypatch, capsys) -> None:
    """Data with equal names but different numbers are different data: scores use other bounds."""
    other_hub = SimpleNamespace(described=replace(hub.described, highest=hub.described.highest + 1.0))
    hubs = iter([hub, other_hub])
    monkeypatch.setattr(evaluate, "load", lambda _: next(hubs))
    assert evaluate.main([str(checkpoint), "other.pt", "--episodes", "1"]) == 1
    assert "other.pt was trained on other data than" in capsys.readouterr().err


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert evaluate.main([str(tmp_path / "none.pt")]) == 1
    assert "none.pt, which is no file; allowed" in capsys.readouterr().err


def test_other_actions_and_longer_episodes(hub: DecisionHubInterface) -> None:
    with pytest.raises(ValueError, match="up to 200 steps; allowed: at most 100, as --max-episode-length"):
        make_for("Pendulum-v1", hub.described, 100)
    description = type(hub.described)(**{**hub.described.as_dict(), "high": [1.0]})
    with pytest.raises(ValueError, match=r"actions are \[-2.0\] to \[2.0\]; allowed for this checkpoint: .*\[1.0\]"):
        make_for("Pendulum-v1", description, 200)


def test_cost(capsys: pytest.CaptureFixture) -> None:
    """A row per model and way of acting, a number per step."""
    assert cost.main(["--archs", "linear", "--steps", "3,2", "--context", "2"]) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line.strip().startswith("linear_decision")]
    assert [row.split("   ")[1].strip() for row in rows] == ["all steps anew", "from the state", "last 2 anew"]
    assert "step 2   step 3" in output
    with pytest.raises(SystemExit):
        cost.main(["--archs", "linear+forget"])
    assert "linear+forget; allowed: " in capsys.readouterr().err
