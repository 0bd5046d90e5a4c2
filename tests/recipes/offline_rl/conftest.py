"""Data of Pendulum-v1, and tiny models trained on it by the comparison's commands."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from recipes.offline_rl import collect, random_search
from recipes.offline_rl.compare import train_arguments
from recipes.offline_rl.random_search import Settings
from recipes.shared.trainings import TrainingResult
from tests.fairseq_plugin.helpers.commands import run_in_turn
from tests.processes import CHECKOUT

NAMES, UPDATES = ("flowformer", "linear"), 10
#: Settings of a search that takes 0.1 seconds.
TINY = Settings(directions=2, best=2)


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a comparison with collected data and complete trainings."""
    pytest.importorskip("gymnasium")
    out = tmp_path_factory.mktemp("comparison")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        patch.setitem(random_search.SETTINGS, "Pendulum", TINY)
        collect.collect("Pendulum-v1", 1e-6, out / "behaviour", grades=2, episodes=3)
    commands = {}
    for name in NAMES:
        arguments = train_arguments(out / "behaviour" / "data", name, "10", UPDATES, 1)
        saved = ["--save-dir", str(out / f"{name}.1" / "checkpoints"), "--log-format", "json", "--cpu"]
        commands[name] = [str(x) for x in arguments] + saved
    outputs = run_in_turn(*(("fairseq_cli.train", command, "") for command in commands.values()), cwd=str(CHECKOUT))
    for name, output in zip(NAMES, outputs):
        (out / f"{name}.1" / "train.log").write_text(output)
        trained = TrainingResult(f"{name}.1", "fairseq-train ...", 60.0, 2**30, "2026-11-22", "a machine", "versions")
        (out / f"{name}.1" / "result.json").write_text(json.dumps(trained._asdict()))
    return out
