"""Where a mechanism is softmax attention or another one by definition, or what transformers has; and its limits.

The tokens that a token sees are written down by hand; the contract compares with literal references. Limits are long
sums in float16, and queries and keys whose products and exponentials overflow.
"""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.ops import (
    bigbird_attention,
    combiner_attention,
    flow_attention,
    flow_source_attention,
    gated_delta_attention,
    gau_attention,
    hedgehog_attention,
    kimi_delta_attention,
    linear_attention,
    linformer_attention,
    local_attention,
    lolcats_attention,
    longformer_attention,
    mixed_chunk_attention,
    nystrom_attention,
    reformer_attention,
    retention_attention,
    row_attention,
    sinkhorn_attention,
    sparse_attention,
    synthesizer_attention,
    yoso_attention,
)
from common.ops.bigbird import draw_numbers
from common.ops.bigbird.random_chunks import choose_chunks
from common.ops.flow.options import FORMS
from common.ops.reformer import draw_rotations
from common.ops.shared.feature_maps import FEATURE_MAPS
from tests.common.inputs import BIASES, bias_like, doubled, padding, qkv
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

NUMBERS = draw_numbers(3, seed=0)
EYE = torch.eye(13, dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maps(d: int = 5) -> dict[str, Tensor]:
    """The maps of two heads with 3 features."""
    return {"query_weight": uniform(2, 3, d) - 0.5, "key_weight": uniform(2, 3, d, seed=1) - 0.5}


def of(op, *more, **options):
    """A function of q, k and v and, where it has one, of the direction."""
    return lambda q, k, v, *causal: op(q, k, v, *more, **dict(zip(["causal"], causal)), **options)


def full(op, *more, **options):
    """A function that has no direction."""
    return lambda q, k, v, *_: op(q, k, v, *more, **options)


def lolcats(gate: float, **options):
    return of(lolcats_attention, window_gate=torch.full((2,), gate, dtype=torch.float64), **maps(), **options)


def chunks(**options):
    return lambda q, k, v, causal: mixed_chunk_attention(q, k, q, k, v, causal=causal, **options)


def combiner(**options):
    return lambda q, k, v, *_: combiner_attention(q, k, v, k, v, **options)


def apart(op):
    """Chunks of 4 tokens are sequences of their own."""
    return lambda q, k, v, causal: torch.cat([op(*x, causal) for x in zip(*(x.split(4, 2) for x in (q, k, v)))], dim=2)


def softmax(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def quadratic(q, k, v, causal):
    """relu(Q Kᵀ / 40)² V, FLASH-Quad."""
    scores = (q @ k.transpose(-2, -1) / 40).relu().square()
    return (scores.tril() if causal else scores) @ v


def retention(**options):
    return lambda q, k, v, _: retention_attention(q[:, :1], k[:, :1], v[:, :1], **options)


BOTH, FULL, CAUSAL = (False, True), (False,), (True,)
SORTED = {"max_tokens": 45, "chunk_size": 15}
WEIGHTS, BETA, DECAY = uniform(2, 5, 3), uniform(2, 2, 13), -uniform(2, 2, 13, seed=1)
NO_BIAS = dict.fromkeys(("query_bias", "key_bias"), torch.zeros(2, 3, dtype=torch.float64))
#: What it is -> (directions, the function with q, k, v of 13 tokens and 5 and 3 channels, what it equals).
EQUAL = {
    "windows of all tokens": (BOTH, of(local_attention, window=40), softmax),
    "a chunk of all": (BOTH, of(local_attention, window=13, chunked=True), softmax),
    "chunks apart": (BOTH, of(local_attention, window=4, chunked=True), apart(softmax)),
    "global tokens alone": (BOTH, of(longformer_attention, window=1, global_tokens=13), softmax),
    "a window that holds the global tokens": (CAUSAL, of(longformer_attention, window=13, global_tokens=3), softmax),
    "a fixed stride of all": (BOTH, of(sparse_attention, stride=13), softmax),
    "a strided stride of all": (BOTH, of(sparse_attention, pattern="strided", stride=13), softmax),
    "columns of all": (FULL, of(sparse_attention, stride=4, columns=9), softmax),
    "few chunks": (FULL, full(bigbird_attention, NUMBERS, chunk_size=4), softmax),
    "a sum for each key": (FULL, full(linformer_attention, EYE, EYE), softmax),
    "a chunk sorted to itself": (FULL, full(sinkhorn_attention, WEIGHTS, **SORTED), softmax),
    "a chunk sorted to itself, twice": (
        *(FULL, full(sinkhorn_attention, WEIGHTS, **SORTED, normaliser="separate")),
        lambda *x: 2 * softmax(*x),
    ),
    "rows of 4": (FULL, full(row_attention, row_length=4), apart(softmax)),
    "one row": (CAUSAL, combiner(row_length=40, causal=True), softmax),
    "a LoLCATs window of all": (BOTH, lolcats(-1.0, window=40), softmax),
    "a LoLCATs window alone": (BOTH, lolcats(0.5, window=4, part="window"), of(local_attention, window=4)),
    "its linear part alone": (
        *(BOTH, lolcats(0.5, window=4, part="linear"), of(hedgehog_attention, **maps(), **NO_BIAS)),
    ),
    "scores of GAU by softmax": (BOTH, of(gau_attention, kernel="softmax"), softmax),
    "GAU": (BOTH, of(gau_attention, divisor=40.0), quadratic),
    "chunks of 4 by softmax": (BOTH, chunks(chunk_size=4, linear=False, kernel="softmax"), apart(softmax)),
    "one mixed chunk": (BOTH, chunks(chunk_size=40, linear=False), quadratic),
    "two mixed chunks that overlap": (CAUSAL, chunks(chunk_size=20, linear=False, overlap=True), quadratic),
    "flow to a source, of itself": (FULL, lambda q, k, v, _: flow_source_attention(q, k, v, q), full(flow_attention)),
    "logits that are given": (
        *(BOTH, lambda q, k, v, c: synthesizer_attention(q @ k.transpose(-2, -1) / 5**0.5 + 50.0, v, causal=c)),
        softmax,
    ),
    "one decay for all channels": (
        *(CAUSAL, full(kimi_delta_attention, beta=BETA, log_decay=DECAY.unsqueeze(3).expand(-1, -1, -1, 5))),
        full(gated_delta_attention, beta=BETA, log_decay=DECAY),
    ),
    "retention of one head": (CAUSAL, retention(decays="log_space"), retention()),
}


@pytest.mark.parametrize(
    "what, causal", [(what, causal) for what, (directions, *_) in EQUAL.items() for causal in directions]
)
def test_it_is_what_it_is_by_definition(what, causal):
    """Outputs and gradients."""
    _, attend, expected = EQUAL[what]
    q, k, v = qkv(13)
    out, wanted = attend(q, k, v, causal), expected(q, k, v, causal)
    assert_close(what, out, wanted)
    assert_all_close("qkv", gradients(out, (q, k, v)), gradients(wanted, (q, k, v)))


@pytest.mark.parametrize("form", BIASES[1:])
@causality
def test_a_bias_of_gau_is_added_to_scores(causal, form):
    """More than a block of 256 rows, with padding; what a vector means for a query r tokens after its key."""
    n = 260
    q, k, v = qkv(n, batch=1)
    bias, mask = bias_like(form, n), padding("right", 1, n)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    matrix = bias[..., distance + n - 1] if form.startswith("vector") else bias
    hidden = mask[:, None, None] | (distance < 0 if causal else torch.zeros(n, n).bool())
    scores = (q @ k.transpose(-2, -1) / 7 + matrix).masked_fill(hidden, 0.0)
    expected = (scores.relu().square() @ v).masked_fill(mask[:, None, :, None], 0.0)
    out = gau_attention(q, k, v, bias=bias, divisor=7.0, causal=causal, key_padding_mask=mask)
    assert_close("out", out, expected)
    leaves = (q, k, v, bias)
    assert_all_close(("q", "k", "v", "bias"), gradients(out, leaves), gradients(expected, leaves))


def test_nystrom_is_softmax_attention_where_landmarks_stand_for_their_tokens():
    """Each token occurs three times in a row: its landmark is the token, and enough steps find the inverse."""
    q, k, v = (x.detach().repeat_interleave(3, dim=2) for x in qkv(4, d=8, scale=2.0))
    expected = F.scaled_dot_product_attention(q, k, v)
    assert_close("out", nystrom_attention(q, k, v, landmarks=4, iterations=20), expected)
    few = nystrom_attention(q, k, v, landmarks=4, iterations=6)
    assert (few - expected).norm() > 1e-6 * expected.norm(), "the number of steps is part of the mechanism"
    for n in (1, 3, 5):  # landmarks that no token falls to are as if they were not there
        assert_close("out", nystrom_attention(*qkv(n), landmarks=16), nystrom_attention(*qkv(n), landmarks=n))


def moved(q, k, v):
    """Global tokens are the first real ones."""
    hidden = (torch.arange(23) < 2) | (torch.arange(23) == 3)
    return longformer_attention(q, k, v, **GLOBAL, key_padding_mask=hidden.expand(2, -1))


ALL, GLOBAL = list(range(23)), {"window": 4, "global_tokens": 2}
#: (function, a token of 23, the tokens that its output depends on). An even window that is not causal extends one
#: further back. The last chunk of the fixed pattern has only three tokens, so it has no columns yet.
SEEN = [
    (of(local_attention, window=4, causal=True), 12, [9, 10, 11, 12]),
    (of(local_attention, window=5), 12, [10, 11, 12, 13, 14]),
    (of(local_attention, window=4), 12, [10, 11, 12, 13]),
    (of(local_attention, window=6, chunked=True), 14, [12, 13, 14, 15, 16, 17]),
    (of(local_attention, window=6, chunked=True, causal=True), 14, [12, 13, 14]),
    (of(longformer_attention, **GLOBAL), 12, [0, 1, 10, 11, 12, 13]),
    (of(longformer_attention, **GLOBAL), 1, ALL),
    (of(longformer_attention, **GLOBAL, causal=True), 12, [0, 1, 9, 10, 11, 12]),
    (of(longformer_attention, **GLOBAL, causal=True), 3, [0, 1, 2, 3]),
    (moved, 12, [2, 4, 10, 11, 12, 13]),
    (moved, 4, [2, *range(4, 23)]),
    (of(sparse_attention, pattern="fixed", stride=5, columns=2), 12, [3, 4, 8, 9, 10, 11, 12, 13, 14, 18, 19]),
    (of(sparse_attention, pattern="fixed", stride=5, columns=2, causal=True), 12, [3, 4, 8, 9, 10, 11, 12]),
    (of(sparse_attention, pattern="strided", stride=3), 12, [0, 3, 6, 9, 10, 11, 12, 13, 14, 15, 18, 21]),
    (of(sparse_attention, pattern="strided", stride=3, causal=True), 12, [0, 3, 6, 9, 10, 11, 12]),
    (full(bigbird_attention, draw_numbers(0, seed=0), chunk_size=2), 12, [0, 1, 10, 11, 12, 13, 14, 15, 22]),
    (full(bigbird_attention, draw_numbers(0, seed=0), chunk_size=2), 3, [0, 1, 2, 3, 4, 5, 22]),
    (full(bigbird_attention, draw_numbers(0, seed=0), chunk_size=2), 1, ALL),
    (full(bigbird_attention, draw_numbers(0, seed=0), chunk_size=2), 22, ALL),
    (full(bigbird_attention, draw_numbers(20, seed=0), chunk_size=2), 12, ALL),
    (combiner(row_length=4), 5, [1, 4, 5, 6, 7, 9, 13, 17, 21]),
    (combiner(row_length=4, causal=True), 9, [1, 5, 8, 9]),
]


@pytest.mark.parametrize("attend, token, seen", SEEN)
def test_which_tokens_a_token_sees_each_once(attend, token, seen):
    """With equal scores, each of them has the same weight; Combiner sees its own row, and summaries of a column."""
    q, k, v = qkv(23)
    for scale in (1.0, 0.0):
        out = attend(scale * q, k, v)[:, :, token]
        (gradient,) = torch.autograd.grad(out.sum(), v)
        weights = gradient[1, 1, :, 0]
        assert weights.nonzero().flatten().tolist() == seen
    if "combiner" not in attend.__qualname__:
        assert_close("weights", weights[seen], torch.full((len(seen),), 1 / len(seen), dtype=torch.float64))


# --- what transformers has, where it computes what the paper says -----------------------------------------------------

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
    config = modeling.BigBirdConfig(**SIZES, block_size=size, num_random_blocks=2)
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
    config = modeling.LongformerConfig(attention_window=[8], attention_probs_dropout_prob=0.0, **SIZES)
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
    modeling = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    sizes = {"attention_head_size": 8, "num_attention_heads": 2, "hidden_size": 16, "lsh_attn_chunk_length": 6}
    config = modeling.ReformerConfig(**sizes, num_buckets=2, num_hashes=1, is_decoder=False)
    layer = modeling.LSHSelfAttention(config, 0).eval()
    x = drawn(2, 12, 16, dtype=torch.float32)
    q, v = by_head(layer, x, ("query_key", "value"))
    expected = layer(x).hidden_states.unflatten(-1, (2, 8)).transpose(1, 2)
    scores = (q @ F.normalize(q, dim=-1).mT).masked_fill(torch.eye(12).bool(), float("-inf"))
    assert_close("theirs", expected, scores.softmax(-1) @ v)
    no_rotation = torch.zeros(1, 8, 1)  # every token is at a tie, and is put into the first bucket
    assert_close("ours", reformer_attention(q, v, no_rotation, chunk_size=6), expected)


def test_the_expectation_of_yoso_with_its_gradient():
    """With a mask of 0 and -10000; transformers ignores the mask of 1 and 0 that its own model passes."""
    modeling = pytest.importorskip("transformers.models.yoso.modeling_yoso")
    config = modeling.YosoConfig(hidden_size=32, num_attention_heads=4, use_expectation=True, conv_window=None)
    layer, x = modeling.YosoSelfAttention(config).eval(), drawn(1, 12, 32, dtype=torch.float32).requires_grad_()
    padding = (torch.arange(12) >= 8)[None]
    expected = layer(x, -10000.0 * padding)[0].unflatten(-1, (4, 8)).transpose(1, 2)[:, :, :8]
    tensors = by_head(layer, x, heads=4)
    out = yoso_attention(*tensors, tau=config.hash_code_len, key_padding_mask=padding)[:, :, :8]
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, {"x": x})


# --- limits -----------------------------------------------------------------------------------------------------------

ROTATIONS = draw_rotations(3, 5, 2, torch.Generator().manual_seed(0))


@causality
@pytest.mark.parametrize("op", [flow_attention, linear_attention], ids=lambda op: op.__name__)
def test_long_sums_of_float16_keep_their_precision(op, causal):
    """With 8192 tokens, Σ k and q·Σ k exceed the range of float16; the contract tests bfloat16's few bits."""
    inputs = qkv(8192, batch=1, heads=1, d=32, e=8, dtype=torch.float16)
    exact = doubled(*inputs)
    out, expected = op(*inputs, causal=causal), op(*exact, causal=causal)
    # Averages over this many values are small: only the last rounding to half precision may be visible.
    assert_all_close(("out", "last tokens"), (out, out[:, :, -100:]), (expected, expected[:, :, -100:]))
    for name, found, wanted in zip("qkv", gradients(out, inputs), gradients(expected, exact)):
        assert_close(f"gradient of {name}", found, wanted)


@causality
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_flow_reaches_the_range_of_float16(dtype, causal):
    """elu+1 features of 100: one q·k is 6.4e5, beyond float16's 65504."""
    inputs = [torch.full((1, 1, 2048, 64), value, dtype=dtype) for value in (100.0, 100.0, 1.0)]
    out = flow_attention(*inputs, causal=causal, phi="elu+1")
    assert_close("out", out, flow_attention(*doubled(*inputs), causal=causal, phi="elu+1"))


def sinkhorn(q, k, v):
    return sinkhorn_attention(q, k, v, torch.randn(2, 5, 4), max_tokens=33, chunk_size=9)


FLOWS = [
    partial(flow_attention, form=form, clamp=clamp, phi=phi, causal=causal, chunk_size=16)
    for form in FORMS
    for clamp in (1.0, None)
    for phi in FEATURE_MAPS
    for causal in (False, True)
]
CALLS = {
    "flow": FLOWS,
    "linear": [partial(linear_attention, phi=phi, causal=causal) for phi in FEATURE_MAPS for causal in (False, True)],
    "nystrom": [partial(nystrom_attention, landmarks=8)],
    "sinkhorn": [sinkhorn],
    "reformer": [
        lambda q, k, v, causal=causal: reformer_attention(q, v, ROTATIONS, chunk_size=4, causal=causal)
        for causal in (False, True)
    ],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1e-4, 30.0, 1e4])
@pytest.mark.parametrize("name", CALLS)
def test_extreme_queries_and_keys_stay_finite(name, size, dtype):
    """Of both signs, all positive, and all negative; and so do gradients, unless true ones exceed float16's 65504.

    Without the 1e-6 of released forms or a clamp, those of relu do at flows near 0, and in Nystrom attention many do.
    """
    for call in CALLS[name]:
        for change in (lambda x: x, torch.abs, lambda x: -x.abs()):
            q, k, v = (x.detach() for x in qkv(33, dtype=dtype))
            leaves = [x.requires_grad_() for x in (change(q * size), change(k * size), v)]
            out = call(*leaves)
            assert torch.isfinite(out).all()
            exact = doubled(*leaves)
            if dtype == torch.float32 or max(x.abs().max() for x in gradients(call(*exact), exact)) < 3e4:
                assert all(torch.isfinite(x).all() for x in gradients(out, leaves))
