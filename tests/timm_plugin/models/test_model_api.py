"""Other uses of a registered model: sizes, heads, options, dtypes, layer-wise learning rates."""

import pytest
import timm
import torch
from timm.layers import DropPath, resample_abs_pos_embed
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn
from torch.nn import functional as F

from common.attention import FlowAttention, LinearAttention
from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import CASES, HIERARCHICAL, UNITS, build, images
from timm_plugin import tell_grid
from timm_plugin.layers.attention import SelfAttention

FLOW_OPTIONS = dict(form="paper", clamp=5.0, phi="relu", competition="none", allocation="none")


@pytest.mark.parametrize(
    ("name", "args", "millions"),
    [
        ("daft_full_s", {}, 22.6),
        ("daft_conv_s", {}, 22.54),  # the paper prints 23.0, which a window of 15 gives
        ("daft_conv_s", {"window": 15}, 23.0),
        ("daft_conv_s_h16", {}, 20.3),
        ("daft_conv_b_384", {}, 79.7),
        ("flowformer_hier_s", {}, 43.3),
        ("flowformer_hier_s_12h", {}, 43.3),
        ("flowformer_deit_s", {}, 22.0),
        ("flowformer_deit_ti", {}, 5.7),
        ("flowformer_hier_ti", {}, 7.4),
        ("flowformer_deit_s_distilled", {}, 22.4),  # DeiT-S distilled has as many
        ("flash_vit_s", {}, 22.7),  # DeiT-S has 22.1
        ("flash_quad_vit_s", {}, 22.7),
    ],
)
def test_parameter_counts(name, args, millions):
    model = timm.create_model(name, device="meta", **args)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_papers_configuration():
    model = timm.create_model("flowformer_hier_s", device="meta")
    assert [len(stage.blocks) for stage in model.stages] == [3, 3, 10, 3]
    assert [info["num_chs"] for info in model.feature_info] == [96, 192, 384, 768]
    assert {block.attn.num_heads for stage in model.stages for block in stage.blocks} == {16}
    assert model.pos_embed.weight.shape == (1, 3136, 96)
    maps = model.forward_intermediates(torch.empty(1, 3, 224, 224, device="meta"), intermediates_only=True)
    assert [map.shape[2] * map.shape[3] for map in maps] == [3136, 784, 196, 49]
    attention = model.stages[0].blocks[0].attn.attention
    assert (attention.options.form, attention.options.clamp, attention.causal) == ("released", 1.0, False)


def test_the_released_configuration():
    model = timm.create_model("flowformer_hier_s_12h", device="meta")
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert {block.attn.num_heads for block in blocks} == {12}
    assert {block.attn.attention.options.form for block in blocks} == {"released_vision"}
    assert all(isinstance(block.ls1, nn.Identity) and block.ls2.init_values == 1e-5 for block in blocks)
    rates = [getattr(block.drop_path2, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx(torch.linspace(0, 0.2, 19).tolist())


# ---- sizes


@pytest.mark.parametrize("case", CASES)
def test_set_input_size(case):
    model = build(case)
    step = 4 if case in HIERARCHICAL else 16
    grid = (5, 9)
    size = (grid[0] * step, grid[1] * step)
    model.set_input_size(img_size=size)
    if case == "daft_conv_vit":
        tell_grid(model)
    assert model(images(model, size=size)).shape == (2, model.num_classes)
    assert model.patch_embed.grid_size == grid


def test_set_input_size_resamples_positions():
    model = build("hier")
    before = model.pos_embed.weight.detach().clone()
    model.pos_embed.weight.requires_grad_(False)
    model.set_input_size((64, 64))
    assert torch.equal(model.pos_embed.weight, before)
    model.set_input_size((96, 40))
    assert_close("positions", model.pos_embed.weight, resample_abs_pos_embed(before, [24, 10], num_prefix_tokens=0))
    assert model.pos_embed.weight.is_leaf and not model.pos_embed.weight.requires_grad


def test_set_patch_size():
    model = build("hier")
    model.set_input_size(patch_size=8)
    assert [info["reduction"] for info in model.feature_info] == [8, 16, 32, 64]
    assert [tuple(m.shape[2:]) for m in model.forward_intermediates(images(model))[1]] == [
        (8, 8),
        (4, 4),
        (2, 2),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("attn_layer", "size"),
    [("flow", size) for size in ((64, 64), (128, 128), (96, 40), (4, 4))]
    + [("soft", (36, 100)), ("daft_conv", (36, 100))],
)
def test_dynamic_size_equals_a_model_of_that_size(attn_layer, size):
    dynamic, fixed = (build(case, attn_layer=attn_layer) for case in ("hier_dynamic", "hier"))
    fixed.load_state_dict(dynamic.state_dict())
    fixed.set_input_size(size)
    x = images(dynamic, size=size)
    assert_close("logits", dynamic(x), fixed(x))


@pytest.mark.parametrize("dynamic", [True, False])
def test_padding_to_whole_patches(dynamic):
    args = dict(img_size=(50, 61), dynamic_img_pad=True, dynamic_img_size=dynamic)
    model = build("hier", **args)
    x = images(model)
    reference = build("hier", img_size=(52, 64))
    reference.load_state_dict(model.state_dict())
    assert_close("logits", model(x), reference(F.pad(x, (0, 3, 0, 2))))
    model.set_input_size((30, 30))
    assert model(images(model, size=(30, 30))).shape == (2, 1000)


def test_odd_maps_are_padded_not_cut():
    """A token in the last row or column of an odd map still affects the output."""
    model = build("hier", img_size=(36, 36))
    x = images(model)
    changed = x.clone()
    changed[:, :, -4:, -4:] += 1.0
    corner = (model.forward_features(changed) - model.forward_features(x))[:, :, -1, -1]
    assert corner.abs().max() > 1e-3
    assert [m.shape[2] for m in model.forward_intermediates(x)[1]] == [9, 5, 3, 2]


# ---- arguments


@pytest.mark.parametrize("case", ["hier", "deit"])
def test_flow_options_reach_every_block(case):
    model = build(case, **FLOW_OPTIONS)
    attentions = [module for module in model.modules() if isinstance(module, FlowAttention)]
    assert len(attentions) == (5 if case == "hier" else 3)
    for attention in attentions:
        assert {name: getattr(attention.options, name) for name in FLOW_OPTIONS} == FLOW_OPTIONS
    plain = build(case)
    plain.load_state_dict(model.state_dict())
    x = images(model)
    assert (model(x) - plain(x)).abs().max() > 1e-4


def test_options_as_a_command_line_gives_them():
    model = build("hier", clamp="inf", form="released")
    assert model.stages[0].blocks[0].attn.attention.options.clamp == float("inf")
    model = build("hier", attn_layer="linear", phi="relu")
    attention = model.stages[0].blocks[0].attn.attention
    assert isinstance(attention, LinearAttention) and attention.options.phi == "relu"


@pytest.mark.parametrize("case", ["hier", "hier_12h", "deit"])
def test_timms_own_attention(case):
    model = build(case, attn_layer="attn")
    assert torch.isfinite(model(images(model))).all()


def test_rates_reach_their_layers():
    model = build("hier", drop_rate=0.1, pos_drop_rate=0.2, proj_drop_rate=0.3, attn_drop_rate=0.4, drop_path_rate=0.5)
    blocks = [block for stage in model.stages for block in stage.blocks]
    assert model.head.drop.p == 0.1
    assert model.pos_embed.drop.p == 0.2
    for block in blocks:
        assert block.attn.proj_drop.p == block.mlp.drop1.p == block.mlp.drop2.p == 0.3
        assert block.attn.attn_drop.p == 0.4
    assert not isinstance(blocks[0].drop_path1, DropPath)
    rates = [block.drop_path1.drop_prob for block in blocks[1:]]
    assert rates == pytest.approx([0.125, 0.25, 0.375, 0.5])
    x = images(model)
    assert torch.equal(model(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize(
    ("pool", "shape"),
    [("", (2, 48, 2, 2)), ("avg", (2, 48)), ("max", (2, 48)), ("avgmax", (2, 48)), ("catavgmax", (2, 96))],
)
def test_pooling(pool, shape):
    model = build("hier", num_classes=0, global_pool=pool)
    x = images(model)
    assert model(x).shape == shape
    features = model.forward_features(x)
    assert model.forward_head(features, pre_logits=True).shape == shape
    if pool == "avg":
        assert_close("pooled", model.forward_head(features, pre_logits=True), features.mean((2, 3)))
    assert model.head_hidden_size == (96 if pool == "catavgmax" else 48)
    other = build("hier")
    other.reset_classifier(0, pool)
    assert other(x).shape == shape and other.global_pool == pool
    if pool:
        other.reset_classifier(9)
        assert other(x).shape == (2, 9) and other.get_classifier().in_features == model.head_hidden_size


def test_layer_scales():
    both = build("hier", init_values=0.5)
    assert both.stages[0].blocks[0].ls1.init_values == both.stages[0].blocks[0].ls2.init_values == 0.5
    mlp = build("hier", mlp_init_values=0.5)
    assert isinstance(mlp.stages[0].blocks[0].ls1, nn.Identity)
    assert torch.equal(mlp.stages[0].blocks[0].ls2.gamma, torch.full((16,), 0.5))


# ---- precision


@pytest.mark.parametrize("case", CASES)
def test_precisions(case):
    """Cast, under autocast, and built and trained in a dtype."""
    model = build(case)
    x = images(model)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close("autocast", model(x), expected, 3e-2)
    for dtype, tolerance in ((torch.float16, 5e-3), (torch.bfloat16, 3e-2)):
        assert_close(f"{dtype}", build(case).to(dtype)(x.to(dtype)), expected, tolerance)
    model = build(case, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    if case in HIERARCHICAL:  # older versions of timm do not keep it in their own models
        model.reset_classifier(5)
        assert model.get_classifier().weight.dtype == torch.bfloat16
    out = model.train()(x.bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()


def test_meta_model_can_be_filled_afterwards():
    model = build("hier", device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    model.init_weights()
    x = images(model)
    assert torch.isfinite(model(x)).all()
    expected = model(x)
    again = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    assert_close("channels last", again, expected)
    assert model.pos_embed.weight.std().item() == pytest.approx(0.02, rel=0.1)


# ---- training aids


@pytest.mark.parametrize("case", CASES)
def test_checkpointing_recomputes_every_block(case):
    model = build(case).train()
    for module in model.modules():
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    x, calls = images(model), []
    attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
    for attention in attentions:
        attention.register_forward_hook(lambda *_: calls.append(1))
    parameters = dict(model.named_parameters())
    torch.manual_seed(1)  # from the samples that a selection draws
    expected = gradients(model(x), parameters.values())
    assert len(calls) == len(attentions)
    calls.clear()
    model.set_grad_checkpointing()
    torch.manual_seed(1)
    actual = gradients(model(x), parameters.values())
    assert len(calls) == 2 * len(attentions)
    for name, gradient, other in zip(parameters, actual, expected):
        assert_close(f"gradient of {name}", gradient, other)
    calls.clear()
    model.set_grad_checkpointing(False)
    gradients(model(x), parameters.values())
    assert len(calls) == len(attentions)


@pytest.mark.parametrize("case", CASES)
def test_weight_and_layer_decay(case):
    model = build(case)
    names = dict(model.named_parameters())
    wanted = model.no_weight_decay()
    if case in HIERARCHICAL:
        assert wanted == {"pos_embed.weight"} <= set(names)
    else:
        stock = {"pos_embed", "cls_token", "dist_token"} & set(names)
        # timm's own model does not know the parts of a layer.
        filters = {name for name in names if ".attn.attention." in name and case != "daft_conv_vit"}
        units = {name for name in names if case in UNITS and name.endswith((".gamma", ".beta", ".bias.weight"))}
        assert wanted & set(names) == stock | filters | units
    optimizer = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.5)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, p in names.items():
        assert (group_of[id(p)]["weight_decay"] == 0.0) == (p.ndim <= 1 or name in wanted), name
    scale = {name: group_of[id(p)]["lr_scale"] for name, p in names.items()}
    layers = list(model.stages[0].blocks if case in HIERARCHICAL else model.blocks)
    first = layers[0].in_proj if case in UNITS else layers[0].attn.qkv
    assert scale["patch_embed.proj.weight"] == min(scale.values()) < group_of[id(first.weight)]["lr_scale"] < 1.0
    assert {scale[name] for name in scale if name.startswith("head") and name.endswith("weight")} == {1.0}


@pytest.mark.parametrize("coarse", [True, False])
@pytest.mark.parametrize("case", ["hier", "digits"])
def test_groups_follow_depth(case, coarse):
    model = build(case)
    layers = group_parameters(model, model.group_matcher(coarse), reverse=True)
    assert set(layers) == {name for name, _ in model.named_parameters()}
    assert {layers[name] for name in layers if name.startswith(("patch_embed", "pos_embed"))} == {0}
    blocks = [(i, j) for i, stage in enumerate(model.stages) for j in range(len(stage.blocks))]
    for name, layer in layers.items():
        if name.startswith("stages."):
            i, part, j = name.split(".")[1:4]
            block = (int(i), int(j) if part == "blocks" else 0)
            assert layer == 1 + (int(i) if coarse else blocks.index(block)), name
    last = 1 + (len(model.stages) if coarse else len(blocks))
    assert {layers["head.fc.weight"], layers["head.fc.bias"]} <= {last, last + 1}
    assert layers["norm.weight"] == (last if coarse else last - 1)


@pytest.mark.parametrize("case", ["hier", "daft_conv"])
def test_an_image_smaller_than_a_patch_is_padded_as_in_a_stock_vit(case):
    dynamic = dict(dynamic_img_size=True) if case == "hier" else {}
    model = build(case, dynamic_img_pad=True, **dynamic)
    x = images(model, size=(3, 64))
    padded = torch.nn.functional.pad(x, (0, 0, 0, model.patch_embed.patch_size[0] - 3))
    assert_close("logits", model(x), model(padded))
