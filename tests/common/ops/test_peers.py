"""Mechanisms are what transformers has under their names, where it computes what the paper says."""

import pytest
import torch
from torch.nn import functional as F

from common.ops import bigbird_attention, longformer_attention, reformer_attention, yoso_attention
from common.ops.bigbird import draw_numbers
from common.ops.bigbird.random_chunks import choose_chunks
from tests.compare import assert_close, assert_gradients_close

transformers = pytest.importorskip("transformers")
HEADS, CHANNELS = 2, 4
SIZES = {"hidden_size": HEADS * CHANNELS, "num_attention_heads": HEADS}


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


def by_head(layer, x, names=("query", "key", "value"), heads=HEADS):
    return tuple(getattr(layer, name)(x).unflatten(-1, (heads, -1)).transpose(1, 2) for name in names)


def joined(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


def test_bigbird_with_the_same_random_chunks():
    """In evaluation, transformers uses the first chunk for each random one, and so counts its keys repeatedly."""
    modeling = pytest.importorskip("transformers.models.big_bird.modeling_big_bird")
    n, size = 48, 4
    config = transformers.BigBirdConfig(**SIZES, block_size=size, num_random_blocks=2)
    layer = modeling.BigBirdBlockSparseAttention(config).double().eval()
    numbers = draw_numbers(2, seed=0)
    chosen, _ = choose_chunks(numbers, n // size, torch.tensor([[n // size - 1]]))
    layer._bigbird_block_rand_mask_with_head = lambda **_: [chosen[0, 1:-1].numpy()] * HEADS
    x, real = drawn(2, n, HEADS * CHANNELS), torch.ones(2, n, dtype=torch.float64)
    blocked, band, rows, columns = modeling.BigBirdModel.create_masks_for_block_sparse_attn(real, size)
    masks = {"band_mask": band, "from_mask": rows, "to_mask": columns}
    expected = layer(x, **masks, from_blocked_mask=blocked, to_blocked_mask=blocked)[0]
    assert_close("out", joined(bigbird_attention(*by_head(layer, x), numbers, chunk_size=size)), expected, 1e-5)


def test_longformer_with_shared_projections():
    """A window of 8 in transformers corresponds to 9 in ours, and its softmax is always float32."""
    modeling = pytest.importorskip("transformers.models.longformer.modeling_longformer")
    n, first = 48, 3
    config = transformers.LongformerConfig(attention_window=[8], attention_probs_dropout_prob=0.0, **SIZES)
    layer = modeling.LongformerSelfAttention(config, 0).double().eval()
    for name in ("query", "key", "value"):
        getattr(layer, f"{name}_global").load_state_dict(getattr(layer, name).state_dict())
    x, padding = drawn(2, n, HEADS * CHANNELS), torch.arange(n) >= torch.tensor([[n], [37]])
    is_global = (torch.arange(n) < first).expand(2, -1)
    weights = torch.zeros(2, n).masked_fill(padding, -1e4).masked_fill(is_global, 1e4)
    masks = {"is_index_masked": padding, "is_index_global_attn": is_global, "is_global_attn": True}
    expected = layer(x, attention_mask=weights.double(), **masks)[0].masked_fill(padding[..., None], 0.0)
    out = longformer_attention(*by_head(layer, x), window=9, global_tokens=first, key_padding_mask=padding)
    assert_close("out", joined(out), expected, 1e-5)


def test_unit_keys_and_the_own_token_of_reformer():
    """Two chunks that see each other, in the only used bucket, since transformers does not compare buckets."""
    peer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    sizes = {"attention_head_size": 8, "num_attention_heads": 2, "hidden_size": 16, "lsh_attn_chunk_length": 6}
    layer = peer.LSHSelfAttention(peer.ReformerConfig(**sizes, num_buckets=2, num_hashes=1, is_decoder=False), 0).eval()
    x = drawn(2, 12, 16, dtype=torch.float32)
    q, v = by_head(layer, x, ("query_key", "value"))
    expected = layer(x).hidden_states.unflatten(-1, (2, 8)).transpose(1, 2)
    scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(torch.eye(12).bool(), float("-inf"))
    assert_close("theirs", expected, scores.softmax(-1) @ v)
    no_rotation = torch.zeros(1, 8, 1)  # every token is at a tie, and is put into the first bucket
    assert_close("ours", reformer_attention(q, v, no_rotation, chunk_size=6), expected)


def test_the_expectation_of_yoso_with_its_gradient():
    """With a mask of 0 and -10000; transformers ignores the mask of 1 and 0 that its own model passes."""
    peer = pytest.importorskip("transformers.models.yoso.modeling_yoso")
    config = peer.YosoConfig(hidden_size=32, num_attention_heads=4, use_expectation=True, conv_window=None)
    layer, x = peer.YosoSelfAttention(config).eval(), drawn(1, 12, 32, dtype=torch.float32).requires_grad_()
    padding = (torch.arange(12) >= 8)[None]
    expected = layer(x, -10000.0 * padding)[0].unflatten(-1, (4, 8)).transpose(1, 2)[:, :, :8]
    tensors = by_head(layer, x, heads=4)
    out = yoso_attention(*tensors, tau=config.hash_code_len, key_padding_mask=padding)[:, :, :8]
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, {"x": x})
