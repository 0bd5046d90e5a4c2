"""Causal sums that may decay, as loops over tokens: S_t = diag(a_t) S_(t-1) + k_t v_tᵀ and o_t = q_t S_t.

With weights, also z_t = a_t z_(t-1) + k_t and w_t = q_t·z_t. Legend: H heads, n tokens, f features of q and k, e
channels of v; S (f, e), z (f). A tensor is its address and strides, as in ``memory``, and 0 if it is not there.

The arguments of both passes are the sizes (H, n, f, e); tokens = (q, k, v, log_decay, kind of gates, feature map of q
and k); before and after, the sums S and z; results = (out, weights); divisor = (whether out is divided by
max(w + eps, least), eps, least).
"""

from . import fours, vectors
from .compiler import inlined, kernel
from .memory import array, exp, number, row

#: Tokens of a tile: the backward pass keeps S before each tile, and before each four tokens of one tile.
TILE = 64
_FOURS = TILE // 4
padded = inlined(vectors.padded)


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
def weights_back(z, grad_z, D, Q, gw, X, Y, same):
    """``add_back`` for z and the gradients gw (4) of four weights; adds to X, Y and ``same``."""
    g0, g1, g2, g3 = gw[0], gw[1], gw[2], gw[3]
    for i in range(len(z)):
        a, b = z[i], grad_z[i]
        X[0, i] += a * g0
        X[1, i] += a * g1
        X[2, i] += a * g2
        X[3, i] += a * g3
        Y[0, i] += b
        Y[1, i] += b
        Y[2, i] += b
        Y[3, i] += b
        same[i] += a * b
        grad_z[i] = D[i] * b + (Q[0, i] * g0 + Q[1, i] * g1 + Q[2, i] * g2 + Q[3, i] * g3)


@inlined
def add_weights(T, gw):
    """The products T of gradients and values, with those of the weights, whose values are 1."""
    t00, t10, t11, t20, t21, t22, t30, t31, t32, t33 = T
    g0, g1, g2, g3 = gw[0], gw[1], gw[2], gw[3]
    return t00 + g0, t10 + g1, t11 + g1, t20 + g2, t21 + g2, t22 + g2, t30 + g3, t31 + g3, t32 + g3, t33 + g3


@inlined
def divide(o, w, divisor):
    """Divide an output by its weight, or make its gradient that of the sum of values."""
    divides, eps, least = divisor
    if divides:
        fours.scale(o, number(1, eps) / max(w + eps, least))


@inlined
def divisors_back(gw, P, T, Q, X, weights, divisor, b, h, t, count):
    """Add to gw (4) the gradients of the sums of weights that outputs were divided by.

    The products of sums of values and their gradients are those of queries Q and X, that of ``add_back``, and of the
    scores P and T, products of gradients and values.
    """
    divides, eps, least = divisor
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    t00, t10, t11, t20, t21, t22, t30, t31, t32, t33 = T
    products = (
        p00 * t00,
        p10 * t10 + p11 * t11,
        p20 * t20 + p21 * t21 + p22 * t22,
        p30 * t30 + p31 * t31 + p32 * t32 + p33 * t33,
    )
    for r in range(count):
        total = row(weights, b, h, t + r, 1, eps)[0] + eps
        if divides and total > least:
            product, query, x = products[r], Q[r], X[r]
            for i in range(len(query)):
                product += query[i] * x[i]
            gw[r] -= product / total


@kernel
def forward(first, last, sizes, tokens, before, results, divisor, after, work):
    """The outputs of heads ``first`` to ``last``, and the sums after the last token."""
    (H, n, f, e), (q, k, v, log_decay, kind, phi), (out, weights), like = sizes, tokens, results, divisor[1]
    C = padded(e)
    S, channels = array(work, 0, (f, C), like), array(work, f * C, (2, 4, C), like)
    at = (f + 8) * C
    z, D, features = (
        array(work, at, (1, f), like),
        array(work, at + f, f, like),
        array(work, at + 2 * f, (5, 4, f), like),
    )
    Q, K, A, queries, keys = features[0], features[1], features[2], features[3], features[4]
    V, U, w = channels[0], channels[1], array(work, at + 22 * f, 4, like)
    for head in range(first, last):
        b, h = head // H, head % H
        fours.load_sums(S, before[0], e, b, h, like)
        fours.load_sums(z, before[1], f, b, h, like)
        for t in range(0, n, 4):
            count = min(4, n - t)
            fours.load(Q, q, f, b, h, t, count, like)
            fours.load(K, k, f, b, h, t, count, like)
            fours.load(V, v, e, b, h, t, count, like)
            fours.apply_map(Q, phi, count)
            fours.apply_map(K, phi, count)
            fours.load_gates(A, log_decay, kind, b, h, t, count, like)
            fours.decay(A, kind, Q, K, queries, keys, D)
            P = fours.scores(A, Q, K, like)
            fours.weigh(P, V, U)
            fours.read_and_add(S, D, queries, keys, V, U, like)
            if weights[0] != 0:
                read_weights(z[0], D, queries, keys, P, w, like)
                for r in range(count):
                    row(weights, b, h, t + r, 1, like)[0] = w[r]
                    divide(U[r], w[r], divisor)
            fours.store(U, out, e, b, h, t, count, like)
        fours.store_sums(S, after[0], e, b, h, like)
        fours.store_sums(z, after[1], f, b, h, like)


@kernel
def step(first, last, sizes, tokens, before, results, divisor, after, work):
    """``forward`` of one token after sums: these are read and written once."""
    (H, _, f, e), (q, k, v, log_decay, kind, phi), (out, weights), like = sizes, tokens, results, divisor[1]
    features = array(work, 0, (2, 1, f), like)
    Q, K = features[0], features[1]
    queries, keys = Q[0], K[0]
    for head in range(first, last):
        b, h = head // H, head % H
        fours.copy(queries, row(q, b, h, 0, f, like))
        fours.copy(keys, row(k, b, h, 0, f, like))
        fours.apply_map(Q, phi, 1)
        fours.apply_map(K, phi, 1)
        values = row(v, b, h, 0, e, like)
        gates = row(log_decay, b, h, 0, f, like)  # only the first number, or none, is there without gates by channel
        z, z_new = row(before[1], b, h, 0, f, like), row(after[1], b, h, 0, f, like)
        a, w, o = number(1, like), number(0, like), row(out, b, h, 0, e, like)
        fours.fill(o, number(0, like))
        if kind == fours.HEAD_GATE:
            a = exp(gates[0])
        for i in range(f):
            if kind == fours.CHANNEL_GATE:
                a = exp(gates[i])
            s, new, x, y = row(before[0], b, h, i, e, like), row(after[0], b, h, i, e, like), keys[i], queries[i]
            for j in range(e):
                total = a * s[j] + x * values[j]
                new[j] = total
                o[j] += y * total
            if weights[0] != 0:
                z_new[i] = a * z[i] + x
                w += y * z_new[i]
        if weights[0] != 0:
            row(weights, b, h, 0, 1, like)[0] = w
            divide(o, w, divisor)


@inlined
def grad_tokens(A, Q, K, X, Y, D, same, T, grad_q, grad_k, grad_a):
    """Gradients (4, f) of four queries, keys and log_decays.

    X, Y, ``same`` are those of ``add_back``, T the products of gradients and values. ``grad_a`` is the sum of all that
    passes across a token. It is no difference of sums, which would lose what a closed gate lets through.
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
        # Across token r: from before the four tokens to queries r..3 and to the end, from keys 0..r-1 to both.
        u10, u21, u32, u20, u31, u30 = (
            u10 * q1 * k0,
            u21 * q2 * k1,
            u32 * q3 * k2,
            u20 * q2 * k0,
            u31 * q3 * k1,
            u30 * q3 * k0,
        )
        x3 = D[i] * same[i] + q3 * x3
        x2, y0, y1, y2 = x3 + q2 * x2, k0 * y0, k1 * y1, k2 * y2
        x1 = x2 + q1 * x1
        grad_a[0, i] = x1 + q0 * x0
        grad_a[1, i] = x1 + (u10 + u20 + u30) + y0
        grad_a[2, i] = x2 + (u20 + u21 + u30 + u31) + (y0 + y1)
        grad_a[3, i] = x3 + (u30 + u31 + u32) + (y0 + y1 + y2)


@inlined
def store_grad_gates(grad_A, grad_decay, kind, b, h, t, count, like):
    """Write gradients of log_decay, if they are wanted: of each channel, or their sum for a head."""
    if grad_decay[0] == 0:
        return
    if kind == fours.CHANNEL_GATE:
        fours.store(grad_A, grad_decay, grad_A.shape[1], b, h, t, count, like)
    else:
        for r in range(count):
            total = number(0, like)
            for i in range(grad_A.shape[1]):
                total += grad_A[r, i]
            row(grad_decay, b, h, t + r, 1, like)[0] = total


@inlined
def add_tokens(S, z, D, A, K, V, queries, keys, tokens, sizes, b, h, t, count, like):
    """Add four tokens to the sums, without reading these."""
    (_, _, f, e), (_, k, v, log_decay, kind, phi) = sizes, tokens
    fours.load(K, k, f, b, h, t, count, like)
    fours.apply_map(K, phi, count)
    fours.load(V, v, e, b, h, t, count, like)
    fours.load_gates(A, log_decay, kind, b, h, t, count, like)
    fours.decay(A, kind, K, K, queries, keys, D)
    fours.add(S, D, keys, V, like)
    for i in range(len(z)):
        z[i] = D[i] * z[i] + (keys[0, i] + keys[1, i] + keys[2, i] + keys[3, i])


@inlined
def grad_tokens_without_gates(Q, K, X, Y, T, grad_q, grad_k):
    """``grad_tokens`` if all factors are 1."""
    fours.weigh(T, K, grad_q)
    fours.weigh_back(T, Q, grad_k)
    for r in range(4):
        fours.increase(grad_q[r], X[r])
        fours.increase(grad_k[r], Y[r])


@inlined
def load_grads(G, gw, grads, weights, divisor, e, b, h, t, count, like):
    """Gradients G (4, e) of four sums of values, and gw (4) of four sums of weights without ``divisors_back``."""
    grad_out, grad_weights = grads
    fours.load(G, grad_out, e, b, h, t, count, like)
    for r in range(4):
        gw[r] = number(0, like)
        if r < count and weights[0] != 0:
            divide(G[r], row(weights, b, h, t + r, 1, like)[0], divisor)
            if grad_weights[0] != 0:
                gw[r] = row(grad_weights, b, h, t + r, 1, like)[0]


@kernel
def backward(first, last, sizes, tokens, before, results, divisor, grads, grad_after, grad_inputs, grad_before, work):
    """Gradients of ``tokens`` and ``before``, heads ``first`` to ``last``, from those of results and of ``after``.

    grads = those of (out, weights), grad_inputs = those of (q, k, v, log_decay). ``out`` is not read, so a caller may
    change it in place. A gradient of results that is not there is 0, except that of ``out``; one of inputs that is not
    there is not written, except those of q, k and v.
    """
    (H, n, f, e), (q, k, v, log_decay, kind, phi), like = sizes, tokens, divisor[1]
    tiles = (n + TILE - 1) // TILE
    kept, kept_z, D, same, gw, features, channels = backward_arrays(tiles, f, e, work, like)
    S, grad_S, z, grad_z = kept[-2], kept[-1], kept_z[-2], kept_z[-1]
    Q, K, A, queries, keys = features[0], features[1], features[2], features[3], features[4]
    X, Y, grad_A, V, G, grad_V = features[5], features[6], features[7], channels[0], channels[1], channels[2]
    for head in range(first, last):
        b, h = head // H, head % H
        fours.load_sums(S, before[0], e, b, h, like)
        fours.load_sums(z, before[1], f, b, h, like)
        for tile in range(tiles):
            fours.copy_rows(kept[tile], S)
            fours.copy_rows(kept_z[tile], z)
            if tile < tiles - 1:
                for t in range(tile * TILE, (tile + 1) * TILE, 4):
                    add_tokens(S, z[0], D, A, K, V, queries, keys, tokens, sizes, b, h, t, 4, like)
        fours.load_sums(grad_S, grad_after[0], e, b, h, like)
        fours.load_sums(grad_z, grad_after[1], f, b, h, like)
        for tile in range(tiles - 1, -1, -1):
            begin, end = tile * TILE, min((tile + 1) * TILE, n)
            fours.copy_rows(S, kept[tile])
            fours.copy_rows(z, kept_z[tile])
            for t in range(begin, end, 4):
                i = tiles + (t - begin) // 4
                fours.copy_rows(kept[i], S)
                fours.copy_rows(kept_z[i], z)
                if t + 4 < end:
                    add_tokens(S, z[0], D, A, K, V, queries, keys, tokens, sizes, b, h, t, 4, like)
            for t in range(begin + (end - begin - 1) // 4 * 4, begin - 1, -4):
                i, count = tiles + (t - begin) // 4, min(4, n - t)
                fours.load(Q, q, f, b, h, t, count, like)
                fours.load(K, k, f, b, h, t, count, like)
                fours.apply_map(Q, phi, count)
                fours.apply_map(K, phi, count)
                fours.load(V, v, e, b, h, t, count, like)
                fours.load_gates(A, log_decay, kind, b, h, t, count, like)
                fours.decay(A, kind, Q, K, queries, keys, D)
                load_grads(G, gw, grads, results[1], divisor, e, b, h, t, count, like)
                P = fours.scores(A, Q, K, like)
                fours.weigh_back(P, G, grad_V)
                fours.add_back(kept[i], grad_S, D, queries, keys, V, G, X, Y, same, grad_V, like)
                T = fours.products(G, V, like)
                if results[1][0] != 0:
                    divisors_back(gw, P, T, queries, X, results[1], divisor, b, h, t, count)
                    T = add_weights(T, gw)
                    weights_back(kept_z[i, 0], grad_z[0], D, queries, gw, X, Y, same)
                if kind == fours.NO_GATE:
                    grad_tokens_without_gates(Q, K, X, Y, T, queries, keys)
                else:
                    grad_tokens(A, Q, K, X, Y, D, same, T, queries, keys, grad_A)
                    store_grad_gates(grad_A, grad_inputs[3], kind, b, h, t, count, like)
                fours.map_back(queries, Q, phi)
                fours.map_back(keys, K, phi)
                fours.store(queries, grad_inputs[0], f, b, h, t, count, like)
                fours.store(keys, grad_inputs[1], f, b, h, t, count, like)
                fours.store(grad_V, grad_inputs[2], e, b, h, t, count, like)
        fours.store_sums(grad_S, grad_before[0], e, b, h, like)
        fours.store_sums(grad_z, grad_before[1], f, b, h, like)


@inlined
def backward_arrays(tiles, f, e, work, like):
    """The arrays of ``backward`` in ``work``."""
    count, C = tiles + _FOURS + 2, padded(e)
    kept, channels = array(work, 0, (count, f, C), like), array(work, count * f * C, (3, 4, C), like)
    at = (count * f + 12) * C
    kept_z, features = array(work, at, (count, 1, f), like), array(work, at + count * f, (8, 4, f), like)
    at += (count + 32) * f
    return (
        kept,
        kept_z,
        array(work, at, f, like),
        array(work, at + f, f, like),
        array(work, at + 2 * f, 4, like),
        features,
        channels,
    )


def forward_work(f: int, e: int) -> int:
    """Numbers of the work of ``forward``."""
    return (f + 8) * vectors.padded(e) + 22 * f + 4


def backward_work(n: int, f: int, e: int) -> int:
    """Numbers of the work of ``backward``."""
    count = -(-n // TILE) + _FOURS + 2
    return (count * f + 12) * vectors.padded(e) + (count + 34) * f + 4
