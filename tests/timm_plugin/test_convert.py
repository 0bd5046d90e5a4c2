"""The command that writes a starting point: its output and files, and that it writes nothing if it fails."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

from tests.processes import CHECKOUT
from tests.timm_plugin.helpers.checkpoint_files import (
    STOCK,
    assert_same,
    copy_of,
    randomise,
    stock_state,
    unusable_files,
)
from tests.timm_plugin.helpers.logs import warnings_of
from tests.timm_plugin.helpers.models import build, images
from timm_plugin.convert import convert, main, read_weights

#: Arguments as they are typed after --model-kwargs.
SMALL = [f"{name}={value}" for name, value in STOCK.items()]


@pytest.fixture
def stock_file(tmp_path):
    """A stock DeiT with 1000 classes."""
    torch.save(stock_state(), tmp_path / "stock.pth")
    return tmp_path / "stock.pth"


def test_the_command(stock_file, tmp_path):
    command = [sys.executable, "-m", "timm_plugin.convert", "daft_conv_s_h16", stock_file, tmp_path / "start"]
    command += ["--model-kwargs", *SMALL, "num_classes=5"]
    done = subprocess.run(list(map(str, command)), cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[-1] == f"{tmp_path / 'start'}: daft_conv_s_h16"
    (summary,) = [line for line in lines if "tensors of the checkpoint are taken" in line]
    assert "left out: cls_token, pos_embed, head.weight, head.bias; " in summary
    assert summary.endswith("taken in part: blocks.*.attn.qkv.weight (2), blocks.*.attn.qkv.bias (2)")
    model = timm.create_model(f"local-dir:{tmp_path / 'start'}", pretrained=True)
    assert (model.num_classes, model.embed_dim, len(model.blocks)) == (5, 48, 2)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, stock_state()["blocks.1.mlp.fc1.weight"])
    assert model(images(model)).shape == (2, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "stock.pth"]


@pytest.mark.parametrize("target", ["start.safetensors", "start.pth", "new/start.pth", "start", "new/start"])
def test_targets(target, stock_file, tmp_path, capsys):
    main(["daft_full_s", str(stock_file), str(tmp_path / target), "--model-kwargs", *SMALL, "bias_dim=8"])
    assert capsys.readouterr().out.endswith(f"{tmp_path / target}: daft_full_s\n")
    small = dict(STOCK, bias_dim=8)
    if Path(target).suffix:
        model = timm.create_model("daft_full_s", checkpoint_path=str(tmp_path / target), **small)
    else:
        model = timm.create_model(f"local-dir:{tmp_path / target}", pretrained=True)
        assert json.loads((tmp_path / target / "config.json").read_text())["architecture"] == "daft_full_s"
    stock = stock_state()
    for name in ("pos_embed", "cls_token", "head.weight", "blocks.1.attn.qkv.weight"):
        assert torch.equal(model.state_dict()[name], stock[name])
    assert not list(tmp_path.rglob("*.part"))


def test_ours_at_another_size_keeps_classes_and_channels(tmp_path):
    source = randomise(build("hier", num_classes=3, in_chans=2))
    torch.save({"state_dict": source.state_dict()}, tmp_path / "ours.pth")
    model = convert("flowformer_hier_test", tmp_path / "ours.pth", dict(img_size=96))
    assert (model.num_classes, model.in_chans, model.patch_embed.img_size) == (3, 2, (96, 96))
    assert torch.equal(model.patch_embed.proj.weight, source.patch_embed.proj.weight)
    assert torch.equal(model.head.fc.weight, source.head.fc.weight)


def test_weights_of_a_training(tmp_path, caplog):
    state, averaged = stock_state(), {name: 2 * tensor for name, tensor in stock_state().items()}
    content = {"state_dict": state, "args": argparse.Namespace(amp=True), "epoch": 3}
    torch.save(content, tmp_path / "last.pth.tar")
    assert_same(read_weights(tmp_path / "last.pth.tar"), state)
    torch.save({**content, "state_dict_ema": {f"module.{k}": v for k, v in averaged.items()}}, tmp_path / "ema.pth.tar")
    torch.save({**content, "state_dict_ema": None}, tmp_path / "none.pth.tar")
    torch.save({"model_ema": averaged}, tmp_path / "alone.pth")
    for name in ("last.pth.tar", "none.pth.tar", "ema.pth.tar"):
        assert_same(read_weights(tmp_path / name), state)
    for name in ("ema.pth.tar", "alone.pth"):
        assert_same(read_weights(tmp_path / name, use_ema=True), averaged)
    assert_same(read_weights(tmp_path / "alone.pth"), averaged)
    messages = warnings_of(caplog)
    assert len(messages) == 2 and all("ema.pth.tar" in line for line in messages)  # each names the file that has both
    assert "plain weights are taken" in messages[0] and "averaged weights are taken" in messages[1]
    with pytest.raises(ValueError, match="--use-ema is given, and .*last.pth.tar"):
        read_weights(tmp_path / "last.pth.tar", use_ema=True)


@pytest.mark.parametrize("suffix", [".onnx", ".npz", ".ts", ".json"])
def test_a_target_in_another_format_is_refused_before_work(suffix, tmp_path):
    with pytest.raises(SystemExit, match=rf"target is .*model\{suffix}.*allowed: \.safetensors, \.pth"):
        main(["daft_conv_s", "nowhere.pth", str(tmp_path / f"model{suffix}")])
    assert not list(tmp_path.iterdir())


def test_the_targets_tensors_stand_by_themselves(stock_file):
    """A converted checkpoint shares no memory with the file or with another conversion."""
    small = dict(STOCK, num_heads=16)
    first = convert("daft_conv_s", stock_file, small)
    before = copy_of(first.state_dict())
    second = convert("daft_conv_s", stock_file, small)
    randomise(second)
    assert_same(first.state_dict(), before)


def fails(arguments, folder, message):
    """Check that the command ends with one line containing ``message``, and writes nothing to ``folder``."""
    present = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as exited:
        main(list(map(str, arguments)))
    error = str(exited.value)
    assert error.startswith("python -m timm_plugin.convert: ") and message in error, error
    assert sorted(folder.rglob("*")) == present
    return error


@pytest.mark.parametrize("target", ["start.safetensors", "start"])
def test_unusable_files(target, tmp_path):
    files, trace = unusable_files(stock_state(), tmp_path)
    (tmp_path / "list.pth").touch()
    torch.save([1, 2], tmp_path / "list.pth")
    for path in [*files, tmp_path / "none.pth", tmp_path / "list.pth"]:
        with pytest.raises(ValueError, match=path.name):
            read_weights(path)
        fails(["daft_conv_s", path, tmp_path / target, "--model-kwargs", *SMALL], tmp_path, path.name)
    line = fails(["daft_conv_s", files[-1], tmp_path / target], tmp_path, "posix.system")
    assert "holds code or classes that are not allowed" in line
    assert not trace.exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["daft_conv_s", "stock.pth", "start.pth"], "does not fit DaftConvVisionTransformer"),  # of another width
        (["flowformer_hier_test", "stock.pth", "start"], "does not fit Flowformer"),
        (["flowformer_deit_s", "stock.pth", "start", "--model-kwargs", *SMALL, "depth=3"], "12 missing"),
        (["deit_tiny_patch16_224", "stock.pth", "start"], "allowed: cosformer_hier_s, daft_conv_b_384"),
        (["daft", "stock.pth", "start"], "the model is 'daft'; allowed: cosformer_hier_s, daft_conv_b_384"),
        (["daft_conv_s", "stock.pth", "start", "--model-kwargs", *SMALL, "windows=3"], "windows"),
        (["daft_conv_s", "stock.pth", "start", "--model-kwargs", *SMALL, "num_heads=48", "window=4"], "window"),
    ],
)
def test_what_does_not_fit(arguments, message, stock_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fails(arguments, tmp_path, message)


def test_a_folder_that_is_there_stays_as_it_is(stock_file, tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "config.json").write_text("mine")
    fails(["daft_full_s", stock_file, tmp_path / "start", "--model-kwargs", *SMALL], tmp_path, "is there already")
    assert (tmp_path / "start" / "config.json").read_text() == "mine"


@pytest.mark.parametrize("target", ["start.safetensors", "start.pth", "start"])
def test_a_write_that_fails_leaves_no_target(target, stock_file, tmp_path, monkeypatch):
    def full(_, path, **__):
        Path(path).write_bytes(b"some")
        raise OSError("no space left on device")

    for name in ("save_file", "save_for_hf", "tensor_files.save"):
        monkeypatch.setattr(f"timm_plugin.convert.{name}", full)
    fails(["daft_full_s", stock_file, tmp_path / target, "--model-kwargs", *SMALL], tmp_path, "no space left")
