"""Inner loops of kernels: four tokens and the sums S that they read and that they are added to.

Legend: f rows and c columns of S; Q, K (4, f), V (4, c): four tokens; U (4, c): their outputs; A (4, f): the factors by
which S decays before each of them is added; P: the 10 scores of queries r and keys s <= r, in the order of r; count:
how many of the four tokens there are, 1 to 4. The arrays with c columns have a ``vectors.padded`` number of columns, 0
after the channels of a tensor. Whoever loads tokens writes these zeros again, since a product of one of them with NaN
or infinity is NaN, which would reach other tokens, heads and rows of the batch. ``README.md`` has the formulas.
"""

from . import vectors
from .compiler import inlined
from .memory import exp, number, row
from .vectors import filled, plus, times, total, width

#: Kinds of gates: every factor is 1, or one number for a head, or one for each row of S.
NO_GATE, HEAD_GATE, CHANNEL_GATE = 0, 1, 2
#: Feature maps of queries and keys, as in ``feature_maps.FEATURE_MAPS``; 0 is none.
SIGMOID, ELU_PLUS_ONE, RELU = 1, 2, 3


@inlined
def fill(x, value):
    """Set each entry of a vector."""
    for i in range(len(x)):
        x[i] = value


@inlined
def copy(target, source):
    """Copy a vector."""
    for i in range(len(source)):
        target[i] = source[i]


@inlined
def copy_to(target, source):
    """Fill a vector with the first numbers of a longer one."""
    for i in range(len(target)):
        target[i] = source[i]


@inlined
def copy_rows(target, source):
    """Copy a contiguous matrix."""
    copy(target.reshape(target.size), source.reshape(source.size))


@inlined
def increase(x, y):
    """Add y to a vector x."""
    for i in range(len(x)):
        x[i] += y[i]


@inlined
def scale(x, factor):
    """Multiply a vector by a number."""
    for i in range(len(x)):
        x[i] *= factor


@inlined
def copy_padded(X, r, source, like):
    """Copy a vector to row r of a matrix, which has its size or a ``vectors.padded`` one, and write 0 after it."""
    if X.shape[1] == len(source):
        copy(X[r], source)
    else:
        for j in range(0, X.shape[1], width(like)):
            vectors.store(X, r, j, vectors.load_first(source, j, len(source) - j))


@inlined
def load(X, tensor, size, b, h, t, count, like):
    """Four tokens of ``size`` channels of a tensor, 0 after the last token."""
    for r in range(4):
        if r < count:
            copy_padded(X, r, row(tensor, b, h, t + r, size, like), like)
        else:
            fill(X[r], number(0, like))


@inlined
def store(X, tensor, size, b, h, t, count, like):
    """Write ``size`` channels of the first ``count`` of four tokens to a tensor."""
    for r in range(count):
        copy_to(row(tensor, b, h, t + r, size, like), X[r])


@inlined
def apply_map(X, phi, count):
    """Apply a feature map to the first ``count`` of four tokens; the others remain 0."""
    one = number(1, X[0, 0])
    for r in range(count):
        x = X[r]
        if phi == SIGMOID:
            for i in range(len(x)):
                x[i] = one / (one + exp(-x[i]))
        elif phi == ELU_PLUS_ONE:
            for i in range(len(x)):
                x[i] = x[i] + one if x[i] > 0 else exp(x[i])
        elif phi == RELU:
            for i in range(len(x)):
                x[i] = max(x[i], number(0, one)) + number(1e-6, one)


@inlined
def map_back(grad, X, phi):
    """Make ``grad`` the gradient of the input of a feature map, from that of its output X."""
    one = number(1, X[0, 0])
    for r in range(len(grad)):
        g, x = grad[r], X[r]
        if phi == SIGMOID:
            for i in range(len(x)):
                g[i] *= x[i] * (one - x[i])
        elif phi == ELU_PLUS_ONE:
            for i in range(len(x)):
                g[i] *= min(x[i], one)
        elif phi == RELU:
            for i in range(len(x)):
                g[i] *= number(1, one) if x[i] > number(1e-6, one) else number(0, one)


@inlined
def load_gates(A, log_decay, kind, b, h, t, count, like):
    """The factors of four count, 1 after the last token."""
    for r in range(4):
        if r >= count or kind == NO_GATE:
            fill(A[r], number(1, like))
        elif kind == HEAD_GATE:
            fill(A[r], exp(row(log_decay, b, h, t + r, 1, like)[0]))
        else:
            logs = row(log_decay, b, h, t + r, A.shape[1], like)
            for i in range(len(logs)):
                A[r, i] = exp(logs[i])


@inlined
def decay(A, kind, Q, K, from_start, to_end, D):
    """Queries decayed from the start of the four count, keys decayed until their end, and the decay D over all."""
    for r in range(4):
        copy(from_start[r], Q[r])
        copy(to_end[r], K[r])
    if kind == NO_GATE:
        copy(D, A[0])
        return
    q0, q1, q2, q3, k0, k1, k2 = (
        from_start[0],
        from_start[1],
        from_start[2],
        from_start[3],
        to_end[0],
        to_end[1],
        to_end[2],
    )
    for i in range(len(D)):
        a0, a1, a2, a3 = A[0, i], A[1, i], A[2, i], A[3, i]
        first, last = a0 * a1, a2 * a3
        D[i] = first * last
        q0[i] *= a0
        q1[i] *= first
        q2[i] *= first * a2
        q3[i] *= first * last
        k0[i] *= a1 * last
        k1[i] *= last
        k2[i] *= a3


@inlined
def scores(A, Q, K, like):
    """Products of queries and keys, each channel decayed from the key to the query."""
    p00 = p10 = p11 = p20 = p21 = p22 = p30 = p31 = p32 = p33 = number(0, like)
    for i in range(Q.shape[1]):
        a1, a2, a3 = A[1, i], A[2, i], A[3, i]
        q1, q2, q3 = Q[1, i], Q[2, i], Q[3, i]
        k0, k1, k2 = K[0, i], K[1, i], K[2, i]
        p00 += Q[0, i] * k0
        p11 += q1 * k1
        p22 += q2 * k2
        p33 += q3 * K[3, i]
        q1 *= a1
        q2 *= a2
        q3 *= a3
        p10 += q1 * k0
        p21 += q2 * k1
        p32 += q3 * k2
        q2 *= a1
        q3 *= a2
        p20 += q2 * k0
        p31 += q3 * k1
        p30 += q3 * a1 * k0
    return p00, p10, p11, p20, p21, p22, p30, p31, p32, p33


@inlined
def products(X, Y, like):
    """Products x_r·y_s for s <= r, without decay."""
    p00 = p10 = p11 = p20 = p21 = p22 = p30 = p31 = p32 = p33 = number(0, like)
    for i in range(X.shape[1]):
        x1, x2, x3, y0, y1, y2 = X[1, i], X[2, i], X[3, i], Y[0, i], Y[1, i], Y[2, i]
        p00 += X[0, i] * y0
        p10 += x1 * y0
        p11 += x1 * y1
        p20 += x2 * y0
        p21 += x2 * y1
        p22 += x2 * y2
        p30 += x3 * y0
        p31 += x3 * y1
        p32 += x3 * y2
        p33 += x3 * Y[3, i]
    return p00, p10, p11, p20, p21, p22, p30, p31, p32, p33


@inlined
def weigh(P, V, U):
    """U = P V."""
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    for j in range(V.shape[1]):
        v0, v1, v2 = V[0, j], V[1, j], V[2, j]
        U[0, j] = p00 * v0
        U[1, j] = p10 * v0 + p11 * v1
        U[2, j] = p20 * v0 + p21 * v1 + p22 * v2
        U[3, j] = p30 * v0 + p31 * v1 + p32 * v2 + p33 * V[3, j]


@inlined
def weigh_back(P, G, U):
    """U = Pᵀ G."""
    p00, p10, p11, p20, p21, p22, p30, p31, p32, p33 = P
    for j in range(G.shape[1]):
        g1, g2, g3 = G[1, j], G[2, j], G[3, j]
        U[0, j] = p00 * G[0, j] + p10 * g1 + p20 * g2 + p30 * g3
        U[1, j] = p11 * g1 + p21 * g2 + p31 * g3
        U[2, j] = p22 * g2 + p32 * g3
        U[3, j] = p33 * g3


@inlined
def load_four(X, j):
    """The vectors of four rows that begin in column j."""
    return vectors.load(X, 0, j), vectors.load(X, 1, j), vectors.load(X, 2, j), vectors.load(X, 3, j)


@inlined
def store_four(X, j, x0, x1, x2, x3):
    """Write what ``load_four`` reads."""
    vectors.store(X, 0, j, x0)
    vectors.store(X, 1, j, x1)
    vectors.store(X, 2, j, x2)
    vectors.store(X, 3, j, x3)


@inlined
def read_and_add(S, D, Q, K, V, U, like):
    """U += Q S, then S = diag(D) S + Kᵀ V."""
    for j in range(0, S.shape[1], width(like)):
        u0, u1, u2, u3 = load_four(U, j)
        v0, v1, v2, v3 = load_four(V, j)
        for i in range(S.shape[0]):
            s = vectors.load(S, i, j)
            u0, u1, u2, u3 = plus(u0, Q[0, i], s), plus(u1, Q[1, i], s), plus(u2, Q[2, i], s), plus(u3, Q[3, i], s)
            s = plus(plus(times(s, D[i]), K[0, i], v0), K[1, i], v1)
            vectors.store(S, i, j, plus(plus(s, K[2, i], v2), K[3, i], v3))
        store_four(U, j, u0, u1, u2, u3)


@inlined
def add(S, D, K, V, like):
    """S = diag(D) S + Kᵀ V."""
    for j in range(0, S.shape[1], width(like)):
        v0, v1, v2, v3 = load_four(V, j)
        for i in range(S.shape[0]):
            s = plus(plus(times(vectors.load(S, i, j), D[i]), K[0, i], v0), K[1, i], v1)
            vectors.store(S, i, j, plus(plus(s, K[2, i], v2), K[3, i], v3))


@inlined
def read(S, Q, U, like):
    """U = Q S."""
    columns, step = S.shape[1], width(like)
    for j in range(0, columns - step, 2 * step):
        u0 = u1 = u2 = u3 = w0 = w1 = w2 = w3 = filled(number(0, like))
        for i in range(S.shape[0]):
            s, t = vectors.load(S, i, j), vectors.load(S, i, j + step)
            q0, q1, q2, q3 = Q[0, i], Q[1, i], Q[2, i], Q[3, i]
            u0, u1, u2, u3 = plus(u0, q0, s), plus(u1, q1, s), plus(u2, q2, s), plus(u3, q3, s)
            w0, w1, w2, w3 = plus(w0, q0, t), plus(w1, q1, t), plus(w2, q2, t), plus(w3, q3, t)
        store_four(U, j, u0, u1, u2, u3)
        store_four(U, j + step, w0, w1, w2, w3)
    if columns % (2 * step) != 0:
        u0 = u1 = u2 = u3 = filled(number(0, like))
        for i in range(S.shape[0]):
            s = vectors.load(S, i, columns - step)
            u0, u1, u2, u3 = plus(u0, Q[0, i], s), plus(u1, Q[1, i], s), plus(u2, Q[2, i], s), plus(u3, Q[3, i], s)
        store_four(U, columns - step, u0, u1, u2, u3)


@inlined
def add_products(S, K, V, like):
    """S += Kᵀ V."""
    columns, step = S.shape[1], width(like)
    for j in range(0, columns - step, 2 * step):
        v0, v1, v2, v3 = load_four(V, j)
        w0, w1, w2, w3 = load_four(V, j + step)
        for i in range(S.shape[0]):
            k0, k1, k2, k3 = K[0, i], K[1, i], K[2, i], K[3, i]
            s, t = vectors.load(S, i, j), vectors.load(S, i, j + step)
            vectors.store(S, i, j, plus(plus(plus(plus(s, k0, v0), k1, v1), k2, v2), k3, v3))
            vectors.store(S, i, j + step, plus(plus(plus(plus(t, k0, w0), k1, w1), k2, w2), k3, w3))
    if columns % (2 * step) != 0:
        v0, v1, v2, v3 = load_four(V, columns - step)
        for i in range(S.shape[0]):
            s = plus(plus(vectors.load(S, i, columns - step), K[0, i], v0), K[1, i], v1)
            vectors.store(S, i, columns - step, plus(plus(s, K[2, i], v2), K[3, i], v3))


@inlined
def clear_columns(X, size, like):
    """Set the columns after ``size`` to 0, which the last vector of each row has."""
    step = width(like)
    if size < X.shape[1]:
        for j in range(size // step * step, X.shape[1], step):
            for t in range(len(X)):
                vectors.store(X, t, j, vectors.first(vectors.load(X, t, j), size - j))


@inlined
def scale_rows(X, factors, begin, like):
    """Multiply four rows by the numbers of ``factors`` from ``begin`` on."""
    for j in range(0, X.shape[1], width(like)):
        for r in range(4):
            vectors.store(X, r, j, times(vectors.load(X, r, j), factors[begin + r]))


@inlined
def row_products(X, Y, like):
    """Products of each of four rows of X with the same row of Y."""
    x0 = x1 = x2 = x3 = filled(number(0, like))
    for j in range(0, X.shape[1], width(like)):
        a0, a1, a2, a3 = load_four(X, j)
        b0, b1, b2, b3 = load_four(Y, j)
        x0, x1, x2, x3 = plus(x0, a0, b0), plus(x1, a1, b1), plus(x2, a2, b2), plus(x3, a3, b3)
    return total(x0), total(x1), total(x2), total(x3)


@inlined
def products_with(X, vector, index, like):
    """Products of four rows of X with row ``index`` of a matrix."""
    x0 = x1 = x2 = x3 = filled(number(0, like))
    for j in range(0, X.shape[1], width(like)):
        a0, a1, a2, a3 = load_four(X, j)
        b = vectors.load(vector, index, j)
        x0, x1, x2, x3 = plus(x0, a0, b), plus(x1, a1, b), plus(x2, a2, b), plus(x3, a3, b)
    return total(x0), total(x1), total(x2), total(x3)


@inlined
def add_rows(target, index, factors, X, like):
    """Add four rows of X, multiplied by four numbers, to row ``index`` of a matrix."""
    f0, f1, f2, f3 = factors
    for j in range(0, X.shape[1], width(like)):
        x0, x1, x2, x3 = load_four(X, j)
        y = plus(plus(vectors.load(target, index, j), f0, x0), f1, x1)
        vectors.store(target, index, j, plus(plus(y, f2, x2), f3, x3))


@inlined
def add_back(S, grad_S, D, Q, K, V, G, X, Y, same, grad_V, like):
    """The gradients of ``read_and_add``, for the gradient G (4, c) of U and ``grad_S`` of S after the four tokens.

    X = G Sᵀ and Y = V grad_Sᵀ (4, f), ``same`` (f) the products of each row of S and of ``grad_S``,
    grad_V += K grad_S; then grad_S = diag(D) grad_S + Qᵀ G, that before the tokens.
    """
    for i in range(S.shape[0]):
        x0 = x1 = x2 = x3 = y0 = y1 = y2 = y3 = st = filled(number(0, like))
        for j in range(0, S.shape[1], width(like)):
            s, t = vectors.load(S, i, j), vectors.load(grad_S, i, j)
            g0, g1, g2, g3 = load_four(G, j)
            v0, v1, v2, v3 = load_four(V, j)
            x0, x1, x2, x3 = plus(x0, s, g0), plus(x1, s, g1), plus(x2, s, g2), plus(x3, s, g3)
            y0, y1, y2, y3 = plus(y0, t, v0), plus(y1, t, v1), plus(y2, t, v2), plus(y3, t, v3)
            st = plus(st, s, t)
        X[0, i], X[1, i], X[2, i], X[3, i] = total(x0), total(x1), total(x2), total(x3)
        Y[0, i], Y[1, i], Y[2, i], Y[3, i] = total(y0), total(y1), total(y2), total(y3)
        same[i] = total(st)
    read_and_add(grad_S, D, K, Q, G, grad_V, like)


@inlined
def load_sums(S, tensor, size, b, h, like):
    """The sums of a head, of ``size`` columns, and zeros where there are no numbers."""
    fill(S.reshape(S.size), number(0, like))
    if tensor[0] != 0:
        for i in range(len(S)):
            copy(S[i], row(tensor, b, h, i, size, like))


@inlined
def store_sums(S, tensor, size, b, h, like):
    """Write what ``load_sums`` reads, if there is a tensor."""
    if tensor[0] != 0:
        for i in range(len(S)):
            copy_to(row(tensor, b, h, i, size, like), S[i])
