"""Behaviour cloning and AWAC through fairseq's commands: they learn, AWAC goes on as if never stopped, both act."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_baselines import AdvantageWeightedActorCritic, BehaviourCloning
from tests.fairseq_plugin.helpers.commands import NamedRuns, run_named
from tests.fairseq_plugin.helpers.episodes import STATE, training_command, write_episodes
from tests.fairseq_plugin.helpers.logs import entries, losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """The output of every command, all in one process; one training is stopped after an epoch and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    write_episodes(folder / "data")

    def train(save_dir: Path, arch: str, *arguments: str) -> tuple[str, list[str], str]:
        words = training_command(folder / "data", save_dir, arch, *arguments)
        at = words.index("--decoder-attention-heads")  # no option of these
        return "fairseq_cli.train", [*words[:at], *words[at + 2 :]], ""

    awac = ("--criterion", "awac", "--max-epoch", "3")
    commands = {
        "bc": train(folder / "bc", "bc_decision", "--max-epoch", "3"),
        "whole": train(folder / "whole", "awac_decision", *awac),
        "begun": train(folder / "parts", "awac_decision", *awac, "--max-epoch", "1"),
        "resumed": train(folder / "parts", "awac_decision", *awac),
    }
    return run_named(folder, commands)


def test_they_learn(runs: NamedRuns) -> None:
    """The errors of actions of a clone; those of AWAC's critics, and of its actions, which its log has too."""
    first, last = (entries(runs.outputs["bc"], "train")[i]["train_loss"] for i in (0, -1))
    assert last < first
    first, last = (entries(runs.outputs["whole"], "train")[i] for i in (0, -1))
    assert last["train_critic_loss"] < first["train_critic_loss"]
    assert 0.0 < last["train_action_mse"] < 1.0  # two actions are as likely in a state


def test_awac_goes_on_as_if_never_stopped(runs: NamedRuns) -> None:
    """Critics, slow copies, random actions and Adam's state come back: the same losses, the same weights."""
    begun, resumed, whole = (losses(runs.outputs[name]) for name in ("begun", "resumed", "whole"))
    assert begun + resumed == whole
    one, other = (torch.load(runs.folder / name / "checkpoint_last.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one) and int(one["updates"]) > 0


@pytest.mark.parametrize("run, kind", [("bc", BehaviourCloning), ("whole", AdvantageWeightedActorCritic)])
def test_they_act_whatever_is_asked_for(runs: NamedRuns, run: str, kind: type) -> None:
    """Loaded by their own class and by the common one, from a window and from the state."""
    actions = []
    for model, target, context in ((kind, 0.0, None), (DecisionModel, 10.0, "full")):
        hub = model.from_pretrained(str(runs.folder / run), "checkpoint_last.pt")
        hub.reset(target, context)
        actions.append([hub.act(np.full(STATE, 4.0)), hub.act(np.full(STATE, 6.0), 1.0)])
    assert np.allclose(*actions, atol=1e-6) and not np.allclose(actions[0][0], actions[0][1])
