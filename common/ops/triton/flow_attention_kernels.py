"""Causal Flow-Attention on the device: one program per chunk of C tokens of one head, and per block of e channels.

Legend as in ``flow_attention``. Two kinds of kernel alternate: one sums over each chunk, and after a cumulative sum of
those over chunks the next has all that came before its own. With ε the form's constant, P = q kᵀ inside a chunk,
q̃ = q + ε and x̄ the sum of x over earlier chunks, a flow weighted by x is (and O, Ô are it with q and k exchanged)

    F_i = Σ_{j<=i} x_j (P_ij + ε Σ_c k_jc) + q̃_i·(x k)‾ + ε Σ_c q̃_ic + ε'

and given dF, with x̂ the sum of x over later chunks, dx_j = Σ_{i>=j} dF_i (P_ij + ε Σ_c k_jc) + k_j·(dF q̃)^.

Arguments: ``x`` pointers of (B, H, n, c) with strides of batch, head and token; ``padding`` (B, n), one byte each, 1 =
padding; ``count`` (B, n); flows and weights (B, H, n), float32. Sums are (2, B H, G + 1, d), of q and of k, or
(B H, G + 1, d, e): slot g of a forward sum holds all before chunk g, slot G - 1 - g of a reversed one all behind it.
"""

import triton
import triton.language as tl

from .launch import tuned
from .tiles import load_matrix, load_tile, store_tile


@triton.jit
def _features(x, stride, rows, channels, keep, d: tl.constexpr, phi: tl.constexpr):
    """phi(x) of a tile (C, D) in float32, zero where not ``keep`` and beyond d channels."""
    inside = keep[:, None] & (channels < d)[None, :]
    x = tl.load(x + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    if phi == "sigmoid":
        x = 1.0 / (1.0 + tl.exp(-x))
    elif phi == "elu+1":
        x = tl.where(x > 0.0, x + 1.0, tl.exp(x))
    else:
        x = tl.where(x < 0.0, 0.0, x) + 1e-6  # not maximum, which need not hand on a NaN
    return tl.where(inside, x, 0.0)


@triton.jit
def _slope(features, phi: tl.constexpr):
    """phi' where phi is ``features``."""
    if phi == "sigmoid":
        return features * (1.0 - features)
    elif phi == "elu+1":
        return tl.where(features > 1.0, 1.0, features)
    else:
        return tl.where(features > 1e-6, 1.0, 0.0)


@triton.jit
def _positive(flow):
    """``flow`` with 1 where nothing flows."""
    return tl.where(flow < 1e-18, 1.0, flow)


@triton.jit
def _place(padding, n, heads, groups, PADDED: tl.constexpr, C: tl.constexpr):
    """Of this program: head b H + h, b, h, chunk, its rows, which of them exist and which are real tokens."""
    program = tl.program_id(0).to(tl.int64)  # all offsets are of 64 bits: tensors pass 2³¹ elements
    head, chunk = program // groups, program % groups
    batch = head // heads
    rows = chunk * C + tl.arange(0, C)
    exist = rows < n
    real = exist
    if PADDED:
        real = exist & (tl.load(padding + batch * n + rows, mask=exist, other=1) == 0)
    return head, batch, head % heads, chunk, rows, exist, real


@tuned(["d", "C", "WEIGHTED"])
@triton.jit
def feature_sums(
    q, k, padding, weights_q, weights_k, sums, n, heads, groups, eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Σ q and Σ k of each chunk; if WEIGHTED, reversed, Σ w (q + ε) and Σ w (k + ε)."""
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    slot = chunk + 1
    if WEIGHTED:
        slot = groups - chunk
        q = (q + eps) * tl.load(weights_q + head * n + rows, mask=exist, other=0.0)[:, None]
        k = (k + eps) * tl.load(weights_k + head * n + rows, mask=exist, other=0.0)[:, None]
    sums += (head * (groups + 1) + slot) * d + channels
    tl.store(sums, tl.sum(q, 0), mask=channels < d)
    sums += (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d  # (B H) (G + 1) d
    tl.store(sums, tl.sum(k, 0), mask=channels < d)


@tuned(["d", "C", "CONSERVED"])
@triton.jit
def flows(
    q, k, padding, count, incoming, outgoing, conserved_incoming, conserved_outgoing, sums, next_sums,
    n, heads, groups, count_stride, eps, outer_eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr, CONSERVED: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """I and O, and Σ (c / I) q and Σ (c / O) k of each chunk; or, if CONSERVED, from I and O those with hats.

    None of the four is divided by c.
    """
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    inside = channels < d
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    slot = (head * (groups + 1) + chunk) * d + channels
    sum_q = tl.load(sums + slot, mask=inside, other=0.0)
    sum_k = tl.load(sums + of_k + slot, mask=inside, other=0.0)
    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    at = head * n + rows
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    width_q, width_k = tl.sum(q, 1), tl.sum(k, 1)
    to_sinks = scores + eps * width_k[None, :]
    to_sources = scores + eps * width_q[:, None]
    if CONSERVED:
        to_sinks *= (count / _positive(tl.load(outgoing + at, mask=exist, other=1.0)))[None, :]
        to_sources *= (count / _positive(tl.load(incoming + at, mask=exist, other=1.0)))[:, None]
    flow_in = tl.sum(tl.where(column <= row, to_sinks, 0.0), 1) + tl.sum((q + eps) * sum_k[None, :], 1)
    flow_out = tl.sum(tl.where(row <= column, to_sources, 0.0), 0) + tl.sum((k + eps) * sum_q[None, :], 1)
    flow_in += eps * (width_q + d * eps) + outer_eps
    flow_out += eps * (width_k + d * eps) + outer_eps
    if CONSERVED:
        tl.store(conserved_incoming + at, flow_in, mask=exist)
        tl.store(conserved_outgoing + at, flow_out, mask=exist)
    else:
        tl.store(incoming + at, flow_in, mask=exist)
        tl.store(outgoing + at, flow_out, mask=exist)
        slot += d
        tl.store(next_sums + slot, tl.sum(q * (count / _positive(flow_in))[:, None], 0), mask=inside)
        tl.store(next_sums + of_k + slot, tl.sum(k * (count / _positive(flow_out))[:, None], 0), mask=inside)


@tuned(["d", "e", "C", "REVERSED"])
@triton.jit
def value_sums(
    x, v, padding, weights, sums, n, heads, groups, xb, xh, xn, vb, vh, vn,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr,
    REVERSED: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Σ phi(x)ᵀ (w v) of each chunk, (d, e): of k and v, or, REVERSED, of q and the gradient of the output."""
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    x = _features(x + batch * xb + h * xh, xn, rows, channels, real, d, phi)
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    v *= tl.load(weights + head * n + rows, mask=exist, other=0.0)[:, None]
    slot = groups - chunk if REVERSED else chunk + 1
    sums += (head * (groups + 1) + slot) * d * e + channels[:, None] * e + columns[None, :]
    product = tl.dot(tl.trans(x), v, input_precision=precision)
    tl.store(sums, product, mask=(channels < d)[:, None] & (columns < e)[None, :])


@tuned(["d", "e", "C"])
@triton.jit
def outputs(
    q, k, v, padding, competition, scale, sums, out, n, heads, groups, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """s_i (Σ_{j<=i} P_ij w_j v_j + q_i (kᵀ w v)‾) for w ``competition`` and s ``scale``; out (B, H, n, e)."""
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    v *= tl.load(competition + head * n + rows, mask=exist, other=0.0)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    scores = tl.where(tl.arange(0, C)[None, :] <= tl.arange(0, C)[:, None], scores, 0.0)
    earlier = load_matrix(sums + (head * (groups + 1) + chunk) * d * e, channels, columns, d, e)
    result = tl.dot(scores, v, input_precision=precision)
    result = tl.dot(q, earlier, result, input_precision=precision)
    result *= tl.load(scale + head * n + rows, mask=exist, other=0.0)[:, None]
    store_tile(out + head * n * e, e, rows, columns, exist, e, result)


@tuned(["d", "e", "C"])
@triton.jit
def values_backward(
    q, k, v, d_out, padding, competition, scale, sums, reversed_sums, d_v, d_competition, d_scale,
    n, heads, groups, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of v (B, H, n, e), and of w and s, a part (B, H, n) from each block of e channels."""
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    at = head * n + rows
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    d_out = load_tile(d_out + batch * ob + h * oh, on, rows, columns, real, e)
    competition = tl.load(competition + at, mask=exist, other=0.0)
    scale = tl.load(scale + at, mask=exist, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    scores = tl.where(tl.arange(0, C)[None, :] <= tl.arange(0, C)[:, None], scores, 0.0)
    head_sums = head * (groups + 1) * d * e
    later = load_matrix(reversed_sums + head_sums + (groups - 1 - chunk) * d * e, channels, columns, d, e)
    d_weighted = tl.dot(tl.trans(scores), d_out * scale[:, None], input_precision=precision)
    d_weighted = tl.dot(k, later, d_weighted, input_precision=precision)
    store_tile(d_v + head * n * e, e, rows, columns, exist, e, d_weighted * competition[:, None])
    part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // groups) * n
    tl.store(d_competition + part + at, tl.sum(d_weighted * v, 1), mask=exist)
    earlier = load_matrix(sums + head_sums + chunk * d * e, channels, columns, d, e)
    unscaled = tl.dot(scores, v * competition[:, None], input_precision=precision)
    unscaled = tl.dot(q, earlier, unscaled, input_precision=precision)
    tl.store(d_scale + part + at, tl.sum(unscaled * d_out, 1), mask=exist)


@tuned(["d", "C"])
@triton.jit
def flows_backward(
    q, k, padding, count, incoming, outgoing, d_conserved_incoming, d_conserved_outgoing, d_incoming_direct,
    reversed_sums, d_incoming, d_outgoing, next_sums, n, heads, groups, count_stride, eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """dI and dO from dÎ, dÔ and the part of dI that does not pass through Ô; and, reversed, Σ dI (q + ε), Σ dO (k + ε).

    Ô is made with c / I, and Î with c / O.
    """
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    inside = channels < d
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    slot = (head * (groups + 1) + groups - 1 - chunk) * d + channels
    later_q = tl.load(reversed_sums + slot, mask=inside, other=0.0)
    later_k = tl.load(reversed_sums + of_k + slot, mask=inside, other=0.0)
    at = head * n + rows
    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    d_in = tl.load(d_conserved_incoming + at, mask=exist, other=0.0)
    d_out = tl.load(d_conserved_outgoing + at, mask=exist, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=precision)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    to_sinks = (scores + eps * tl.sum(k, 1)[None, :]) * d_in[:, None]
    to_sources = (scores + eps * tl.sum(q, 1)[:, None]) * d_out[None, :]
    d_over_outgoing = tl.sum(tl.where(column <= row, to_sinks, 0.0), 0) + tl.sum(k * later_q[None, :], 1)
    d_over_incoming = tl.sum(tl.where(row <= column, to_sources, 0.0), 1) + tl.sum(q * later_k[None, :], 1)
    flow_in = tl.load(incoming + at, mask=exist, other=1.0)
    flow_out = tl.load(outgoing + at, mask=exist, other=1.0)
    d_in = tl.load(d_incoming_direct + at, mask=exist, other=0.0)
    d_in -= tl.where(flow_in < 1e-18, 0.0, d_over_incoming * (count / _positive(flow_in)) / _positive(flow_in))
    d_out = -tl.where(flow_out < 1e-18, 0.0, d_over_outgoing * (count / _positive(flow_out)) / _positive(flow_out))
    tl.store(d_incoming + at, d_in, mask=exist)
    tl.store(d_outgoing + at, d_out, mask=exist)
    slot += d
    tl.store(next_sums + slot, tl.sum((q + eps) * d_in[:, None], 0), mask=inside)
    tl.store(next_sums + of_k + slot, tl.sum((k + eps) * d_out[:, None], 0), mask=inside)


@tuned(["d", "e", "C"])
@triton.jit
def features_backward(
    q, k, v, d_out, padding, count, incoming, outgoing, competition, scale,
    d_incoming, d_outgoing, d_conserved_incoming, d_conserved_outgoing,
    sums, conserved_sums, reversed_sums, reversed_conserved_sums, kv_sums, reversed_kv_sums, d_q, d_k,
    n, heads, groups, count_stride, eps, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, precision: tl.constexpr, PADDED: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of q and k (B, H, n, d), before phi, from those of the flows and of the output.

    All that passes through P inside the chunk meets in dP: dq = dP k and dk = dPᵀ q, and what crosses chunks adds
    products with the sums.
    """
    head, batch, h, chunk, rows, exist, real = _place(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    at = head * n + rows
    q = _features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = _features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    competition = tl.load(competition + at, mask=exist, other=0.0)
    scale = tl.load(scale + at, mask=exist, other=0.0)
    v += batch * vb + h * vh
    d_out += batch * ob + h * oh
    kv_sums += (head * (groups + 1) + chunk) * d * e
    reversed_kv_sums += (head * (groups + 1) + groups - 1 - chunk) * d * e
    d_scores = tl.zeros((C, C), tl.float32)
    grad_q = tl.zeros((C, D), tl.float32)
    grad_k = tl.zeros((C, D), tl.float32)
    for start in range(0, e, E):
        columns = start + tl.arange(0, E)
        given = load_tile(d_out, on, rows, columns, real, e) * scale[:, None]
        values = load_tile(v, vn, rows, columns, real, e) * competition[:, None]
        d_scores = tl.dot(given, tl.trans(values), d_scores, input_precision=precision)
        earlier = load_matrix(kv_sums, channels, columns, d, e)
        grad_q = tl.dot(given, tl.trans(earlier), grad_q, input_precision=precision)
        later = load_matrix(reversed_kv_sums, channels, columns, d, e)
        grad_k = tl.dot(values, tl.trans(later), grad_k, input_precision=precision)

    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    over_incoming = count / _positive(tl.load(incoming + at, mask=exist, other=1.0))
    over_outgoing = count / _positive(tl.load(outgoing + at, mask=exist, other=1.0))
    d_in = tl.load(d_incoming + at, mask=exist, other=0.0)
    d_out_flow = tl.load(d_outgoing + at, mask=exist, other=0.0)
    d_in_hat = tl.load(d_conserved_incoming + at, mask=exist, other=0.0)
    d_out_hat = tl.load(d_conserved_outgoing + at, mask=exist, other=0.0)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    to_sinks = d_scores + d_in[:, None] + d_in_hat[:, None] * over_outgoing[None, :]
    to_sources = d_out_flow[None, :] + d_out_hat[None, :] * over_incoming[:, None]
    d_scores = tl.where(column <= row, to_sinks, 0.0) + tl.where(row <= column, to_sources, 0.0)
    grad_q = tl.dot(d_scores, k, grad_q, input_precision=precision)
    grad_k = tl.dot(tl.trans(d_scores), q, grad_k, input_precision=precision)

    inside = channels < d
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    before = (head * (groups + 1) + chunk) * d + channels
    behind = (head * (groups + 1) + groups - 1 - chunk) * d + channels
    # As receivers: the sums of what they received from, each with its ε.
    grad_q += d_in[:, None] * (tl.load(sums + of_k + before, mask=inside, other=0.0) + eps)[None, :]
    grad_q += d_in_hat[:, None] * (tl.load(conserved_sums + of_k + before, mask=inside, other=0.0) + eps)[None, :]
    grad_k += d_out_flow[:, None] * (tl.load(sums + before, mask=inside, other=0.0) + eps)[None, :]
    grad_k += d_out_hat[:, None] * (tl.load(conserved_sums + before, mask=inside, other=0.0) + eps)[None, :]
    # As givers: the sums of those who received from them, and the ε of the receivers in this chunk.
    grad_q += tl.load(reversed_sums + of_k + behind, mask=inside, other=0.0)[None, :]
    grad_k += tl.load(reversed_sums + behind, mask=inside, other=0.0)[None, :]
    hat_q = tl.load(reversed_conserved_sums + of_k + behind, mask=inside, other=0.0)
    hat_k = tl.load(reversed_conserved_sums + behind, mask=inside, other=0.0)
    grad_q += over_incoming[:, None] * hat_q[None, :]
    grad_k += over_outgoing[:, None] * hat_k[None, :]
    received_q = d_out_flow[None, :] + d_out_hat[None, :] * over_incoming[:, None]  # of sink ``row`` by ``column``
    received_k = d_in[:, None] + d_in_hat[:, None] * over_outgoing[None, :]
    grad_q += eps * tl.sum(tl.where(row <= column, received_q, 0.0), 1)[:, None]
    grad_k += eps * tl.sum(tl.where(column <= row, received_k, 0.0), 0)[:, None]
    store_tile(d_q + head * n * d, d, rows, channels, exist, d, tl.where(real[:, None], grad_q * _slope(q, phi), 0.0))
    store_tile(d_k + head * n * d, d, rows, channels, exist, d, tl.where(real[:, None], grad_k * _slope(k, phi), 0.0))
