"""The functions with kernels for CPUs, each of which computes something that the others do not, and calls of them.

A row has a literal reference, so that kernels and plain PyTorch are both compared with the formula.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from common.ops import (
    flow_attention,
    gated_delta_attention,
    gla_attention,
    linear_attention,
    retention_attention,
    rfa_attention,
)
from common.ops.flow.reference import flow_attention_reference
from common.ops.gated_delta.reference import gated_delta_attention_reference
from common.ops.gla.reference import gla_attention_reference
from common.ops.linear.reference import linear_attention_reference
from common.ops.retention.reference import retention_attention_reference
from common.ops.rfa.reference import rfa_attention_reference
from tests.common.inputs import qkv

#: The environment variable that turns kernels off.
VARIABLE = "LINEARTIME_CPU_KERNELS"
#: The dimension of tokens of each tensor that has one.
TOKENS = {"q": 2, "k": 2, "v": 2, "log_decay": 2, "beta": 2, "x": 1}


class Row(NamedTuple):
    """A function with its options, and the shapes of what it takes beside q, k and v; see ``draw`` for the letters."""

    op: Callable
    reference: Callable
    options: dict[str, Any]
    shapes: dict[str, str] = {}
    longest: int = 1000  # most tokens for which the reference takes less than a second

    @property
    def causal(self) -> bool:
        """Whether it has a state."""
        return self.options.get("causal", True)


LINEAR, RFA = (linear_attention, linear_attention_reference), (rfa_attention, rfa_attention_reference)
FLOW, DELTA = (flow_attention, flow_attention_reference), (gated_delta_attention, gated_delta_attention_reference)
RETENTION, GLA = (retention_attention, retention_attention_reference), (gla_attention, gla_attention_reference)
CAUSAL, DIRECTIONS = {"causal": True}, {"directions": "hfd"}
ROWS = {
    "sums of features": Row(*LINEAR, CAUSAL),
    "sums of other features": Row(*LINEAR, {"phi": "sigmoid", **CAUSAL}),
    "sums of few features": Row(*LINEAR, {"phi": "relu", **CAUSAL}),
    "sums above a floor": Row(*RFA, {"floor": 1.5, **CAUSAL}, DIRECTIONS),
    "sums with a gate for each head": Row(*RFA, {"floor": 0.8, **CAUSAL}, {**DIRECTIONS, "log_decay": "bhn"}),
    "sums with a gate for each feature": Row(*RFA, {"floor": 0.8, **CAUSAL}, {**DIRECTIONS, "log_decay": "bhng"}),
    "sums and their weights": Row(*RETENTION, {}),
    "sums without weights": Row(*GLA, {}, {"x": "bnw", "gate_down": "rw", "gate_up": "cr", "gate_bias": "c"}),
    "flow": Row(*FLOW, {"clamp": 0.9, **CAUSAL}),
    "flow of the paper": Row(*FLOW, {"form": "paper", "phi": "elu+1", "allocation": "softmax", **CAUSAL}),
    "flow without a clamp": Row(*FLOW, {"form": "released_vision", "clamp": None, "allocation": "none", **CAUSAL}),
    "flow of sigmoids": Row(*FLOW, {"competition": "sigmoid", "phi": "relu", "clamp": 0.3, **CAUSAL}),
    "flow without weights": Row(*FLOW, {"competition": "none", "allocation": "none", **CAUSAL}),
    "flow with a gate for each head": Row(*FLOW, CAUSAL, {"log_decay": "bhn"}, 17),
    "flow with a gate for each channel": Row(*FLOW, CAUSAL, {"log_decay": "bhnd"}, 17),
    "flow both ways": Row(*FLOW, {"causal": False}),
    "flow both ways of the paper": Row(*FLOW, {"causal": False, "form": "paper", "phi": "elu+1", "allocation": "none"}),
    "flow both ways, sigmoids": Row(*FLOW, {"causal": False, "competition": "sigmoid", "allocation": "softmax"}),
    "flow both ways, no weights": Row(*FLOW, {"causal": False, "competition": "none", "phi": "relu", "clamp": None}),
    "flow both ways over heads": Row(*FLOW, {"causal": False, "competition": "softmax_heads", "clamp": 0.9}),
    "delta rule": Row(*DELTA, {"v_activation": "none"}, {"beta": "bhn"}),
    "delta rule with gates": Row(*DELTA, {}, {"beta": "bhn", "log_decay": "bhn"}),
    "delta rule of plain keys": Row(*DELTA, {"qk_activation": "none", "qk_norm": "none"}, {"beta": "bhn"}),
}
#: One row for each operator of PyTorch that kernels are behind.
OPERATORS = {
    "causal_sums": "sums with a gate for each feature",
    "decayed_cumsum": "flow with a gate for each head",
    "causal_flow": "flow",
    "full_flow": "flow both ways",
    "gated_delta_rule": "delta rule with gates",
}


def draw(
    name: str,
    n: int,
    d: int = 5,
    e: int = 3,
    *,
    batch: int = 2,
    heads: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The tensors of a call, as leaves; gates exp(-2) to 1 and beta 0 to 1."""
    tensors = dict(zip("qkv", qkv(n, batch=batch, heads=heads, d=d, e=e, seed=seed)))
    if ROWS[name].options.get("qk_norm") == "none":
        tensors["k"] = tensors["k"].detach() / (2 * d**0.5)  # the memory of longer keys grows
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": batch, "h": heads, "n": n, "d": d, "f": 3, "g": 6, "w": 4, "r": 2, "c": heads * d}
    for other, letters in ROWS[name].shapes.items():
        x = torch.rand([sizes[letter] for letter in letters], generator=generator, dtype=torch.float64)
        tensors[other] = {"log_decay": -2 * x.square(), "beta": x}.get(other, 4 * x - 2)
    return {other: x.detach().to(dtype).requires_grad_() for other, x in tensors.items()}


def attend(name: str, tensors: dict[str, Tensor], **call: Any) -> Any:
    """The function, with chunks of eight tokens in plain PyTorch."""
    return ROWS[name].op(**tensors, **ROWS[name].options, chunk_size=8, **call)


def literally(name: str, tensors: dict[str, Tensor], **call: Any) -> Tensor:
    """The literal reference."""
    return ROWS[name].reference(**tensors, **ROWS[name].options, **call)


def of_tokens(tensors: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    """Some of the tokens."""
    return {x: y[(slice(None),) * TOKENS[x] + (part,)] if x in TOKENS else y for x, y in tensors.items()}


def in_parts(name: str, tensors: dict[str, Tensor], lengths: Iterable[int], mask: Tensor | None = None):
    """The outputs of consecutive parts, each after the state of the one before, and the last state."""
    outputs, state, begin = [], None, 0
    for length in lengths:
        part = slice(begin, begin + length)
        hidden = None if mask is None else mask[:, part]
        masks = {"key_padding_mask": hidden, "query_padding_mask": hidden}
        out, state = attend(name, of_tokens(tensors, part), **masks, initial_state=state, return_state=True)
        outputs, begin = [*outputs, out], begin + length
    return torch.cat(outputs, dim=2), state


def numbers(name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The sums of a state, without the logarithm of an empty one, beside which any other number is rounding."""
    kinds = {"competition": "softmax", "allocation": "sigmoid", **ROWS[name].options}
    empty = {f"log_{weight}" for weight in ("competition", "allocation") if kinds[weight] != "softmax"}
    return {entry: x for entry, x in sorted(state.items()) if x.is_floating_point() and entry not in empty}


def results(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The output and, if there is one, the sums of the state after the tokens."""
    if not ROWS[name].causal:
        return {"out": attend(name, tensors)}
    out, state = attend(name, tensors, return_state=True)
    return {"out": out, **numbers(name, state)}


def total(found: dict[str, Tensor]) -> Tensor:
    """A number that depends on each result in another way."""
    return sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in found.values())


def everything(name: str, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The results, and the gradients of ``total``."""
    found = results(name, tensors)
    return [*found.values(), *torch.autograd.grad(total(found), list(tensors.values()))]


class Operators(TorchDispatchMode):
    """Records the project's own operators that run inside the context, with their arguments, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "lineartime":
            self.calls[func._schema.name.removeprefix("lineartime::")] = args
        return func(*args, **(kwargs or {}))
