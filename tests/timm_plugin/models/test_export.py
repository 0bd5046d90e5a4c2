"""The models leave Python: torch.export, ONNX, pickles and copies."""

import copy
import io
import pickle

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.export import Dim

from tests.compare import assert_close
from tests.timm_plugin.helpers.models import CASES, build, images
from tests.torch_versions import needs_newer_than_2_6

#: One of each kind of layer: exporting costs seconds.
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
    # Afterwards, since torch 2.6 writes the sizes of its example into the program that it turns to ONNX.
    program = torch.onnx.export(exported, dynamo=True, verbose=False)
    session = ReferenceEvaluator(program.model_proto)
    for batch, expected in batches:
        (out,) = session.run(None, {session.input_names[0]: batch.numpy()})
        assert_close("onnx", torch.from_numpy(out), expected, 1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("case", ["daft_full", "daft_conv", "daft_gumbel"])
def test_onnx_of_the_tracing_exporter_keeps_the_batch_free(case, tmp_path):
    """``dynamo=False``, as timm's onnx_export.py without ``--dynamo``."""
    model, path = build(case, depth=1), tmp_path / "model.onnx"
    axes = {"x": {0: "batch"}}
    torch.onnx.export(model, (images(model),), path, dynamo=False, input_names=["x"], dynamic_axes=axes)
    more = images(model, batch=3)
    (out,) = ReferenceEvaluator(str(path)).run(None, {"x": more.numpy()})
    assert_close("onnx", torch.from_numpy(out), model(more), 1e-4)


@pytest.mark.parametrize("case", CASES)
def test_pickle_and_copy(case):
    model = build(case)
    x = images(model)
    assert_close("pickled", pickle.loads(pickle.dumps(model))(x), model(x))
    assert_close("copied", copy.deepcopy(model)(x), model(x))


def test_whole_model_saved():
    model = build("hier_12h", form="paper")
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded.stages[0].blocks[0].attn.attention.options.form == "paper"
    assert_close("loaded", loaded(images(model)), model(images(model)))
