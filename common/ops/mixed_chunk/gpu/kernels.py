"""Mixed chunk attention by Triton kernels, the device's side: one program per tile of R tokens of a chunk of one head.

Scores are divided by C, and products across chunks by D: C if causal, else each row's number of real tokens. The scores
of a tile of queries and a tile of keys are computed where they are needed, from q and k. They are never stored; their
gradients are, for that of a bias that is a matrix.

Arguments: ``x`` pointers of (B, H, n, c) with strides of batch, head and token, each row's real tokens first;
``lengths`` (B,), their number; ``divisors`` D (B,), float32; ``sums`` (B H, G, s, e) if causal, where slot g holds
Σ k_lin vᵀ of all chunks before chunk g (reversed, slot G - 1 - g that of all after it), else (B H, s, e), of all.
"""

import triton
import triton.language as tl

from ...shared.gpu.launch import with_warps
from ...shared.gpu.tiles import load_matrix, load_tile, product, store_matrix, store_tile

#: Whether ``gradients`` can add up along diagonals; Triton has the function for it since 3.3.
HAS_GATHER = hasattr(tl, "gather")


@triton.jit
def _location(lengths, program, heads, groups, tiles):
    """This program's head b H + h, b, h, chunk and tile, and the number of real tokens."""
    program = program.to(tl.int64)  # all offsets are of 64 bits: tensors pass 2³¹ elements
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
def _diagonals(x):
    """Sums of x (R, R) along its diagonals: of x[i, i - d], and of x[i, i - d + R], each for d from 0 to R - 1."""
    R: tl.constexpr = x.shape[0]
    row, distance = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    turned = x.gather((row - distance) & (R - 1), 1)  # of each row, the entry at each distance
    return tl.sum(tl.where(row >= distance, turned, 0.0), 0), tl.sum(tl.where(row < distance, turned, 0.0), 0)


@triton.jit
def _sum_address(sums, head, slot, groups, s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr):
    """The address of the sum that a chunk uses."""
    return sums + (head * groups + slot) * s * e if causal else sums + head * s * e


@with_warps(4)
@triton.jit
def chunk_sums(
    x, v, lengths, divisors, sums,
    heads, groups, shares, xb, xh, xn, vb, vh, vn,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, REVERSED: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Σ x vᵀ of k_lin and v, or, REVERSED, of q_lin / D and the gradient of the output, by ``shares`` programs a head.

    Each walks through its share of the chunks, 1 or all. If causal it writes its sum before each of them, else after
    the last one, (B H, shares, s, e).
    """
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, share, tile, length = _location(lengths, tl.program_id(0), heads, shares, 1)
    channels, columns = tl.arange(0, S), tl.program_id(1) * E + tl.arange(0, E)
    x += batch * xb + h * xh
    v += batch * vb + h * vh
    total = tl.zeros((S, E), tl.float32)
    divisor = tl.load(divisors + batch) if REVERSED else 1.0
    for step in range(0, groups // shares):
        slot = share * (groups // shares) + step
        chunk = slot
        if causal:  # the one before, or after, the chunk of the slot; the first slot has none
            chunk = groups - slot if REVERSED else slot - 1
        for tile in range(0, (C + R - 1) // R):
            slots, tokens, real = _rows(tile, chunk, length, C, R)
            real = real & (tokens >= 0)
            x_tile = load_tile(x, xn, tokens, channels, real, s)
            total = product(tl.trans(x_tile), load_tile(v, vn, tokens, columns, real, e), total, dtype)
        if causal:
            store_matrix(sums + (head * groups + slot) * s * e, channels, columns, s, e, total / divisor)
    if not causal:
        store_matrix(sums + (head * shares + share) * s * e, channels, columns, s, e, total / divisor)


@with_warps()
@triton.jit
def outputs(
    q_quad, k_quad, q_lin, v, bias, lengths, divisors, sums, out,
    n, heads, groups, tiles, bias_stride, qb, qh, qn, kb, kh, kn, lb, lh, ln, vb, vh, vn,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Both terms (B, H, n, e), zero at padding, which is after the real tokens."""
    dtype: tl.constexpr = v.dtype.element_ty
    head, batch, h, chunk, tile, length = _location(lengths, tl.program_id(0), heads, groups, tiles)
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


@triton.jit
def _as_keys(
    q_quad, k_quad, k_lin, v, grad_out, bias, sums, grad_k_quad, grad_k_lin, grad_v,
    n, chunk, tile, tiles, parts, length, qn, kn, ln, vn, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of k_quad, k_lin and v; ``sums`` is the one after the chunk."""
    dtype: tl.constexpr = v.dtype.element_ty
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    if LINEAR:
        grad = tl.zeros((R, S), tl.float32)
        for part in range(0, parts):
            columns = part * E + tl.arange(0, E)
            later = load_matrix(sums, channels, columns, s, e)
            values = load_tile(v, vn, tokens, columns, real, e)
            grad = product(values, tl.trans(later), grad, dtype)
        store_tile(grad_k_lin, s, tokens, channels, exist, s, grad)
    grad = tl.zeros((R, S), tl.float32)
    if LOCAL:
        k = load_tile(k_quad, kn, tokens, channels, real, s)
    for part in range(0, parts):
        columns = part * E + tl.arange(0, E)
        values = load_tile(v, vn, tokens, columns, real, e)
        grad_values = tl.zeros((R, E), tl.float32)
        if LINEAR:
            later = load_matrix(sums, channels, columns, s, e)
            grad_values = product(load_tile(k_lin, ln, tokens, channels, real, s), later, grad_values, dtype)
        if LOCAL:
            for other in range(tile if causal else 0, tiles):
                query_slots, queries, real_queries = _rows(other, chunk, length, C, R)
                q = load_tile(q_quad, qn, queries, channels, real_queries, s)
                grad_tile = load_tile(grad_out, on, queries, columns, real_queries, e)
                scores, visible = _scores(q, k, bias, query_slots, slots, real, C, causal, BIAS)
                grad_values = product(tl.trans(_weights(scores, visible, kernel)), grad_tile, grad_values, dtype)
                grad_scores = product(grad_tile, tl.trans(values), tl.zeros((R, R), tl.float32), dtype)
                grad_scores *= _slopes(scores, visible, kernel)
                grad = product(tl.trans(grad_scores), q, grad, dtype)
        store_tile(grad_v, e, tokens, columns, exist, e, grad_values)
    if LOCAL:
        store_tile(grad_k_quad, s, tokens, channels, exist, s, grad / C)


@triton.jit
def _as_queries(
    q_quad, k_quad, v, grad_out, bias, divisor, sums, grad_q_quad, grad_q_lin, grad_bias,
    n, chunk, tile, tiles, parts, size, length, qn, kn, vn, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, OF_BIAS: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of q_quad, q_lin and the bias; ``sums`` is the one before the chunk."""
    dtype: tl.constexpr = v.dtype.element_ty
    channels = tl.arange(0, S)
    slots, tokens, real = _rows(tile, chunk, length, C, R)
    exist = (slots < C) & (tokens < n)
    if LINEAR:
        grad = tl.zeros((R, S), tl.float32)
        for part in range(0, parts):
            columns = part * E + tl.arange(0, E)
            earlier = load_matrix(sums, channels, columns, s, e)
            grad_tile = load_tile(grad_out, on, tokens, columns, real, e)
            grad = product(grad_tile, tl.trans(earlier), grad, dtype)
        store_tile(grad_q_lin, s, tokens, channels, exist, s, grad / divisor)
    if LOCAL:
        q = load_tile(q_quad, qn, tokens, channels, real, s)
        grad = tl.zeros((R, S), tl.float32)
        beyond = tl.zeros((R,), tl.float32)  # along the diagonals that the next tile of keys continues
        for other in range(0, tile + 1 if causal else tiles):
            key_slots, keys, real_keys = _rows(other, chunk, length, C, R)
            grad_scores = tl.zeros((R, R), tl.float32)
            for part in range(0, parts):
                columns = part * E + tl.arange(0, E)
                grad_tile = load_tile(grad_out, on, tokens, columns, real, e)
                values = load_tile(v, vn, keys, columns, real_keys, e)
                grad_scores = product(grad_tile, tl.trans(values), grad_scores, dtype)
            k = load_tile(k_quad, kn, keys, channels, real_keys, s)
            scores, visible = _scores(q, k, bias, slots, key_slots, real_keys, C, causal, BIAS)
            grad_scores *= _slopes(scores, visible, kernel)
            grad = product(grad_scores, k, grad, dtype)
            if OF_BIAS == "distances":
                from_0, below_0 = _diagonals(grad_scores)
                tl.store(grad_bias + (tile - other) * R + tl.arange(0, R), from_0 + beyond)
                beyond = below_0
            elif OF_BIAS == "scores":
                at = grad_bias + slots[:, None] * size + key_slots[None, :]
                tl.store(at, grad_scores, mask=(slots < size)[:, None] & (key_slots < size)[None, :])
        if OF_BIAS == "distances" and not causal:
            tl.store(grad_bias + (tile - tiles) * R + tl.arange(0, R), beyond)
        store_tile(grad_q_quad, s, tokens, channels, exist, s, grad / C)


@with_warps()
@triton.jit
def gradients(
    q_quad, k_quad, k_lin, v, grad_out, bias, lengths, divisors, sums, reversed_sums, grad_q_quad, grad_k_quad,
    grad_q_lin, grad_k_lin, grad_v, grad_bias,
    n, heads, groups, tiles, parts, size, bias_stride, qb, qh, qn, kb, kh, kn, lb, lh, ln, vb, vh, vn, ob, oh, on,
    s: tl.constexpr, e: tl.constexpr, causal: tl.constexpr, kernel: tl.constexpr, BIAS: tl.constexpr,
    LOCAL: tl.constexpr, LINEAR: tl.constexpr, OF_BIAS: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Gradients of the five inputs; a tile of tokens has two programs, one as keys and values and one as queries.

    Also, for the host to add up, OF_BIAS "scores": those of the scores (B H, G, size, size), size = min(C, n); or
    OF_BIAS "distances": each program's sums of them for each distance of query and key, (B H, G, T, T R) from 0 on,
    or, not causal, (B H, G, T, 2 T R) from -T R on, where T = ``tiles``. What is never visible is not written.
    """
    role = tl.program_id(0) % 2
    head, batch, h, chunk, tile, length = _location(lengths, tl.program_id(0) // 2, heads, groups, tiles)
    q_quad += batch * qb + h * qh
    k_quad += batch * kb + h * kh
    v += batch * vb + h * vh
    grad_out += batch * ob + h * oh
    bias += h * bias_stride
    if role == 0:
        _as_keys(
            q_quad,
            k_quad,
            k_lin + batch * lb + h * lh,
            v,
            grad_out,
            bias,
            _sum_address(reversed_sums, head, groups - 1 - chunk, groups, s, e, causal),
            grad_k_quad + head * n * s,
            grad_k_lin + head * n * s,
            grad_v + head * n * e,
            n,
            chunk,
            tile,
            tiles,
            parts,
            length,
            qn,
            kn,
            ln,
            vn,
            on,
            s,
            e,
            causal,
            kernel,
            BIAS,
            LOCAL,
            LINEAR,
            C,
            R,
            S,
            E,
        )
    else:
        if OF_BIAS == "distances":
            lowest = 0 if causal else -tiles * R
            grad_bias += ((head * groups + chunk) * tiles + tile) * (tiles * R - lowest) - lowest
        elif OF_BIAS == "scores":
            grad_bias += (head * groups + chunk) * size * size
        _as_queries(
            q_quad,
            k_quad,
            v,
            grad_out,
            bias,
            tl.load(divisors + batch),
            _sum_address(sums, head, chunk, groups, s, e, causal),
            grad_q_quad + head * n * s,
            grad_q_lin + head * n * s,
            grad_bias,
            n,
            chunk,
            tile,
            tiles,
            parts,
            size,
            length,
            qn,
            kn,
            vn,
            on,
            s,
            e,
            causal,
            kernel,
            BIAS,
            LOCAL,
            LINEAR,
            OF_BIAS,
            C,
            R,
            S,
            E,
        )
