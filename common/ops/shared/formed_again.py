"""Tensors that the backward pass forms again, so that the graph need not keep them from the forward pass.

``torch.utils.checkpoint`` was tried in its place, with ``use_reentrant=False``, around three parts of a gated attention
unit: norm and first projection, attention, gate and last projection. It computes both projections and attention once
more. Peaks of a training step of ``flash_lm`` beyond the model, two layers, float32, one core:

| width, tokens | here | checkpoint | ``transformer_pp_lm``, which a test promises is not exceeded |
| --- | ---: | ---: | ---: |
| 256, 512 | 26.5 MiB | 26.5 MiB | 28.6 MiB |
| 512, 512 | 49.5 MiB | 50.7 MiB | 49.9 MiB |
| 256, 2,048 | 108.3 MiB | 98.5 MiB | 114.4 MiB |

A step of two units alone (width 256, 2,048 tokens, chunks of 256) took 0.41 s here and 0.47 s with it, the fastest of
eight each on a busy machine; the sums of sizes of the gradients were equal. Around the parts without a product alone it
took 0.44 s and its peak was 77 MiB, where it is 56 MiB here and 81 MiB without either: what a product reads is kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from .tracing import runs_eagerly

#: Where ``x`` has fewer numbers all is kept: the calls for each tensor would take more than a twentieth of the time.
LEAST_NUMBERS = 2**17
#: ``form_again(tensors, function, *inputs)``: keep the inputs in place of the tensors, which are ``function(*inputs)``.
FormAgain = Callable[..., None]


def forming_again(x: Tensor) -> AbstractContextManager[FormAgain]:
    """Inside it, operations keep for their backward pass how a tensor was formed where ``form_again`` was told so.

        with forming_again(x) as form_again:
            y = silu(x)
            form_again([y], silu, x)
            z = y @ weight  # keeps x for the gradient of the weight, not y

    Gradients are the same bit for bit, gradients of gradients too, for the time of computing ``function`` once more.
    It is to be cheap, without random numbers, and its inputs are to be kept anyway. Everything is kept as ever where
    ``x`` is small, traced or transformed, and where somebody else decides on what is kept: activation checkpointing or
    another ``torch.autograd.graph.saved_tensors_hooks``.
    """
    return _forming_again() if _decides_what_is_kept(x) else _KeepingAll()


def _keep_all(*_: Any) -> None:
    """A ``form_again`` that changes nothing."""


class _KeepingAll:
    """Inside it all is kept. ``nullcontext`` would do, but torch.compile of torch 2.6 forgets what that gives."""

    def __enter__(self) -> FormAgain:
        return _keep_all

    def __exit__(self, *_: Any) -> None:
        return None


@contextmanager
def _forming_again() -> Iterator[FormAgain]:
    saved: list[_Saved] = []
    formed: dict[tuple[Any, ...], tuple[_Form, int]] = {}
    alive: list[Tensor] = []  # so that until the end no two tensors have the same place

    def form_again(tensors: Sequence[Tensor], function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        form = _Form(function, inputs)
        alive.extend(tensors)
        formed.update((_place(tensor), (form, i)) for i, tensor in enumerate(tensors))

    def pack(tensor: Tensor) -> _Saved:
        saved.append(_Saved(tensor))
        return saved[-1]

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, _Saved.get):
            yield form_again
    finally:
        for one in saved:
            one.form_again(formed)
        # A graph holds on to its hooks, and so to what they refer to.
        for held in (saved, formed, alive):
            held.clear()


def _decides_what_is_kept(x: Tensor) -> bool:
    """Whether ``forming_again`` may say what is kept. Before torch 2.8 nobody can ask whether somebody else does."""
    if not runs_eagerly(x) or not torch.is_grad_enabled() or x.numel() < LEAST_NUMBERS:
        return False
    hooks_of_others = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return hooks_of_others is not None and hooks_of_others(False) is None


def _place(x: Tensor) -> tuple[Any, ...]:
    """Key that two tensors share if they are the same numbers in the same memory, in any shape if contiguous."""
    order = (x.numel(),) if x.is_contiguous() else (x.shape, x.stride())
    return (x.data_ptr(), x.dtype, *order)


class _Unchanged:
    """Tensors that nobody may change in place before the backward pass; autograd does not look where hooks are."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors, self._versions = tensors, [x._version for x in tensors]

    def get(self) -> Sequence[Tensor]:
        """The tensors; RuntimeError where one was changed."""
        if self._versions != [x._version for x in self._tensors]:
            raise RuntimeError("a tensor that the backward pass needs was changed in place after the forward pass")
        return self._tensors


class _Form:
    """Forms some tensors in one call, and holds each until it is taken."""

    def __init__(self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
        self._function, self._inputs, self._formed = function, _Unchanged(inputs), {}

    def take(self, i: int) -> Tensor:
        """Tensor ``i``."""
        inputs = self._inputs.get()
        if i not in self._formed:
            with torch.no_grad():
                self._formed = dict(enumerate(self._function(*inputs)))
        return self._formed.pop(i)


class _Saved:
    """Stand-in for a tensor in the graph, which holds the tensor itself, or how it is formed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._kept, self._form = tensor, _Unchanged([tensor]), None

    def form_again(self, formed: Mapping[tuple[Any, ...], tuple[_Form, int]]) -> None:
        """Drop the tensor if it is one of ``formed``: a form, and the tensor's number in it, by place."""
        self._form, self._shape = formed.get(_place(self._tensor)), self._tensor.shape
        if self._form is not None:
            self._kept = None
        self._tensor = None

    def get(self) -> Tensor:
        """The tensor."""
        if self._form is None:
            return self._kept.get()[0]
        form, i = self._form
        return form.take(i).reshape(self._shape)
