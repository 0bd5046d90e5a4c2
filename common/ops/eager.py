"""Whether a hand-written backward pass or a kernel may run, into which nothing that takes operations apart sees."""

import torch
from torch import Tensor


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether operations on ``tensors`` simply run.

    They do not under torch.compile, torch.export, tracing, torch.func's transforms and forward-mode gradients.
    """
    # First, as a graph that is being traced must not depend on the rest.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    return all(torch.autograd.forward_ad.unpack_dual(x).tangent is None for x in tensors)
