"""torch.compile of every kind of model: outputs and gradients as without it, no new graph for a new batch or size.

That every mechanism compiles into one graph is in ``tests/common/contract``; here is what stands around them.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import build, images


@pytest.fixture(autouse=True)
def fresh_compiler():
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


#: Two stages of a hierarchical model, and one block of ours and of timm's. SOFT's iterations, whose backward pass the
#: contract compiles, would take most of the time.
TRACED_WITHOUT_BACKWARD = ("hier_soft",)
SMALL = {
    "hier": dict(embed_dims=(16, 24), depths=(1, 1)),
    "hier_soft": dict(embed_dims=(16, 24), depths=(1, 1)),
    "flash": dict(depth=1),
    "daft_full": dict(depth=1),
    "daft_conv_vit": dict(depth=1),
}


@pytest.mark.parametrize("case", SMALL)
def test_any_batch(case):
    model = build(case, **SMALL[case])
    backend = "eager" if case in TRACED_WITHOUT_BACKWARD else "aot_eager"
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4))  # 3 would be the size of something else too
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(compiled, model, images(model, batch=7))


def test_any_batch_and_size():
    """With ``dynamic_img_pad``: without it timm's own check of an image's size is part of the graph."""
    model = build("daft_gumbel", dynamic_img_pad=True, depth=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4, size=(101, 75)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, size in ((2, (101, 75)), (5, (83, 118))):
            assert_same(compiled, model, images(model, batch=batch, size=size))
