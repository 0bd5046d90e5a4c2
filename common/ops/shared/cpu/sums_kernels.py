"""Causal sums that may decay, as loops over tokens: S_t = diag(a_t) S_(t-1) + k_t v_tᵀ and o_t = q_t S_t.

With weights, also z_t = a_t z_(t-1) + k_t and w_t = q_t·z_t. Legend: H heads, n tokens, f features of q and k, e
channels of v; S (f, e), z (f). Tensors are addresses and strides as in ``memory``, 0 for one that is not there.
"""

from . import fours
from .compiler import inlined, kernel
from .memory import array, exp, number, row

#: Tokens of a tile: the backward pass keeps S before each tile, and before each four tokens of one tile.
TILE = 64
_PER_TILE = TILE // 4


@inlined
def read_weights(z, D, Q, K, P, w, like):
    """The sums of weights w (4) of four tokens; ``read_and_add`` for z."""
    w0 = w1 = w2 = w3 = number(0, like)
    for i in range(len(z)):
        x = z[i]
        w0 += Q[0, i] * x
        w1 += Q[1, i] * x
        w2 += Q[2, i] * x
        w3 += Q[3, i] * x
        z[i] = D[i] * x + (K[0, i] + K[1, i] + K[2, i] + K[3, i])
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    w[0] = w0 + p00
    w[1] = w1 + (p10 + p11)
    w[2] = w2 + (p20 + p21 + p22)
    w[3] = w3 + (p30 + p31 + p32 + p33)


@inlined
def add_to_weights(z, D, K):
    """``add`` for z."""
    for i in range(len(z)):
        z[i] = D[i] * z[i] + (K[0, i] + K[1, i] + K[2, i] + K[3, i])


@inlined
def weights_back(z, grad_z, D, Q, gw, X, Y, same):
    """``add_back`` for z and the gradients gw of four weights; adds to X, Y and ``same``."""
    g0, g1, g2, g3 = gw
    for i in range(len(z)):
        a, b = z[i], grad_z[i]
        X[0, i] += a * g0
        X[1, i] += a * g1
        X[2, i] += a * g2
        X[3, i] += a * g3
        for r in range(4):
            Y[r, i] += b
        same[i] += a * b
        grad_z[i] = D[i] * b + (Q[0, i] * g0 + Q[1, i] * g1 + Q[2, i] * g2 + Q[3, i] * g3)


@kernel
def forward(first, last, sizes, q, k, v, log_decay, kind, before, after, out, weights, normalise, eps, work):
    """The outputs of heads ``first`` to ``last``, and the sums after the last token.

    ``before`` and ``after`` are S and z; ``weights`` (B, H, n) is 0 without weights. With ``normalise`` the outputs are
    divided by w + ``eps``. ``work`` is for ``forward_work`` numbers.
    """
    H, n, f, e = sizes
    S, z, D = array(work, 0, (f, e), eps), array(work, f * e, f, eps), array(work, f * (e + 1), f, eps)
    features, channels = array(work, f * (e + 2), (5, 4, f), eps), array(work, f * (e + 22), (2, 4, e), eps)
    Q, K, A, queries, keys = features[0], features[1], features[2], features[3], features[4]
    V, O, w = channels[0], channels[1], array(work, f * (e + 22) + 8 * e, 4, eps)
    for bh in range(first, last):
        b, h = bh // H, bh % H
        fours.load_sums(S, before[0], bh, eps)
        fours.load_vector(z, before[1], bh, eps)
        for t in range(0, n, 4):
            tokens = min(4, n - t)
            fours.load(Q, q, b, h, t, tokens, eps)
            fours.load(K, k, b, h, t, tokens, eps)
            fours.load(V, v, b, h, t, tokens, eps)
            fours.load_gates(A, log_decay, kind, b, h, t, tokens, eps)
            fours.decay(A, Q, K, queries, keys, D)
            P = fours.scores(A, Q, K, eps)
            fours.weigh(P, V, O)
            fours.read_and_add(S, D, queries, keys, V, O)
            if weights != 0:
                read_weights(z, D, queries, keys, P, w, eps)
                for r in range(tokens):
                    array(weights, bh * n + t + r, 1, eps)[0] = w[r]
                    if normalise:
                        fours.scale(O[r], number(1, eps) / (w[r] + eps))
            fours.store(O, out, b, h, t, tokens, eps)
        fours.store_sums(S, after[0], bh, eps)
        fours.store_vector(z, after[1], bh, eps)


@kernel
def step(first, last, sizes, q, k, v, log_decay, kind, before, after, out, weights, normalise, eps):
    """``forward`` of one token, without work: S is read and written once."""
    H, _, f, e = sizes
    one = number(1, eps)
    for bh in range(first, last):
        b, h = bh // H, bh % H
        queries, keys, values = row(q, b, h, 0, f, eps), row(k, b, h, 0, f, eps), row(v, b, h, 0, e, eps)
        gates = row(log_decay, b, h, 0, f if kind == fours.CHANNEL_GATE else 1, eps)
        o, w = row(out, b, h, 0, e, eps), number(0, eps)
        fours.fill(o, number(0, eps))
        a = exp(gates[0]) if kind == fours.HEAD_GATE else one
        for i in range(f):
            if kind == fours.CHANNEL_GATE:
                a = exp(gates[i])
            s, new = array(before[0], (bh * f + i) * e, e, eps), array(after[0], (bh * f + i) * e, e, eps)
            x, y = keys[i], queries[i]
            for j in range(e):
                new[j] = a * s[j] + x * values[j]
                o[j] += y * new[j]
            if weights != 0:
                total = a * array(before[1], bh * f + i, 1, eps)[0] + x
                array(after[1], bh * f + i, 1, eps)[0] = total
                w += y * total
        if weights != 0:
            array(weights, bh, 1, eps)[0] = w
            if normalise:
                fours.scale(o, one / (w + eps))


@inlined
def load_grads(G, gw, grad_out, grad_weights, out, weights, b, h, t, tokens, bh, n, normalise, eps):
    """Gradients G (4, e) of four sums of values and gw (4) of four sums of weights, from those of the results."""
    zero = number(0, eps)
    fours.load(G, grad_out, b, h, t, tokens, eps)
    for r in range(4):
        gw[r] = zero
        if r < tokens and grad_weights != 0:
            gw[r] = array(grad_weights, bh * n + t + r, 1, eps)[0]
        if r < tokens and normalise:
            factor = number(1, eps) / (array(weights, bh * n + t + r, 1, eps)[0] + eps)
            o, g, total = row(out, b, h, t + r, G.shape[1], eps), G[r], zero
            for j in range(len(o)):
                g[j] *= factor
                total += g[j] * o[j]
            gw[r] -= total


@inlined
def grad_tokens(A, Q, K, X, Y, same, D, T, grad_q, grad_k, grad_a):
    """Gradients (4, f) of four queries, keys and log_decays.

    X, Y, ``same`` are those of ``add_back``, T the products of gradients and values. Every term of ``grad_a`` is what
    passes across a token, and no difference of others, which would lose what a closed gate lets through.
    """
    t00, t10, t11, t20, t21, t22, t30, t31, t32, t33 = T
    for i in range(len(D)):
        a0, a1, a2, a3 = A[0, i], A[1, i], A[2, i], A[3, i]
        q0, q1, q2, q3, k0, k1, k2, k3 = Q[0, i], Q[1, i], Q[2, i], Q[3, i], K[0, i], K[1, i], K[2, i], K[3, i]
        a12, a23 = a1 * a2, a2 * a3
        x0, x1, x2, x3 = X[0, i] * a0, X[1, i] * (a0 * a1), X[2, i] * (a0 * a12), X[3, i] * (a0 * a1 * a23)
        y0, y1, y2, y3 = Y[0, i] * (a1 * a23), Y[1, i] * a23, Y[2, i] * a3, Y[3, i]
        u10, u21, u32, u20, u31, u30 = t10 * a1, t21 * a2, t32 * a3, t20 * a12, t31 * a23, t30 * (a1 * a23)
        grad_q[0, i] = x0 + t00 * k0
        grad_q[1, i] = x1 + u10 * k0 + t11 * k1
        grad_q[2, i] = x2 + u20 * k0 + u21 * k1 + t22 * k2
        grad_q[3, i] = x3 + u30 * k0 + u31 * k1 + u32 * k2 + t33 * k3
        grad_k[0, i] = y0 + t00 * q0 + u10 * q1 + u20 * q2 + u30 * q3
        grad_k[1, i] = y1 + t11 * q1 + u21 * q2 + u31 * q3
        grad_k[2, i] = y2 + t22 * q2 + u32 * q3
        grad_k[3, i] = y3 + t33 * q3
        # Of factor r: from before the four tokens to queries r..3, to after them, and from keys 0..r-1.
        u10, u21, u32, u20 = u10 * q1 * k0, u21 * q2 * k1, u32 * q3 * k2, u20 * q2 * k0
        u31, u30 = u31 * q3 * k1, u30 * q3 * k0
        x0, x1, x2, x3 = q0 * x0, q1 * x1, q2 * x2, q3 * x3
        y0, y1, y2 = k0 * y0, k1 * y1, k2 * y2
        across = D[i] * same[i] + x3
        grad_a[3, i] = across + (u30 + u31 + u32) + (y0 + y1 + y2)
        grad_a[2, i] = across + x2 + (u20 + u21 + u30 + u31) + (y0 + y1)
        grad_a[1, i] = across + x2 + x1 + (u10 + u20 + u30) + y0
        grad_a[0, i] = across + x2 + x1 + x0


@kernel
def backward(
    first, last, sizes, q, k, v, log_decay, kind, before, out, weights, normalise,
    grad_out, grad_weights, grad_after, grad_q, grad_k, grad_v, grad_decay, grad_before, eps, work,
):  # fmt: skip
    """Gradients of all inputs of ``forward``, heads ``first`` to ``last``; ``work`` is for ``backward_work`` numbers.

    ``grad_decay`` is 0 if it is not wanted, ``grad_weights`` and ``grad_after`` are where the results have none.
    """
    H, n, f, e = sizes
    tiles, size = (n + TILE - 1) // TILE, f * (e + 1)
    kept = array(work, 0, (tiles + _PER_TILE, size), eps)
    sums = array(work, size * (tiles + _PER_TILE), (2, size), eps)
    at = size * (tiles + _PER_TILE + 2)
    vectors, features = array(work, at, (2, f), eps), array(work, at + 2 * f, (8, 4, f), eps)
    channels, gw = array(work, at + 34 * f, (3, 4, e), eps), array(work, at + 34 * f + 12 * e, 4, eps)
    D, same, now, grad = vectors[0], vectors[1], sums[0], sums[1]
    S, z, grad_S, grad_z = now[: f * e].reshape(f, e), now[f * e :], grad[: f * e].reshape(f, e), grad[f * e :]
    Q, K, A, queries, keys = features[0], features[1], features[2], features[3], features[4]
    X, Y, grad_A, V, G, grad_V = features[5], features[6], features[7], channels[0], channels[1], channels[2]
    for bh in range(first, last):
        b, h = bh // H, bh % H
        fours.load_sums(S, before[0], bh, eps)
        fours.load_vector(z, before[1], bh, eps)
        for tile in range(tiles):
            fours.copy(kept[tile], now)
            if tile < tiles - 1:
                for t in range(tile * TILE, (tile + 1) * TILE, 4):
                    fours.load(K, k, b, h, t, 4, eps)
                    fours.load(V, v, b, h, t, 4, eps)
                    fours.load_gates(A, log_decay, kind, b, h, t, 4, eps)
                    fours.decay(A, K, K, queries, keys, D)
                    fours.add(S, D, keys, V)
                    add_to_weights(z, D, keys)
        fours.load_sums(grad_S, grad_after[0], bh, eps)
        fours.load_vector(grad_z, grad_after[1], bh, eps)
        for tile in range(tiles - 1, -1, -1):
            begin, end = tile * TILE, min((tile + 1) * TILE, n)
            fours.copy(now, kept[tile])
            for t in range(begin, end, 4):
                tokens = min(4, n - t)
                fours.copy(kept[tiles + (t - begin) // 4], now)
                if t + 4 < end:
                    fours.load(K, k, b, h, t, tokens, eps)
                    fours.load(V, v, b, h, t, tokens, eps)
                    fours.load_gates(A, log_decay, kind, b, h, t, tokens, eps)
                    fours.decay(A, K, K, queries, keys, D)
                    fours.add(S, D, keys, V)
                    add_to_weights(z, D, keys)
            for t in range(begin + (end - begin - 1) // 4 * 4, begin - 1, -4):
                tokens = min(4, n - t)
                earlier = kept[tiles + (t - begin) // 4]
                fours.load(Q, q, b, h, t, tokens, eps)
                fours.load(K, k, b, h, t, tokens, eps)
                fours.load(V, v, b, h, t, tokens, eps)
                fours.load_gates(A, log_decay, kind, b, h, t, tokens, eps)
                fours.decay(A, Q, K, queries, keys, D)
                load_grads(G, gw, grad_out, grad_weights, out, weights, b, h, t, tokens, bh, n, normalise, eps)
                T = fours.products(G, V, eps)
                fours.weigh_back(fours.scores(A, Q, K, eps), G, grad_V)
                fours.add_back(earlier[: f * e].reshape(f, e), grad_S, D, queries, keys, V, G, X, Y, same, grad_V, eps)
                if weights != 0:
                    T = add_weights(T, gw)
                    weights_back(earlier[f * e :], grad_z, D, queries, (gw[0], gw[1], gw[2], gw[3]), X, Y, same)
                grad_tokens(A, Q, K, X, Y, same, D, T, queries, keys, grad_A)
                fours.store(queries, grad_q, b, h, t, tokens, eps)
                fours.store(keys, grad_k, b, h, t, tokens, eps)
                fours.store(grad_V, grad_v, b, h, t, tokens, eps)
                if grad_decay[0] != 0:
                    store_grad_gates(grad_A, grad_decay, kind, b, h, t, tokens, eps)
        fours.store_sums(grad_S, grad_before[0], bh, eps)
        fours.store_vector(grad_z, grad_before[1], bh, eps)


@inlined
def add_weights(T, gw):
    """Products of gradients and values, with those of the weights, whose values are 1."""
    t00, t10, t11, t20, t21, t22, t30, t31, t32, t33 = T
    g0, g1, g2, g3 = gw[0], gw[1], gw[2], gw[3]
    return t00 + g0, t10 + g1, t11 + g1, t20 + g2, t21 + g2, t22 + g2, t30 + g3, t31 + g3, t32 + g3, t33 + g3


@inlined
def store_grad_gates(grad_A, grad_decay, kind, b, h, t, tokens, like):
    """Write gradients of log_decay: of each channel, or their sum for a head."""
    if kind == fours.CHANNEL_GATE:
        fours.store(grad_A, grad_decay, b, h, t, tokens, like)
    else:
        for r in range(tokens):
            total = number(0, like)
            for i in range(grad_A.shape[1]):
                total += grad_A[r, i]
            row(grad_decay, b, h, t + r, 1, like)[0] = total


def forward_work(f: int, e: int) -> int:
    """Numbers that a thread of ``forward`` needs."""
    return f * (e + 22) + 8 * e + 4


def backward_work(n: int, f: int, e: int) -> int:
    """Numbers that a thread of ``backward`` needs."""
    return f * (e + 1) * (-(-n // TILE) + _PER_TILE + 2) + 34 * f + 12 * e + 4
