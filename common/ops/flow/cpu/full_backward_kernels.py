"""The backward pass of Flow-Attention of all sinks with all sources; legend and arguments as in ``full_kernels``.

The gradient of S is a sum over all sinks, and with it follow those of all weights, of the flows, and of the sums of
features. The gradient of a token's features is then one product of a row and a matrix T (e + 4, D). The row holds what
S or its gradient is multiplied by, and four numbers of the token; T is S or its gradient, transposed, and in four more
rows the sums of features and their gradients.

``results`` are the output, what is kept of it, and its gradient; ``grads`` those of q, k and v. In matrices of numbers
FLOW and CONSERVED are gradients, and WEIGHT is what a token's row is multiplied by.
"""

from ...shared.cpu import fours, vectors
from ...shared.cpu.compiler import inlined, kernel
from ...shared.cpu.memory import array, number
from .full_kernels import (
    CONSERVED,
    FLOW,
    SUM_K,
    SUM_K_OVER_OUTGOING,
    SUM_Q,
    SUM_Q_OVER_INCOMING,
    WEIGHT,
    kept_numbers,
    load_sides,
    whole,
)
from .kernels import (
    NONE,
    SIGMOID,
    SOFTMAX,
    clear_padding,
    load_tokens,
    matrices,
    padded,
    positive,
    row_counts,
    store_tokens,
)


@inlined
def sinks_back(Q, grad_S, G, U, e, place, out, grad_out, of_sinks, grads, like):
    """The gradient of S, and of the logarithm of each sink's weight, allocation / I, in the row FLOW."""
    b, h, n, tokens, count = place
    fours.fill(grad_S.reshape(grad_S.size), number(0, like))
    for t in range(0, len(Q), 4):
        load_tokens(G, grad_out, e, tokens, b, h, n, t, 1, count - t, like)
        load_tokens(U, out, e, tokens, b, h, n, t, 1, count - t, like)
        p0, p1, p2, p3 = fours.row_products(G, U, like)
        grads[FLOW, t], grads[FLOW, t + 1], grads[FLOW, t + 2], grads[FLOW, t + 3] = p0, p1, p2, p3
        for r in range(4):
            grads[WEIGHT, t + r] = of_sinks[WEIGHT, t + r] / positive(of_sinks[FLOW, t + r], like)
        fours.scale_rows(G, grads[WEIGHT], t, like)
        fours.add_products(grad_S, Q[t : t + 4], G, like)


@inlined
def sources_back(K, grad_S, V, U, e, place, v, grad_v, of_sources, grads, like):
    """The gradient of v, and of the logarithm of each source's weight, the competition, in the row CONSERVED."""
    b, h, m, tokens, count = place
    for t in range(0, len(K), 4):
        fours.read(grad_S, K[t : t + 4], U, like)
        load_tokens(V, v, e, tokens, b, h, m, t, 1, count - t, like)
        fours.scale_rows(U, of_sources[WEIGHT], t, like)
        p0, p1, p2, p3 = fours.row_products(U, V, like)
        grads[CONSERVED, t], grads[CONSERVED, t + 1] = p0, p1
        grads[CONSERVED, t + 2], grads[CONSERVED, t + 3] = p2, p3
        store_tokens(U, grad_v, e, tokens, b, h, m, t, 1, min(4, count - t), like)
    fours.copy(grads[WEIGHT], of_sources[WEIGHT])
    clear_padding(grad_v, tokens, b, h, m, e, like)


@inlined
def logits_back(grads, grad_logs, weights, kind, factor, like):
    """The gradients of conserved flows, times ``factor``, from those of the logarithms of weights."""
    if kind == SIGMOID:
        for i in range(len(grads)):
            grads[i] = factor * grad_logs[i] * (number(1, like) - weights[i])
    elif kind == NONE:
        fours.fill(grads, number(0, like))
    elif kind == SOFTMAX:
        total_grad = total_weight = number(0, like)
        for i in range(len(grads)):
            total_grad += grad_logs[i]
            total_weight += weights[i]
        share = total_grad / total_weight
        for i in range(len(grads)):
            grads[i] = factor * (grad_logs[i] - weights[i] * share)


@inlined
def heads_back(grads, numbers, count):
    """``logits_back`` for real sources whose heads compete, both (heads, 3, tokens)."""
    zero = number(0, grads[0, 0, 0])
    for j in range(count):
        total_grad = total_weight = zero
        for i in range(len(grads)):
            total_grad += grads[i, CONSERVED, j]
            total_weight += numbers[i, WEIGHT, j]
        share = total_grad / total_weight
        for i in range(len(grads)):
            grads[i, CONSERVED, j] -= numbers[i, WEIGHT, j] * share


@inlined
def weights_back(kept, grads, counts, options):
    """The gradients of Î and Ô from those of the logarithms of the weights; of Ô unless the heads compete."""
    (of_sinks, of_sources), (grads_of_sinks, grads_of_sources) = kept, grads
    (sinks, sources), eps = counts, options[3]
    ratio = number(max(sinks, 1), eps) / number(max(sources, 1), eps) if options[6] else number(1, eps)
    allocations, competitions = of_sinks[WEIGHT][:sinks], of_sources[WEIGHT][:sources]
    logs = grads_of_sources[CONSERVED][:sources]
    logits_back(grads_of_sinks[CONSERVED][:sinks], grads_of_sinks[FLOW][:sinks], allocations, options[2], ratio, eps)
    logits_back(logs, logs, competitions, options[1], number(1, eps), eps)


@inlined
def clamp_back(grads, flows, clamp):
    """Flows above the clamp have no gradient."""
    for i in range(len(grads)):
        if flows[i] > clamp:
            grads[i] = number(0, clamp)


@inlined
def sum_back(X, grads, sums, index, d, eps):
    """The gradient of a sum of givers, in a row of ``sums``, from those of the flows that tokens receive from it."""
    total = number(0, eps)
    for t in range(0, len(X), 4):
        g0, g1, g2, g3 = grads[t], grads[t + 1], grads[t + 2], grads[t + 3]
        fours.add_rows(sums, index, (g0, g1, g2, g3), X[t : t + 4], eps)
        total += (g0 + g1) + (g2 + g3)
    for i in range(d):
        sums[index, i] += eps * total


@inlined
def flow_back(grad, product, flow, like):
    """The gradient of I or O: ``grad`` of the logarithm of its reciprocal, ``product`` of the reciprocal."""
    if flow != positive(flow, like):
        return number(0, like)
    return -(grad + product / flow) / flow


@inlined
def first_flows_back(X, flows, grads, sums, giver, target, d, eps):
    """The gradients of I or O, in the place of ``grads``, and of the sum of givers ``target`` that they came from."""
    for t in range(0, len(X), 4):
        p0, p1, p2, p3 = fours.products_with(X[t : t + 4], sums, giver, eps)
        grads[t] = flow_back(grads[t], p0, flows[t], eps)
        grads[t + 1] = flow_back(grads[t + 1], p1, flows[t + 1], eps)
        grads[t + 2] = flow_back(grads[t + 2], p2, flows[t + 2], eps)
        grads[t + 3] = flow_back(grads[t + 3], p3, flows[t + 3], eps)
    sum_back(X, grads, sums, target, d, eps)


@inlined
def flows_back(Q, K, kept, grads, grad_sums, d, eps):
    """From the gradients of Î and Ô to those of I and O, and of all sums of features."""
    (of_sinks, of_sources), (grads_of_sinks, grads_of_sources) = kept, grads
    fours.fill(grad_sums.reshape(grad_sums.size), number(0, eps))
    sum_back(Q, grads_of_sinks[CONSERVED], grad_sums, SUM_K_OVER_OUTGOING, d, eps)
    sum_back(K, grads_of_sources[CONSERVED], grad_sums, SUM_Q_OVER_INCOMING, d, eps)
    first_flows_back(Q, of_sinks[FLOW], grads_of_sinks[FLOW], grad_sums, SUM_Q_OVER_INCOMING, SUM_K, d, eps)
    first_flows_back(K, of_sources[FLOW], grads_of_sources[FLOW], grad_sums, SUM_K_OVER_OUTGOING, SUM_Q, d, eps)


@inlined
def transpose(T, X, columns):
    """Write the first columns of a matrix to the rows of another."""
    for i in range(len(X)):
        x = X[i]
        for j in range(columns):
            T[j, i] = x[j]


@inlined
def copy_sums(T, row, sums, first, second):
    """Write two rows of ``sums`` to a matrix from ``row`` on."""
    fours.copy(T[row], sums[first])
    fours.copy(T[row + 1], sums[second])


@inlined
def features_back(X, T, G, Y, d, e, place, phi, tensor, grad, flows, grads, like):
    """The gradient of q or k: rows of ``tensor`` and four numbers of each token, times T."""
    (b, h, n, tokens, count), one = place, number(1, like)
    for t in range(0, len(X), 4):
        load_tokens(G, tensor, e, tokens, b, h, n, t, 1, count - t, like)
        fours.scale_rows(G, grads[WEIGHT], t, like)
        for r in range(4):
            G[r, e], G[r, e + 1] = grads[CONSERVED, t + r], grads[FLOW, t + r]
            G[r, e + 2], G[r, e + 3] = one / positive(flows[t + r], like), one
        fours.read(T, G, Y, like)
        fours.map_back(Y.reshape(1, Y.size), X[t : t + 4].reshape(1, Y.size), phi)
        store_tokens(Y, grad, d, tokens, b, h, n, t, 1, min(4, count - t), like)
    clear_padding(grad, tokens, b, h, n, d, like)


@inlined
def arrays(sizes, group, work, like):
    """The arrays of ``backward`` in ``work``, after the features."""
    _, n, m, d, e = sizes
    C, D, E = padded(e), padded(d), padded(e + 4)
    at = (whole(n) + whole(m)) * D
    T, Y, of_features = (
        array(work, at, (e + 4, D), like),
        array(work, at + (e + 4) * D, (4, D), like),
        array(work, at + (e + 8) * D, (2, 4, D), like),
    )
    at += (e + 16) * D
    of_values, G, grad_S = (
        array(work, at, (2, 4, C), like),
        array(work, at + 8 * C, (4, E), like),
        array(work, at + 8 * C + 4 * E, (group, d, C), like),
    )
    at += (8 + group * d) * C + 4 * E
    of_sinks = array(work, at, (group, 3, whole(n)), like)
    of_sources = array(work, at + group * 3 * whole(n), (group, 3, whole(m)), like)
    fours.fill(T.reshape(T.size), number(0, like))
    return T, Y, of_features[0], of_features[1], of_values[0], of_values[1], G, grad_S, of_sinks, of_sources


@kernel
def backward(first, last, sizes, options, group, tokens, inputs, results, grads, work):
    """Gradients of ``inputs``, groups ``first`` to ``last`` of heads."""
    (H, n, m, d, e), v, (out, kept, grad_out), phi, eps = sizes, inputs[2], results, options[0], options[3]
    T, Y, sums, grad_sums, V, U, G, grad_S, of_sinks, of_sources = arrays(sizes, group, work, eps)
    for begin in range(first * group, last * group, group):
        b = begin // H
        all_sinks, all_sources = kept_numbers(kept, begin, group, n, m, eps)
        fours.fill(of_sinks.reshape(of_sinks.size), number(0, eps))
        fours.fill(of_sources.reshape(of_sources.size), number(0, eps))
        for i in range(group):
            h, flows, numbers = begin % H + i, (all_sinks[i], all_sources[i]), (of_sinks[i], of_sources[i])
            Q, K, counts = load_sides(work, sizes, options, tokens, inputs, b, h, sums, True)
            sinks, sources = (b, h, n, tokens[0], counts[0]), (b, h, m, tokens[1], counts[1])
            sinks_back(Q, grad_S[i], V, U, e, sinks, out, grad_out, flows[0], numbers[0], eps)
            sources_back(K, grad_S[i], V, U, e, sources, v, grads[2], flows[1], numbers[1], eps)
            weights_back(flows, numbers, counts, options)
        if options[1] > NONE:
            heads_back(of_sources, all_sources, row_counts(tokens[1], b, m)[0])
        for i in range(group):
            h, flows, numbers = begin % H + i, (all_sinks[i], all_sources[i]), (of_sinks[i], of_sources[i])
            Q, K, counts = load_sides(work, sizes, options, tokens, inputs, b, h, sums, group > 1)
            sinks, sources = (b, h, n, tokens[0], counts[0]), (b, h, m, tokens[1], counts[1])
            fours.load_sums(sums, matrices(kept[2], H, 4, d), d, b, h, eps)
            clamp_back(numbers[1][CONSERVED], flows[1][CONSERVED], options[5])
            flows_back(Q, K, flows, numbers, grad_sums, d, eps)
            transpose(T, array(kept[3], (begin + i) * d * e, (d, e), eps), e)
            copy_sums(T, e, sums, SUM_K_OVER_OUTGOING, SUM_K)
            copy_sums(T, e + 2, grad_sums, SUM_Q_OVER_INCOMING, SUM_Q)
            features_back(Q, T, G, Y, d, e, sinks, phi, grad_out, grads[0], flows[0][FLOW], numbers[0], eps)
            transpose(T, grad_S[i], e)
            copy_sums(T, e, sums, SUM_Q_OVER_INCOMING, SUM_Q)
            copy_sums(T, e + 2, grad_sums, SUM_K_OVER_OUTGOING, SUM_K)
            features_back(K, T, G, Y, d, e, sources, phi, v, grads[1], flows[1][FLOW], numbers[1], eps)


def backward_work(n: int, m: int, d: int, e: int, group: int) -> int:
    """Numbers that a thread of ``backward`` needs."""
    tokens, C, D, E = 4 * (-(-n // 4) + -(-m // 4)), vectors.padded(e), vectors.padded(d), vectors.padded(e + 4)
    return (tokens + e + 16) * D + (8 + group * d) * C + 4 * E + 3 * group * tokens
