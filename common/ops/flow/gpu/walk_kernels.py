"""Causal Flow-Attention by Triton kernels, the device's side: one program walks through all tokens of one head.

It takes a tile of C tokens at a time and keeps the running sums in registers, so that weights, too, are formed in it.
Forward there is one walk. Backward there are two: ``sources_backward`` from the end, where all gradients are that are
sums over later tokens, and then ``sinks_backward`` from the start, for what a sink reads: the sum of kᵀ(w v) before it.

``chunks_kernels`` has the formulas of flows inside a tile and across tiles, and the arguments. In addition:
``counted`` (B,), the real tokens before the first one; ``vectors`` (B H, 4, d), the sums of q, k, (c / I) q and
(c / O) k; ``logs`` (B H, 2) of competition and allocation; ``kv_sums`` (B H, d, e), Σ kᵀ(w v). Of each of the G tiles:
``flows`` (B H, G, 4, C), I, O, Î and Ô, not over c; ``tile_sums`` (B H, G, 4, d), the sums of ``vectors`` before it;
``carried`` (B H, G, 5), the largest logit before it and Σ exp(logit - largest), of competition, then of allocation, and
the number of real tokens. With one base and constant distances, their addresses take few registers.

The order of products matters to the compiler, not to the result: the last one of a loop has fewer rows than columns.
The README beside ``compiled.md`` says why.
"""

import triton
import triton.language as tl

from ...shared.gpu.launch import tuned
from ...shared.gpu.tiles import (
    feature_scores,
    feature_slope,
    load_features,
    load_matrix,
    load_tile,
    product,
    store_matrix,
    store_tile,
)

#: The logit of padding.
_EXCLUDED = tl.constexpr(-1e30)


@triton.jit
def _tile(padding, batch, tile, n, PADDED: tl.constexpr, C: tl.constexpr, part: tl.constexpr = 0):
    """The rows of a tile, which of them exist, and which are real tokens.

    Each ``part`` of a kernel can form them for itself: addresses that are kept from one to the next take registers. The
    condition is always true, but unknown to the compiler, which would else see that the rows are the same.
    """
    inside = tl.arange(0, C)
    if part > 0:
        inside = tl.where(tile - part < n, inside, 0)
    rows = inside.to(tl.int64) + tile * C  # offsets are of 64 bits: tensors pass 2³¹ elements
    exist = rows < n
    real = exist
    if PADDED:
        real = exist & (tl.load(padding + batch * n + rows, mask=exist, other=1) == 0)
    return rows, exist, real


@triton.jit
def _load_vectors(vectors, inside, d: tl.constexpr):
    """Four sums of d channels that stand one after the other."""
    return (
        tl.load(vectors, mask=inside, other=0.0),
        tl.load(vectors + d, mask=inside, other=0.0),
        tl.load(vectors + 2 * d, mask=inside, other=0.0),
        tl.load(vectors + 3 * d, mask=inside, other=0.0),
    )


@triton.jit
def _store_vectors(vectors, first, second, third, fourth, inside, d: tl.constexpr):
    """The reverse of ``_load_vectors``."""
    tl.store(vectors, first, mask=inside)
    tl.store(vectors + d, second, mask=inside)
    tl.store(vectors + 2 * d, third, mask=inside)
    tl.store(vectors + 3 * d, fourth, mask=inside)


@triton.jit
def _load_numbers(numbers, C: tl.constexpr):
    """Competition, scale, c / I, c / O and the gradients of I, O, Î and Ô of a tile."""
    return (
        tl.load(numbers),
        tl.load(numbers + C),
        tl.load(numbers + 2 * C),
        tl.load(numbers + 3 * C),
        tl.load(numbers + 4 * C),
        tl.load(numbers + 5 * C),
        tl.load(numbers + 6 * C),
        tl.load(numbers + 7 * C),
    )


@triton.jit
def _score_gradients(grad_out, v, on, vn, rows, real, e: tl.constexpr, C: tl.constexpr, E: tl.constexpr):
    """∂out vᵀ of a tile, a few columns at a time."""
    dtype: tl.constexpr = v.dtype.element_ty
    total = tl.zeros((C, C), tl.float32)
    for start in range(0, E, 16):
        columns = start + tl.arange(0, 16)
        grad_tile = load_tile(grad_out, on, rows, columns, real, e)
        values = load_tile(v, vn, rows, columns, real, e)
        total = product(grad_tile, tl.trans(values), total, dtype)
    return total


@triton.jit
def _inverse(flow, count, real):
    """c / flow; 0 at padding."""
    return tl.where(real, count / tl.where(flow < 1e-18, 1.0, flow), 0.0)


@triton.jit
def _flows(scores, q, k, weight_q, weight_k, sum_q, sum_k, eps, outer_eps, d: tl.constexpr, C: tl.constexpr):
    """Flows to sinks from sources with ``weight_k``, and to sources from sinks with ``weight_q``, not divided by c."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    width_q, width_k = tl.sum(q, 1), tl.sum(k, 1)
    to_sinks = tl.where(column <= row, (scores + eps * width_k[None, :]) * weight_k[None, :], 0.0)
    to_sources = tl.where(row <= column, (scores + eps * width_q[:, None]) * weight_q[:, None], 0.0)
    flow_in = tl.sum(to_sinks, 1) + tl.sum((q + eps) * sum_k[None, :], 1) + eps * (width_q + d * eps) + outer_eps
    flow_out = tl.sum(to_sources, 0) + tl.sum((k + eps) * sum_q[None, :], 1) + eps * (width_k + d * eps) + outer_eps
    return flow_in, flow_out


@triton.jit
def _softmax_so_far(logits, largest, total, C: tl.constexpr):
    """For each token the largest logit so far and Σ exp(logit - largest), from those before the tile; and after it."""
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    so_far = tl.where(column <= row, logits[None, :], _EXCLUDED)
    most = tl.maximum(tl.max(so_far, 1), largest)
    sums = tl.sum(tl.exp(so_far - most[:, None]), 1) + total * tl.exp(largest - most)
    largest_after = tl.maximum(tl.max(logits, 0), largest)
    total_after = tl.sum(tl.exp(logits - largest_after), 0) + total * tl.exp(largest - largest_after)
    return most, sums, largest_after, total_after


@triton.jit
def _weight(logits, count, real, largest, total, KIND: tl.constexpr, C: tl.constexpr):
    """Competition or allocation of a tile, 0 at padding; and what the softmax carries to the next tile."""
    if KIND == "softmax":
        logits = tl.where(real, logits, _EXCLUDED)
        most, sums, largest, total = _softmax_so_far(logits, largest, total, C)
        weight = tl.exp(logits - most) / sums * count
    elif KIND == "sigmoid":
        weight = 1.0 / (1.0 + tl.exp(-logits))
    else:
        weight = tl.full([C], 1.0, tl.float32)
    return tl.where(real, weight, 0.0), largest, total


@triton.jit
def _weight_backward(grad, weight, logits, real, largest, total, after, KIND: tl.constexpr, C: tl.constexpr):
    """The gradient of the logits, from ``grad``, that of the logarithm of the weight; and the next ``after``.

    ``after`` is Σ grad_i S / S_i over all tokens i after the tile, S being the sum of exponentials up to the tile's
    end; minus it is the gradient of log S.
    """
    if KIND == "softmax":
        row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        logits = tl.where(real, logits, _EXCLUDED)
        most, sums, largest_after, total_after = _softmax_so_far(logits, largest, total, C)
        # The share that source j (column) has in the sum up to i (row)
        shares = tl.exp(tl.where(column <= row, logits[None, :] - most[:, None], _EXCLUDED)) / sums[:, None]
        of_later = tl.exp(logits - largest_after) / total_after * after
        after *= tl.exp(largest - largest_after) * total / total_after
        after += tl.sum(grad * tl.exp(largest - most) / sums, 0) * total
        grad -= tl.sum(shares * grad[:, None], 0) + of_later
    elif KIND == "sigmoid":
        grad *= 1.0 - weight
    else:
        grad = tl.zeros([C], tl.float32)
    return tl.where(real, grad, 0.0), after


@triton.jit
def _store_carried(carried, most_c, total_c, most_a, total_a, before):
    """Store the maxima and sums of the softmaxes, and the number of real tokens, from before a tile."""
    tl.store(carried, most_c)
    tl.store(carried + 1, total_c)
    tl.store(carried + 2, most_a)
    tl.store(carried + 3, total_a)
    tl.store(carried + 4, before.to(tl.float32))


@triton.jit
def _flows_of_tile(
    scores, phi_q, phi_k, count, real, sum_q, sum_k, conserved_q, conserved_k, eps, outer_eps, flows, slot,
    d: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """c / I, c / O, I, Î and Ô of a tile; all four flows are written to ``flows``."""
    one = tl.full([C], 1.0, tl.float32)
    flow_in, flow_out = _flows(scores, phi_q, phi_k, one, one, sum_q, sum_k, eps, outer_eps, d, C)
    inverse_in, inverse_out = _inverse(flow_in, count, real), _inverse(flow_out, count, real)
    hat_in, hat_out = _flows(
        scores, phi_q, phi_k, inverse_in, inverse_out, conserved_q, conserved_k, eps, outer_eps, d, C
    )
    at = flows + slot * 4 * C + tl.arange(0, C)
    tl.store(at, flow_in)
    tl.store(at + C, flow_out)
    tl.store(at + 2 * C, hat_in)
    tl.store(at + 3 * C, hat_out)
    return inverse_in, inverse_out, flow_in, hat_in, hat_out


@tuned(["d", "e", "C"])
@triton.jit
def outputs(
    q, k, v, padding, counted, vectors, logs, kv_sums, out, flows, tile_sums, carried,
    new_count, new_sum_q, new_sum_k, new_conserved_q, new_conserved_k, new_log_competition, new_log_allocation,
    new_kv_sums, n, heads, groups, eps, outer_eps, clamp, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr,
    PADDED: tl.constexpr, STATE: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The output (B, H, n, e); flows; and the sums before each tile and after the last."""
    dtype: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    batch, h = head // heads, head % heads
    channels, columns = tl.arange(0, D), tl.arange(0, E)
    inside = channels < d
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    v += batch * vb + h * vh
    sum_q, sum_k = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    conserved_q, conserved_k = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    sum_kv = tl.zeros([D, E], tl.float32)
    before = tl.full([], 0, tl.int32)
    most_c, total_c = tl.full([], _EXCLUDED, tl.float32), tl.full([], 1.0, tl.float32)
    most_a, total_a = most_c, total_c
    if STATE:
        vectors += head * 4 * d + channels
        sum_q, sum_k, conserved_q, conserved_k = _load_vectors(vectors, inside, d)
        sum_kv = load_matrix(kv_sums + head * d * e, channels, columns, d, e)
        before = tl.load(counted + batch).to(tl.int32)
        most_c, most_a = tl.load(logs + 2 * head), tl.load(logs + 2 * head + 1)
    for tile in range(groups):
        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C)
        phi_q = load_features(q, qn, rows, channels, real, d, phi)
        phi_k = load_features(k, kn, rows, channels, real, d, phi)
        scores = feature_scores(q, k, qn, kn, rows, real, d, phi, C, D)
        slot = head * groups + tile
        _store_vectors(tile_sums + slot * 4 * d + channels, sum_q, sum_k, conserved_q, conserved_k, inside, d)
        _store_carried(carried + 5 * slot, most_c, total_c, most_a, total_a, before)
        count = tl.maximum(before + tl.cumsum(real.to(tl.int32), 0), 1).to(tl.float32)
        before += tl.sum(real.to(tl.int32), 0)

        values = load_tile(v, vn, rows, columns, real, e)
        inverse_in, inverse_out, flow_in, hat_in, hat_out = _flows_of_tile(
            scores, phi_q, phi_k, count, real, sum_q, sum_k, conserved_q, conserved_k, eps, outer_eps, flows, slot, d, C
        )  # fmt: skip
        sum_q += tl.sum(phi_q, 0)
        sum_k += tl.sum(phi_k, 0)
        conserved_q += tl.sum(phi_q * inverse_in[:, None], 0)
        conserved_k += tl.sum(phi_k * inverse_out[:, None], 0)

        logits = hat_out / count
        logits = tl.where(logits > clamp, clamp, logits)  # not minimum, which need not hand on a NaN
        competition, most_c, total_c = _weight(logits, count, real, most_c, total_c, COMPETITION, C)
        allocation, most_a, total_a = _weight(hat_in / count, count, real, most_a, total_a, ALLOCATION, C)
        row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
        scores = tl.where(column <= row, scores * competition[None, :], 0.0)
        result = product(phi_q, sum_kv, tl.zeros((C, E), tl.float32), dtype)
        sum_kv = product(tl.trans(phi_k * competition[:, None]), values, sum_kv, dtype)
        result = product(scores, values, result, dtype)
        result *= (allocation / tl.where(flow_in < 1e-18, 1.0, flow_in))[:, None]
        store_tile(out + head * n * e, e, rows, columns, exist, e, result)

    tl.store(new_sum_q + head * d + channels, sum_q, mask=inside)
    tl.store(new_sum_k + head * d + channels, sum_k, mask=inside)
    tl.store(new_conserved_q + head * d + channels, conserved_q, mask=inside)
    tl.store(new_conserved_k + head * d + channels, conserved_k, mask=inside)
    tl.store(new_log_competition + head, most_c + tl.log(total_c))
    tl.store(new_log_allocation + head, most_a + tl.log(total_a))
    store_matrix(new_kv_sums + head * d * e, channels, columns, d, e, sum_kv)
    if h == 0:
        tl.store(new_count + batch, before.to(tl.int64))


@triton.jit
def _values_backward(
    k, v, out, grad_out, grad_v, scores, scale, competition, after_kv,
    head, n, rows, exist, real, channels, columns, row, column, kn, vn, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, C: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """φ(k), and the gradients of the logarithms of scale and competition; that of v is written."""
    dtype: tl.constexpr = v.dtype.element_ty
    grad_tile = load_tile(grad_out, on, rows, columns, real, e)
    grad_log_scale = tl.sum(load_tile(out + head * n * e, e, rows, columns, real, e).to(tl.float32) * grad_tile, 1)
    values = load_tile(v, vn, rows, columns, real, e)
    weighted = tl.where(column <= row, scores * scale[:, None], 0.0)
    phi_k = load_features(k, kn, rows, channels, real, d, phi)
    grad_weighted = product(phi_k, after_kv, tl.zeros((C, E), tl.float32), dtype)
    grad_weighted = product(tl.trans(weighted), grad_tile, grad_weighted, dtype) * competition[:, None]
    store_tile(grad_v + head * n * e, e, rows, columns, exist, e, grad_weighted)
    return phi_k, grad_log_scale, tl.sum(grad_weighted * values, 1)


@triton.jit
def _flows_backward(
    scores, phi_q, phi_k, grad_hat_in, grad_hat_out, grad_log_scale, flow_in, flow_out, nonzero_in, nonzero_out,
    inverse_in, inverse_out, after_conserved_q, after_conserved_k, row, column, eps,
):  # fmt: skip
    """Gradients of I and O, from those of Î, Ô and the logarithm of the scale."""
    to_sinks = (scores + eps * tl.sum(phi_k, 1)[None, :]) * grad_hat_in[:, None]
    to_sources = (scores + eps * tl.sum(phi_q, 1)[:, None]) * grad_hat_out[None, :]
    grad_inverse_out = tl.sum(tl.where(column <= row, to_sinks, 0.0), 0)
    grad_inverse_out += tl.sum(phi_k * after_conserved_k[None, :], 1)
    grad_inverse_in = tl.sum(tl.where(row <= column, to_sources, 0.0), 1)
    grad_inverse_in += tl.sum(phi_q * after_conserved_q[None, :], 1)
    grad_in = tl.where(flow_in < 1e-18, 0.0, -(grad_inverse_in * inverse_in + grad_log_scale) / nonzero_in)
    grad_flow_out = tl.where(flow_out < 1e-18, 0.0, -grad_inverse_out * inverse_out / nonzero_out)
    return grad_in, grad_flow_out


@triton.jit
def _store_numbers(
    numbers, competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out,
    C: tl.constexpr,
):  # fmt: skip
    """The reverse of ``_load_numbers``."""
    tl.store(numbers, competition)
    tl.store(numbers + C, scale)
    tl.store(numbers + 2 * C, inverse_in)
    tl.store(numbers + 3 * C, inverse_out)
    tl.store(numbers + 4 * C, grad_in)
    tl.store(numbers + 5 * C, grad_flow_out)
    tl.store(numbers + 6 * C, grad_hat_in)
    tl.store(numbers + 7 * C, grad_hat_out)


@triton.jit
def _keys_backward(
    q, k, v, grad_out, grad_k, tile_sums, head, n, slot, rows, exist, real,
    competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out,
    after_k, after_conserved_k, after_kv, channels, columns, inside, row, column, eps, qn, kn, vn, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """φ(q), φ(k) and the next ``after_kv``; the gradient of k is written.

    It comes through the sinks of the tile, through those after it, and to k as a receiver of what came before it.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    to_sources = tl.where(column <= row, grad_in[:, None] + grad_hat_in[:, None] * inverse_out[None, :], 0.0)
    grad_scores = _score_gradients(grad_out, v, on, vn, rows, real, e, C, E)
    grad_scores *= scale[:, None] * competition[None, :]
    grad_scores = tl.where(column <= row, grad_scores, 0.0) + to_sources
    grad_scores += tl.where(row <= column, grad_flow_out[None, :] + grad_hat_out[None, :] * inverse_in[:, None], 0.0)
    # Read again: until here they would take registers that products need.
    phi_q = load_features(q, qn, rows, channels, real, d, phi)
    grad_tile = load_tile(grad_out, on, rows, columns, real, e)
    values = load_tile(v, vn, rows, columns, real, e)
    total_k = product(values, tl.trans(after_kv), tl.zeros((C, D), tl.float32), dtype) * competition[:, None]
    after_kv = product(tl.trans(phi_q * scale[:, None]), grad_tile, after_kv, dtype)
    total_k = product(tl.trans(grad_scores), phi_q, total_k, dtype)
    phi_k = load_features(k, kn, rows, channels, real, d, phi)
    sums_here = tile_sums + slot * 4 * d + channels
    sum_q = tl.load(sums_here, mask=inside, other=0.0)
    conserved_q = tl.load(sums_here + 2 * d, mask=inside, other=0.0)
    total_k += grad_flow_out[:, None] * (sum_q + eps)[None, :]
    total_k += grad_hat_out[:, None] * (conserved_q + eps)[None, :]
    total_k += after_k[None, :] + inverse_out[:, None] * after_conserved_k[None, :]
    total_k += eps * tl.sum(to_sources, 0)[:, None]
    total_k = tl.where(real[:, None], total_k * feature_slope(phi_k, phi), 0.0)
    store_tile(grad_k + head * n * d, d, rows, channels, exist, d, total_k)
    return phi_q, phi_k, after_kv


@tuned(["d", "e", "C"])
@triton.jit
def sources_backward(
    q, k, v, out, grad_out, padding, flows, tile_sums, carried, grad_vectors, grad_logs, grad_kv_sums,
    grad_k, grad_v, numbers, sums_after, first_vectors, first_logs, first_kv_sums,
    n, heads, groups, eps, clamp, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr,
    PADDED: tl.constexpr, STATE: tl.constexpr, STATE_GRADS: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of k (B, H, n, d), before phi, and of v, from the last tile to the first; and what the sinks need.

    That is, ``numbers`` (B H, G, 8, C), competition w, scale s, c / I, c / O, and the gradients of I, O, Î and Ô; and
    ``sums_after`` each tile (B H, G, 2, d), Σ dO (k + ε) and Σ dÔ (k + ε), the gradients of Σ q and Σ (c / I) q.
    STATE_GRADS: the sums after the last token have gradients. STATE: those before the first token want theirs.
    """
    head = tl.program_id(0).to(tl.int64)
    batch, h = head // heads, head % heads
    channels, columns = tl.arange(0, D), tl.arange(0, E)
    inside = channels < d
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    # Gradients of the running sums of q, k, (c / I) q, (c / O) k and kᵀ(w v) after the tile.
    after_q, after_k = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    after_conserved_q, after_conserved_k = tl.zeros([D], tl.float32), tl.zeros([D], tl.float32)
    after_kv = tl.zeros([D, E], tl.float32)
    after_c, after_a = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    if STATE_GRADS:
        grad_vectors += head * 4 * d + channels
        after_q, after_k, after_conserved_q, after_conserved_k = _load_vectors(grad_vectors, inside, d)
        after_kv = load_matrix(grad_kv_sums + head * d * e, channels, columns, d, e)
        after_c, after_a = -tl.load(grad_logs + 2 * head), -tl.load(grad_logs + 2 * head + 1)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for step in range(groups):
        tile = groups - 1 - step
        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C)
        scores = feature_scores(q, k, qn, kn, rows, real, d, phi, C, D)
        slot = head * groups + tile
        here = carried + 5 * slot
        count = tl.maximum(tl.load(here + 4) + tl.cumsum(real.to(tl.int32), 0).to(tl.float32), 1.0)
        after_here = sums_after + slot * 2 * d + channels
        tl.store(after_here, after_q, mask=inside)
        tl.store(after_here + d, after_conserved_q, mask=inside)

        # Weights
        at = flows + slot * 4 * C + tl.arange(0, C)
        flow_in, flow_out = tl.load(at), tl.load(at + C)
        logits_in, logits_out = tl.load(at + 2 * C) / count, tl.load(at + 3 * C) / count
        clamped = logits_out > clamp
        logits_out = tl.where(clamped, clamp, logits_out)
        most_c, total_c = tl.load(here), tl.load(here + 1)
        most_a, total_a = tl.load(here + 2), tl.load(here + 3)
        competition, _, _ = _weight(logits_out, count, real, most_c, total_c, COMPETITION, C)
        allocation, _, _ = _weight(logits_in, count, real, most_a, total_a, ALLOCATION, C)
        nonzero_in, nonzero_out = tl.where(flow_in < 1e-18, 1.0, flow_in), tl.where(flow_out < 1e-18, 1.0, flow_out)
        scale = allocation / nonzero_in
        inverse_in, inverse_out = _inverse(flow_in, count, real), _inverse(flow_out, count, real)

        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C, part=1)
        phi_k, grad_log_scale, grad_log_competition = _values_backward(
            k, v, out, grad_out, grad_v, scores, scale, competition, after_kv,
            head, n, rows, exist, real, channels, columns, row, column, kn, vn, on, d, e, phi, C, E,
        )  # fmt: skip

        # Î and Ô
        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C, part=2)
        grad_hat_in, after_a = _weight_backward(
            grad_log_scale, allocation, logits_in, real, most_a, total_a, after_a, ALLOCATION, C
        )
        grad_hat_out, after_c = _weight_backward(
            grad_log_competition, competition, logits_out, real, most_c, total_c, after_c, COMPETITION, C
        )
        grad_hat_in /= count
        grad_hat_out = tl.where(clamped, 0.0, grad_hat_out / count)

        # I and O
        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C, part=3)
        phi_q = load_features(q, qn, rows, channels, real, d, phi)
        grad_in, grad_flow_out = _flows_backward(
            scores, phi_q, phi_k, grad_hat_in, grad_hat_out, grad_log_scale, flow_in, flow_out, nonzero_in, nonzero_out,
            inverse_in, inverse_out, after_conserved_q, after_conserved_k, row, column, eps,
        )  # fmt: skip
        at = numbers + slot * 8 * C + tl.arange(0, C)
        _store_numbers(
            at, competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out, C
        )
        # Read again in the layouts that follow: else they would take registers, and a barrier for each layout.
        tl.debug_barrier()
        competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out = _load_numbers(
            at, C
        )

        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C, part=4)
        phi_q, phi_k, after_kv = _keys_backward(
            q, k, v, grad_out, grad_k, tile_sums, head, n, slot, rows, exist, real,
            competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out,
            after_k, after_conserved_k, after_kv, channels, columns, inside, row, column, eps, qn, kn, vn, on,
            d, e, phi, C, D, E,
        )  # fmt: skip

        # The sums after the next tile
        after_q += tl.sum((phi_k + eps) * grad_flow_out[:, None], 0)
        after_k += tl.sum((phi_q + eps) * grad_in[:, None], 0)
        after_conserved_q += tl.sum((phi_k + eps) * grad_hat_out[:, None], 0)
        after_conserved_k += tl.sum((phi_q + eps) * grad_hat_in[:, None], 0)

    if STATE:
        first_vectors += head * 4 * d + channels
        _store_vectors(first_vectors, after_q, after_k, after_conserved_q, after_conserved_k, inside, d)
        tl.store(first_logs + 2 * head, -after_c)
        tl.store(first_logs + 2 * head + 1, -after_a)
        store_matrix(first_kv_sums + head * d * e, channels, columns, d, e, after_kv)


@tuned(["d", "e", "C"])
@triton.jit
def sinks_backward(
    q, k, v, grad_out, padding, numbers, tile_sums, sums_after, kv_sums, grad_q,
    n, heads, groups, eps, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, STATE: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The gradient of q (B, H, n, d), before phi, from the first tile to the last; after ``sources_backward``."""
    dtype: tl.constexpr = q.dtype.element_ty
    head = tl.program_id(0).to(tl.int64)
    batch, h = head // heads, head % heads
    channels, columns = tl.arange(0, D), tl.arange(0, E)
    inside = channels < d
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    sum_kv = tl.zeros([D, E], tl.float32)
    if STATE:
        sum_kv = load_matrix(kv_sums + head * d * e, channels, columns, d, e)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for tile in range(groups):
        rows, exist, real = _tile(padding, batch, tile, n, PADDED, C)
        slot = head * groups + tile
        at = numbers + slot * 8 * C + tl.arange(0, C)
        competition, scale, inverse_in, inverse_out, grad_in, grad_flow_out, grad_hat_in, grad_hat_out = _load_numbers(
            at, C
        )
        grad_tile = load_tile(grad_out, on, rows, columns, real, e)
        values = load_tile(v, vn, rows, columns, real, e)
        total_q = product(grad_tile, tl.trans(sum_kv), tl.zeros((C, D), tl.float32), dtype) * scale[:, None]
        grad_scores = _score_gradients(grad_out, v, on, vn, rows, real, e, C, E)
        grad_scores *= scale[:, None] * competition[None, :]
        grad_scores += grad_in[:, None] + grad_hat_in[:, None] * inverse_out[None, :]
        to_sinks = tl.where(row <= column, grad_flow_out[None, :] + grad_hat_out[None, :] * inverse_in[:, None], 0.0)
        grad_scores = tl.where(column <= row, grad_scores, 0.0) + to_sinks
        phi_k = load_features(k, kn, rows, channels, real, d, phi)
        sum_kv = product(tl.trans(phi_k * competition[:, None]), values, sum_kv, dtype)
        total_q = product(grad_scores, phi_k, total_q, dtype)

        # As a receiver of what came before the tile, and as a giver to what comes after it
        sums_here = tile_sums + slot * 4 * d + channels
        after_here = sums_after + slot * 2 * d + channels
        sum_k = tl.load(sums_here + d, mask=inside, other=0.0)
        conserved_k = tl.load(sums_here + 3 * d, mask=inside, other=0.0)
        after_q = tl.load(after_here, mask=inside, other=0.0)
        after_conserved_q = tl.load(after_here + d, mask=inside, other=0.0)
        total_q += grad_in[:, None] * (sum_k + eps)[None, :] + grad_hat_in[:, None] * (conserved_k + eps)[None, :]
        total_q += after_q[None, :] + inverse_in[:, None] * after_conserved_q[None, :]
        total_q += eps * tl.sum(to_sinks, 1)[:, None]
        phi_q = load_features(q, qn, rows, channels, real, d, phi)
        total_q = tl.where(real[:, None], total_q * feature_slope(phi_q, phi), 0.0)
        store_tile(grad_q + head * n * d, d, rows, channels, exist, d, total_q)
