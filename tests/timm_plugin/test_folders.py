"""Every way to create our models goes through timm's folder format, with the same weights, output and meaning."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

from tests.processes import CHECKOUT
from tests.timm_plugin.helpers import PATCHES_ONLY, VIT, Hostile, images, one_line, randomise, warnings_of
from timm_plugin import attention_layer, create_model, replace_attention, store_attention, tell_grid
from timm_plugin.layers.attention import SelfAttention

SMALL = dict(img_size=32, depth=3, embed_dim=32, num_heads=2, num_classes=3)
PLACES = {"blocks.0-1": "flow", "blocks.2": ("lolcats", {"window": 16})}


def _vit(**arguments) -> nn.Module:
    return timm.create_model(VIT, **{**SMALL, **arguments})


def _resized(model: nn.Module, size: int) -> nn.Module:
    model.set_input_size(size)
    tell_grid(model)
    return model


def _stored(model: nn.Module) -> nn.Module:
    store_attention(model)
    return model


def _with_classes(model: nn.Module, classes: int) -> nn.Module:
    model.reset_classifier(classes)
    return model


def _davit() -> nn.Module:
    small = dict(depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), num_classes=3)
    return timm.create_model("davit_tiny", **small)


WAYS = {
    "timm's create_model": lambda: _vit(attn_layer="flow"),
    "a name": lambda: create_model(VIT, attn_layer="hedgehog", **SMALL),
    "a pattern": lambda: create_model(VIT, attn_layer="flow*2,softmax", **SMALL),
    "a class": lambda: create_model(VIT, attn_layer=attention_layer("flow", form="paper", clamp=torch.inf), **SMALL),
    "a class for timm": lambda: _stored(_vit(attn_layer=attention_layer("flow", form="paper"))),
    "positions": lambda: create_model(VIT, attn_layer="daft_full", **SMALL),
    "positions, resized": lambda: _resized(create_model(VIT, attn_layer="daft_full", **SMALL), 64),
    "a grid": lambda: create_model(VIT, attn_layer="soft", **{**SMALL, **PATCHES_ONLY, "img_size": (32, 64)}),
    "replaced": lambda: replace_attention(_vit(), "favor"),
    "places": lambda: replace_attention(_vit(), PLACES),
    "other widths": lambda: replace_attention(_vit(), "reformer"),
    "replaced twice": lambda: replace_attention(replace_attention(_vit(), "linformer"), "flow,hedgehog", rows=5),
    "any size": lambda: replace_attention(_vit(dynamic_img_size=True), "linear"),
    "wrapped": lambda: replace_attention(nn.Sequential(nn.Identity(), _vit()), "flow")[1],
    "other classes": lambda: _with_classes(replace_attention(_vit(), "flow"), 5),
    "another family": lambda: replace_attention(_davit(), "flow"),
    "ours, a pattern": lambda: timm.create_model("flowformer_hier_test", attn_layer="flow*3,softmax"),
    "ours, a class": lambda: create_model("flowformer_hier_test", attn_layer=attention_layer("flow", form="paper")),
    "ours, replaced": lambda: replace_attention(
        timm.create_model("flowformer_hier_test", form="paper"), {"stages.0-1": "soft", "stages.2": "linear"}
    ),
    "ours, positions": lambda: create_model("flowformer_deit_ti", attn_layer="daft_full", **SMALL),
    "ours, the mechanism away": lambda: replace_attention(timm.create_model("daft_full_s", **SMALL), "flow"),
    "DAFT": lambda: timm.create_model("daft_conv_test", num_classes=3),
    "FLASH": lambda: timm.create_model("flash_vit_s", img_size=32, embed_dim=48, depth=1, query_dim=16, num_classes=3),
}

#: A script that the launcher runs, as one of timm's.
LOAD = """
import sys, torch, timm
from timm_plugin.layers.attention import SelfAttention
for folder in sys.argv[1:]:
    x, expected = torch.load(folder + "/images.pt")
    model = timm.create_model("local-dir:" + folder, pretrained=True).eval()
    out = model(x)
    layers = [(path, x) for path, x in model.named_modules() if isinstance(x, SelfAttention)]
    print(torch.equal(out, expected), repr([(path, x.mechanism, str(x.options)) for path, x in layers]))
"""


def _kinds(model: nn.Module) -> list[tuple[str, str, str]]:
    layers = [(path, x) for path, x in model.named_modules() if isinstance(x, SelfAttention)]
    return [(path, x.mechanism, str(x.options)) for path, x in layers]


def test_every_way_to_make_a_model_goes_through_a_folder(tmp_path):
    """Loaded by another interpreter, through the launcher, without a warning, bit for bit."""
    folders, expected = [], []
    for number, make in enumerate(WAYS.values()):
        model, folder = randomise(make()), tmp_path / str(number)
        save_for_hf(model, folder, safe_serialization=number % 2 == 0)
        x = images(model, 1, () if hasattr(model, "patch_embed") else (64, 64))
        with torch.no_grad():
            torch.save((x, model(x)), folder / "images.pt")
        folders.append(str(folder))
        expected.append(f"True {_kinds(model)!r}")
    (tmp_path / "script.py").write_text(f"import torch\ntorch.set_grad_enabled(False)\n{LOAD}")
    command = [sys.executable, "-W", "error::UserWarning", "-m", "timm_plugin", str(tmp_path / "script.py"), *folders]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert dict(zip(WAYS, done.stdout.splitlines())) == dict(zip(WAYS, expected))
    assert "warn" not in done.stderr.lower() and "something else" not in done.stderr, done.stderr


def _folder(tmp_path: Path, model: nn.Module, **changes) -> str:
    save_for_hf(model, tmp_path / "folder", safe_serialization=True)
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    config["model_args"] |= changes
    path.write_text(json.dumps(config))
    return f"local-dir:{path.parent}"


def test_what_is_loaded_is_stored_again_and_adapts(tmp_path, caplog):
    source = randomise(create_model(VIT, attn_layer="daft_full", **SMALL))
    once = timm.create_model(_folder(tmp_path, source), pretrained=True)
    twice = timm.create_model(_folder(tmp_path, once), pretrained=True).eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(twice(x), source(x))
    path = _folder(tmp_path, twice)
    assert warnings_of(caplog) == []
    other = timm.create_model(path, pretrained=True, num_classes=7, in_chans=1, img_size=64)
    assert other(torch.randn(1, 1, 64, 64)).shape == (1, 7)
    assert other.blocks[0].attn.attention.max_tokens == 17
    assert torch.equal(other.blocks[0].mlp.fc1.weight, source.blocks[0].mlp.fc1.weight)
    assert "head.weight" in warnings_of(caplog)[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(attn_layer="linear"), "attn_layer is 'linear', and the stored model has its own attention"),
        (dict(form="released"), "form is 'released', and the stored model"),
        (dict(attn_layer="x" * 9999), "attn_layer is 'xx"),
        (dict(features_only=True), "features_only is True; allowed .*FeatureGetterNet"),
    ],
)
def test_what_would_not_reach_the_stored_attention_is_refused(arguments, said, tmp_path):
    path = _folder(tmp_path, create_model(VIT, attn_layer="flow*2,softmax", **SMALL))
    one_line(said, lambda: timm.create_model(path, pretrained=True, **arguments))


KIND = {"name": "flow", "options": {}, "places": ["blocks.0.attn"]}
LONG = "x" * 9999
#: Argument names that are not options.
TAKEN = ("name", "max_tokens", "grid_size")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(attention=None), "attention is None"),
        (dict(attention=[]), r"attention is \[\]"),
        (dict(attention="flow"), "attention is 'flow'"),
        (dict(attention=[{"name": "flow"}]), "attention is "),
        (dict(attention=[{**KIND, "further": 1}]), "attention is "),
        (dict(attention=[{**KIND, "name": "flwo"}]), "'flwo'; allowed: .*flow"),
        (dict(attention=[{**KIND, "name": "flow*1000000000"}]), "1000000000"),
        (dict(attention=[{**KIND, "name": ["flow"]}]), "flow"),
        (dict(attention=[{**KIND, "options": {"form": "papr"}}]), "form is 'papr'"),
        (dict(attention=[{**KIND, "options": {"frm": "paper"}}]), "'frm'"),
        (dict(attention=[{**KIND, "options": [1]}]), "attention is "),
        *((dict(attention=[{**KIND, "options": {name: 1}}]), "attention is ") for name in TAKEN),
        *((dict(attention=[{**KIND, "options": {name: LONG}}]), "xx") for name in ("form", "clamp", LONG)),
        (dict(attention=[{**KIND, "places": []}]), "attention is "),
        (dict(attention=[KIND, {**KIND, "name": "linear"}]), "'blocks.0.attn' twice"),
        (dict(attention=[{**KIND, "places": ["blocks.7.attn"]}]), "blocks.7.attn"),
        (dict(attention=[{**KIND, "places": ["blocks.0-999999999.attn"]}]), "blocks.0-999999999.attn"),
        (dict(attention=[{**KIND, "places": [3]}]), "place '3'"),
        (dict(attention=[{**KIND, "grid_size": 3}]), "grid_size is 3"),
        (dict(attention=[{**KIND, "max_tokens": "x"}]), "max_tokens is 'x'"),
        (dict(attention=[{**KIND, "max_tokens": LONG}]), "max_tokens is 'xx"),
        (dict(attention=[{**KIND, "grid_size": [1] * 9999}]), r"grid_size is \[1, 1"),
        (dict(of=LONG), "of is 'xx"),
        (dict(of=None), "of is None"),
        (dict(of="lineartime"), "of is 'lineartime'"),
        (dict(of="hf-hub:somebody/model"), "of is 'hf-hub:somebody/model'"),
        (dict(of=["vit"]), r"of is \['vit'\]"),
    ],
)
def test_a_changed_configuration_is_refused_in_one_line(changes, said, tmp_path):
    path = _folder(tmp_path, replace_attention(_vit(), "flow"), **changes)
    one_line(said, lambda: timm.create_model(path, pretrained=True))


@pytest.mark.parametrize(
    ("make", "depth"),
    [
        (lambda: timm.create_model("flowformer_hier_test"), dict(attn_layer="flow*1000000000")),
        (lambda: replace_attention(_vit(), "flow"), dict(depth=10**9)),
        (lambda: replace_attention(_davit(), "flow"), dict(depths=[1, 10**9])),
        (lambda: timm.create_model("flowformer_hier_test"), dict(depths=[1, 1, 1, 10**400])),
        (lambda: timm.create_model("flowformer_deit_ti", **SMALL), dict(depth=1e9)),
        (lambda: timm.create_model("daft_conv_test"), dict(depth=10**9)),
        (lambda: timm.create_model("flash_vit_s", img_size=32, embed_dim=48, depth=1), dict(depth=10**9)),
    ],
)
def test_layers_without_end_in_a_configuration_are_not_built(make, depth, tmp_path):
    path = _folder(tmp_path, make(), **depth)
    one_line(f"{next(iter(depth))} is .*allowed", lambda: timm.create_model(path, pretrained=True))


def test_weights_that_hold_code_do_not_run_it(tmp_path):
    model, trace = replace_attention(_vit(), "flow"), tmp_path / "trace"
    path = _folder(tmp_path, model)
    (tmp_path / "folder" / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "extra": Hostile(trace)}, tmp_path / "folder" / "pytorch_model.bin")
    with pytest.raises(Exception, match="weights_only"):
        timm.create_model(path, pretrained=True)
    assert not trace.exists()


class Own(attention_layer("flow")):
    """A class defined by a user."""


def test_what_a_folder_cannot_express_is_refused_when_it_is_saved(tmp_path):
    for model in (create_model(VIT, attn_layer=Own, **SMALL), replace_attention(_vit(), Own)):
        with pytest.raises(ValueError, match="'attn_layer' is not serializable"):
            save_for_hf(model, tmp_path)
        with pytest.raises(ValueError, match="Own, a class of your own"):
            store_attention(model)
