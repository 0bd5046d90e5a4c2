"""Weights of stock models, of the authors, of ours and of the package: adapted where that is asked for, else strict.

A warning lists what is left out or new, and another one says that weights belong to other options.
"""

import json
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import load_checkpoint, model_entrypoint, resume_checkpoint, save_for_hf
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn

from common.modules.stored_options import is_extra_state
from recipes.bench.peers.released_image_model import released_forward, released_shapes
from recipes.images import loaders, validate, write_digits
from tests.compare import assert_close, weights
from tests.golden import make_timm as golden
from tests.timm_plugin.helpers import (
    CASES,
    PATCHES_ONLY,
    SMALL,
    STOCK,
    VIT,
    assert_same,
    build,
    draw_filters,
    images,
    one_line,
    randomise,
    stock_state,
    vit,
    warnings_of,
)
from timm_plugin import create_model, replace_attention
from timm_plugin.convert import convert, save
from timm_plugin.convert import main as convert_main

#: Our model -> arguments that give it the shape of the small stock models.
MODELS = {
    "flowformer_deit_s": dict(num_heads=4),
    "daft_full_s": dict(bias_dim=8),
    "daft_conv_s": dict(num_heads=48),  # h = C: as many keys as channels
    "daft_conv_s_h16": dict(query=False),
    "daft_conv_b_384": dict(window=5, num_heads=6),
}
FLOW, CONV = ["flowformer_deit_s"], [name for name in MODELS if "conv" in name]
#: One of each class.
THREE = ("flowformer_deit_s", "daft_full_s", "daft_conv_s")
DIM = STOCK["embed_dim"]


def create(name: str, state: dict, folder: Path, way: str = "pretrained", **kwargs: Any) -> tuple[nn.Module, dict]:
    """``name`` started from ``state`` in one of timm's ways or by our command, and the tensors it would have without.

    "pretrained-path" is what the option of train.py results in.
    """
    path = folder / "stock.pth"
    torch.save(state, path)
    small = {**STOCK, **MODELS[name], **kwargs}
    torch.manual_seed(7)
    own = weights(timm.create_model(name, **small).state_dict())
    torch.manual_seed(7)
    if way == "convert":
        converted = convert(name, path, small)
        save(converted, folder / "converted.safetensors")
        model = timm.create_model(name, checkpoint_path=str(folder / "converted.safetensors"), **small)
        assert_same(model.state_dict(), converted.state_dict())
    else:
        overlay = dict(file=str(path), num_classes=1000 if way == "pretrained" else -1)
        model = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **small)
    return model, own


def adapted_stem(stem: torch.Tensor, channels: int) -> torch.Tensor:
    """Patches for 1 or 4 channels as timm makes them of those for 3."""
    return stem.sum(1, keepdim=True) if channels == 1 else torch.cat([stem, stem[:, :1]], 1) * (3 / 4)


# ---- stock vision transformers as a start


@pytest.mark.parametrize("stock_name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
@pytest.mark.parametrize(
    ("name", "way"), [*((name, "pretrained") for name in MODELS), *((name, "convert") for name in THREE)]
)
def test_every_tensor(name, way, stock_name, tmp_path, caplog):
    """It is the file's, in part the file's, new or left out, and a warning says so."""
    stock = stock_state(stock_name)
    model, own = create(name, stock, tmp_path, way)
    distilled = {key for key in stock if "dist" in key}
    taken = {key: tensor for key, tensor in stock.items() if key not in distilled}
    if distilled:
        taken["pos_embed"] = torch.cat([stock["pos_embed"][:, :1], stock["pos_embed"][:, 2:]], 1)
    state = weights(model.state_dict())
    assert set(state) == set(own)
    for key, tensor in own.items():
        if ".attn.attention." in key:
            expected = tensor  # new, as first drawn
        elif name in CONV and ".attn.qkv." in key:
            expected = torch.cat([tensor[:-DIM], stock[key][2 * DIM :]])  # the values' rows
        else:
            expected = taken[key]
        assert torch.equal(state[key], expected), key
    left_out = distilled | ({"cls_token", "pos_embed"} if name in CONV else set())
    if name in FLOW and not distilled:
        assert warnings_of(caplog) == []
        return
    (line,) = warnings_of(caplog)
    assert all(key in line for key in left_out)
    new = {key.removeprefix("blocks.0.") for key in own if "blocks.0.attn.attention." in key}
    assert all(f"blocks.*.{key} (2)" in line for key in new)
    assert ("taken in part: blocks.*.attn.qkv.weight (2), blocks.*.attn.qkv.bias (2)" in line) == (name in CONV)
    assert torch.isfinite(model(images(model))).all()


@pytest.mark.parametrize("name", THREE)
def test_loading_is_strict_where_adaptation_is_not_asked_for(name, tmp_path):
    small = dict(STOCK, **MODELS[name])
    model, path = timm.create_model(name, **small), str(tmp_path / "stock.pth")
    for stock in (stock_state(num_classes=10), *([] if name in FLOW else [stock_state()])):
        torch.save(stock, path)
        for way in (
            lambda: model.load_state_dict(torch.load(path), strict=True),
            lambda: timm.create_model(name, checkpoint_path=path, **small),
        ):
            with pytest.raises(RuntimeError, match=r"(head.weight|attn.attention)(.|\n)*pretrained=True(.|\n)*convert"):
                way()


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("name", THREE)
def test_other_channels_classes_size_and_patch(name, channels, tmp_path, caplog):
    stock = stock_state()
    changed = dict(in_chans=channels, num_classes=5, img_size=(64, 96), patch_size=8)
    model, own = create(name, stock, tmp_path, "pretrained-path", **changed)
    started = model.state_dict()
    patches = adapted_stem(resample_patch_embed(stock["patch_embed.proj.weight"], [8, 8]), channels)
    assert_close("stem", started["patch_embed.proj.weight"], patches)
    assert_close("body", started["blocks.1.mlp.fc1.weight"], stock["blocks.1.mlp.fc1.weight"])
    assert torch.equal(started["head.weight"], own["head.weight"])
    if name not in CONV:
        expected = resample_abs_pos_embed(stock["pos_embed"], [8, 12], [4, 4])
        assert_close("positions", started["pos_embed"], expected)
    (line,) = warnings_of(caplog)
    assert line.count("head.weight, head.bias") == 2  # the file's are left out, and new ones are drawn
    assert model(images(model)).shape == (2, 5)
    features, _ = create(name, stock, tmp_path, features_only=True, out_indices=1)
    assert torch.equal(features.model.blocks[0].mlp.fc1.weight, stock["blocks.0.mlp.fc1.weight"])


POOLED = dict(global_pool="avg")


@pytest.mark.parametrize(
    ("name", "stock_args", "args", "here", "there"),
    [
        ("daft_full_s", POOLED, {}, "norm", "fc_norm"),
        ("daft_conv_s", POOLED, {}, "norm", "fc_norm"),
        ("daft_conv_s", {}, dict(fc_norm=True), "fc_norm", "norm"),
        ("flowformer_deit_s", POOLED, POOLED, "fc_norm", "fc_norm"),
        ("daft_full_s", dict(no_embed_class=True), PATCHES_ONLY, "fc_norm", "norm"),
    ],
)
def test_normalisation_on_either_side_of_the_pool(name, stock_args, args, here, there, tmp_path):
    """And positions of patches alone, without that of a class token."""
    stock = stock_state("vit_tiny_patch16_224", **stock_args)
    state = create(name, stock, tmp_path, **args)[0].state_dict()
    for parameter in ("weight", "bias"):
        assert torch.equal(state[f"{here}.{parameter}"], stock[f"{there}.{parameter}"])
    if name not in CONV:
        assert torch.equal(state["pos_embed"], stock["pos_embed"][:, -state["pos_embed"].shape[1] :])


@pytest.mark.parametrize(
    ("name", "stock_name"),
    [
        ("flowformer_deit_s", "deit_small_patch16_224"),
        ("flowformer_deit_ti", "deit_tiny_patch16_224"),
        ("flowformer_deit_s_distilled", "deit_small_distilled_patch16_224"),
        ("daft_full_s", "deit_small_patch16_224"),
        ("daft_conv_s_h16", "deit_small_patch16_224"),
        ("daft_conv_b_384", "deit_base_patch16_384"),
    ],
)
def test_models_have_the_size_of_the_stock_model_that_starts_them(name, stock_name):
    """Another number of heads would fit the same weights, and be another function of them."""
    model, stock = (timm.create_model(each, device="meta") for each in (name, stock_name))
    own = model.state_dict()
    for key, tensor in stock.state_dict().items():
        if not (name in CONV and (".attn.qkv." in key or key in ("cls_token", "pos_embed"))):
            assert own[key].shape == tensor.shape, key
    if "deit" in name:
        assert model.blocks[0].attn.num_heads == stock.blocks[0].attn.num_heads


def test_softmax_in_a_distilled_model_computes_what_the_stock_one_computes():
    small = dict(STOCK, num_heads=3)
    stock = randomise(timm.create_model("deit_small_distilled_patch16_224", **small))
    arguments = dict(small, pretrained=True, pretrained_cfg_overlay=dict(state_dict=stock.state_dict()))
    model = timm.create_model("flowformer_deit_s_distilled", attn_layer="softmax", **arguments).eval()
    assert_close("logits", model(images(model)), stock(images(model)))
    other = timm.create_model("flowformer_deit_s_distilled", num_classes=7, **arguments)
    assert other.head.weight.shape == other.head_dist.weight.shape == (7, 48)
    assert torch.equal(other.dist_token, stock.dist_token)


# ---- the weights that Flowformer's authors released

DIMS, DEPTHS = (24, 36, 48, 60), (1, 2, 1, 1)
RELEASED = dict(img_size=64, embed_dims=DIMS, depths=DEPTHS)


@pytest.fixture(scope="module")
def released():
    """A state dict with the authors' names, for 64 x 64 images and 7 classes."""
    generator = torch.Generator().manual_seed(3)
    shapes = released_shapes(classes=7, side=64, embed_dims=DIMS, depths=DEPTHS)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1.0 + t if "norm" in name and name.endswith("weight") else t for name, t in state.items()}


@pytest.fixture
def released_file(released, tmp_path) -> Path:
    torch.save({"model": released, "epoch": 299}, tmp_path / "released.pth")
    return tmp_path / "released.pth"


def start_released(path: Path, classes: int, **kwargs: Any) -> nn.Module:
    overlay = dict(file=str(path), num_classes=classes)
    arguments = {**RELEASED, "num_classes": 7, **kwargs}
    return timm.create_model("flowformer_hier_s_12h", True, pretrained_cfg_overlay=overlay, **arguments).eval()


def test_released_outputs(released, released_file, caplog):
    """Not with another form of the attention, and not where adaptation is not asked for."""
    model = start_released(released_file, 7)
    x = images(model)
    assert_close("logits", model(x), released_forward(x, released, DEPTHS), 1e-5)
    assert warnings_of(caplog) == []  # no tensor is left out or new
    converted = convert("flowformer_hier_s_12h", released_file, RELEASED).eval()
    assert torch.equal(converted(x), model(x))  # the classifier is the file's
    other = start_released(released_file, 7, form="paper")(x)
    assert (other - model(x)).norm() > 1e-2 * other.norm()  # the comparison can distinguish the forms
    with pytest.raises(RuntimeError, match=r"pos_embed(.|\n)*pretrained=True(.|\n)*timm_plugin.convert"):
        model.load_state_dict(released)


def test_released_state_dict_fits_the_full_model():
    shapes = released_shapes(classes=1000, side=224, embed_dims=(96, 192, 384, 768), depths=(3, 3, 10, 3))
    overlay = dict(state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is copied to the meta device
        timm.create_model("flowformer_hier_s_12h", True, pretrained_cfg_overlay=overlay, device="meta")


@pytest.mark.parametrize(("channels", "classes"), [(1, 7), (4, -1)])  # -1 is what train.py's --pretrained-path passes
def test_released_with_other_channels_classes_and_size(classes, channels, released, released_file, caplog):
    torch.manual_seed(7)
    changed = dict(num_classes=5, in_chans=channels, img_size=(64, 96))
    own = timm.create_model("flowformer_hier_s_12h", **{**RELEASED, **changed}).state_dict()
    torch.manual_seed(7)
    state = start_released(released_file, classes, **changed).state_dict()
    stem = adapted_stem(released["patch_embed.0.proj.weight"], channels)
    assert_close("stem", state["patch_embed.proj.weight"], stem)
    positions = resample_abs_pos_embed(released["pos_embed"], [16, 24], [16, 16], num_prefix_tokens=0)
    assert_close("positions", state["pos_embed.weight"], positions)
    assert torch.equal(state["head.fc.weight"], own["head.fc.weight"])
    assert torch.equal(state["stages.1.blocks.1.ls2.gamma"], released["blocks.1.1.gamma"])
    (line,) = warnings_of(caplog)
    assert "new, as first drawn: head.fc.weight, head.fc.bias" in line


# ---- our own


def start(source: nn.Module, case: str = "hier", overlay: Any = (), **kwargs: Any) -> nn.Module:
    """The model of ``case`` with the weights of ``source``, as ``pretrained=True`` adapts them."""
    name, small = CASES[case]
    overlay = dict(overlay, state_dict={key: x.clone() for key, x in source.state_dict().items()})
    return timm.create_model(name, True, pretrained_cfg_overlay=overlay, **{**small, **kwargs}).eval()


@pytest.mark.parametrize("case", ["hier", "deit", "deit_distilled", "daft_full", "daft_conv", "flash", "flash_quad"])
def test_a_file_of_another_size_is_a_start_as_set_input_size(case):
    """From a grid that is no square, whose size must be stated; (32, 128) has as many patches as 64 x 64."""
    for size, other in (((64, 64), (96, 32)), ((32, 96), (64, 64)), ((32, 128), (64, 64))):
        source = randomise(build(case, img_size=size))
        model = start(source, case, dict(input_size=(3, *size)), img_size=other)
        if case != "daft_conv" and size == (32, 96):
            with pytest.raises(ValueError, match=r"\d+ positions .*input_size"):
                start(source, case, img_size=other)
        source.set_input_size(other)
        x = images(model)
        assert_close("logits", model(x), source(x))


def test_another_patch():
    source = build("hier")
    model = start(source, patch_size=8)
    assert_close("stem", model.patch_embed.proj.weight, resample_patch_embed(source.patch_embed.proj.weight, [8, 8]))
    small = build("daft_full", img_size=(16, 48), patch_size=8)  # its grid is its own size over its own patch
    model = start(small, "daft_full", dict(input_size=(3, 16, 48)), img_size=(32, 96))
    assert_close("biases", model.blocks[0].attn.attention.pe0, small.blocks[0].attn.attention.pe0)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_of_a_model(case, tmp_path, caplog):
    """For other classes and channels, and whatever another version stored in it."""
    source = randomise(build(case))
    save_for_hf(source, tmp_path / "model", safe_serialization=True)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    ours = config["architecture"] != "lineartime" and "attn_layer" not in config.get("model_args", {})
    if ours:
        config.setdefault("model_args", {})["option_of_tomorrow"] = 3
        path.write_text(json.dumps(config))
    x = images(source)
    whole = timm.create_model(f"local-dir:{path.parent}", pretrained=True).eval()
    assert_close("logits", whole(x), source(x))
    said = [line for line in warnings_of(caplog) if "option_of_tomorrow=3 is not known here and left out" in line]
    assert len(said) == ours
    model = timm.create_model(f"local-dir:{path.parent}", pretrained=True, num_classes=3, in_chans=1)
    assert model(x[:, :1]).shape == (2, 3)
    assert_close("stem", model.patch_embed.proj.weight, adapted_stem(source.patch_embed.proj.weight, 1))
    body = next(name for name in source.state_dict() if "blocks.0" in name and "norm" in name)
    assert torch.equal(model.state_dict()[body], source.state_dict()[body])
    if ours:
        with pytest.raises(ValueError, match="option_of_tomorrow"):
            timm.create_model(f"local-dir:{path.parent}", option_of_tomorrow=4)


# ---- what does not fit

CLASSES = ("hier", "deit", "daft_full", "daft_conv", "flash")


@pytest.mark.parametrize("case", CLASSES)
def test_what_does_not_fit_is_refused(case):
    """A tensor missing, unknown, of another shape or no tensor; then what is loaded without ``strict``, or assigned.

    With other classes timm loads without ``strict``, so another architecture could load nothing without a message.
    """
    (name, small), model, state = CASES[case], build(case), randomise(build(case)).state_dict()
    first, last = list(state)[1], list(state)[-1]
    missing = {key: t for key, t in state.items() if key != last}
    faulty = {
        "missing": missing,
        "not of this model": {**state, "other.weight": state[last]},
        "of other shapes": {**state, last: torch.cat([state[last], state[last]])},
        "a str": {**state, first: "no tensor"},
    }
    for fault, wrong in faulty.items():
        with pytest.raises((RuntimeError, AttributeError)):
            model.load_state_dict(wrong)
        overlay = dict(state_dict=wrong, num_classes=model.num_classes)
        with pytest.raises(ValueError, match=fault):
            timm.create_model(name, True, pretrained_cfg_overlay=overlay, **small)
    for stranger in (timm.create_model("resnet18"), *(build(other) for other in CLASSES if other != case)):
        for classes in (1000, 5):
            overlay = dict(state_dict=stranger.state_dict())
            with pytest.raises(ValueError, match="does not fit|positions"):
                timm.create_model(name, True, num_classes=classes, pretrained_cfg_overlay=overlay, **small)
    own = model.state_dict()[last].clone()
    result = model.load_state_dict({**missing, "other.weight": torch.zeros(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([last], ["other.weight"])
    assert_same(model.state_dict(), {**state, last: own})
    model.load_state_dict(randomise(build(case)).double().state_dict(), assign=True)
    assert model.patch_embed.proj.weight.dtype == torch.float64


def test_ours_is_not_taken_for_stock(tmp_path):
    source = timm.create_model("daft_conv_s", **STOCK, **MODELS["daft_conv_s"])
    draw_filters(source)
    for size in (64, 96):
        model, _ = create("daft_conv_s", source.state_dict(), tmp_path, img_size=size)
        assert_same(model.state_dict(), source.state_dict())
    (tmp_path / "vit.npz").touch()
    path = str(tmp_path / "vit.npz")
    for name in ("daft_conv_test", "flash_vit_s"):
        one_line("vit.npz' is of JAX; allowed for", lambda name=name: timm.create_model(name, checkpoint_path=path))


# ---- the record of options

NAME = "flowformer_hier_test"


def _three(**options: Any) -> nn.Module:
    return timm.create_model(NAME, num_classes=3, **options)


def _saved(model: nn.Module, folder: Path, prefix: str = "") -> str:
    """Save a model as train.py does."""
    state = {prefix + name: x for name, x in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 1, "arch": NAME}, folder / "c.pth.tar")
    return str(folder / "c.pth.tar")


def _by_pretrained(model: nn.Module, folder: Path, options: dict) -> None:
    overlay = {"file": _saved(model, folder), "num_classes": 3}
    _three(pretrained=True, pretrained_cfg_overlay=overlay, **options)


def _by_local_dir(model: nn.Module, folder: Path, options: dict) -> None:
    save_for_hf(model, folder / "hub", safe_serialization=True)
    timm.create_model(f"local-dir:{folder / 'hub'}", pretrained=True, **options)


def _by_convert(model: nn.Module, folder: Path, options: dict) -> None:
    values = [f"{name}={value}" for name, value in options.items()]
    convert_main([NAME, _saved(model, folder), str(folder / "converted.pth"), "--model-kwargs", *values])


def _by_moving_average(model: nn.Module, folder: Path, options: dict) -> None:
    average, older = ModelEmaV3(model, decay=0.9), ModelEmaV2(model, decay=0.9)
    for each in (average, older):
        each.update(model)
    torch.save({"state_dict": model.state_dict(), "state_dict_ema": average.module.state_dict()}, folder / "e.pth.tar")
    load_checkpoint(_three(**options), str(folder / "e.pth.tar"), use_ema=True)
    _three(**options).load_state_dict(older.module.state_dict())


#: The ways of timm; the contract of the mechanisms has those of torch and safetensors.
WAYS: dict[str, Callable[[nn.Module, Path, dict], Any]] = {
    "resume": lambda model, folder, options: resume_checkpoint(_three(**options), _saved(model, folder), None),
    # Of a model in DistributedDataParallel and torch.compile.
    "checkpoint_path": lambda model, folder, options: _three(
        checkpoint_path=_saved(model, folder, "module._orig_mod."), **options
    ),
    "pretrained": _by_pretrained,
    "local_dir": _by_local_dir,
    "convert": _by_convert,
    "moving_average": _by_moving_average,
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_other_options_are_a_warning(way, tmp_path, caplog):
    """Equal options are silent."""
    model = _three(form="paper")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        WAYS[way](model, tmp_path, {"form": "paper"})
    # The stored arguments of a folder are those of the complete model.
    others = {"form": "released"} if way == "local_dir" else {"form": "released", "num_heads": 8}
    for name, value in others.items():
        (tmp_path / name).mkdir()
        with pytest.warns(UserWarning, match=f"{name}="):
            WAYS[way](model, tmp_path / name, {"form": "paper", name: value})
    said = [line for line in warnings_of(caplog) if "'released'" in line and "'paper'" in line and "form" in line]
    assert len(said) == (way == "local_dir")
    (tmp_path / "linear").mkdir()
    with pytest.warns(UserWarning, match="attention='flow'.*attention='linear'"):
        WAYS[way](_three(), tmp_path / "linear", {"attn_layer": "linear"})


def test_a_stock_transformer_with_another_attention_and_another_kernel():
    """Stock weights warn once; a stock model refuses ours, as strict loading does."""
    flow, stock = create_model(VIT, attn_layer="flow", **SMALL), vit()
    with pytest.warns(UserWarning, match="do not say.*attention='flow'") as caught:
        flow.load_state_dict(stock.state_dict())
    assert len({str(warning.message) for warning in caught}) == 1
    with pytest.raises(RuntimeError, match="blocks.0.attn.attention"):
        vit().load_state_dict(flow.state_dict())
    with pytest.warns(UserWarning, match="attention='flow'.*attention='linear'"):
        replace_attention(stock, "linear").load_state_dict(flow.state_dict())
    with pytest.warns(UserWarning, match="kernel='relu2'.*kernel='laplace'"):
        build("flash", kernel="laplace").load_state_dict(build("flash").state_dict())


# ---- trained weights that are part of the package, and stored checkpoints of every model

DIGITS = "flowformer_hier_digits"


def test_packaged_weights_classify_digits_that_they_have_not_seen(tmp_path):
    """And adapt to other images and classes, as all weights do."""
    assert timm.list_pretrained("flowformer*") == [f"{DIGITS}.uci_digits"]
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        timm.create_model(f"{DIGITS}.untrained", pretrained=True)
    assert Path(timm.get_pretrained_cfg(DIGITS).file).stat().st_size <= 2_000_000
    trained = timm.create_model(DIGITS, pretrained=True).eval()
    write_digits(tmp_path)
    assert validate(trained, loaders(tmp_path, trained)[1])["top1"] >= 97.0  # of 360 held-out digits
    grey = timm.create_model(DIGITS, pretrained=True, in_chans=1, num_classes=3, img_size=64).eval()
    trained.set_input_size(64)
    x = torch.rand(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    features = trained.forward_features(x.expand(-1, 3, -1, -1))
    assert_close("features", grey.forward_features(x), features, 1e-2)
    save_for_hf(trained, tmp_path / "mine", safe_serialization=True)
    assert "weights" not in (tmp_path / "mine" / "config.json").read_text()  # no path of the package


def test_no_registered_model_lacks_a_stored_checkpoint():
    assert {name for name, _ in golden.GOLDEN.values()} | set(golden.SIZES_OF) == set(golden.registered())
    files = {path for file in golden.GOLDEN for path in (golden.weights(file), golden.expected(file))}
    assert set(golden.FOLDER.iterdir()) == files
    assert max(path.stat().st_size for path in files) <= 60_000
    for name, file in golden.SIZES_OF.items():
        classes = {signature(model_entrypoint(x)).return_annotation for x in (name, golden.GOLDEN[file][0])}
        assert len(classes) == 1, name


@pytest.mark.parametrize("file", golden.GOLDEN)
def test_a_stored_checkpoint_gives_its_logits(file):
    """And they depend on every stored tensor: one that was left at its first value would be noticed."""
    name, arguments, x, logits = golden.stored(file)
    path = str(golden.weights(file))
    overlay = dict(file=path, num_classes=arguments["num_classes"])
    for ways in (dict(checkpoint_path=path), dict(pretrained=True, pretrained_cfg_overlay=overlay)):
        model = timm.create_model(name, **arguments, **ways).eval()
        assert_close("logits", model(x), logits, 1e-5)
    assert logits.std(0).min() > 1e-3  # images matter
    state = load_file(path)
    for tensor_name, tensor in state.items():
        if not is_extra_state(tensor_name):  # a record of what the others mean
            model.load_state_dict({**state, tensor_name: tensor + torch.randn_like(tensor)})
            assert (model(x) - logits).abs().max() > 1e-4, tensor_name
