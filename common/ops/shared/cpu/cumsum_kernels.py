"""Running sums that decay, as a loop over tokens: y_t = a_t ⊙ y_(t-1) + x_t.

Legend: H heads, n tokens, c channels of x, g numbers of a gate log a_t: c, or 1 for all channels. A tensor is its
address and strides, as in ``memory``, and 0 if it is not there. Every ``work`` is for 2 c numbers.
"""

from . import fours
from .compiler import inlined, kernel
from .memory import array, exp, number, row


@inlined
def load_factors(a, gates, g, b, h, t, like):
    """The factors a_t of a token, one for each channel."""
    logs = row(gates, b, h, t, g, like)
    if g == 1:
        fours.fill(a, exp(logs[0]))
    else:
        for i in range(len(a)):
            a[i] = exp(logs[i])


@kernel
def forward(first, last, sizes, x, gates, before, out, like, work):
    """The sums of heads ``first`` to ``last``; ``before`` is y before the first token."""
    H, n, c, g = sizes
    y, a = array(work, 0, (1, c), like), array(work, c, c, like)
    for head in range(first, last):
        b, h = head // H, head % H
        fours.load_sums(y, before, c, b, h, like)
        for t in range(n):
            load_factors(a, gates, g, b, h, t, like)
            new, result, total = row(x, b, h, t, c, like), row(out, b, h, t, c, like), y[0]
            for i in range(c):
                value = a[i] * total[i] + new[i]
                total[i] = value
                result[i] = value


@kernel
def backward(first, last, sizes, gates, before, out, grad_out, grad_x, grad_gates, grad_before, like, work):
    """Gradients of ``x``, ``gates`` and ``before`` from that of ``out``, where they are there, except that of x."""
    H, n, c, g = sizes
    grad, a = array(work, 0, (1, c), like), array(work, c, c, like)
    for head in range(first, last):
        b, h = head // H, head % H
        total = grad[0]
        fours.fill(total, number(0, like))
        for t in range(n - 1, -1, -1):
            fours.increase(total, row(grad_out, b, h, t, c, like))
            fours.copy(row(grad_x, b, h, t, c, like), total)
            load_factors(a, gates, g, b, h, t, like)
            for i in range(c):
                total[i] *= a[i]
            if grad_gates[0] != 0:
                earlier = row(out, b, h, t - 1, c, like) if t > 0 else row(before, b, h, 0, c, like)
                target = row(grad_gates, b, h, t, g, like)
                if t == 0 and before[0] == 0:
                    fours.fill(target, number(0, like))
                else:
                    write_products(target, total, earlier, like)
        fours.store_sums(grad, grad_before, c, b, h, like)


@inlined
def write_products(target, x, y, like):
    """Products of two vectors, or their sum if ``target`` is one number."""
    if len(target) == len(x):
        for i in range(len(x)):
            target[i] = x[i] * y[i]
    else:
        total = number(0, like)
        for i in range(len(x)):
            total += x[i] * y[i]
        target[0] = total
