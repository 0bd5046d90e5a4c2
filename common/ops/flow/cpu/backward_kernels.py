"""The backward pass of causal Flow-Attention as two loops over tokens; legend as in ``kernels``.

From the last token to the first go the gradients of the running sums, to which every token adds where it has read. From
the first to the last go the sums themselves, which are multiplied by the gradients of the flows that have read them.
Between the loops four numbers of each token are kept: the gradients of I, O, Î and Ô, none of them divided by c.

``results`` are out, the numbers kept by ``forward``, and the gradient of out; ``grads`` those of q, k and v. ``blocks``
are Q, K, X, Y (4, d) and V, G, W (4, e): G is the gradient of U, X and Y collect those of Q and K, W is that of V.
"""

from ...shared.cpu import fours
from ...shared.cpu.compiler import inlined, kernel
from ...shared.cpu.memory import array, number, row
from . import KEPT
from .kernels import (
    NONE,
    SIGMOID,
    clear_padding,
    load_tokens,
    load_vector,
    matrices,
    position,
    positive,
    row_counts,
    store_tokens,
)


@inlined
def load_four(blocks, b, h, first, direction, count, sizes, options, tokens, inputs, results):
    """Features, weighted values and G of ``count`` of four real tokens, and 0 for the others."""
    (_, n, d, e), (q, k, v), (_, kept, grad_out), (Q, K, _, _, V, G, _) = sizes, inputs, results, blocks
    phi, eps = options[0], options[3]
    load_tokens(Q, q, d, tokens, b, h, n, first, direction, count, eps)
    load_tokens(K, k, d, tokens, b, h, n, first, direction, count, eps)
    load_tokens(V, v, e, tokens, b, h, n, first, direction, count, eps)
    load_tokens(G, grad_out, e, tokens, b, h, n, first, direction, count, eps)
    fours.apply_map(Q, phi, count)
    fours.apply_map(K, phi, count)
    for r in range(count):
        incoming, _, _, competition, allocation = numbers_of(kept, b, h, first + direction * r, eps)
        fours.scale(V[r], competition)
        fours.scale(G[r], allocation / positive(incoming, eps))


@inlined
def numbers_of(kept, b, h, index, like):
    """I, O, Ô, competition and allocation of a token."""
    numbers = row(kept, b, h, index, KEPT, like)
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]


@inlined
def dot(x, y, like):
    """The product of two vectors."""
    total = number(0, like)
    for i in range(len(x)):
        total += x[i] * y[i]
    return total


@inlined
def read_both_and_add(S, Q, K, V, G, X, Y, like):
    """X += V Sᵀ and Y += K S, then S += Qᵀ G."""
    g0, g1, g2, g3, v0, v1, v2, v3 = G[0], G[1], G[2], G[3], V[0], V[1], V[2], V[3]
    o0, o1, o2, o3 = Y[0], Y[1], Y[2], Y[3]
    for i in range(len(S)):
        s = S[i]
        q0, q1, q2, q3, k0, k1, k2, k3 = Q[0, i], Q[1, i], Q[2, i], Q[3, i], K[0, i], K[1, i], K[2, i], K[3, i]
        x0 = x1 = x2 = x3 = number(0, like)
        for j in range(len(v0)):
            a = s[j]
            x0 += a * v0[j]
            x1 += a * v1[j]
            x2 += a * v2[j]
            x3 += a * v3[j]
            o0[j] += k0 * a
            o1[j] += k1 * a
            o2[j] += k2 * a
            o3[j] += k3 * a
            s[j] = a + (q0 * g0[j] + q1 * g1[j] + q2 * g2[j] + q3 * g3[j])
        X[0, i] += x0
        X[1, i] += x1
        X[2, i] += x2
        X[3, i] += x3


@inlined
def read_rows_and_add(S, K, V, G, X, like):
    """X += G Sᵀ, then S += Kᵀ V."""
    g0, g1, g2, g3, v0, v1, v2, v3 = G[0], G[1], G[2], G[3], V[0], V[1], V[2], V[3]
    for i in range(len(S)):
        s = S[i]
        k0, k1, k2, k3 = K[0, i], K[1, i], K[2, i], K[3, i]
        x0 = x1 = x2 = x3 = number(0, like)
        for j in range(len(v0)):
            a = s[j]
            x0 += a * g0[j]
            x1 += a * g1[j]
            x2 += a * g2[j]
            x3 += a * g3[j]
            s[j] = a + (k0 * v0[j] + k1 * v1[j] + k2 * v2[j] + k3 * v3[j])
        X[0, i] += x0
        X[1, i] += x1
        X[2, i] += x2
        X[3, i] += x3


@inlined
def grad_logit(grad_log, weight, kind, later, c, like):
    """The gradient of the flow of a competition or allocation, from ``grad_log``, that of the weight's logarithm.

    ``later[0]`` is minus the gradient of the logarithm of the softmax's sum: after the token, and then before it.
    """
    if kind == SIGMOID:
        return grad_log * (number(1, like) - weight)
    if kind == NONE:
        return number(0, like)
    share = weight / c
    grad_sum = later[0] + grad_log
    later[0] = grad_sum * (number(1, like) - share)
    return grad_log - share * grad_sum


@inlined
def token_back(x, y, numbers, competing, allocating, grad_sums, softmaxes, c, options, flow_grads):
    """Write the gradients of a token's flows, and add what it has read from the sums to their gradients.

    ``competing`` and ``allocating`` are the gradients of the logarithms of competition and allocation.
    """
    grad_sum_k, grad_sum_q, grad_sum_k_over_outgoing, grad_sum_q_over_incoming = grad_sums
    incoming, outgoing, conserved_outgoing, competition, allocation = numbers
    eps, clamp = options[3], options[5]
    grad_conserved_outgoing = grad_logit(competing, competition, options[1], softmaxes[0], c, eps) / c
    grad_conserved_incoming = grad_logit(allocating, allocation, options[2], softmaxes[1], c, eps) / c
    grad_over_incoming = grad_over_outgoing = grad_incoming = grad_outgoing = number(0, eps)
    if conserved_outgoing > clamp:
        grad_conserved_outgoing = number(0, eps)
    for i in range(len(x)):
        grad_sum_k_over_outgoing[i] += grad_conserved_incoming * (x[i] + eps)
        grad_sum_q_over_incoming[i] += grad_conserved_outgoing * (y[i] + eps)
        grad_over_outgoing += y[i] * grad_sum_k_over_outgoing[i]
        grad_over_incoming += x[i] * grad_sum_q_over_incoming[i]
    if incoming == positive(incoming, eps):  # the output is divided by I as it is multiplied by the allocation
        grad_incoming = -(grad_over_incoming * (c / incoming) + allocating) / incoming
    if outgoing == positive(outgoing, eps):
        grad_outgoing = -(grad_over_outgoing * (c / outgoing)) / outgoing
    for i in range(len(x)):
        grad_sum_k[i] += grad_incoming * (x[i] + eps)
        grad_sum_q[i] += grad_outgoing * (y[i] + eps)
    flow_grads[0], flow_grads[1] = grad_incoming, grad_outgoing
    flow_grads[2], flow_grads[3] = grad_conserved_incoming, grad_conserved_outgoing


@inlined
def from_later(b, h, sizes, options, tokens, inputs, results, grads, flow_grads, grad_sums, softmaxes, S, blocks):
    """The gradient of v, and of the features q and k what comes from the gradients of the sums they were added to.

    ``S``, ``grad_sums`` and ``softmaxes`` are gradients of the sums after the last token, and then before the first.
    """
    (_, n, d, e), (Q, K, X, Y, V, G, W), (out, kept, grad_out), eps = sizes, blocks, results, options[3]
    real, earlier = row_counts(tokens, b, n)
    for begin in range(real - 1, -1, -4):
        count = min(4, begin + 1)
        load_four(blocks, b, h, begin, -1, count, sizes, options, tokens, inputs, results)
        fours.weigh(fours.products(K, Q, eps), G, W)
        fours.weigh(fours.products(V, G, eps), Q, Y)
        read_both_and_add(S, Q, K, V, G, Y, W, eps)
        for r in range(count):
            t, c, numbers = (
                position(tokens, b, n, begin - r),
                number(earlier + begin - r + 1, eps),
                numbers_of(kept, b, h, begin - r, eps),
            )
            # A result's gradient times the result is the gradient of the logarithm of a factor of it.
            allocating = dot(row(grad_out, b, h, t, e, eps), row(out, b, h, t, e, eps), eps)
            competing = dot(W[r], V[r], eps)
            token_back(
                Q[r], K[r], numbers, competing, allocating, grad_sums, softmaxes, c, options, flow_grads[begin - r]
            )
            over_incoming, over_outgoing = c / positive(numbers[0], eps), c / positive(numbers[1], eps)
            for i in range(d):
                X[r, i] = grad_sums[1][i] + over_incoming * grad_sums[3][i]
                Y[r, i] += grad_sums[0][i] + over_outgoing * grad_sums[2][i]
            fours.scale(W[r], numbers[3])
        store_tokens(X, grads[0], d, tokens, b, h, n, begin, -1, count, eps)
        store_tokens(Y, grads[1], d, tokens, b, h, n, begin, -1, count, eps)
        store_tokens(W, grads[2], e, tokens, b, h, n, begin, -1, count, eps)


@inlined
def from_earlier(b, h, sizes, options, tokens, inputs, results, grads, flow_grads, sums, S, blocks):
    """Add to the gradients of the features q and k what comes from the sums that they have read; then of q and k.

    ``S`` and ``sums`` are those before the first token, and then after the last.
    """
    (_, n, d, _), (Q, K, X, Y, V, G, _), eps = sizes, blocks, options[3]
    sum_k, sum_q, sum_k_over_outgoing, sum_q_over_incoming = sums
    real, earlier = row_counts(tokens, b, n)
    for begin in range(0, real, 4):
        count = min(4, real - begin)
        load_four(blocks, b, h, begin, 1, count, sizes, options, tokens, inputs, results)
        fours.weigh(fours.products(G, V, eps), K, X)
        read_rows_and_add(S, K, V, G, X, eps)
        for r in range(count):
            t, c, index = position(tokens, b, n, begin + r), number(earlier + begin + r + 1, eps), begin + r
            incoming, outgoing, _, _, _ = numbers_of(results[1], b, h, index, eps)
            over_incoming, over_outgoing = c / positive(incoming, eps), c / positive(outgoing, eps)
            grad_incoming, grad_outgoing = flow_grads[index, 0], flow_grads[index, 1]
            grad_conserved_incoming, grad_conserved_outgoing = flow_grads[index, 2], flow_grads[index, 3]
            x, y, grad_x, grad_y = Q[r], K[r], row(grads[0], b, h, t, d, eps), row(grads[1], b, h, t, d, eps)
            for i in range(d):
                sum_k[i] += y[i]
                sum_q[i] += x[i]
                sum_k_over_outgoing[i] += y[i] * over_outgoing
                sum_q_over_incoming[i] += x[i] * over_incoming
                by_incoming = grad_incoming * (sum_k[i] + eps)
                by_outgoing = grad_outgoing * (sum_q[i] + eps)
                by_incoming += grad_conserved_incoming * (sum_k_over_outgoing[i] + eps)
                by_outgoing += grad_conserved_outgoing * (sum_q_over_incoming[i] + eps)
                X[r, i] += grad_x[i] + by_incoming
                Y[r, i] = grad_y[i] + by_outgoing
        fours.map_back(X, Q, options[0])
        fours.map_back(Y, K, options[0])
        store_tokens(X, grads[0], d, tokens, b, h, n, begin, 1, count, eps)
        store_tokens(Y, grads[1], d, tokens, b, h, n, begin, 1, count, eps)


@inlined
def load_all(sums, S, addresses, head, H, like):
    """The sums of features and of values of a head, or their gradients."""
    for i in range(4):
        load_vector(sums[i], addresses[i], head, like)
    fours.load_sums(S, matrices(addresses[6], H, *S.shape), S.shape[1], head // H, head % H, like)


@inlined
def store_all(sums, S, softmaxes, addresses, head, H, like):
    """Write the gradients of all sums of a head, where there is an address."""
    for i in range(4):
        if addresses[i] != 0:
            fours.copy(array(addresses[i], head * len(sums[i]), len(sums[i]), like), sums[i])
    for i in range(2):
        if addresses[4 + i] != 0:
            array(addresses[4 + i], head, 1, like)[0] = -softmaxes[i, 0]
    fours.store_sums(S, matrices(addresses[6], H, *S.shape), S.shape[1], head // H, head % H, like)


@kernel
def backward(first, last, sizes, options, tokens, inputs, before, results, grad_after, grads, grad_before, work):
    """Gradients of ``inputs`` and ``before``, heads ``first`` to ``last``; of ``before`` where there is a tensor."""
    (H, n, d, e), eps = sizes, options[3]
    S, vectors, of_features = (
        array(work, 0, (d, e), eps),
        array(work, d * e, (4, d), eps),
        array(work, d * (e + 4), (4, 4, d), eps),
    )
    at = d * (e + 20)
    of_values, flow_grads, softmaxes = (
        array(work, at, (3, 4, e), eps),
        array(work, at + 12 * e, (n, 4), eps),
        array(work, at + 12 * e + 4 * n, (2, 1), eps),
    )
    sums = vectors[0], vectors[1], vectors[2], vectors[3]
    blocks = of_features[0], of_features[1], of_features[2], of_features[3], of_values[0], of_values[1], of_values[2]
    for head in range(first, last):
        b, h = head // H, head % H
        load_all(sums, S, grad_after, head, H, eps)
        for i in range(2):
            x = grad_after[4 + i]
            softmaxes[i, 0] = number(0, eps) if x == 0 else -array(x, head, 1, eps)[0]
        from_later(b, h, sizes, options, tokens, inputs, results, grads, flow_grads, sums, softmaxes, S, blocks)
        store_all(sums, S, softmaxes, grad_before, head, H, eps)
        load_all(sums, S, before, head, H, eps)
        from_earlier(b, h, sizes, options, tokens, inputs, results, grads, flow_grads, sums, S, blocks)
        clear_padding(grads[0], tokens, b, h, n, d, eps)
        clear_padding(grads[1], tokens, b, h, n, d, eps)
        clear_padding(grads[2], tokens, b, h, n, e, eps)


def backward_work(n: int, d: int, e: int) -> int:
    """Numbers that a thread of ``backward`` needs."""
    return d * e + 20 * d + 12 * e + 4 * n + 2
