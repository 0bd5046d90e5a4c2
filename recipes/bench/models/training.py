"""Training steps of whole models, and their gradients beside those of a reference."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import gau

from ..compare import MODEL_TOLERANCES, compare
from ..peers import attention_maps
from ..work import Comparison

#: Of ``mixed_chunk_attention``, as the models call it; the map has no form for anything else.
_PLAIN = {"key_padding_mask": None, "kernel": "relu2", "local": True, "linear": True, "return_state": False}


def training_step(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[], list[Tensor]]:
    """One update of ``parameters`` with AdamW, as a function; nothing of it remains but the parameters."""
    optimizer = torch.optim.AdamW(list(parameters), lr=1e-4)

    def step() -> list[Tensor]:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        return []

    return step


def compare_training(
    loss: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    reference: Callable[[], Tensor],
    reference_parameters: Iterable[Tensor],
    dtype: torch.dtype,
) -> list[Comparison]:
    """A loss and its gradients beside a reference's; parameters are given in the same order.

    Gradients are compared as one vector: some, of a bias before a softmax, are nothing but rounding by themselves.
    """
    actual, expected = loss(), reference()
    allowed = MODEL_TOLERANCES[dtype]
    sides = [
        torch.cat([x.double().flatten() for x in torch.autograd.grad(side, list(wanted))])
        for side, wanted in ((actual, parameters), (expected, reference_parameters))
    ]
    return [
        compare("loss", actual.detach(), expected.detach(), allowed),
        compare("gradient of the parameters", *sides, allowed),
    ]


@contextmanager
def attention_written_out() -> Iterator[None]:
    """Gated attention units and fused softmax attention take their weights from a map of every two tokens."""

    def literal(*heads: Tensor, chunk_size: int, bias: Tensor | None, causal: bool, **other: object) -> Tensor:
        if not causal or any(other.get(name, value) != value for name, value in _PLAIN.items()):
            raise ValueError(f"causal is {causal}, with {other}; allowed here: the causal form without options")
        return attention_maps.mixed_chunk_attention(*heads, chunk_size=chunk_size, bias=bias)

    with mock.patch.object(gau, "mixed_chunk_attention", literal), sdpa_kernel(SDPBackend.MATH):
        yield
