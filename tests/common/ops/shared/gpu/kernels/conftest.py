"""Makes sure that kernels ran: the PyTorch forms are taken away, and a warning that one runs is an error."""

import sys
import warnings

import pytest

# Imported before the PyTorch forms are taken away, which they fall back to.
from common.ops.flow import causal_chunks_gpu, causal_gpu, causal_walk_gpu
from common.ops.flow import interface as flow
from common.ops.mixed_chunk import gpu
from common.ops.mixed_chunk import interface as mixed_chunk
from common.ops.shared.gpu import dispatch
from common.ops.shared.gpu.launch import interpreted

PYTORCH_FORMS = ((flow, "attention_in_chunks"), (mixed_chunk, "whole_sequence"))


def _taken_away(*args, **kwargs):
    raise AssertionError("a PyTorch form ran where a kernel was to be tested")


@pytest.fixture(autouse=True)
def kernels_alone(request, monkeypatch):
    """No PyTorch form, unless a test is marked as one that compares with it."""
    monkeypatch.setattr(dispatch, "failed", set())
    if "with_pytorch" in request.fixturenames:
        yield
        return
    for module, name in PYTORCH_FORMS:
        monkeypatch.setattr(module, name, _taken_away)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
    assert not dispatch.failed


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of few tokens in the interpreter, so that small inputs have several in a chunk."""
    if interpreted():
        monkeypatch.setattr(gpu, "tile_rows", lambda x, channels: 16)


@pytest.fixture
def split(request, monkeypatch):
    """How causal Flow-Attention is split, and nothing else: in chunks, or a walk, as for a GPU of one processor."""
    of_name = {"chunks": causal_chunks_gpu, "walk": causal_walk_gpu}
    monkeypatch.setattr(causal_gpu, "processors", lambda device: 1 if request.param == "walk" else sys.maxsize)
    for name, module in of_name.items():
        if name != request.param:
            monkeypatch.setattr(module, "forward", _taken_away)
    return of_name[request.param]


@pytest.fixture
def with_pytorch():
    """Leaves the PyTorch forms in place."""
