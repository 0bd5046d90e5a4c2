"""Using another number of tokens than a stock vision transformer was built with is right or refused, per mechanism."""

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

from common.attention import ATTENTIONS
from tests.compare import assert_close
from tests.timm_plugin.helpers.checkpoint_files import randomise
from timm_plugin import attention_layer, create_model, replace_attention, tell_grid
from timm_plugin.layers.attention import usable_mechanisms

MECHANISMS = usable_mechanisms()
SMALL = dict(img_size=64, embed_dim=32, depth=1, num_heads=2, num_classes=3)
#: Mechanisms that must know the rows and columns of the tokens, and models that support them.
ON_GRID = {name: dict(class_token=False, global_pool="avg") for name in ("daft_conv", "soft")}
#: Mechanisms that hold something for each position; of these, those that follow ``set_input_size``.
WITH_POSITIONS = tuple(name for name in MECHANISMS if "max_tokens" in ATTENTIONS[name].needs)
FOLLOWING = ("daft_full", "cosformer")
#: Mechanisms for which tokens are a set, whatever their order and number.
OF_SETS = tuple(name for name in MECHANISMS if ATTENTIONS[name].permutation_equivariant)
#: Mechanisms that use the sequence of an image's rows, whatever its length.
OF_ORDER = tuple(name for name in MECHANISMS if name not in (*OF_SETS, *ON_GRID, *WITH_POSITIONS))


def _vit(name: str, **arguments) -> nn.Module:
    torch.manual_seed(0)
    args = {**SMALL, **ON_GRID.get(name, {}), **arguments}
    return randomise(replace_attention(timm.create_model("vit_tiny_patch16_224", **args), name))


def _images(height: int, width: int) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))


def _rebuilt(model: nn.Module, name: str, size: tuple[int, int]) -> nn.Module:
    """A model of ``name`` built for ``size`` with the weights of ``model``."""
    other = _vit(name, img_size=size)
    other.load_state_dict(model.state_dict())
    return other


def test_the_kinds_are_all():
    assert set(MECHANISMS) == {*OF_SETS, *ON_GRID, *WITH_POSITIONS, *OF_ORDER}
    assert set(WITH_POSITIONS) == {"cosformer", "daft_full", "linformer", "sinkhorn", "synthesizer"}


@pytest.mark.parametrize("size", [(32, 32), (96, 64), (32, 128)])
@pytest.mark.parametrize("name", MECHANISMS)
def test_set_input_size(name, size):
    """(32, 128) has as many tokens as before, at other positions."""
    model = _vit(name)
    model.set_input_size(size)
    if name in OF_SETS or name in OF_ORDER:
        tell_grid(model)  # no grid to set
    else:
        grid = rf"{size[0] // 16} x {size[1] // 16}"
        with pytest.raises(ValueError, match=rf"{grid} since set_input_size.*tell_grid"):
            model(_images(*size))
        if name not in ON_GRID and name not in FOLLOWING:
            before = copy.deepcopy(model.state_dict())
            with pytest.raises(ValueError, match=rf"{grid}; allowed for attention '{name}'.*4 x 4"):
                tell_grid(model)
            assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
            model.set_input_size((64, 64))
            assert torch.isfinite(model(_images(64, 64))).all()
            return
        tell_grid(model)
        with pytest.raises((ValueError, AssertionError)):
            model(_images(64, 64))
    assert_close("logits", model(_images(*size)), _rebuilt(model, name, size)(_images(*size)))


def test_biases_on_a_grid_that_nobody_told_are_not_guessed():
    layer = attention_layer("daft_full", max_tokens=17)
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, patch_drop_rate=0.5, **SMALL)
    with pytest.raises(ValueError, match="x has 9 tokens; .*max_tokens=17.*patch_drop_rate=0"):
        model.train()(_images(64, 64))
    model.eval()
    model.set_input_size((32, 32))
    with pytest.raises(ValueError, match=r"x has 5 tokens; allowed .*max_tokens=17"):
        model(_images(32, 32))
    with pytest.raises(ValueError, match=r"max_tokens is 17, and 2 x 2 .* 5; allowed: .*tell_grid before"):
        tell_grid(model)


@pytest.mark.parametrize("name", MECHANISMS)
def test_images_of_several_sizes(name):
    stock = timm.create_model("vit_tiny_patch16_224", **SMALL, **ON_GRID.get(name, {}), dynamic_img_size=True)
    if name not in OF_SETS and name not in OF_ORDER:
        with pytest.raises(ValueError, match=f"'{name}'.*dynamic_img_size=False"):
            replace_attention(stock, name)
        if name in WITH_POSITIONS:
            layer = attention_layer(name, max_tokens=17)
            with pytest.raises(ValueError, match=f"'{name}'.*dynamic_img_size=False"):
                create_model("vit_tiny_patch16_224", attn_layer=layer, dynamic_img_size=True, **SMALL)
            plain = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, dynamic_img_size=True, **SMALL).eval()
            assert plain(_images(64, 64)).shape == (2, 3)
            for size in ((32, 32), (96, 64)):
                with pytest.raises(ValueError, match="max_tokens=17, with dynamic_img_size=False"):
                    plain(_images(*size))
        return
    model = randomise(replace_attention(stock, name))
    for size in ((32, 32), (96, 64), (32, 128)):
        other = copy.deepcopy(model)
        other.set_input_size(size)  # timm's permanent resampling of positions and its resampling for each image agree
        assert_close("logits", model(_images(*size)), _rebuilt(other, name, size)(_images(*size)))


@pytest.mark.parametrize("name", MECHANISMS)
def test_patches_that_are_dropped_at_random(name):
    model = _vit(name, patch_drop_rate=0.5)
    whole = _vit(name)
    whole.load_state_dict(model.state_dict())
    assert_close("in evaluation", model(_images(64, 64)), whole(_images(64, 64)))
    model.train()
    if name in OF_SETS:
        assert torch.isfinite(model(_images(64, 64))).all()
        return
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match=f"patch_drop_rate is 0.5; .*'{name}'"):
            each(_images(64, 64))
    model.patch_drop.prob = 0.0
    assert torch.isfinite(model(_images(64, 64))).all()


@pytest.mark.parametrize("tokens", [5, 16, 18])
@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_fewer_or_more_tokens_than_a_layer_was_built_for(name, tokens):
    layer = attention_layer(name, max_tokens=17, grid_size=(1, 17))(32, 2).eval()
    assert layer(torch.randn(2, 17, 32)).shape == (2, 17, 32)
    with pytest.raises(ValueError, match=f"x has {tokens} tokens; allowed .*max_tokens=17"):
        layer(torch.randn(2, tokens, 32))
    with pytest.raises(ValueError, match="17 x 1 tokens; allowed .*1 x 17"):
        layer(torch.randn(2, 17, 1, 32))
    mask = torch.ones(2, 1, 1, 17, dtype=torch.bool)
    mask[..., 9:] = False
    with pytest.raises(ValueError, match="attn_mask is given; allowed .*None"):
        layer(torch.randn(2, 17, 32), attn_mask=mask)


@pytest.mark.parametrize("name", ["daft_full", "linformer", "soft"])
def test_a_number_or_a_grid_that_is_not_the_models(name):
    args = {**SMALL, **ON_GRID.get(name, {})}
    own = 16 if name in ON_GRID else 17
    for size, allowed in (
        (dict(max_tokens=99), rf"max_tokens is 99; allowed: {own}\b"),
        (dict(grid_size=(2, 8)), r"grid_size is \(2, 8\); allowed: \(4, 4\)"),
    ):
        with pytest.raises(ValueError, match=allowed):
            replace_attention(timm.create_model("vit_tiny_patch16_224", **args), name, **size)
        for layer in (attention_layer(name, **{"max_tokens": own, **size}), attention_layer(name, **size)):
            with pytest.raises(ValueError, match=allowed):
                create_model("vit_tiny_patch16_224", attn_layer=layer, **args)
    model = timm.create_model("vit_tiny_patch16_224", **args)
    replace_attention(model, name, max_tokens=own, grid_size=[4, 4])
    assert model(_images(64, 64)).shape == (2, 3)


def test_what_is_advised_for_unknown_numbers_of_tokens_is_taken():
    sizes = timm.create_model("vit_tiny_patch16_224", depth=1, dynamic_img_size=True)
    for tokens in ({}, {"max_tokens": 17}):
        with pytest.raises(ValueError, match=r"one image size \(dynamic_img_size=False\)$"):
            replace_attention(sizes, "cosformer", **tokens)
    layers = nn.Sequential(timm.layers.Attention(16, num_heads=2))
    with pytest.raises(ValueError, match="allowed .*, or max_tokens$"):
        replace_attention(layers, "cosformer")
    assert replace_attention(layers, "cosformer", max_tokens=5)(torch.ones(1, 5, 16)).shape == (1, 5, 16)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "average": lambda model: timm.utils.ModelEmaV3(model).module,
}


@pytest.mark.parametrize("made", COPIES)
@pytest.mark.parametrize("name", [*ON_GRID, *FOLLOWING])
def test_copies_are_told_another_grid(name, made):
    model = _vit(name)
    other = COPIES[made](COPIES[made](model))
    assert type(other.blocks[0].attn) is type(model.blocks[0].attn)
    assert_close("logits", other(_images(64, 64)), model(_images(64, 64)))
    for each in (model, other):
        each.set_input_size((32, 96))
        with pytest.raises(ValueError, match="tell_grid"):
            each(_images(32, 96))
        tell_grid(each)
    assert_close("logits after", other(_images(32, 96)), model(_images(32, 96)))
    if name == "cosformer":  # with fewer tokens, weights fall off over fewer positions
        assert "max_tokens=13" in str(other.blocks[0].attn.attention)


@pytest.mark.parametrize("name", ["daft_full", "soft"])
def test_torchscript_and_tracing(name):
    """TorchScript, export and torch.compile include the checks of positions and of a grid."""
    model = _vit(name, patch_drop_rate=0.5)
    x = _images(64, 64)
    if "torchscript" in ATTENTIONS[name].supports:
        scripted = torch.jit.script(model)
        assert_close("scripted", scripted(x), model(x))
        with pytest.raises(torch.jit.Error, match=f"patch_drop_rate is 0.5.*'{name}'"):
            scripted.train()(x)
    assert_close("exported", torch.export.export(model, (x,)).module()(x), model(x))
    torch._dynamo.reset()
    assert_close("compiled", torch.compile(model, backend="eager", fullgraph=True)(x), model(x))
