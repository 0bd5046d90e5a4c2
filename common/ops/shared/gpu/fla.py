"""fla's kernels for running sums and the delta rule on a GPU, where the package fla-core is installed.

It is imported at the first CUDA tensors that its kernels may take and never before, because the import takes seconds.
They go through its kernels if there is more than one token and the inputs have half precision, or float32 where torch
may multiply in TF32 (``torch.set_float32_matmul_precision("high")``). bfloat16 is multiplied as it is; float16 as
TF32, which has as many bits and does not overflow. States are float32. All else is as for Triton kernels of this
project, see ``dispatch``: the environment variable, the comparison before the first use, and plain PyTorch for what
kernels cannot do.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import graph_gradients
from ..precision import compute_dtype
from ..tracing import is_compiled, runs_eagerly
from . import dispatch
from .first_use import FirstUse, normal_like
from .operators import differentiable_operator

#: The version whose functions these are.
VERSION = "0.6"
#: Its functions and their modules: sums without gates or with one per head, with one per channel, the delta rule.
FUNCTIONS = {
    "chunk_simple_gla": "simple_gla",
    "chunk_gla": "gla",
    "chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kda": "kda",
}
#: Largest difference from plain PyTorch before the first use, as for half precision: products have 8 or 11 bits.
BOUND = 3e-2
#: Tokens of that comparison: fla's chunks have 64.
_TOKENS = 135

_log = logging.getLogger(__name__)
_lock = threading.Lock()

#: (q, k, v, beta, log_decay, initial, chunk_size) -> outputs (B, H, n, e) and the last sum (B, H, f, e).
Plain = Callable[..., tuple[Tensor, Tensor]]


def functions() -> dict[str, Callable] | None:
    """fla's functions by name, imported at the first call; None, and one warning, if it is installed in vain."""
    with _lock:  # two threads that import it at once would see it half imported
        return _imported()


@functools.cache
def _imported() -> dict[str, Callable] | None:
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        version = importlib.metadata.version("fla-core")
        if version.split(".")[:2] != VERSION.split("."):
            raise ImportError(f"fla-core has version {version}; known: {VERSION}")
        found = {name: getattr(importlib.import_module(f"fla.ops.{x}"), name) for name, x in FUNCTIONS.items()}
    except Exception as error:  # whatever an import may raise
        warnings.warn(
            f"fla is installed and cannot be used ({type(error).__name__}: {error}); running sums and the delta rule "
            f"are computed in plain PyTorch. To use its kernels: pip install 'fla-core=={VERSION}.*'. To use plain "
            f"PyTorch without this warning: {dispatch.VARIABLE}=0",
            stacklevel=5,
        )
        return None
    _log.info("fla-core %s computes running sums and the delta rule on a GPU", version)
    return found


def forget() -> None:
    """Look for fla again at the next call of ``functions``."""
    _imported.cache_clear()


def is_usable() -> bool:
    """Whether fla is installed, can be imported and is not switched off."""
    return dispatch.switched_on() and functions() is not None


is_usable._dynamo_marked_constant = True  # asked once for a graph, as in ``dispatch``


def _tf32_is_allowed() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


_tf32_is_allowed._dynamo_marked_constant = True


class Kernels:
    """fla's kernels for a function ``plain``, which is called in their place if they fail."""

    def __init__(self, name: str, plain: Plain) -> None:
        self.plain = plain
        arguments = ("q", "k", "v", "beta?", "log_decay?", "initial?")
        self._operator = differentiable_operator(name, arguments, "int chunk_size", 2, self._run, _fake)

    def apply_to(self, precision: torch.dtype | None, *tensors: Tensor | None) -> bool:
        """Whether they are used for ``tensors``: q, k (B, H, n, f), v (B, H, n, e), beta, log_decay, the first sum.

        ``precision`` is the dtype in which tokens were given, None for that of ``q``.
        """
        q, _, _, beta, log_decay, _ = tensors
        precision = q.dtype if precision is None else precision
        if precision == torch.float64 or (precision == torch.float32 and not _tf32_is_allowed()):
            return False
        name = _name(_dtype(precision, q), q, beta, log_decay)
        return dispatch.applies(name, *(x for x in tensors if x is not None)) and is_usable()

    def __call__(
        self, precision: torch.dtype | None, chunk_size: int, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Outputs (B, H, n, e) in q's dtype and the last sum; ``tensors`` are those of ``apply_to``."""
        q, k, v, beta, log_decay, initial = tensors
        tokens = [x.to(_dtype(precision, q)) for x in (q, k, v)]
        if log_decay is not None:
            log_decay = log_decay.expand(q.shape[0], *log_decay.shape[1:])
        run = self._operator if is_compiled() else self._guarded
        out, last = run(*tokens, beta, log_decay, initial, chunk_size)
        return out.to(q.dtype), last

    def _run(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        return tuple(x.contiguous() for x in self._guarded(*arguments))

    def _guarded(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        *tensors, chunk_size = arguments
        plain = functools.partial(_in_full, functools.partial(self.plain, chunk_size=chunk_size))
        kernels = functools.partial(_attend, plain)
        q, _, v, beta, log_decay, _ = tensors
        name = _name(q.dtype, q, beta, log_decay)

        def sample() -> list[Tensor]:
            return _sample(*tensors)

        def joined(attend: Callable) -> Callable[..., Tensor]:
            def run(*some: Tensor) -> Tensor:
                given = iter(some)
                out, last = attend(*(None if x is None else next(given) for x in tensors))
                return torch.cat([out.flatten().to(last.dtype), last.flatten()])

            return run

        case = tuple(x is None for x in tensors), q.shape[1], v.shape[3]
        first_use = FirstUse(name, q.device, case, sample, joined(kernels), joined(plain), BOUND)
        return dispatch.guarded(name, lambda: kernels(*tensors), lambda: plain(*tensors), first_use)


def _dtype(precision: torch.dtype | None, q: Tensor) -> torch.dtype:
    """The dtype in which fla gets tokens that were given in ``precision``, of which ``q`` are features."""
    return torch.bfloat16 if precision == torch.bfloat16 else q.dtype


def _function(beta: Tensor | None, log_decay: Tensor | None) -> str:
    by_channel = log_decay is not None and log_decay.dim() == 4
    if beta is None:
        return "chunk_gla" if by_channel else "chunk_simple_gla"
    return "chunk_kda" if by_channel else "chunk_gated_delta_rule"


def _name(dtype: torch.dtype, q: Tensor, beta: Tensor | None, log_decay: Tensor | None) -> str:
    """The name in a warning: fla may refuse one size and compute another. ``running_sums`` makes channels even."""
    return f"{_function(beta, log_decay)} of fla for {q.shape[3] + q.shape[3] % 2} channels in {dtype}"


def _attend(plain: Callable, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """fla's function, whose layout is (B, n, H, c); its backward pass has no derivative, so ``plain`` provides one."""
    *tokens, initial = tensors
    rows = [None if x is None else x.transpose(1, 2).contiguous() for x in tokens]
    given, later = [*rows, initial], [None, None]
    if torch.is_grad_enabled():
        by_rows = functools.partial(_of_rows, plain, [x is not None for x in given])
        entered = iter(_Inputs.apply(by_rows, later, *(x for x in given if x is not None)))
        given = [None if x is None else next(entered) for x in given]
    q, k, v, beta, log_decay, initial = given
    more = {}
    if beta is not None:
        more, log_decay = {"beta": beta}, torch.zeros_like(beta) if log_decay is None else log_decay
    options = {"scale": 1.0, "initial_state": initial, "output_final_state": True}
    results = functions()[_function(beta, log_decay)](q, k, v, g=log_decay, **more, **options)[:2]
    for i, x in enumerate(results):
        if x.requires_grad:
            x.register_hook(functools.partial(_keep, later, i))
    return results[0].transpose(1, 2), results[1]


class _Inputs(torch.autograd.Function):
    """The inputs of kernels; ``plain`` gives their gradients if these need a gradient, or come in batches.

    ``later`` then has the gradients of the outputs, from ``_keep``.
    """

    @staticmethod
    def forward(ctx: Any, plain: Callable, later: list, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.plain, ctx.later = plain, later
        ctx.save_for_backward(*tensors)
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        later, ctx.later[:] = list(ctx.later), [None, None]
        if any(x is not None for x in later):
            used = [i for i, x in enumerate(later) if x is not None]
            outputs = lambda *tensors: tuple(ctx.plain(*tensors)[i] for i in used)  # noqa: E731
            grads = graph_gradients(outputs, ctx.saved_tensors, [later[i] for i in used])
        return (None, None, *grads)


def _keep(later: list, i: int, grad: Tensor | None) -> Tensor | None:
    """Take the gradient of output ``i``, None if there is none, from kernels that could not pass it on."""
    if grad is None or (runs_eagerly(grad) and not torch.is_grad_enabled()):
        return None
    later[i] = grad
    return torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)


def _of_rows(plain: Callable, present: Sequence[bool], *some: Tensor) -> tuple[Tensor, Tensor]:
    """``plain`` of tensors (B, n, H, c), without those that are None, as fla's function gives its results."""
    given = iter(some)
    *rows, initial = [next(given) if there else None for there in present]
    out, last = plain(*(None if x is None else x.transpose(1, 2) for x in rows), initial)
    return out.transpose(1, 2), last


def _in_full(plain: Callable, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    """``plain`` in float32 or float64; the output in v's dtype."""
    out, last = plain(*(None if x is None else x.to(compute_dtype(x)) for x in tensors))
    return out.to(tensors[2].dtype), last


def _sample(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, initial: Tensor | None
) -> list[Tensor]:
    """A small input of the same dtypes and channels: unit vectors, gates below 1."""

    def normal(x: Tensor, seed: int) -> Tensor:
        return normal_like(x, (2, x.shape[1], _TOKENS, *x.shape[3:]), seed)

    sample = [F.normalize(normal(q, 0), dim=-1), F.normalize(normal(k, 1), dim=-1), normal(v, 2)]
    if beta is not None:
        sample.append(normal(beta, 3).sigmoid())
    if log_decay is not None:
        sample.append(-0.1 * normal(log_decay, 4).abs())
    if initial is not None:
        sample.append(normal_like(initial, (2, *initial.shape[1:]), 5))
    return sample


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), q.new_empty((*q.shape[:2], q.shape[3], v.shape[3]), dtype=torch.float32)
