"""Our layers in place of timm's Attention: arguments, masks, norms, dropout, hooks, attributes and copies."""

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
from common.ops import flow_attention
from tests.compare import assert_close
from tests.timm_plugin.helpers.models import PATCHES_ONLY, SMALL, VIT, build, images, vit
from timm_plugin import attention_layer, create_model, replace_attention
from timm_plugin.layers.attention import usable_mechanisms
from timm_plugin.models._registry import register_attention_layers

B, C, H = 2, 24, 3
N, GRID = 9, (3, 3)
#: Every mechanism for images, for tokens on GRID.
LAYERS = {
    name: attention_layer(name, grid_size=GRID, max_tokens=N if "max_tokens" in ATTENTIONS[name].needs else None)
    for name in usable_mechanisms()
}
#: Those that read any number of tokens, on no grid.
FREE = [name for name in LAYERS if "max_tokens" not in ATTENTIONS[name].needs and name not in ("daft_conv", "soft")]
every_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def tokens():
    return torch.randn(B, N, C, generator=torch.Generator().manual_seed(0))


@every_layer
def test_timms_vision_transformers_know_it(name, monkeypatch):
    """By name; one that must know the number of tokens says who finds it, and a name of others is left alone."""
    layer = attention_layer(name)
    assert ATTN_LAYERS[name] is layer and layer.mechanism == name
    arguments = set(inspect.signature(_create_attn).parameters) - {"attn_layer", "depth", "kwargs"}
    assert arguments | set(inspect.signature(Attention).parameters) <= set(inspect.signature(layer).parameters)
    if "max_tokens" in ATTENTIONS[name].needs:
        with pytest.raises(ValueError, match=f"(?s)attn_layer is '{name}'.*allowed: timm_plugin.create_model"):
            timm.create_model(VIT, attn_layer=name, **SMALL)
    monkeypatch.setitem(ATTN_LAYERS, name, Attention)
    with pytest.warns(UserWarning, match=f"attn_layer '{name}' .*timm.layers.attention.Attention"):
        register_attention_layers()
    assert ATTN_LAYERS[name] is Attention
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_attention_layers()
    assert ATTN_LAYERS[name] is layer


@pytest.mark.parametrize("options", [{}, dict(form="paper", phi="relu")])
def test_flow_is_the_op_between_the_projections(tokens, options):
    layer = attention_layer("flow", **options)(C, H, qkv_bias=True)
    q, k, v = (part.reshape(B, N, H, C // H).transpose(1, 2) for part in layer.qkv(tokens).chunk(3, dim=-1))
    expected = layer.proj(flow_attention(q, k, v, **options).transpose(1, 2).flatten(2))
    assert_close("output", layer(tokens), expected)


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
        torch.nn.init.normal_(parameter, std=0.3)
    layer.load_state_dict(stock.state_dict(), strict=True)
    assert_close("output", layer(tokens), stock(tokens))


# ---- masks


@pytest.mark.parametrize("name", FREE)
def test_masks_of_padding_are_honoured_and_others_refused(tokens, name):
    """Padding changes nothing, and real tokens have the output that they have without it."""
    layer = LAYERS[name](C, H).eval()
    valid = torch.ones(B, N + 3, dtype=torch.bool)
    valid[:, N:] = False
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
    model = timm.create_model("naflexvit_base_patch16_gap", attn_layer="flow", embed_dim=48, num_heads=4, depth=2)
    model.use_key_only_attn_mask = True
    model.eval()
    patches = torch.randn(2, 12, 768)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 8:] = False
    coordinates = grid.expand(2, 12, 2).masked_fill(~valid[..., None], 0)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager")
    batch = run(dict(patches=patches, patch_coord=coordinates, patch_valid=valid))
    assert sum(getattr(module, "mechanism", "") == "flow" for module in model.modules()) == 2
    alone = model(
        dict(patches=patches[1:, :8], patch_coord=grid[None, :8], patch_valid=torch.ones(1, 8, dtype=torch.bool))
    )
    assert_close("the smaller image", batch[1:], alone, 1e-4)


# ---- dropout, precision, copies


class Float32Norm(LayerNorm):
    """As autocast computes a normalisation on a GPU: float32 for any input."""

    def forward(self, x):
        return super().forward(x.float()).float()


@every_layer
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
        torch.nn.init.normal_(parameter)
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
    layer = model.blocks[0].attn
    make, arguments, state = layer.__reduce__()
    old = make(*arguments[:3], layer.grid_size)
    old.__setstate__(copy.deepcopy({key: x for key, x in state.items() if key != "has_positions"}))
    other = pickle.loads(pickle.dumps(model))
    other.blocks[0].attn = old
    assert_close("logits", other(images(model)), model(images(model)))


def test_daft_conv_on_a_grid_that_is_no_square():
    """2 x 8 tokens could also form a square: the grid gives their layout."""
    tokens = torch.randn(B, 16, C)
    square = attention_layer("daft_conv", window=3, grid_size=(4, 4))(C, H)
    torch.nn.init.normal_(square.attention.gamma)
    wide, unknown = attention_layer("daft_conv", window=3, grid_size=(2, 8)), attention_layer("daft_conv", window=3)
    wide, unknown = wide(C, H), unknown(C, H)
    for layer in (wide, unknown):
        layer.load_state_dict(square.state_dict())
    assert_close("as a map", wide(tokens), square(tokens.view(B, 2, 8, C)).flatten(1, 2))
    assert (wide(tokens) - square(tokens)).abs().max() > 1e-3
    assert torch.equal(unknown(tokens.view(B, 2, 8, C)), square(tokens.view(B, 2, 8, C)))
    for layer, message in ((wide, "9 tokens; allowed .*grid of 2 x 8"), (unknown, "9 tokens on an unknown grid")):
        with pytest.raises(ValueError, match=message):
            layer(torch.randn(B, 9, C))


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


def test_attention_maps():
    """timm's extraction says why there are none; ours records them, of a stock model once its attention is ours."""
    model = replace_attention(vit(), "flow")
    with pytest.warns(UserWarning, match="record_attention"):
        AttentionExtract(model, method="hook")
    with pytest.warns(UserWarning, match="fused_attn stays True: attention 'flow'"):
        model.blocks[0].attn.fused_attn = False
    model = vit().eval()
    with pytest.raises(ValueError, match="VisionTransformer without attention .*'softmax' in its place.*maps=True"):
        with record_attention(model, maps=True):
            pass
    stock, weights = model.blocks[0].attn, []
    stock.fused_attn = False
    stock.attn_drop.register_forward_hook(lambda module, args, out: weights.append(out))
    with torch.no_grad():
        model(images(model))
        with record_attention(replace_attention(model, "softmax"), maps=True) as records:
            model(images(model))
    assert_close("map", records[0].map, weights[0])
    model = build("hier")
    with record_attention(model) as records, torch.no_grad():
        model(images(model))
    names = ["stages.0.blocks.0", "stages.1.blocks.0", "stages.2.blocks.0", "stages.2.blocks.1", "stages.3.blocks.0"]
    assert [record.name for record in records] == [f"{name}.attn.attention" for name in names]
    for record, side in zip(records, (16, 8, 4, 4, 2)):
        assert record.competition.shape == record.allocation.shape == (2, 4, side * side)
        # The released competition is a softmax over the sources times their number.
        assert_close("competition", record.competition.mean(-1), torch.ones(2, 4))


def test_create_model_finds_what_a_layer_needs():
    model = create_model(VIT, attn_layer="cosformer,daft_full,softmax", **dict(SMALL, depth=3))
    assert [block.attn.max_tokens for block in model.blocks[:2]] == [5, 5]
    wide = dict(SMALL, **PATCHES_ONLY, img_size=(32, 64))
    for further in ({}, dict(features_only=True, out_indices=1)):
        model = create_model(VIT, attn_layer=attention_layer("daft_conv", window=3), **wide, **further)
        assert {x.grid_size for x in model.modules() if hasattr(x, "mechanism")} == {(2, 4)}
