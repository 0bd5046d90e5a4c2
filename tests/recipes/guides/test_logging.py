"""TensorBoard's files hold what the log lines say: of a training by fairseq, and of a summary that timm wrote."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from timm.utils import update_summary

from tests.fairseq_plugin.helpers.commands import run_in_turn, training_command
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.text import write_text
from tests.processes import CHECKOUT
from tests.readmes import blocks


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value of the scalars in ``folder``."""
    events = EventAccumulator(str(folder)).Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_fairseq_writes_its_log_lines(tmp_path: Path) -> None:
    """Every folder of the page's table, with the tags and the values of the lines, by the number of updates."""
    write_text(tmp_path)
    preprocess = "--only-source --trainpref train.txt --validpref valid.txt --destdir bin --workers 1".split()
    arguments = "--tensorboard-logdir runs --max-update 3 --log-interval 1".split()
    train = training_command("bin", "checkpoints", "flowformer_lm", *arguments)
    commands = (("fairseq_cli.preprocess", preprocess, ""), ("fairseq_cli.train", train, ""))
    output = run_in_turn(*commands, cwd=str(tmp_path))[-1]
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"train_inner", "train", "valid"}
    for name, count in (("train_inner", 3), ("train", 1), ("valid", 1)):
        lines, written = entries(output, name), scalars(tmp_path / "runs" / name)
        assert len(lines) == count
        prefix = "" if name == "train_inner" else f"{name}_"
        for tag in ("loss", "ppl", "wpb"):
            expected = {int(line.get(f"{prefix}num_updates", i)): line[prefix + tag] for i, line in enumerate(lines, 1)}
            assert written[tag] == pytest.approx(expected, rel=1e-5)


def test_a_summary_of_timm_becomes_a_file_of_tensorboard(tmp_path: Path) -> None:
    """By the lines that the page shows, where a training that went on has written the names of the columns again."""
    folder = tmp_path / "output" / "first"
    folder.mkdir(parents=True)
    for epoch in range(3):
        metrics = {"loss": 2.0 - epoch, "top1": 10.0 * epoch, "top5": 50.0}
        update_summary(
            epoch, {"loss": 1.5 - epoch}, metrics, filename=str(folder / "summary.csv"), lr=0.1 / (epoch + 1)
        )
    (code,) = (x.code for x in blocks(CHECKOUT / "recipes" / "guides" / "logging.md") if x.language == "python")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    with open(folder / "summary.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["epoch"] != "epoch"]
    written = scalars(tmp_path / "runs" / "first")
    assert written.keys() == rows[0].keys() - {"epoch"} and len(rows) == 3
    for tag, values in written.items():
        assert values == pytest.approx({int(row["epoch"]): float(row[tag]) for row in rows}, rel=1e-6)
