"""Causal Flow-Attention by Triton kernels, the device's side: one program per chunk of one head and tile of channels.

A chunk has C tokens, a tile at most E of the e channels. Two kinds of kernel alternate: one forms the sum over each
chunk; ``sums_so_far`` adds them up; the next kernel reads there what came before its own chunk. With ε the form's
constant, P = q kᵀ inside a chunk, q̃ = q + ε and x̄ the sum of x over all earlier chunks, the flow from sources with
weights x into sink i is (I and Î; exchange q and k for O and Ô)

    F_i = Σ_{j<=i} x_j (P_ij + ε Σ_c k_jc) + q̃_i·(x k)‾ + ε Σ_c q̃_ic + ε'

and its gradient, with x̂ the sum of x over all later chunks, is dx_j = Σ_{i>=j} dF_i (P_ij + ε Σ_c k_jc) + k_j·(dF q̃)^.

Weights need a sum over all earlier tokens of a head, of one number each: one program for each head walks through it in
blocks of T tokens. With p_i = exp(x_i) / Σ_{j<=i} exp(x_j) the gradient of log p_i, g_i, gives

    dx_i = g_i - p_i S_i,   S_i = g_i + (1 - p_{i+1}) S_{i+1}

since exp(L_i - L_{i+1}) = 1 - p_{i+1} for the logarithms L of the sums. S after the last token is minus the gradient of
the last L, and the gradient of L before the first is -(1 - p_1) S_1.

Arguments: ``x`` pointers of (B, H, n, c) with strides of batch, head and token; ``padding`` (B, n), one byte each, 1 =
padding; ``count`` (B, n); flows and weights (B, H, n), float32. Sums are (2, B H, G + 1, d), of q and of k, or
(B H, G + 1, d, e): slot g of a forward sum holds all before chunk g, slot G - 1 - g of a reversed one all after it.
"""

import triton
import triton.language as tl

from ...shared.gpu.launch import with_warps
from ...shared.gpu.tiles import load_matrix, load_tile, product, store_tile
from .tiles import feature_scores, feature_slope, load_features


@triton.jit
def _replace_zero_by_one(flow):
    """``flow``, but 1 where it is 0, so that 1 / flow is finite."""
    return tl.where(flow < 1e-18, 1.0, flow)


@triton.jit
def _location(padding, n, heads, groups, PADDED: tl.constexpr, C: tl.constexpr):
    """This program's head b H + h, b, h, chunk and rows; which rows exist, and which are real tokens."""
    program = tl.program_id(0).to(tl.int64)  # all offsets are of 64 bits: tensors pass 2³¹ elements
    head, chunk = program // groups, program % groups
    batch = head // heads
    rows = chunk * C + tl.arange(0, C)
    exist = rows < n
    real = exist
    if PADDED:
        real = exist & (tl.load(padding + batch * n + rows, mask=exist, other=1) == 0)
    return head, batch, head % heads, chunk, rows, exist, real


@with_warps(4)
@triton.jit
def sums_so_far(
    sums, first, other_first, last, other_last,
    groups, heads, width,
    STARTED: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Turn the sums of chunks, (rows, G + 1, width), into those of all chunks up to each; a program for W columns.

    Slot 0 becomes ``first`` if STARTED, otherwise 0, and the last slot is also written to ``last``. Rows from ``heads``
    on have the other two. R chunks are read at once.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * W + tl.arange(0, W)
    inside = columns < width
    here, other = inside & (row < heads), inside & (row >= heads)
    at = tl.where(row < heads, row, row - heads) * width + columns
    sums += row * (groups + 1) * width + columns
    total = tl.zeros((W,), tl.float32)
    if STARTED:
        total += tl.load(first + at, mask=here, other=0.0) + tl.load(other_first + at, mask=other, other=0.0)
    tl.store(sums, total, mask=inside)
    for start in range(1, groups + 1, R):
        slots = start + tl.arange(0, R)
        keep = (slots <= groups)[:, None] & inside[None, :]
        places = sums[None, :] + slots.to(tl.int64)[:, None] * width
        x = tl.load(places, mask=keep, other=0.0)
        tl.store(places, tl.cumsum(x, 0) + total[None, :], mask=keep)
        total += tl.sum(x, 0)
    tl.store(last + at, total, mask=here)
    tl.store(other_last + at, total, mask=other)


@with_warps(4)
@triton.jit
def feature_sums(
    q, k, padding, weights_q, weights_k, sums,
    n, heads, groups, eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, WEIGHTED: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Σ q and Σ k of each chunk; if WEIGHTED, reversed, Σ w (q + ε) and Σ w (k + ε)."""
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    q = load_features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = load_features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    slot = chunk + 1
    if WEIGHTED:
        slot = groups - chunk
        q = (q + eps) * tl.load(weights_q + head * n + rows, mask=exist, other=0.0)[:, None]
        k = (k + eps) * tl.load(weights_k + head * n + rows, mask=exist, other=0.0)[:, None]
    sums += (head * (groups + 1) + slot) * d + channels
    tl.store(sums, tl.sum(q, 0), mask=channels < d)
    sums += (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d  # (B H) (G + 1) d
    tl.store(sums, tl.sum(k, 0), mask=channels < d)


@with_warps()
@triton.jit
def flows(
    q, k, padding, count, incoming, outgoing, conserved_incoming, conserved_outgoing, sums, next_sums,
    n, heads, groups, count_stride, eps, outer_eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, CONSERVED: tl.constexpr, C: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """I and O, and Σ (c / I) q and Σ (c / O) k of each chunk; or, if CONSERVED, Î and Ô from I and O.

    None of the four flows is divided by c.
    """
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    inside = channels < d
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    scores = feature_scores(q, k, qn, kn, rows, real, d, phi, C, D)
    q = load_features(q, qn, rows, channels, real, d, phi)
    k = load_features(k, kn, rows, channels, real, d, phi)
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    slot = (head * (groups + 1) + chunk) * d + channels
    sum_q = tl.load(sums + slot, mask=inside, other=0.0)
    sum_k = tl.load(sums + of_k + slot, mask=inside, other=0.0)
    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    at = head * n + rows
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    width_q, width_k = tl.sum(q, 1), tl.sum(k, 1)
    to_sinks = scores + eps * width_k[None, :]
    to_sources = scores + eps * width_q[:, None]
    if CONSERVED:
        to_sinks *= (count / _replace_zero_by_one(tl.load(outgoing + at, mask=exist, other=1.0)))[None, :]
        to_sources *= (count / _replace_zero_by_one(tl.load(incoming + at, mask=exist, other=1.0)))[:, None]
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
        tl.store(next_sums + slot, tl.sum(q * (count / _replace_zero_by_one(flow_in))[:, None], 0), mask=inside)
        tl.store(next_sums + of_k + slot, tl.sum(k * (count / _replace_zero_by_one(flow_out))[:, None], 0), mask=inside)


@triton.jit
def _add_exponentials(largest, total, other_largest, other_total):
    """The sum of ``total`` exp(``largest``) and the other, in the same form."""
    both = tl.maximum(largest, other_largest)
    return both, total * tl.exp(largest - both) + other_total * tl.exp(other_largest - both)


@triton.jit
def _last(x, T: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, T) == T - 1, x, 0.0), 0)


@triton.jit
def _shares_so_far(logits, real, largest, total, T: tl.constexpr):
    """p of T logits, 0 where not ``real``, and the sum after it; the one before is ``total`` exp(``largest``)."""
    start = tl.where(real, logits, -1e30), tl.where(real, 1.0, 0.0)
    largest_so_far, total_so_far = tl.associative_scan(start, 0, _add_exponentials)
    largest_so_far, total_so_far = _add_exponentials(largest, total, largest_so_far, total_so_far)
    shares = tl.where(real, tl.exp(logits - largest_so_far) / total_so_far, 0.0)
    return shares, _last(largest_so_far, T), _last(total_so_far, T)


@triton.jit
def _weights_so_far(logits, real, c, largest, total, KIND: tl.constexpr, T: tl.constexpr):
    """The weights of T logits by the option KIND, and the sum of exponentials after them, as in ``_shares_so_far``."""
    if KIND == "softmax":
        shares, largest, total = _shares_so_far(logits, real, largest, total, T)
        weights = shares * c
    elif KIND == "sigmoid":
        weights = tl.sigmoid(logits)
    else:
        weights = logits * 0.0 + 1.0
    return weights, largest, total


@triton.jit
def _block(padding, count, rows, n, batch, count_stride, PADDED: tl.constexpr):
    """Which of the rows exist, which are real tokens, and their counts c."""
    exist = (rows >= 0) & (rows < n)
    real = exist
    if PADDED:
        real = exist & (tl.load(padding + batch * n + rows, mask=exist, other=1) == 0)
    return exist, real, tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)


@triton.jit
def _first_numbers(first, other_first, head, empty, STARTED: tl.constexpr):
    """Two numbers of a head, ``empty`` unless STARTED."""
    keep = (head >= 0) & STARTED
    return tl.load(first + head, mask=keep, other=empty), tl.load(other_first + head, mask=keep, other=empty)


@with_warps()
@triton.jit
def weights(
    incoming, conserved_incoming, conserved_outgoing, padding, count, competition, scale, allocation,
    first_competition, first_allocation, last_competition, last_allocation,
    n, heads, count_stride, clamp, empty,
    STARTED: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, PADDED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Competition, allocation and allocation / I of a head's tokens, and the logarithms (B, H) after them.

    The first logarithms are ``empty`` unless STARTED.
    """
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads
    largest, allocation_largest = _first_numbers(first_competition, first_allocation, head, empty, STARTED)
    total, allocation_total = tl.exp(largest - largest), tl.exp(allocation_largest - allocation_largest)  # 1
    for start in range(0, n, T):
        rows = start + tl.arange(0, T)
        at = head * n + rows
        exist, real, c = _block(padding, count, rows, n, batch, count_stride, PADDED)
        logits = tl.load(conserved_outgoing + at, mask=exist, other=0.0) / c
        logits = tl.where(logits > clamp, clamp, logits)
        weight, largest, total = _weights_so_far(logits, real, c, largest, total, COMPETITION, T)
        tl.store(competition + at, weight, mask=exist)
        logits = tl.load(conserved_incoming + at, mask=exist, other=0.0) / c
        safe = _replace_zero_by_one(tl.load(incoming + at, mask=exist, other=1.0))
        weight, allocation_largest, allocation_total = _weights_so_far(
            logits, real, c, allocation_largest, allocation_total, ALLOCATION, T
        )
        tl.store(allocation + at, weight, mask=exist)
        tl.store(scale + at, weight / safe, mask=exist)
    tl.store(last_competition + head, largest + tl.log(total))
    tl.store(last_allocation + head, allocation_largest + tl.log(allocation_total))


@triton.jit
def _decay_and_add(decay, total, later_decay, later_total):
    return decay * later_decay, later_total + later_decay * total


@triton.jit
def _logit_gradients(grads, weights, at, c, next_c, exist, has_next, later, KIND: tl.constexpr, T: tl.constexpr):
    """Gradients of T logits, from the last to the first, and S of the first, from those of the logarithms of weights.

    ``weights`` points to those of all tokens, by the option KIND; ``later`` is S of the token after these.
    """
    weight = tl.load(weights + at, mask=exist, other=0.0)
    if KIND == "softmax":
        next_shares = tl.load(weights + at + 1, mask=has_next, other=0.0) / next_c
        decay, total = tl.associative_scan((1.0 - next_shares, grads), 0, _decay_and_add)
        total += decay * later
        grads -= weight / c * total
        later = _last(total, T)
    elif KIND == "sigmoid":
        grads *= 1.0 - weight
    else:
        grads *= 0.0
    return grads, later


@with_warps(4)
@triton.jit
def weights_backward(
    incoming, conserved_outgoing, padding, count, competition, allocation, grad_competition, grad_log_scale,
    grad_incoming, grad_conserved_incoming, grad_conserved_outgoing,
    first_competition, first_allocation, last_competition, last_allocation,
    n, heads, count_stride, clamp,
    STARTED: tl.constexpr, COMPETITION: tl.constexpr, ALLOCATION: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Gradients of I, Î and Ô, and of the logarithms (B, H) before the tokens, ``last``, from those after, ``first``.

    The gradients of the competition and of log s come in PARTS, (PARTS, B, H, n).
    """
    head = tl.program_id(0).to(tl.int64)
    batch = head // heads
    size = tl.num_programs(0).to(tl.int64) * n
    later, allocation_later = _first_numbers(first_competition, first_allocation, head, 0.0, STARTED)
    grad_log, grad_log_allocation = later, allocation_later
    later, allocation_later = -later, -allocation_later
    for start in range(0, n, T):
        rows = n - 1 - start - tl.arange(0, T)
        at = head * n + rows
        exist, real, c = _block(padding, count, rows, n, batch, count_stride, PADDED)
        has_next = exist & (rows < n - 1)
        next_c = tl.load(count + batch * count_stride + rows + 1, mask=has_next, other=1.0)
        grad_weight, grad_scale = tl.zeros((T,), tl.float32), tl.zeros((T,), tl.float32)
        for part in range(PARTS):
            grad_weight += tl.load(grad_competition + part * size + at, mask=exist, other=0.0)
            grad_scale += tl.load(grad_log_scale + part * size + at, mask=exist, other=0.0)
        grad_weight *= tl.load(competition + at, mask=exist, other=0.0)
        grads, later = _logit_gradients(grad_weight, competition, at, c, next_c, exist, has_next, later, COMPETITION, T)
        logits = tl.load(conserved_outgoing + at, mask=exist, other=0.0) / c
        tl.store(grad_conserved_outgoing + at, tl.where(logits > clamp, 0.0, grads / c), mask=exist)
        flow = tl.load(incoming + at, mask=exist, other=1.0)
        safe = _replace_zero_by_one(flow)
        tl.store(grad_incoming + at, tl.where(flow < 1e-18, 0.0, -grad_scale / safe), mask=exist)
        grads, allocation_later = _logit_gradients(
            grad_scale, allocation, at, c, next_c, exist, has_next, allocation_later, ALLOCATION, T
        )
        tl.store(grad_conserved_incoming + at, grads / c, mask=exist)
    c = tl.load(count + batch * count_stride)
    if COMPETITION == "softmax":
        grad_log = (tl.load(competition + head * n) / c - 1.0) * later
    if ALLOCATION == "softmax":
        grad_log_allocation = (tl.load(allocation + head * n) / c - 1.0) * allocation_later
    tl.store(last_competition + head, grad_log)
    tl.store(last_allocation + head, grad_log_allocation)


@with_warps(4)
@triton.jit
def value_sums(
    x, v, padding, out, weights, sums, dots,
    n, heads, groups, xb, xh, xn, vb, vh, vn,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, REVERSED: tl.constexpr,
    C: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Σ phi(x)ᵀ (w v) of each chunk, (d, e): of k and v, or, REVERSED, of q and the gradient of the output.

    REVERSED, also each token's product of ``out`` and its gradient, a part (B, H, n) from each block of e channels.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    x = load_features(x + batch * xb + h * xh, xn, rows, channels, real, d, phi)
    x *= tl.load(weights + head * n + rows, mask=exist, other=0.0)[:, None]
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    slot = chunk + 1
    if REVERSED:
        slot = groups - chunk
        out = load_tile(out + head * n * e, e, rows, columns, exist, e)
        part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // groups) * n
        tl.store(dots + part + head * n + rows, tl.sum(out.to(tl.float32) * v, 1), mask=exist)
    sums += (head * (groups + 1) + slot) * d * e + channels[:, None] * e + columns[None, :]
    total = product(tl.trans(x), v, tl.zeros((D, E), tl.float32), dtype)
    tl.store(sums, total, mask=(channels < d)[:, None] & (columns < e)[None, :])


@with_warps()
@triton.jit
def outputs(
    q, k, v, padding, competition, scale, sums, out,
    n, heads, groups, qb, qh, qn, kb, kh, kn, vb, vh, vn,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """s_i (Σ_{j<=i} P_ij w_j v_j + q_i (kᵀ w v)‾) for w ``competition`` and s ``scale``; out (B, H, n, e)."""
    dtype: tl.constexpr = q.dtype.element_ty
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    if dtype == tl.float32:  # exact in parts; in half precision one product of rounded operands is less work
        scores = feature_scores(q, k, qn, kn, rows, real, d, phi, C, D)
        q = load_features(q, qn, rows, channels, real, d, phi)
    else:
        q = load_features(q, qn, rows, channels, real, d, phi)
        k = load_features(k, kn, rows, channels, real, d, phi)
        scores = product(q, tl.trans(k), tl.zeros((C, C), tl.float32), dtype)
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    scores = tl.where(tl.arange(0, C)[None, :] <= tl.arange(0, C)[:, None], scores, 0.0)
    scores *= tl.load(competition + head * n + rows, mask=exist, other=0.0)[None, :]
    earlier = load_matrix(sums + (head * (groups + 1) + chunk) * d * e, channels, columns, d, e)
    result = product(scores, v, tl.zeros((C, E), tl.float32), dtype)
    result = product(q, earlier, result, dtype)
    result *= tl.load(scale + head * n + rows, mask=exist, other=0.0)[:, None]
    store_tile(out + head * n * e, e, rows, columns, exist, e, result)


@with_warps()
@triton.jit
def values_backward(
    q, k, v, grad_out, padding, competition, scale, reversed_sums, grad_v, grad_competition,
    n, heads, groups, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Gradients of v (B, H, n, e), and of w, a part (B, H, n) from each block of e channels."""
    dtype: tl.constexpr = q.dtype.element_ty
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels, columns = tl.arange(0, D), tl.program_id(1) * E + tl.arange(0, E)
    at = head * n + rows
    q = load_features(q + batch * qb + h * qh, qn, rows, channels, real, d, phi)
    k = load_features(k + batch * kb + h * kh, kn, rows, channels, real, d, phi)
    v = load_tile(v + batch * vb + h * vh, vn, rows, columns, real, e)
    grad_out = load_tile(grad_out + batch * ob + h * oh, on, rows, columns, real, e)
    competition = tl.load(competition + at, mask=exist, other=0.0)
    scale = tl.load(scale + at, mask=exist, other=0.0)
    scores = product(q, tl.trans(k), tl.zeros((C, C), tl.float32), dtype)
    scores = tl.where(tl.arange(0, C)[None, :] <= tl.arange(0, C)[:, None], scores, 0.0)
    head_sums = head * (groups + 1) * d * e
    after = load_matrix(reversed_sums + head_sums + (groups - 1 - chunk) * d * e, channels, columns, d, e)
    grad_weighted = tl.zeros((C, E), tl.float32)
    grad_weighted = product(tl.trans(scores * scale[:, None]), grad_out, grad_weighted, dtype)
    grad_weighted = product(k, after, grad_weighted, dtype)
    store_tile(grad_v + head * n * e, e, rows, columns, exist, e, grad_weighted * competition[:, None])
    part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // groups) * n
    tl.store(grad_competition + part + at, tl.sum(grad_weighted * v, 1), mask=exist)


@with_warps()
@triton.jit
def flows_backward(
    q, k, padding, count, incoming, outgoing, grad_conserved_incoming, grad_conserved_outgoing, grad_incoming_direct,
    reversed_sums, grad_incoming, grad_outgoing, next_sums,
    n, heads, groups, count_stride, eps, qb, qh, qn, kb, kh, kn,
    d: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Gradients of I and O from those of Î and Ô; and, reversed, Σ dI (q + ε) and Σ dO (k + ε).

    Ô depends on c / I, and Î on c / O. ``grad_incoming_direct`` is the gradient of I that does not pass through Ô.
    """
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    inside = channels < d
    q += batch * qb + h * qh
    k += batch * kb + h * kh
    scores = feature_scores(q, k, qn, kn, rows, real, d, phi, C, D)
    q = load_features(q, qn, rows, channels, real, d, phi)
    k = load_features(k, kn, rows, channels, real, d, phi)
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    slot = (head * (groups + 1) + groups - 1 - chunk) * d + channels
    after_q = tl.load(reversed_sums + slot, mask=inside, other=0.0)
    after_k = tl.load(reversed_sums + of_k + slot, mask=inside, other=0.0)
    at = head * n + rows
    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    grad_in = tl.load(grad_conserved_incoming + at, mask=exist, other=0.0)
    grad_out = tl.load(grad_conserved_outgoing + at, mask=exist, other=0.0)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    to_sinks = (scores + eps * tl.sum(k, 1)[None, :]) * grad_in[:, None]
    to_sources = (scores + eps * tl.sum(q, 1)[:, None]) * grad_out[None, :]
    grad_inverse_outgoing = tl.sum(tl.where(column <= row, to_sinks, 0.0), 0) + tl.sum(k * after_q[None, :], 1)
    grad_inverse_incoming = tl.sum(tl.where(row <= column, to_sources, 0.0), 1) + tl.sum(q * after_k[None, :], 1)
    flow_in = tl.load(incoming + at, mask=exist, other=1.0)
    flow_out = tl.load(outgoing + at, mask=exist, other=1.0)
    grad_in = tl.load(grad_incoming_direct + at, mask=exist, other=0.0)
    safe_in, safe_out = _replace_zero_by_one(flow_in), _replace_zero_by_one(flow_out)
    grad_in -= tl.where(flow_in < 1e-18, 0.0, grad_inverse_incoming * (count / safe_in) / safe_in)
    grad_out = -tl.where(flow_out < 1e-18, 0.0, grad_inverse_outgoing * (count / safe_out) / safe_out)
    tl.store(grad_incoming + at, grad_in, mask=exist)
    tl.store(grad_outgoing + at, grad_out, mask=exist)
    slot += d
    tl.store(next_sums + slot, tl.sum((q + eps) * grad_in[:, None], 0), mask=inside)
    tl.store(next_sums + of_k + slot, tl.sum((k + eps) * grad_out[:, None], 0), mask=inside)


@with_warps()
@triton.jit
def features_backward(
    q, k, v, grad_out, padding, count, incoming, outgoing, competition, scale, grad_incoming, grad_outgoing,
    grad_conserved_incoming, grad_conserved_outgoing, sums, conserved_sums, reversed_sums, reversed_conserved_sums,
    kv_sums, reversed_kv_sums, grad_q, grad_k,
    n, heads, groups, count_stride, eps, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    d: tl.constexpr, e: tl.constexpr, phi: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Gradients of q and k (B, H, n, d), before phi, from those of the flows and of the output.

    Inside the chunk all gradients pass through P: dq = dP k and dk = dPᵀ q. Those that cross chunks are products with
    the sums.
    """
    dtype: tl.constexpr = q.dtype.element_ty
    head, batch, h, chunk, rows, exist, real = _location(padding, n, heads, groups, PADDED, C)
    channels = tl.arange(0, D)
    at = head * n + rows
    q_rows, k_rows = q + batch * qb + h * qh, k + batch * kb + h * kh
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    kv_sums += (head * (groups + 1) + chunk) * d * e
    reversed_kv_sums += (head * (groups + 1) + groups - 1 - chunk) * d * e
    grad_scores = tl.zeros((C, C), tl.float32)
    total_q = tl.zeros((C, D), tl.float32)
    total_k = tl.zeros((C, D), tl.float32)
    for start in range(0, e, E):
        columns = start + tl.arange(0, E)
        grad_tile = load_tile(grad_out, on, rows, columns, real, e)
        values = load_tile(v, vn, rows, columns, real, e)
        grad_scores = product(grad_tile, tl.trans(values), grad_scores, dtype)
        earlier = load_matrix(kv_sums, channels, columns, d, e)
        total_q = product(grad_tile, tl.trans(earlier), total_q, dtype)
        after = load_matrix(reversed_kv_sums, channels, columns, d, e)
        total_k = product(values, tl.trans(after), total_k, dtype)
    # Weights only now: v and the gradient of the output are then exact operands.
    competition = tl.load(competition + at, mask=exist, other=0.0)
    scale = tl.load(scale + at, mask=exist, other=0.0)
    grad_scores *= scale[:, None] * competition[None, :]
    total_q *= scale[:, None]
    total_k *= competition[:, None]
    tl.debug_barrier()  # keeps the compiler from loading what follows while all registers are taken

    count = tl.load(count + batch * count_stride + rows, mask=exist, other=1.0)
    # 0 at padding, whose flows are next to nothing: their reciprocals would outweigh all that is scaled with them.
    inverse_incoming = count / _replace_zero_by_one(tl.load(incoming + at, mask=real, other=1.0))
    inverse_outgoing = count / _replace_zero_by_one(tl.load(outgoing + at, mask=real, other=1.0))
    inverse_incoming, inverse_outgoing = tl.where(real, inverse_incoming, 0.0), tl.where(real, inverse_outgoing, 0.0)
    grad_in = tl.load(grad_incoming + at, mask=exist, other=0.0)
    grad_out_flow = tl.load(grad_outgoing + at, mask=exist, other=0.0)
    grad_in_hat = tl.load(grad_conserved_incoming + at, mask=exist, other=0.0)
    grad_out_hat = tl.load(grad_conserved_outgoing + at, mask=exist, other=0.0)
    row, column = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    # What a sink (row) gives a source (column) as gradient, and the reverse.
    to_sources = tl.where(column <= row, grad_in[:, None] + grad_in_hat[:, None] * inverse_outgoing[None, :], 0.0)
    to_sinks = tl.where(row <= column, grad_out_flow[None, :] + grad_out_hat[None, :] * inverse_incoming[:, None], 0.0)
    # As givers, the ε of the receivers in this chunk.
    total_q += eps * tl.sum(to_sinks, 1)[:, None]
    total_k += eps * tl.sum(to_sources, 0)[:, None]
    grad_scores = tl.where(column <= row, grad_scores, 0.0) + to_sources + to_sinks
    k = load_features(k_rows, kn, rows, channels, real, d, phi)
    total_q = product(grad_scores, k, total_q, dtype)
    q = load_features(q_rows, qn, rows, channels, real, d, phi)
    total_k = product(tl.trans(grad_scores), q, total_k, dtype)

    inside = channels < d
    of_k = (tl.num_programs(0).to(tl.int64) + tl.num_programs(0) // groups) * d
    before = (head * (groups + 1) + chunk) * d + channels
    after = (head * (groups + 1) + groups - 1 - chunk) * d + channels
    # As receivers: products with the sums of the givers, each with its ε.
    total_q += grad_in[:, None] * (tl.load(sums + of_k + before, mask=inside, other=0.0) + eps)[None, :]
    total_q += grad_in_hat[:, None] * (tl.load(conserved_sums + of_k + before, mask=inside, other=0.0) + eps)[None, :]
    total_k += grad_out_flow[:, None] * (tl.load(sums + before, mask=inside, other=0.0) + eps)[None, :]
    total_k += grad_out_hat[:, None] * (tl.load(conserved_sums + before, mask=inside, other=0.0) + eps)[None, :]
    # As givers: the sums of the receivers.
    total_q += tl.load(reversed_sums + of_k + after, mask=inside, other=0.0)[None, :]
    total_k += tl.load(reversed_sums + after, mask=inside, other=0.0)[None, :]
    hat_q = tl.load(reversed_conserved_sums + of_k + after, mask=inside, other=0.0)
    hat_k = tl.load(reversed_conserved_sums + after, mask=inside, other=0.0)
    total_q += inverse_incoming[:, None] * hat_q[None, :]
    total_k += inverse_outgoing[:, None] * hat_k[None, :]
    # Features are computed again: until here they would take registers that products need.
    q = load_features(q_rows, qn, rows, channels, real, d, phi)
    k = load_features(k_rows, kn, rows, channels, real, d, phi)
    store_tile(
        grad_q + head * n * d,
        d,
        rows,
        channels,
        exist,
        d,
        tl.where(real[:, None], total_q * feature_slope(q, phi), 0.0),
    )
    store_tile(
        grad_k + head * n * d,
        d,
        rows,
        channels,
        exist,
        d,
        tl.where(real[:, None], total_k * feature_slope(k, phi), 0.0),
    )
