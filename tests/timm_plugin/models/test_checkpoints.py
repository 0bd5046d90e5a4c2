"""Checkpoints: stock DeiT weights, our own at other sizes and classes, and the authors' released state dicts."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed

from recipes.bench.peers.released_image_model import released_forward, released_shapes
from tests.compare import assert_close, weights
from tests.timm_plugin.helpers.models import build, images
from timm_plugin.models._weights import fit_hierarchical

DIMS, DEPTHS = (24, 36, 48, 60), (1, 2, 1, 1)


@pytest.fixture
def saved(tmp_path):
    """A trained ``hier`` model and the file of its state dict."""
    model = build("hier")
    path = tmp_path / "hier.pth"
    torch.save({"state_dict": model.state_dict()}, path)
    return model, str(path)


def _pretrained(path: str, overlay=None, **kwargs):
    overlay = dict(file=path, **(overlay or {}))
    return timm.create_model("flowformer_hier_test", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()


def test_stock_deit_names_and_shapes():
    stock = timm.create_model("deit_small_patch16_224", device="meta").state_dict()
    ours = weights(timm.create_model("flowformer_deit_s", device="meta").state_dict())
    assert {name: tensor.shape for name, tensor in stock.items()} == {name: t.shape for name, t in ours.items()}


def test_stock_deit_weights_load_and_mean_the_same():
    stock = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=3).eval()
    model = build("deit", attn_layer="softmax")
    model.load_state_dict(stock.state_dict(), strict=True)
    x = images(model)
    assert_close("with softmax attention", model(x), stock(x))
    flow = build("deit")
    flow.load_state_dict(stock.state_dict(), strict=True)
    assert (flow(x) - stock(x)).abs().max() > 1e-3


def test_pretrained_deit_of_another_size(tmp_path):
    stock = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=3)
    torch.save(stock.state_dict(), tmp_path / "deit.pth")
    model = timm.create_model(
        "flowformer_deit_ti",
        pretrained=True,
        img_size=96,
        depth=3,
        num_classes=4,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "deit.pth")),
    )
    assert_close("body", model.blocks[1].attn.qkv.weight, stock.blocks[1].attn.qkv.weight)
    assert_close("positions", model.pos_embed, resample_abs_pos_embed(stock.pos_embed, [6, 6]))


def test_pretrained_as_it_is(saved):
    source, path = saved
    model = _pretrained(path)
    assert_close("logits", model(images(model)), source(images(source)))


def test_pretrained_with_other_classes_channels_and_size(saved):
    source, path = saved
    model = _pretrained(path, num_classes=5, in_chans=1, img_size=(64, 96))
    assert model(images(model)).shape == (2, 5)
    assert_close("body", model.stages[2].blocks[1].mlp.fc1.weight, source.stages[2].blocks[1].mlp.fc1.weight)
    assert_close("stem", model.patch_embed.proj.weight, source.patch_embed.proj.weight.sum(1, keepdim=True))
    expected = resample_abs_pos_embed(source.pos_embed.weight, [16, 24], [16, 16], num_prefix_tokens=0)
    assert_close("positions", model.pos_embed.weight, expected)


def test_pretrained_with_another_patch(saved):
    source, path = saved
    model = _pretrained(path, patch_size=8)
    assert_close("stem", model.patch_embed.proj.weight, resample_patch_embed(source.patch_embed.proj.weight, [8, 8]))
    assert model(images(model)).shape == (2, 1000)


def test_pretrained_features(saved):
    source, path = saved
    model = _pretrained(path, features_only=True)
    x = images(source)
    expected = source.forward_intermediates(x, intermediates_only=True)
    for i, feature in enumerate(model(x)):
        assert_close(f"features {i}", feature, expected[i])


def test_non_square_source_needs_its_size(tmp_path):
    source = build("hier", img_size=(32, 96))
    path = str(tmp_path / "wide.pth")
    torch.save(source.state_dict(), path)
    expected = resample_abs_pos_embed(source.pos_embed.weight, [16, 16], [8, 24], num_prefix_tokens=0)
    model = _pretrained(path, overlay=dict(input_size=(3, 32, 96)), img_size=64)
    assert_close("positions", model.pos_embed.weight, expected)
    with pytest.raises(ValueError, match="192 positions .*input_size"):
        _pretrained(path)


def _released_state(side: int) -> dict:
    generator = torch.Generator().manual_seed(3)
    shapes = released_shapes(classes=7, side=side, embed_dims=DIMS, depths=DEPTHS)
    state = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: 1.0 + t if "norm" in name and name.endswith("weight") else t for name, t in state.items()}


def test_released_weights_give_released_outputs(tmp_path):
    state = _released_state(side=64)
    torch.save({"model": state, "epoch": 299}, tmp_path / "released.pth")
    model = timm.create_model(
        "flowformer_hier_s_12h",
        pretrained=True,
        img_size=64,
        embed_dims=DIMS,
        depths=DEPTHS,
        num_classes=7,
        pretrained_cfg_overlay=dict(file=str(tmp_path / "released.pth"), num_classes=7),
    ).eval()
    x = images(model)
    assert_close("logits", model(x), released_forward(x, state, DEPTHS), 1e-5)
    x = x.double()
    expected = released_forward(x, {name: tensor.double() for name, tensor in state.items()}, DEPTHS)
    assert_close("logits in float64", model.double()(x), expected)


def test_released_form_matters():
    """The comparison above can tell the forms apart."""
    state = _released_state(side=64)
    overlay = dict(state_dict=state, num_classes=7)
    model = build("hier_12h", depths=DEPTHS, form="paper", pretrained=True, pretrained_cfg_overlay=overlay)
    x = images(model)
    expected = released_forward(x, state, DEPTHS)
    assert (model(x) - expected).norm() > 1e-2 * expected.norm()


def test_released_state_dict_fits_the_full_model():
    shapes = released_shapes(classes=1000, side=224, embed_dims=(96, 192, 384, 768), depths=(3, 3, 10, 3))
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    model = timm.create_model("flowformer_hier_s_12h", device="meta")
    ours = {name: tensor.shape for name, tensor in weights(model.state_dict()).items()}
    assert {name: t.shape for name, t in fit_hierarchical(state, model).items()} == ours


def test_released_weights_at_another_size():
    overlay = dict(state_dict=_released_state(side=64), num_classes=7)
    model = build("hier_12h", depths=DEPTHS, img_size=96, pretrained=True, pretrained_cfg_overlay=overlay)
    assert torch.isfinite(model(images(model))).all()
