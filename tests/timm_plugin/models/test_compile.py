"""torch.compile of every model: outputs and gradients as without it, and no new graph for a new batch or image size."""

import logging

import pytest
import torch
from torch import Tensor, nn

from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import ANY_SIZE, CASES, build, images


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch):
    # pytest keeps every record of torch's trace log, which makes compiling slower.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(compiled: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Logits and the gradients of every parameter."""
    out, expected = compiled(x), model(x)
    assert_close("logits", out, expected)
    parameters = dict(model.named_parameters())
    wanted = gradients(expected, parameters.values())
    for name, gradient, one in zip(parameters, gradients(out, parameters.values()), wanted):
        assert_close(f"gradient of {name}", gradient, one, 5e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ANY_SIZE])
def test_any_batch(case):
    model = build(case, **({"depth": 1} if "vit" in case or case == "deit" else {}))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4))  # 3 would be the size of something else too
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (2, 7):
            assert_same(compiled, model, images(model, batch=batch))


@pytest.mark.parametrize("case", ANY_SIZE)
def test_any_batch_and_size(case):
    """With ``dynamic_img_pad``: without it timm's own check of an image's size is part of the graph."""
    model = build(case, dynamic_img_pad=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4, size=(101, 75)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, size in ((2, (101, 75)), (5, (83, 118))):
            assert_same(compiled, model, images(model, batch=batch, size=size))
