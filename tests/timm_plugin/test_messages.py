"""A mistake in any argument of ours is one line that says the argument, the value, and what is near or allowed."""

from collections.abc import Callable

import pytest
import timm
from torch import nn

from timm_plugin import attention_layer, create_model, replace_attention, store_attention, tell_grid
from timm_plugin.models.flowformer import Flowformer

VIT = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3)
#: One model of each class of ours, and what makes it small.
OURS = {
    "flowformer_hier_test": {},
    "soft_hier_s": dict(embed_dims=(16, 24), depths=(1, 1)),
    "flowformer_deit_ti": SMALL,
    "daft_full_s": SMALL,
    "daft_conv_test": {},
    "flash_vit_s": dict(embed_dim=32, depth=1),
    "mixer_deit_s": dict(num_blocks=1),
}
#: What is given as the attention of a model, and what the message must hold.
NO_ATTENTION = [
    ("flwo", "'flwo'.*nearest: 'flow'"),
    ("flow*1000000000", r"'flow\*1000000000'.*allowed"),
    ("flow*" + "9" * 5000, "allowed"),
    ("flow,flwo", "'flwo'.*nearest: 'flow'"),
    ("flow*0", r"'flow\*0'.*NAME\*COUNT"),
    ({"a": "flow"}, "'a'"),
    (3, "3; allowed"),
    (int, "int"),
    (nn.Linear, "Linear"),
]


def _vit(**further) -> nn.Module:
    return timm.create_model(VIT, **{**SMALL, **further})


def _one_line(said: str, call: Callable) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500


@pytest.mark.parametrize(("given", "said"), NO_ATTENTION)
def test_attention_that_is_none(given, said):
    if given is not nn.Linear:  # a class of layers, of which timm says that it does not take heads
        _one_line(f"attn_layer is .*{said}", lambda: create_model(VIT, attn_layer=given, **SMALL))
        for name in ("flowformer_hier_test", "flowformer_deit_ti"):
            _one_line(f"attn_layer is .*{said}", lambda name=name: timm.create_model(name, attn_layer=given))
    _one_line(said, lambda: replace_attention(_vit(), given))
    if not isinstance(given, dict):  # a pattern is none of one place
        said = "'blocks.0' is .*allowed" if "*" in str(given) or "," in str(given) else said
        _one_line(said, lambda: replace_attention(_vit(), {"blocks.0": given}))
    _one_line("attention is ", lambda: attention_layer(given))


def test_a_list_is_no_attention():
    _one_line(r"attn_layer is \['flow'\]", lambda: create_model(VIT, attn_layer=["flow"], **SMALL))
    _one_line(r"name is \['flow'\]", lambda: replace_attention(_vit(), ["flow"]))
    _one_line(r"\['flow'\]", lambda: attention_layer(["flow"]))


@pytest.mark.parametrize("name", OURS)
def test_an_argument_that_no_model_has(name):
    said = f"{name} has no argument 'imgsize'.*nearest: 'img_size'"
    _one_line(said, lambda: timm.create_model(name, imgsize=64, **OURS[name]))


def test_an_argument_that_the_class_has_not():
    _one_line("Flowformer has no argument 'depht'; .*nearest: 'depths'", lambda: Flowformer(depht=3))


@pytest.mark.parametrize("attn_layer", ["daft_full", "cosformer", "linformer", "synthesizer", "sinkhorn"])
def test_positions_without_a_number_of_tokens(attn_layer):
    said = f"dynamic_img_size is True.*'{attn_layer}'"
    given = dict(dynamic_img_size=True)
    _one_line(said, lambda: create_model(VIT, attn_layer=attn_layer, **given, **SMALL))
    _one_line(said, lambda: replace_attention(_vit(**given), attn_layer))
    _one_line(said, lambda: timm.create_model("flowformer_hier_test", attn_layer=attn_layer, **given))


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("blocks.2-0", "the place 'blocks.2-0' has the range 2-0"),
        ("blocks.0-999999999", "the place 'blocks.0-999999999' .*blocks.2 is not there"),
        ("block.0", "the place 'block.0'.*nearest: 'blocks.0'"),
        ("blocks.0.mlp", "blocks.0.mlp is no attention"),
        (3, "the place 3"),
    ],
)
def test_places(place, said):
    _one_line(said, lambda: replace_attention(_vit(), {place: "flow"}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(frm="paper"), "'flow' has no option 'frm'.*nearest: 'form'"),
        (dict(form="papr"), "form is 'papr'.*nearest: 'paper'"),
        (dict(form=["paper"]), r"form is \['paper'\]"),
        (dict(clamp="much"), "clamp is 'much'"),
        (dict(max_tokens="x"), "max_tokens is '?x"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(grid_size=3), "grid_size is 3"),
    ],
)
def test_options(options, said):
    _one_line(said, lambda: attention_layer("flow", **options))
    _one_line(said, lambda: replace_attention(_vit(), "flow", **options))
    if not options.keys() & {"max_tokens", "grid_size"}:
        _one_line(said, lambda: replace_attention(_vit(), {"blocks.0": ("flow", options)}))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("patch_size", "a"),
        ("in_chans", 0),
        ("num_classes", "a"),
        ("embed_dims", "abcd"),
        ("depths", 3),
        ("num_heads", "a"),
        ("num_heads", 0),
        ("mlp_ratio", "a"),
        ("norm_layer", "a"),
        ("act_layer", "a"),
        ("img_size", "a"),
        ("global_pool", "a"),
        ("drop_rate", 3.0),
        ("pos_drop_rate", "a"),
        ("proj_drop_rate", -1),
        ("attn_drop_rate", "a"),
        ("drop_path_rate", "a"),
    ],
)
def test_arguments_of_the_hierarchical_model(argument, value):
    _one_line(f"{argument} is {value!r}|{argument} .*{value}", lambda: Flowformer(**{argument: value}))
    _one_line(argument, lambda: timm.create_model("flowformer_hier_test", **{argument: value}))


@pytest.mark.parametrize("function", [tell_grid, store_attention, lambda model: replace_attention(model, "flow")])
def test_what_is_no_model(function):
    _one_line("model is ", lambda: function(3))
