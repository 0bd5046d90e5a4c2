"""Curves of DAFT: reading folders of timm's train.py, and drawing them."""

from pathlib import Path

import pytest
import yaml
from PIL import Image

from recipes.daft import curves

CONV = {"img_size": 32, "patch_size": 4}


def write_run(folder: Path, model: str = "daft_conv_test", top1=(20.0, 60.5, 58.0), **arguments) -> Path:
    """A folder as written by train.py."""
    folder.mkdir(parents=True)
    saved = {"model": model, "num_classes": 10, "model_kwargs": arguments, "lr": 0.001}
    (folder / "args.yaml").write_text(yaml.safe_dump(saved))
    lines = ["epoch,train_loss,eval_loss,eval_top1,eval_top5,lr"]
    lines += [f"{epoch},2.0,1.5,{value},90.0,0.001" for epoch, value in enumerate(top1)]
    (folder / "summary.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_a_run_is_read(tmp_path: Path) -> None:
    run = curves.read_run(write_run(tmp_path / "one", window=3, **CONV))
    assert (run.name, run.model, run.epochs, run.top1) == ("one", "daft_conv_test", [1, 2, 3], [20.0, 60.5, 58.0])
    assert run.arguments == {"num_classes": 10, "window": 3, **CONV}


@pytest.mark.parametrize(
    ("model", "arguments", "across", "expected"),
    [
        ("daft_conv_test", {"window": 3}, "kernel_size", ("daft_conv_test, with what is outside", 3)),
        ("daft_conv_test", {"local_only": True}, "kernel_size", ("daft_conv_test, window alone", 5)),
        ("deit_tiny_patch16_224", {"embed_dim": 96, "depth": 1}, "width", ("deit_tiny_patch16_224", 96)),
    ],
)
def test_where_a_run_stands(tmp_path: Path, model: str, arguments: dict, across: str, expected: tuple) -> None:
    """A run's x value comes from the model that its arguments build, with the model's defaults."""
    assert curves.place(curves.read_run(write_run(tmp_path / "run", model, **CONV, **arguments)), across) == expected


@pytest.mark.parametrize("across", curves.AXES)
def test_pictures_are_drawn(tmp_path: Path, across: str, capsys: pytest.CaptureFixture) -> None:
    folders = [
        str(write_run(tmp_path / f"{window}_{local}", window=window, local_only=local, **CONV))
        for window in (3, 5)
        for local in (False, True)
    ]
    target = tmp_path / "curves.png"
    assert curves.main(["--runs", *folders, "--across", across, "--output", str(target)]) == 0
    assert "Ready: " in capsys.readouterr().out
    with Image.open(target) as image:
        assert image.width > 600


@pytest.mark.parametrize(
    ("more", "top1", "same"),
    [([], (60.5, 20.0, 58.0), (20.0, 61.0, 58.0)), (["--best"], (58.0, 61.0, 20.0), (61.0, 1.0, 2.0))],
)
def test_one_epoch_alone_is_drawn(tmp_path: Path, more: list[str], top1: tuple, same: tuple) -> None:
    """Only the last epoch is drawn, or the best one with ``--best``."""
    for name, values in (("one", top1), ("other", same)):
        folder = str(write_run(tmp_path / name, top1=values, **CONV))
        picture = ["--across", "width", "--output", str(tmp_path / f"{name}.png")]
        assert curves.main(["--runs", folder, *picture, *more]) == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


def test_what_cannot_be_drawn(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One line on stderr, and no picture."""
    folder = write_run(tmp_path / "run", **CONV)
    deit_run = write_run(tmp_path / "deit", "deit_tiny_patch16_224", **CONV)
    unknown = write_run(tmp_path / "unknown", "no_model")
    empty, odd = write_run(tmp_path / "empty", top1=()), write_run(tmp_path / "odd")
    short = write_run(tmp_path / "short", top1=(20.0,), **CONV)
    (odd / "summary.csv").write_text("epoch,loss\n0,1\n")
    for command, named in (
        (["--runs", str(tmp_path / "none")], "none, which has no summary.csv; allowed"),
        (["--runs", str(empty)], "has no epoch; allowed"),
        (["--runs", str(odd)], "odd, whose files are not those of train.py"),
        (["--runs", str(deit_run), "--across", "kernel_size"], "windows are none; allowed"),
        (["--runs", str(unknown), "--across", "width"], "cannot be built as no_model"),
        (["--runs", str(folder), str(short), "--across", "width"], "(run 3, short 1); allowed"),
        (["--runs", str(folder), "--best"], "--best is passed; allowed"),
    ):
        assert curves.main([*command, "--output", str(tmp_path / "c.png")]) == 1
        assert named in capsys.readouterr().err
    assert not (tmp_path / "c.png").exists()
