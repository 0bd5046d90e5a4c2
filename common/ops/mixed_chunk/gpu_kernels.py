"""Mixed chunk attention by Triton kernels, the device's side: one program per tile of R tokens of a chunk of one head.

Scores are divided by C, and products across chunks by D: C if causal, else each row's number of real tokens. The scores
of a tile of queries and a tile of keys are computed where they are needed, from q and k, and never stored except for
the gradient of a bias.

Arguments: ``x`` pointers of (B, H, n, c) with strides of batch, head and token, each row's real tokens first;
``lengths`` (B,), their number; ``divisors`` D (B,), float32; ``sums`` (B H, G + 1, s, e) if causal, where slot g holds
Σ k_lin vᵀ of all chunks before chunk g (reversed, slot G - 1 - g: behind it), else (B H, s, e), of all chunks.
"""

import triton
import triton.language as tl

from ..shared.gpu.launch import tuned
from ..shared.gpu.tiles import load_matrix, load_tile, product, store_tile


@triton.jit
def _location(lengths, n, heads, groups, tiles, C: tl.constexpr, R: tl.constexpr):
    """This program's head b H + h, b, h, chunk and tile, and the number of real tokens."""
    program = tl.program_id(0).to(tl.int64)  # all offsets are of 64 bits: tensors pass 2³¹ elements
    tile, program = (program % tiles).to(tl.int32), program // tiles
    head, chunk = program // groups, program % groups
    batch = head // heads
    return head, batch, head % heads, chunk, tile, tl.load(lengths + batch)


@triton.jit
def _rows(tile, chunk, length, C: tl.constexpr, R: tl.constexpr):
    """A tile's slots in the chunk, its tokens, and which of them are real."""
    slots = tile * R + tl.arange(0, R)
    tokens = chunk * C + slots
    return slots, tokens, (slots < C) & (tokens < length)


@triton.jit
def _scores(
    q,
    k,
    bias,
    query_slots,
    key_slots,
    real_keys,
    C: tl.constexpr,
    causal: tl.constexpr,
    BIAS: tl.constexpr,
):
    """q·k / C + bias of a tile, and which of the scores are visible: (R, R) each."""
    R: tl.constexpr = q.shape[0]
    scores = product(q, tl.trans(k), tl.zeros((R, R), tl.float32), q.dtype) / C
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
    """The kernel of the scores, 0 where they are not visible."""
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
def _weights_gradient(
    grad_out,
    on,
    queries,
    real_queries,
    v,
    vn,
    keys,
    real_keys,
    e: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
):
    """The gradient of the weights that some queries give some keys, grad_out vᵀ (R, R)."""
    dtype: tl.constexpr = v.dtype.element_ty
    grad = tl.zeros((R, R), tl.float32)
    for start in range(0, e, E):
        columns = start + tl.arange(0, E)
        grad_out_tile = load_tile(grad_out, on, queries, columns, real_queries, e)
        values = load_tile(v, vn, keys, columns, real_keys, e)
        grad = product(grad_out_tile, tl.trans(values), grad, dtype)
    return grad


@triton.jit
def _sum_address(sums, head, slot, groups, s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr):
    """The address of the sum that a chunk uses."""
    return sums + (head * (groups + 1) + slot) * s * e if causal else sums + head * s * e


@tuned(["s", "e", "C", "REVERSED"], warps=(8, 4))
@triton.jit
def chunk_sums(
    x,
    v,
    lengths,
    divisors,
    sums,
    n,
    heads,
    groups,
    xb,
    xh,
    xn,
    vb,
    vh,
    vn,
    s: tl.constexpr,
    e: tl.constexpr,
    REVERSED: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Σ x vᵀ of each chunk: of k_lin and v, or, REVERSED, of q_lin / D and the gradient of the output."""
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, n, heads, groups, 1, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    x += batch * xb + h * xh
    v += batch * vb + h * vh
    total = tl.zeros((S, E), tl.float32)
    for tile in range(0, (C + R - 1) // R):
        slots, tokens, real = _rows(tile, chunk, length, C, R)
        x_tile = load_tile(x, xn, tokens, channels, real, s)
        total = product(tl.trans(x_tile), load_tile(v, vn, tokens, columns, real, e), total, dtype)
    slot = chunk + 1
    if REVERSED:
        slot = groups - chunk
        total /= tl.load(divisors + batch)
    sums += (head * (groups + 1) + slot) * s * e + channels[:, None] * e + columns[None, :]
    tl.store(sums, total, mask=(channels < s)[:, None] & (columns < e)[None, :])


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def outputs(
    q_quad,
    k_quad,
    q_lin,
    v,
    bias,
    lengths,
    divisors,
    sums,
    out,
    n,
    heads,
    groups,
    tiles,
    bias_stride,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    lb,
    lh,
    ln,
    vb,
    vh,
    vn,
    s: tl.constexpr,
    e: tl.constexpr,
    causal: tl.constexpr,
    kernel: tl.constexpr,
    BIAS: tl.constexpr,
    LOCAL: tl.constexpr,
    LINEAR: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Both terms (B, H, n, e), zero behind the real tokens."""
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, n, heads, groups, tiles, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    result = tl.zeros((R, E), tl.float32)
    if LINEAR:
        earlier = load_matrix(_sum_address(sums, head, chunk, groups, s, e, causal), channels, columns, s, e)
        q_tile = load_tile(q_lin + batch * lb + h * lh, ln, tokens, channels, real, s)
        result = product(q_tile, earlier, result, dtype) / tl.load(divisors + batch)
    if LOCAL:
        q = load_tile(q_quad + batch * qb + h * qh, qn, tokens, channels, real, s)
        for other in range(0, tile + 1 if causal else tiles):
            key_slots, keys, real_keys = _rows(other, chunk, length, C, R)
            k = load_tile(k_quad + batch * kb + h * kh, kn, keys, channels, real_keys, s)
            values = load_tile(v + batch * vb + h * vh, vn, keys, columns, real_keys, e)
            scores, visible = _scores(q, k, bias + h * bias_stride, slots, key_slots, real_keys, C, causal, BIAS)
            result = product(_weights(scores, visible, kernel), values, result, dtype)
    exist = (slots < C) & (tokens < n)
    store_tile(out + head * n * e, e, tokens, columns, exist, e, tl.where(real[:, None], result, 0.0))


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def queries_backward(
    q_quad,
    k_quad,
    v,
    grad_out,
    bias,
    lengths,
    divisors,
    sums,
    grad_q_quad,
    grad_q_lin,
    grad_scores,
    n,
    heads,
    groups,
    tiles,
    size,
    bias_stride,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    ob,
    oh,
    on,
    s: tl.constexpr,
    e: tl.constexpr,
    causal: tl.constexpr,
    kernel: tl.constexpr,
    BIAS: tl.constexpr,
    LOCAL: tl.constexpr,
    LINEAR: tl.constexpr,
    OF_BIAS: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Gradients of q_quad and q_lin (B, H, n, s) and, OF_BIAS, of the scores (B H, G, size, size), size = min(C, n)."""
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, n, heads, groups, tiles, C, R)
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    if LINEAR:
        sums = _sum_address(sums, head, chunk, groups, s, e, causal)
        grad = tl.zeros((R, S), tl.float32)
        for start in range(0, e, E):
            columns = start + tl.arange(0, E)
            earlier = load_matrix(sums, channels, columns, s, e)
            grad_out_tile = load_tile(grad_out, on, tokens, columns, real, e)
            grad = product(grad_out_tile, tl.trans(earlier), grad, dtype)
        store_tile(grad_q_lin + head * n * s, s, tokens, channels, exist, s, grad / tl.load(divisors + batch))
    if LOCAL:
        q = load_tile(q_quad + batch * qb + h * qh, qn, tokens, channels, real, s)
        grad = tl.zeros((R, S), tl.float32)
        for other in range(0, tile + 1 if causal else tiles):
            key_slots, keys, real_keys = _rows(other, chunk, length, C, R)
            k = load_tile(k_quad + batch * kb + h * kh, kn, keys, channels, real_keys, s)
            scores, visible = _scores(q, k, bias + h * bias_stride, slots, key_slots, real_keys, C, causal, BIAS)
            grad_tile = _weights_gradient(grad_out, on, tokens, real, v, vn, keys, real_keys, e, R, E)
            grad_tile *= _slopes(scores, visible, kernel)
            grad = product(grad_tile, k, grad, dtype)
            if OF_BIAS:
                at = grad_scores + (head * groups + chunk) * size * size + slots[:, None] * size + key_slots[None, :]
                tl.store(at, grad_tile, mask=(slots < size)[:, None] & (key_slots < size)[None, :])
        store_tile(grad_q_quad + head * n * s, s, tokens, channels, exist, s, grad / C)


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def keys_backward(
    q_quad,
    k_quad,
    v,
    grad_out,
    bias,
    lengths,
    reversed_sums,
    grad_k_quad,
    grad_k_lin,
    n,
    heads,
    groups,
    tiles,
    bias_stride,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    vb,
    vh,
    vn,
    ob,
    oh,
    on,
    s: tl.constexpr,
    e: tl.constexpr,
    causal: tl.constexpr,
    kernel: tl.constexpr,
    BIAS: tl.constexpr,
    LOCAL: tl.constexpr,
    LINEAR: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Gradients of k_quad and k_lin (B, H, n, s)."""
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, n, heads, groups, tiles, C, R)
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    if LINEAR:
        reversed_sums = _sum_address(reversed_sums, head, groups - 1 - chunk, groups, s, e, causal)
        grad = tl.zeros((R, S), tl.float32)
        for start in range(0, e, E):
            columns = start + tl.arange(0, E)
            after = load_matrix(reversed_sums, channels, columns, s, e)
            values = load_tile(v, vn, tokens, columns, real, e)
            grad = product(values, tl.trans(after), grad, dtype)
        store_tile(grad_k_lin + head * n * s, s, tokens, channels, exist, s, grad)
    if LOCAL:
        k = load_tile(k_quad + batch * kb + h * kh, kn, tokens, channels, real, s)
        grad = tl.zeros((R, S), tl.float32)
        for other in range(tile if causal else 0, tiles):
            query_slots, queries, real_queries = _rows(other, chunk, length, C, R)
            q = load_tile(q_quad + batch * qb + h * qh, qn, queries, channels, real_queries, s)
            scores, visible = _scores(q, k, bias + h * bias_stride, query_slots, slots, real, C, causal, BIAS)
            grad_tile = _weights_gradient(grad_out, on, queries, real_queries, v, vn, tokens, real, e, R, E)
            grad_tile *= _slopes(scores, visible, kernel)
            grad = product(tl.trans(grad_tile), q, grad, dtype)
        store_tile(grad_k_quad + head * n * s, s, tokens, channels, exist, s, grad / C)


@tuned(["s", "e", "C", "causal", "kernel", "LOCAL", "LINEAR"])
@triton.jit
def values_backward(
    q_quad,
    k_quad,
    k_lin,
    grad_out,
    bias,
    lengths,
    reversed_sums,
    grad_v,
    n,
    heads,
    groups,
    tiles,
    bias_stride,
    qb,
    qh,
    qn,
    kb,
    kh,
    kn,
    lb,
    lh,
    ln,
    ob,
    oh,
    on,
    s: tl.constexpr,
    e: tl.constexpr,
    causal: tl.constexpr,
    kernel: tl.constexpr,
    BIAS: tl.constexpr,
    LOCAL: tl.constexpr,
    LINEAR: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Gradient of v (B, H, n, e)."""
    dtype: tl.constexpr = grad_out.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, n, heads, groups, tiles, C, R)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    result = tl.zeros((R, E), tl.float32)
    if LINEAR:
        reversed_sums = _sum_address(reversed_sums, head, groups - 1 - chunk, groups, s, e, causal)
        after = load_matrix(reversed_sums, channels, columns, s, e)
        keys = load_tile(k_lin + batch * lb + h * lh, ln, tokens, channels, real, s)
        result = product(keys, after, result, dtype)
    if LOCAL:
        k = load_tile(k_quad + batch * kb + h * kh, kn, tokens, channels, real, s)
        for other in range(tile if causal else 0, tiles):
            query_slots, queries, real_queries = _rows(other, chunk, length, C, R)
            q = load_tile(q_quad + batch * qb + h * qh, qn, queries, channels, real_queries, s)
            grad_out_tile = load_tile(grad_out + batch * ob + h * oh, on, queries, columns, real_queries, e)
            scores, visible = _scores(q, k, bias + h * bias_stride, query_slots, slots, real, C, causal, BIAS)
            weights = _weights(scores, visible, kernel)
            result = product(tl.trans(weights), grad_out_tile, result, dtype)
    exist = (slots < C) & (tokens < n)
    store_tile(grad_v + head * n * e, e, tokens, columns, exist, e, result)
