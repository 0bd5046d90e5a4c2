"""Mixed chunk attention on the device: one program per block of R tokens of a chunk of one head.

Legend as in ``mixed_chunk_attention``; scores are divided by C, and products across chunks by D: C if causal, else each
row's number of real tokens. The scores of a block of queries and a block of keys are made where they are needed, from q
and k, and never stored but for the gradient of a bias.

Arguments: ``x`` pointers of (B, H, n, c) with strides of batch, head and token, each row's real tokens first;
``lengths`` (B,), their number; ``divisors`` D (B,), float32; ``sums`` (B H, G + 1, s, e) if causal, where slot g holds
Σ k_lin vᵀ of all chunks before chunk g (reversed, slot G - 1 - g: behind it), else (B H, s, e), of all chunks.
"""

import triton
import triton.language as tl

from .launch import tuned
from .tiles import load_matrix, load_tile, store_tile


@triton.jit
def _place(lengths, n, heads, groups, blocks, C: tl.constexpr, R: tl.constexpr):
    """Of this program: head b H + h, b, h, chunk, block, and the number of real tokens."""
    program = tl.program_id(0).to(tl.int64)  # all offsets are of 64 bits: tensors pass 2³¹ elements
    block, program = (program % blocks).to(tl.int32), program // blocks
    head, chunk = program // groups, program % groups
    batch = head // heads
    return head, batch, head % heads, chunk, block, tl.load(lengths + batch)


@triton.jit
def _rows(block, chunk, length, C: tl.constexpr, R: tl.constexpr):
    """Of a block: its slots in the chunk, its tokens, and which of them are real."""
    slots = block * R + tl.arange(0, R)
    tokens = chunk * C + slots
    return slots, tokens, (slots < C) & (tokens < length)


@triton.jit
def _scores(
    q, k, bias, query_slots, key_slots, real_keys,
    C: tl.constexpr, causal: tl.constexpr, BIAS: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """q·k / C + bias of a block, and which of it is visible: (R, R) each."""
    scores = tl.dot(q, tl.trans(k), input_precision=precision) / C
    visible = (query_slots < C)[:, None] & real_keys[None, :]
    if causal:
        visible = visible & (key_slots[None, :] <= query_slots[:, None])
    if BIAS == "vector":
        scores += tl.load(bias + query_slots[:, None] - key_slots[None, :] + (C - 1), mask=visible, other=0.0)
    elif BIAS == "matrix":
        scores += tl.load(bias + query_slots[:, None] * C + key_slots[None, :], mask=visible, other=0.0)
    return scores, visible


@triton.jit
def _weights(scores, visible, kernel: tl.constexpr):
    if kernel == "relu2":
        weights = tl.where(scores < 0.0, 0.0, scores)  # not maximum, which need not hand on a NaN
        weights = weights * weights
    else:
        weights = 0.5 * (1.0 + tl.math.erf((scores - 0.7071067811865476) * 2.5066282746310002))
    return tl.where(visible, weights, 0.0)


@triton.jit
def _slopes(scores, visible, kernel: tl.constexpr):
    """The derivative of ``_weights``."""
    if kernel == "relu2":
        slopes = 2.0 * tl.where(scores < 0.0, 0.0, scores)
    else:
        z = (scores - 0.7071067811865476) * 2.5066282746310002
        slopes = 1.4142135623730951 * tl.exp(-z * z)
    return tl.where(visible, slopes, 0.0)


@triton.jit
def _of_weights(
    d_out, on, queries, real_queries, v, vn, keys, real_keys,
    e: tl.constexpr, R: tl.constexpr, E: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights that some queries give some keys, d_out vᵀ (R, R)."""
    grad = tl.zeros((R, R), tl.float32)
    for start in range(0, e, E):
        columns = start + tl.arange(0, E)
        given = load_tile(d_out, on, queries, columns, real_queries, e)
        values = load_tile(v, vn, keys, columns, real_keys, e)
        grad = tl.dot(given, tl.trans(values), grad, input_precision=precision)
    return grad


@triton.jit
def _sums_of(sums, head, slot, groups, s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr):
    """Where the sum a chunk uses begins."""
    return sums + (head * (groups + 1) + slot) * s * e if causal else sums + head * s * e


@tuned(["s", "e", "C", "REVERSED"])
@triton.jit
def chunk_sums(
    x, v, lengths, divisors, sums, n, heads, groups, xb, xh, xn, vb, vh, vn,
    s: tl.constexpr, e: tl.constexpr, precision: tl.constexpr, REVERSED: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Σ x vᵀ of each chunk: of k_lin and v, or, REVERSED, of q_lin / D and the gradient of the output."""
    head, batch, h, chunk, block, length = _place(lengths, n, heads, groups, 1, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    x += batch * xb + h * xh
    v += batch * vb + h * vh
    total = tl.zeros((S, E), tl.float32)
    for block in range(0, (C + R - 1) // R):
        slots, tokens, real = _rows(block, chunk, length, C, R)
        given = load_tile(x, xn, tokens, channels, real, s)
        total = tl.dot(tl.trans(given), load_tile(v, vn, tokens, columns, real, e), total, input_precision=precision)
    slot = chunk + 1
    if REVERSED:
        slot = groups - chunk
        total /= tl.load(divisors + batch)
    sums += (head * (groups + 1) + slot) * s * e + channels[:, None] * e + columns[None, :]
    tl.store(sums, total, mask=(channels < s)[:, None] & (columns < e)[None, :])


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def outputs(
    q_quad, k_quad, q_lin, v, bias, lengths, divisors, sums, out, n, heads, groups, blocks, bias_stride,
    qb, qh, qn, kb, kh, kn, lb, lh, ln, vb, vh, vn,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, precision: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Both terms (B, H, n, e), zero behind the real tokens."""
    head, batch, h, chunk, block, length = _place(lengths, n, heads, groups, blocks, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    slots, tokens, real = _rows(block, chunk, length, C, R)
    result = tl.zeros((R, E), tl.float32)
    if LINEAR:
        earlier = load_matrix(_sums_of(sums, head, chunk, groups, s, e, causal), channels, columns, s, e)
        given = load_tile(q_lin + batch * lb + h * lh, ln, tokens, channels, real, s)
        result = tl.dot(given, earlier, result, input_precision=precision) / tl.load(divisors + batch)
    if LOCAL:
        q = load_tile(q_quad + batch * qb + h * qh, qn, tokens, channels, real, s)
        for other in range(0, block + 1 if causal else blocks):
            key_slots, keys, real_keys = _rows(other, chunk, length, C, R)
            k = load_tile(k_quad + batch * kb + h * kh, kn, keys, channels, real_keys, s)
            values = load_tile(v + batch * vb + h * vh, vn, keys, columns, real_keys, e)
            scores, visible = _scores(
                q, k, bias + h * bias_stride, slots, key_slots, real_keys, C, causal, BIAS, precision
            )
            result = tl.dot(_weights(scores, visible, kernel), values, result, input_precision=precision)
    exist = (slots < C) & (tokens < n)
    store_tile(out + head * n * e, e, tokens, columns, exist, e, tl.where(real[:, None], result, 0.0))


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def queries_backward(
    q_quad, k_quad, v, d_out, bias, lengths, divisors, sums, d_q_quad, d_q_lin, d_scores,
    n, heads, groups, blocks, size, bias_stride, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, OF_BIAS: tl.constexpr, precision: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of q_quad and q_lin (B, H, n, s) and, OF_BIAS, of the scores (B H, G, size, size), size = min(C, n)."""
    head, batch, h, chunk, block, length = _place(lengths, n, heads, groups, blocks, C, R)
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(block, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    v += batch * vb + h * vh
    d_out += batch * ob + h * oh
    if LINEAR:
        sums = _sums_of(sums, head, chunk, groups, s, e, causal)
        grad = tl.zeros((R, S), tl.float32)
        for start in range(0, e, E):
            columns = start + tl.arange(0, E)
            earlier = load_matrix(sums, channels, columns, s, e)
            given = load_tile(d_out, on, tokens, columns, real, e)
            grad = tl.dot(given, tl.trans(earlier), grad, input_precision=precision)
        store_tile(d_q_lin + head * n * s, s, tokens, channels, exist, s, grad / tl.load(divisors + batch))
    if LOCAL:
        q = load_tile(q_quad + batch * qb + h * qh, qn, tokens, channels, real, s)
        grad = tl.zeros((R, S), tl.float32)
        for other in range(0, block + 1 if causal else blocks):
            key_slots, keys, real_keys = _rows(other, chunk, length, C, R)
            k = load_tile(k_quad + batch * kb + h * kh, kn, keys, channels, real_keys, s)
            scores, visible = _scores(
                q, k, bias + h * bias_stride, slots, key_slots, real_keys, C, causal, BIAS, precision
            )
            of_scores = _of_weights(d_out, on, tokens, real, v, vn, keys, real_keys, e, R, E, precision)
            of_scores *= _slopes(scores, visible, kernel)
            grad = tl.dot(of_scores, k, grad, input_precision=precision)
            if OF_BIAS:
                at = d_scores + (head * groups + chunk) * size * size + slots[:, None] * size + key_slots[None, :]
                tl.store(at, of_scores, mask=(slots < size)[:, None] & (key_slots < size)[None, :])
        store_tile(d_q_quad + head * n * s, s, tokens, channels, exist, s, grad / C)


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def keys_backward(
    q_quad, k_quad, v, d_out, bias, lengths, reversed_sums, d_k_quad, d_k_lin,
    n, heads, groups, blocks, bias_stride, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, precision: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of k_quad and k_lin (B, H, n, s)."""
    head, batch, h, chunk, block, length = _place(lengths, n, heads, groups, blocks, C, R)
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(block, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    v += batch * vb + h * vh
    d_out += batch * ob + h * oh
    if LINEAR:
        reversed_sums = _sums_of(reversed_sums, head, groups - 1 - chunk, groups, s, e, causal)
        grad = tl.zeros((R, S), tl.float32)
        for start in range(0, e, E):
            columns = start + tl.arange(0, E)
            later = load_matrix(reversed_sums, channels, columns, s, e)
            values = load_tile(v, vn, tokens, columns, real, e)
            grad = tl.dot(values, tl.trans(later), grad, input_precision=precision)
        store_tile(d_k_lin + head * n * s, s, tokens, channels, exist, s, grad)
    if LOCAL:
        k = load_tile(k_quad + batch * kb + h * kh, kn, tokens, channels, real, s)
        grad = tl.zeros((R, S), tl.float32)
        for other in range(block if causal else 0, blocks):
            query_slots, queries, real_queries = _rows(other, chunk, length, C, R)
            q = load_tile(q_quad + batch * qb + h * qh, qn, queries, channels, real_queries, s)
            scores, visible = _scores(
                q, k, bias + h * bias_stride, query_slots, slots, real, C, causal, BIAS, precision
            )
            of_scores = _of_weights(d_out, on, queries, real_queries, v, vn, tokens, real, e, R, E, precision)
            of_scores *= _slopes(scores, visible, kernel)
            grad = tl.dot(tl.trans(of_scores), q, grad, input_precision=precision)
        store_tile(d_k_quad + head * n * s, s, tokens, channels, exist, s, grad / C)


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def values_backward(
    q_quad, k_quad, k_lin, d_out, bias, lengths, reversed_sums, d_v, n, heads, groups, blocks, bias_stride,
    qb, qh, qn, kb, kh, kn, lb, lh, ln, ob, oh, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, precision: tl.constexpr,
    C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradient of v (B, H, n, e)."""
    head, batch, h, chunk, block, length = _place(lengths, n, heads, groups, blocks, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    slots, tokens, real = _rows(block, chunk, length, C, R)
    result = tl.zeros((R, E), tl.float32)
    if LINEAR:
        reversed_sums = _sums_of(reversed_sums, head, groups - 1 - chunk, groups, s, e, causal)
        later = load_matrix(reversed_sums, channels, columns, s, e)
        keys = load_tile(k_lin + batch * lb + h * lh, ln, tokens, channels, real, s)
        result = tl.dot(keys, later, result, input_precision=precision)
    if LOCAL:
        k = load_tile(k_quad + batch * kb + h * kh, kn, tokens, channels, real, s)
        for other in range(block if causal else 0, blocks):
            query_slots, queries, real_queries = _rows(other, chunk, length, C, R)
            q = load_tile(q_quad + batch * qb + h * qh, qn, queries, channels, real_queries, s)
            given = load_tile(d_out + batch * ob + h * oh, on, queries, columns, real_queries, e)
            scores, visible = _scores(
                q, k, bias + h * bias_stride, query_slots, slots, real, C, causal, BIAS, precision
            )
            weights = _weights(scores, visible, kernel)
            result = tl.dot(tl.trans(weights), given, result, input_precision=precision)
    exist = (slots < C) & (tokens < n)
    store_tile(d_v + head * n * e, e, tokens, columns, exist, e, result)
