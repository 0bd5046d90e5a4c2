"""Answers of trained models, written to files and evaluated as in the official evaluation."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from recipes.triviaqa import answer
from recipes.triviaqa.evaluate import score
from tests.fairseq_plugin.helpers.commands import run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.spans import training_command, write_names


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two trainings, one of which hardly learns; costs the start of a process."""
    root = tmp_path_factory.mktemp("answers")
    data = write_names(root / "data-bin")
    commands = [
        training_command(data, str(root / arch), arch, "--lr", rate, "--max-epoch", "3")
        for arch, rate in (("flash_mlm", "1e-2"), ("roberta", "1e-9"))
    ]
    logs = run_in_turn(*(("fairseq_cli.train", command, "") for command in commands))
    paths = [root / arch / "checkpoint_last.pt" for arch in ("flash_mlm", "roberta")]
    return SimpleNamespace(data=data, paths=paths, valid=[entries(log, "valid")[-1] for log in logs])


def test_the_best_of_several_checkpoints_answers(trained, tmp_path, capsys):
    """Scores equal those of validation; the best checkpoint's answers are written, name -> text."""
    output = tmp_path / "answers" / "predictions.json"
    arguments = ["--data", str(trained.data), "--output", str(output), "--batch-size", "7"]
    answer.main([*map(str, trained.paths), *arguments])
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if "_last.pt" in line]
    for row, path, valid in zip(rows, trained.paths, trained.valid):
        assert row[:3] == [str(path), f"{valid['valid_f1']:.2f}", f"{valid['valid_em']:.2f}"]
    assert [row[3:] for row in rows] == [["True"], ["False"]]
    answers = json.loads(output.read_text())
    gold = {
        question["name"]: question["answers"]
        for question in json.loads((trained.data / "valid.json").read_text())["questions"]
    }
    assert answers.keys() == gold.keys()
    assert score(answers, gold).f1 == pytest.approx(trained.valid[0]["valid_f1"], abs=0.01)
    assert any(answers[name] == texts[0] for name, texts in gold.items())


def test_checkpoints_that_are_none(trained, tmp_path, capsys):
    state = torch.load(trained.paths[0])
    for name in ("masked_lm", "flash_lm"):
        changed = copy.deepcopy(state)
        if name == "masked_lm":
            changed["cfg"]["task"] = {"_name": name, "data": str(trained.data), "tokens_per_sample": 32, "seed": 1}
        else:
            changed["cfg"]["model"] = {"_name": name}
        torch.save(changed, tmp_path / f"{name}.pt")
    for path, message in (
        (tmp_path / "nothing.pt", "which is no file"),
        (trained.data / "dict.txt", "dict.txt"),
        (tmp_path / "masked_lm.pt", "of --task masked_lm"),
        (tmp_path / "flash_lm.pt", "of a flash_lm"),
    ):
        with pytest.raises(SystemExit):
            answer.main([str(path), "--data", str(trained.data)])
        error = capsys.readouterr().err
        assert message in error and "allowed" in error


def test_a_folder_without_the_split(trained, capsys):
    with pytest.raises(SystemExit):
        answer.main([str(trained.paths[0]), "--data", str(trained.data), "--split", "test"])
    assert "has no split test; allowed: train, valid" in capsys.readouterr().err
