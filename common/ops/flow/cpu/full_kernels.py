"""Flow-Attention of all sinks with all sources (Algorithm 1) as loops over four tokens: the forward pass.

Sinks and sources are two *sides*. Each has features X (tokens, D), of its real tokens alone, 0 in rows up to a multiple
of four, and numbers of these tokens, in the rows FLOW, WEIGHT and CONSERVED of a matrix. Sums of features are the rows
SUM_K, ... of a matrix. Further legend, with that of the folder: S (d, e): Σ k_jᵀ w_j v_j; D and C: d and e rounded up
to whole vectors.

Tensors of tokens are an address and strides, as in ``shared/cpu/memory.py``. The arguments are
    sizes: H, n, m, d, e.
    options: as in ``kernels``, and whether the form rescales.
    group: 1, or H if the heads of a source compete. ``first`` and ``last`` count groups of as many heads.
    tokens: those of the sinks and of the sources, each as in ``kernels``.
    inputs: q, k, v.
    out: the output.
    kept: addresses of what the backward pass needs: numbers of sinks, I and allocation (B, H, 2, n rounded up to a
        multiple of four); of sources, O, competition and Ô (B, H, 3, m rounded up); the sums of features, with the
        form's epsilon (B, H, 4, d); and S (B, H, d, e).
"""

import math

from ...shared.cpu import fours, vectors
from ...shared.cpu.compiler import inlined, kernel
from ...shared.cpu.memory import array, exp, number, row
from . import whole_fours
from .kernels import (
    NONE,
    SIGMOID,
    SOFTMAX,
    clear_padding,
    load_tokens,
    matrices,
    padded,
    position,
    positive,
    row_counts,
    store_tokens,
)

#: Rows of a matrix of sums.
SUM_K, SUM_Q, SUM_K_OVER_OUTGOING, SUM_Q_OVER_INCOMING = 0, 1, 2, 3
#: Rows of a matrix of numbers: I or O; allocation or competition; Ô.
FLOW, WEIGHT, CONSERVED = 0, 1, 2
#: Tokens whose features are formed in the first-level cache.
_TILE = 32
whole = inlined(whole_fours)


@inlined
def load_features(X, tensor, d, tokens, b, h, n, count, phi, sums, index, like):
    """The features X of a side's ``count`` real tokens, which are also added to a row of ``sums``."""
    zero, one = number(0, like), number(1, like)
    for begin in range(0, len(X), _TILE):
        tile = X[begin : min(begin + _TILE, len(X))]
        real = min(len(tile), count - begin)
        for t in range(real):
            fours.copy(tile[t], row(tensor, b, h, position(tokens, b, n, begin + t), d, like))
        fours.apply_map(tile.reshape(1, tile.size), phi, 1)
        for t in range(real, len(tile)):
            fours.fill(tile[t], zero)
        fours.clear_columns(tile, d, like)
        for t in range(0, len(tile), 4):
            fours.add_rows(sums, index, (one, one, one, one), tile[t : t + 4], like)


@inlined
def add_epsilon(x, d, eps):
    """Add the form's epsilon to each of d channels."""
    for i in range(d):
        x[i] += eps


@inlined
def base_of(x, d, eps, outer):
    """The part of each flow that the form's epsilons make, where the sum of all givers is x."""
    total = outer
    for i in range(d):
        total += eps * x[i]
    return total


@inlined
def first_flows(X, flows, sums, giver, target, d, eps, outer):
    """I or O of each token, from a row of ``sums``; the tokens, divided by their flows, are added to another."""
    one, base = number(1, eps), base_of(sums[giver], d, eps, outer)
    for t in range(0, len(X), 4):
        x = X[t : t + 4]
        p0, p1, p2, p3 = fours.products_with(x, sums, giver, eps)
        p0, p1, p2, p3 = base + p0, base + p1, base + p2, base + p3
        flows[t], flows[t + 1], flows[t + 2], flows[t + 3] = p0, p1, p2, p3
        p0, p1, p2, p3 = (
            one / positive(p0, eps),
            one / positive(p1, eps),
            one / positive(p2, eps),
            one / positive(p3, eps),
        )
        fours.add_rows(sums, target, (p0, p1, p2, p3), x, eps)
    add_epsilon(sums[target], d, eps)


@inlined
def conserved_flows(X, flows, sums, giver, d, eps, outer):
    """Î or Ô of each token, from a row of ``sums``."""
    base = base_of(sums[giver], d, eps, outer)
    for t in range(0, len(X), 4):
        p0, p1, p2, p3 = fours.products_with(X[t : t + 4], sums, giver, eps)
        flows[t], flows[t + 1], flows[t + 2], flows[t + 3] = base + p0, base + p1, base + p2, base + p3


@inlined
def find_flows(Q, K, sums, d, options, of_sinks, of_sources):
    """Equations 5 to 7, from the sums of features: I, O and Ô, and Î in the place of the allocation."""
    eps, outer = options[3], options[4]
    add_epsilon(sums[SUM_K], d, eps)
    add_epsilon(sums[SUM_Q], d, eps)
    first_flows(Q, of_sinks[FLOW], sums, SUM_K, SUM_Q_OVER_INCOMING, d, eps, outer)
    first_flows(K, of_sources[FLOW], sums, SUM_Q, SUM_K_OVER_OUTGOING, d, eps, outer)
    conserved_flows(Q, of_sinks[WEIGHT], sums, SUM_K_OVER_OUTGOING, d, eps, outer)
    conserved_flows(K, of_sources[CONSERVED], sums, SUM_Q_OVER_INCOMING, d, eps, outer)


@inlined
def weigh(weights, flows, kind, bound, factor, like):
    """Competition or allocation; flows are limited to ``bound``, and a softmax over tokens is times ``factor``.

    ``flows`` may be ``weights`` themselves.
    """
    one = number(1, like)
    if kind == SIGMOID:
        for i in range(len(weights)):
            weights[i] = one / (one + exp(-min(flows[i], bound)))
    elif kind == NONE:
        fours.fill(weights, one)
    elif kind == SOFTMAX:
        largest = total = number(0, like)  # no flow is negative
        for i in range(len(weights)):
            largest = max(largest, min(flows[i], bound))
        for i in range(len(weights)):
            exponential = exp(min(flows[i], bound) - largest)
            weights[i] = exponential
            total += exponential
        fours.scale(weights, factor / total)


@inlined
def weigh_tokens(of_sinks, of_sources, counts, options):
    """Allocation and, unless the heads compete, competition, of real tokens."""
    (sinks, sources), competing, allocating, eps, clamp = counts, options[1], options[2], options[3], options[5]
    allocations, competitions, flows = (
        of_sinks[WEIGHT][:sinks],
        of_sources[WEIGHT][:sources],
        of_sources[CONSERVED][:sources],
    )
    per_sink = per_source = number(1, eps)
    if options[6]:
        per_sink, per_source = number(max(sinks, 1), eps), number(max(sources, 1), eps)
        fours.scale(allocations, per_sink / per_source)
    weigh(allocations, allocations, allocating, number(math.inf, eps), per_sink, eps)
    weigh(competitions, flows, competing, clamp, per_source, eps)


@inlined
def weigh_heads(numbers, count, options):
    """Competition of the heads of each real source, whose numbers are (heads, 3, tokens)."""
    zero, eps, clamp = number(0, options[3]), options[3], options[5]
    factor = number(count, eps) if options[6] else number(1, eps)
    for j in range(count):
        largest = total = zero
        for i in range(len(numbers)):
            largest = max(largest, min(numbers[i, CONSERVED, j], clamp))
        for i in range(len(numbers)):
            numbers[i, WEIGHT, j] = exp(min(numbers[i, CONSERVED, j], clamp) - largest)
            total += numbers[i, WEIGHT, j]
        for i in range(len(numbers)):
            numbers[i, WEIGHT, j] *= factor / total


@inlined
def kept_numbers(kept, head, group, n, m, like):
    """The numbers that are kept of the sinks and of the sources of a group of heads, (group, 2 or 3, tokens)."""
    return (
        array(kept[0], head * 2 * whole(n), (group, 2, whole(n)), like),
        array(kept[1], head * 3 * whole(m), (group, 3, whole(m)), like),
    )


@inlined
def write_outputs(Q, K, S, blocks, b, h, sizes, tokens, counts, v, out, of_sinks, of_sources, like):
    """Equation 8: S and the outputs."""
    (_, n, m, _, e), (sinks, sources), (V, U, scales) = sizes, counts, blocks
    fours.fill(S.reshape(S.size), number(0, like))
    for t in range(0, len(K), 4):
        load_tokens(V, v, e, tokens[1], b, h, m, t, 1, sources - t, like)
        fours.scale_rows(V, of_sources[WEIGHT], t, like)
        fours.add_products(S, K[t : t + 4], V, like)
    for t in range(0, len(Q), 4):
        fours.read(S, Q[t : t + 4], U, like)
        for r in range(4):
            scales[r] = of_sinks[WEIGHT, t + r] / positive(of_sinks[FLOW, t + r], like)
        fours.scale_rows(U, scales, 0, like)
        store_tokens(U, out, e, tokens[0], b, h, n, t, 1, min(4, sinks - t), like)
    clear_padding(out, tokens[0], b, h, n, e, like)


@inlined
def load_sides(work, sizes, options, tokens, inputs, b, h, sums, needed):
    """The features of both sides of a head and their sums, formed if they are ``needed``; real sinks and sources."""
    (_, n, m, d, _), (q, k, _), phi, eps = sizes, inputs, options[0], options[3]
    sinks, sources, D = row_counts(tokens[0], b, n)[0], row_counts(tokens[1], b, m)[0], padded(d)
    Q, K = array(work, 0, (whole(sinks), D), eps), array(work, whole(n) * D, (whole(sources), D), eps)
    if needed:
        fours.fill(sums.reshape(sums.size), number(0, eps))
        load_features(Q, q, d, tokens[0], b, h, n, sinks, phi, sums, SUM_Q, eps)
        load_features(K, k, d, tokens[1], b, h, m, sources, phi, sums, SUM_K, eps)
    return Q, K, (sinks, sources)


@kernel
def forward(first, last, sizes, options, group, tokens, inputs, out, kept, work):
    """The outputs of groups ``first`` to ``last`` of heads."""
    (H, n, m, d, e), eps = sizes, options[3]
    C, D = padded(e), padded(d)
    at = (whole(n) + whole(m)) * D
    sums, S = array(work, at, (4, D), eps), array(work, at + 4 * D, (d, C), eps)
    at += 4 * D + d * C
    blocks = array(work, at, (4, C), eps), array(work, at + 4 * C, (4, C), eps), array(work, at + 8 * C, 4, eps)
    for begin in range(first * group, last * group, group):
        b = begin // H
        of_sinks, of_sources = kept_numbers(kept, begin, group, n, m, eps)
        fours.fill(of_sinks.reshape(of_sinks.size), number(0, eps))
        fours.fill(of_sources.reshape(of_sources.size), number(0, eps))
        for i in range(group):
            h = begin % H + i
            Q, K, counts = load_sides(work, sizes, options, tokens, inputs, b, h, sums, True)
            find_flows(Q, K, sums, d, options, of_sinks[i], of_sources[i])
            fours.store_sums(sums, matrices(kept[2], H, 4, d), d, b, h, eps)
            weigh_tokens(of_sinks[i], of_sources[i], counts, options)
        if options[1] > NONE:
            weigh_heads(of_sources, row_counts(tokens[1], b, m)[0], options)
        for i in range(group):
            h = begin % H + i
            Q, K, counts = load_sides(work, sizes, options, tokens, inputs, b, h, sums, group > 1)
            write_outputs(Q, K, S, blocks, b, h, sizes, tokens, counts, inputs[2], out, of_sinks[i], of_sources[i], eps)
            fours.store_sums(S, matrices(kept[3], H, d, e), e, b, h, eps)


def forward_work(n: int, m: int, d: int, e: int) -> int:
    """Numbers that a thread of ``forward`` needs."""
    tokens, D = 4 * (-(-n // 4) + -(-m // 4)), vectors.padded(d)
    return (tokens + 4) * D + (d + 8) * vectors.padded(e) + 4
