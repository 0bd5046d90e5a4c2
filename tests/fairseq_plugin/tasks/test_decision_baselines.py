"""Behaviour cloning and AWAC through fairseq's commands: they learn, AWAC goes on as if never stopped, both act."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_baselines import AdvantageWeightedActorCritic, BehaviourCloning
from tests.fairseq_plugin.helpers.commands import run_in_turn
from tests.fairseq_plugin.helpers.episodes import SIZES, STATE, training_command, write_episodes
from tests.fairseq_plugin.helpers.logs import entries, losses


def command(data: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """A short training; heads are no option of these."""
    words = training_command(data, save_dir, arch, *arguments)
    at = words.index("--decoder-attention-heads")
    return [*words[:at], *words[at + 2 :]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The output of every command, all in one process; one training is stopped after an epoch and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    write_episodes(folder / "data")
    awac = ("--criterion", "awac", "--max-epoch", "3")
    commands = {
        "bc": command(folder / "data", folder / "bc", "bc_decision", "--max-epoch", "3"),
        "whole": command(folder / "data", folder / "whole", "awac_decision", *awac),
        "begun": command(folder / "data", folder / "parts", "awac_decision", *awac, "--max-epoch", "1"),
        "resumed": command(folder / "data", folder / "parts", "awac_decision", *awac),
    }
    found = run_in_turn(*(("fairseq_cli.train", words, "") for words in commands.values()))
    return {**dict(zip(commands, found)), "folder": folder}


def test_they_learn(runs: dict) -> None:
    """The errors of actions of a clone; those of AWAC's critics, and of its actions, which its log has too."""
    first, last = (entries(runs["bc"], "train")[i]["train_loss"] for i in (0, -1))
    assert last < first and SIZES["decoder_embed_dim"] == 16
    first, last = (entries(runs["whole"], "train")[i] for i in (0, -1))
    assert last["train_critic_loss"] < first["train_critic_loss"]
    assert 0.0 < last["train_action_mse"] < 1.0  # two actions are as likely in a state


def test_awac_goes_on_as_if_never_stopped(runs: dict) -> None:
    """Critics, slow copies, random actions and Adam's state come back: the same losses, the same weights."""
    assert losses(runs["begun"]) + losses(runs["resumed"]) == losses(runs["whole"])
    one, other = (torch.load(runs["folder"] / name / "checkpoint_last.pt")["model"] for name in ("whole", "parts"))
    assert all(torch.equal(one[name], other[name]) for name in one) and int(one["updates"]) > 0


@pytest.mark.parametrize("run, kind", [("bc", BehaviourCloning), ("whole", AdvantageWeightedActorCritic)])
def test_they_act_whatever_is_asked_for(runs: dict, run: str, kind: type) -> None:
    """Loaded by their own class and by the common one, from a window and from the state."""
    found = []
    for model, target, context in ((kind, 0.0, None), (DecisionModel, 10.0, "full")):
        hub = model.from_pretrained(str(runs["folder"] / run), "checkpoint_last.pt")
        hub.reset(target, context)
        found.append([hub.act(np.full(STATE, 4.0)), hub.act(np.full(STATE, 6.0), 1.0)])
    assert np.allclose(*found, atol=1e-6) and not np.allclose(found[0][0], found[0][1])


def test_another_criterion_is_refused(runs: dict) -> None:
    """Either way, by name."""
    for arch, criterion, wanted in (("awac_decision", "action_mse", "awac"), ("bc_decision", "awac", "action_mse")):
        words = command(runs["folder"] / "data", runs["folder"] / "no", arch, "--criterion", criterion)
        with pytest.raises(AssertionError, match=f"--criterion is {criterion}; allowed .* this --arch: {wanted}"):
            run_in_turn(("fairseq_cli.train", words, ""))
