"""DAFT's layers and models in timm against the literal attention, computed from their weights."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.daft.full_reference import daft_full_reference
from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import build, draw_filters, filters_by_hand, images
from timm_plugin import attention_layer

C, H = 12, 4
#: Rows and columns of a map that is not square and, for a window of 5, smaller than the window in one dimension.
Y, X = 3, 7


def _layer(kind: str, **options) -> nn.Module:
    layer = attention_layer(kind, **options)(C, H, qkv_bias=True, dtype=torch.float64)
    draw_filters(layer)
    return layer


def _map(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


# ---- layers


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("daft_conv", dict(window=5)),
        ("daft_conv", dict(window=(5, 3), query=False)),
        ("daft_conv", dict(window=3, local_only=True, reparameterize=False)),
        ("daft_full", dict(max_tokens=21, bias_dim=6)),
        ("daft_full", dict(max_tokens=21, bias_dim=None, query=False)),
    ],
)
def test_a_layer_is_the_reference_over_the_raster(kind, options):
    layer, x = _layer(kind, **options), _map(2, Y, X, C)
    attention, has_query = layer.attention, options.get("query", True)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    q, k, v = layer.qkv(x.flatten(1, 2)).split([C if has_query else 0, H if kind == "daft_conv" else C, C], dim=-1)
    q = q if has_query else None
    if kind == "daft_conv":
        local = dict(spatial_shape=(Y, X), local_only=attention.local_only)
        out = daft_conv_reference(q, k, v, filters_by_hand(attention), **local)
    else:
        out = daft_full_reference(q, k, v, (attention.pe0, attention.pe1) if options["bias_dim"] else attention.w)
    actual, expected = layer(x), layer.proj(out).view_as(x)
    assert_close("output", actual, expected)
    names, inputs = zip(("x", x), *layer.named_parameters())
    for name, gradient, wanted in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", gradient, wanted)


def test_window_is_11_and_square_unless_given():
    assert attention_layer("daft_conv")(C, H).attention.window_shape == (11, 11)
    assert build("daft_conv", window=(3, 7)).blocks[0].attn.attention.r.shape == (4, 3, 7)


@pytest.mark.parametrize("query", [True, False])
def test_widths_of_the_projection(query):
    """Keys of DAFT-conv are one number per head; DAFT-full has timm's width, so that it can load stock weights."""
    queries = C if query else 0
    assert _layer("daft_conv", query=query).qkv.weight.shape == (queries + H + C, C)
    full = _layer("daft_full", max_tokens=4, query=query)
    assert full.qkv.weight.shape == (queries + 2 * C, C)
    assert attention_layer("daft_conv")(C, H, qkv_bias=False).qkv.bias is None
    assert full.qkv.bias.dtype == torch.float64


# ---- models


def _forward_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """Compute ``daft_conv_test``'s logits from its weights."""
    maps = F.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=16)
    shape, tokens = maps.shape[2:], maps.flatten(2).transpose(1, 2)
    for block in model.blocks:
        attention = block.attn.attention
        q, k, v = block.attn.qkv(block.norm1(tokens)).split([48, 4, 48], dim=-1)
        out = daft_conv_reference(q, k, v, filters_by_hand(attention), spatial_shape=shape)
        tokens = tokens + block.attn.proj(out)
        tokens = tokens + block.mlp(block.norm2(tokens))
    return model.head(model.norm(tokens).mean(1))


@pytest.mark.parametrize("size", [(64, 64), (96, 96), (48, 80), (32, 128), (16, 32), (16, 16)])
def test_conv_model_at_any_size(size):
    """Weights work unchanged at every size; the smallest sizes are smaller than the window."""
    model = build("daft_conv").double()
    x = images(model, batch=1, size=size).double()
    assert_close("logits", model(x), _forward_by_hand(model, x))
    built = build("daft_conv", img_size=size).double()
    built.load_state_dict(model.state_dict(), strict=True)
    assert_close("a model of that size", built(x), model(x))


@pytest.mark.parametrize("size", [(50, 61), (30, 70), (64, 64)])
def test_conv_model_pads_to_whole_patches(size):
    model = build("daft_conv", img_size=size, dynamic_img_pad=True)
    x = images(model, size=size)
    padded = F.pad(x, (0, -size[1] % 16, 0, -size[0] % 16))
    assert_close("logits", model(x), build("daft_conv")(padded))
    final, maps = model.forward_intermediates(x)
    assert maps[0].shape[2:] == tuple(side // 16 for side in padded.shape[2:])
    assert_close("features", final, model.forward_features(x))
    model.set_input_size((20, 20))
    assert model(images(model)).shape == (2, 1000)


def test_class_token_and_positions():
    full, conv = build("daft_full"), build("daft_conv")
    assert full.cls_token is not None and full.pos_embed.shape == (1, 17, 48) and full.global_pool == "token"
    assert full.blocks[0].attn.attention.pe0.shape == (17, 16)
    assert timm.create_model("daft_full_s", device="meta").blocks[0].attn.attention.pe1.shape == (197, 128)
    assert conv.cls_token is None and conv.pos_embed is None and conv.global_pool == "avg"
    windows = {"daft_conv_s": (384, 11, 11), "daft_conv_s_h16": (16, 11, 11), "daft_conv_b_384": (32, 25, 25)}
    for name, shape in windows.items():
        model = timm.create_model(name, device="meta")
        assert {tuple(block.attn.attention.r.shape) for block in model.blocks} == {shape}
        assert model.default_cfg["fixed_input_size"] is False


def test_other_prefixes_of_the_full_model():
    model = build("daft_full", reg_tokens=2)
    assert model.blocks[0].attn.attention.max_tokens == 19
    assert torch.isfinite(model(images(model))).all()
    model = build("daft_full", class_token=False, global_pool="avg")
    assert model.blocks[0].attn.attention.max_tokens == 16
    assert torch.isfinite(model(images(model))).all()


def test_filters_are_drawn_again():
    """Initialisation after the meta device: filters are 0 since γ and β are 0, biases have both factors."""
    for case, names in (("daft_conv", {"r", "gamma", "beta"}), ("daft_full", {"pe0", "pe1"})):
        model = build(case, device="meta").to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.constant_(parameter, float("nan"))
        model.init_weights()
        attention = model.blocks[0].attn.attention
        assert {name for name, _ in attention.named_parameters()} == names
        assert torch.isfinite(model(images(model))).all()
    assert attention.pe0.std() > 0.05
    model = timm.create_model("daft_conv_test")
    assert all(not block.attn.attention.position_bias().any() for block in model.blocks)


# ---- bad input


def test_bad_arguments_of_layers():
    conv = attention_layer("daft_conv")
    for make, message in (
        (lambda: conv(C, H, qk_norm=True, norm_layer=nn.LayerNorm), "qk_norm is True; allowed .*'daft_conv'.*: False"),
        (lambda: attention_layer("daft_full")(C, H), "number of tokens.*allowed"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
