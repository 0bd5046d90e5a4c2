"""An error in any of our arguments is one line with the argument, the value, and similar or allowed ones."""

from collections.abc import Callable

import pytest
import timm
from torch import nn

from timm_plugin import attention_layer, create_model, replace_attention, store_attention, tell_grid
from timm_plugin.models.flowformer import Flowformer

VIT = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3)
#: One model of each of our classes, with arguments that make it small.
OURS = {
    "flowformer_hier_test": {},
    "soft_hier_s": dict(embed_dims=(16, 24), depths=(1, 1)),
    "flowformer_deit_ti": SMALL,
    "daft_full_s": SMALL,
    "daft_conv_test": {},
    "flash_vit_s": dict(embed_dim=32, depth=1),
    "mixer_deit_s": dict(num_blocks=1),
}
#: An attention for a model, and the text that the message must contain.
NO_ATTENTION = [
    ("flwo", "'flwo'.*nearest: 'flow'"),
    ("flow*1000000000", r"'flow\*1000000000'.*allowed"),
    ("flow*" + "9" * 5000, "allowed"),
    ("flow,flwo", "'flwo'.*nearest: 'flow'"),
    ("flow*0", r"'flow\*0'.*NAME\*COUNT"),
    ({"a": "flow"}, "'a'"),
    (["flow"], r"\['flow'\]"),
    ("flow_source", "'flow_source'; allowed: .*flow, |'flow_source'; allowed: .*'flow'"),  # of another sequence
    (3, "3; allowed"),
    (int, "int"),
    (nn.Linear, "Linear"),
]


def _vit(**arguments) -> nn.Module:
    return timm.create_model(VIT, **{**SMALL, **arguments})


def _one_line(said: str, call: Callable) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500


@pytest.mark.parametrize(("name", "said"), NO_ATTENTION)
def test_attention_that_is_none(name, said):
    if name is not nn.Linear:  # a class of layers that does not accept heads, as timm reports
        _one_line(f"attn_layer is .*{said}", lambda: create_model(VIT, attn_layer=name, **SMALL))
        for model in ("flowformer_hier_test", "flowformer_deit_ti"):
            _one_line(f"attn_layer is .*{said}", lambda model=model: timm.create_model(model, attn_layer=name))
    _one_line(said, lambda: replace_attention(_vit(), name))
    if not isinstance(name, dict):  # a pattern is never one module path
        said = "'blocks.0' is .*allowed" if "*" in str(name) or "," in str(name) else said
        _one_line(said, lambda: replace_attention(_vit(), {"blocks.0": name}))
    _one_line("attention is ", lambda: attention_layer(name))


@pytest.mark.parametrize("name", OURS)
def test_an_argument_that_no_model_has(name):
    message = f"{name} has no argument 'imgsize'.*nearest: 'img_size'"
    _one_line(message, lambda: timm.create_model(name, imgsize=64, **OURS[name]))


def test_an_argument_that_the_class_has_not():
    _one_line("Flowformer has no argument 'depht'; .*nearest: 'depths'", lambda: Flowformer(depht=3))


@pytest.mark.parametrize("attn_layer", ["daft_full", "cosformer", "linformer", "synthesizer", "sinkhorn"])
def test_positions_without_a_number_of_tokens(attn_layer):
    message, any_size = f"dynamic_img_size is True.*'{attn_layer}'", dict(dynamic_img_size=True)
    _one_line(message, lambda: create_model(VIT, attn_layer=attn_layer, **any_size, **SMALL))
    _one_line(message, lambda: replace_attention(_vit(**any_size), attn_layer))
    _one_line(message, lambda: timm.create_model("flowformer_hier_test", attn_layer=attn_layer, **any_size))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("flow*7,softmax", {}, "name is .*a pattern of 8 layers; allowed: of at most 2"),
        ("flow,softmax", {"rows": 3}, "has no option 'rows'; allowed: .*form"),
        ({}, {}, "without a place"),
        ({"blocks.0": "flow"}, {"form": "paper"}, "form is given together with places"),
        ({"blocks.2-0": "flow"}, {}, "the place 'blocks.2-0' has the range 2-0"),
        (
            {"blocks.0-999999999": "flow"},
            {},
            "'blocks.0-999999999' is not one of .*blocks.2 is not there; .*blocks.0.a",
        ),
        ({"block.0": "flow"}, {}, "the place 'block.0'.*nearest: 'blocks.0'"),
        ({"blocks.0.mlp": "flow"}, {}, "blocks.0.mlp is no attention"),
        ({3: "flow"}, {}, "the place 3"),
        ({"": "flow"}, {}, "the place ''"),
        ({"blocks": "flow", "blocks.1": "linear"}, {}, "blocks.1.attn is in 'blocks' and in 'blocks.1'"),
        ({"blocks.0": ("flow", {"rows": 3})}, {}, "'flow' has no option 'rows'"),
        ({"blocks.0": (attention_layer("flow"), {"form": "paper"})}, {}, "allowed: a class that has its options"),
        ({"blocks.0": nn.Linear}, {}, "kind of 'blocks.0' is"),
    ],
)
def test_places_and_patterns_that_do_not_fit_change_nothing(name, options, said):
    model = _vit()
    before = [type(module) for module in model.modules()]
    _one_line(said, lambda: replace_attention(model, name, **options))
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("flow", dict(frm="paper"), "'flow' has no option 'frm'.*nearest: 'form'"),
        ("flow", dict(form="papr"), "form is 'papr'.*nearest: 'paper'"),
        ("flow", dict(form=["paper"]), r"form is \['paper'\]"),
        ("flow", dict(clamp="much"), "clamp is 'much'"),
        ("flow", dict(shape=1), "no option 'shape'"),
        ("flow", dict(max_tokens="x"), "max_tokens is '?x"),
        ("flow", dict(max_tokens=0), "max_tokens is 0"),
        *(("soft", dict(grid_size=x), "grid_size is .*; allowed: two") for x in (5, "ab", (2, 8, 1), (2, 8.0), (0, 4))),
    ],
)
def test_options(name, options, said):
    _one_line(said, lambda: attention_layer(name, **options))
    _one_line(said, lambda: replace_attention(_vit(), name, **options))
    if not options.keys() & {"max_tokens", "grid_size"}:
        _one_line(said, lambda: replace_attention(_vit(), {"blocks.0": (name, options)}))


@pytest.mark.parametrize("function", [tell_grid, store_attention, lambda model: replace_attention(model, "flow")])
def test_what_is_no_model(function):
    _one_line("model is ", lambda: function(3))
