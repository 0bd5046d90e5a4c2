"""LSH attention beyond the contract: the keys it finds, a token's own key, its rotations, and transformers' module."""

import pytest
import torch

from common.attention import build_attention
from common.ops import reformer_attention
from common.ops.reformer import draw_rotations
from tests.common.inputs import qkv
from tests.common.refusals import refused, tensors
from tests.compare import assert_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def others(q, v, causal: bool):
    """Softmax attention with unit keys to every token except the query's own."""
    n = q.shape[2]
    scores = q @ torch.nn.functional.normalize(q, dim=-1).transpose(-2, -1)
    hidden = torch.eye(n).bool() | (torch.ones(n, n).triu().bool() if causal else False)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0) @ v + (hidden.all(-1)[:, None] * v)


@causality
def test_one_bucket_in_one_chunk_is_attention_to_all_others(causal):
    q, _, v = qkv(9)
    q = q.abs()  # all on the same side of a direction of ones
    out = reformer_attention(q, v, torch.ones(1, 5, 1), causal=causal, chunk_size=9)
    assert_close("out", out, others(q, v, causal))


@causality
def test_more_rounds_find_more_of_what_softmax_attention_weighs(causal):
    """In each round, a key with a large weight has a certain chance to be in the query's bucket."""
    with torch.no_grad():
        q, _, v = qkv(60, d=8, scale=3.0)
        expected = others(q, v, causal)
        errors = []
        for rounds in (1, 4, 16):
            out = reformer_attention(q, v, draw_rotations(rounds, 8, 4, seeded()), causal=causal)
            errors.append((out - expected).norm() / expected.norm())
    assert errors[0] > 1.5 * errors[1] > 2.0 * errors[2] and errors[2] < 0.2


@causality
def test_a_token_attends_to_itself_only_where_it_finds_no_other(causal):
    """Two directions in two buckets: the third token shares the first one's bucket, the second is alone."""
    q = torch.tensor([[1.0, 0.1], [0.1, -1.0], [2.0, 0.1]])[None, None]
    v = torch.tensor([[1.0], [2.0], [4.0]])[None, None]
    rotations = torch.eye(2).expand(3, 2, 2)
    for scale in (1.0, 1e4):
        out = reformer_attention(scale * q, v, rotations, causal=causal, chunk_size=4).flatten().tolist()
        assert out == ([1.0, 2.0, 1.0] if causal else [4.0, 2.0, 1.0])


@causality
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_extreme_queries_stay_finite(size, causal):
    q, _, v = (x.detach().requires_grad_() for x in qkv(30, dtype=torch.float32))
    large = (size * q.detach()).requires_grad_()
    out = reformer_attention(large, v, draw_rotations(3, 5, 2, seeded()), causal=causal, chunk_size=4)
    assert torch.isfinite(out).all() and all(torch.isfinite(x).all() for x in gradients(out, (large, v)))


def test_a_causal_token_finds_the_last_keys_of_its_bucket():
    """Ten tokens of one bucket, with one of another in between: values show which three are seen, equally weighted."""
    q = torch.ones(1, 1, 11, 1, dtype=torch.float64)
    q[:, :, 6] = -1.0
    v = torch.eye(11, dtype=torch.float64)[None, None]
    out = reformer_attention(q, v, torch.ones(1, 1, 1), causal=True, chunk_size=4)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in out]
    assert seen[:5] == [[0], [0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert seen[6] == [6] and seen[7] == [3, 4, 5] and seen[10] == [7, 8, 9]
    assert_close("weights", out[10], v[0, 0, 7:10].mean(0))


def test_rotations_are_drawn_again_on_request_alone():
    module = build_attention("reformer", head_dim=5, rounds=2, directions=3, chunk_size=4).train()
    q, _, v = qkv(12, dtype=torch.float32)
    before, first = module.rotations.clone(), module(q, None, v)
    assert torch.equal(module(q, None, v), first)
    module.redraw_rotations(seed=5)
    again = module.rotations.clone()
    assert not torch.equal(again, before)
    module.redraw_rotations(seed=5)
    assert torch.equal(module.rotations, again)
    fresh = build_attention("reformer", head_dim=5, rounds=2, directions=3, chunk_size=4)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh(q, None, v), module(q, None, v))


def test_what_does_not_fit_is_refused():
    x = tensors()
    with refused("k", "given", "None"):
        build_attention("reformer", head_dim=4)(**x)
    _, state = reformer_attention(x["q"], x["v"], draw_rotations(2, 4, 3), causal=True, return_state=True)
    with refused("initial_state['codes']", "(2, 3, 5, 2)", "(2, 3, 5, 1)"):
        reformer_attention(x["q"], x["v"], draw_rotations(1, 4, 3), causal=True, initial_state=state)


def test_unit_keys_and_the_own_token_are_those_of_transformers():
    """Two chunks that see each other, in the only used bucket, since transformers does not compare buckets."""
    peer = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    sizes = {"attention_head_size": 8, "num_attention_heads": 2, "hidden_size": 16, "lsh_attn_chunk_length": 6}
    config = peer.ReformerConfig(**sizes, num_buckets=2, num_hashes=1, is_decoder=False)
    layer = peer.LSHSelfAttention(config, 0).eval()
    x = torch.randn(2, 12, 16, generator=seeded())
    q, v = (f(x).view(2, 12, 2, 8).transpose(1, 2) for f in (layer.query_key, layer.value))
    expected = layer(x).hidden_states.view(2, 12, 2, 8).transpose(1, 2)
    out = others(q, v, False)
    assert_close("theirs", expected, out)
    no_rotation = torch.zeros(1, 8, 1)  # every token is at a tie, and is put into the first bucket
    assert_close("ours", reformer_attention(q, v, no_rotation, chunk_size=6), out)
