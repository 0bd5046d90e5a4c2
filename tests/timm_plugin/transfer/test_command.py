"""``python -m timm_plugin.transfer``: from a checkpoint to a checkpoint, with interruptions and refused arguments."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import load_checkpoint

from common.checkpoints import read_checkpoint
from tests.compare import assert_close
from timm_plugin import create_model, replace_attention
from timm_plugin.transfer import AttentionTransferTask
from timm_plugin.transfer.__main__ import main

NAME = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, depth=2, embed_dim=24, num_heads=2)
KWARGS = ["--model-kwargs", *(f"{name}={value}" for name, value in SMALL.items())]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with images of two classes, and a teacher's checkpoint as train.py writes it."""
    folder = tmp_path_factory.mktemp("transfer")
    random = np.random.default_rng(0)
    for i in range(12):
        path = folder / "images" / "train" / f"class{i % 2}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=3, **SMALL)
    torch.nn.init.normal_(model.head.weight)
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, folder / "teacher.pth")
    return folder


def run(made: Path, output: Path, *options: str, attn: tuple[str, ...] = ("hedgehog",)) -> None:
    common = ["--teacher", NAME, "--teacher-checkpoint", str(made / "teacher.pth"), *KWARGS]
    images = ["--data-dir", str(made / "images"), "-b", "4", "-j", "0", "--img-size", "32", "--device", "cpu"]
    main([*common, *images, "--epochs", "3", "--attn", *attn, "--output", str(output), *options])


def test_from_a_checkpoint_to_a_checkpoint(made, tmp_path, capsys):
    teacher_dir, output = tmp_path / "teacher", tmp_path / "new" / "student.pth"
    run(made, output, "--teacher-dir", str(teacher_dir), attn=("hedgehog,softmax",))
    assert {path.name for path in output.parent.iterdir()} == {"student.pth"}
    assert "blocks.0.attn: loss" in capsys.readouterr().out
    x = torch.randn(2, 3, 32, 32)
    student = create_model(
        NAME, attn_layer="hedgehog,softmax", num_classes=3, checkpoint_path=str(output), **SMALL
    ).eval()
    teacher = timm.create_model(NAME, num_classes=3, checkpoint_path=str(made / "teacher.pth"), **SMALL).eval()
    assert not torch.equal(student.blocks[0].attn.attention.query_weight, torch.eye(12).expand(2, 12, 12))
    for name, tensor in teacher.state_dict().items():
        assert torch.equal(student.state_dict()[name], tensor)
    again = timm.create_model(f"local-dir:{teacher_dir}", pretrained=True).eval()
    assert torch.equal(again(x), teacher(x))


def test_an_interrupted_run_goes_on_to_the_same_result(made, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    run(made, whole)
    calls, forward = [], AttentionTransferTask.forward

    def killed(self, *arguments):
        calls.append(1)
        if len(calls) == 8:  # in the third of three epochs
            raise KeyboardInterrupt
        return forward(self, *arguments)

    monkeypatch.setattr(AttentionTransferTask, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        run(made, parts)
    assert not parts.exists()
    with pytest.raises(SystemExit, match="of another transfer.*lr is 0.5, there 0.01"):
        run(made, parts, "--lr", "0.5")
    calls.clear()
    run(made, parts)
    assert len(calls) == 3
    uninterrupted, resumed = read_checkpoint(whole), read_checkpoint(parts)
    assert uninterrupted.keys() == resumed.keys() and all(
        torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted
    )
    assert {path.name for path in tmp_path.iterdir()} == {"whole.safetensors", "parts.safetensors"}


def test_mixed_precision(made, tmp_path):
    """The result is close to full precision, but not equal."""
    files = [tmp_path / "exact.safetensors", tmp_path / "mixed.safetensors"]
    for file, options in zip(files, ([], ["--amp"])):
        run(made, file, "--lr", "1e-3", *options)
    exact, mixed = (read_checkpoint(file) for file in files)
    name = "blocks.0.attn.attention.query_weight"
    assert not torch.equal(exact[name], mixed[name])
    assert_close(name, mixed[name], exact[name], tolerance=0.05)


def test_unfinished_work_is_that_of_one_teacher(made, tmp_path, monkeypatch):
    """The teacher is identified by its weights, whatever file they are in."""
    output, weights = tmp_path / "student.pth", tmp_path / "teacher.pth"
    checkpoint = ("--teacher-checkpoint", str(weights))
    weights.write_bytes((made / "teacher.pth").read_bytes())
    with monkeypatch.context() as patched:
        patched.setattr("timm_plugin.transfer.__main__.write", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(made, output, *checkpoint)
    with pytest.raises(SystemExit, match="of another transfer.*teacher_checkpoint is"):
        run(made, output)
    torch.save(timm.create_model(NAME, num_classes=3, **SMALL).state_dict(), weights)
    with pytest.raises(SystemExit, match="its teacher has other weights"):
        run(made, output, *checkpoint)
    weights.write_bytes((made / "teacher.pth").read_bytes())
    run(made, output, *checkpoint)  # no parameter is left to learn
    assert output.exists()


def test_places_projections_and_options(made, tmp_path):
    output = tmp_path / "student.pth"
    attn = ("blocks.0=flow", "blocks.1=lolcats")
    run(made, output, "--learn-projections", "--attn-kwargs", "window=3", "form=paper", "--no-aug", attn=attn)
    model = timm.create_model(NAME, num_classes=3, **SMALL)
    replace_attention(model, {"blocks.0": ("flow", {"form": "paper"}), "blocks.1": ("lolcats", {"window": 3})})
    load_checkpoint(model, str(output))
    teacher = torch.load(made / "teacher.pth")["state_dict"]
    assert not torch.equal(model.blocks[0].attn.qkv.weight, teacher["blocks.0.attn.qkv.weight"])
    assert torch.equal(model.blocks[0].attn.proj.weight, teacher["blocks.0.attn.proj.weight"])


@pytest.mark.parametrize(
    ("options", "attn", "said"),
    [
        (["--num-classes", "7"], ["hedgehog"], "does not fit VisionTransformer: .*head"),
        (["--model-kwargs", "img_size=32"], ["hedgehog"], "does not fit VisionTransformer"),
        (["--teacher-checkpoint", "nowhere.pth"], ["hedgehog"], "nowhere.pth"),
        (["--teacher", "resnet18"], ["hedgehog"], "unexpected keyword"),
        (
            ["--img-size", "48"],
            ["hedgehog"],
            "images are 48 x 48, and the teacher takes 32 x 32; allowed: --img-size 32",
        ),
        (["-b", "13"], ["hedgehog"], "not one whole batch"),
        (["--output", "nowhere/student.onnx"], ["hedgehog"], r"--output is nowhere/student\.onnx, .*safetensors"),
        (["--use-ema"], ["hedgehog"], "--use-ema is given, and .*teacher.pth has no averaged weights"),
        (["--data-dir", "nowhere"], ["hedgehog"], "nowhere"),
        *(
            (
                [f"--{name}", *value.split()],
                ["hedgehog"],
                f"--{name} is .*{value.split()[-1]}.*; allowed: {least} or more",
            )
            for least, values in {
                1: {"epochs": "0", "batch-size": "-3", "log-interval": "0", "in-chans": "0", "img-size": "-32"},
                0: {"num-classes": "-1", "warmup-epochs": "-1", "workers": "-1"},
            }.items()
            for name, value in values.items()
        ),
        (["--input-size", "3", "0", "32"], ["hedgehog"], r"--input-size is \[3, 0, 32\]; allowed: 1 or more"),
        (["--opt", "adamww"], ["hedgehog"], "--opt is 'adamww'; allowed: .*adamw"),
        (["--attn-kwargs", "rws=3"], ["hedgehog"], "has no option 'rws'"),
        ([], ["flow"], "--learn-projections"),
        ([], ["hedgehg"], "attention is 'hedgehg'; allowed"),
        ([], ["blocks.0-5=hedgehog"], "blocks.2 is not there"),
        ([], ["blocks.0=hedgehog", "flow"], "--attn is blocks.0=hedgehog flow; allowed"),
        ([], ["blocks.0=hedgehg"], "--attn is 'hedgehg'"),
        (["--loss", "weights", "--learn-projections"], ["flow"], "loss is weights and .* flow attention"),
    ],
)
def test_refusals(made, tmp_path, options, attn, said):
    with pytest.raises(SystemExit, match=said):
        run(made, tmp_path / "student.pth", *options, attn=attn)
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused(made, tmp_path, monkeypatch):
    """Each process would do all of the work, and write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="torchrun started 2 processes.*; allowed: .*prepare_distributed"):
        run(made, tmp_path / "student.pth")
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(made, tmp_path):
    output = tmp_path / "student.pth"
    output.write_text("mine")
    with pytest.raises(SystemExit, match="--output is .*there already"):
        run(made, output)
    assert output.read_text() == "mine"
    with pytest.raises(SystemExit, match="--teacher-dir is .*there already"):
        run(made, tmp_path / "other.pth", "--teacher-dir", str(tmp_path))
    with pytest.raises(SystemExit, match="--output is .*allowed: a file"):
        run(made, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["student.pth"]


def test_a_converted_model_is_no_teacher(made, tmp_path):
    flow = create_model(NAME, attn_layer="flow", num_classes=3, **SMALL)
    torch.save(flow.state_dict(), tmp_path / "flow.pth")
    with pytest.raises(SystemExit, match="does not fit VisionTransformer: .*not of this model"):
        run(made, tmp_path / "student.pth", "--teacher-checkpoint", str(tmp_path / "flow.pth"))
