"""Where a mechanism is softmax attention, or another one, by its definition; and the tokens that a token sees.

Both are written down here by hand, for examples; the contract compares with literal references.
"""

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
    linformer_attention,
    local_attention,
    lolcats_attention,
    longformer_attention,
    mixed_chunk_attention,
    nystrom_attention,
    retention_attention,
    row_attention,
    sinkhorn_attention,
    sparse_attention,
    synthesizer_attention,
)
from common.ops.bigbird import draw_numbers
from tests.common.inputs import BIASES, bias_like, padding, qkv
from tests.compare import assert_all_close, assert_close, gradients

NUMBERS = draw_numbers(3, seed=0)
EYE = torch.eye(13, dtype=torch.float64)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def maps(d: int = 5) -> dict[str, Tensor]:
    """The maps of two heads with 3 features."""
    return {"query_weight": uniform(2, 3, d) - 0.5, "key_weight": uniform(2, 3, d, seed=1) - 0.5}


def with_gate(gate: float, **options):
    options = {"window_gate": torch.full((2,), gate, dtype=torch.float64), **options}
    return lambda q, k, v, causal: lolcats_attention(q, k, v, **maps(), causal=causal, **options)


def in_chunks(op):
    """Chunks of 4 tokens are sequences of their own."""
    return lambda q, k, v, causal: torch.cat([op(*x, causal) for x in zip(*(x.split(4, 2) for x in (q, k, v)))], dim=2)


def softmax(q, k, v, causal):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def quadratic(q, k, v, causal):
    """relu(Q Kᵀ / 40)² V, FLASH-Quad."""
    scores = (q @ k.transpose(-2, -1) / 40).relu().square()
    return (scores.tril() if causal else scores) @ v


BOTH, FULL, CAUSAL = (False, True), (False,), (True,)
#: What it is -> (directions, the function with q, k, v of 13 tokens and 5 and 3 channels, what it equals).
EQUAL = {
    "windows of all tokens": (BOTH, lambda q, k, v, c: local_attention(q, k, v, window=40, causal=c), softmax),
    "a chunk of all": (BOTH, lambda q, k, v, c: local_attention(q, k, v, window=13, chunked=True, causal=c), softmax),
    "chunks apart": (
        *(BOTH, lambda q, k, v, c: local_attention(q, k, v, window=4, chunked=True, causal=c)),
        in_chunks(softmax),
    ),
    "global tokens alone": (
        *(BOTH, lambda q, k, v, c: longformer_attention(q, k, v, window=1, global_tokens=13, causal=c)),
        softmax,
    ),
    "a window that holds the global tokens": (
        *(CAUSAL, lambda q, k, v, c: longformer_attention(q, k, v, window=13, global_tokens=3, causal=c)),
        softmax,
    ),
    "a fixed stride of all": (BOTH, lambda q, k, v, c: sparse_attention(q, k, v, stride=13, causal=c), softmax),
    "a strided stride of all": (
        *(BOTH, lambda q, k, v, c: sparse_attention(q, k, v, pattern="strided", stride=13, causal=c)),
        softmax,
    ),
    "columns of all": (FULL, lambda q, k, v, c: sparse_attention(q, k, v, stride=4, columns=9), softmax),
    "few chunks": (FULL, lambda q, k, v, c: bigbird_attention(q, k, v, NUMBERS, chunk_size=4), softmax),
    "a sum for each key": (FULL, lambda q, k, v, c: linformer_attention(q, k, v, EYE, EYE), softmax),
    "a single chunk, sorted to itself": (
        FULL,
        lambda q, k, v, c: sinkhorn_attention(q, k, v, uniform(2, 5, 3), max_tokens=45, chunk_size=15),
        softmax,
    ),
    "a single chunk twice": (
        FULL,
        lambda q, k, v, c: sinkhorn_attention(
            q, k, v, uniform(2, 5, 3), max_tokens=45, chunk_size=15, normaliser="separate"
        ),
        lambda q, k, v, c: 2 * softmax(q, k, v, c),
    ),
    "rows of 4": (FULL, lambda q, k, v, c: row_attention(q, k, v, row_length=4), in_chunks(softmax)),
    "one row": (CAUSAL, lambda q, k, v, c: combiner_attention(q, k, v, k, v, row_length=40, causal=c), softmax),
    "a LoLCATs window of all": (BOTH, with_gate(-1.0, window=40), softmax),
    "a LoLCATs window alone": (
        *(BOTH, with_gate(0.5, window=4, part="window")),
        lambda q, k, v, c: local_attention(q, k, v, window=4, causal=c),
    ),
    "its linear part alone": (
        *(BOTH, with_gate(0.5, window=4, part="linear")),
        lambda q, k, v, c: hedgehog_attention(
            q, k, v, **maps(), query_bias=torch.zeros(2, 3).double(), key_bias=torch.zeros(2, 3).double(), causal=c
        ),
    ),
    "scores of GAU by softmax": (BOTH, lambda q, k, v, c: gau_attention(q, k, v, kernel="softmax", causal=c), softmax),
    "GAU": (BOTH, lambda q, k, v, c: gau_attention(q, k, v, divisor=40.0, causal=c), quadratic),
    "mixed chunks of 4 by softmax": (
        BOTH,
        lambda q, k, v, c: mixed_chunk_attention(q, k, q, k, v, chunk_size=4, linear=False, kernel="softmax", causal=c),
        in_chunks(softmax),
    ),
    "one mixed chunk": (
        *(BOTH, lambda q, k, v, c: mixed_chunk_attention(q, k, q, k, v, chunk_size=40, linear=False, causal=c)),
        quadratic,
    ),
    "two mixed chunks that overlap": (
        CAUSAL,
        lambda q, k, v, c: mixed_chunk_attention(q, k, q, k, v, chunk_size=20, linear=False, overlap=True, causal=c),
        quadratic,
    ),
    "flow to a source, of the source itself": (
        *(FULL, lambda q, k, v, c: flow_source_attention(q, k, v, q)),
        lambda q, k, v, c: flow_attention(q, k, v),
    ),
    "logits that are given": (
        *(BOTH, lambda q, k, v, c: synthesizer_attention(q @ k.transpose(-2, -1) / 5**0.5 + 50.0, v, causal=c)),
        lambda q, k, v, c: softmax(q, k, v, c),
    ),
    "one decay for all channels": (
        CAUSAL,
        lambda q, k, v, c: kimi_delta_attention(
            q, k, v, beta=uniform(2, 2, 13), log_decay=-uniform(2, 2, 13, 1, seed=1).expand_as(k)
        ),
        lambda q, k, v, c: gated_delta_attention(q, k, v, beta=uniform(2, 2, 13), log_decay=-uniform(2, 2, 13, seed=1)),
    ),
    "retention of one head": (
        CAUSAL,
        lambda q, k, v, c: retention_attention(q[:, :1], k[:, :1], v[:, :1], decays="log_space"),
        lambda q, k, v, c: retention_attention(q[:, :1], k[:, :1], v[:, :1]),
    ),
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
@pytest.mark.parametrize("causal", [False, True])
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


def bigbird(random_chunks: int):
    numbers = draw_numbers(random_chunks, seed=0)
    return lambda q, k, v: bigbird_attention(q, k, v, numbers, chunk_size=2)


def moved(q, k, v):
    """Global tokens are the first real ones."""
    hidden = (torch.arange(23) < 2) | (torch.arange(23) == 3)
    return longformer_attention(q, k, v, window=4, global_tokens=2, key_padding_mask=hidden.expand(2, -1))


def local(**options):
    return lambda q, k, v: local_attention(q, k, v, **options)


def longformer(**options):
    return lambda q, k, v: longformer_attention(q, k, v, window=4, global_tokens=2, **options)


def sparse(pattern, stride, **options):
    return lambda q, k, v: sparse_attention(q, k, v, pattern=pattern, stride=stride, **options)


def combiner(**options):
    return lambda q, k, v: combiner_attention(q, k, v, k, v, row_length=4, **options)


ALL = list(range(23))
#: (function, a token of 23, the tokens that its output depends on). An even window that is not causal extends one
#: further back. The last chunk of the fixed pattern has only three tokens, so it has no columns yet.
SEEN = [
    (local(window=4, causal=True), 12, [9, 10, 11, 12]),
    (local(window=5), 12, [10, 11, 12, 13, 14]),
    (local(window=4), 12, [10, 11, 12, 13]),
    (local(window=6, chunked=True), 14, [12, 13, 14, 15, 16, 17]),
    (local(window=6, chunked=True, causal=True), 14, [12, 13, 14]),
    (longformer(), 12, [0, 1, 10, 11, 12, 13]),
    (longformer(), 1, ALL),
    (longformer(causal=True), 12, [0, 1, 9, 10, 11, 12]),
    (longformer(causal=True), 3, [0, 1, 2, 3]),
    (moved, 12, [2, 4, 10, 11, 12, 13]),
    (moved, 4, [2, *range(4, 23)]),
    (sparse("fixed", 5, columns=2), 12, [3, 4, 8, 9, 10, 11, 12, 13, 14, 18, 19]),
    (sparse("fixed", 5, columns=2, causal=True), 12, [3, 4, 8, 9, 10, 11, 12]),
    (sparse("strided", 3), 12, [0, 3, 6, 9, 10, 11, 12, 13, 14, 15, 18, 21]),
    (sparse("strided", 3, causal=True), 12, [0, 3, 6, 9, 10, 11, 12]),
    (bigbird(0), 12, [0, 1, 10, 11, 12, 13, 14, 15, 22]),
    (bigbird(0), 3, [0, 1, 2, 3, 4, 5, 22]),
    (bigbird(0), 1, ALL),
    (bigbird(0), 22, ALL),
    (bigbird(20), 12, ALL),
    (combiner(), 5, [1, 4, 5, 6, 7, 9, 13, 17, 21]),
    (combiner(causal=True), 9, [1, 5, 8, 9]),
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
