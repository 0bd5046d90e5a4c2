"""Costs of launches on a GPU, and gains of fla's kernels: causal attention eager, replayed and compiled."""

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from common.ops import gla_attention
from common.ops.gla.reference import gla_attention_reference
from common.ops.shared.chunked_sums import channel_decayed_sums
from common.ops.shared.gpu.dispatch import VARIABLE

from . import operations
from .measure import Candidate, Case, Place
from .operations import SOFTMAX, Check, Function, gated_shapes

SEQUENCES = 16
LENGTHS = (512, 2048, 8192, 32768)


class Replayed:
    """A function whose launches are captured once for each shape, forward and backward, and replayed."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        self.call, self.graphs = call, {}

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Capture, or replay."""
        shapes = tuple(x.shape for x in inputs)
        if shapes not in self.graphs:
            sample = tuple(x.detach().clone().requires_grad_() for x in inputs)
            self.graphs[shapes] = torch.cuda.make_graphed_callables(self.call, sample, allow_unused_input=True)
        return self.graphs[shapes](*inputs)


def plain(call: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``call`` without kernels of Triton and of fla."""
    before = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = "0"
    try:
        return call(*inputs)
    finally:
        os.environ[VARIABLE] = before


def _gla(attend: Callable, q: Tensor, k: Tensor, v: Tensor, _: Tensor, channel: Tensor) -> Tensor:
    """Gated linear attention of tokens whose gates have no learned map."""
    x = channel.transpose(1, 2).flatten(2)
    one = torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
    return attend(q, k, v, x, one, one, torch.zeros_like(x[0, 0]))


def _fla_gla(q: Tensor, k: Tensor, v: Tensor, _: Tensor, channel: Tensor) -> Tensor:
    from fla.ops.gla import chunk_gla

    rows = (x.transpose(1, 2) for x in (q, k, v, -channel.float().abs()))
    return chunk_gla(*rows, scale=1.0)[0].transpose(1, 2)


def _written_out(q: Tensor, k: Tensor, v: Tensor, _: Tensor, channel: Tensor) -> Tensor:
    return channel_decayed_sums(q, k, v, -channel.abs(), 16, None)[0]


def _fla_delta(q: Tensor, k: Tensor, v: Tensor, head: Tensor, _: Tensor) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = (torch.nn.functional.silu(x).transpose(1, 2) for x in (q, k, v))
    g, beta = (x.transpose(1, 2) for x in (-head.float().abs(), head.sigmoid()))
    return chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0].transpose(1, 2)


def functions() -> dict[str, Function]:
    """Ours, and fused softmax attention, of q, k, v and the numbers that gates are made of."""
    ours = operations.short_inputs()
    gla = Function(partial(_gla, gla_attention), (Check(partial(_gla, gla_attention_reference), 37),))
    return {**ours, "GLA": gla}


def eager(batch: int, size: int, place: Place) -> list[Candidate]:
    """Each function as it is, replayed, and in plain PyTorch; beside them two of fla's functions alone."""
    ours, made = functions(), {}
    for name, function in ours.items():
        made[name] = function
        made[f"{name}, replayed"] = function._replace(call=Replayed(function.call))
        if name != SOFTMAX:
            made[f"{name}, plain PyTorch"] = function._replace(call=partial(plain, function.call))
    made["fla, chunk_gla"] = Function(_fla_gla, (Check(_written_out, 37),), "fla")
    made["fla, chunk_gated_delta_rule"] = Function(_fla_delta, ours["gated delta rule"].checks, "fla")
    return _candidates(made, batch, size, place)


def compiled(mode: str, batch: int, size: int, place: Place) -> list[Candidate]:
    """Each function compiled in a mode of torch.compile, and eager softmax attention."""
    ours, made = functions(), {}
    for name, function in ours.items():
        made[f"{name}, compiled"] = function._replace(call=torch.compile(function.call, dynamic=False, mode=mode))
    return _candidates({**made, SOFTMAX: ours[SOFTMAX]}, batch, size, place)


def _candidates(made: dict[str, Function], batch: int, size: int, place: Place) -> list[Candidate]:
    here = {name: x for name, x in made.items() if place.device == "cuda" or not _needs_gpu(x)}
    built = operations.operation(partial(gated_shapes, batch=batch), here, size, place)
    return built + [Candidate(name, absent="not installed: a GPU") for name in made if name not in here]


def _needs_gpu(function: Function) -> bool:
    return isinstance(function.call, Replayed) or function.package == "fla"


_CASES = {
    "gpu_sequence": (eager, 1, LENGTHS, "one sequence"),
    "gpu_sequences": (eager, SEQUENCES, LENGTHS, f"{SEQUENCES} sequences"),
    "gpu_compiled": (partial(compiled, "default"), 1, (512, 8192), "one sequence, compiled"),
    "gpu_reduce_overhead": (partial(compiled, "reduce-overhead"), 1, (512, 8192), "one sequence, reduce-overhead"),
}
CASES = {
    name: Case(f"Causal attention, {what}", sizes, partial(build, batch), SOFTMAX, devices=("cuda",))
    for name, (build, batch, sizes, what) in _CASES.items()
}
