"""Training steps of whole models, and the comparison of their gradients with a reference."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.attention import InnerAttention
from common.ops import mixed_chunk

from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.work import Comparison
from ..peers import attention_maps

#: The options of mixed chunk attention that the map can compute; the models use these values.
_PLAIN = {"causal": True, "kernel": "relu2", "local": True, "linear": True}


def training_step(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[], list[Tensor]]:
    """A function that does one update of ``parameters`` with AdamW and leaves no gradients behind."""
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
    literal: AbstractContextManager | None = None,
) -> list[Comparison]:
    """Compare a loss and its gradients with a reference; both lists of parameters are in the same order.

    Gradients are compared as one vector, since some are only rounding errors, such as that of a bias before a softmax.
    ``literal`` is entered for both passes of the reference: a layer may compute its output again in the backward pass.
    """
    actual, gradients = _loss_and_gradients(loss, parameters)
    with literal or nullcontext():
        expected, expected_gradients = _loss_and_gradients(reference, reference_parameters)
    allowed = MODEL_TOLERANCES[dtype]
    return [
        compare("loss", actual, expected, allowed),
        compare("gradient of the parameters", gradients, expected_gradients, allowed),
    ]


def _loss_and_gradients(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and its gradients as one vector in float64."""
    value = loss()
    gradients = torch.autograd.grad(value, list(parameters))
    return value.detach(), torch.cat([x.double().flatten() for x in gradients])


@contextmanager
def attention_written_out() -> Iterator[None]:
    """Compute gated attention units and fused softmax attention by maps of all pairs of tokens."""

    def literal(*heads: Tensor, chunk_size: int, bias: Tensor | None = None, **other: Any) -> Tensor:
        options = {name: x for name, x in other.items() if x is not None}
        wrong = {name: x for name, x in options.items() if isinstance(x, Tensor) or x != _PLAIN.get(name, False)}
        if wrong:
            raise ValueError(f"mixed chunk attention is called with {wrong}; allowed here: {_PLAIN}, without masks")
        return attention_maps.mixed_chunk_attention(*heads, chunk_size=chunk_size, bias=bias)

    with mock.patch.object(mixed_chunk, "mixed_chunk_attention", literal), sdpa_kernel(SDPBackend.MATH):
        yield


@contextmanager
def attention_by_reference(model: nn.Module) -> Iterator[None]:
    """Compute every attention of ``model`` by its literal ``reference``, without dropout."""

    def literal(attention: InnerAttention, *inputs: Tensor, dropout_p: float = 0.0, **further: Any) -> Tensor:
        if dropout_p:
            raise ValueError(f"dropout_p is {dropout_p}; allowed: 0, as a reference has no dropout")
        return attention.reference(*inputs, **further)

    with ExitStack() as patches:
        for module in model.modules():
            if hasattr(module, "inner") and isinstance(module.inner, InnerAttention):  # between a host's projections
                patches.enter_context(mock.patch.object(module.inner, "forward", partial(literal, module.inner)))
        yield
