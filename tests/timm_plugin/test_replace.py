"""Replacing the attention of timm's models, during creation or afterwards."""

import pytest
import timm
import torch
from timm.layers import Attention, DiffAttention
from timm.models import convit, volo
from timm.utils import reparameterize_model

from common.attention import FlowAttention
from tests.compare import assert_close
from tests.timm_plugin.helpers.logs import warnings_of
from tests.timm_plugin.helpers.models import build, draw_filters, images
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.layers.attention import SelfAttention

VIT = dict(img_size=64, depth=2, num_classes=5)


@pytest.mark.parametrize("norms", [{}, dict(qk_norm=True, scale_attn_norm=True)])
def test_a_stock_vit_is_the_one_with_attn_layer(norms, caplog):
    model = timm.create_model("vit_tiny_patch16_224", **VIT, **norms).eval()
    parameters = dict(model.named_parameters())
    expected = timm.create_model(
        "vit_tiny_patch16_224", attn_layer=attention_layer("flow", form="paper"), **VIT, **norms
    ).eval()
    expected.load_state_dict(model.state_dict())
    assert replace_attention(model, "flow", form="paper") is model
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in parameters.items())
    assert all(block.attn.attention.options.form == "paper" for block in model.blocks)
    assert_close("logits", model(images(model)), expected(images(model)))
    assert warnings_of(caplog) == []
    model.train()(images(model)).sum().backward()


def test_softmax_changes_nothing():
    model = timm.create_model("deit3_small_patch16_224", **VIT).eval()
    before = model(images(model))
    assert_close("logits", replace_attention(model, "softmax")(images(model)), before)


@pytest.mark.parametrize(
    "name, small",
    [
        ("cait_xxs24_224", dict(img_size=64, depth=2)),  # talking heads, and class attention
        ("swin_tiny_patch4_window7_224", dict(depths=(1, 1))),  # relative position biases
        ("beit_base_patch16_224", dict(depth=1)),
        ("eva02_tiny_patch14_224", dict(depth=1)),  # rotary positions
        ("vit_base_patch16_xp_224", dict(depth=1)),  # attention inside of the block itself
        ("resnet18", {}),
    ],
)
def test_other_attention_is_refused_with_the_reason(name, small):
    model = timm.create_model(name, **small)
    before = {path: type(module) for path, module in model.named_modules()}
    with pytest.raises(ValueError, match=f"model is a {type(model).__name__} .*;"):
        replace_attention(model, "flow")
    assert {path: type(module) for path, module in model.named_modules()} == before


def test_what_stays_is_a_warning(caplog):
    """DaViT has attention between tokens in windows, and attention between channels."""
    model = replace_attention(timm.create_model("davit_tiny", depths=(1, 1, 1, 1), num_classes=3).eval(), "flow")
    (line,) = warnings_of(caplog)
    assert "these stay: ChannelAttention" in line
    assert sum(isinstance(module, FlowAttention) for module in model.modules()) == 4
    assert torch.isfinite(model(torch.randn(1, 3, 64, 64))).all()


@pytest.mark.parametrize("kind, shape", [(convit.MHSA, (2, 6, 24)), (volo.Attention, (2, 2, 3, 24))])
def test_attention_under_another_name_and_of_maps(kind, shape):
    """ConViT's class names contain neither "attention" nor "attn"; VOLO's attention takes maps of tokens."""
    model = torch.nn.Sequential(kind(24, num_heads=3, qkv_bias=True)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(shape)
    before = model(x)
    assert_close("softmax", replace_attention(model, "softmax")(x), before)
    flow = replace_attention(model, "flow")
    assert isinstance(flow[0].attention, FlowAttention)
    assert (flow(x) - before).abs().max() > 1e-3


def test_numbers_that_no_parameter_shows_tell_kinds_apart():
    """Two layers of one class with equal parameters, the second of which scales its scores differently."""

    class ScaledAttention(Attention):
        def forward(self, x):
            return super().forward(x) * self.factor

    model = torch.nn.Sequential(ScaledAttention(24, 3), ScaledAttention(24, 3))
    model[0].factor, model[1].factor = 1.0, 2.0
    replace_attention(model, "flow")
    assert isinstance(model[0], SelfAttention) and type(model[1]) is ScaledAttention


def test_a_model_on_the_meta_device():
    model = replace_attention(timm.create_model("vit_base_patch16_224", device="meta"), "flow")
    assert sum(isinstance(module, SelfAttention) for module in model.modules()) == 12
    assert all(parameter.is_meta for parameter in model.parameters())


def test_daft_keeps_the_values_and_knows_the_image(caplog):
    args = dict(VIT, img_size=(32, 128), class_token=False, global_pool="avg")  # 2 x 8 tokens, as many as 4 x 4
    model = timm.create_model("vit_tiny_patch16_224", **args).eval()
    values = model.blocks[1].attn.qkv.weight[-192:].clone()
    replace_attention(model, "daft_conv", window=3)
    assert "new: qkv.weight (2), qkv.bias (2), attention." in warnings_of(caplog)[-1]
    assert model.blocks[1].attn.grid_size == (2, 8)
    assert torch.equal(model.blocks[1].attn.qkv.weight[-192:], values)
    assert model(images(model)).shape == (2, 5)
    full = replace_attention(timm.create_model("vit_tiny_patch16_224", **VIT), "daft_full", bias_dim=4)
    assert full.blocks[0].attn.attention.pe0.shape == (17, 4)


@pytest.mark.parametrize("name", ["daft_conv", "soft"])
def test_attention_on_a_grid_without_one_is_refused(name):
    alone = dict(class_token=False, global_pool="avg")
    for args in ({}, dict(alone, dynamic_img_size=True), dict(alone, reg_tokens=4)):
        model = timm.create_model("vit_tiny_patch16_224", **VIT, **args)
        with pytest.raises(ValueError, match="tokens are not those of one grid"):
            create_model("vit_tiny_patch16_224", attn_layer=name, **VIT, **args)
        with pytest.raises(ValueError, match="tokens are not those of one grid"):
            replace_attention(model, name)
        assert all(type(block.attn) is Attention for block in model.blocks)


@pytest.mark.parametrize(("name", "stated"), [("soft", {}), ("daft_conv", {"window": 3}), ("cosformer", {})])
def test_stages_have_grids_of_their_own(name, stated):
    """The result equals the model built with this attention: it loads its weights, and computes the same."""
    args = dict(img_size=64, num_classes=5)
    model = replace_attention(timm.create_model("flowformer_hier_test", **args).eval(), name, **stated)
    built = timm.create_model("flowformer_hier_test", attn_layer=name, **args, **stated).eval()
    model.load_state_dict(built.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), built(x))
    model.set_input_size(96)
    built.set_input_size(96)
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(model(x), built(x))


def test_a_stage_that_does_not_fit_leaves_the_model_as_it_is():
    model = timm.create_model("flowformer_hier_test", img_size=64)
    kinds = [type(stage.blocks[0].attn) for stage in model.stages]
    for name, options, message in (("soft", {"ratio": 0}, "ratio"), ("sof", {}, "sof"), ("soft", {"rate": 2}, "rate")):
        with pytest.raises(ValueError, match=message):
            replace_attention(model, name, **options)
    assert [type(stage.blocks[0].attn) for stage in model.stages] == kinds


@pytest.mark.parametrize("case", ["daft_conv", "daft_conv_vit", "hier", "daft_full"])
def test_timms_reparameterisation(case):
    """``--reparam`` of timm's scripts calls a method of the module by its name."""
    model = build(case)
    draw_filters(model)
    expected = model(images(model))
    assert_close("logits", reparameterize_model(model)(images(model)), expected)


# ---- create_model, which raises if timm's models ignore the requested attention

CREATED = dict(img_size=48, depth=2, num_classes=3)


@pytest.mark.parametrize("attn_layer", ["flow", attention_layer("flow", form="paper")])
def test_a_model_that_uses_it_is_timms(attn_layer):
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **CREATED).eval()
    torch.manual_seed(0)
    expected = timm.create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **CREATED).eval()
    assert sum(isinstance(module, SelfAttention) for module in model.modules()) == 2
    assert_close("logits", model(images(model)), expected(images(model)))


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_xp_224", "vit_pwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"]
)
def test_a_model_that_ignores_it_is_refused(name):
    with torch.device("meta"):
        ignored = timm.create_model(name, attn_layer="flow", depth=1)
        assert not any(isinstance(module, SelfAttention) for module in ignored.modules())  # why create_model exists
        with pytest.raises(ValueError, match=f"attn_layer is 'flow', .*{name}"):
            create_model(name, attn_layer="flow", depth=1)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "resnet18", "nf_regnet_b0"])
def test_a_model_that_does_not_take_it_is_refused(name):
    with torch.device("meta"), pytest.raises(ValueError, match=f"attn_layer is 'flow', .*{name}"):
        create_model(name, attn_layer="flow")


def test_an_argument_that_timm_does_not_have_is_timms_error():
    with pytest.raises(TypeError, match="depht"):
        create_model("vit_tiny_patch16_224", attn_layer="flow", depht=1)


@pytest.mark.parametrize("attn_layer, kind", [("attn", Attention), ("diff", DiffAttention), (Attention, Attention)])
def test_timms_own_attention(attn_layer, kind):
    model = create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **CREATED)
    assert all(type(block.attn) is kind for block in model.blocks)


def test_the_grid_is_the_models():
    args = dict(CREATED, class_token=False, global_pool="avg", img_size=(32, 128))
    layer = attention_layer("daft_conv", window=3)
    for extra in ({}, dict(features_only=True, out_indices=1)):
        model = create_model("vit_tiny_patch16_224", attn_layer=layer, **{**args, **extra})
        layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
        assert {module.grid_size for module in layers} == {(2, 8)}
