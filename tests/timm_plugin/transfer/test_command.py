"""``python -m timm_plugin.transfer``: from a checkpoint to a checkpoint, its settings, interruptions and refusals."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import load_checkpoint

from common.checkpoints import read_checkpoint
from tests.compare import assert_close
from tests.timm_plugin.helpers import VIT, assert_same, vit
from timm_plugin import create_model, replace_attention
from timm_plugin.transfer import AttentionTransferTask
from timm_plugin.transfer.__main__ import main

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
    model = vit(**SMALL)
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        torch.nn.init.normal_(block.attn.qkv.weight, std=0.3)
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, folder / "teacher.pth")
    return folder


def run(made: Path, output: Path, *options: str, attn: tuple[str, ...] = ("hedgehog",)) -> None:
    common = ["--teacher", VIT, "--teacher-checkpoint", str(made / "teacher.pth"), *KWARGS]
    images = ["--data-dir", str(made / "images"), "-b", "4", "-j", "0", "--img-size", "32", "--device", "cpu"]
    main([*common, *images, "--epochs", "3", "--attn", *attn, "--output", str(output), *options])


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory) -> dict:
    """The student of an uninterrupted run with default settings, and of one with SGD."""
    folder = tmp_path_factory.mktemp("whole")
    run(made, folder / "adamw.safetensors")
    run(made, folder / "sgd.safetensors", "--opt", "sgd", "--lr", "1e-3")
    return {name: read_checkpoint(folder / f"{name}.safetensors") for name in ("adamw", "sgd")}


def test_from_a_checkpoint_to_a_checkpoint(made, tmp_path, capsys):
    teacher_dir, output = tmp_path / "teacher", tmp_path / "new" / "student.pth"
    run(made, output, "--teacher-dir", str(teacher_dir), attn=("hedgehog,softmax",))
    assert {path.name for path in output.parent.iterdir()} == {"student.pth"}
    assert "blocks.0.attn: loss" in capsys.readouterr().out
    arguments = dict(SMALL, num_classes=3)
    student = create_model(VIT, attn_layer="hedgehog,softmax", checkpoint_path=str(output), **arguments)
    teacher = timm.create_model(VIT, checkpoint_path=str(made / "teacher.pth"), **arguments)
    assert not torch.equal(student.blocks[0].attn.attention.query_weight, torch.eye(12).expand(2, 12, 12))
    assert_same({name: student.state_dict()[name] for name in teacher.state_dict()}, teacher.state_dict())
    assert_same(timm.create_model(f"local-dir:{teacher_dir}", pretrained=True).state_dict(), teacher.state_dict())


def test_places_projections_and_options(made, tmp_path):
    output = tmp_path / "student.pth"
    attn = ("blocks.0=flow", "blocks.1=lolcats")
    run(made, output, "--learn-projections", "--attn-kwargs", "window=3", "form=paper", "--no-aug", attn=attn)
    model = vit(**SMALL)
    replace_attention(model, {"blocks.0": ("flow", {"form": "paper"}), "blocks.1": ("lolcats", {"window": 3})})
    load_checkpoint(model, str(output))
    teacher = torch.load(made / "teacher.pth")["state_dict"]
    assert not torch.equal(model.blocks[0].attn.qkv.weight, teacher["blocks.0.attn.qkv.weight"])
    assert torch.equal(model.blocks[0].attn.proj.weight, teacher["blocks.0.attn.proj.weight"])


WEIGHT = "blocks.0.attn.attention.query_weight"


@pytest.mark.parametrize(
    "setting",
    ["--lr 1e-2", "--clip-grad 1e-3", "--weight-decay 10", "--seed 1", "--warmup-epochs 1", "--epochs 2", "--no-aug"]
    + ["--loss weights", "--amp"],
)
def test_a_setting_has_an_effect(made, whole, tmp_path, setting):
    run(made, tmp_path / "other.safetensors", "--opt", "sgd", "--lr", "1e-3", *setting.split())
    other = read_checkpoint(tmp_path / "other.safetensors")[WEIGHT]
    assert not torch.equal(other, whole["sgd"][WEIGHT])
    if setting == "--amp":
        assert_close(WEIGHT, other, whole["sgd"][WEIGHT], tolerance=0.05)


def test_an_interrupted_run_goes_on_to_the_same_result(made, whole, tmp_path, monkeypatch):
    """Each epoch has random numbers of its own, and the learning rate falls to the end."""
    output, seen, forward = tmp_path / "parts.safetensors", [], AttentionTransferTask.forward

    def killed(self, images, target=None):
        seen.append(images)
        if len(seen) == 8:  # in the third of three epochs
            raise KeyboardInterrupt
        return forward(self, images, target)

    monkeypatch.setattr(AttentionTransferTask, "forward", killed)
    with pytest.raises(KeyboardInterrupt):
        run(made, output)
    assert not output.exists() and not torch.equal(seen[0], seen[3])
    with pytest.raises(SystemExit, match="of another transfer.*lr is 0.5, there 0.01"):
        run(made, output, "--lr", "0.5")
    steps = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *_: (steps.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    run(made, output)
    assert len(seen) == 8 + 3 and torch.equal(seen[8], seen[6])
    assert 0 < steps[-1] < steps[0] < 1e-2
    assert_same(read_checkpoint(output), whole["adamw"])
    assert {path.name for path in tmp_path.iterdir()} == {"parts.safetensors"}


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
    torch.save(vit(**SMALL).state_dict(), weights)
    with pytest.raises(SystemExit, match="its teacher has other weights"):
        run(made, output, *checkpoint)
    weights.write_bytes((made / "teacher.pth").read_bytes())
    run(made, output, *checkpoint)  # no parameter is left to learn
    assert output.exists()


#: Options whose values are counts, with a value that is too small and the smallest one.
COUNTS = {"epochs": ("0", 1), "batch-size": ("-3", 1), "log-interval": ("0", 1), "in-chans": ("0", 1)}
COUNTS |= {"img-size": ("-32", 1), "num-classes": ("-1", 0), "warmup-epochs": ("-1", 0), "workers": ("-1", 0)}
#: Options, --attn, and the message.
REFUSED = [
    ("--num-classes 7", "hedgehog", "does not fit VisionTransformer: .*head"),
    ("--model-kwargs img_size=32", "hedgehog", "does not fit VisionTransformer"),
    ("--teacher-checkpoint {folder}/flow.pth", "hedgehog", "does not fit VisionTransformer: .*not of this model"),
    ("--teacher resnet18", "hedgehog", "unexpected keyword"),
    ("--img-size 48", "hedgehog", "images are 48 x 48, and the teacher takes 32 x 32; allowed: --img-size 32"),
    ("-b 13", "hedgehog", "not one whole batch"),
    ("--output nowhere/student.onnx", "hedgehog", r"--output is nowhere/student\.onnx, .*safetensors"),
    ("--output {folder}/folder", "hedgehog", "--output is .*allowed: a file"),
    ("--output {folder}/flow.pth", "hedgehog", "--output is .*there already"),
    ("--teacher-dir {folder}", "hedgehog", "--teacher-dir is .*there already"),
    ("--use-ema", "hedgehog", "--use-ema is given, and .*teacher.pth has no averaged weights"),
    ("--input-size 3 0 32", "hedgehog", r"--input-size is \[3, 0, 32\]; allowed: 1 or more"),
    ("--opt adamww", "hedgehog", "--opt is 'adamww'; allowed: .*adamw"),
    ("--attn-kwargs rws=3", "hedgehog", "has no option 'rws'"),
    *(
        (f"--{name} {x}", "hedgehog", f"--{name} is {x}; allowed: {least} or more")
        for name, (x, least) in COUNTS.items()
    ),
    ("", "flow", "--learn-projections"),
    ("", "hedgehg", "attention is 'hedgehg'; allowed"),
    ("", "blocks.0-5=hedgehog", "blocks.2 is not there"),
    ("", "blocks.0=hedgehog flow", "--attn is blocks.0=hedgehog flow; allowed"),
    ("", "blocks.0=hedgehg", "--attn is 'hedgehg'"),
    ("--loss weights --learn-projections", "flow", "loss is weights and .* flow attention"),
]


@pytest.mark.parametrize(("options", "attn", "said"), REFUSED)
def test_refusals(made, tmp_path, options, attn, said):
    torch.save(create_model(VIT, attn_layer="flow", num_classes=3, **SMALL).state_dict(), tmp_path / "flow.pth")
    before = (tmp_path / "flow.pth").read_bytes()
    words = options.format(folder=tmp_path).split()
    with pytest.raises(SystemExit, match=said) as exited:
        run(made, tmp_path / "student.pth", *words, attn=tuple(attn.split()))
    assert "\n" not in str(exited.value)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_several_processes_are_refused(made, tmp_path, monkeypatch):
    """Each process would do all of the work, and write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="torchrun started 2 processes.*; allowed: .*prepare_distributed"):
        run(made, tmp_path / "student.pth")
    assert not list(tmp_path.iterdir())
