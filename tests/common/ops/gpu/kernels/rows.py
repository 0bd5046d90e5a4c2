"""The functions with kernels for GPUs, calls of them on the device, and of their literal references in float64."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.ops import flow_attention, mixed_chunk_attention
from common.ops.flow.reference import flow_attention_reference
from common.ops.mixed_chunk.reference import mixed_chunk_attention_reference
from common.ops.shared.gpu.launch import interpreted
from tests.common.inputs import bias_like, mixed_chunk_inputs, qkv
from tests.compare import gradients

DEVICE = "cpu" if interpreted() else "cuda"
CHUNK = 5  # of mixed chunk attention, where a test is not about tiles: they have 16 tokens in the interpreter
SHORT = {"flow": 20, "chunks": 9, "chunks both ways": 9}  # two tiles, or two chunks


class Row(NamedTuple):
    """A function, its literal reference, the names of its tensors, and whether it takes a mask of queries."""

    op: Callable
    reference: Callable
    names: tuple[str, ...]
    masks: tuple[str, ...]
    options: dict[str, Any]


OF_FLOW = (flow_attention, flow_attention_reference, ("q", "k", "v"), ("key_padding_mask", "query_padding_mask"))
OF_CHUNKS = (
    *(mixed_chunk_attention, mixed_chunk_attention_reference),
    *(("q_quad", "k_quad", "q_lin", "k_lin", "v", "bias"), ("key_padding_mask",)),
)
ROWS = {
    "flow": Row(*OF_FLOW, {"causal": True}),
    "chunks": Row(*OF_CHUNKS, {"chunk_size": CHUNK, "causal": True}),
    "chunks both ways": Row(*OF_CHUNKS, {"chunk_size": CHUNK, "causal": False}),
}


def draw(
    name: str, n: int | None = None, d: int = 5, e: int = 3, *, batch: int = 1, heads: int = 1, bias="vector", **more
):
    """The tensors of a call on the device, as leaves; ``SHORT`` tokens by default."""
    sizes, dtype, n = {"batch": batch, "heads": heads, "e": e}, more.get("dtype", torch.float32), n or SHORT[name]
    if name == "flow":
        tensors = qkv(n, d=d, dtype=dtype, **sizes)
    else:
        size = more.get("chunk_size", CHUNK)
        tensors = (*mixed_chunk_inputs(n, s=d, dtype=dtype, **sizes), bias_like(bias, size, heads, dtype))
    named = zip(ROWS[name].names, on_device(tensors))
    return {x: y for x, y in named if y is not None}


def on_device(tensors: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    """Copy the numbers to new leaves on the device; None stays None."""
    return tuple(None if x is None else x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for x in tensors)


def attend(name: str, tensors: dict[str, Tensor], mask: Tensor | None = None, **options: Any) -> Any:
    """The function on the device."""
    masks = dict.fromkeys(ROWS[name].masks, on_device([mask])[0])
    return ROWS[name].op(**tensors, **masks, **{**ROWS[name].options, **options})


def doubled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leaves in float64 on the CPU."""
    return {name: x.detach().cpu().double().requires_grad_() for name, x in tensors.items()}


def literally(name: str, exact: dict[str, Tensor], mask: Tensor | None = None, **options: Any) -> Tensor:
    """The literal reference."""
    masks = dict.fromkeys(ROWS[name].masks, mask)
    return ROWS[name].reference(**exact, **masks, **{**ROWS[name].options, **options})


def of_all(out: Tensor, tensors: dict[str, Tensor]) -> list[Tensor]:
    """Gradients of all ``tensors``, on the CPU."""
    return [x.cpu() for x in gradients(out.cpu(), tensors.values())]
