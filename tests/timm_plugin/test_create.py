"""``create_model`` says so where timm's models leave out the attention that they were asked for."""

import pytest
import timm
import torch
from timm.layers import Attention, DiffAttention

from tests.compare import assert_close
from tests.timm_plugin.helpers.models import images
from timm_plugin import attention_layer, create_model
from timm_plugin.layers.attention import SelfAttention

SMALL = dict(img_size=48, depth=2, num_classes=3)


@pytest.mark.parametrize("attn_layer", ["flow", attention_layer("flow", form="paper")])
def test_a_model_that_uses_it_is_timms(attn_layer):
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **SMALL).eval()
    torch.manual_seed(0)
    expected = timm.create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **SMALL).eval()
    assert sum(isinstance(module, SelfAttention) for module in model.modules()) == 2
    assert_close("logits", model(images(model)), expected(images(model)))


@pytest.mark.parametrize(
    "name", ["vit_base_patch16_xp_224", "vit_pwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"]
)
def test_a_model_that_ignores_it_is_refused(name):
    with torch.device("meta"):
        ignored = timm.create_model(name, attn_layer="flow", depth=1)
        assert not any(isinstance(module, SelfAttention) for module in ignored.modules())  # why create_model is there
        with pytest.raises(ValueError, match=f"attn_layer is 'flow', .*{name}"):
            create_model(name, attn_layer="flow", depth=1)


@pytest.mark.parametrize("name", ["eva02_tiny_patch14_224", "resnet18", "nf_regnet_b0"])
def test_a_model_that_does_not_take_it_is_refused(name):
    with torch.device("meta"), pytest.raises(ValueError, match=f"attn_layer is 'flow', .*{name}"):
        create_model(name, attn_layer="flow")


def test_names():
    with pytest.raises(ValueError, match="attn_layer is 'flo'; allowed: .*flow"):
        create_model("vit_base_patch16_xp_224", attn_layer="flo")
    with pytest.raises(ValueError, match="attn_layer is 'flow_source'; allowed: .*flow, "):
        create_model("vit_tiny_patch16_224", attn_layer="flow_source")  # it attends to another sequence
    with pytest.raises(TypeError, match="depht"):
        create_model("vit_tiny_patch16_224", attn_layer="flow", depht=1)


@pytest.mark.parametrize("attn_layer, kind", [("attn", Attention), ("diff", DiffAttention), (Attention, Attention)])
def test_timms_own_attention(attn_layer, kind):
    model = create_model("vit_tiny_patch16_224", attn_layer=attn_layer, **SMALL)
    assert all(type(block.attn) is kind for block in model.blocks)


def test_the_grid_is_the_models():
    args = dict(SMALL, class_token=False, global_pool="avg", img_size=(32, 128))
    layer = attention_layer("daft_conv", window=3)
    for extra in ({}, dict(features_only=True, out_indices=1)):
        model = create_model("vit_tiny_patch16_224", attn_layer=layer, **{**args, **extra})
        layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
        assert {module.grid_size for module in layers} == {(2, 8)}


def test_a_grid_that_is_not_the_models_is_refused_where_tokens_are_counted_too():
    layer = attention_layer("linformer", grid_size=(2, 9))
    with pytest.raises(ValueError, match=r"grid_size is \(2, 9\); allowed: \(3, 3\)"):
        create_model("vit_tiny_patch16_224", attn_layer=layer, **SMALL)
