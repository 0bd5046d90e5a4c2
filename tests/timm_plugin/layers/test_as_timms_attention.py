"""Programs that read timm's Attention, or hook its parts, find the same in ours, or an error names alternatives."""

import warnings

import pytest
import timm
import torch
from timm.layers import Attention
from timm.utils import AttentionExtract
from torch import nn

from common.attention import record_attention
from tests.compare import assert_close
from timm_plugin import attention_layer, replace_attention
from timm_plugin.layers.attention import SelfAttention

VIT = dict(img_size=32, embed_dim=32, depth=2, num_heads=2, num_classes=3)
#: Attributes of timm's Attention that a plain module does not have.
ATTRIBUTES = sorted({*vars(Attention(32, 2)), *dict(Attention(32, 2).named_children())} - set(vars(nn.Module())))


def _layers(**options) -> list[tuple[SelfAttention, Attention]]:
    """Pairs of our layer, built with these arguments or replacing timm's, and timm's layer."""
    stock = Attention(32, 2, **options)
    model = nn.Sequential(Attention(32, 2, **options))
    return [(attention_layer("flow")(32, 2, **options), stock), (replace_attention(model, "hedgehog")[0], stock)]


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_attribute_of_timms_attention_is_there(name):
    options = dict(qkv_bias=True, attn_drop=0.1, proj_drop=0.2, attn_head_dim=8)
    for layer, stock in _layers(**options):
        own, expected = getattr(layer, name), getattr(stock, name)
        if isinstance(expected, nn.Module):
            assert isinstance(own, type(expected)) and own.extra_repr() == expected.extra_repr()
        else:
            assert own == expected


def test_attributes_are_found():
    assert {"num_heads", "head_dim", "attn_dim", "scale", "fused_attn", "attn_drop", "qkv", "proj"} <= set(ATTRIBUTES)


PARTS = ("", "qkv", "q_norm", "k_norm", "proj", "proj_drop", "norm", "attn_drop")


@pytest.mark.parametrize("name", ["flow", "linformer", "daft_conv", "synthesizer", "reformer"])
def test_a_hook_is_called_or_a_warning_says_that_it_is_not(name):
    model = timm.create_model("vit_tiny_patch16_224", class_token=False, global_pool="avg", **VIT)
    layer = replace_attention(model, name).train().blocks[0].attn
    parts = [layer.get_submodule(part) for part in PARTS] + [layer.attention]
    silent = []
    for part in parts:
        calls: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handles = [
                getattr(part, f"register_{kind}_hook")(lambda *args, kind=kind, calls=calls: calls.append(kind))
                for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
            ]
        model(torch.randn(1, 3, 32, 32, requires_grad=True)).sum().backward()
        is_reported = ["never called" in str(warning.message) for warning in caught]
        assert (is_reported, len(set(calls))) in (([], 4), ([True] * 4, 0)), type(part).__name__
        assert all(warning.filename == __file__ for warning in caught)
        silent += [part] * bool(is_reported)
        for handle in handles:
            handle.remove()
    assert layer.attn_drop in silent and layer.proj not in silent


def test_timms_extraction_of_attention_maps_says_why_there_are_none():
    model = replace_attention(timm.create_model("vit_tiny_patch16_224", **VIT), "flow")
    with pytest.warns(UserWarning, match="record_attention"):
        AttentionExtract(model, method="hook")
    with pytest.warns(UserWarning, match="fused_attn stays True: attention 'flow'"):
        model.blocks[0].attn.fused_attn = False
    assert model.blocks[0].attn.fused_attn


def test_the_weights_of_a_stock_vision_transformer_are_recorded_once_its_attention_is_ours():
    model = timm.create_model("vit_tiny_patch16_224", **VIT).eval()
    with pytest.raises(ValueError, match="VisionTransformer without attention .*'softmax' in its place.*maps=True"):
        with record_attention(model, maps=True):
            pass
    stock = model.blocks[0].attn
    stock.fused_attn = False
    with torch.no_grad():
        weights: list[torch.Tensor] = []
        stock.attn_drop.register_forward_hook(lambda module, args, out: weights.append(out))
        x = torch.randn(2, 3, 32, 32)
        model(x)
        with record_attention(replace_attention(model, "softmax"), maps=True) as records:
            model(x)
    assert_close("map", records[0].map, weights[0])
