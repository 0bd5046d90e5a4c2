"""The command that writes a starting point: its files and output, and that it writes nothing if it fails.

What it computes is tested with all other ways in ``models/test_loading.py``.
"""

import argparse
from pathlib import Path

import pytest
import timm
import torch

from tests.timm_plugin.helpers import (
    STOCK,
    Hostile,
    assert_same,
    build,
    images,
    randomise,
    stock_state,
    warnings_of,
)
from timm_plugin.convert import convert, main, read_weights

#: Arguments as they are typed after --model-kwargs.
SMALL = [f"{name}={value}" for name, value in STOCK.items()]


@pytest.fixture
def stock_file(tmp_path) -> Path:
    """A stock DeiT with 1000 classes."""
    torch.save(stock_state(), tmp_path / "stock.pth")
    return tmp_path / "stock.pth"


@pytest.mark.parametrize("target", ["start.safetensors", "start.pth", "new/start.pth", "start", "new/start"])
def test_targets(target, stock_file, tmp_path, capsys):
    """The last line says what was written; a folder knows its arguments, and what it left out was said."""
    main(["daft_conv_s", str(stock_file), str(tmp_path / target), "--model-kwargs", *SMALL, "num_heads=48"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / target}: daft_conv_s"
    if Path(target).suffix:
        small = dict(STOCK, num_heads=48)
        model = timm.create_model("daft_conv_s", checkpoint_path=str(tmp_path / target), **small)
    else:
        model = timm.create_model(f"local-dir:{tmp_path / target}", pretrained=True)
    stock = stock_state()
    for name in ("patch_embed.proj.weight", "head.weight", "blocks.1.mlp.fc1.weight"):
        assert torch.equal(model.state_dict()[name], stock[name])
    assert model(images(model)).shape == (2, 1000)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({target.split("/")[0], "stock.pth"})


def test_ours_at_another_size_keeps_classes_and_channels_and_shares_no_memory(tmp_path):
    source = randomise(build("hier", num_classes=3, in_chans=2))
    torch.save({"state_dict": source.state_dict()}, tmp_path / "ours.pth")
    model, other = (convert("flowformer_hier_test", tmp_path / "ours.pth", dict(img_size=96)) for _ in range(2))
    randomise(other, seed=6)
    assert (model.num_classes, model.in_chans, model.patch_embed.img_size) == (3, 2, (96, 96))
    assert torch.equal(model.patch_embed.proj.weight, source.patch_embed.proj.weight)
    assert torch.equal(model.head.fc.weight, source.head.fc.weight)


def test_weights_of_a_training(tmp_path, caplog):
    """Plain ones unless averaged ones are asked for, or alone; a warning says so if there are both."""
    state, averaged = stock_state(), {name: 2 * tensor for name, tensor in stock_state().items()}
    content = {"state_dict": state, "args": argparse.Namespace(amp=True), "epoch": 3}
    torch.save(content, tmp_path / "last.pth.tar")
    torch.save({**content, "state_dict_ema": {f"module.{k}": v for k, v in averaged.items()}}, tmp_path / "ema.pth.tar")
    torch.save({**content, "state_dict_ema": None}, tmp_path / "none.pth.tar")
    torch.save({"model_ema": averaged}, tmp_path / "alone.pth")
    for name in ("last.pth.tar", "none.pth.tar", "ema.pth.tar"):
        assert_same(read_weights(tmp_path / name), state)
    for name, options in (("ema.pth.tar", {"use_ema": True}), ("alone.pth", {"use_ema": True}), ("alone.pth", {})):
        assert_same(read_weights(tmp_path / name, **options), averaged)
    plain, other = warnings_of(caplog)
    assert "plain weights are taken" in plain and "averaged weights are taken" in other and "ema.pth.tar" in plain
    with pytest.raises(ValueError, match="--use-ema is given, and .*last.pth.tar"):
        read_weights(tmp_path / "last.pth.tar", use_ema=True)


#: Model, source and target, --model-kwargs, and the message. Wrong paths are tested for all commands at once.
REFUSED = [
    ("daft_conv_s stock.pth start.pth", [], "does not fit DaftConvVisionTransformer"),  # of another width
    ("flowformer_hier_test stock.pth start", [], "does not fit Flowformer"),
    ("flowformer_deit_s stock.pth start", [*SMALL, "depth=3"], "12 missing"),
    ("deit_tiny_patch16_224 stock.pth start", [], "allowed: cosformer_hier_s, daft_conv_b_384"),
    ("daft_conv_s stock.pth start", [*SMALL, "windows=3"], "windows"),
    ("daft_conv_s nowhere.pth start.onnx", [], "start.onnx, a file in a format of .onnx; allowed: .safetensors"),
    ("daft_conv_s list.pth start", [], "list.pth"),
    ("daft_conv_s hostile.pth start", [], "holds code or classes that are not allowed"),
]


@pytest.mark.parametrize(("words", "kwargs", "said"), REFUSED)
def test_what_does_not_fit_is_one_line_and_nothing_is_written(words, kwargs, said, stock_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"state_dict": stock_state(), "extra": Hostile(tmp_path / "trace")}, tmp_path / "hostile.pth")
    present = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as exited:
        main([*words.split(), "--model-kwargs", *kwargs])
    error = str(exited.value)
    assert error.startswith("python -m timm_plugin.convert: ") and said in error and "\n" not in error, error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == present
