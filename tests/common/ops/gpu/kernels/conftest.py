"""Tests of Triton's kernels need a GPU or Triton's interpreter; without either, ``../test_dispatch.py`` runs them.

Those of fla's kernels need fla-core and a newer torch than 2.6 as well.

Fixtures ensure that kernels ran, and use small tiles in the interpreter, so that small inputs have several of them.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from common.ops.flow.gpu import causal, chunks
from common.ops.mixed_chunk.gpu import sequence
from common.ops.shared.gpu import dispatch
from common.ops.shared.gpu.launch import interpreted
from tests.torch_versions import NEWER_THAN_2_6

collect_ignore_glob = [] if interpreted() or torch.cuda.is_available() else ["test_*.py"]
collect_ignore = [] if find_spec("fla") and NEWER_THAN_2_6 else ["test_fla_functions.py"]


@pytest.fixture
def launches(monkeypatch) -> list:
    """The launches of kernels so far."""
    if interpreted():
        from triton.runtime.interpreter import GridExecutor as Launcher

        method = "__call__"
    else:
        from triton.runtime.jit import JITFunction as Launcher

        method = "run"
    seen, launch = [], getattr(Launcher, method)

    def counted(self, *args, **kwargs):
        seen.append(self)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(Launcher, method, counted)
    return seen


@pytest.fixture(autouse=True)
def kernels_run(request, monkeypatch, launches):
    """Kernels run in each test, and do not fail, except in tests marked as comparing with plain PyTorch."""
    monkeypatch.setattr(dispatch, "failed", set())
    if "with_pytorch" in request.fixturenames:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # the warning about a fallback
        yield
    assert launches and not dispatch.failed


@pytest.fixture
def with_pytorch():
    """Tests in which plain PyTorch may take the place of kernels."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if interpreted():
        for module in (sequence, causal, chunks):
            monkeypatch.setattr(module, "tile_rows", lambda x, channels: 16)
        monkeypatch.setattr(chunks, "SCAN", 16)


@pytest.fixture(autouse=True)
def language_prepared_once(monkeypatch, launches):
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
