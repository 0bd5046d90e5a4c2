"""Our checkpoints and the authors' in every way that timm loads them, and all that cannot be loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models import save_for_hf

from recipes.bench.peers.released_image_model import released_forward, released_shapes
from tests.compare import assert_close, weights
from tests.processes import CHECKOUT
from tests.timm_plugin.helpers.checkpoint_files import assert_same, copy_of, randomise
from tests.timm_plugin.helpers.logs import warnings_of
from tests.timm_plugin.helpers.models import CASES, build, images
from timm_plugin.convert import convert
from timm_plugin.models._weights import fit_hierarchical
from timm_plugin.models.flowformer import Flowformer

DIMS, DEPTHS = (24, 36, 48, 60), (1, 2, 1, 1)
RELEASED = dict(img_size=64, embed_dims=DIMS, depths=DEPTHS, num_classes=7)
#: One model of each class, small.
CLASSES = ("hier", "deit", "daft_full", "daft_conv")


@pytest.fixture(scope="module")
def released():
    """A state dict with the authors' names, for 64 x 64 images and 7 classes."""
    generator = torch.Generator().manual_seed(3)
    shapes = released_shapes(classes=7, side=64, embed_dims=DIMS, depths=DEPTHS)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1.0 + t if "norm" in name and name.endswith("weight") else t for name, t in state.items()}


@pytest.fixture
def released_file(released, tmp_path):
    """The file in the authors' format."""
    torch.save({"model": released, "epoch": 299}, tmp_path / "released.pth")
    return str(tmp_path / "released.pth")


def start_released(path, classes, **kwargs):
    """The authors' model started from ``path``, with the file's number of ``classes``."""
    overlay = dict(file=path, num_classes=classes)
    arguments = {**RELEASED, **kwargs}
    return timm.create_model("flowformer_hier_s_12h", True, pretrained_cfg_overlay=overlay, **arguments).eval()


def test_released_outputs(released, released_file, caplog):
    model = start_released(released_file, 7)
    x = images(model)
    assert_close("logits", model(x), released_forward(x, released, DEPTHS), 1e-5)
    assert warnings_of(caplog) == []  # no tensor is left out or new
    sizes = {name: value for name, value in RELEASED.items() if name != "num_classes"}
    converted = convert("flowformer_hier_s_12h", Path(released_file), sizes).eval()
    assert torch.equal(converted(x), model(x))  # the classifier is the file's
    other = start_released(released_file, 7, form="paper")(x)
    assert (other - model(x)).norm() > 1e-2 * other.norm()  # the comparison can distinguish the forms
    x = x.double()
    expected = released_forward(x, {name: tensor.double() for name, tensor in released.items()}, DEPTHS)
    assert_close("logits in float64", model.double()(x), expected)


def test_released_state_dict_fits_the_full_model():
    shapes = released_shapes(classes=1000, side=224, embed_dims=(96, 192, 384, 768), depths=(3, 3, 10, 3))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    model = timm.create_model("flowformer_hier_s_12h", device="meta")
    own = {name: tensor.shape for name, tensor in weights(model.state_dict()).items()}
    assert {name: tensor.shape for name, tensor in fit_hierarchical(state, model).items()} == own


def test_the_authors_names_are_not_adapted_unasked(released, released_file):
    model = Flowformer(**RELEASED, num_heads=12, mlp_init_values=1e-5, form="released_vision", clamp=1.0)
    with pytest.raises(RuntimeError, match=r"pos_embed(.|\n)*pretrained=True(.|\n)*timm_plugin.convert"):
        model.load_state_dict(released)
    with pytest.raises(RuntimeError, match="timm_plugin.convert"):
        timm.create_model("flowformer_hier_s_12h", checkpoint_path=released_file, **RELEASED)


def test_released_state_dict_into_a_model_that_timm_did_not_make(released):
    wide = Flowformer(**{**RELEASED, "img_size": 96}, num_heads=12, mlp_init_values=1e-5)
    wide.load_state_dict(fit_hierarchical(released, wide))
    expected = resample_abs_pos_embed(released["pos_embed"], [24, 24], [16, 16], num_prefix_tokens=0)
    assert_close("positions", wide.pos_embed.weight, expected)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("classes", [7, -1])  # -1 is what train.py's --pretrained-path passes
def test_released_with_other_channels_classes_and_size(classes, channels, released, released_file, caplog):
    torch.manual_seed(7)
    changed = dict(num_classes=5, in_chans=channels, img_size=(64, 96))
    own = timm.create_model("flowformer_hier_s_12h", **{**RELEASED, **changed}).state_dict()
    torch.manual_seed(7)
    state = start_released(released_file, classes, **changed).state_dict()
    stem = released["patch_embed.0.proj.weight"]
    stem = stem.sum(1, keepdim=True) if channels == 1 else torch.cat([stem, stem[:, :1]], 1) * (3 / 4)
    assert_close("stem", state["patch_embed.proj.weight"], stem)
    positions = resample_abs_pos_embed(released["pos_embed"], [16, 24], [16, 16], num_prefix_tokens=0)
    assert_close("positions", state["pos_embed.weight"], positions)
    for name in ("head.fc.weight", "head.fc.bias"):
        assert torch.equal(state[name], own[name]), name
    for name, new_name in (("blocks.1.1.gamma", "stages.1.blocks.1.ls2.gamma"), ("norm.weight", "norm.weight")):
        assert torch.equal(state[new_name], released[name])
    (line,) = warnings_of(caplog)
    assert "new, as first drawn: head.fc.weight, head.fc.bias" in line


def start(source, overlay=(), **kwargs):
    """``flowformer_hier_test`` with the weights of ``source``, as ``pretrained=True`` adapts them."""
    overlay = dict(overlay, state_dict=source.state_dict())
    return timm.create_model("flowformer_hier_test", True, pretrained_cfg_overlay=overlay, **kwargs).eval()


@pytest.mark.parametrize("size", [(32, 96), (32, 128)])  # the second has as many positions as 64 x 64
def test_a_source_that_is_no_square_needs_its_size(size):
    source = build("hier", img_size=size)
    model = start(source, dict(input_size=(3, *size)), img_size=64)
    grid = [side // 4 for side in size]
    expected = resample_abs_pos_embed(source.pos_embed.weight, [16, 16], grid, num_prefix_tokens=0)
    assert_close("positions", model.pos_embed.weight, expected)
    if size == (32, 96):
        with pytest.raises(ValueError, match="192 positions .*input_size"):
            start(source)


def test_another_patch_and_features():
    source = build("hier")
    model = start(source, patch_size=8)
    assert_close("stem", model.patch_embed.proj.weight, resample_patch_embed(source.patch_embed.proj.weight, [8, 8]))
    features = start(source, features_only=True)(images(source))
    for i, expected in enumerate(source.forward_intermediates(images(source), intermediates_only=True)):
        assert_close(f"features {i}", features[i], expected)


LOAD_ELSEWHERE = """
import sys, torch, timm, timm_plugin
for model, target in zip(sys.argv[2::2], sys.argv[3::2]):
    model = timm.create_model(model, pretrained=True).eval()
    with torch.no_grad():
        torch.save(model(torch.load(sys.argv[1], weights_only=True)), target)
"""


def test_folders_load_in_a_new_process_whatever_another_version_stored(tmp_path):
    """Options that have their default may be missing, and options that no version here knows may be present.

    ``test_folders.py`` tests folders as written. Python's default logging is used: warnings reach the console.
    """
    models = {case: randomise(build(case)) for case in CLASSES}
    x = images(models["hier"], size=(64, 64))
    torch.save(x, tmp_path / "images.pt")
    arguments, expected = [], {}
    for case, model in models.items():
        folder, target = tmp_path / case, str(tmp_path / f"{case}.pt")
        save_for_hf(model, folder, safe_serialization=False)
        config = json.loads((folder / "config.json").read_text())
        stored = {x: y for x, y in config.get("model_args", {}).items() if x not in ("in_chans", "num_classes")}
        config["model_args"] = {**stored, "option_of_tomorrow": 3}
        (folder / "config.json").write_text(json.dumps(config))
        arguments += [f"local-dir:{folder}", target]
        expected[target] = model(x).detach()
    command = [sys.executable, "-c", LOAD_ELSEWHERE, str(tmp_path / "images.pt"), *arguments]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the stored argument option_of_tomorrow=3 is not known here and left out") == len(models)
    for target, logits in expected.items():
        assert_close(target, torch.load(target), logits)


def test_an_option_that_the_caller_gives_is_never_left_out(tmp_path):
    save_for_hf(build("daft_conv"), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config.setdefault("model_args", {})["option_of_tomorrow"] = 3
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="option_of_tomorrow"):
        timm.create_model(f"local-dir:{tmp_path / 'model'}", option_of_tomorrow=4)
    with pytest.raises(ValueError, match="option_of_tomorrow"):
        timm.create_model("daft_conv_test", option_of_tomorrow=3)


@pytest.mark.parametrize("case", CLASSES)
def test_a_folder_for_other_classes_and_channels(case, tmp_path):
    source = randomise(build(case))
    save_for_hf(source, tmp_path / "model", safe_serialization=True)
    model = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=True, num_classes=3, in_chans=1)
    assert model(torch.randn(1, 1, 64, 64)).shape == (1, 3)
    assert_close("stem", model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    assert torch.equal(model.norm.weight, source.norm.weight)


def _faulty(state):
    """Description of a fault -> a state dict with it."""
    first, last = list(state)[1], list(state)[-1]
    wider = torch.cat([state[last], state[last]])
    return {
        "missing": {name: t for name, t in state.items() if name != last},
        "not of this model": {**state, "other.weight": state[last]},
        "of other shapes": {**state, last: wider},
        "a str": {**state, first: "no tensor"},
    }


@pytest.mark.parametrize("case", CLASSES)
def test_what_does_not_fit_is_refused(case):
    model, (name, small) = build(case), CASES[case]
    for fault, state in _faulty(randomise(build(case)).state_dict()).items():
        with pytest.raises((RuntimeError, AttributeError)):
            model.load_state_dict(state)
        overlay = dict(state_dict=state, num_classes=model.num_classes)
        with pytest.raises(ValueError, match=fault):
            timm.create_model(name, True, pretrained_cfg_overlay=overlay, **small)


@pytest.mark.parametrize("case", CLASSES)
def test_not_strict_and_assigned(case):
    """Unexpected tensors are named, missing ones stay unchanged; assigned tensors become the model's."""
    model, state = build(case), randomise(build(case)).state_dict()
    own, last = copy_of(model.state_dict()), list(state)[-1]
    part = {**_faulty(state)["missing"], "other.weight": torch.zeros(1)}
    result = model.load_state_dict(part, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([last], ["other.weight"])
    assert_same(model.state_dict(), {**state, last: own[last]})
    model.load_state_dict(randomise(build(case)).double().state_dict(), assign=True)
    assert model.patch_embed.proj.weight.dtype == torch.float64


@pytest.mark.parametrize("classes", [1000, 5])
@pytest.mark.parametrize("case", CLASSES)
def test_another_architecture_is_refused_whatever_the_classes(case, classes):
    """With other classes timm loads without ``strict``, so it could load nothing at all without a message."""
    names = {"hier": "flowformer_hier_test", "deit": "flowformer_deit_ti", "daft_full": "daft_full_s"}
    for other in {*CLASSES, "resnet"} - {case}:
        if (case, other) == ("daft_full", "deit"):
            continue  # a vision transformer, which can start DAFT-full; but it has another width
        stranger = timm.create_model("resnet18") if other == "resnet" else build(other)
        with pytest.raises(ValueError, match="does not fit"):
            overlay = dict(state_dict=stranger.state_dict())
            name = names.get(case, "daft_conv_test")
            timm.create_model(name, pretrained=True, num_classes=classes, pretrained_cfg_overlay=overlay)


def test_an_option_that_changes_what_stored_weights_mean_is_a_warning(tmp_path, caplog):
    save_for_hf(build("hier", form="paper"), tmp_path / "model")
    path = f"local-dir:{tmp_path / 'model'}"
    timm.create_model(path, pretrained=True)
    assert warnings_of(caplog) == []
    timm.create_model(path, pretrained=True, form="released")
    (line,) = warnings_of(caplog)
    assert "form" in line and "'released'" in line and "'paper'" in line
