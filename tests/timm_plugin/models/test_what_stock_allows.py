"""Each kind of our models supports what torch and timm do with a stock vision transformer, or refuses with a message.

timm_plugin/REFERENCE.md names the models and the operations, and which of these have limits. Programs for any batch
and size of image are made of a few kinds, since exporting and compiling takes seconds.
torch.fx and intermediates are in test_conformance.py.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable

import onnx
import pytest
import timm
import torch
from onnx.reference import ReferenceEvaluator
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim
from torch.func import functional_call, grad, jvp, vmap
from torch.optim.swa_utils import AveragedModel

from tests.compare import assert_close, gradients
from tests.timm_plugin.helpers import SMALL, VIT, build, images, vit
from tests.torch_versions import needs_newer_than_2_6
from timm_plugin import create_model, replace_attention

TINY = dict(SMALL, depth=1)
COLUMNS = {
    "`flowformer_hier_*`": [
        lambda: timm.create_model("flowformer_hier_test", img_size=32, embed_dims=(16, 24), depths=(1, 1))
    ],
    "`flowformer_deit_*`": [lambda: timm.create_model("flowformer_deit_ti", **TINY)],
    "`daft_*`": [
        lambda: timm.create_model("daft_full_s", bias_dim=8, **TINY),
        lambda: timm.create_model("daft_conv_test", **TINY),
    ],
    "`flash_*`": [lambda: timm.create_model("flash_vit_s", query_dim=16, **TINY | {"num_heads": 1})],
    '`attn_layer="flow"`': [lambda: create_model(VIT, attn_layer="flow", **TINY)],
    '`replace_attention(vit, "hedgehog")`': [lambda: replace_attention(vit(depth=1), "hedgehog")],
}
#: If the answer is not "yes": the text of the refusal.
REFUSED = {
    ("torch.jit.script", "`flash_*`"): "gated attention units; allowed .*torch.compile and torch.export",
    (
        "torch.jit.script",
        '`replace_attention(vit, "hedgehog")`',
    ): "'hedgehog'; allowed .*torch.compile and torch.export",
}


def _images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _score(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, parameters, (x,)).square().sum()


def _same(what: str, other: Callable, model: nn.Module, tolerance: float | None = None) -> None:
    for x in (_images(), _images(3)):
        tolerances = () if tolerance is None else (tolerance,)
        assert_close(what, other(x), model(x), *tolerances)


def _traced(model: nn.Module) -> None:
    _same("traced", torch.jit.trace(model, (_images(),)), model)


def _exported(model: nn.Module) -> None:
    x = _images()
    assert_close("exported", torch.export.export(model, (x,)).module()(x), model(x))


def _onnx(model: nn.Module) -> None:
    file = io.BytesIO()
    torch.onnx.export(model, (_images(),), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch"}})
    session = ReferenceEvaluator(onnx.load_from_string(file.getvalue()))
    _same("onnx", lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model, 1e-4)


def _quantised(model: nn.Module) -> None:
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert any("quantized" in type(module).__module__ for module in quantised.modules())
    _same("quantised", quantised, model, 0.05)


class _Int8(nn.Module):
    """A layer with 8-bit weights, as libraries for quantisation have: it has none of the attributes of the layer."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        weight = layer.weight.detach()
        self.scale = weight.abs().amax() / 127
        self.small = (weight / self.scale).round().to(torch.int8)
        self.layer = [layer]

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.layer[0], {"weight": self.small.to(x) * self.scale}, (x,))


def _of_eight_bits(model: nn.Module) -> None:
    small = copy.deepcopy(model)
    for name, layer in list(small.named_modules()):
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            parent, _, child = name.rpartition(".")
            setattr(small.get_submodule(parent), child, _Int8(layer))
    _same("of eight bits", small, model, 0.05)


def _hooked(model: nn.Module) -> None:
    called: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns about hooks that are never called
        for name, module in model.named_modules():
            module.register_forward_hook(lambda *args, name=name: called.append(name))
            module.register_full_backward_hook(lambda *args, name=name: called.append(f"back {name}"))
    model(_images()).sum().backward()
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {*layers, "", "back "} <= set(called) and {f"back {name}" for name in layers} <= set(called)


def _averaged(model: nn.Module) -> None:
    average, ema = AveragedModel(model), ModelEmaV3(model, decay=0.5)
    average.update_parameters(model)
    ema.update(model)
    _same("average", average, model)
    _same("exponential average", ema, model)


def _per_sample(model: nn.Module) -> None:
    parameters, x = _parameters(model), _images()
    out = vmap(lambda image: functional_call(model, parameters, (image[None],))[0])(x)
    assert_close("vmap", out, model(x))
    per_image = vmap(grad(lambda p, image: _score(model, p, image[None])), (None, 0))(parameters, x)
    model.zero_grad()
    model(x).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    # All gradients in one tensor: where a window sees every token, the gradient of DAFT-conv's β is only rounding.
    sums = torch.cat([per_image[name].sum(0).flatten() for name in expected])
    assert_close("gradients", sums, torch.cat([gradient.flatten() for gradient in expected.values()]), 1e-4)


def _forward_mode(model: nn.Module) -> None:
    model, x = model.double(), _images(1).double()
    direction = torch.randn_like(x)
    _, derivative = jvp(model, (x,), (direction,))
    step = 1e-6 * direction
    assert_close("jvp", derivative, (model(x + step) - model(x - step)) / 2e-6, 1e-5)


def _differentiated_twice(model: nn.Module) -> None:
    x = _images(1).double().requires_grad_()
    model = model.double()
    torch.autograd.gradcheck(lambda x: model(x).square().sum(), (x,), fast_mode=True)
    torch.autograd.gradgradcheck(lambda x: model(x).square().sum(), (x,), fast_mode=True)


def _without_values(model: nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(5, 3, 32, 32)).shape[0] == 5


#: Operations as the reference names them.
ROWS: dict[str, Callable[[nn.Module], None]] = {
    "torch.jit.script": lambda model: _same("scripted", torch.jit.script(model), model),
    "torch.jit.trace": _traced,
    "torch.export": _exported,
    "ONNX": _onnx,
    "dynamic quantisation": _quantised,
    "weight-only quantisation": _of_eight_bits,
    "forward and backward hooks": _hooked,
    "deepcopy": lambda model: _same("copy", copy.deepcopy(model), model),
    "pickle": lambda model: _same("pickle", pickle.loads(pickle.dumps(model)), model),
    "ModelEmaV3, AveragedModel": _averaged,
    "torch.func: functional_call, vmap, grad": _per_sample,
    "torch.func: jvp": _forward_mode,
    "first derivatives, second derivatives": _differentiated_twice,
    "FakeTensorMode": _without_values,
}


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.default_generator.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if not parameter.any():  # filters of DAFT-conv, biases
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("row", ROWS)
def test_what_a_model_allows(row, column):
    for make in COLUMNS[column]:
        if (row, column) not in REFUSED:
            ROWS[row](_built(make))
            continue
        with pytest.raises(ValueError, match=REFUSED[row, column]) as raised:
            ROWS[row](_built(make))
        assert "\n" not in str(raised.value)


# ---- any batch and any size

TWO_STAGES = dict(embed_dims=(16, 24), depths=(1, 1))


@needs_newer_than_2_6
@pytest.mark.parametrize(
    ("case", "arguments", "step"),
    [
        ("hier", dict(TWO_STAGES, dynamic_img_size=True), 8),
        ("daft_gumbel", dict(depth=1), 16),
        ("hier", TWO_STAGES, None),  # of one size, and to ONNX
    ],
)
def test_exported_for_any_batch_and_size(case, arguments, step):
    model = build(case, **arguments)
    dynamic, sizes = {0: Dim("batch", min=1, max=64)}, [(64, 64)] * 2
    if step is not None:
        dynamic |= {2: step * Dim("height", min=2, max=64), 3: step * Dim("width", min=2, max=64)}
        sizes = [(96, 128), (64, 96), (48, 160)]
    pictures = [images(model, batch=2 + i, size=size) for i, size in enumerate(sizes)]
    exported = torch.export.export(model, (pictures[0],), dynamic_shapes=(dynamic,))
    for x in pictures:
        assert_close("exported", exported.module()(x), model(x))
    if case == "daft_gumbel":
        _onnx(model)
    if step is None:
        session = ReferenceEvaluator(torch.onnx.export(exported, dynamo=True, verbose=False).model_proto)
        for x in pictures:
            (out,) = session.run(None, {session.input_names[0]: x.numpy()})
            assert_close("onnx", torch.from_numpy(out), model(x), 1e-4)


#: Case -> arguments: stages on maps and on tokens, units, and samples for images of any size, with ``dynamic_img_pad``;
#: without, timm's own check of the size is part of the graph. The contract traces backward passes.
COMPILED = {
    "hier": dict(TWO_STAGES, attn_layer="soft,flow"),
    "flash": dict(depth=1),
    "daft_gumbel": dict(depth=1, dynamic_img_pad=True),
}


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_for_any_batch(case):
    """Logits and gradients, in one graph that is compiled once."""
    model, arguments = build(case, **COMPILED[case]), COMPILED[case]
    sizes = [(101, 75), (83, 118)] if "dynamic_img_pad" in arguments else [(64, 64)] * 2
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for batch, size in zip((4, 7), sizes):  # 3 would also be the size of another dimension
        x = images(model, batch=batch, size=size)
        with torch.compiler.set_stance("fail_on_recompile" if batch == 7 else "default"):
            out = compiled(x)
            found = gradients(out, model.parameters())
        expected = model(x)
        assert_close("logits", out, expected)
        for (name, _), *both in zip(model.named_parameters(), found, gradients(expected, model.parameters())):
            assert_close(f"gradient of {name}", *both, 5e-5)
    torch._dynamo.reset()
