"""Longformer: which tokens see each other, what decoding keeps, and comparison with transformers' module."""

import pytest
import torch

from common.attention import build_attention
from common.ops import local_attention, longformer_attention
from tests.common.inputs import qkv
from tests.compare import assert_close, gradients


def seen_by(token: int, **options) -> list[int]:
    """The tokens that the output of ``token`` depends on."""
    q, k, v = qkv(70)
    out = longformer_attention(q, k, v, window=4, global_tokens=2, **options)
    return gradients(out[:, :, token], [v])[0].abs().sum((0, 1, 3)).nonzero().flatten().tolist()


def test_global_tokens_see_all_and_are_seen_by_all():
    assert seen_by(20) == [0, 1, 18, 19, 20, 21]
    assert seen_by(1) == list(range(70))
    assert seen_by(69) == [0, 1, 67, 68, 69]


def test_causal_global_tokens_are_seen_by_all_after_them():
    assert seen_by(20, causal=True) == [0, 1, 17, 18, 19, 20]
    assert seen_by(1, causal=True) == [0, 1]
    assert seen_by(3, causal=True) == [0, 1, 2, 3]


def test_global_tokens_are_the_first_real_ones():
    mask = torch.zeros(2, 70, dtype=torch.bool)
    mask[:, :5], mask[:, 6] = True, True
    assert seen_by(30, key_padding_mask=mask) == [5, 7, 28, 29, 30, 31]
    assert seen_by(7, key_padding_mask=mask) == [5, *range(7, 70)]


def test_without_later_global_tokens_it_is_local_attention():
    """Causal tokens whose window contains the global ones see nothing else."""
    q, k, v = qkv(40)
    out = longformer_attention(q, k, v, window=30, global_tokens=3, causal=True)
    assert_close("out", out[:, :, :30], local_attention(q, k, v, window=30, causal=True)[:, :, :30])


def test_a_state_holds_the_window_and_the_global_tokens():
    module = build_attention("longformer", True, window=6, global_tokens=2)
    q, k, v = qkv(20, d=4, dtype=torch.float32)
    _, state = module.extend(q, k, v)
    assert_close("k", state["k"], k[:, :, 14:])
    assert_close("global_v", state["global_v"], v[:, :, :2])


def test_it_is_transformers_longformer_with_shared_projections():
    """A window of 8 in transformers corresponds to 9 in ours, and its softmax is always float32."""
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    heads, channels, n, first = 2, 4, 48, 3
    sizes = {"hidden_size": heads * channels, "num_attention_heads": heads, "attention_probs_dropout_prob": 0.0}
    layer = modeling.LongformerSelfAttention(transformers.LongformerConfig(attention_window=[8], **sizes), 0)
    layer = layer.double().eval()
    names = ("query", "key", "value")
    for name in names:
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    x = torch.randn(2, n, heads * channels, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    padding = torch.arange(n) >= torch.tensor([[n], [37]])
    is_global = (torch.arange(n) < first).expand(2, -1)
    weights = torch.zeros(2, n).masked_fill(padding, -1e4).masked_fill(is_global, 1e4)
    masks = {"is_index_masked": padding, "is_index_global_attn": is_global, "is_global_attn": True}
    expected = layer(x, attention_mask=weights.double(), **masks)[0]
    q, k, v = (getattr(layer, name)(x).unflatten(-1, (heads, channels)).transpose(1, 2) for name in names)
    out = longformer_attention(q, k, v, window=9, global_tokens=first, key_padding_mask=padding)
    out = out.transpose(1, 2).flatten(2)
    assert_close("out", out, expected.masked_fill(padding[..., None], 0.0), 1e-5)
