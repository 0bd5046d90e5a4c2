"""The table of fairseq_plugin/REFERENCE.md: features of torch and fairseq with every kind of model.

Each entry works, or raises a ValueError of one line that names an alternative. If fairseq's own code prevents it and
torch reports that, the README says so, and it is not tested here.
"""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from tests.compare import assert_all_close, assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.episodes import build_decision, window
from tests.fairseq_plugin.helpers.language_models import build, build_model
from tests.fairseq_plugin.helpers.masked_models import build_masked
from tests.fairseq_plugin.helpers.series import CHANNELS, build_classifier
from tests.fairseq_plugin.helpers.text import tokens
from tests.torch_versions import NEWER_THAN_2_6

SOURCE, TARGET = tokens(2, 12), tokens(2, 9, seed=3)
LINEAR = ("--lineartime-cross-attention", "linear")
LAYERS = ("--lineartime-layers", "flow,linear")
CLASSIFIER = (
    "data --task sentence_prediction --criterion sentence_prediction --num-classes 3 --arch flow_classifier "
    "--max-positions 40 --encoder-layers 1 --encoder-embed-dim 16 --encoder-attention-heads 2"
).split()
#: Tolerances of dynamic quantisation to 8 bits and of half-precision weights, largest for random weights.
COARSE = 0.2


class Called(nn.Module):
    """The first output of ``model``, called with tensors only, under these names."""

    def __init__(self, model: nn.Module, inputs: dict[str, Tensor], options: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.names, self.options = model.eval(), tuple(inputs), options
        self.given = tuple(inputs.values())

    def forward(self, *tensors: Tensor) -> Tensor:
        out = self.model(**dict(zip(self.names, tensors)), **self.options)
        return out[0] if isinstance(out, tuple) else out


def _language_model(arch: str, *arguments: str) -> Called:
    return Called(build_model(arch, "--decoder-layers", "1", *arguments), {"src_tokens": SOURCE}, {})


def _encoder_decoder(arch: str, *arguments: str) -> Called:
    inputs = {"src_tokens": SOURCE, "src_lengths": torch.full((2,), 12), "prev_output_tokens": TARGET}
    return Called(build_encoder_decoder(arch, *arguments), inputs, {})


def _masked(arch: str, *arguments: str) -> Called:
    return Called(build_masked(arch, "--encoder-layers", "1", *arguments), {"src_tokens": SOURCE}, {})


def _classifier() -> Called:
    model = build(CLASSIFIER)
    model.register_classification_head("toy", num_classes=3)
    return Called(model, {"src_tokens": SOURCE}, {"features_only": True, "classification_head_name": "toy"})


def _series(arch: str) -> Called:
    source = torch.randn(2, 9, CHANNELS, generator=torch.Generator().manual_seed(1))
    return Called(build_classifier(arch), {"source": source}, {"classification_head_name": "toy"})


def _decision(arch: str) -> Called:
    batch = {name: x.float() if x.is_floating_point() else x for name, x in window(2, 7).items()}
    return Called(build_decision(arch), batch, {})


#: Every kind of model, with fairseq's layers, gated attention units, gates, and projections that operations read.
KINDS: dict[str, Callable[[], Called]] = {
    "encoder-decoder": lambda: _encoder_decoder("flow"),
    "encoder-decoder, linear": lambda: _encoder_decoder("linear", *LINEAR),
    "encoder-decoder, hybrid": lambda: _encoder_decoder("hybrid", *LAYERS, *LINEAR),
    "language model": lambda: _language_model("linear_lm", "--linear-forget", "channel", "--linear-short-conv", "3"),
    "language model, flash": lambda: _language_model("flash_lm"),
    "language model, gated_delta": lambda: _language_model("gated_delta_lm"),
    "language model, gla": lambda: _language_model("gla_lm"),
    "language model, rfa_gate": lambda: _language_model("rfa_gate_lm"),
    "language model, rotary": lambda: _language_model("performer_lm"),
    "masked model": lambda: _masked("flow_mlm"),
    "masked model, flash": lambda: _masked("flash_mlm"),
    "masked model, hybrid": lambda: _masked("hybrid_mlm", "--encoder-layers", "2", *LAYERS),
    "classifier": _classifier,
    "time series": lambda: _series("flow_time_series"),
    "time series, flash": lambda: _series("flash_time_series"),
    "decisions": lambda: _decision("flow_decision"),
}


def _assert_same(other: Callable[..., Tensor], called: Called, tolerance: float | None = None) -> None:
    with torch.no_grad():
        assert_close("outputs", other(*called.given), called(*called.given), tolerance)


def _loss(called: Called, parameters: dict[str, Tensor]) -> Tensor:
    return functional_call(called, parameters, called.given).square().mean()


def _trace(called: Called) -> None:
    _assert_same(torch.jit.trace(called, called.given, check_trace=False), called)


def _quantise(called: Called, dtype: torch.dtype) -> None:
    _assert_same(quantize_dynamic(called, {nn.Linear}, dtype=dtype), called, COARSE)


def _moving_average(called: Called) -> None:
    average = EMA(called, EMAConfig(store_ema=True, ema_decay=0.9))
    average.step(called, updates=1)
    _assert_same(average.get_model(), called)


def _averaged_model(called: Called) -> None:
    average = AveragedModel(called, use_buffers=True)
    for _ in range(2):
        average.update_parameters(called)
    average.load_state_dict(average.state_dict())
    _assert_same(average, called)


def _transforms(called: Called) -> None:
    """``grad`` and ``jvp`` with parameters as arguments; several models at once by ``vmap``."""
    parameters = {name: x.detach() for name, x in called.named_parameters()}
    gradients = torch.func.grad(lambda p: _loss(called, p))(parameters)
    expected = torch.autograd.grad(
        _loss(called, dict(called.named_parameters())),
        list(called.parameters()),
        allow_unused=True,
        materialize_grads=True,
    )
    assert_all_close(gradients, gradients.values(), expected, 1e-4)
    direction = {name: torch.ones_like(x) for name, x in parameters.items()}
    _, along = torch.func.jvp(lambda p: _loss(called, p), (parameters,), (direction,))
    assert_close("jvp", along, sum(x.sum() for x in expected), 1e-3)
    stacked = {name: torch.stack([x, x]) for name, x in parameters.items()}
    stacked_outputs = torch.func.vmap(lambda p: functional_call(called, p, called.given), randomness="different")(
        stacked
    )
    _assert_same(lambda *_: stacked_outputs[1], called, 1e-4)


def _second_derivatives(called: Called) -> None:
    """Hessian along the gradient, against finite differences; fairseq's gelu computes in float32."""
    called = called.double()
    called.given = tuple(x.double() if x.is_floating_point() else x for x in called.given)
    parameters = {name: x.detach() for name, x in called.named_parameters()}
    gradient = torch.func.grad(lambda p: _loss(called, p))
    along = gradient(parameters)
    leaves = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(_loss(called, leaves), list(leaves.values()), create_graph=True, **options)
    product = sum((gradient * along[name]).sum() for name, gradient in zip(leaves, first))
    second_derivatives = torch.autograd.grad(product, list(leaves.values()), **options)
    step = 1e-5 / sum(x.square().sum() for x in along.values()).sqrt()
    above, below = (gradient({n: x + sign * step * along[n] for n, x in parameters.items()}) for sign in (1, -1))
    expected = [(above[name] - below[name]) / (2 * step) for name in parameters]
    second_derivatives, expected = (torch.cat([x.flatten() for x in parts]) for parts in (second_derivatives, expected))
    assert_close("the Hessian along the gradient", second_derivatives, expected, 5e-3)


def _hooks(called: Called) -> None:
    """Forward hooks of every module that computes something, backward hooks of every layer and its attention."""
    called_modules, backward = set(), set()
    modules = {name: x for name, x in called.named_modules() if any(True for _ in x.parameters(recurse=False))}
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: called_modules.add(name))
    layers = [x for x in called.modules() if isinstance(x, nn.ModuleList)]
    expected_modules = {part for layer in layers for part in layer.children() if any(True for _ in part.parameters())}
    for layer in expected_modules:
        layer.register_full_backward_hook(lambda module, *_: backward.add(module))
    called(*called.given).square().mean().backward()
    assert backward == expected_modules
    unseen = {name for name in modules if name not in called_modules}
    # An operation reads the weights of these directly.
    assert all(name.rpartition(".")[2] in READ_BY_OPERATIONS for name in unseen), unseen


READ_BY_OPERATIONS = ("gate_proj", "down_proj", "beta_proj", "decay_proj", "gate_down_proj", "gate_up_proj", "conv")
#: Uses that work for every kind of model.
WAYS: dict[str, Callable[[Called], None]] = {
    "torch.jit.trace": _trace,
    "dynamic quantisation": lambda called: _quantise(called, torch.qint8),
    "weights in half precision": lambda called: _quantise(called, torch.float16),
    "hooks": _hooks,
    "copy.deepcopy": lambda called: _assert_same(copy.deepcopy(called), called),
    "pickle": lambda called: _assert_same(pickle.loads(pickle.dumps(called)), called),
    "EMA": _moving_average,
    "AveragedModel": _averaged_model,
    "torch.func": _transforms,
    "second derivatives": _second_derivatives,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_works(kind: str, way: str) -> None:
    WAYS[way](KINDS[kind]())


def _modules(called: Called) -> list[nn.Module]:
    """The model, the parent module of its layers, and a layer."""
    parts = [x for x in called.model.modules() if any(isinstance(y, nn.ModuleList) for y in x.children())]
    layers = [next(iter(x.children())) for x in called.modules() if isinstance(x, nn.ModuleList)]
    return [called.model, *parts, *layers]


@pytest.mark.parametrize("kind", KINDS)
def test_torch_script_is_refused(kind: str) -> None:
    """Refused for the model and for its parts."""
    for module in _modules(KINDS[kind]()):
        with pytest.raises(ValueError, match=r"torch.jit.script; allowed: .*torch.jit.trace.*export_step$"):
            torch.jit.script(module)


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind: str) -> None:
    """Decision models can be exported; models that branch on padding name an alternative in their error."""
    called = KINDS[kind]()
    if kind == "decisions":
        _assert_same(torch.export.export(called, called.given, strict=False).module(), called)
    elif NEWER_THAN_2_6:
        with pytest.raises(ValueError, match=r"torch.export; allowed: .*torch.jit.trace.*export_step$"):
            torch.export.export(called, called.given, strict=False)
