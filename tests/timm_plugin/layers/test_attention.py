"""The adapter between timm's attention interface and the mechanisms of ``common``."""

import inspect
import pickle
import warnings
from copy import deepcopy

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm
from timm.models.naflexvit import create_attention_mask
from timm.models.vision_transformer import ATTN_LAYERS, _create_attn

from common.attention import ATTENTIONS, record_attention
from common.ops import flow_attention
from tests.compare import assert_close
from tests.timm_plugin.helpers.models import build, images
from timm_plugin import attention_layer, create_model
from timm_plugin.layers.attention import usable_mechanisms
from timm_plugin.layers.layer_spec import LayerSpec
from timm_plugin.models._registry import register_attention_layers

B, C, H = 2, 24, 3
N, GRID = 9, (3, 3)


#: Mechanisms that must know the positions of tokens.
ON_GRID = ("daft_conv", "soft")
#: Every mechanism that a stock vision transformer accepts by name, for tokens on GRID.
LAYERS = {
    name: attention_layer(name, grid_size=GRID if name in ON_GRID else None)
    for name in usable_mechanisms()
    if "max_tokens" not in ATTENTIONS[name].needs
}
FlowSelfAttention, SoftmaxSelfAttention = LAYERS["flow"], LAYERS["softmax"]


@pytest.fixture
def tokens():
    return torch.randn(B, N, C, generator=torch.Generator().manual_seed(0))


def test_every_mechanism_for_images_is_in_timms_table():
    assert {"flow", "linear", "softmax", "quadratic", "mixed_chunk", "combiner", *ON_GRID} <= set(LAYERS)
    for name in usable_mechanisms():
        assert ATTN_LAYERS[name] is attention_layer(name)
        assert ATTN_LAYERS[name].mechanism == name


@pytest.mark.parametrize("name", [name for name in usable_mechanisms() if name not in LAYERS])
def test_a_mechanism_that_must_know_the_number_of_tokens_says_who_finds_it(name):
    arguments = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=5)
    with pytest.raises(ValueError, match=f"(?s)attn_layer is '{name}'.*allowed: timm_plugin.create_model"):
        timm.create_model("vit_tiny_patch16_224", attn_layer=name, **arguments)
    model = create_model("vit_tiny_patch16_224", attn_layer=name, **arguments)
    assert model.blocks[0].attn.attention.shape.max_tokens == 17
    assert torch.isfinite(model(torch.randn(2, 3, 32, 32))).all()


def test_names_of_others_are_left_alone(monkeypatch):
    monkeypatch.setitem(ATTN_LAYERS, "flow", Attention)
    with pytest.warns(UserWarning, match="attn_layer 'flow' .*timm.layers.attention.Attention"):
        register_attention_layers()
    assert ATTN_LAYERS["flow"] is Attention
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_attention_layers()
    assert ATTN_LAYERS["flow"] is FlowSelfAttention


@pytest.mark.parametrize("layer", LAYERS.values())
def test_takes_every_argument_timm_gives(layer):
    arguments = set(inspect.signature(_create_attn).parameters) - {"attn_layer", "depth", "kwargs"}
    assert arguments | set(inspect.signature(Attention).parameters) <= set(inspect.signature(layer).parameters)


def test_flow_is_the_op_between_the_projections(tokens):
    layer = FlowSelfAttention(C, H, qkv_bias=True)
    q, k, v = (
        part.reshape(B, N, H, C // H).transpose(1, 2) for part in layer.qkv(tokens).chunk(3, dim=-1)
    )  # each (B, H, N, d)
    expected = layer.proj(flow_attention(q, k, v).transpose(1, 2).flatten(2))
    assert_close("output", layer(tokens), expected)
    weights = layer.state_dict()
    layer = attention_layer("flow", form="paper", phi="relu")(C, H, qkv_bias=True)
    layer.load_state_dict(weights)
    expected = layer.proj(flow_attention(q, k, v, form="paper", phi="relu").transpose(1, 2).flatten(2))
    assert_close("output with options", layer(tokens), expected)


@pytest.mark.parametrize(
    "norms",
    [
        dict(),
        dict(qk_norm=True, scale_norm=True),
        dict(attn_head_dim=12, qk_norm=True, scale_norm=True),
        dict(dim_out=16),
        dict(gated=True, scale_norm=True),
    ],
)
@pytest.mark.parametrize("proj_bias", [True, False])
def test_softmax_is_timms_attention(tokens, norms, proj_bias):
    args = dict(qkv_bias=True, proj_bias=proj_bias, norm_layer=LayerNorm, **norms)
    stock, layer = Attention(C, H, **args), SoftmaxSelfAttention(C, H, **args)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.load_state_dict(stock.state_dict(), strict=True)
    assert_close("output", layer(tokens), stock(tokens))


@pytest.mark.parametrize("name", LAYERS)
def test_masks_of_anything_but_padding_are_refused(tokens, name):
    layer = LAYERS[name](C, H)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    masks = [causal, causal.expand(B, 1, N, N), torch.rand(B, 1, N, N), torch.ones(B, N, dtype=torch.bool)]
    for mask in masks + [torch.ones(B, H, N, N, dtype=torch.bool), torch.ones(B, 1, 1, N + 1, dtype=torch.bool)]:
        with pytest.raises(ValueError, match="attn_mask"):
            layer(tokens, attn_mask=mask)
    with pytest.raises(ValueError, match="is_causal is True; allowed: False"):
        layer(tokens, is_causal=True)
    assert layer(tokens, attn_mask=None, is_causal=False).shape == tokens.shape


@pytest.mark.parametrize("kind", ["symmetric", "keys", "bool"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in ON_GRID])
def test_masks_of_padding_are_honoured(tokens, name, kind):
    """Padding values change nothing, and the real tokens have the same output as without padding."""
    layer = LAYERS[name](C, H).eval()
    valid = torch.ones(B, N + 3, dtype=torch.bool)
    valid[:, N:] = False
    mask = create_attention_mask(valid, symmetric=kind != "keys", q_len=1 if kind == "keys" else None)
    mask = mask == 0 if kind == "bool" else mask
    padded = torch.cat([tokens, 100.0 * torch.ones(B, 3, C)], 1)
    assert_close("real tokens", layer(padded, attn_mask=mask)[:, :N], layer(tokens), 1e-5)


@pytest.mark.parametrize("compiled, key_only", [(False, False), (False, True), (True, True)])
def test_naflexvit_with_images_of_several_sizes(key_only, compiled):
    """Uses its dictionary of patches, where the second image has fewer."""
    model = timm.create_model("naflexvit_base_patch16_gap", attn_layer="flow", embed_dim=48, num_heads=4, depth=2)
    model.use_key_only_attn_mask = key_only
    model.eval()
    torch.manual_seed(0)
    patches = torch.randn(2, 12, 768)
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij"), -1).flatten(0, 1)
    valid = torch.ones(2, 12, dtype=torch.bool)
    valid[1, 8:] = False
    coordinates = grid.expand(2, 12, 2).masked_fill(~valid[..., None], 0)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager") if compiled else model
    batch = run(dict(patches=patches, patch_coord=coordinates, patch_valid=valid))
    assert sum(isinstance(module, FlowSelfAttention) for module in model.modules()) == 2
    alone = model(
        dict(patches=patches[1:, :8], patch_coord=grid[None, :8], patch_valid=torch.ones(1, 8, dtype=torch.bool))
    )
    assert_close("the smaller image", batch[1:], alone, 1e-4)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FlowSelfAttention(C, 5), "num_heads is 5 and dim 24; allowed"),
        *((lambda x=x: FlowSelfAttention(C, x), "num_heads is ") for x in (0, 2.0, True, "2", None, [2])),
        (lambda: FlowSelfAttention(C, H, qk_norm=True), "norm_layer is None; allowed with qk_norm or scale_norm"),
        (
            lambda: attention_layer("rfa_gate"),
            "attention is 'rfa_gate'; allowed: .*'flow'",
        ),  # sees only earlier tokens
    ],
)
def test_bad_arguments(make, said):
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", LAYERS)
def test_dropouts_only_in_training(tokens, name):
    layer = LAYERS[name](C, H, attn_drop=0.5).eval()
    assert torch.equal(layer(tokens), layer(tokens))
    layer.train()
    assert not torch.equal(layer(tokens), layer(tokens))
    layer = LAYERS[name](C, H, proj_drop=0.5).train()
    assert (layer(tokens) == 0.0).any()


@pytest.mark.parametrize("name", LAYERS)
def test_normalised_queries_under_autocast(tokens, name):
    queries, keys, _ = LAYERS[name](C, H).widths
    layer = LAYERS[name](C, H, qk_norm=queries == keys == C, scale_norm=True, norm_layer=LayerNorm).eval()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(tokens)
    assert out.dtype == torch.bfloat16
    assert_close("autocast", out, layer(tokens), 2e-2)


def test_options_make_another_class_and_survive_copies(tokens):
    """Classes with options are created dynamically: a pickle stores no class name and recreates them when read."""
    assert attention_layer("flow", form="paper") is attention_layer("flow", form="paper")
    layer = attention_layer("flow", form="paper")(C, H)
    for copy in (deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(copy) is type(layer)
        assert_close("copy", copy(tokens), layer(tokens))
    grid = attention_layer("daft_conv", window=3, grid_size=(1, 9))(C, H)
    torch.nn.init.normal_(grid.attention.gamma)
    assert_close("copy", pickle.loads(pickle.dumps(grid))(tokens), grid(tokens))


class OwnLayer(attention_layer("hedgehog", rows=8)):
    """A class with a name, as a user may write one."""


def test_a_model_that_was_built_with_a_class_can_be_pickled():
    """timm stores the arguments of a model in it."""
    sizes = dict(img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=2)
    for layer in (attention_layer("hedgehog", rows=8), OwnLayer):
        model = timm.create_model("vit_tiny_patch16_224", attn_layer=layer, **sizes).eval()
        x = torch.randn(2, 3, 32, 32)
        assert_close("copy", pickle.loads(pickle.dumps(model))(x), model(x))
        assert pickle.loads(pickle.dumps(layer)) is deepcopy(layer) is layer


def test_daft_conv_on_a_grid_that_is_no_square(tokens):
    """2 x 8 tokens could also form a square: the grid gives their layout."""
    tokens = torch.randn(B, 16, C)
    square = attention_layer("daft_conv", window=3, grid_size=(4, 4))(C, H)
    torch.nn.init.normal_(square.attention.gamma)
    wide = attention_layer("daft_conv", window=3, grid_size=(2, 8))(C, H)
    wide.load_state_dict(square.state_dict())
    assert_close("as a map", wide(tokens), square(tokens.view(B, 2, 8, C)).flatten(1, 2))
    assert (wide(tokens) - square(tokens)).abs().max() > 1e-3
    with pytest.raises(ValueError, match="9 tokens; allowed .*grid of 2 x 8"):
        wide(torch.randn(B, 9, C))
    unknown = attention_layer("daft_conv", window=3)(C, H)
    unknown.load_state_dict(square.state_dict())
    with pytest.raises(ValueError, match="x has 16 tokens on an unknown grid"):
        unknown(tokens)
    assert torch.equal(unknown(tokens.view(B, 2, 8, C)), square(tokens.view(B, 2, 8, C)))


def test_options_of_a_spec():
    assert LayerSpec("flow", {"form": None}).without_defaults().layer_class() is FlowSelfAttention
    options = {"clamp": "5.0", "phi": "relu"}
    assert LayerSpec("flow", options).layer_class() is attention_layer("flow", clamp=5.0, phi="relu")
    assert LayerSpec(Attention, {"form": None}).without_defaults().layer_class() is Attention
    with pytest.raises(ValueError, match="form; allowed.*flow"):
        LayerSpec(Attention, {"form": "paper"}).layer_class()


def test_pictures_of_a_hierarchical_model():
    model = build("hier")
    with record_attention(model) as records, torch.no_grad():
        model(images(model))
    assert [record.name for record in records] == [
        "stages.0.blocks.0.attn.attention",
        "stages.1.blocks.0.attn.attention",
        "stages.2.blocks.0.attn.attention",
        "stages.2.blocks.1.attn.attention",
        "stages.3.blocks.0.attn.attention",
    ]
    for record, side in zip(records, (16, 8, 4, 4, 2)):
        assert record.competition.shape == record.allocation.shape == (2, 4, side * side)
        # The released competition is a softmax over the sources times their number.
        assert_close("competition", record.competition.mean(-1), torch.ones(2, 4))
        assert ((record.allocation > 0) & (record.allocation < 1)).all()
