"""Running sums that decay by kernels, as an operator of PyTorch: B batch, H heads, n tokens, c channels."""

from torch import Tensor

from ..blocked_cumsum import cumsum_in_blocks
from . import threads
from .operators import kernel_operator
from .tensors import contiguous_channels, empty_like, number, rows, vectors


def decayed_cumsum(x: Tensor, log_decay: Tensor, initial: Tensor | None) -> Tensor:
    """y_t = exp(log_decay_t) y_(t-1) + x_t, (B, H, n, ...); arguments as in ``decayed_cumsum.decayed_cumsum``."""
    if log_decay.shape[3:].numel() > 1:
        log_decay = log_decay.expand(x.shape)
    flat = [None if y is None else y.reshape(*y.shape[:dims], -1) for y, dims in ((x, 3), (log_decay, 3), (initial, 2))]
    out, _ = _operator(*flat)
    return out.view(x.shape)


def _allocate(x: Tensor, log_decay: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0)  # an operator with one output would not return a tuple


def _sizes(x: Tensor, log_decay: Tensor) -> tuple[int, int, int, int]:
    """(H, n, c, g), g being 1 or c."""
    return *x.shape[1:], log_decay.shape[3]


def _forward(inputs: tuple, constants: tuple, outputs: tuple) -> None:
    from . import cumsum_kernels as kernels

    x, log_decay, initial = map(contiguous_channels, inputs)
    heads, channels, out = x.shape[0] * x.shape[1], x.shape[3], outputs[0]
    arguments = (_sizes(x, log_decay), rows(x), rows(log_decay), vectors(initial), rows(out), number(0.0, x))
    threads.run(kernels.forward, heads, x.numel(), 2 * channels, x, *arguments)


def _backward(inputs: tuple, constants: tuple, saved: list, grads: list, grad_inputs: list) -> None:
    from . import cumsum_kernels as kernels

    x, log_decay, initial = map(contiguous_channels, inputs)
    heads, channels, grad_out = x.shape[0] * x.shape[1], x.shape[3], contiguous_channels(grads[0])
    out = contiguous_channels(saved[0])  # a hook of saved tensors may have given it another layout
    grad_x = empty_like(x) if grad_inputs[0] is None else grad_inputs[0]
    grad_rows = rows(grad_out), rows(grad_x), rows(grad_inputs[1]), vectors(grad_inputs[2])
    arguments = (_sizes(x, log_decay), rows(log_decay), vectors(initial), rows(out), *grad_rows, number(0.0, x))
    threads.run(kernels.backward, heads, 2 * x.numel(), 2 * channels, x, *arguments)


def _plain(x: Tensor, log_decay: Tensor, initial: Tensor | None) -> tuple[Tensor, ...]:
    return (cumsum_in_blocks(x, log_decay, x.new_zeros(x[:, :, 0].shape) if initial is None else initial),)


_operator = kernel_operator(
    "decayed_cumsum",
    ("x", "log_decay", "initial?"),
    "",
    (1, 1),
    lambda: (0,),
    _allocate,
    _forward,
    _backward,
    _plain,
    multiply_adds=(1, 2),
)
