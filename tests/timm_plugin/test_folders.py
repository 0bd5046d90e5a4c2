"""Every way to make our models goes through timm's folder format, with the same weights, output and meaning."""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
import yaml
from timm.models import save_for_hf
from timm.utils import ParseKwargs
from torch import nn

from tests.processes import CHECKOUT, Command, run_in_turn
from tests.timm_plugin.helpers import PATCHES_ONLY, SMALL, VIT, Hostile, images, one_line, randomise, vit, warnings_of
from tests.trainings import trainings
from timm_plugin import attention_layer, create_model, replace_attention, store_attention, tell_grid
from timm_plugin.layers.attention import SelfAttention

THREE = dict(SMALL, depth=3)
PLACES = {"blocks.0-1": "flow", "blocks.2": ("lolcats", {"window": 16})}


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
    return timm.create_model("davit_tiny", depths=(1, 1), embed_dims=(16, 32), num_heads=(2, 2), num_classes=3)


def _hier(**arguments) -> nn.Module:
    return timm.create_model("flowformer_hier_test", **arguments)


WAYS = {
    "timm's create_model": lambda: vit(attn_layer="flow"),
    "a name": lambda: create_model(VIT, attn_layer="hedgehog", **SMALL),
    "a pattern": lambda: create_model(VIT, attn_layer="flow*2,softmax", **THREE),
    "a class": lambda: create_model(VIT, attn_layer=attention_layer("flow", form="paper", clamp=torch.inf), **SMALL),
    "a class for timm": lambda: _stored(vit(attn_layer=attention_layer("flow", form="paper"))),
    "positions": lambda: create_model(VIT, attn_layer="daft_full", **SMALL),
    "positions, resized": lambda: _resized(create_model(VIT, attn_layer="daft_full", **SMALL), 64),
    "a grid": lambda: create_model(VIT, attn_layer="soft", **{**SMALL, **PATCHES_ONLY, "img_size": (32, 64)}),
    "replaced": lambda: replace_attention(vit(), "favor"),
    "places": lambda: replace_attention(vit(depth=3), PLACES),
    "other widths": lambda: replace_attention(vit(), "reformer"),
    "replaced twice": lambda: replace_attention(replace_attention(vit(), "linformer"), "flow,hedgehog", rows=5),
    "any size": lambda: replace_attention(vit(dynamic_img_size=True), "linear"),
    "wrapped": lambda: replace_attention(nn.Sequential(nn.Identity(), vit()), "flow")[1],
    "other classes": lambda: _with_classes(replace_attention(vit(), "flow"), 5),
    "another family": lambda: replace_attention(_davit(), "flow"),
    "ours, a pattern": lambda: _hier(attn_layer="flow*3,softmax"),
    "ours, a class": lambda: create_model("flowformer_hier_test", attn_layer=attention_layer("flow", form="paper")),
    "ours, replaced": lambda: replace_attention(_hier(form="paper"), {"stages.0-1": "soft", "stages.2": "linear"}),
    "ours, positions": lambda: create_model("flowformer_deit_ti", attn_layer="daft_full", **SMALL),
    "ours, the mechanism away": lambda: replace_attention(timm.create_model("daft_full_s", **SMALL), "flow"),
    "DAFT": lambda: timm.create_model("daft_conv_test", num_classes=3),
    "FLASH": lambda: timm.create_model("flash_vit_s", img_size=32, embed_dim=48, depth=1, query_dim=16, num_classes=3),
}

#: What makes a model that a document trains small, by the beginning of the name that knows it.
SIZES = {
    "flowformer_hier_digits": {},
    "flowformer_hier": dict(embed_dims=(16, 24, 32, 48), depths=(1, 1, 1, 1), num_heads=4, img_size=64),
    "daft_conv_test": {},
    "daft_conv": dict(embed_dim=32, depth=2, num_heads=4, window=3, img_size=64),
    "": dict(depth=2, img_size=64),
}


def ways() -> dict[str, Callable[[], nn.Module]]:
    """``WAYS``, and the models that documents train, in small."""
    parser, found = argparse.ArgumentParser(), dict(WAYS)
    parser.add_argument("--config")
    parser.add_argument("--model")
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=ParseKwargs)
    for training in trainings():
        if training.host == "timm":
            given, _ = parser.parse_known_args(training.arguments)
            stored = yaml.safe_load((CHECKOUT / given.config).read_text()) if given.config else {}
            model, kwargs = given.model or stored["model"], {**stored.get("model_kwargs", {}), **given.model_kwargs}
            if kwargs.get("attn_layer") == "nearby":
                continue  # the guide's own attention, which only processes with LINEARTIME_MECHANISMS know
            small = next(sizes for start, sizes in SIZES.items() if model.startswith(start))
            create = create_model if "attn_layer" in kwargs else timm.create_model
            found[f"{model} {given.model_kwargs}"] = partial(create, model, **{**kwargs, **small, "num_classes": 10})
    return found


#: A script that the launcher runs, as one of timm's.
LOAD = """
import sys, torch, timm, warnings
from timm_plugin.layers.attention import SelfAttention
torch.set_grad_enabled(False)
warnings.simplefilter("error", UserWarning)
for folder in sys.argv[1:]:
    x, expected = torch.load(folder + "/images.pt")
    model = timm.create_model("local-dir:" + folder, pretrained=True).eval()
    out = model(x)
    layers = [(path, x) for path, x in model.named_modules() if isinstance(x, SelfAttention)]
    print(torch.equal(out, expected), repr([(path, x.mechanism, str(x.options)) for path, x in layers]))
"""


@torch.no_grad()
def test_every_way_to_make_a_model_goes_through_a_folder(tmp_path):
    """Loaded by another process, through the launcher, without a warning or any other line, bit for bit."""
    folders, expected, made = [], [], ways()
    for number, make in enumerate(made.values()):
        model, folder = randomise(make()), tmp_path / str(number)
        save_for_hf(model, folder, safe_serialization=number % 2 == 0)
        x = images(model, 1, () if hasattr(model, "patch_embed") else (64, 64))
        torch.save((x, model(x)), folder / "images.pt")
        folders.append(str(folder))
        layers = [(path, x) for path, x in model.named_modules() if isinstance(x, SelfAttention)]
        expected.append(f"True {[(path, x.mechanism, str(x.options)) for path, x in layers]!r}")
    (tmp_path / "script.py").write_text(LOAD)
    (printed,) = run_in_turn(Command("timm_plugin", [str(tmp_path / "script.py"), *folders]), cwd=str(CHECKOUT))
    assert len(made) > len(WAYS) + 5 and dict(zip(made, printed.splitlines())) == dict(zip(made, expected))


# ---- changes, and what a folder cannot mean


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
    path = _folder(tmp_path, once)
    twice = timm.create_model(path, pretrained=True).eval()
    assert torch.equal(twice(images(twice)), source(images(twice)))
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
    path = _folder(tmp_path, create_model(VIT, attn_layer="flow,softmax", **SMALL))
    one_line(said, lambda: timm.create_model(path, pretrained=True, **arguments))


KIND = {"name": "flow", "options": {}, "places": ["blocks.0.attn"]}
LONG = "x" * 9999
#: What ``attention`` in a configuration may not be, and the message.
ATTENTION = [
    (None, "attention is None"),
    ([], r"attention is \[\]"),
    ("flow", "attention is 'flow'"),
    ([{"name": "flow"}], "attention is "),
    ([{**KIND, "further": 1}], "attention is "),
    ([{**KIND, "name": "flwo"}], "'flwo'; allowed: .*flow"),
    ([{**KIND, "name": "flow*1000000000"}], "1000000000"),
    ([{**KIND, "name": ["flow"]}], "flow"),
    ([{**KIND, "options": {"form": "papr"}}], "form is 'papr'"),
    ([{**KIND, "options": [1]}], "attention is "),
    ([{**KIND, "options": {"max_tokens": 1}}], "attention is "),  # an argument that is no option
    *(([{**KIND, "options": {name: LONG}}], "xx") for name in ("form", LONG)),
    ([{**KIND, "places": []}], "attention is "),
    ([KIND, {**KIND, "name": "linear"}], "'blocks.0.attn' twice"),
    ([{**KIND, "places": ["blocks.0-999999999.attn"]}], "blocks.0-999999999.attn"),
    ([{**KIND, "places": [3]}], "place '3'"),
    ([{**KIND, "grid_size": [1] * 9999}], r"grid_size is \[1, 1"),
    ([{**KIND, "max_tokens": LONG}], "max_tokens is 'xx"),
]
#: The same of ``of``, the model that has the attention.
OF = [
    *((x, f"of is '{x[:2]}") for x in (LONG, "lineartime", "hf-hub:somebody/model")),
    (None, "of is None"),
    (["vit"], r"of is \['vit'\]"),
]


@pytest.mark.parametrize(
    ("name", "value", "said"), [("attention", *row) for row in ATTENTION] + [("of", *row) for row in OF]
)
def test_a_changed_configuration_is_refused_in_one_line(name, value, said, tmp_path):
    path = _folder(tmp_path, replace_attention(vit(), "flow"), **{name: value})
    one_line(said, lambda: timm.create_model(path, pretrained=True))


@pytest.mark.parametrize(
    ("make", "depth"),
    [
        (_hier, dict(attn_layer="flow*1000000000")),
        (_hier, dict(depths=[1, 1, 1, 10**400])),
        (lambda: replace_attention(vit(), "flow"), dict(depth=10**9)),
        (lambda: replace_attention(_davit(), "flow"), dict(depths=[1, 10**9])),
        (lambda: timm.create_model("flowformer_deit_ti", **SMALL), dict(depth=1e9)),
        (lambda: timm.create_model("daft_conv_test"), dict(depth=10**9)),
        (lambda: timm.create_model("flash_vit_s", img_size=32, embed_dim=48, depth=1), dict(depth=10**9)),
    ],
)
def test_layers_without_end_in_a_configuration_are_not_built(make, depth, tmp_path):
    path = _folder(tmp_path, make(), **depth)
    one_line(f"{next(iter(depth))} is .*allowed", lambda: timm.create_model(path, pretrained=True))


def test_weights_that_hold_code_do_not_run_it(tmp_path):
    model, trace = replace_attention(vit(), "flow"), tmp_path / "trace"
    path = _folder(tmp_path, model)
    (tmp_path / "folder" / "model.safetensors").unlink()
    torch.save({**model.state_dict(), "extra": Hostile(trace)}, tmp_path / "folder" / "pytorch_model.bin")
    with pytest.raises(Exception, match="weights_only"):
        timm.create_model(path, pretrained=True)
    assert not trace.exists()


class Own(attention_layer("flow")):
    """A class defined by a user."""


def test_what_a_folder_cannot_express_is_refused_when_it_is_saved(tmp_path):
    for model in (create_model(VIT, attn_layer=Own, **SMALL), replace_attention(vit(), Own)):
        with pytest.raises(ValueError, match="'attn_layer' is not serializable"):
            save_for_hf(model, tmp_path)
        one_line("Own, a class of your own", lambda model=model: store_attention(model))
