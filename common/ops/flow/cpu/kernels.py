"""Causal Flow-Attention (Algorithm 2) as loops over tokens: forward, and the step of one token.

Legend, with that of the folder: x, y (d): features phi(q), phi(k) of a token; Q, K (4, d), V, U (4, e): features,
weighted values and outputs of four tokens; S (d, e): the running sum of y wᵀ, w = competition · v; c: the number of
tokens so far. The real tokens of a row have the indices 0, 1, ...; padding is skipped.

Tensors of tokens are an address and strides, as in ``shared/cpu/memory.py``. The arguments are
    sizes: H, n, d, e.
    options: the numbers of phi in ``fours`` and of competition and allocation below; eps, outer_eps and clamp.
    tokens: addresses of the positions of all tokens, real ones first (B, n); of the number of real tokens (B,); of that
        of earlier tokens (B,). int64; 0 where no token is padding, and where none is earlier.
    before, after: addresses of the sums of a state, in the order of STATE_SUMS, contiguous; 0 for sums that are 0.
    results: the output, and numbers of each token that the backward pass needs (B, H, n, KEPT).
"""

import math

import numpy as np

from ...shared.cpu import fours, vectors
from ...shared.cpu.compiler import inlined, kernel
from ...shared.cpu.memory import array, exp, number, row
from . import KEPT

#: Kinds of competition and allocation.
SOFTMAX, SIGMOID, NONE = 0, 1, 2
_INTEGER = np.int64(0)
padded = inlined(vectors.padded)


@inlined
def row_counts(tokens, b, n):
    """The number of real tokens of a row, and of earlier tokens."""
    real, earlier = n, 0
    if tokens[1] != 0:
        real = array(tokens[1], b, 1, _INTEGER)[0]
    if tokens[2] != 0:
        earlier = array(tokens[2], b, 1, _INTEGER)[0]
    return real, earlier


@inlined
def position(tokens, b, n, index):
    """The position of the real token ``index`` of a row; of padding, if there are not as many."""
    return index if tokens[0] == 0 else array(tokens[0], b * n + index, 1, _INTEGER)[0]


@inlined
def load_tokens(X, tensor, size, tokens, b, h, n, first, direction, count, like):
    """``count`` of four real tokens, each ``direction`` after the one before, and 0 for the others."""
    for r in range(4):
        if r < count:
            t = position(tokens, b, n, first + direction * r)
            fours.copy_padded(X, r, row(tensor, b, h, t, size, like), like)
        else:
            fours.fill(X[r], number(0, like))


@inlined
def store_tokens(X, tensor, size, tokens, b, h, n, first, direction, count, like):
    """Write ``count`` of four tokens."""
    for r in range(count):
        t = position(tokens, b, n, first + direction * r)
        fours.copy_to(row(tensor, b, h, t, size, like), X[r])


@inlined
def clear_padding(tensor, tokens, b, h, n, channels, like):
    """Write 0 at padding."""
    for index in range(row_counts(tokens, b, n)[0], n):
        fours.fill(row(tensor, b, h, position(tokens, b, n, index), channels, like), number(0, like))


@inlined
def positive(flow, like):
    """A flow, with 1 in place of 0: features that have underflowed have none."""
    return number(1, like) if flow < number(1e-18, like) else flow


@inlined
def add_token(x, y, sums, c, eps, outer):
    """Add a token to the sums; its flows I and O, not divided by c, and Î and Ô."""
    sum_k, sum_q, sum_k_over_outgoing, sum_q_over_incoming = sums
    incoming = outgoing = outer
    for i in range(len(x)):
        sum_k[i] += y[i]
        sum_q[i] += x[i]
        incoming += (x[i] + eps) * (sum_k[i] + eps)
        outgoing += (y[i] + eps) * (sum_q[i] + eps)
    over_incoming, over_outgoing = c / positive(incoming, eps), c / positive(outgoing, eps)
    conserved_incoming = conserved_outgoing = outer
    for i in range(len(x)):
        sum_k_over_outgoing[i] += y[i] * over_outgoing
        sum_q_over_incoming[i] += x[i] * over_incoming
        conserved_incoming += (x[i] + eps) * (sum_k_over_outgoing[i] + eps)
        conserved_outgoing += (y[i] + eps) * (sum_q_over_incoming[i] + eps)
    return incoming, outgoing, conserved_incoming / c, conserved_outgoing / c


@inlined
def newest_weight(flow, kind, softmax, c, like):
    """Competition or allocation of the newest token among those so far.

    ``softmax`` is the largest flow so far, and the sum of e to the power of each flow minus the largest.
    """
    if kind == SIGMOID:
        return number(1, like) / (number(1, like) + exp(-flow))
    if kind == NONE:
        return number(1, like)
    if flow > softmax[0]:
        softmax[1] *= exp(softmax[0] - flow)
        softmax[0] = flow
    exponential = exp(flow - softmax[0])
    softmax[1] += exponential
    return exponential / softmax[1] * c


@inlined
def weigh_token(x, y, sums, softmaxes, c, options, kept):
    """Add a token to all sums but S. Writes I, O, Ô, competition and allocation; returns the weights of v and of U."""
    _, competing, allocating, eps, outer, clamp = options
    incoming, outgoing, conserved_incoming, conserved_outgoing = add_token(x, y, sums, c, eps, outer)
    competition = newest_weight(min(conserved_outgoing, clamp), competing, softmaxes[0], c, eps)
    allocation = newest_weight(conserved_incoming, allocating, softmaxes[1], c, eps)
    kept[0], kept[1], kept[2], kept[3], kept[4] = incoming, outgoing, conserved_outgoing, competition, allocation
    return competition, allocation / positive(incoming, eps)


@inlined
def load_vector(x, address, head, like):
    """The vector of a head."""
    if address == 0:
        fours.fill(x, number(0, like))
    else:
        fours.copy(x, array(address, head * len(x), len(x), like))


@inlined
def matrices(address, H, d, e):
    """Contiguous matrices (d, e) of all heads, as an address and strides."""
    return address, H * d * e, d * e, e


@inlined
def begin_sums(before, after, softmaxes, head, d, like):
    """The four sums of features of a head, those of ``after``, and both softmaxes, as before the first token."""
    sums = (
        array(after[0], head * d, d, like),
        array(after[1], head * d, d, like),
        array(after[2], head * d, d, like),
        array(after[3], head * d, d, like),
    )
    for i in range(4):
        load_vector(sums[i], before[i], head, like)
    for i in range(2):
        softmaxes[i, 0] = number(-1e30, like) if before[4 + i] == 0 else array(before[4 + i], head, 1, like)[0]
        softmaxes[i, 1] = number(1, like)
    return sums


@inlined
def store_logs(softmaxes, after, head, like):
    """Write the logarithms of the softmaxes' sums."""
    for i in range(2):
        array(after[4 + i], head, 1, like)[0] = softmaxes[i, 0] + math.log(softmaxes[i, 1])


@kernel
def forward(first, last, sizes, options, tokens, inputs, before, results, after, work):
    """The outputs of heads ``first`` to ``last``, and the sums after the last token."""
    (H, n, d, e), (q, k, v), (out, kept), phi, eps = sizes, inputs, results, options[0], options[3]
    C = padded(e)
    S, of_values = array(work, 0, (d, C), eps), array(work, d * C, (2, 4, C), eps)
    at = (d + 8) * C
    of_features, D = array(work, at, (2, 4, d), eps), array(work, at + 8 * d, d, eps)
    Q, K, V, U = of_features[0], of_features[1], of_values[0], of_values[1]
    scales, softmaxes = array(work, at + 9 * d, 4, eps), array(work, at + 9 * d + 4, (2, 2), eps)
    fours.fill(D, number(1, eps))
    for head in range(first, last):
        b, h = head // H, head % H
        real, earlier = row_counts(tokens, b, n)
        sums = begin_sums(before, after, softmaxes, head, d, eps)
        fours.load_sums(S, matrices(before[6], H, d, e), e, b, h, eps)
        for begin in range(0, real, 4):
            count = min(4, real - begin)
            load_tokens(Q, q, d, tokens, b, h, n, begin, 1, count, eps)
            load_tokens(K, k, d, tokens, b, h, n, begin, 1, count, eps)
            load_tokens(V, v, e, tokens, b, h, n, begin, 1, count, eps)
            fours.apply_map(Q, phi, count)
            fours.apply_map(K, phi, count)
            for r in range(count):
                c, numbers = number(earlier + begin + r + 1, eps), row(kept, b, h, begin + r, KEPT, eps)
                weight, scales[r] = weigh_token(Q[r], K[r], sums, softmaxes, c, options, numbers)
                fours.scale(V[r], weight)
            fours.weigh(fours.products(Q, K, eps), V, U)
            fours.read_and_add(S, D, Q, K, V, U, eps)
            for r in range(count):
                fours.scale(U[r], scales[r])
            store_tokens(U, out, e, tokens, b, h, n, begin, 1, count, eps)
        fours.store_sums(S, matrices(after[6], H, d, e), e, b, h, eps)
        clear_padding(out, tokens, b, h, n, e, eps)
        for index in range(real, n):
            fours.fill(row(kept, b, h, index, KEPT, eps), number(0, eps))
        store_logs(softmaxes, after, head, eps)


@kernel
def step(first, last, sizes, options, tokens, inputs, before, results, after, work):
    """``forward`` of one token, without padding and after a state: S is read and written once."""
    (H, _, d, e), (q, k, v), (out, kept), phi, eps = sizes, inputs, results, options[0], options[3]
    features, softmaxes = array(work, 0, (2, 1, d), eps), array(work, 2 * d, (2, 2), eps)
    Q, K = features[0], features[1]
    x, y = Q[0], K[0]
    for head in range(first, last):
        b, h = head // H, head % H
        fours.copy(x, row(q, b, h, 0, d, eps))
        fours.copy(y, row(k, b, h, 0, d, eps))
        fours.apply_map(Q, phi, 1)
        fours.apply_map(K, phi, 1)
        c, sums = number(row_counts(tokens, b, 1)[1] + 1, eps), begin_sums(before, after, softmaxes, head, d, eps)
        weight, scale = weigh_token(x, y, sums, softmaxes, c, options, row(kept, b, h, 0, KEPT, eps))
        values, u = row(v, b, h, 0, e, eps), row(out, b, h, 0, e, eps)
        fours.fill(u, number(0, eps))
        earlier, later = array(before[6], head * d * e, (d, e), eps), array(after[6], head * d * e, (d, e), eps)
        for i in range(d):
            s, new, query, key = earlier[i], later[i], x[i], y[i] * weight
            for j in range(e):
                total = s[j] + key * values[j]
                new[j] = total
                u[j] += query * total
        fours.scale(u, scale)
        store_logs(softmaxes, after, head, eps)


def forward_work(d: int, e: int) -> int:
    """Numbers that a thread of ``forward`` or ``step`` needs."""
    return (d + 8) * vectors.padded(e) + 9 * d + 8
