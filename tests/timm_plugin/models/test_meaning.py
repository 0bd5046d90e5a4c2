"""The record of options survives every path that timm has for weights: other options warn, the same are silent."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
from timm.models import clean_state_dict, load_checkpoint, resume_checkpoint, save_for_hf
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn

from timm_plugin import replace_attention
from timm_plugin.convert import main as convert

NAME = "flowformer_hier_test"


def _build(**options: Any) -> nn.Module:
    return timm.create_model(NAME, num_classes=3, **options)


def _saved(model: nn.Module, folder: Path) -> Path:
    """Save a model as train.py does."""
    torch.save({"state_dict": model.state_dict(), "epoch": 1, "arch": NAME}, folder / "c.pth.tar")
    return folder / "c.pth.tar"


def _safetensors(model: nn.Module, folder: Path) -> Path:
    safetensors.torch.save_file(model.state_dict(), folder / "c.safetensors")
    return folder / "c.safetensors"


def _by_pretrained(model: nn.Module, folder: Path, options: dict) -> None:
    file = str(_saved(model, folder))
    _build(pretrained=True, pretrained_cfg_overlay={"file": file, "num_classes": 3}, **options)


def _by_local_dir(model: nn.Module, folder: Path, options: dict) -> None:
    save_for_hf(model, folder / "hub", safe_serialization=True)
    timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True, **options)


def _by_convert(model: nn.Module, folder: Path, options: dict) -> None:
    values = [f"{name}={value}" for name, value in options.items()]
    arguments = [NAME, str(_saved(model, folder)), str(folder / "converted.pth"), "--model-kwargs", *values]
    convert(arguments if values else arguments[:3])


def _by_moving_average(model: nn.Module, folder: Path, options: dict) -> None:
    average = ModelEmaV3(model, decay=0.9)
    older = ModelEmaV2(model, decay=0.9)
    for _ in range(3):
        average.update(model)
        older.update(model)
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}, folder / "e.pth.tar")
    load_checkpoint(_build(**options), str(folder / "e.pth.tar"), use_ema=True)
    _build(**options).load_state_dict(older.module.state_dict())


def _from_state(change: Callable[[nn.Module], dict]) -> Callable[[nn.Module, Path, dict], None]:
    """``load_state_dict`` of the result of ``change`` on a model's state dict."""
    return lambda model, _, options: _build(**options).load_state_dict(change(model))


WAYS: dict[str, Callable[[nn.Module, Path, dict], None]] = {
    "load_checkpoint": lambda model, folder, options: load_checkpoint(_build(**options), str(_saved(model, folder))),
    "resume": lambda model, folder, options: resume_checkpoint(_build(**options), str(_saved(model, folder)), None),
    "checkpoint_path": lambda model, folder, options: _build(checkpoint_path=str(_saved(model, folder)), **options),
    "safetensors": lambda model, folder, options: _build(checkpoint_path=str(_safetensors(model, folder)), **options),
    "pretrained": _by_pretrained,
    "local_dir": _by_local_dir,
    "convert": _by_convert,
    "moving_average": _by_moving_average,
    # As clean_checkpoint.py does, and a model in DistributedDataParallel or torch.compile.
    "cleaning": _from_state(
        lambda model: clean_state_dict({f"module._orig_mod.{name}": x for name, x in model.state_dict().items()})
    ),
    # As avg_checkpoints.py does: sums in float64, stored in float32.
    "averaging": _from_state(
        lambda model: {name: (3 * x.double() / 3).float() for name, x in model.state_dict().items()}
    ),
    "deepcopy": _from_state(lambda model: copy.deepcopy(model).state_dict()),
    "pickle": _from_state(lambda model: pickle.loads(pickle.dumps(model)).state_dict()),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way(way: str, tmp_path: Path) -> None:
    """Equal options are silent; another form, clamp, mechanism or number of heads causes a warning that names it."""
    model = _build(form="paper")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        WAYS[way](model, tmp_path, {"form": "paper"})
    for name, value in {"form": "released", "clamp": 3.0, "num_heads": 8}.items():
        if way == "local_dir" and name != "form":
            continue  # its stored arguments are those of the complete model
        (tmp_path / name).mkdir()
        with pytest.warns(UserWarning, match=f"{name}="):
            WAYS[way](model, tmp_path / name, {"form": "paper", name: value})
    (tmp_path / "linear").mkdir()
    with pytest.warns(UserWarning, match="attention='flow'.*attention='linear'"):
        WAYS[way](_build(), tmp_path / "linear", {"attn_layer": "linear"})


def test_twelve_heads_of_the_authors(tmp_path: Path) -> None:
    """Their weights have the same shapes as those with sixteen."""
    model = timm.create_model("flowformer_hier_s_12h", img_size=32, embed_dims=(48, 48), depths=(1, 1))
    with pytest.warns(UserWarning, match="num_heads=12.*num_heads=16"):
        other = timm.create_model(
            "flowformer_hier_s_12h", img_size=32, embed_dims=(48, 48), depths=(1, 1), num_heads=16
        )
        other.load_state_dict(model.state_dict())


def test_a_stock_transformer_with_another_attention() -> None:
    """Stock weights warn once; a stock model refuses ours, as strict loading does."""
    stock = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    flow = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, attn_layer="flow")
    with pytest.warns(UserWarning, match="do not say.*attention='flow'") as caught:
        flow.load_state_dict(stock.state_dict())
    assert len({str(warning.message) for warning in caught}) == 1
    with pytest.raises(RuntimeError, match="blocks.0.attn.attention"):
        stock.load_state_dict(flow.state_dict())
    replaced = replace_attention(copy.deepcopy(stock), "linear")
    with pytest.warns(UserWarning, match="attention='flow'.*attention='linear'"):
        replaced.load_state_dict(flow.state_dict())
