"""The gated delta rule as loops over four tokens; ``../README.md`` derives them.

Legend: as in the folder above. S (d, e) is the memory, T (e, d) its transpose; Q, K (4, d) and V (4, e) four queries,
keys and values, G (4, e) the gradients of their outputs; E (4, e) errors and U (4, e) what they write, beta times E;
A the factors of four gates. Tensors are addresses and strides as in ``shared.cpu.memory``, 0 for one that is not there.
Rows of arrays have ``vectors.padded`` sizes, with zeros after the d or e channels.
"""

import numpy as np

from ...shared.cpu import fours, vectors
from ...shared.cpu.compiler import inlined, kernel
from ...shared.cpu.memory import array, exp, number, row
from ...shared.cpu.vectors import filled, plus, times, total, width

#: Tokens of a tile: the forward pass keeps the memory before each tile, the backward pass, within one tile, that before
#: each four tokens.
TILE = 64
_PER_TILE = TILE // 4
_padded = inlined(vectors.padded)


@inlined
def load_numbers(tensor, missing, b, h, t, count, like):
    """A number for each of four tokens of a tensor (B, H, n): ``missing`` after the last token or without a tensor."""
    x0 = row(tensor, b, h, t, 1, like)[0] if tensor[0] != 0 else missing
    x1 = row(tensor, b, h, t + 1, 1, like)[0] if tensor[0] != 0 and count > 1 else missing
    x2 = row(tensor, b, h, t + 2, 1, like)[0] if tensor[0] != 0 and count > 2 else missing
    x3 = row(tensor, b, h, t + 3, 1, like)[0] if tensor[0] != 0 and count > 3 else missing
    return x0, x1, x2, x3


@inlined
def store_numbers(tensor, x, b, h, t, count, like):
    """Write numbers of four tokens to a tensor (B, H, n), if there is one."""
    if tensor[0] != 0:
        for r in range(count):
            row(tensor, b, h, t + r, 1, like)[0] = x[r]


@inlined
def load_gates(log_decay, b, h, t, count, like):
    """The factors of four gates, 1 after the last token and without gates."""
    x0, x1, x2, x3 = load_numbers(log_decay, number(0, like), b, h, t, count, like)
    return exp(x0), exp(x1), exp(x2), exp(x3)


@inlined
def decayed(P, A):
    """Products of tokens r and s <= r, decayed from s to r."""
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    _, a1, a2, a3 = A
    a12, a23 = a1 * a2, a2 * a3
    return p00, p10 * a1, p11, p20 * a12, p21 * a2, p22, p30 * (a1 * a23), p31 * a23, p32 * a3, p33


@inlined
def from_start(target, X, A):
    """Four tokens, decayed from before the first of them."""
    a0, a1, a2, a3 = A
    a01, a23 = a0 * a1, a2 * a3
    a012, a0123 = a01 * a2, a01 * a23
    for i in range(X.shape[1]):
        target[0, i] = X[0, i] * a0
        target[1, i] = X[1, i] * a01
        target[2, i] = X[2, i] * a012
        target[3, i] = X[3, i] * a0123


@inlined
def to_end(target, X, A):
    """Four tokens, decayed until after the last of them."""
    _, a1, a2, a3 = A
    a23 = a2 * a3
    a123 = a1 * a23
    for i in range(X.shape[1]):
        target[0, i] = X[0, i] * a123
        target[1, i] = X[1, i] * a23
        target[2, i] = X[2, i] * a3
        target[3, i] = X[3, i]


@inlined
def activate(x, slope, like):
    """silu of numbers, and its derivative."""
    one = number(1, like)
    for i in range(len(x)):
        y = x[i]
        gate = one / (one + exp(-y))
        slope[i] = gate * (one + y * (one - gate))
        x[i] = y * gate


@inlined
def normalise(x, slope, normalised, factor, eps):
    """Give a vector the norm ``factor`` or, if it is not ``normalised``, multiply it; and its derivative."""
    scale = factor
    if normalised:
        squares = eps
        for i in range(len(x)):
            squares += x[i] * x[i]
        scale *= number(1, eps) / np.sqrt(squares)
    for i in range(len(x)):
        x[i] *= scale
        slope[i] *= scale


@inlined
def direct(X, slopes, activated, normalised, factor, eps):
    """Make four queries or keys for the memory of ``X``; ``direct_back`` needs ``slopes``."""
    if activated:
        activate(X.reshape(X.size), slopes.reshape(X.size), eps)
    else:
        fours.fill(slopes.reshape(X.size), number(1, eps))
    for r in range(4):
        normalise(X[r], slopes[r], normalised, factor, eps)


@inlined
def direct_back(grad, X, slopes, normalised, factor, eps):
    """Turn gradients of what ``direct`` made, ``X``, into those of what it was made of."""
    for r in range(4):
        g, x, slope, along = grad[r], X[r], slopes[r], number(0, eps)
        if normalised:
            for i in range(len(x)):
                along += g[i] * x[i]
            along /= factor * factor
        for i in range(len(x)):
            g[i] = slope[i] * (g[i] - x[i] * along)


@inlined
def read(S, Q, K, outputs, R, like):
    """outputs = Q S and R = K S."""
    for j in range(0, S.shape[1], width(like)):
        o0 = o1 = o2 = o3 = r0 = r1 = r2 = r3 = filled(number(0, like))
        for i in range(S.shape[0]):
            s = vectors.load(S, i, j)
            o0, o1, o2, o3 = plus(o0, Q[0, i], s), plus(o1, Q[1, i], s), plus(o2, Q[2, i], s), plus(o3, Q[3, i], s)
            r0, r1, r2, r3 = plus(r0, K[0, i], s), plus(r1, K[1, i], s), plus(r2, K[2, i], s), plus(r3, K[3, i], s)
        fours.store_four(outputs, j, o0, o1, o2, o3)
        fours.store_four(R, j, r0, r1, r2, r3)


@inlined
def write(after, S, decay, K, U, like):
    """after = decay S + Kᵀ U; ``after`` may be S."""
    for j in range(0, S.shape[1], width(like)):
        u0, u1, u2, u3 = fours.load_four(U, j)
        for i in range(S.shape[0]):
            s = plus(plus(times(vectors.load(S, i, j), decay), K[0, i], u0), K[1, i], u1)
            vectors.store(after, i, j, plus(plus(s, K[2, i], u2), K[3, i], u3))


@inlined
def find_errors(E, outputs, R, P, T, betas):
    """Turn values E and what keys read, R, into errors and what they write, and add what queries read of that."""
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    _, t10, _, t20, t21, _, t30, t31, t32, _ = T
    beta0, beta1, beta2, beta3 = betas
    for j in range(E.shape[1]):
        e0 = E[0, j] - R[0, j]
        u0 = beta0 * e0
        e1 = E[1, j] - R[1, j] - t10 * u0
        u1 = beta1 * e1
        e2 = E[2, j] - R[2, j] - t20 * u0 - t21 * u1
        u2 = beta2 * e2
        e3 = E[3, j] - R[3, j] - t30 * u0 - t31 * u1 - t32 * u2
        u3 = beta3 * e3
        E[0, j], E[1, j], E[2, j], E[3, j] = e0, e1, e2, e3
        R[0, j], R[1, j], R[2, j], R[3, j] = u0, u1, u2, u3
        outputs[0, j] += p00 * u0
        outputs[1, j] += p10 * u0 + p11 * u1
        outputs[2, j] += p20 * u0 + p21 * u1 + p22 * u2
        outputs[3, j] += p30 * u0 + p31 * u1 + p32 * u2 + p33 * u3


@inlined
def load_memory(S, tensor, b, h, first, e, like):
    """A memory (d, e): rows of a tensor from ``first`` on; zeros if there is none."""
    fours.fill(S.reshape(S.size), number(0, like))
    if tensor[0] != 0:
        for i in range(S.shape[0]):
            fours.copy(S[i], row(tensor, b, h, first + i, e, like))


@inlined
def store_memory(S, tensor, b, h, first, e, like):
    """Write what ``load_memory`` reads; not if there is no tensor."""
    if tensor[0] != 0:
        for i in range(S.shape[0]):
            target, s = row(tensor, b, h, first + i, e, like), S[i]
            for j in range(e):
                target[j] = s[j]


@inlined
def load_transposed(T, tensor, b, h, first, d, like):
    """The transpose (e, d) of what ``load_memory`` reads."""
    fours.fill(T.reshape(T.size), number(0, like))
    if tensor[0] != 0:
        for i in range(d):
            s = row(tensor, b, h, first + i, T.shape[0], like)
            for j in range(len(s)):
                T[j, i] = s[j]


@inlined
def store_transposed(T, tensor, b, h, first, d, like):
    """Write what ``load_transposed`` reads; not if there is no tensor."""
    if tensor[0] != 0:
        for i in range(d):
            s = row(tensor, b, h, first + i, T.shape[0], like)
            for j in range(len(s)):
                s[j] = T[j, i]


@kernel
def forward(first, last, sizes, inputs, before, after, out, kept, directions, work):
    """Outputs of heads ``first`` to ``last`` and the memory after the last token.

    ``kept`` (B, H, n + tiles d, e) is for ``backward``, or 0: the errors, and then the memory before each tile.
    ``inputs``: q, k, v, beta and log_decay. ``directions``: whether queries and keys go through silu, whether they get
    a norm of 1, whether values go through silu; a factor of queries; what is added to squares of norms. ``work`` is for
    ``forward_work`` numbers.
    """
    (H, n, d, e), (q, k, v, beta, log_decay) = sizes, inputs
    qk_activated, qk_normalised, v_activated, scale, eps = directions
    D, C = _padded(d), _padded(e)
    S, tokens_d = array(work, 0, (d, C), eps), array(work, d * C, (5, 4, D), eps)
    tokens_e = array(work, d * C + 20 * D, (4, 4, C), eps)
    Q, K, queries, keys, slopes = tokens_d[0], tokens_d[1], tokens_d[2], tokens_d[3], tokens_d[4]
    E, outputs, R, slopes_e = tokens_e[0], tokens_e[1], tokens_e[2], tokens_e[3]
    one, zero = number(1, eps), number(0, eps)
    for bh in range(first, last):
        b, h = bh // H, bh % H
        load_memory(S, before, b, h, 0, e, eps)
        for t in range(0, n, 4):
            if t % TILE == 0:
                store_memory(S, kept, b, h, n + t // TILE * d, e, eps)
            count = min(4, n - t)
            fours.load(Q, q, d, b, h, t, count, eps)
            fours.load(K, k, d, b, h, t, count, eps)
            fours.load(E, v, e, b, h, t, count, eps)
            direct(Q, slopes, qk_activated, qk_normalised, scale, eps)
            direct(K, slopes, qk_activated, qk_normalised, one, eps)
            if v_activated:
                activate(E.reshape(E.size), slopes_e.reshape(E.size), eps)
            A = load_gates(log_decay, b, h, t, count, eps)
            betas = load_numbers(beta, zero, b, h, t, count, eps)
            from_start(queries, Q, A)
            from_start(keys, K, A)
            read(S, queries, keys, outputs, R, eps)
            find_errors(
                E, outputs, R, decayed(fours.products(Q, K, eps), A), decayed(fours.products(K, K, eps), A), betas
            )
            to_end(keys, K, A)
            write(S, S, A[0] * A[1] * A[2] * A[3], keys, R, eps)
            fours.store(outputs, out, e, b, h, t, count, eps)
            if kept[0] != 0:
                fours.store(E, kept, e, b, h, t, count, eps)
        store_memory(S, after, b, h, 0, e, eps)


@inlined
def step_vectors(S, after, Q, K, U, out, gate, beta, like):
    """``step_column`` for whole vectors of columns; the number of these columns."""
    rows, size = S.shape[0], width(like)
    end = S.shape[1] // size * size
    for j in range(0, end, size):
        r0 = r1 = r2 = r3 = filled(number(0, like))
        for i in range(0, rows - 3, 4):
            r0, r1 = plus(r0, K[i], vectors.load(S, i, j)), plus(r1, K[i + 1], vectors.load(S, i + 1, j))
            r2, r3 = plus(r2, K[i + 2], vectors.load(S, i + 2, j)), plus(r3, K[i + 3], vectors.load(S, i + 3, j))
        for i in range(rows // 4 * 4, rows):
            r0 = plus(r0, K[i], vectors.load(S, i, j))
        one = filled(number(1, like))
        read = plus(plus(plus(r0, one, r1), one, r2), one, r3)
        u = times(plus(vectors.load(U, 0, j), -gate, read), beta)
        o = filled(number(0, like))
        for i in range(rows):
            s = plus(times(vectors.load(S, i, j), gate), K[i], u)
            vectors.store(after, i, j, s)
            o = plus(o, Q[i], s)
        vectors.store(out, 0, j, o)
    return end


@inlined
def step_column(S, after, Q, K, U, out, gate, beta, j, like):
    """One column of the memory after a token, and what the query reads of it."""
    read = o = number(0, like)
    for i in range(S.shape[0]):
        read += K[i] * S[i, j]
    u = (U[0, j] - gate * read) * beta
    for i in range(S.shape[0]):
        s = gate * S[i, j] + K[i] * u
        after[i, j] = s
        o += Q[i] * s
    out[0, j] = o


@kernel
def step(first, last, sizes, inputs, before, after, out, directions, work):
    """``forward`` of one token; ``work`` is for ``step_work`` numbers.

    ``before`` and ``after`` are different memories, whose rows of a head follow each other.
    """
    (H, _, d, e), (q, k, v, beta, log_decay) = sizes, inputs
    qk_activated, qk_normalised, v_activated, scale, eps = directions
    one = number(1, eps)
    tokens_d, U, slope_e = array(work, 0, (3, d), eps), array(work, 3 * d, (1, e), eps), array(work, 3 * d + e, e, eps)
    Q, K, slope = tokens_d[0], tokens_d[1], tokens_d[2]
    for bh in range(first, last):
        b, h = bh // H, bh % H
        fours.copy(Q, row(q, b, h, 0, d, eps))
        fours.copy(K, row(k, b, h, 0, d, eps))
        fours.copy(U[0], row(v, b, h, 0, e, eps))
        if qk_activated:
            activate(Q, slope, eps)
            activate(K, slope, eps)
        if v_activated:
            activate(U[0], slope_e, eps)
        normalise(Q, slope, qk_normalised, scale, eps)
        normalise(K, slope, qk_normalised, one, eps)
        gate = one if log_decay[0] == 0 else exp(row(log_decay, b, h, 0, 1, eps)[0])
        beta_now = row(beta, b, h, 0, 1, eps)[0]
        S = array(before[0], b * before[1] + h * before[2], (d, e), eps)
        S_after = array(after[0], b * after[1] + h * after[2], (d, e), eps)
        o = array(out[0], b * out[1] + h * out[2], (1, e), eps)
        end = step_vectors(S, S_after, Q, K, U, o, gate, beta_now, eps)
        for j in range(end, e):
            step_column(S, S_after, Q, K, U, o, gate, beta_now, j, eps)


@inlined
def written(U, E, betas):
    """U, what four errors write."""
    for r in range(4):
        for j in range(E.shape[1]):
            U[r, j] = betas[r] * E[r, j]


@inlined
def read_transposed(T, K, R, like):
    """R = K Tᵀ."""
    for j in range(T.shape[0]):
        r0 = r1 = r2 = r3 = filled(number(0, like))
        for i in range(0, T.shape[1], width(like)):
            t = vectors.load(T, j, i)
            k0, k1, k2, k3 = fours.load_four(K, i)
            r0, r1, r2, r3 = plus(r0, k0, t), plus(r1, k1, t), plus(r2, k2, t), plus(r3, k3, t)
        R[0, j], R[1, j], R[2, j], R[3, j] = total(r0), total(r1), total(r2), total(r3)
    for j in range(T.shape[0], R.shape[1]):
        R[0, j] = R[1, j] = R[2, j] = R[3, j] = number(0, like)


@inlined
def grad_errors(grad_E, grad_U, P, T, betas, G):
    """Gradients of errors and of what they write, from what keys read of the gradient of the memory, ``grad_U``."""
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    _, t10, _, t20, t21, _, t30, t31, t32, _ = T
    beta0, beta1, beta2, beta3 = betas
    for j in range(G.shape[1]):
        g0, g1, g2, g3 = G[0, j], G[1, j], G[2, j], G[3, j]
        u3 = grad_U[3, j] + p33 * g3
        e3 = beta3 * u3
        u2 = grad_U[2, j] + p22 * g2 + p32 * g3 - t32 * e3
        e2 = beta2 * u2
        u1 = grad_U[1, j] + p11 * g1 + p21 * g2 + p31 * g3 - t21 * e2 - t31 * e3
        e1 = beta1 * u1
        u0 = grad_U[0, j] + p00 * g0 + p10 * g1 + p20 * g2 + p30 * g3 - t10 * e1 - t20 * e2 - t30 * e3
        grad_U[0, j], grad_U[1, j], grad_U[2, j], grad_U[3, j] = u0, u1, u2, u3
        grad_E[0, j], grad_E[1, j], grad_E[2, j], grad_E[3, j] = beta0 * u0, e1, e2, e3


@inlined
def write_back(grad_T, T, decay, U, G, grad_E, Q, K, Y, like):
    """Y = U grad_T, then grad_T = decay grad_T + Gᵀ Q - grad_Eᵀ K; the sum of the products of T and ``grad_T``."""
    same = filled(number(0, like))
    for i in range(0, T.shape[1], width(like)):
        q0, q1, q2, q3 = fours.load_four(Q, i)
        k0, k1, k2, k3 = fours.load_four(K, i)
        y0 = y1 = y2 = y3 = filled(number(0, like))
        for j in range(T.shape[0]):
            t = vectors.load(grad_T, j, i)
            same = plus(same, t, vectors.load(T, j, i))
            y0, y1, y2, y3 = plus(y0, U[0, j], t), plus(y1, U[1, j], t), plus(y2, U[2, j], t), plus(y3, U[3, j], t)
            t = plus(plus(times(t, decay), G[0, j], q0), G[1, j], q1)
            t = plus(plus(t, G[2, j], q2), G[3, j], q3)
            t = plus(plus(t, -grad_E[0, j], k0), -grad_E[1, j], k1)
            vectors.store(grad_T, j, i, plus(plus(t, -grad_E[2, j], k2), -grad_E[3, j], k3))
        fours.store_four(Y, i, y0, y1, y2, y3)
    return total(same)


@inlined
def dots(X, Y, like):
    """Products of four vectors with four others."""
    x0 = x1 = x2 = x3 = number(0, like)
    for i in range(X.shape[1]):
        x0 += X[0, i] * Y[0, i]
        x1 += X[1, i] * Y[1, i]
        x2 += X[2, i] * Y[2, i]
        x3 += X[3, i] * Y[3, i]
    return x0, x1, x2, x3


@inlined
def grad_gates(P, T, W, M, x, y, z, whole):
    """Gradients of the logarithms of four gates: the sum of what passes across each, never a difference of such sums.

    P and T are products of queries and of keys with keys, W and M the decayed gradients; x, z: of what queries and keys
    read of the memory before; y: of what keys write to that after; ``whole``: of what remains of the memory.
    """
    _, p10, _, p20, p21, _, p30, p31, p32, _ = P
    _, t10, _, t20, t21, _, t30, t31, t32, _ = T
    _, w10, _, w20, w21, _, w30, w31, w32, _ = W
    _, m10, _, m20, m21, _, m30, m31, m32, _ = M
    c10, c20, c21 = w10 * p10 - m10 * t10, w20 * p20 - m20 * t20, w21 * p21 - m21 * t21
    c30, c31, c32 = w30 * p30 - m30 * t30, w31 * p31 - m31 * t31, w32 * p32 - m32 * t32
    read3 = whole + (x[3] - z[3])
    read2 = read3 + (x[2] - z[2])
    read1 = read2 + (x[1] - z[1])
    return (
        read1 + (x[0] - z[0]),
        read1 + (c10 + c20 + c30) + y[0],
        read2 + (c20 + c21 + c30 + c31) + (y[0] + y[1]),
        read3 + (c30 + c31 + c32) + (y[0] + y[1] + y[2]),
    )


@inlined
def grad_tokens(X, Y, Z, Q, K, W, M):
    """Add what other queries and keys among the four give to the gradients X of queries, and Y - Z, in Y, of keys."""
    w00, w10, w11, w20, w21, w22, w30, w31, w32, w33 = W
    _, m10, _, m20, m21, _, m30, m31, m32, _ = M
    for i in range(Q.shape[1]):
        q0, q1, q2, q3, k0, k1, k2, k3 = Q[0, i], Q[1, i], Q[2, i], Q[3, i], K[0, i], K[1, i], K[2, i], K[3, i]
        X[0, i] += w00 * k0
        X[1, i] += w10 * k0 + w11 * k1
        X[2, i] += w20 * k0 + w21 * k1 + w22 * k2
        X[3, i] += w30 * k0 + w31 * k1 + w32 * k2 + w33 * k3
        Y[0, i] += (w00 * q0 + w10 * q1 + w20 * q2 + w30 * q3) - (Z[0, i] + m10 * k1 + m20 * k2 + m30 * k3)
        Y[1, i] += (w11 * q1 + w21 * q2 + w31 * q3) - (Z[1, i] + m10 * k0 + m21 * k2 + m31 * k3)
        Y[2, i] += (w22 * q2 + w32 * q3) - (Z[2, i] + m20 * k0 + m21 * k1 + m32 * k3)
        Y[3, i] += w33 * q3 - (Z[3, i] + m30 * k0 + m31 * k1 + m32 * k2)


@inlined
def sweep(states, keys_of_tile, slopes, K, E, U, sizes, inputs, b, h, begin, kept, directions):
    """The keys of a tile, and the memory, transposed, before each four tokens of it; the first is there already."""
    (_, n, d, e), (_, k, _, beta, log_decay) = sizes, inputs
    activated, normalised, _, _, eps = directions
    for t in range(begin, min(begin + TILE, n), 4):
        count, part = min(4, n - t), (t - begin) // 4
        fours.load(keys_of_tile[part], k, d, b, h, t, count, eps)
        direct(keys_of_tile[part], slopes[part], activated, normalised, number(1, eps), eps)
        if t + 4 < min(begin + TILE, n):
            A = load_gates(log_decay, b, h, t, count, eps)
            fours.load(E, kept, e, b, h, t, count, eps)
            written(U, E, load_numbers(beta, number(0, eps), b, h, t, count, eps))
            to_end(K, keys_of_tile[part], A)
            write(states[part + 1], states[part], A[0] * A[1] * A[2] * A[3], U, K, eps)


@inlined
def four_back(S, grad_S, Q, K, E, U, G, grad_E, grad_U, X, Y, Z, queries, keys, A, betas, like):
    """Gradients of four tokens: X of queries, Y of keys, ``grad_E`` of values; returned are those of beta and gates.

    S is the transposed memory before them, and ``grad_S`` becomes its gradient. Z, ``grad_U``, ``queries`` and ``keys``
    are for intermediate results.
    """
    P, T = fours.products(Q, K, like), fours.products(K, K, like)
    to_end(keys, K, A)
    read_transposed(grad_S, keys, grad_U, like)
    y = dots(U, grad_U, like)
    grad_errors(grad_E, grad_U, decayed(P, A), decayed(T, A), betas, G)
    read(S, G, grad_E, X, Z, like)
    from_start(queries, Q, A)
    from_start(keys, K, A)
    decay = A[0] * A[1] * A[2] * A[3]
    whole = decay * write_back(grad_S, S, decay, U, G, grad_E, queries, keys, Y, like)
    from_start(X, X, A)
    from_start(Z, Z, A)
    to_end(Y, Y, A)
    W, M = decayed(fours.products(G, U, like), A), decayed(fours.products(grad_E, U, like), A)
    of_gates = grad_gates(P, T, W, M, dots(Q, X, like), y, dots(K, Z, like), whole)
    grad_tokens(X, Y, Z, Q, K, W, M)
    return dots(E, grad_U, like), of_gates


@inlined
def backward_arrays(work, d, e, like):
    """Memories (17, e, d), keys of a tile and their slopes (16, 4, d), and four tokens (7, 4, d) and (6, 4, e)."""
    D, C = _padded(d), _padded(e)
    at, size = (_PER_TILE + 1) * e * D, 4 * _PER_TILE * D
    return (
        array(work, 0, (_PER_TILE + 1, e, D), like),
        array(work, at, (_PER_TILE, 4, D), like),
        array(work, at + size, (_PER_TILE, 4, D), like),
        array(work, at + 2 * size, (7, 4, D), like),
        array(work, at + 2 * size + 28 * D, (6, 4, C), like),
    )


@kernel
def backward(first, last, sizes, inputs, kept, grad_out, grad_after, grad_inputs, grad_before, directions, work):
    """Gradients of all inputs of ``forward``, heads ``first`` to ``last``; ``work`` is for ``backward_work`` numbers.

    ``grad_after`` is 0 where the memory after the last token has no gradient, ``grad_decay`` without gates.
    """
    (H, n, d, e), (q, _, v, beta, log_decay) = sizes, inputs
    grad_q, grad_k, grad_v, grad_beta, grad_decay = grad_inputs
    qk_activated, qk_normalised, v_activated, scale, eps = directions
    memories, keys_of_tile, slopes_of_tile, tokens_d, tokens_e = backward_arrays(work, d, e, eps)
    Q, X, Y, Z = tokens_d[0], tokens_d[1], tokens_d[2], tokens_d[3]
    queries, keys, slopes = tokens_d[4], tokens_d[5], tokens_d[6]
    V, E, U, G, grad_E, grad_U = tokens_e[0], tokens_e[1], tokens_e[2], tokens_e[3], tokens_e[4], tokens_e[5]
    grad_S, one = memories[_PER_TILE], number(1, eps)
    for bh in range(first, last):
        b, h = bh // H, bh % H
        load_transposed(grad_S, grad_after, b, h, 0, d, eps)
        for begin in range((n - 1) // TILE * TILE, -1, -TILE):
            load_transposed(memories[0], kept, b, h, n + begin // TILE * d, d, eps)
            sweep(memories, keys_of_tile, slopes_of_tile, keys, E, U, sizes, inputs, b, h, begin, kept, directions)
            for t in range(begin + (min(TILE, n - begin) - 1) // 4 * 4, begin - 1, -4):
                count, part = min(4, n - t), (t - begin) // 4
                K = keys_of_tile[part]
                fours.load(Q, q, d, b, h, t, count, eps)
                direct(Q, slopes, qk_activated, qk_normalised, scale, eps)
                A = load_gates(log_decay, b, h, t, count, eps)
                betas = load_numbers(beta, number(0, eps), b, h, t, count, eps)
                fours.load(E, kept, e, b, h, t, count, eps)
                written(U, E, betas)
                fours.load(G, grad_out, e, b, h, t, count, eps)
                of_beta, of_gates = four_back(
                    memories[part], grad_S, Q, K, E, U, G, grad_E, grad_U, X, Y, Z, queries, keys, A, betas, eps
                )
                direct_back(X, Q, slopes, qk_normalised, scale, eps)
                direct_back(Y, K, slopes_of_tile[part], qk_normalised, one, eps)
                if v_activated:
                    fours.load(V, v, e, b, h, t, count, eps)
                    activate(V.reshape(V.size), U.reshape(U.size), eps)
                    direct_back(grad_E, V, U, False, one, eps)
                fours.store(X, grad_q, d, b, h, t, count, eps)
                fours.store(Y, grad_k, d, b, h, t, count, eps)
                fours.store(grad_E, grad_v, e, b, h, t, count, eps)
                store_numbers(grad_beta, of_beta, b, h, t, count, eps)
                store_numbers(grad_decay, of_gates, b, h, t, count, eps)
        store_transposed(grad_S, grad_before, b, h, 0, d, eps)


def forward_work(d: int, e: int) -> int:
    """Numbers that a thread of ``forward`` needs."""
    return (d + 16) * vectors.padded(e) + 20 * vectors.padded(d)


def step_work(d: int, e: int) -> int:
    """Numbers that a thread of ``step`` needs."""
    return 3 * d + 2 * e


def backward_work(d: int, e: int) -> int:
    """Numbers that a thread of ``backward`` needs."""
    return ((_PER_TILE + 1) * e + 8 * _PER_TILE + 28) * vectors.padded(d) + 24 * vectors.padded(e)
