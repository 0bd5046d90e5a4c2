"""What is tested here ran in kernels: the PyTorch forms are taken away, and a warning that one runs is an error."""

import sys
import warnings

import pytest

# Imported before the PyTorch forms are taken away, which they fall back to.
from common.ops.triton import dispatch, flow_attention, mixed_chunk_attention  # noqa: F401

PYTORCH_FORMS = {
    "common.ops.flow_attention_causal": "attention_in_chunks",
    "common.ops.mixed_chunk_attention": "whole_sequence",
}


def _taken_away(*args, **kwargs):
    raise AssertionError("a PyTorch form ran where a kernel was to be tested")


@pytest.fixture(autouse=True)
def kernels_alone(request, monkeypatch):
    """No PyTorch form, unless a test is marked as one that compares with it."""
    monkeypatch.setattr(dispatch, "_failed", set())
    if "with_pytorch" in request.fixturenames:
        yield
        return
    for module, name in PYTORCH_FORMS.items():
        monkeypatch.setattr(sys.modules[module], name, _taken_away)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield
    assert not dispatch._failed


@pytest.fixture
def with_pytorch():
    """Leaves the PyTorch forms in place."""
