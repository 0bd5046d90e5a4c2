"""The adapter between timm's attention seam and the mechanisms of ``common``."""

import inspect
import pickle
import warnings

import pytest
import timm
import torch
from timm.layers import Attention, LayerNorm
from timm.models.vision_transformer import ATTN_LAYERS, _create_attn

from common.attention import ATTENTIONS, record_attention
from common.ops import flow_attention, flow_attention_weights
from tests.compare import assert_close
from timm_plugin.attention import FlowSelfAttention, SoftmaxSelfAttention, given_options
from timm_plugin.registry import ATTENTION_LAYERS, register_attention_layers

from .models import build, images

B, C, H = 2, 24, 3
N = 9  # DAFT-conv takes them for an image of 3 x 3


@pytest.fixture
def tokens():
    return torch.randn(B, N, C, generator=torch.Generator().manual_seed(0))


def test_every_mechanism_for_images_is_in_timms_table():
    """Those of the FLASH paper's language models count positions along a text, and stay with fairseq.

    DAFT-full must be told the number of tokens, which the seam does not carry: it has a model of its own.
    """
    assert set(ATTENTION_LAYERS) == set(ATTENTIONS) - {"combiner", "mixed_chunk", "quadratic", "daft_full"}
    for name, layer in ATTENTION_LAYERS.items():
        assert ATTN_LAYERS[name] is layer
        assert layer.mechanism == name


def test_names_of_others_are_left_alone(monkeypatch):
    monkeypatch.setitem(ATTN_LAYERS, "flow", Attention)
    with pytest.warns(UserWarning, match="attn_layer 'flow' is already timm.layers.attention.Attention and stays so"):
        register_attention_layers()
    assert ATTN_LAYERS["flow"] is Attention
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_attention_layers()
    assert ATTN_LAYERS["flow"] is FlowSelfAttention


@pytest.mark.parametrize("layer", ATTENTION_LAYERS.values())
def test_takes_every_argument_timm_gives(layer):
    given = set(inspect.signature(_create_attn).parameters) - {"attn_layer", "depth", "kwargs"}
    assert given | {"device", "dtype"} <= set(inspect.signature(layer).parameters)


def test_flow_is_the_op_between_the_projections(tokens):
    layer = FlowSelfAttention(C, H, qkv_bias=True)
    q, k, v = (
        part.reshape(B, N, H, C // H).transpose(1, 2) for part in layer.qkv(tokens).chunk(3, dim=-1)
    )  # each (B, H, N, d)
    expected = layer.proj(flow_attention(q, k, v).transpose(1, 2).flatten(2))
    assert_close("output", layer(tokens), expected)
    layer.configure(form="paper", phi="relu")
    expected = layer.proj(flow_attention(q, k, v, form="paper", phi="relu").transpose(1, 2).flatten(2))
    assert_close("output with options", layer(tokens), expected)


@pytest.mark.parametrize("norms", [dict(), dict(qk_norm=True, scale_norm=True)])
@pytest.mark.parametrize("proj_bias", [True, False])
def test_softmax_is_timms_attention(tokens, norms, proj_bias):
    args = dict(qkv_bias=True, proj_bias=proj_bias, norm_layer=LayerNorm, **norms)
    stock, ours = Attention(C, H, **args), SoftmaxSelfAttention(C, H, **args)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(stock.state_dict(), strict=True)
    assert_close("output", ours(tokens), stock(tokens))


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_masks_are_refused(tokens, name):
    layer = ATTENTION_LAYERS[name](C, H)
    with pytest.raises(ValueError, match="attn_mask is given; allowed: None"):
        layer(tokens, attn_mask=torch.ones(N, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="is_causal is True; allowed: False"):
        layer(tokens, is_causal=True)
    assert layer(tokens, attn_mask=None, is_causal=False).shape == tokens.shape


def test_masks_are_refused_by_the_whole_model():
    model = build("stock_vit")
    with pytest.raises(ValueError, match="attn_mask is given; allowed: None"):
        model(images(model), attn_mask=torch.ones(17, 17, dtype=torch.bool))


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_heads is 5 and dim 24; allowed: a num_heads that divides dim"):
        FlowSelfAttention(C, 5)
    with pytest.raises(ValueError, match="num_heads is 0"):
        FlowSelfAttention(C, 0)
    with pytest.raises(ValueError, match="norm_layer is None; allowed with qk_norm or scale_norm"):
        FlowSelfAttention(C, H, qk_norm=True)
    with pytest.raises(ValueError, match="has no option 'form'"):
        SoftmaxSelfAttention(C, H).configure(form="paper")


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_dropouts_only_in_training(tokens, name):
    layer = ATTENTION_LAYERS[name](C, H, attn_drop=0.5).eval()
    assert torch.equal(layer(tokens), layer(tokens))
    layer.train()
    assert not torch.equal(layer(tokens), layer(tokens))
    layer = ATTENTION_LAYERS[name](C, H, proj_drop=0.5).train()
    assert (layer(tokens) == 0.0).any()


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_normalised_queries_under_autocast(tokens, name):
    layer = ATTENTION_LAYERS[name](C, H, qk_norm=name != "daft_conv", scale_norm=True, norm_layer=LayerNorm)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(tokens)
    assert out.dtype == torch.bfloat16
    assert_close("autocast", out, layer(tokens), 2e-2)


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_pickles(tokens, name):
    layer = ATTENTION_LAYERS[name](C, H)
    assert_close("pickled", pickle.loads(pickle.dumps(layer))(tokens), layer(tokens))


def test_given_options():
    assert given_options() == {}
    assert given_options(clamp="5.0", form=None, phi="relu") == {"clamp": 5.0, "phi": "relu"}
    assert given_options(clamp="inf") == {"clamp": float("inf")}
    for clamp in ("none", "nan"):
        with pytest.raises(ValueError, match=f"clamp is '{clamp}'; allowed: a number above 0, or inf for no clamp"):
            given_options(clamp=clamp)


@pytest.mark.parametrize("name", ATTENTION_LAYERS)
def test_any_stock_vit_takes_it(name):
    args = dict(class_token=False, global_pool="avg") if name == "daft_conv" else {}
    model = timm.create_model("vit_tiny_patch16_224", attn_layer=name, img_size=48, depth=2, num_classes=3, **args)
    assert all(type(block.attn) is ATTENTION_LAYERS[name] for block in model.blocks)
    assert model(images(model)).shape == (2, 3)


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


def test_pictures_are_of_the_queries_and_keys(tokens):
    layer = FlowSelfAttention(C, H)
    with record_attention(layer) as records:
        layer(tokens)
    qkv = layer.qkv(tokens).reshape(B, N, 3, H, C // H).permute(2, 0, 3, 1, 4)
    competition, allocation = flow_attention_weights(qkv[0], qkv[1])
    assert_close("competition", records[0].competition, competition)
    assert_close("allocation", records[0].allocation, allocation)
