"""A training with a truncated last checkpoint continues from the newest complete one."""

import os
from pathlib import Path

import pytest
import torch

from recipes.shared.last_checkpoint import restore_last


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder as written by fairseq-train, with update 6 as the newest file."""
    for time, (name, update) in enumerate((("checkpoint_1_6.pt", 6), ("checkpoint_best.pt", 3)), start=1):
        torch.save({"update": update}, tmp_path / name)
        os.utime(tmp_path / name, (10 - time, 10 - time))
    return tmp_path


@pytest.mark.parametrize("cut_to", [0, 100])
def test_a_copy_that_was_cut_short(checkpoints: Path, cut_to: int, capsys: pytest.CaptureFixture) -> None:
    """The truncated copy is reported, and the other files are kept."""
    last = checkpoints / "checkpoint_last.pt"
    last.write_bytes((checkpoints / "checkpoint_1_6.pt").read_bytes()[:cut_to])
    restore_last(checkpoints)
    assert torch.load(last) == {"update": 6} and "checkpoint_1_6.pt" in capsys.readouterr().out
    assert sorted(x.name for x in checkpoints.iterdir()) == ["checkpoint_1_6.pt", "checkpoint_best.pt", last.name]


def test_a_whole_file_stays_as_it_is(checkpoints: Path, capsys: pytest.CaptureFixture) -> None:
    """A folder without a checkpoint, as at the beginning, is not changed either."""
    restore_last(checkpoints)
    assert not (checkpoints / "checkpoint_last.pt").exists()
    torch.save({"update": 9}, checkpoints / "checkpoint_last.pt")
    restore_last(checkpoints)
    assert torch.load(checkpoints / "checkpoint_last.pt") == {"update": 9} and capsys.readouterr().out == ""


def test_without_another_the_training_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The restart is reported."""
    (tmp_path / "checkpoint_last.pt").write_bytes(b"")
    restore_last(tmp_path)
    assert not list(tmp_path.iterdir()) and "anew" in capsys.readouterr().out
