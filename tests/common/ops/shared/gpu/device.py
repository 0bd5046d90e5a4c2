"""The device of the kernels under test, and fixtures that ensure that kernels ran.

The ``conftest.py`` of each folder with tests of kernels imports the fixtures. They disable the PyTorch forms, and
turn the warning about a fallback into an error.
"""

import warnings
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor

# Imported before the PyTorch forms, to which they fall back, are disabled.
from common.ops.flow import interface as flow
from common.ops.flow.gpu import chunks as flow_gpu
from common.ops.mixed_chunk import interface as mixed_chunk
from common.ops.mixed_chunk.gpu import sequence as mixed_chunk_gpu
from common.ops.shared.gpu import dispatch
from common.ops.shared.gpu.launch import interpreted

#: Fixtures that each ``conftest.py`` of kernel tests imports; tests import the other names.
__all__ = ["collect_ignore_glob", "kernels_alone", "language_prepared_once", "small_tiles", "with_pytorch"]

#: Tests of kernels need a GPU or Triton's interpreter; without either, ``test_interpreted.py`` runs them in it.
collect_ignore_glob = [] if interpreted() or torch.cuda.is_available() else ["test_*.py"]

DEVICE = "cpu" if interpreted() else "cuda"


def on_device(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Copy the numbers to new leaves on the device; None stays None."""
    return tuple(None if x is None else x.detach().to(DEVICE).requires_grad_(x.is_floating_point()) for x in tensors)


def on_cpu(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.cpu() for x in tensors)


_PYTORCH_FORMS = ((flow, "attention_in_chunks"), (mixed_chunk, "whole_sequence"))


def _taken_away(*args, **kwargs):
    raise AssertionError("a PyTorch form ran where a kernel was to be tested")


@pytest.fixture(autouse=True)
def kernels_alone(request, monkeypatch):
    """Disable the PyTorch forms, except in tests marked as comparing with them."""
    monkeypatch.setattr(dispatch, "failed", set())
    if "with_pytorch" in request.fixturenames:
        yield
        return
    for module, name in _PYTORCH_FORMS:
        monkeypatch.setattr(module, name, _taken_away)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
    assert not dispatch.failed


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Use small tiles in the interpreter, so that small inputs have several of them."""
    if interpreted():
        monkeypatch.setattr(mixed_chunk_gpu, "tile_rows", lambda x, channels: 16)
        monkeypatch.setattr(flow_gpu, "SCAN", 16)


@pytest.fixture(autouse=True)
def language_prepared_once(monkeypatch):
    """Prepare Triton's interpreter language once per launch, since doing so at every call takes most of its time.

    The interpreter does it at each call of a function inside a kernel, for each module that the functions use.
    """
    if not interpreted():
        return
    from triton import language
    from triton.runtime import interpreter

    prepare, launch, prepared = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    @cache
    def seen_by(function):
        return frozenset(x.__name__ for x in function.__globals__.values() if x is language or x is language.core)

    def prepare_once(function):
        if seen_by(function) in prepared:
            return None
        prepared.add(seen_by(function))
        return prepare(function)

    def launch_anew(*args, **kwargs):
        prepared.clear()
        return launch(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", prepare_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)


@pytest.fixture
def with_pytorch():
    """Keep the PyTorch forms enabled."""
