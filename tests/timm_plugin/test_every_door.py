"""Every image model that a document trains leaves by every door and has the same outputs behind it."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.models import save_for_hf
from timm.utils import ParseKwargs
from torch import Tensor, nn

import timm_plugin
from tests.compare import assert_close
from tests.processes import CHECKOUT
from tests.trainings import trainings
from timm_plugin import convert

#: What makes a model small, by the beginning of the name that knows it.
_FOUR_STAGES = {"embed_dims": (16, 24, 32, 48), "depths": (1, 1, 1, 1)}
SMALL = {
    "flowformer_hier_digits": {},
    "flowformer_hier": {**_FOUR_STAGES, "num_heads": 4, "img_size": 64},
    "daft_conv_test": {},
    "daft_conv": {"embed_dim": 32, "depth": 2, "num_heads": 4, "window": 3, "img_size": 64},
    "": {"depth": 2, "img_size": 64},
}
Build = Callable[..., nn.Module]


def shown_models() -> dict[str, tuple[str, dict]]:
    """Models and their arguments, in small, by what documents say of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--model")
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    found = {}
    for training in trainings():
        if training.host == "timm":
            given, _ = parser.parse_known_args(training.arguments)
            stored = yaml.safe_load((CHECKOUT / given.config).read_text()) if given.config else {}
            model = given.model or stored["model"]
            if given.model_kwargs.get("attn_layer") == "nearby":
                continue  # the guide's own attention, which only processes with LINEARTIME_MECHANISMS know
            small = next(sizes for start, sizes in SMALL.items() if model.startswith(start))
            arguments = {**stored.get("model_kwargs", {}), **given.model_kwargs, **small, "num_classes": 10}
            found[" ".join([model, *(f"{name}={x}" for name, x in given.model_kwargs.items())])] = (model, arguments)
    return found


SHOWN = shown_models()


@torch.no_grad()
def weigh(model: nn.Module, seed: int) -> nn.Module:
    """Random weights under which every part of ``model`` shows in its outputs."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def folder(build: Build, model: nn.Module, path: Path) -> nn.Module:
    """timm's format of the hub, without the arguments of the model."""
    save_for_hf(model, path / "folder", safe_serialization=True)
    return timm.create_model(f"local-dir:{path / 'folder'}", pretrained=True)


def checkpoint(build: Build, model: nn.Module, path: Path) -> nn.Module:
    """A checkpoint of train.py."""
    torch.save({"arch": "any", "state_dict": model.state_dict()}, path / "last.pth.tar")
    return build(checkpoint_path=str(path / "last.pth.tar"))


def average(build: Build, model: nn.Module, path: Path) -> nn.Module:
    """The mean of three equal checkpoints by timm's avg_checkpoints.py: sums in float64, stored in float32."""
    state = {name: (3 * x.double() / 3).float() for name, x in model.state_dict().items()}
    torch.save(state, path / "average.pth")
    return build(checkpoint_path=str(path / "average.pth"))


def converted(build: Build, model: nn.Module, path: Path) -> nn.Module:
    """``timm_plugin.convert`` of one of our models, to safetensors."""
    convert.save(model, path / "model.safetensors")
    return build(checkpoint_path=str(path / "model.safetensors"))


DOORS = {"folder": folder, "checkpoint": checkpoint, "average": average, "converted": converted}


@pytest.mark.parametrize("name", SHOWN)
@torch.no_grad()
def test_a_model_leaves_by_every_door(name: str, tmp_path: Path) -> None:
    model_name, arguments = SHOWN[name]

    def build(**further) -> nn.Module:
        create = timm_plugin.create_model if "attn_layer" in arguments else timm.create_model
        return create(model_name, **arguments, **further)

    model = weigh(build(), 1)
    images: Tensor = torch.randn(2, *model.pretrained_cfg["input_size"][:1], *[arguments.get("img_size", 32)] * 2)
    expected = model(images)
    assert not torch.allclose(expected, weigh(build(), 2)(images))
    for door, leave in DOORS.items():
        behind = leave(build, model, tmp_path).eval()
        assert type(behind) is type(model) or door == "folder", door
        assert_close(door, behind(images), expected)
