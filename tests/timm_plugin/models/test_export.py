"""torch.export and its ONNX, and torch.compile: outputs, gradients, any batch and any size.

``tests/common/contract`` checks that every mechanism compiles into one graph; these tests cover the models.
"""

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import Tensor, nn
from torch.export import Dim

from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers.models import build, images
from tests.torch_versions import needs_newer_than_2_6

#: One of each kind of layer, since exporting takes seconds.
SMALL = {
    "hier_12h": dict(embed_dims=(12, 24), depths=(1, 1)),
    "daft_full": dict(depth=1),
    "daft_gumbel": dict(depth=1),
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_newer_than_2_6
@pytest.mark.parametrize(
    ("case", "step", "sizes"),
    [
        ("hier_dynamic", 8, ((96, 128), (64, 96), (40, 160))),
        ("daft_conv", 16, ((96, 128), (64, 96), (48, 160))),
    ],
)
def test_export_any_size(case, step, sizes):
    model = build(case, **({"embed_dims": (16, 24), "depths": (1, 1)} if "hier" in case else {"depth": 1}))
    height, width = Dim("height", min=2, max=64), Dim("width", min=2, max=64)
    example = images(model, size=sizes[0])
    program = torch.export.export(model, (example,), dynamic_shapes=({2: step * height, 3: step * width},))
    for size in sizes:
        x = images(model, size=size)
        assert_close(f"exported at {size}", program.module()(x), model(x))


@pytest.mark.parametrize("case", [pytest.param(x, marks=needs_newer_than_2_6) if "daft" in x else x for x in SMALL])
def test_export_and_onnx_of_any_batch(case):
    model = build(case, **SMALL[case])
    x = images(model)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch", min=1, max=64)},))
    batches = [(batch, model(batch)) for batch in (x, images(model, batch=3))]
    for batch, expected in batches:
        assert_close("exported", exported.module()(batch), expected)
    # Runs afterwards, since torch 2.6 writes the sizes of its example into the program that it converts to ONNX.
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    session = ReferenceEvaluator(program.model_proto)
    for batch, expected in batches:
        (out,) = session.run(None, {session.input_names[0]: batch.numpy()})
        assert_close("onnx", torch.from_numpy(out), expected, 1e-4)


def assert_same(compiled: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Compare logits and the gradients of every parameter."""
    out, expected = compiled(x), model(x)
    assert_close("logits", out, expected)
    parameters = dict(model.named_parameters())
    wanted = gradients(expected, parameters.values())
    for name, gradient, expected_gradient in zip(parameters, gradients(out, parameters.values()), wanted):
        assert_close(f"gradient of {name}", gradient, expected_gradient, 5e-5)


#: Two stages of a hierarchical model, and one of our blocks and one of timm's; with the backend. "aot_eager" traces
#: both passes, which takes seconds; the contract does so for the attentions of the others.
COMPILED = {
    "hier": ("aot_eager", dict(embed_dims=(16, 24), depths=(1, 1))),
    "hier_soft": ("eager", dict(embed_dims=(16, 24), depths=(1, 1))),
    "flash": ("aot_eager", dict(depth=1)),
    "daft_full": ("eager", dict(depth=1)),
    "daft_conv_vit": ("eager", dict(depth=1)),
}


@pytest.mark.parametrize("case", COMPILED)
def test_any_batch(case):
    backend, sizes = COMPILED[case]
    model = build(case, **sizes)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4))  # 3 would also be the size of another dimension
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_same(compiled, model, images(model, batch=7))


def test_any_batch_and_size():
    """With ``dynamic_img_pad``: otherwise timm's own check of an image's size is part of the graph."""
    model = build("daft_gumbel", dynamic_img_pad=True, depth=1)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    assert_same(compiled, model, images(model, batch=4, size=(101, 75)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, size in ((2, (101, 75)), (5, (83, 118))):
            assert_same(compiled, model, images(model, batch=batch, size=size))
