"""Detects tracing and transforms of operations: torch.compile, export, torch.jit.trace, torch.func, forward mode.

Hand-written backward passes and kernels are opaque to all of these, and must not run then.
"""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether operations on ``tensors`` are executed eagerly.

    They are not under torch.compile, torch.export, tracing, torch.func's transforms, forward-mode gradients, batches of
    gradients (``is_grads_batched``) and FakeTensorMode, whose tensors have no values.
    """
    # First, because a graph that is being traced must not depend on the other checks.
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._are_functorch_transforms_active():
        return False
    for x in tensors:  # faster than any(): this is called for every token
        if torch._C._functorch.is_legacy_batchedtensor(x) or isinstance(x, FakeTensor):
            return False
    if torch.autograd.forward_ad._current_level < 0:  # no tensor has a tangent, and asking each takes a microsecond
        return True
    return all(torch.autograd.forward_ad.unpack_dual(x).tangent is None for x in tensors)


def may_be_exported() -> bool:
    """Whether torch.export traces; in torch 2.6, which cannot distinguish them, True for torch.compile as well."""
    if hasattr(torch.compiler, "_is_exporting_flag"):
        return is_exported()
    return torch.compiler.is_compiling()


def is_exported() -> bool:
    """Whether torch.export certainly traces; False in torch 2.6, which cannot distinguish it from torch.compile."""
    # The flag itself: torch.compile of torch 2.11 and earlier takes torch.compiler.is_exporting() for True.
    return hasattr(torch.compiler, "_is_exporting_flag") and torch.compiler._is_exporting_flag


def may_checkpoint() -> bool:
    """Whether gradients are computed and ``torch.utils.checkpoint`` works, whose hooks do not work under torch.func."""
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


def is_compiled() -> bool:
    """Whether torch.compile traces, and not torch.export, whose graphs must contain only PyTorch's own operators."""
    return torch.compiler.is_dynamo_compiling() and not may_be_exported()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which would include all launches."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
