"""DAFT's layers and models in timm against the literal attention, built by hand from their weights."""

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.daft.full_reference import daft_full_reference
from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import build, draw_filters, filters_by_hand, images
from timm_plugin import attention_layer, create_model, tell_grid

C, H = 12, 4
#: Rows and columns of a map that is no square and, with a window of 5, smaller than the window one way.
Y, X = 3, 7


def _layer(kind: str, **options) -> nn.Module:
    layer = attention_layer(kind, **options)(C, H, qkv_bias=True, dtype=torch.float64)
    draw_filters(layer)
    return layer


def _map(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


def conv_by_hand(layer: nn.Module, tokens: Tensor, shape: tuple, filters: Tensor) -> Tensor:
    """The layer on tokens (B, N, C) that are the raster of ``shape``."""
    q, k, v = layer.qkv(tokens).split([C if layer.attention.options.query else 0, H, C], dim=-1)
    q = q if layer.attention.options.query else None
    out = daft_conv_reference(q, k, v, filters, spatial_shape=shape, local_only=layer.attention.local_only)
    return layer.proj(out)


# ---- layers


@pytest.mark.parametrize(
    "options",
    [
        dict(window=5),
        dict(window=(1, 5)),
        dict(window=(5, 3), query=False),
        dict(window=3, local_only=True, reparameterize=False),
        dict(window=3, reparameterize=False),
    ],
)
def test_conv_is_the_reference_over_the_raster(options):
    layer, x = _layer("daft_conv", **options), _map(2, Y, X, C)
    expected = conv_by_hand(layer, x.flatten(1, 2), (Y, X), filters_by_hand(layer.attention)).view_as(x)
    actual = layer(x)
    assert_close("output", actual, expected)
    names, inputs = zip(("x", x), *layer.named_parameters())
    for name, one, other in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", one, other)


def test_window_is_11_and_square_unless_given():
    assert attention_layer("daft_conv")(C, H).attention.window_shape == (11, 11)
    assert build("daft_conv", window=(3, 7)).blocks[0].attn.attention.r.shape == (4, 3, 7)


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("bias_dim", [6, None])
def test_full_is_the_reference(bias_dim, query):
    layer, x = _layer("daft_full", max_tokens=9, bias_dim=bias_dim, query=query), _map(2, 9, C)
    attention = layer.attention
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    q, k, v = layer.qkv(x).split([C if query else 0, C, C], dim=-1)
    w = attention.w if bias_dim is None else (attention.pe0, attention.pe1)
    expected = layer.proj(daft_full_reference(q if query else None, k, v, w))
    actual = layer(x)
    assert_close("output", actual, expected)
    names, inputs = zip(("x", x), *layer.named_parameters())
    for name, one, other in zip(names, gradients(actual, inputs), gradients(expected, inputs)):
        assert_close(f"gradient of {name}", one, other)


@pytest.mark.parametrize("query", [True, False])
def test_widths_of_the_projection(query):
    """Keys of DAFT-conv are one number per head; DAFT-full has timm's width, so that stock weights fit."""
    queries = C if query else 0
    assert _layer("daft_conv", query=query).qkv.weight.shape == (queries + H + C, C)
    full = _layer("daft_full", max_tokens=4, query=query)
    assert full.qkv.weight.shape == (queries + 2 * C, C)
    assert attention_layer("daft_conv")(C, H, qkv_bias=False).qkv.bias is None
    assert full.qkv.bias.dtype == torch.float64


# ---- models


def _forward_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """``daft_conv_test``'s logits from its weights."""
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
    """The same weights at every size, the smallest of which are smaller than the window."""
    model = build("daft_conv").double()
    x = images(model, batch=1, size=size).double()
    assert_close("logits", model(x), _forward_by_hand(model, x))
    built = build("daft_conv", img_size=size).double()
    built.load_state_dict(model.state_dict(), strict=True)
    assert_close("a model of that size", built(x), model(x))


def test_features_move_with_what_is_in_the_image():
    """Positions are relative: far from the borders a moved content has moved features, and pooled ones stay."""
    model = timm.create_model("daft_conv_test", img_size=(80, 96), patch_size=4, depth=2).eval().double()
    draw_filters(model)  # two windows of 5 reach 4 tokens
    content = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    x, moved = torch.zeros(2, 1, 3, 80, 96, dtype=torch.float64)
    x[:, :, 36:44, 40:48] = content  # in tokens 9 and 10 of 20 rows, 10 and 11 of 24 columns
    moved[:, :, 40:48, 48:56] = content
    before, after = (f.unflatten(1, (20, 24)) for f in (model.forward_features(x), model.forward_features(moved)))
    assert_close("moved features", after[:, 6:15, 8:18], before[:, 5:14, 6:16])
    assert (after - before)[:, 6:15, 8:18].abs().max() > 1e-2
    assert_close("logits", model(moved), model(x))


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


def test_conv_checkpoint_of_another_size(tmp_path):
    source = build("daft_conv")
    torch.save(source.state_dict(), tmp_path / "conv.pth")
    model = timm.create_model(
        "daft_conv_test",
        pretrained=True,
        img_size=(96, 48),
        in_chans=3,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "conv.pth")),
    ).eval()
    x = images(model)
    assert x.shape == (2, 3, 96, 48)
    assert_close("logits", model(x), source(x))


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
    """What a model on the meta device is filled with: filters of 0 by γ and β of 0, biases of both factors."""
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


# ---- the selection of a neighbour


def test_a_selection_is_sampled_in_training():
    layer, x = _layer("daft_conv", window=3, gumbel_temperature=0.5), _map(1, 3, 4, C)
    layer.train()
    assert (layer(x) - layer(x)).abs().max() > 1e-3
    torch.manual_seed(5)
    actual = layer(x)
    torch.manual_seed(5)
    r = filters_by_hand(layer.attention)
    sample = F.gumbel_softmax(r.flatten(1), tau=0.5).view_as(r)
    expected = conv_by_hand(layer, x.flatten(1, 2), (3, 4), sample * r).view_as(x)
    assert_close("output", actual, expected)
    filters = list(layer.attention.parameters())
    for one, other in zip(gradients(actual, filters), gradients(expected, filters)):
        assert_close("gradient", one, other)
        assert one.abs().min() > 0


def test_a_selection_is_indexed_in_evaluation(monkeypatch):
    layer, x = _layer("daft_conv", window=(5, 3), gumbel_temperature=0.5), _map(2, Y, X, C)
    layer.eval()
    flat = filters_by_hand(layer.attention).flatten(1)
    largest = F.one_hot(flat.argmax(1), 15).to(flat) * flat
    expected = conv_by_hand(layer, x.flatten(1, 2), (Y, X), largest.view_as(layer.attention.r)).view_as(x)
    monkeypatch.setattr(F, "conv2d", None)  # a convolution would fail
    assert_close("output", layer(x), expected)
    assert torch.equal(layer(x), layer(x))


def test_a_selecting_model_is_the_model_with_one_hot_filters():
    model = build("daft_gumbel")
    plain = build("daft_conv", reparameterize=False)
    state = {name: tensor for name, tensor in model.state_dict().items() if name in plain.state_dict()}
    for i, block in enumerate(model.blocks):
        flat = filters_by_hand(block.attn.attention).flatten(1)
        hot = F.one_hot(flat.argmax(1), flat.shape[1]) * flat
        state[f"blocks.{i}.attn.attention.r"] = hot.view(4, 5, 5)
    plain.load_state_dict(state, strict=True)
    for size in ((64, 64), (96, 32)):
        x = images(model, size=size)
        assert_close(f"logits at {size}", model(x), plain(x))
        assert torch.equal(model(x), model(x))
    assert not torch.equal(model.train()(x), model(x))


# ---- bad input


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(num_heads=5), "num_heads is 5 and dim 48; allowed"),
        (dict(window=4), r"window is 4; allowed"),
        (dict(window=(3, 4)), r"window is \(3, 4\); allowed"),
        (dict(window=(3, 5, 7)), r"window is \(3, 5, 7\); allowed: an integer"),
        (dict(window=0), "window is 0; allowed"),
        (dict(window="11"), "window is '11'; allowed: an integer"),
        (dict(class_token=True), "class_token is True; allowed for DAFT-conv: False"),
        (dict(reg_tokens=4), "reg_tokens is 4; allowed for DAFT-conv: 0"),
        (dict(pos_embed="learn"), "pos_embed is 'learn'; allowed for DAFT-conv: 'none'"),
        (dict(no_embed_class=True), "no_embed_class is True; allowed for DAFT-conv: False"),
        (dict(pool_include_prefix=True), "pool_include_prefix is True; allowed for DAFT-conv: False"),
        (dict(patch_drop_rate=0.1), "patch_drop_rate is 0.1; allowed for DAFT-conv: 0.0"),
        (dict(pos_drop_rate=0.1), "pos_drop_rate is 0.1; allowed for DAFT-conv: 0.0"),
        (dict(dynamic_img_size=False), "dynamic_img_size is False; allowed for DAFT-conv: True"),
        (dict(attn_layer="flow"), "attn_layer is 'flow'; allowed"),
        (dict(block_fn=nn.Identity), "block_fn is .*; allowed"),
        (dict(embed_layer=nn.Identity), "embed_layer is .*; allowed"),
        (dict(global_pool="token"), "global_pool is 'token'; allowed"),
        (dict(entropy_weight=-0.001), "entropy_weight is -0.001; allowed"),
        (dict(entropy_weight=float("nan")), "entropy_weight is nan; allowed"),
        (dict(entropy_weight="much"), "entropy_weight is 'much'; allowed"),
        (dict(gumbel_temperature=0.0), "gumbel_temperature is 0.0; allowed"),
        (dict(gumbel_temperature=-0.5), "gumbel_temperature is -0.5; allowed"),
        (
            dict(gumbel_temperature=0.5, local_only=True),
            "local_only=True is given; allowed: without gumbel_temperature",
        ),
        (dict(qk_norm=True), "qk_norm is True; allowed .*: False"),
        (dict(img_size=8), r"img_size is \(8, 8\); allowed: at least \(16, 16\)"),
        (dict(img_size=50), r"img_size is \(50, 50\); allowed"),
        (dict(img_size="64"), "img_size is '64'; allowed: an integer or two"),
    ],
)
def test_bad_arguments_of_conv(args, message):
    with pytest.raises(ValueError, match=message):
        build("daft_conv", **args)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (dict(num_heads=5), "num_heads is 5 and dim 48; allowed"),
        (dict(bias_dim=-1), "bias_dim is -1; allowed"),
        (dict(dynamic_img_size=True), "dynamic_img_size is True; allowed for DAFT-full: False"),
        (dict(dynamic_img_pad=True), "dynamic_img_pad is True; allowed for DAFT-full: False"),
        (dict(patch_drop_rate=0.1), "patch_drop_rate is 0.1; allowed for DAFT-full: 0.0"),
        (dict(attn_layer="flow"), "attn_layer is 'flow'; allowed"),
        (dict(block_fn=nn.Identity), "block_fn is .*; allowed"),
        (dict(embed_layer=nn.Identity), "embed_layer is .*; allowed"),
        (dict(class_token=False), "global_pool is 'token'; allowed"),
        (dict(qk_norm=True), "qk_norm is True; allowed .*: False"),
        (dict(img_size=50), r"img_size is \(50, 50\); allowed"),
        (dict(img_size=(8, 64)), r"img_size is \(8, 64\); allowed: at least"),
    ],
)
def test_bad_arguments_of_full(args, message):
    with pytest.raises(ValueError, match=message):
        build("daft_full", **args)


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("daft_full", (64, 96), "x has image size 64 x 96; allowed: 64 x 64"),
        ("daft_full", (32, 32), "x has image size 32 x 32; allowed: 64 x 64"),
        ("daft_conv", (64, 50), "x has image size 64 x 50; allowed: .*16 x 16"),
        ("daft_conv", (8, 64), "x has image size 8 x 64; allowed"),
    ],
)
def test_images_of_a_wrong_size(case, size, message):
    model = build(case)
    with pytest.raises(ValueError, match=message):
        model(images(model, size=size))


@pytest.mark.parametrize("case", ["daft_full", "daft_conv"])
def test_images_of_a_wrong_shape(case):
    with pytest.raises(ValueError, match=r"x has shape \[2, 1, 64, 64\]; allowed: \(batch, 3, height, width\)"):
        build(case)(torch.randn(2, 1, 64, 64))


@pytest.mark.parametrize("case", ["daft_full", "daft_conv", "daft_conv_vit"])
def test_masks_are_refused_by_whole_models(case):
    model = build(case)
    x = images(model)
    with pytest.raises(ValueError, match="attn_mask has shape"):
        model(x, attn_mask=torch.ones(16, 16, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal is True; allowed: False"):
        model(x, is_causal=True)


@pytest.mark.parametrize(
    "args",
    [
        dict(),
        dict(class_token=False, global_pool="avg", reg_tokens=4),
        dict(class_token=False, global_pool="avg", dynamic_img_size=True),
    ],
)
def test_stock_vits_whose_tokens_lie_on_no_grid(args):
    with pytest.raises(ValueError, match="grid; allowed with 'daft_conv'"):
        create_model("deit_tiny_patch16_224", attn_layer="daft_conv", img_size=64, depth=1, **args)


def test_an_unknown_grid_is_refused():
    """timm's own create_model tells a layer nothing; 16:9 images have 9 x 16 patches, as many as 12 x 12."""
    args = dict(class_token=False, global_pool="avg", img_size=(144, 256), depth=1)
    model = timm.create_model("deit_tiny_patch16_224", attn_layer="daft_conv", **args)
    with pytest.raises(ValueError, match="x has 144 tokens on an unknown grid"):
        model(images(model))


def test_the_grid_of_a_stock_vit_follows_the_image_size():
    args = dict(class_token=False, global_pool="avg", img_size=(64, 16), depth=1, pos_embed="none")
    model = create_model("deit_tiny_patch16_224", attn_layer=attention_layer("daft_conv", window=3), **args).eval()
    draw_filters(model)
    x = images(model)
    tall = model(x)
    model.set_input_size((32, 32))  # as many tokens
    with pytest.raises(ValueError, match="2 x 2 .*4 x 1; .*tell_grid"):
        model(x.reshape(2, 3, 32, 32))
    tell_grid(model)
    assert model.blocks[0].attn.grid_size == (2, 2)
    model(x.reshape(2, 3, 32, 32))
    model.set_input_size((64, 16))
    tell_grid(model)
    assert torch.equal(model(x), tall)


def test_stock_vit_with_normalised_queries():
    with pytest.raises(ValueError, match="qk_norm is True; allowed with attention 'daft_conv'.*: False"):
        timm.create_model("vit_tiny_patch16_224", attn_layer="daft_conv", qk_norm=True, depth=1)


def test_bad_arguments_of_layers():
    conv = attention_layer("daft_conv")
    with pytest.raises(ValueError, match="num_heads is 5 and dim 12"):
        conv(C, 5)
    with pytest.raises(ValueError, match="qk_norm is True"):
        conv(C, H, qk_norm=True, norm_layer=nn.LayerNorm)
    with pytest.raises(ValueError, match="has no option 'form'"):
        attention_layer("daft_conv", form="paper")
    with pytest.raises(ValueError, match="number of tokens.*allowed"):
        attention_layer("daft_full")(C, H)


def test_more_tokens_than_the_full_layer_has_positions_for():
    with pytest.raises(ValueError, match="10 tokens.*max_tokens=9"):
        _layer("daft_full", max_tokens=9)(_map(1, 10, C))
