"""Sets of trainings: completed ones are skipped, interrupted ones resume, other settings are refused."""

import json
import subprocess
import sys
import threading

import pytest

from recipes.shared import fairseq_log, fairseq_training, trainings
from recipes.shared.fairseq_log import Point
from recipes.shared.trainings import Training, read_points, read_trained, train_all
from tests.processes import CHECKOUT

# Replaces fairseq-train: four updates, the last one's number in a checkpoint (a zip file as torch writes), and
# --fail-at.
PROGRAM = """
import argparse, json, os, pathlib, zipfile
parser = argparse.ArgumentParser()
for name in ("data", "--max-update", "--fail-at", "--save-dir", "--log-format", "--seed"):
    parser.add_argument(name, type=int if name in ("--max-update", "--fail-at") else str)
options = parser.parse_args()
folder = pathlib.Path(options.save_dir)
folder.mkdir(parents=True, exist_ok=True)
last = folder / "checkpoint_last.pt"
start = int(zipfile.ZipFile(last).read("update")) if last.exists() else 0
print("threads", os.environ["OMP_NUM_THREADS"])
for update in range(start + 1, options.max_update + 1):
    if update == options.fail_at and start == 0:
        raise SystemExit("out of luck")
    values = {"epoch": 1, "loss": str(1 / update), "wall": "9", "wps": "1", "num_updates": str(update)}
    print(f"2026-11-22 07:00:0{update} | INFO | train_inner | {json.dumps(values)}")
    if update % 2 == 0:
        with zipfile.ZipFile(last, "w") as file:
            file.writestr("update", str(update))
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return [path]


def training(name, updates=4, **further):
    options = [word for option, value in further.items() for word in (f"--{option.replace('_', '-')}", value)]
    return Training(name, ["data-bin", "--max-update", updates, *options])


def test_results_are_kept_and_not_made_again(tmp_path, program):
    out = tmp_path / "out"
    outcome = train_all([training("a", seed=1), training("b", seed=2)], out, 2, program)
    assert list(outcome.trained) == ["a", "b"] and not outcome.failed
    stored = json.loads((out / "b" / "result.json").read_text())
    assert stored["seconds"] == 3.0 and stored["date"] and stored["machine"] and "--seed 2" in stored["command"]
    assert [point.update for point in read_points(out / "a")] == [1, 2, 3, 4]
    assert "threads 1\n" in (out / "a" / "train.log").read_text()
    (out / "a" / "checkpoints" / "checkpoint_last.pt").unlink()
    results = train_all([training("b", seed=2), training("a", seed=1), training("c")], out, 1, program)
    assert results.trained["a"] == outcome.trained["a"] and list(results.trained) == ["b", "a", "c"]
    assert not (out / "a" / "checkpoints" / "checkpoint_last.pt").exists()


def test_an_interrupted_training_goes_on_from_its_last_checkpoint(tmp_path, program):
    planned = [training("a", fail_at=4), training("b")]
    first = train_all(planned, tmp_path, 1, program)
    assert list(first.trained) == ["b"] and "out of luck" in first.failed["a"]
    assert read_trained(tmp_path / "a") is None
    second = train_all(planned, tmp_path, 1, program)
    assert list(second.trained) == ["a", "b"]
    # Updates 1 to 3, then 3 again, from the checkpoint of update 2, and 4: 2 seconds and 1 second.
    assert second.trained["a"].seconds == 3.0
    assert [point.update for point in read_points(tmp_path / "a")] == [1, 2, 3, 4]


def test_a_training_goes_on_where_the_last_checkpoint_was_cut_short(tmp_path, program):
    planned = [training("a", fail_at=4)]
    train_all(planned, tmp_path, 1, program)
    (tmp_path / "a" / "checkpoints" / "checkpoint_last.pt").write_bytes(b"PK")
    # From the beginning, since there is no other checkpoint; the program fails again, only in its first part.
    assert "out of luck" in train_all(planned, tmp_path, 1, program).failed["a"]
    assert list(train_all(planned, tmp_path, 1, program).trained) == ["a"]


def test_a_folder_is_trained_in_by_one_run_at_a_time(tmp_path, program):
    """The second of two runs ends at once and names the folder; the first continues."""
    slow = tmp_path / "slow.py"
    slow.write_text("import time\n" + PROGRAM.replace("    values =", "    time.sleep(1.5)\n    values ="))
    out = tmp_path / "out"
    first = threading.Thread(target=train_all, args=([training("a")], out, 1, [slow]))
    first.start()
    while not (out / "a" / "train.log").exists():
        assert first.is_alive()
    script = "import sys; from pathlib import Path; from recipes.shared.working_folder import working_folder\n"
    script += "with working_folder(Path(sys.argv[1]), 'recipes.shared.trainings'): pass"
    second = subprocess.run(
        [sys.executable, "-c", script, out / "a"], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True, check=False
    )
    assert "FolderInUse: another run" in second.stderr and f"{out / 'a'}; allowed" in second.stderr
    first.join()
    assert read_trained(out / "a") is not None


@pytest.mark.parametrize("other", [{"seed": 2}, {"updates": 5}, {}])
def test_other_settings_in_one_folder_are_refused(tmp_path, program, other):
    train_all([training("a", seed=1)], tmp_path, 1, program)
    changed = "--seed" if other.get("updates", 4) == 4 else "--max-update"
    keep = {"seed": 1} if "updates" in other else {}
    with pytest.raises(ValueError, match=f"{changed} is .*allowed in .*a: [14]"):
        train_all([training("new"), training("a", **{**keep, **other})], tmp_path, 1, program)
    assert not (tmp_path / "new").exists()


def test_two_trainings_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="2 trainings are called a"):
        train_all([training("a"), training("a", seed=2)], tmp_path)


def test_an_interruption_ends_all(tmp_path, program, monkeypatch):
    """The main thread is interrupted while two trainings run and a third waits."""
    started, original = threading.Event(), trainings.as_completed

    def interrupted(futures):
        started.wait(60)
        raise KeyboardInterrupt

    def run(command, log, on_line, **options):
        started.set()
        while True:
            on_line("x")

    monkeypatch.setattr(trainings, "as_completed", interrupted)
    monkeypatch.setattr(fairseq_training, "run", run)
    planned = [training(name) for name in "abc"]
    with pytest.raises(KeyboardInterrupt):
        train_all(planned, tmp_path, 2, program)
    monkeypatch.undo()
    assert trainings.as_completed is original
    assert not (tmp_path / "c").exists()
    assert list(train_all(planned, tmp_path, 2, program).trained) == ["a", "b", "c"]


def test_points_of_a_continued_log_are_those_of_one_run():
    def line(split, update, loss):
        prefix = "" if split == "train_inner" else f"{split}_"
        values = {"epoch": 1, f"{prefix}loss": str(loss), f"{prefix}num_updates": str(update)}
        return f"2026-11-22 07:00:00 | INFO | {split} | {json.dumps(values)}"

    def evaluated(update, loss):
        return [line(split, update, loss) for split in ("train_inner", "valid", "test")]

    # Two updates, the first one saved; then resumed from it.
    lines = [*evaluated(1, 3.0), *evaluated(2, 2.0), "$ again", *evaluated(2, 1.5), *evaluated(3, 1.0)]
    points = fairseq_log.parse_points(lines)
    assert points[1] == Point("valid", 1, 1, {"loss": 3.0})
    assert [(p.split, p.update, p.values["loss"]) for p in points[2:]] == [
        ("test", 1, 3.0),
        *((split, update, loss) for update, loss in ((2, 1.5), (3, 1.0)) for split in ("train_inner", "valid", "test")),
    ]
