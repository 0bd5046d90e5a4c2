"""Compiling, tracing, quantising, averaging and differentiating every kind of model, and the memory of a step.

Each works, or raises a ValueError of one line that names an alternative.
"""

import copy
import pickle
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema import EMA
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.ao.quantization import quantize_dynamic
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel

from recipes.bench import models as bench_models
from recipes.runs import peak_bytes
from tests.common.properties import Elements, LargestTensor
from tests.compare import assert_all_close, assert_close, gradients
from tests.fairseq_plugin.helpers.kinds import build, ending_of, kind_of, shown
from tests.fairseq_plugin.helpers.text import padded, tokens
from tests.torch_versions import NEWER_THAN_2_6

#: Every kind of model, with fairseq's layers, gated attention units, gates, and projections that operations read.
MODELS = """
flow --lineartime-cross-attention linear
hybrid --lineartime-layers flow,linear
linear_lm --linear-forget channel --linear-short-conv 3
flash_lm
gated_delta_lm
gla_lm
performer_lm
flow_mlm
flash_mlm
flow_classifier
flow_time_series
flash_time_series
flow_decision
""".strip().splitlines()
COARSE = 0.2  # dynamic quantisation to 8 bits, largest for random weights


class Called(nn.Module):
    """A model that is called with tensors only."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.arch, *arguments = words.split()
        self.model = shown(self.arch, *arguments).float()
        batch = kind_of(self.arch).rows(2, 12)
        self.names = tuple(batch)
        self.given = tuple(x.float() if x.is_floating_point() else x for x in batch.values())

    def forward(self, *tensors: Tensor) -> Tensor:
        kind = kind_of(self.arch)  # which cannot be pickled
        head = {"classification_head_name": "toy"} if self.arch.endswith("_classifier") else kind.head
        return kind.out(self.model(**dict(zip(self.names, tensors)), **head))


def same(other: Callable[..., Tensor], called: Called, tolerance: float | None = None) -> None:
    with torch.no_grad():
        assert_close("outputs", other(*called.given), called(*called.given), tolerance)


def loss(called: Called, parameters: dict[str, Tensor]) -> Tensor:
    return functional_call(called, parameters, called.given).square().mean()


def average(called: Called) -> None:
    ema = EMA(called, EMAConfig(store_ema=True, ema_decay=0.9))
    ema.step(called, updates=1)
    same(ema.get_model(), called)
    other = AveragedModel(called, use_buffers=True)
    other.update_parameters(called)
    same(other, called)


def transforms(called: Called) -> None:
    """``grad`` and ``jvp`` with parameters as arguments; several models at once by ``vmap``."""
    parameters = {name: x.detach() for name, x in called.named_parameters()}
    actual = torch.func.grad(lambda p: loss(called, p))(parameters)
    options = {"allow_unused": True, "materialize_grads": True}
    leaves = dict(called.named_parameters())
    expected = torch.autograd.grad(loss(called, leaves), list(leaves.values()), **options)
    assert_all_close(actual, actual.values(), expected, 1e-4)
    ones = {name: torch.ones_like(x) for name, x in parameters.items()}
    _, along = torch.func.jvp(lambda p: loss(called, p), (parameters,), (ones,))
    assert_close("jvp", along, sum(x.sum() for x in expected), 1e-3)
    stacked = {name: torch.stack([x, x]) for name, x in parameters.items()}
    outs = torch.func.vmap(lambda p: functional_call(called, p, called.given), randomness="different")(stacked)
    same(lambda *_: outs[1], called, 1e-4)


def second_derivatives(called: Called) -> None:
    """Hessian along the gradient, against finite differences; fairseq's gelu computes in float32."""
    called.double()
    called.given = tuple(x.double() if x.is_floating_point() else x for x in called.given)
    parameters = {name: x.detach() for name, x in called.named_parameters()}
    gradient = torch.func.grad(lambda p: loss(called, p))
    along = gradient(parameters)
    leaves = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss(called, leaves), list(leaves.values()), create_graph=True, **options)
    product = sum((x * along[name]).sum() for name, x in zip(leaves, first))
    found = torch.autograd.grad(product, list(leaves.values()), **options)
    step = 1e-5 / sum(x.square().sum() for x in along.values()).sqrt()
    above, below = (gradient({n: x + s * step * along[n] for n, x in parameters.items()}) for s in (1, -1))
    expected = [(above[name] - below[name]) / (2 * step) for name in parameters]
    assert_close("Hessian", *(torch.cat([x.flatten() for x in y]) for y in (found, expected)), 5e-3)


READ_BY_OPERATIONS = ("gate_proj", "down_proj", "beta_proj", "decay_proj", "gate_down_proj", "gate_up_proj", "conv")


def hooks(called: Called) -> None:
    """Of every module with parameters of its own, but those whose weights an operation reads."""
    seen: set[str] = set()
    modules = {name: x for name, x in called.named_modules() if any(True for _ in x.parameters(recurse=False))}
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: seen.add(name))
    called(*called.given).square().mean().backward()
    unseen = {name.rpartition(".")[2] for name in modules if name not in seen}
    assert unseen <= set(READ_BY_OPERATIONS), unseen


def refused_script(called: Called) -> None:
    stacks = [x for x in called.model.modules() if any(isinstance(y, nn.ModuleList) for y in x.children())]
    for module in (called.model, *stacks):
        with pytest.raises(ValueError, match=r"torch.jit.script; allowed: .*torch.jit.trace.*export_step$"):
            torch.jit.script(module)


def export(called: Called) -> None:
    if "actions" in called.names:
        same(torch.export.export(called, called.given, strict=False).module(), called)
    elif NEWER_THAN_2_6:
        with pytest.raises(ValueError, match=r"torch.export; allowed: .*torch.jit.trace.*export_step$"):
            torch.export.export(called, called.given, strict=False)


WAYS: dict[str, Callable[[Called], None]] = {
    "trace": lambda called: same(torch.jit.trace(called, called.given, check_trace=False), called),
    "quantisation": lambda called: same(quantize_dynamic(called, {nn.Linear}, dtype=torch.qint8), called, COARSE),
    "deepcopy": lambda called: same(copy.deepcopy(called), called),
    "pickle": lambda called: same(pickle.loads(pickle.dumps(called)), called),
    "averages": average,
    "torch.func": transforms,
    "second derivatives": second_derivatives,
    "hooks": hooks,
    "script": refused_script,
    "export": export,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("words", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_what_works_and_what_is_refused(way: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")  # they take seconds to compile, and transforms do not use them
    WAYS[way](Called(words))


#: fairseq's layer, other norms and positions, gated attention units, parameters that limit the length; and how many
#: graphs more than fairseq's own model has: of reading a limit, or of the final norm.
COMPILED = {"flowformer_lm": 0, "transformer_pp_lm": 0, "flash_lm": 0, "daft_full_lm": 1, "flash_mlm": 1}


@cache
def graphs(arch: str, lengths: tuple[int, ...]) -> tuple[int, int]:
    """The graph breaks and the graphs of a compiled model that reads these lengths, as the model that is not does."""
    masked = ending_of(arch) == "_mlm"
    side, longest = ("encoder", "--max-positions") if masked else ("decoder", "--tokens-per-sample")
    torch._dynamo.reset()
    counters.clear()
    model = shown(arch, f"--{side}-layers", "1", longest, "100").float().train()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for i, length in enumerate(lengths):
        sequence = padded(tokens(2, length - 7, seed=i), 3, 4) if masked else tokens(2, length, seed=i)
        with torch.compiler.set_stance("fail_on_recompile" if i and NEWER_THAN_2_6 else "default"):
            out, expected = compiled(sequence)[0], model(sequence)[0]
        assert_close("logits", out, expected)
        parameters = dict(model.named_parameters())
        assert_all_close(parameters, *(gradients(x, parameters.values()) for x in (out, expected)), 1e-3)
    found = sum(counters["graph_break"].values()), counter.frame_count
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("arch", COMPILED)
def test_compiled_models_serve_any_length(arch: str) -> None:
    """The same outputs and gradients, without a graph break or a new graph that fairseq's model has not."""
    stock, ours = graphs("roberta" if arch.endswith("_mlm") else "transformer_lm", (71,)), graphs(arch, (71, 69, 90))
    if NEWER_THAN_2_6 or not arch.startswith("flash"):  # torch 2.6 breaks the graph in a gated attention unit
        assert ours[0] <= stock[0] and ours[1] <= stock[1] + COMPILED[arch], (ours, stock)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "mc_transformer_pp_lm"])
def test_time_and_memory_of_a_step_are_linear(arch: str) -> None:
    """Twice the tokens create twice the elements, and no tensor is near T x T; tests/common has each mechanism."""
    created = []
    for length in (1024, 2048):
        model = build(arch, "--tokens-per-sample", str(length), "--decoder-attention-heads", "1").train()
        sequence = padded(tokens(1, length - 100), 0, 100)
        with Elements() as counted, LargestTensor() as largest:
            model(sequence)[0].sum().backward()
        created.append(counted.total)
    assert created[1] <= 2.1 * created[0] and largest.numel <= 2048 * 2048 // 8


@pytest.mark.parametrize(
    ("arch", "peer", "bound"), [("flash_lm", "transformer_pp_lm", 1.0), ("flowformer_lm", "softmax_lm", 1.02)]
)
def test_a_step_needs_no_more_memory_than_softmax_attention_does(arch: str, peer: str, bound: float) -> None:
    """Equal sizes of the linear layers; Flow-Attention keeps its flows, a few numbers per token and head."""

    def peak(name: str) -> int:
        model, sequence = bench_models.language_model(name, 256, 2, 1024).train(), bench_models.tokens(1024)

        def step() -> list[Tensor]:
            model(sequence)[0].float().logsumexp(-1).mean().backward()
            model.zero_grad()
            return []

        step()  # positions are computed once
        return peak_bytes(step)

    assert peak(arch) <= bound * peak(peer)
