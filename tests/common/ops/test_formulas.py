"""Worked examples of formulas, and numbers that papers promise: estimates, probabilities, decays, weights."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from common.ops import (
    bigbird_attention,
    cosformer_attention,
    favor_attention,
    flow_attention,
    flow_source_attention,
    gated_delta_attention,
    gau_attention,
    gla_attention,
    linear_attention,
    lolcats_attention,
    nystrom_attention,
    reformer_attention,
    retention_attention,
    rfa_attention,
    sinkhorn_attention,
    soft_attention,
    t2r_attention,
    yoso_attention,
)
from common.ops.bigbird import draw_numbers
from common.ops.bigbird.random_chunks import choose_chunks
from common.ops.favor import LENGTHS, draw_directions
from common.ops.gated_delta.reference import gated_delta_attention_reference
from common.ops.reformer import draw_rotations
from common.ops.yoso.reference import yoso_attention_reference
from tests.common.inputs import qkv
from tests.compare import assert_all_close, assert_close, assert_gradients_close, gradients

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def detached(n: int, **sizes) -> list[Tensor]:
    return [x.detach() for x in qkv(n, **sizes)]


def shares(weights: Tensor, causal: bool = False) -> Tensor:
    weights = weights.tril() if causal else weights
    return weights / weights.sum(-1, keepdim=True)


# --- sums of features ------------------------------------------------------------------------------------------------


def test_feature_maps_are_what_they_are_called():
    """Of one query and keys of one channel, weights are features of the keys."""
    x = torch.linspace(-5, 5, 11, dtype=torch.float64)[None, None, :, None]
    y, eye, one = x.flatten(), torch.eye(11, dtype=torch.float64)[None, None], torch.ones(1, 1, 1, 1).double()
    maps = {"sigmoid": 1 / (1 + (-y).exp()), "elu+1": torch.where(y > 0, y + 1, y.exp()), "relu": y.clamp(min=0) + 1e-6}
    for phi, features in maps.items():
        out = linear_attention(one, x, eye, phi=phi)[0, 0, 0]
        assert_close(phi, out, features / features.sum(), 1e-5)


@causality
def test_cosformer_weights_fall_off_as_a_cosine_of_the_distance(causal):
    """If queries and keys are ones, only the cosine remains; its longest length is part of the function."""
    ones, positions = torch.ones(1, 1, 7, 3).double(), torch.arange(7).double()
    for longest in (9, 60):
        out = cosformer_attention(ones, ones, torch.eye(7).double()[None, None], max_tokens=longest, causal=causal)
        weights = torch.cos(math.pi / 2 * (positions[:, None] - positions) / longest)
        assert_close("weights", out[0, 0], shares(weights, causal))


def test_t2r_divides_queries_alone_and_raises_a_small_normaliser_to_its_floor():
    q, k, v = detached(6, d=4)
    weight, nothing = normal(2, 5, 4), torch.zeros(2, 5).double()
    scores = (q / 2 @ weight.mT).relu() @ (k @ weight.mT).relu().mT
    expected = scores / scores.sum(-1, keepdim=True).clamp(min=1e-2) @ v
    assert_close("out", t2r_attention(q, k, v, weight, nothing), expected)
    assert not t2r_attention(q, k, v, weight, nothing - 100.0).any(), "relu may leave only zeros"
    low, high = (t2r_attention(q, k, v, weight, nothing, floor=floor) for floor in (1e5, 2e5))
    assert_close("out", low, 2 * high)


def test_the_largest_score_of_a_lolcats_window_belongs_to_the_formula():
    """Far weights are not divided by it: adding a constant to all scores leaves the window's share unchanged."""
    q, k, v = detached(17, d=4)
    maps = {"query_weight": F.pad(normal(2, 3, 4), (0, 1)), "key_weight": F.pad(normal(2, 3, 4, seed=1), (0, 1))}
    arguments = {**maps, "window_gate": torch.zeros(2).double(), "window": 4, "causal": True}
    ones = torch.ones_like(q[..., :1])
    near, far = (
        lolcats_attention(torch.cat([q, shift * ones], -1), torch.cat([k, ones], -1), v, **arguments)
        for shift in (0.0, 50.0)
    )
    assert_close("out", far, near)


@pytest.mark.parametrize("bias", [-2000.0, 2000.0], ids=["closed", "open"])
def test_gla_gates_at_their_ends(bias):
    """With a bias of -2,000 each token keeps exp(-125) of the sum; with 2,000 nothing is forgotten."""
    q, k, v = qkv(70, dtype=torch.float32)
    x, down, up = (normal(*shape).float().requires_grad_() for shape in ((2, 70, 8), (3, 8), (10, 3)))
    leaves = (q, k, v, x, down, up, torch.full((10,), bias).requires_grad_())
    scores = q @ k.mT * 5**-0.5
    out = gla_attention(*leaves, chunk_size=16)
    assert_close("out", out, (scores.tril() if bias > 0 else scores * torch.eye(70)) @ v)
    assert all(torch.isfinite(grad).all() for grad in gradients(out, leaves))


def test_retention_heads_forget_at_the_paper_s_pace():
    """The key of the first token, read by each query: q·k / √d times γ to the power of the distance."""
    q, v = torch.ones(1, 3, 40, 4).double(), torch.ones(1, 3, 40, 1).double()
    k = torch.zeros_like(q).index_fill_(2, torch.tensor([0]), 1.0)
    for decays, lost in (("powers", (32, 64, 128)), ("log_space", (32, 128, 512))):
        out = retention_attention(q, k, v, score_norm=False, chunk_size=8, decays=decays)
        gamma = 1 - 1 / torch.tensor(lost).double()
        assert_close(decays, out[0, :, :, 0], 2 * gamma[:, None] ** torch.arange(40))


def test_retention_scores_sum_to_at_most_one_and_slow_heads_keep_their_precision():
    """Values of 1 make the sum visible; the last of 64 heads forgets 2^-68 per token, which float32 cannot hold."""
    for scale in (0.1, 10.0):
        q, k, _ = detached(50, scale=scale)
        sums = retention_attention(q, k, torch.ones(2, 2, 50, 1).double()).abs()
        assert sums.max() <= 1 + 1e-12
        assert (sums > 1 - 1e-12).double().mean() > 0.5 if scale == 10.0 else sums.median() < 0.5
    inputs = detached(2000, batch=1, heads=64, d=2, e=2, dtype=torch.float32)
    assert_close("out", retention_attention(*inputs), retention_attention(*(x.double() for x in inputs)), 1e-4)


@causality
def test_rfa_estimates_attention_with_a_gaussian_kernel(causal):
    q, k, v = detached(11, d=4)
    distances = torch.cdist(F.normalize(q, dim=-1), F.normalize(k, dim=-1))
    out = rfa_attention(q, k, v, normal(2, 60_000, 4), causal=causal, floor=1e-6)
    assert_close("out", out, shares(torch.exp(-distances.square() / 2), causal) @ v, 0.03)
    low, high = (rfa_attention(q, k, v, normal(2, 6, 4), causal=causal, floor=floor) for floor in (50.0, 100.0))
    assert_close("a normaliser that is raised to the floor", low, 2 * high)


def error(q, k, v, directions, causal: bool) -> float:
    """Relative error of FAVOR+ against softmax attention."""
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return ((favor_attention(q, k, v, directions.to(q), causal=causal) - expected).norm() / expected.norm()).item()


@causality
def test_favor_estimates_softmax_attention(causal):
    """Sixteen times as many directions give a quarter of the error; theorem 2, of orthogonal ones, in the mean."""
    inputs, generator = detached(23, d=8, e=4, scale=0.4), torch.Generator().manual_seed(1)
    few, many = (error(*inputs, draw_directions(r, 8, "gaussian", generator), causal) for r in (512, 8192))
    assert many < 0.02 and 2.0 < few / many < 8.0
    inputs = detached(9, d=8, e=4, scale=0.7)
    orthogonal = [error(*inputs, draw_directions(8, 8, "gaussian", generator), causal) for _ in range(300)]
    independent = [error(*inputs, torch.randn(8, 8, generator=generator), causal) for _ in range(300)]
    assert sum(orthogonal) < 0.95 * sum(independent)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_favor_directions_are_orthogonal_in_blocks(lengths):
    """A squared length has mean d and variance 2d, the variance for a Gaussian vector."""
    for block in draw_directions(11, 4, lengths, torch.Generator().manual_seed(0)).double().split(4):
        products = block @ block.T
        assert_close("products", products, torch.diag(products.diagonal()), 1e-6)
    squares = draw_directions(4000, 4, lengths, torch.Generator().manual_seed(0)).square().sum(1)
    assert abs(squares.mean() - 4.0) < 0.2 and abs(squares.var() - (8.0 if lengths == "gaussian" else 0.0)) < 1.0


@causality
@pytest.mark.parametrize("scale", [10.0, 20.0, 60.0])
def test_favor_of_queries_far_from_all_keys(causal, scale):
    """Their weights are negligible relative to the largest, and gradients divide by them; features overflow float64."""
    directions, generator = draw_directions(64, 16, "gaussian", torch.Generator().manual_seed(0)), torch.Generator()
    for _ in range(5):
        q, k, v = (torch.randn(1, 2, 9, 16, generator=generator) for _ in range(3))
        leaves = [x.requires_grad_() for x in (scale * q, scale * k, v)]
        out = favor_attention(*leaves, directions, causal=causal)
        assert all(x.isfinite().all() for x in (out, *gradients(out.square(), leaves)))
        if not causal:
            q, k, v = (x.detach().double() for x in leaves)
            of_q, of_k = (x / 2 @ directions.double().T - x.square().sum(-1, keepdim=True) / 8 for x in (q, k))
            weights = (of_q.unsqueeze(3) + of_k.unsqueeze(2)).logsumexp(-1).softmax(-1)
            assert_close("output", out.double(), weights @ v, 1e-3)


@causality
def test_large_later_tokens_leave_the_past_of_favor_alone(causal):
    """The authors' features would overflow here, or an earlier token's own key would be lost to a later one."""
    directions = draw_directions(16, 8, "gaussian", torch.Generator().manual_seed(0))
    q, k, v = detached(20, d=8, dtype=torch.float32)
    loud = [torch.cat([x[:, :, :12], 300 * x[:, :, 12:]], 2).requires_grad_() for x in (q, k)]
    out = favor_attention(*loud, v, directions, causal=causal, chunk_size=8)
    assert torch.isfinite(out).all() and all(torch.isfinite(x).all() for x in gradients(out, loud))
    if causal:
        assert_close("the past", out[:, :, :12], favor_attention(q, k, v, directions, causal=True)[:, :, :12])


def test_flow_of_targets_depends_on_later_ones_and_flow_to_a_source_does_not():
    """This is why the latter exists; its output also depends on the queries of the source."""
    (q, k, v), source_q = detached(6, m=11), normal(2, 2, 11, 5)
    later = torch.cat([q[:, :, :4], q[:, :, 4:] + 3.0], 2)
    leaked = flow_attention(later, k, v)[:, :, :4] - flow_attention(q, k, v)[:, :, :4]
    assert leaked.norm() > 1e-3 * v.norm()
    out, changed = flow_source_attention(q, k, v, source_q), flow_source_attention(later, k, v, source_q)
    assert torch.equal(out[:, :, :4], changed[:, :, :4])
    assert not torch.allclose(out, flow_source_attention(q, k, v, 2 * source_q))


def test_the_delta_rule_replaces_the_old_value_of_a_key():
    """With orthogonal keys and beta 1, each query reads the last value of its key; half a beta goes half the way."""
    bare = {"qk_activation": "none", "qk_norm": "none", "v_activation": "none"}
    v, order = normal(1, 1, 12, 3), torch.tensor([0, 1, 2, 3, 4, 5, 2, 4, 0, 1, 2, 5])
    keys, ones = torch.eye(6).double()[order][None, None], torch.ones(1, 1, 12).double()
    _, state = gated_delta_attention(keys, keys, v, beta=ones, **bare, chunk_size=4, return_state=True)
    for key, last in ((0, 8), (1, 9), (2, 10), (3, 3), (4, 7), (5, 11)):
        assert_close(f"value of key {key}", state["memory"][0, 0, key], v[0, 0, last])
    k, v = torch.tensor([0.6, 0.8]).expand(1, 1, 3, 2), torch.full((1, 1, 3, 1), 8.0)
    beta, log_decay = torch.full((1, 1, 3), 0.5), torch.tensor([-1e4, -1e4, math.log(0.5)]).view(1, 1, 3)
    for gates, expected in (({}, [4.0, 6.0, 7.0]), ({"log_decay": log_decay}, [4.0, 4.0, 5.0])):
        out = gated_delta_attention(2**0.5 * k, k, v, beta=beta, **gates, **bare)
        assert_close("halves", out.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("kernels", "10")
@pytest.mark.parametrize("beta", [0.9, 2.0])
def test_the_delta_rule_of_equal_keys_in_float32(beta, kernels, monkeypatch):
    """The triangle of a chunk is then full of ``beta``: a series for its inverse would lose every digit."""
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", kernels)
    q, k, v = detached(130, d=16, batch=1)
    tensors = q, k[:, :, :1] + 1e-3 * k, v, torch.full((1, 2, 130), beta).double()
    results = []
    for convert in (Tensor.float, Tensor.double):
        *inputs, betas = (convert(x).requires_grad_() for x in tensors)
        out = gated_delta_attention(*inputs, beta=betas, chunk_size=64)
        results.append([out, *gradients(out, [*inputs, betas])])
    assert_all_close(("out", *"qkv", "beta"), *results, 1e-3)


@pytest.mark.parametrize("n, size", [(15, 1), (133, 2), (70, 1)])
def test_a_graph_of_the_delta_rule_of_many_chunks(n, size):
    """A traced graph reads eight chunks in turn, more than eight by parts of eight, and so on from 65 on."""
    tensors, beta = qkv(n, d=3, batch=1), normal(1, 2, n).sigmoid().requires_grad_()
    leaves = [*tensors, beta, (-normal(1, 2, n, seed=1).exp()).requires_grad_()]

    def attend(attention, *inputs, **options):
        return attention(*inputs[:3], beta=inputs[3], log_decay=inputs[4], **options)

    row = torch.func.vmap(lambda *x: attend(gated_delta_attention, *(y[None] for y in x), chunk_size=size)[0])
    out, expected = row(*leaves), attend(gated_delta_attention_reference, *leaves)
    assert_all_close(range(6), [out, *gradients(out, leaves)], [expected, *gradients(expected, leaves)], 1e-8)


# --- scores ----------------------------------------------------------------------------------------------------------


def test_kernels_of_scores_are_relu2_and_the_normal_distribution_function():
    """Mega's μ and σ are those for which the latter and its slope meet relu² at μ; here read through GAU."""
    one = torch.ones(1, 1, 1, 1).double()

    def weights(scores: Tensor, kernel: str) -> Tensor:
        return torch.stack([gau_attention(x * one, one, one, kernel=kernel, divisor=1.0).sum() for x in scores])

    scores, mean = torch.linspace(-3, 3, 61, dtype=torch.float64), torch.tensor([0.5**0.5]).double().requires_grad_()
    assert_close("relu²", weights(scores, "relu2"), scores.clamp(min=0) ** 2)
    normal_function = torch.distributions.Normal(math.sqrt(0.5), math.sqrt(1 / (4 * math.pi))).cdf(scores)
    assert_close("laplace", weights(scores, "laplace"), normal_function, 1e-7)
    weight = weights(mean, "laplace")
    at_mean = torch.cat([weight, *torch.autograd.grad(weight, mean)])
    assert_close("at its mean", at_mean, torch.tensor([0.5, 2**0.5], dtype=torch.float64), 1e-7)


def test_yoso_weights_are_the_probability_of_equal_hashes():
    """A query and a key share the sides of three random hyperplanes with the probability given by the weight."""
    q, k = directions([0.3]), directions([0.5, 1.4, 2.9])
    out = yoso_attention(q, k, torch.eye(3).double()[None, None], tau=3)
    sides = [(normal(100_000, 3, 2) @ x[0, 0].T) > 0 for x in (q, k)]
    equal = (sides[0] == sides[1]).all(1).double().mean(0)
    assert_close("weights", out[0, 0, 0], equal / equal.norm(), 0.02)


def directions(angles: list[float]) -> Tensor:
    """Unit vectors of the plane at ``angles``, as queries or keys (1, 1, n, 2)."""
    angle = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None, None]


@pytest.mark.parametrize("gradient", ["bound", "exact"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_yoso_gradients_of_parallel_and_opposite_vectors(dtype, gradient):
    """A query, an equal key, and its opposite: the cosine is 1 and -1, where arccos has no derivative."""
    _, _, v = qkv(4, batch=1, heads=1, d=3, dtype=dtype)
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0], [-1.0, -2.0, -3.0], [1.0, 2.0, 3.001]], dtype=dtype)[None, None]
    q, k = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = (f(q, k, v, gradient=gradient) for f in (yoso_attention, yoso_attention_reference))
    tolerance = 1e-9 if dtype == torch.float64 else 2e-3  # an angle of 0.001 is 5e-8 below a cosine of 1
    assert_close("out", out, expected, tolerance)
    assert_gradients_close(out, expected, {"q": q, "k": k, "v": v}, tolerance)


@causality
def test_yoso_s_exact_gradient_is_the_derivative_and_blocks_of_256_rows_change_nothing(causal):
    """The bound is half of tau times the weight, which the reference has literally."""
    few = qkv(6, batch=1, heads=1)
    assert torch.autograd.gradcheck(lambda *x: yoso_attention(*x, causal=causal, gradient="exact"), few)
    inputs, mask = qkv(300, batch=1, heads=1), (torch.arange(300) % 7 == 3)[None]
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    out, expected = (attend(*inputs, causal=causal, **masks) for attend in (yoso_attention, yoso_attention_reference))
    assert_close("out", out, expected)
    assert_gradients_close(out, expected, dict(zip("qkv", inputs)))


def test_the_convolution_of_nystrom_is_over_real_tokens():
    """A filter that reads the previous token reads the previous real one, however much padding is in between."""
    q, k, v = detached(6, batch=1)
    mask = torch.tensor([[False, True, True, False, False, True]])
    masks, weight = {"key_padding_mask": mask, "query_padding_mask": mask}, torch.zeros(2, 1, 3, 1).double()
    weight[:, :, 0] = 1.0
    added = nystrom_attention(q, k, v, conv_weight=weight, **masks) - nystrom_attention(q, k, v, **masks)
    expected = torch.zeros_like(v)
    expected[:, :, 3], expected[:, :, 4] = v[:, :, 0], v[:, :, 3]
    assert_close("what is added", added, expected)


def test_a_tall_filter_has_right_gradients_in_float32():
    """For some of 49 rows and more with up to 3 columns, those of oneDNN on a CPU are wrong by a tenth and more."""
    found, inputs = [], (*qkv(200, e=70), normal(2, 1, 63, 1))
    for dtype in (torch.float32, torch.float64):
        q, k, v, weight = (x.detach().to(dtype).requires_grad_() for x in inputs)
        out = nystrom_attention(q, k, v, conv_weight=weight) - nystrom_attention(q, k, v)
        found.append([out, *torch.autograd.grad((out * v).sum(), (weight, v))])
    assert_all_close(("out", "weight", "v"), *found)


# --- images, sorted chunks, buckets and random chunks ---------------------------------------------------------------


def soft_parameters(ratio: int = 2) -> dict[str, Tensor]:
    """Weights that produce landmarks far from each other."""
    ones = torch.ones(4, dtype=torch.float64)
    return {"landmark_weight": normal(4, 4, ratio, ratio), "norm_weight": 3.0 * ones, "norm_bias": 0.1 * ones}


def test_soft_is_a_kernel_through_the_inverse_of_its_landmarks():
    (q, _, v), weights = detached(16, d=4, heads=1, batch=1), soft_parameters()
    x = q[0, 0] / 4**0.25
    landmarks = F.conv2d(x.T.reshape(1, 4, 4, 4), weights["landmark_weight"], stride=2)[0].flatten(1).T
    landmarks = F.gelu(F.layer_norm(landmarks, (4,), weights["norm_weight"], weights["norm_bias"]))
    rows, few = ((-torch.cdist(a, landmarks).square() / 2).exp() for a in (x, landmarks))
    inverse = torch.linalg.inv(few + 0.2 * torch.eye(4).double())
    out = soft_attention(q, v, spatial_shape=(4, 4), ridge=0.2, **weights)
    assert_close("out", out[0, 0], rows @ inverse @ rows.T @ v[0, 0], 1e-6)


@pytest.mark.parametrize("ratio", [2, 3, 5])
def test_beyond_the_edge_of_an_image_soft_sees_padding(ratio):
    """An image of 3 x 4 tokens, alone and in the corner of one of 5 x 6."""
    q, _, v = detached(30, d=4)
    inside = torch.zeros(5, 6, dtype=torch.bool)
    inside[:3, :4] = True
    inside, parameters = inside.flatten(), {**soft_parameters(ratio), "conv_weight": normal(2, 1, 3, 3)}
    masks = dict.fromkeys(("key_padding_mask", "query_padding_mask"), ~inside.expand(2, -1))
    whole = soft_attention(q, v, spatial_shape=(5, 6), **parameters, **masks)[:, :, inside]
    alone = soft_attention(q[:, :, inside], v[:, :, inside], spatial_shape=(3, 4), **parameters)
    assert_close("out", whole, alone)


def test_a_sure_sorting_puts_another_chunk_beside_the_own():
    """Three chunks of four tokens, whose sums select a chunk: each selects the next, and the last selects the first."""
    q, k, v = detached(12, batch=1, heads=1, d=3)
    k = k - k.unflatten(2, (3, 4)).mean(3).repeat_interleave(4, 2) + torch.eye(3).repeat_interleave(4, 0)
    wanted = torch.eye(3).double().roll(1, 1)[None] * 1e3  # chunk g, whose sum is 4 in channel g
    out = sinkhorn_attention(q, k, v, wanted, max_tokens=12, chunk_size=4)
    for g in range(3):
        own, other = slice(4 * g, 4 * g + 4), slice(4 * ((g + 1) % 3), 4 * ((g + 1) % 3) + 4)
        both = (torch.cat([x[:, :, own], x[:, :, other]], dim=2) for x in (k, v))
        assert_close(f"chunk {g}", out[:, :, own], F.scaled_dot_product_attention(q[:, :, own], *both))


@pytest.mark.parametrize("sort, columns", [("sinkhorn", True), ("softmax", False)])
def test_weights_of_sorted_chunks_add_up(sort, columns):
    """Zero queries weight all keys equally, and values that identify their chunk show the weights of chunks."""
    _, k, _ = detached(20, batch=1, heads=1, scale=0.3)
    values = torch.eye(4).double().repeat_interleave(5, 0)[None, None]
    options = {"max_tokens": 20, "chunk_size": 5, "sort": sort, "iterations": 60, "normaliser": "separate"}
    out = sinkhorn_attention(torch.zeros_like(k), k, values, normal(1, 5, 4), **options)
    weights = (out - values)[0, 0, ::5]  # without the average over the own chunk
    assert_close("rows", weights.sum(1), torch.ones(4).double(), 1e-6)
    assert ((weights.sum(0) - 1).abs().max() < 1e-6) == columns


def others(q: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Softmax attention with unit keys to every token except the query's own."""
    n = q.shape[2]
    hidden = torch.eye(n).bool() | (torch.ones(n, n).triu().bool() if causal else False)
    weights = (q @ F.normalize(q, dim=-1).mT).masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.nan_to_num(0.0) @ v + (hidden.all(-1)[:, None] * v)


@causality
def test_lsh_attention_of_one_bucket_and_of_more_and_more_rounds(causal):
    """In each round, a key with a large weight has a certain chance to be in the query's bucket."""
    q, _, v = detached(9)
    out = reformer_attention(q.abs(), v, torch.ones(1, 5, 1), causal=causal, chunk_size=9)
    assert_close("one bucket", out, others(q.abs(), v, causal))
    q, _, v = detached(60, d=8, scale=3.0)
    expected, errors = others(q, v, causal), []
    for rounds in (1, 4, 16):
        rotations = draw_rotations(rounds, 8, 4, torch.Generator().manual_seed(0))
        errors.append((reformer_attention(q, v, rotations, causal=causal) - expected).norm() / expected.norm())
    assert errors[0] > 1.5 * errors[1] > 2.0 * errors[2] and errors[2] < 0.2


def test_a_causal_token_finds_the_last_keys_of_its_bucket_and_itself_if_there_are_none():
    """Ten tokens of one bucket, with one of another in between: values show which three are seen, equally weighted."""
    q = torch.ones(1, 1, 11, 1, dtype=torch.float64)
    q[:, :, 6] = -1.0
    v = torch.eye(11, dtype=torch.float64)[None, None]
    out = reformer_attention(q, v, torch.ones(1, 1, 1), causal=True, chunk_size=4)[0, 0]
    seen = [row.nonzero().flatten().tolist() for row in out]
    assert seen[:5] == [[0], [0], [0, 1], [0, 1, 2], [1, 2, 3]]
    assert seen[6] == [6] and seen[7] == [3, 4, 5] and seen[10] == [7, 8, 9]
    assert_close("weights", out[10], v[0, 0, 7:10].mean(0))
    alone = reformer_attention(q, v, torch.ones(1, 1, 1), chunk_size=11)[0, 0, 6]
    assert alone.nonzero().flatten().tolist() == [6], "not causal either"


def test_random_chunks_of_bigbird():
    """They are different, real, not seen anyway, as likely as each other, and all that are left if there are few."""
    last = torch.tensor([[0], [1], [6], [40]])
    chosen, valid = choose_chunks(draw_numbers(3, seed=0), 50, last)
    for row, end in enumerate(last.flatten().tolist()):
        for chunk in range(end + 1):
            left = set(range(1, end)) - {chunk - 1, chunk, chunk + 1}
            indices = chosen[row, chunk][valid[row, chunk]].tolist()
            assert len(indices) == len(set(indices)) == min(3, len(left)) and set(indices) <= left
    chosen, _ = choose_chunks(draw_numbers(3, seed=0), 1000, torch.tensor([[999]]))
    counts = torch.bincount(chosen.flatten() // 100)
    assert counts.sum() == 3000 and (counts > 240).all() and (counts < 360).all()
    q, k, v = qkv(50, batch=1)
    out = bigbird_attention(q, k, v, draw_numbers(2, seed=0), chunk_size=4)
    reached = gradients(out[:, :, 25], [v])[0].abs().sum((0, 1, 3)).nonzero().flatten() // 4
    assert len(set(reached.tolist())) == 7, "the ends, three neighbours and two random chunks"
