"""An error in any argument of ours is a ValueError of one line: the argument, the value, and what is allowed."""

import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from timm.models import create_feature_extractor
from torch import nn

from tests.timm_plugin.helpers import CASES, SMALL, VIT, build, images, one_line, vit
from timm_plugin import attention_layer, create_model, replace_attention, store_attention, tell_grid
from timm_plugin.models.flowformer import Flowformer

#: Parts that these vision transformers replace or lack.
_PARTS = dict(attn_layer=["flow"], block_fn=[nn.Identity], embed_layer=[nn.Identity], qk_norm=[True])
_PARTS |= dict(patch_drop_rate=[0.1])
#: Case -> argument of a model -> values that are not allowed.
VALUES = {
    "hier": dict(
        img_size=[2, 63, "64", (64, 64, 3)],
        patch_size=[0, "a"],
        in_chans=[0],
        num_classes=[-1, "a"],
        embed_dims=["abcd"],
        depths=[3, (1, 1), (1, 1, 1, 10**9), (1, 0, 1, 1)],
        num_heads=[0, 7, "a", (4, 4)],
        mlp_ratio=["a"],
        norm_layer=["a"],
        act_layer=["a"],
        global_pool=["a", "token"],
        drop_rate=[3.0],
        pos_drop_rate=["a"],
        proj_drop_rate=[-1],
        attn_drop_rate=["a"],
        drop_path_rate=["a"],
        form=["papr"],
        clamp=["much"],
    ),
    "daft_conv": dict(
        _PARTS,
        img_size=[8, 50, "64"],
        depth=[10**9],
        num_heads=[5],
        window=[0, 4, (3, 4), (3, 5, 7), "11"],
        class_token=[True],
        reg_tokens=[4],
        pos_embed=["learn"],
        no_embed_class=[True],
        pool_include_prefix=[True],
        pos_drop_rate=[0.1],
        dynamic_img_size=[False],
        global_pool=["token"],
        entropy_weight=[-0.001, float("nan"), "much"],
        gumbel_temperature=[0.0, -0.5],
    ),
    "daft_full": dict(
        _PARTS,
        img_size=[50, (8, 64)],
        num_heads=[5],
        bias_dim=[-1],
        dynamic_img_size=[True],
        dynamic_img_pad=[True],
    ),
    "flash": dict(
        _PARTS,
        img_size=[65],
        class_token=[True],
        global_pool=["token"],
        chunk_rows=[0],
        dynamic_img_size=[True],
        dynamic_img_pad=[True],
        query_dim=[15],
        kernel=["gelu"],
    ),
}


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [(case, name, x) for case, names in VALUES.items() for name in names for x in names[name]],
)
def test_a_value_of_a_model(case, name, value):
    shown = re.escape(str(value).strip("()")) if value != (1, 0, 1, 1) else "0"
    one_line(f"{name}.*{shown}.*; allowed", lambda: build(case, **{name: value}))


#: Case, arguments that do not go together, and the message.
TOGETHER = [
    ("hier", dict(attn_layer="softmax", form="paper"), "attention 'softmax' has no option 'form'"),
    ("hier", dict(attn_layer="attn", form="paper"), "attn_layer is 'attn', .*form; allowed"),
    ("hier", dict(init_values=1e-5, mlp_init_values=1e-5), "init_values is 1e-05 and mlp_init_values 1e-05"),
    ("hier_soft", dict(ratio=(4, 2)), r"ratio is \(4, 2\)"),
    ("hier_cosformer", dict(dynamic_img_size=True), "dynamic_img_size is True; allowed .*'cosformer'.*False"),
    ("daft_conv", dict(gumbel_temperature=0.5, local_only=True), "local_only=True is given; allowed"),
    ("daft_full", dict(class_token=False), "global_pool is 'token'; allowed"),
    # An argument that no model has.
    *((case, dict(imgsize=64), "has no argument 'imgsize'.*nearest: 'img_size'") for case in VALUES),
    ("deit", dict(imgsize=64), "has no argument 'imgsize'.*nearest: 'img_size'"),
]


@pytest.mark.parametrize(("case", "arguments", "said"), TOGETHER)
def test_arguments_of_a_model(case, arguments, said):
    one_line(said, lambda: build(case, **arguments))


@pytest.mark.parametrize(
    ("case", "size", "allowed"),
    [
        ("hier", (32, 64), "64 x 64"),
        ("hier dynamic", (2, 64), ""),
        ("hier dynamic", (62, 64), ".*4 x 4"),
        ("daft_full", (64, 96), "64 x 64"),
        ("daft_conv", (64, 50), ".*16 x 16"),
        ("daft_conv", (8, 64), ""),
        ("flash", (80, 64), "64 x 64"),
    ],
)
def test_images_and_sizes_afterwards(case, size, allowed):
    case, _, dynamic = case.partition(" ")
    model = build(case, **({"dynamic_img_size": True} if dynamic else {}))
    one_line(f"x has image size {size[0]} x {size[1]}; allowed: {allowed}", lambda: model(images(model, size=size)))
    for shape in ([2, 1, 64, 64], [3, 64, 64]):
        said = re.escape(f"x has shape {shape}; allowed: (batch, 3, height, width)")
        one_line(said, lambda shape=shape: model(torch.randn(shape)))
    one_line(r"img_size is \(2, 64\); allowed: at least", lambda: model.set_input_size((2, 64)))
    if case == "hier":
        one_line("global_pool is 'token'", lambda: model.reset_classifier(3, "token"))
        one_line("num_classes is -3", lambda: model.reset_classifier(-3))
    assert model(images(model)).shape == (2, 1000)


# ---- attention


#: An attention for a model, and the text that the message must contain.
NO_ATTENTION = [
    ("flwo", "'flwo'.*nearest: 'flow'"),
    ("flow*1000000000", r"'flow\*1000000000'.*allowed"),
    ("flow*" + "9" * 5000, "allowed"),
    ("flow,flwo", "'flwo'.*nearest: 'flow'"),
    ("flow,attn", "'attn'"),  # timm's own: softmax is ours
    ("flow*9,softmax", "a pattern of 10 layers; allowed: of at most"),
    ("flow*0", r"'flow\*0'.*NAME\*COUNT"),
    ({"a": "flow"}, "'a'"),
    (["flow"], r"\['flow'\]"),
    ("flow_source", "'flow_source'; allowed: .*flow"),  # of another sequence
    ("rfa_gate", "'rfa_gate'; allowed: .*flow"),  # sees only earlier tokens
    (3, "3; allowed"),
    (int, "int"),
    (nn.Linear, "Linear"),
]


def _timms(case: str, **arguments: Any) -> nn.Module:
    """The model of ``case`` by timm's own ``create_model``."""
    name, small = CASES[case]
    return timm.create_model(name, **{**small, **arguments})


@pytest.mark.parametrize(("name", "said"), NO_ATTENTION)
def test_attention_that_is_none(name, said):
    if name is not nn.Linear:  # a class of layers that does not accept heads, as timm reports
        one_line(f"attn_layer is .*{said}", lambda: create_model(VIT, attn_layer=name, **SMALL))
        for case in ("hier", "deit"):
            one_line(f"attn_layer is .*{said}", lambda case=case: _timms(case, attn_layer=name))
    one_line(said, lambda: replace_attention(vit(), name))
    if not isinstance(name, dict):  # a pattern is never one module path
        in_place = "'blocks.0' is .*allowed" if "*" in str(name) or "," in str(name) else said
        one_line(in_place, lambda: replace_attention(vit(), {"blocks.0": name}))
    one_line("attention is ", lambda: attention_layer(name))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("flow", dict(frm="paper"), "'flow' has no option 'frm'.*nearest: 'form'"),
        ("flow", dict(form="papr"), "form is 'papr'.*nearest: 'paper'"),
        ("flow", dict(form=["paper"]), r"form is \['paper'\]"),
        ("flow", dict(clamp="much"), "clamp is 'much'"),
        ("flow", dict(shape=1), "no option 'shape'"),
        ("soft", dict(ratio=0), "ratio is 0"),
        ("flow", dict(max_tokens="x"), "max_tokens is '?x"),
        ("flow", dict(max_tokens=0), "max_tokens is 0"),
        *(("soft", dict(grid_size=x), "grid_size is .*; allowed: two") for x in (5, "ab", (2, 8, 1), (2, 8.0), (0, 4))),
    ],
)
def test_options_of_an_attention(name, options, said):
    """Nothing is changed when they are refused."""
    stages = build("hier")
    kinds = [type(module) for module in stages.modules()]
    one_line(said, lambda: attention_layer(name, **options))
    one_line(said, lambda: replace_attention(vit(), name, **options))
    if not options.keys() & {"max_tokens", "grid_size"}:
        one_line(said, lambda: replace_attention(vit(), {"blocks.0": (name, options)}))
        one_line(said, lambda: replace_attention(stages, name, **options))
    assert [type(module) for module in stages.modules()] == kinds


#: An attention for a model of two blocks, options, and the message.
PLACES = [
    ("flow*7,softmax", {}, "name is .*a pattern of 8 layers; allowed: of at most 2"),
    ("flow,softmax", {"rows": 3}, "has no option 'rows'; allowed: .*form"),
    ({}, {}, "without a place"),
    ({"blocks.0": "flow"}, {"form": "paper"}, "form is given together with places"),
    ({"blocks.2-0": "flow"}, {}, "the place 'blocks.2-0' has the range 2-0"),
    ({"blocks.0-999999999": "flow"}, {}, "'blocks.0-999999999' is not one of .*blocks.2 is not there; .*blocks.0.a"),
    ({"block.0": "flow"}, {}, "the place 'block.0'.*nearest: 'blocks.0'"),
    ({"blocks.0.mlp": "flow"}, {}, "blocks.0.mlp is no attention"),
    ({3: "flow"}, {}, "the place 3"),
    ({"": "flow"}, {}, "the place ''"),
    ({"blocks": "flow", "blocks.1": "linear"}, {}, "blocks.1.attn is in 'blocks' and in 'blocks.1'"),
    ({"blocks.0": ("flow", {"rows": 3})}, {}, "'flow' has no option 'rows'"),
    ({"blocks.0": (attention_layer("flow"), {"form": "paper"})}, {}, "allowed: a class that has its options"),
    ({"blocks.0": nn.Linear}, {}, "kind of 'blocks.0' is"),
]


@pytest.mark.parametrize(("name", "options", "said"), PLACES)
def test_places_and_patterns_that_do_not_fit_change_nothing(name, options, said):
    model = vit()
    before = [type(module) for module in model.modules()]
    one_line(said, lambda: replace_attention(model, name, **options))
    assert [type(module) for module in model.modules()] == before


Flow = attention_layer("flow")


def traced() -> nn.Module:
    model = vit().eval()
    return torch.jit.trace(model, (images(model),))


@pytest.mark.parametrize(
    ("said", "call"),
    [
        ("num_heads is 5 and dim 24; allowed", lambda: Flow(24, 5)),
        *(("num_heads is ", lambda x=x: Flow(24, x)) for x in (0, 2.0, True, "2", None, [2])),
        ("norm_layer is None; allowed with qk_norm", lambda: Flow(24, 3, qk_norm=True)),
        (
            "qk_norm.*'reformer'.*False",
            lambda: attention_layer("reformer")(24, 3, qk_norm=True, norm_layer=nn.LayerNorm),
        ),
        (
            "9 tokens; allowed .*grid of 2 x 8",
            lambda: attention_layer("soft", grid_size=(2, 8))(24, 3)(torch.ones(1, 9, 24)),
        ),
        ("9 tokens on an unknown grid", lambda: attention_layer("daft_conv")(24, 3)(torch.ones(1, 9, 24))),
        ("number of tokens.*allowed", lambda: attention_layer("daft_full")(24, 3)),
        ("Flowformer has no argument 'depht'; .*nearest: 'depths'", lambda: Flowformer(depht=3)),
        ("model is 3", lambda: tell_grid(3)),
        ("model is a int", lambda: store_attention(3)),
        ("model is 3", lambda: replace_attention(3, "flow")),
        ("model is a Attention .*attention itself", lambda: replace_attention(Attention(32, 2), "flow")),
        ("no module is one", lambda: replace_attention(nn.Linear(2, 2), "flow")),
        ("Sequential that does not know its", lambda: store_attention(nn.Sequential(vit()))),
        ("without attention of", lambda: store_attention(vit())),
        ("model is a TopLevelTracedModule, .*allowed", lambda: replace_attention(traced(), "flow")),
        (
            "a graph that torch.fx .*allowed",
            lambda: replace_attention(create_feature_extractor(vit(), ["norm"]), "flow"),
        ),
    ],
)
def test_a_call(said, call):
    one_line(said, call)
