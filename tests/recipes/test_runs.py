"""The layer below comparisons: resumption, failures, logs and tables, with a stand-in for fairseq-train."""

import json

import pytest
import torch

from recipes import runs
from recipes.runs import Run

#: Logs a result, and fails for the seed 3.
TRAINER = """
import sys
seed = sys.argv[1]
print('x | INFO | test |', '{"test_accuracy": "%s", "test_num_updates": "8"}' % (50 + int(seed)))
sys.exit(seed == '3')
"""


def plan(*seeds):
    """Trainings of two models."""
    return [Run(model, seed, ["-c", TRAINER, seed], (), False) for seed in seeds for model in ("a", "b")]


def read(folder):
    return {"accuracy": runs.points(folder / "train.log").accuracy.iloc[-1]}


def test_a_second_run_trains_only_what_is_missing_and_tables_have_mean_and_deviation(tmp_path, capsys):
    first = runs.train_all(plan(1), tmp_path, 2, read)
    before = (tmp_path / "runs/a.1/train.log").read_text()
    found = runs.train_all(plan(1, 2), tmp_path, 1, read)
    assert (tmp_path / "runs/a.1/train.log").read_text() == before and len(first) == 2
    table = runs.table(found, {"accuracy": ("accuracy", runs.spread(1)), "seeds": ("seed", "count")})
    assert table.to_dict("records")[1] == {"model": "b", "accuracy": "51.5 ± 0.7", "seeds": 2}
    runs.report(tmp_path, {"Title": table}, ["a note"], found)
    text = (tmp_path / "results.md").read_text()
    assert "51.5 ± 0.7 |" in text and "* a note" in text and text in capsys.readouterr().out
    assert len(json.loads((tmp_path / "results.json").read_text())) == 4


def test_a_failure_is_named_does_not_stop_others_and_goes_on_later(tmp_path, capsys):
    assert set(runs.train_all(plan(3, 1), tmp_path, 1, read).seed) == {1}
    assert "a.3 failed" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="no training is complete"):
        runs.train_all(plan(3), tmp_path, 1, read)
    assert (tmp_path / "runs/a.3/train.log").read_text().count("INFO") == 2


def test_folders_of_another_command_or_of_others_are_refused_and_stay_as_they_are(tmp_path, capsys):
    runs.train_all(plan(1), tmp_path, 1, read)
    log = (tmp_path / "runs/a.1/train.log").read_text()
    with pytest.raises(SystemExit, match=r"a\.1 was begun with"):
        runs.train_all([Run("a", 1, ["-c", "pass"], (), False)], tmp_path, 1, read)
    with pytest.raises(SystemExit, match="something else"):
        runs.begin(tmp_path, ["recipes.lra.compare"])
    (tmp_path / "p.png").touch()
    parser = runs.parser("about", "work")
    parser.add_argument("--output", type=runs.new_file)
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", str(tmp_path / "p.png")])
    assert "p.png exists" in capsys.readouterr().err
    assert (tmp_path / "runs/a.1/train.log").read_text() == log


def test_points_of_a_repeated_update_are_the_later_ones(tmp_path):
    lines = [(1, 3.0), (2, 2.0), (2, 2.5), (3, 1.0)]
    logged = [json.dumps({"num_updates": str(update), "train_loss": loss}) for update, loss in lines]
    (tmp_path / "log").write_text("".join(f"2026-11-28 | INFO | train | {words}\n" for words in logged))
    assert runs.points(tmp_path / "log").loss.tolist() == [3.0, 2.5, 1.0]


def test_published_tables_and_reaches():
    assert runs.published("flowformer", "6").loc["JAPANESEVOWELS", "FLOW. (OURS)"] == "98.9"
    assert runs.reach_arguments("local", 256) == ["--local-window", 64]
    assert runs.reach_arguments("softmax", 256) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts memory of the GPU")
def test_measurements():
    x = torch.zeros(2**18)
    assert 2**20 <= runs.peak_bytes(lambda: x + 1) < 2**20 + 10_000
    times = runs.in_turns({"short": lambda: None, "long": lambda: sum(range(10_000))}, rounds=2)
    assert times["long"] > times["short"]
