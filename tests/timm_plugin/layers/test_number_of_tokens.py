"""Other images than those that a stock vision transformer was built for: right, or refused, for every mechanism."""

import copy
import pickle

import pytest
import timm
import torch
from torch import Tensor, nn

from common.attention import ATTENTIONS
from tests.compare import assert_close
from tests.timm_plugin.helpers.models import PATCHES_ONLY, SMALL, VIT, images, randomise, vit
from timm_plugin import attention_layer, create_model, replace_attention, tell_grid
from timm_plugin.layers.attention import usable_mechanisms

MECHANISMS = usable_mechanisms()
SIZE = dict(img_size=64, depth=1)  # 4 x 4 patches, and a class token
#: Mechanisms that must know the rows and columns of the tokens.
ON_GRID = ("daft_conv", "soft")
#: Mechanisms that hold something for each position; of these, those that follow ``set_input_size``.
WITH_POSITIONS = tuple(name for name in MECHANISMS if "max_tokens" in ATTENTIONS[name].needs)
FOLLOWING = ("daft_full", "cosformer")
#: Mechanisms for which tokens are a set, whatever their order and number.
OF_SETS = tuple(name for name in MECHANISMS if ATTENTIONS[name].permutation_equivariant)
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


def _stock(name: str, **arguments) -> nn.Module:
    return vit(**{**SIZE, **(PATCHES_ONLY if name in ON_GRID else {}), **arguments})


def _vit(name: str, **arguments) -> nn.Module:
    return randomise(replace_attention(_stock(name, **arguments), name))


def _images(size: tuple[int, int] = (64, 64)) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))


def _rebuilt(model: nn.Module, name: str, size: tuple[int, int]) -> nn.Module:
    """A model of ``name`` built for ``size`` with the weights of ``model``."""
    other = _vit(name, img_size=size)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("size", [(96, 64), (32, 128)])
@every_mechanism
def test_set_input_size(name, size):
    """(32, 128) has as many tokens as before, at other positions. Copies and pickles follow as well."""
    model = _vit(name)
    if name not in (*ON_GRID, *WITH_POSITIONS):
        model.set_input_size(size)
        tell_grid(model)  # no grid to set
        assert_close("logits", model(_images(size)), _rebuilt(model, name, size)(_images(size)))
        return
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model))), model):
        assert_close("logits of a copy", each(_images()), model(_images()))
        each.set_input_size(size)
        grid = rf"{size[0] // 16} x {size[1] // 16}"
        with pytest.raises(ValueError, match=rf"{grid} since set_input_size.*tell_grid"):
            each(_images(size))
        if name in WITH_POSITIONS and name not in FOLLOWING:
            before = copy.deepcopy(each.state_dict())
            with pytest.raises(ValueError, match=rf"{grid}; allowed for attention '{name}'.*4 x 4"):
                tell_grid(each)
            assert all(torch.equal(tensor, before[key]) for key, tensor in each.state_dict().items())
            each.set_input_size((64, 64))
            assert torch.isfinite(each(_images())).all()
            continue
        tell_grid(each)
        with pytest.raises((ValueError, AssertionError)):
            each(_images())
        assert_close("logits", each(_images(size)), _rebuilt(each, name, size)(_images(size)))


@every_mechanism
def test_images_of_several_sizes(name):
    stock = _stock(name, dynamic_img_size=True)
    if name in (*ON_GRID, *WITH_POSITIONS):
        with pytest.raises(ValueError, match=f"'{name}'.*dynamic_img_size=False"):
            replace_attention(stock, name)
        if name in WITH_POSITIONS:
            args = dict(SMALL, **SIZE, dynamic_img_size=True, attn_layer=attention_layer(name, max_tokens=17))
            with pytest.raises(ValueError, match=f"'{name}'.*dynamic_img_size=False"):
                create_model(VIT, **args)
            plain = timm.create_model(VIT, **args).eval()
            assert plain(_images()).shape == (2, 3)
            with pytest.raises(ValueError, match="max_tokens=17, with dynamic_img_size=False"):
                plain(_images((96, 64)))
        return
    model = randomise(replace_attention(stock, name))
    for size in ((96, 64), (32, 128)):
        other = copy.deepcopy(model)
        other.set_input_size(size)  # timm's permanent resampling of positions and its resampling for each image agree
        assert_close("logits", model(_images(size)), _rebuilt(other, name, size)(_images(size)))


@every_mechanism
def test_patches_that_are_dropped_at_random(name):
    model, whole = _vit(name, patch_drop_rate=0.5), _vit(name)
    whole.load_state_dict(model.state_dict())
    assert_close("in evaluation", model(_images()), whole(_images()))
    model.train()
    if name not in OF_SETS:
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with pytest.raises(ValueError, match=f"patch_drop_rate is 0.5; .*'{name}'"):
                each(_images())
        model.patch_drop.prob = 0.0
    assert torch.isfinite(model(_images())).all()


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_another_number_of_tokens_than_a_layer_was_built_for(name):
    layer = attention_layer(name, max_tokens=17, grid_size=(1, 17))(32, 2).eval()
    assert layer(torch.randn(2, 17, 32)).shape == (2, 17, 32)
    mask = torch.ones(2, 1, 1, 17, dtype=torch.bool)
    mask[..., 9:] = False
    for shape, given, said in (
        ((16, 32), None, "x has 16 tokens; allowed .*max_tokens=17"),
        ((18, 32), None, "x has 18 tokens; allowed .*max_tokens=17"),
        ((17, 1, 32), None, "17 x 1 tokens; allowed .*1 x 17"),
        ((17, 32), mask, "attn_mask is given; allowed .*None"),
    ):
        with pytest.raises(ValueError, match=said):
            layer(torch.randn(2, *shape), attn_mask=given)
    model = timm.create_model(VIT, attn_layer=attention_layer(name, max_tokens=17), **dict(SMALL, **SIZE)).eval()
    model.set_input_size((32, 32))
    with pytest.raises(ValueError, match=r"max_tokens is 17, and 2 x 2 .* 5; allowed: .*tell_grid before"):
        tell_grid(model)


@pytest.mark.parametrize("name", ["daft_full", "linformer", "soft"])
def test_a_number_or_a_grid_that_is_not_the_models(name):
    own = 16 if name in ON_GRID else 17
    arguments = {**SMALL, **SIZE, **(PATCHES_ONLY if name in ON_GRID else {})}
    for size, allowed in (
        (dict(max_tokens=99), rf"max_tokens is 99; allowed: {own}\b"),
        (dict(grid_size=(2, 8)), r"grid_size is \(2, 8\); allowed: \(4, 4\)"),
    ):
        with pytest.raises(ValueError, match=allowed):
            replace_attention(_stock(name), name, **size)
        for layer in (attention_layer(name, **{"max_tokens": own, **size}), attention_layer(name, **size)):
            with pytest.raises(ValueError, match=allowed):
                create_model(VIT, attn_layer=layer, **arguments)
    model = replace_attention(_stock(name), name, max_tokens=own, grid_size=[4, 4])
    assert model(images(model)).shape == (2, 3)


def test_what_is_advised_for_an_unknown_number_of_tokens():
    for tokens in ({}, {"max_tokens": 17}):
        with pytest.raises(ValueError, match=r"one image size \(dynamic_img_size=False\)$"):
            replace_attention(vit(dynamic_img_size=True), "cosformer", **tokens)
    layers = nn.Sequential(timm.layers.Attention(16, num_heads=2))
    with pytest.raises(ValueError, match="allowed .*, or max_tokens$"):
        replace_attention(layers, "cosformer")
    assert replace_attention(layers, "cosformer", max_tokens=5)(torch.ones(1, 5, 16)).shape == (1, 5, 16)
    for name in ON_GRID:
        for arguments in ({}, dict(PATCHES_ONLY, dynamic_img_size=True), dict(PATCHES_ONLY, reg_tokens=4)):
            with pytest.raises(ValueError, match="tokens are not those of one grid"):
                create_model(VIT, attn_layer=name, **SMALL, **arguments)
            with pytest.raises(ValueError, match="tokens are not those of one grid"):
                replace_attention(vit(**arguments), name)
