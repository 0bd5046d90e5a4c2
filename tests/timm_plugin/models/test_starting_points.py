"""Stock vision transformers as a start: each tensor is taken, taken in part, left out or new, and reported so."""

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed

from tests.compare import assert_close, weights
from tests.timm_plugin.helpers.checkpoint_files import STOCK, assert_same, copy_of, stock_state
from tests.timm_plugin.helpers.logs import warnings_of
from tests.timm_plugin.helpers.models import draw_filters, images
from timm_plugin.convert import convert, save
from timm_plugin.models._weights import fit_vision_transformer

#: Our model -> arguments that give it the shape of the small stock models.
MODELS = {
    "flowformer_deit_s": dict(num_heads=4),
    "flowformer_deit_ti": dict(num_heads=4),
    "daft_full_s": dict(bias_dim=8),
    "daft_conv_s": dict(num_heads=48),  # h = C: as many keys as channels
    "daft_conv_s_h16": dict(query=False),
    "daft_conv_b_384": dict(window=5, num_heads=6),
}
FLOW, FULL, CONV = [[name for name in MODELS if kind in name] for kind in ("flow", "full", "conv")]
DIM = STOCK["embed_dim"]
#: Ways in which timm adapts sizes, channels and classes.
PRETRAINED = ("pretrained", "pretrained-path")


def create(name, state, way, folder, **kwargs):
    """``name`` started from ``state`` in one of timm's ways or through the command, and the same model unstarted."""
    path = folder / "stock.pth"
    torch.save(state, path)
    small = {**STOCK, **MODELS[name], **kwargs}
    torch.manual_seed(7)
    own = weights(timm.create_model(name, **small).state_dict())
    torch.manual_seed(7)
    if way == "pretrained":
        model = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=dict(file=str(path), num_classes=1000), **small
        )
    elif way == "pretrained-path":  # what train.py's --pretrained-path results in
        model = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=dict(file=str(path), num_classes=-1), **small
        )
    else:
        converted = convert(name, path, small)
        save(converted, folder / "converted.safetensors")
        model = timm.create_model(name, checkpoint_path=str(folder / "converted.safetensors"), **small)
        assert_same(model.state_dict(), converted.state_dict())
    return model, own


def expected_start(name, stock, own):
    """The model's expected tensors, and the names that are taken whole, taken in part, left out and new."""
    if name in FLOW:
        return dict(stock), list(stock), [], [], []
    expected, whole, in_part, new = {}, [], [], []
    for key, tensor in own.items():
        if ".attn.attention." in key:
            expected[key] = tensor
            new.append(key)
        elif name in CONV and ".attn.qkv." in key:
            expected[key] = torch.cat([tensor[:-DIM], stock[key][2 * DIM :]])
            in_part.append(key)
        else:
            expected[key] = stock[key]
            whole.append(key)
    left_out = ["cls_token", "pos_embed"] if name in CONV else []
    assert {*whole, *in_part, *left_out} == set(stock)
    return expected, whole, in_part, left_out, new


def grouped(kind, names, depth=2):
    """How a warning lists ``names``: a name that every block has is listed once, with the count."""
    return f"{kind}: " + ", ".join(f"blocks.*.{name} ({depth})" for name in names)


@pytest.mark.parametrize("way", ["pretrained", "convert"])
@pytest.mark.parametrize("name", MODELS)
def test_every_tensor(name, way, tmp_path, caplog):
    stock = stock_state()
    model, own = create(name, stock, way, tmp_path)
    expected, whole, in_part, left_out, new = expected_start(name, stock, own)
    state = weights(model.state_dict())
    assert set(state) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    if name in FLOW:
        assert warnings_of(caplog) == []
    else:
        (line,) = warnings_of(caplog)
        assert line.startswith(f"{type(model).__name__}: {len(whole)} tensors of the checkpoint are taken; ")
        assert grouped("new, as first drawn", [key[9:] for key in new if key.startswith("blocks.0.")]) in line
        assert ("left out" in line) == bool(left_out) and all(key in line for key in left_out)
        if name in CONV:
            assert line.endswith(grouped("taken in part", ["attn.qkv.weight", "attn.qkv.bias"]))
    assert torch.isfinite(model(images(model))).all()


@pytest.mark.parametrize("name", MODELS)
def test_loading_is_strict_where_adaptation_is_not_asked_for(name, tmp_path):
    """A stock vision transformer is no ``daft_conv_s``: ``load_state_dict`` says so, and names how to adapt it."""
    small = dict(STOCK, **MODELS[name])
    model, path = timm.create_model(name, **small), str(tmp_path / "stock.pth")
    ways = (
        lambda: model.load_state_dict(torch.load(path), strict=True),
        lambda: timm.models.load_checkpoint(model, path),
        lambda: timm.create_model(name, checkpoint_path=path, **small),
    )
    for stock in (stock_state(num_classes=10), *([] if name in FLOW else [stock_state()])):
        torch.save(stock, path)
        for way in ways:
            with pytest.raises(RuntimeError, match=r"(head.weight|attn.attention)(.|\n)*pretrained=True(.|\n)*convert"):
                way()
    stock = stock_state()
    if name in FLOW:  # its tensors are those of a stock vision transformer
        torch.save(stock, path)
        assert_same(weights(ways[2]().state_dict()), stock)
    else:
        own = {x: y for x, y in stock.items() if model.state_dict().get(x, y[..., :0]).shape == y.shape}
        result = model.load_state_dict(own, strict=False)
        assert set(result.missing_keys) == set(weights(model.state_dict())) - set(own)
        assert set(result.unexpected_keys) == set(own) - set(model.state_dict())


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize(
    "name, way", [(name, way) for name in ("flowformer_deit_s", "daft_full_s", "daft_conv_s_h16") for way in PRETRAINED]
)
def test_other_channels_classes_size_and_patch(name, way, channels, tmp_path, caplog):
    stock = stock_state()
    model, own = create(name, stock, way, tmp_path, in_chans=channels, num_classes=5, img_size=(64, 96), patch_size=8)
    started = model.state_dict()
    patches = resample_patch_embed(stock["patch_embed.proj.weight"], [8, 8])
    if channels == 1:
        patches = patches.sum(1, keepdim=True)
    else:
        patches = torch.cat([patches, patches[:, :1]], 1) * (3 / 4)
    assert_close("stem", started["patch_embed.proj.weight"], patches)
    assert_close("body", started["blocks.1.mlp.fc1.weight"], stock["blocks.1.mlp.fc1.weight"])
    for key in ("head.weight", "head.bias"):
        assert torch.equal(started[key], own[key]), key
    if name not in CONV:
        expected = resample_abs_pos_embed(stock["pos_embed"], [8, 12], [4, 4])
        assert_close("positions", started["pos_embed"], expected)
    (line,) = warnings_of(caplog)
    assert line.count("head.weight, head.bias") == 2  # the file's are left out, and new ones are drawn
    assert model(images(model)).shape == (2, 5)


@pytest.mark.parametrize("way", ["pretrained", "convert"])
@pytest.mark.parametrize("name", ["flowformer_deit_ti", "daft_full_s", "daft_conv_s"])
def test_distilled(name, way, tmp_path, caplog):
    stock = stock_state("deit_tiny_distilled_patch16_224")
    before = copy_of(stock)
    fit_vision_transformer(stock, timm.create_model(name, **STOCK, **MODELS[name]))
    assert_same(stock, before)  # the caller's
    caplog.clear()
    model, own = create(name, stock, way, tmp_path)
    distilled = {key for key in stock if "dist" in key}
    assert distilled == {"dist_token", "head_dist.weight", "head_dist.bias"}
    plain = {key: tensor for key, tensor in stock.items() if key not in distilled}
    plain["pos_embed"] = torch.cat([stock["pos_embed"][:, :1], stock["pos_embed"][:, 2:]], 1)
    expected = expected_start(name, plain, own)[0]
    state = weights(model.state_dict())
    assert set(state) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(state[key], tensor), key
    (line,) = warnings_of(caplog)
    assert all(key in line for key in distilled)
    if name not in CONV:
        (tmp_path / "larger").mkdir()
        model, _ = create(name, stock, way, tmp_path / "larger", img_size=96)
        assert_close("positions", model.pos_embed, resample_abs_pos_embed(plain["pos_embed"], [6, 6], [4, 4]))


POOLED = dict(global_pool="avg")
NO_CLASS_TOKEN = dict(class_token=False, global_pool="avg")


@pytest.mark.parametrize(
    ("name", "stock_args", "args", "here", "there"),
    [
        ("daft_full_s", POOLED, {}, "norm", "fc_norm"),
        ("daft_conv_s", POOLED, {}, "norm", "fc_norm"),
        ("daft_conv_s", POOLED, dict(fc_norm=True), "fc_norm", "fc_norm"),
        ("daft_conv_s", {}, dict(fc_norm=True), "fc_norm", "norm"),
        ("flowformer_deit_s", POOLED, POOLED, "fc_norm", "fc_norm"),
        ("daft_full_s", {}, NO_CLASS_TOKEN, "fc_norm", "norm"),
        ("daft_full_s", dict(no_embed_class=True), NO_CLASS_TOKEN, "fc_norm", "norm"),
    ],
)
def test_normalisation_on_either_side_of_the_pool_and_positions_of_patches(
    name, stock_args, args, here, there, tmp_path
):
    stock = stock_state("vit_tiny_patch16_224", **stock_args)
    state = create(name, stock, "pretrained", tmp_path, **args)[0].state_dict()
    for parameter in ("weight", "bias"):
        assert torch.equal(state[f"{here}.{parameter}"], stock[f"{there}.{parameter}"])
    if name not in CONV:
        assert torch.equal(state["pos_embed"], stock["pos_embed"][:, -state["pos_embed"].shape[1] :])


@pytest.mark.parametrize("name", ["daft_conv_s", "daft_full_s", "flowformer_deit_s"])
def test_features_and_no_classes(name, tmp_path, caplog):
    stock = stock_state()
    path = tmp_path / "stock.pth"
    torch.save(stock, path)
    small = {**STOCK, **MODELS[name]}
    overlay = dict(pretrained_cfg_overlay=dict(file=str(path)))
    model = timm.create_model(name, pretrained=True, features_only=True, out_indices=1, **overlay, **small)
    assert len(model(torch.randn(1, 3, 64, 64))) > 0
    assert torch.equal(model.model.blocks[0].mlp.fc1.weight, stock["blocks.0.mlp.fc1.weight"])
    model = timm.create_model(name, pretrained=True, num_classes=0, **overlay, **small)
    assert torch.equal(model.blocks[1].mlp.fc1.weight, stock["blocks.1.mlp.fc1.weight"])
    assert "head.weight, head.bias" in warnings_of(caplog)[-1]


@pytest.mark.parametrize(
    "name, stock_name",
    [
        ("daft_full_s", "deit_small_patch16_224"),
        ("daft_conv_s", "deit_small_patch16_224"),
        ("daft_conv_s_h16", "deit_small_distilled_patch16_224"),
        ("daft_conv_b_384", "deit_base_patch16_384"),
        ("daft_conv_b_384", "deit_base_patch16_224"),
    ],
)
def test_the_papers_sizes(name, stock_name):
    stock = timm.create_model(stock_name, device="meta").state_dict()
    model = timm.create_model(name, device="meta")
    fitted = fit_vision_transformer(stock, model, values_only=name in CONV)
    new = {key for key in model.state_dict() if ".attn.attention." in key}
    shapes = {key: tensor.shape for key, tensor in fitted.items()}
    assert shapes == {key: tensor.shape for key, tensor in model.state_dict().items() if key not in new}


@pytest.mark.parametrize("way", ["pretrained", "pretrained-path", "convert"])
@pytest.mark.parametrize(
    "other, message",
    [
        (dict(embed_dim=36), r"norm1.weight|pos_embed|cls_token"),
        (dict(depth=3), r"12 not of this model \(blocks.2.norm1.weight"),
        (dict(depth=1), r"missing \(blocks.1.norm1.weight"),
        (dict(init_values=0.1), r"4 not of this model \(blocks.0.ls1.gamma"),
    ],
)
@pytest.mark.parametrize("name", ["flowformer_deit_s", "daft_full_s", "daft_conv_s"])
def test_a_stock_model_of_another_shape_is_refused(name, other, message, way, tmp_path):
    with pytest.raises(ValueError, match=message) as raised:
        create(name, stock_state(**other), way, tmp_path)
    assert "Nothing was loaded" in str(raised.value)


def test_files_of_jax_are_refused_where_they_have_no_place(tmp_path):
    (tmp_path / "vit.npz").touch()
    with pytest.raises(ValueError, match="vit.npz' is of JAX; allowed for DAFT-conv"):
        timm.create_model("daft_conv_test", checkpoint_path=str(tmp_path / "vit.npz"))


def test_ours_is_not_taken_for_stock(tmp_path):
    small = {**STOCK, **MODELS["daft_conv_s"]}
    source = timm.create_model("daft_conv_s", **small)
    draw_filters(source)
    model, _ = create("daft_conv_s", source.state_dict(), "pretrained", tmp_path)
    assert_same(model.state_dict(), source.state_dict())
    model, _ = create("daft_conv_s", source.state_dict(), "pretrained", tmp_path, img_size=96)
    assert_same(model.state_dict(), source.state_dict())
    for way in PRETRAINED:
        with pytest.raises(ValueError, match="does not fit DaftFullVisionTransformer"):
            create("daft_full_s", source.state_dict(), way, tmp_path)
