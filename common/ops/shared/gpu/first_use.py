"""The check of kernels before their first use: output and gradients for a small input against plain PyTorch.

So no kernel returns wrong numbers on a GPU model, or with a version of Triton, on which it was never tested.
"""

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

#: Largest difference between a kernel's output or gradient and that of plain PyTorch in float64, relative to the norm
#: of the latter. Wrong numbers differ by about 1.
BOUNDS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}

#: The keys of kernels that passed the check in this process.
right: set[Hashable] = set()


class KernelsDiffer(RuntimeError):
    """An output or a gradient of kernels is not what plain PyTorch computes."""


class FirstUse(NamedTuple):
    """Comparison of kernels with plain PyTorch before their first use in a process, for ``case`` on a device."""

    name: str  # of the kernels
    device: torch.device
    case: Hashable  # dtype, sizes and options: everything for which kernels are compiled separately
    sample: Callable[[], Sequence[Tensor]]  # a small input
    by_kernels: Callable[..., Tensor]
    by_pytorch: Callable[..., Tensor]  # in the dtype that it is given
    bound: float | None = None  # in place of that of the output's dtype

    @property
    def key(self) -> Hashable:
        """Key under which the comparison is made once."""
        return self.name, self.device, self.case


def compare(use: FirstUse) -> None:
    """Check that the kernels are correct; takes milliseconds in addition to their compilation.

    Raises:
        KernelsDiffer: by more than ``BOUNDS``, or the bound of ``use``.
    """
    # A thread has its own autocast, gradient mode and hooks, so that the caller's see nothing of this.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_compare, use).result()
    right.add(use.key)


def sample_like(x: Tensor, tokens: int, seed: int) -> Tensor:
    """Normal numbers (2, H, ``tokens``, c) in the dtype and on the device of x (B, H, n, c); the same for a seed."""
    return normal_like(x, (2, x.shape[1], tokens, x.shape[3]), seed)


def normal_like(x: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Normal numbers in the dtype and on the device of ``x``, without torch's own generator; the same for a seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(x)


def sample_padding(tokens: int, device: torch.device) -> Tensor:
    """A mask (2, ``tokens``), True = padding: three tokens of the first row, in front."""
    padding = torch.zeros(2, tokens, dtype=torch.bool)
    padding[0, :3] = True
    return padding.to(device)


def _compare(use: FirstUse) -> None:
    sample = [x.detach() for x in use.sample()]
    out, *grads = _output_and_gradients(use.by_kernels, sample)
    wanted, *wanted_grads = _output_and_gradients(use.by_pytorch, [x.double() for x in sample])
    named = {"the output": (out, wanted)}
    named.update({f"gradient {i}": pair for i, pair in enumerate(zip(grads, wanted_grads), 1)})
    bound = use.bound or BOUNDS[out.dtype]
    for name, (actual, expected) in named.items():
        difference = ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()
        if not difference <= bound:  # also true for NaN
            raise KernelsDiffer(f"{name} differs from plain PyTorch's by {difference:.2g} of its norm, over {bound:g}")


def _output_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.requires_grad_() for x in inputs]
    out = function(*leaves)
    grad = torch.linspace(-1.0, 1.0, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
