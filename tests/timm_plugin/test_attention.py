"""Our layers in place of timm's Attention: masks, norms, dropout, hooks, attributes, copies, and numbers of tokens."""

import copy
import inspect
import pickle
import warnings

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm
from timm.models.naflexvit import create_attention_mask
from timm.models.vision_transformer import ATTN_LAYERS, _create_attn
from timm.utils import AttentionExtract
from torch import nn

from common.attention import ATTENTIONS, record_attention
from tests.compare import assert_close
from tests.timm_plugin.helpers import PATCHES_ONLY, SMALL, VIT, images, one_line, randomise, vit
from timm_plugin import attention_layer, create_model, replace_attention, tell_grid
from timm_plugin.layers.attention import usable_mechanisms
from timm_plugin.models._registry import register_attention_layers

B, C, H = 2, 24, 3
N, GRID = 9, (3, 3)
MECHANISMS = usable_mechanisms()
#: Mechanisms that must know the rows and columns of the tokens.
ON_GRID = ("daft_conv", "soft")
#: Mechanisms that hold something for each position; of these, those that follow ``set_input_size``.
WITH_POSITIONS = tuple(name for name in MECHANISMS if "max_tokens" in ATTENTIONS[name].needs)
FOLLOWING = ("daft_full", "cosformer")
#: Those that read any number of tokens, on no grid.
FREE = [name for name in MECHANISMS if name not in (*ON_GRID, *WITH_POSITIONS)]
#: Layers for tokens on GRID.
LAYERS = {
    name: attention_layer(name, grid_size=GRID, max_tokens=N if name in WITH_POSITIONS else None) for name in MECHANISMS
}
every_mechanism = pytest.mark.parametrize("name", MECHANISMS)


@pytest.fixture
def tokens():
    return torch.randn(B, N, C, generator=torch.Generator().manual_seed(0))


@every_mechanism
def test_timms_vision_transformers_know_it(name):
    """One that must know the number of tokens says who finds it."""
    layer = attention_layer(name)
    assert ATTN_LAYERS[name] is layer and layer.mechanism == name
    arguments = set(inspect.signature(_create_attn).parameters) - {"attn_layer", "depth", "kwargs"}
    assert arguments | set(inspect.signature(Attention).parameters) <= set(inspect.signature(layer).parameters)
    if name in WITH_POSITIONS:
        with pytest.raises(ValueError, match=f"(?s)attn_layer is '{name}'.*allowed: timm_plugin.create_model"):
            timm.create_model(VIT, attn_layer=name, **SMALL)


def test_a_name_of_others_is_left_alone(monkeypatch):
    monkeypatch.setitem(ATTN_LAYERS, "flow", Attention)
    with pytest.warns(UserWarning, match="attn_layer 'flow' .*timm.layers.attention.Attention"):
        register_attention_layers()
    assert ATTN_LAYERS["flow"] is Attention


@pytest.mark.parametrize(
    "norms",
    [
        dict(),
        dict(proj_bias=False, attn_head_dim=12, qk_norm=True, scale_norm=True),
        dict(dim_out=16),
        dict(gated=True, scale_norm=True),
    ],
)
def test_softmax_is_timms_attention(tokens, norms):
    args = dict(qkv_bias=True, norm_layer=LayerNorm, **norms)
    stock, layer = Attention(C, H, **args), LAYERS["softmax"](C, H, **args)
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.3)
    layer.load_state_dict(stock.state_dict(), strict=True)
    assert_close("output", layer(tokens), stock(tokens))


# ---- masks


@pytest.mark.parametrize("name", FREE)
def test_masks_of_padding_are_honoured_and_others_refused(tokens, name):
    """Padding changes nothing, and real tokens have the output that they have without it."""
    layer = LAYERS[name](C, H).eval()
    valid = torch.arange(N + 3).expand(B, -1) < N
    padded = torch.cat([tokens, 100.0 * torch.ones(B, 3, C)], 1)
    symmetric = create_attention_mask(valid)
    for mask in (symmetric, symmetric == 0, create_attention_mask(valid, symmetric=False, q_len=1)):
        assert_close("real tokens", layer(padded, attn_mask=mask)[:, :N], layer(tokens), 1e-5)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    bias = torch.where(torch.eye(N, dtype=torch.bool), -1.0, 0.0).expand(B, 1, N, N)
    others = [causal, causal.expand(B, 1, N, N), torch.rand(B, 1, N, N), bias, torch.ones(B, N, dtype=torch.bool)]
    slopes = torch.tensor([0.0] * (N - 1) + [-1.0]).expand(B, 1, 1, N)  # less attention is no padding
    others += [slopes, torch.ones(B, H, N, N, dtype=torch.bool), torch.ones(B, 1, 1, N + 1, dtype=torch.bool)]
    for mask in others:
        with pytest.raises(ValueError, match="attn_mask"):
            layer(tokens, attn_mask=mask)
    with pytest.raises(ValueError, match="is_causal is True; allowed: False"):
        layer(tokens, is_causal=True)


def test_a_compiled_naflexvit_with_images_of_several_sizes():
    """Uses its dictionary of patches, where the second image has fewer."""
    model = timm.create_model("naflexvit_base_patch16_gap", attn_layer="flow", embed_dim=48, num_heads=4, depth=1)
    model.use_key_only_attn_mask = True
    model.eval()
    patches, grid = torch.randn(2, 12, 768), torch.cartesian_prod(torch.arange(3), torch.arange(4))
    valid = torch.arange(12) < torch.tensor([[12], [8]])
    coordinates = grid.expand(2, 12, 2).masked_fill(~valid[..., None], 0)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    batch = run(dict(patches=patches, patch_coord=coordinates, patch_valid=valid))
    alone = model(dict(patches=patches[1:, :8], patch_coord=grid[None, :8], patch_valid=valid[1:, :8]))
    assert_close("the smaller image", batch[1:], alone, 1e-4)


# ---- dropout, precision, copies


class Float32Norm(LayerNorm):
    """As autocast computes a normalisation on a GPU: float32 for any input."""

    def forward(self, x):
        return super().forward(x.float()).float()


@every_mechanism
def test_dropout_norms_and_copies(tokens, name):
    """Dropout in training alone; norms under autocast; copies and pickles, whose class has no name; half precision."""
    layer = LAYERS[name](C, H, attn_drop=0.5).eval()
    assert torch.equal(layer(tokens), layer(tokens))
    layer.train()
    assert not torch.equal(layer(tokens), layer(tokens))
    assert (LAYERS[name](C, H, proj_drop=0.5).train()(tokens) == 0.0).any()
    queries, keys, _ = layer.widths
    norms = dict(qk_norm=queries == keys == C, scale_norm=True, norm_layer=Float32Norm)
    layer = LAYERS[name](C, H, **norms).eval()
    for parameter in layer.attention.parameters():
        nn.init.normal_(parameter)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(tokens)
        assert {x.dtype for x in layer.query_key_value(tokens) if x is not None} == {torch.bfloat16}
    assert out.dtype == torch.bfloat16
    assert_close("autocast", out, layer(tokens), 2e-2)
    for each in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(each) is type(layer)
        assert_close("copy", each(tokens), layer(tokens))
    half = LAYERS[name](C, H, dtype=torch.bfloat16)
    assert {x.dtype for x in (*half.parameters(), *half.buffers()) if x.is_floating_point()} == {torch.bfloat16}


class OwnLayer(attention_layer("hedgehog", rows=8)):
    """A class with a name, as a user may write one."""


@pytest.mark.parametrize("layer", [attention_layer("hedgehog", rows=8), OwnLayer])
def test_copies_of_a_model_know_the_options_of_its_class(layer):
    """timm stores the arguments of a model in it."""
    model = timm.create_model(VIT, attn_layer=layer, **SMALL).eval()
    for each in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_close("copy", each(images(model)), model(images(model)))
        assert each.blocks[0].attn.options == layer.options and type(each.blocks[0].attn).options == layer.options
    assert pickle.loads(pickle.dumps(layer)) is copy.deepcopy(layer) is layer


@pytest.mark.parametrize("name", ["soft", "daft_conv", "daft_full"])
def test_a_pickle_of_version_0_2(name):
    """The pickle stores the grid in place of the class's, and does not say whether there are positions."""
    model = replace_attention(vit(**({} if name == "daft_full" else PATCHES_ONLY)), name).eval()
    expected, layer = model(images(model)), model.blocks[0].attn
    make, arguments, state = layer.__reduce__()
    old = make(*arguments[:3], layer.grid_size)
    old.__setstate__({key: x for key, x in state.items() if key != "has_positions"})
    model.blocks[0].attn = old
    assert_close("logits", model(images(model)), expected)


# ---- for programs that read timm's Attention or hook its parts

#: Attributes of timm's Attention that a plain module does not have.
ATTRIBUTES = sorted({*vars(Attention(32, 2)), *dict(Attention(32, 2).named_children())} - set(vars(nn.Module())))


def test_every_attribute_of_timms_attention_is_there():
    options = dict(qkv_bias=True, attn_drop=0.1, proj_drop=0.2, attn_head_dim=8)
    stock = Attention(32, 2, **options)
    replaced = replace_attention(nn.Sequential(Attention(32, 2, **options)), "hedgehog")[0]
    assert {"num_heads", "head_dim", "attn_dim", "scale", "fused_attn", "attn_drop", "qkv", "proj"} <= set(ATTRIBUTES)
    for layer in (attention_layer("flow")(32, 2, **options), replaced):
        for name in ATTRIBUTES:
            own, expected = getattr(layer, name), getattr(stock, name)
            if isinstance(expected, nn.Module):
                assert isinstance(own, type(expected)) and own.extra_repr() == expected.extra_repr(), name
            else:
                assert own == expected, name


PARTS = ("", "qkv", "q_norm", "k_norm", "proj", "proj_drop", "norm", "attn_drop", "attention")


@pytest.mark.parametrize("name", ["flow", "linformer", "daft_conv", "synthesizer", "reformer"])
def test_a_hook_is_called_or_a_warning_says_that_it_is_not(name):
    model = replace_attention(vit(**PATCHES_ONLY), name).train()
    layer = model.blocks[0].attn
    silent = []
    for part in map(layer.get_submodule, PARTS):
        calls: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handles = [
                getattr(part, f"register_{kind}_hook")(lambda *args, kind=kind, calls=calls: calls.append(kind))
                for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
            ]
        model(images(model, batch=1).requires_grad_()).sum().backward()
        is_reported = ["never called" in str(warning.message) for warning in caught]
        assert (is_reported, len(set(calls))) in (([], 4), ([True] * 4, 0)), type(part).__name__
        assert all(warning.filename == __file__ for warning in caught)
        silent += [part] * bool(is_reported)
        for handle in handles:
            handle.remove()
    assert layer.attn_drop in silent and layer.proj not in silent


def test_attention_maps_are_recorded_in_another_way():
    """timm's extraction says so, and ours says what a stock model needs for them."""
    model = replace_attention(vit(), "flow")
    with pytest.warns(UserWarning, match="record_attention"):
        AttentionExtract(model, method="hook")
    with pytest.warns(UserWarning, match="fused_attn stays True: attention 'flow'"):
        model.blocks[0].attn.fused_attn = False
    one_line("without attention .*'softmax' in its place", lambda: record_attention(vit(), maps=True).__enter__())


# ---- images of other sizes than a stock vision transformer was built for: right, or refused

SIZE = dict(img_size=64, depth=1)  # 4 x 4 patches, and a class token


def arguments_for(name: str, **arguments) -> dict:
    """Arguments of a stock model whose tokens fit the mechanism."""
    return {**SIZE, **(PATCHES_ONLY if name in ON_GRID else {}), **arguments}


def random_vit(name: str, **arguments) -> nn.Module:
    """A stock model with the mechanism, and random weights."""
    return randomise(replace_attention(vit(**arguments_for(name, **arguments)), name))


def assert_a_model_of(size: tuple[int, int], name: str, resized: nn.Module, model: nn.Module | None = None) -> None:
    """Check that ``model``, by default ``resized``, computes what one built for ``size`` does with those weights."""
    built = random_vit(name, img_size=size)
    built.load_state_dict(resized.state_dict())
    assert_close("logits", (model or resized)(images(built)), built(images(built)))


@pytest.mark.parametrize("size", [(96, 64), (32, 128)])
@every_mechanism
def test_set_input_size(name, size):
    """(32, 128) has as many tokens as before, at other positions. Copies and pickles follow as well."""
    model = random_vit(name)
    if name in FREE:
        model.set_input_size(size)
        tell_grid(model)  # no grid to set
        assert_a_model_of(size, name, model)
        return
    before = images(model)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(copy.deepcopy(model))), model):
        assert_close("logits of a copy", each(before), model(before))
        each.set_input_size(size)
        grid = rf"{size[0] // 16} x {size[1] // 16}"
        one_line(rf"{grid} since set_input_size.*tell_grid", lambda each=each: each(images(each)))
        if name in FOLLOWING or name in ON_GRID:
            tell_grid(each)
            with pytest.raises((ValueError, AssertionError)):
                each(before)
            assert_a_model_of(size, name, each)
            continue
        state = copy.deepcopy(each.state_dict())
        one_line(rf"{grid}; allowed for attention '{name}'.*4 x 4", lambda each=each: tell_grid(each))
        assert all(torch.equal(tensor, state[key]) for key, tensor in each.state_dict().items())
        each.set_input_size((64, 64))
        assert torch.isfinite(each(before)).all()


@every_mechanism
def test_images_of_several_sizes(name):
    stock = vit(**arguments_for(name, dynamic_img_size=True))
    if name in FREE:
        model = randomise(replace_attention(stock, name))
        for size in ((96, 64), (32, 128)):
            other = copy.deepcopy(model)
            other.set_input_size(size)  # timm's permanent resampling of positions and that for each image agree
            assert_a_model_of(size, name, other, model)
        return
    refused = f"'{name}'.*dynamic_img_size=False"
    one_line(refused, lambda: replace_attention(stock, name))
    if name in WITH_POSITIONS:
        said, hier = f"dynamic_img_size is True.*'{name}'", dict(attn_layer=name, dynamic_img_size=True)
        one_line(said, lambda: timm.create_model("flowformer_hier_test", **hier))
        args = dict(SMALL, **SIZE, dynamic_img_size=True, attn_layer=attention_layer(name, max_tokens=17))
        one_line(refused, lambda: create_model(VIT, **args))
        plain = timm.create_model(VIT, **args).eval()
        assert plain(images(plain)).shape == (2, 3)
        one_line("max_tokens=17, with dynamic_img_size=False", lambda: plain(images(plain, size=(96, 64))))


@every_mechanism
def test_patches_that_are_dropped_at_random(name):
    """In training alone, for mechanisms to which tokens are a set."""
    model, whole = random_vit(name, patch_drop_rate=0.5), random_vit(name)
    whole.load_state_dict(model.state_dict())
    x = images(model)
    assert_close("in evaluation", model(x), whole(x))
    model.train()
    if not ATTENTIONS[name].permutation_equivariant:
        for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            one_line(f"patch_drop_rate is 0.5; .*'{name}'", lambda each=each: each(x))
        model.patch_drop.prob = 0.0
    assert torch.isfinite(model(x)).all()


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_another_number_of_tokens_than_a_layer_was_built_for(name):
    layer = attention_layer(name, max_tokens=17, grid_size=(1, 17))(32, 2).eval()
    assert layer(torch.randn(2, 17, 32)).shape == (2, 17, 32)
    mask = torch.arange(17).expand(2, 1, 1, 17) < 9
    for shape, given in (((16, 32), None), ((18, 32), None), ((17, 1, 32), None), ((17, 32), mask)):
        said = "attn_mask is given; allowed .*None" if given is not None else "tokens; allowed .*17"
        one_line(said, lambda shape=shape, given=given: layer(torch.randn(2, *shape), attn_mask=given))


@pytest.mark.parametrize("name", ["linformer", "soft"])
def test_a_number_or_a_grid_that_is_not_the_models(name):
    own, arguments = (16 if name in ON_GRID else 17), {**SMALL, **arguments_for(name)}
    for size, allowed in (
        (dict(max_tokens=99), rf"max_tokens is 99; allowed: {own}\b"),
        (dict(grid_size=(2, 8)), r"grid_size is \(2, 8\); allowed: \(4, 4\)"),
    ):
        one_line(allowed, lambda size=size: replace_attention(vit(**arguments), name, **size))
        layer = attention_layer(name, **{"max_tokens": own, **size})
        one_line(allowed, lambda layer=layer: create_model(VIT, attn_layer=layer, **arguments))
    model = replace_attention(vit(**arguments), name, max_tokens=own, grid_size=[4, 4])
    assert model(images(model)).shape == (2, 3)


def test_what_a_layer_needs_is_found_or_asked_for():
    model = create_model(VIT, attn_layer="cosformer,daft_full,softmax", **dict(SMALL, depth=3))
    assert [block.attn.max_tokens for block in model.blocks[:2]] == [5, 5]
    wide = dict(SMALL, **PATCHES_ONLY, img_size=(32, 64))
    for further in ({}, dict(features_only=True, out_indices=1)):
        model = create_model(VIT, attn_layer=attention_layer("daft_conv", window=3), **wide, **further)
        assert {x.grid_size for x in model.modules() if hasattr(x, "mechanism")} == {(2, 4)}
    layers = nn.Sequential(Attention(16, num_heads=2))
    one_line("allowed .*, or max_tokens$", lambda: replace_attention(layers, "cosformer"))
    assert replace_attention(layers, "cosformer", max_tokens=5)(torch.ones(1, 5, 16)).shape == (1, 5, 16)
    for name in ON_GRID:
        for other in ({}, dict(PATCHES_ONLY, dynamic_img_size=True), dict(PATCHES_ONLY, reg_tokens=4)):
            for call in (
                lambda name=name, other=other: create_model(VIT, attn_layer=name, **SMALL, **other),
                lambda name=name, other=other: replace_attention(vit(**other), name),
            ):
                one_line("tokens are not those of one grid", call)
