"""Gradients are the same whoever stores the saved tensors: activation checkpointing, hooks, FSDP.

Each of them returns a saved tensor only once, moves it elsewhere, or gathers the parameters again first.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from common.ops.shared.cpu.dispatch import VARIABLE
from tests.common.contract.mechanisms import DEFAULTS, PLAIN, Case, at, both, cases, leaves, tensors
from tests.common.inputs import padding
from tests.compare import assert_all_close, gradients
from tests.torch_versions import needs_fsdp_on_cpu


class Layer(nn.Module):
    """A mechanism whose input tensors are multiplied by a parameter, which FSDP shards with the mechanism's own."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.factor, self.attention = (
            nn.Parameter(torch.tensor([0.75], dtype=torch.float64)),
            case.build(max_tokens=260),
        )

    def forward(self, **inputs) -> Tensor:
        """Multiply the floating-point tensors by the factor, then attend."""
        scaled = {
            x: y * self.factor if isinstance(y, Tensor) and y.is_floating_point() else y for x, y in inputs.items()
        }
        return self.attention(**scaled).clone()  # FSDP warns of a view


def _checkpointed(use_reentrant: bool) -> Callable:
    def call(layer: Layer, inputs: dict) -> Tensor:
        names = [name for name, x in inputs.items() if isinstance(x, Tensor)]

        def positional(*given: Tensor) -> Tensor:
            return layer(**{**inputs, **dict(zip(names, given))})

        return checkpoint(positional, *(inputs[name] for name in names), use_reentrant=use_reentrant)

    return call


def _on_cpu(layer: Layer, inputs: dict) -> Tensor:
    with save_on_cpu():
        return layer(**inputs)


def _copied(layer: Layer, inputs: dict) -> Tensor:
    with saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        return layer(**inputs)


def _sharded(layer: Layer, inputs: dict) -> Tensor:
    """FSDP2 around a layer with activation checkpointing, as in torchtitan."""
    return fully_shard(checkpoint_wrapper(layer), mesh=init_device_mesh("cpu", (1,)))(**inputs)


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of only this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_as_ever(call: Callable, case: Case, n: int, side: str) -> None:
    results = []
    for compute in (call, lambda layer, inputs: layer(**inputs)):
        layer = Layer(case)
        inputs = {**tensors(layer.attention, n), **both(padding(side, 2, n))}
        out = compute(layer, inputs)
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
        wanted = {name: x for name, x in leaves(inputs, layer).items() if x.requires_grad}  # only FSDP still holds them
        results.append(
            [out, *(torch.zeros_like(whole(x)) if x.grad is None else whole(x.grad) for x in wanted.values())]
        )
    assert_all_close(["out", *wanted], *results)


KEEPERS = [
    *(_checkpointed(True), _checkpointed(False), _on_cpu, _copied),
    pytest.param(_sharded, marks=needs_fsdp_on_cpu),
]
keepers = pytest.mark.parametrize("call", KEEPERS, ids=["reentrant", "non-reentrant", "on CPU", "copied", "FSDP"])


@keepers
@cases(DEFAULTS)
def test_gradients(case, call):
    assert_as_ever(call, case, 13, "left")


@pytest.mark.parametrize("call", [_checkpointed(False), _copied], ids=["non-reentrant", "copied"])
@cases(case for case in PLAIN if not case.kind.linear_cost)
def test_more_tokens_than_a_block_that_is_computed_again(case, call):
    assert_as_ever(call, case._replace(options={}), 260, "none")


#: Options with which each pass in training draws random numbers of its own.
DRAWS = {"rfa": {}, "favor": {"redraw": 1}, "daft_conv": {"gumbel_temperature": 0.5}}
drawing = [case._replace(options={**case.options, **DRAWS.get(case.name, {})}) for case in PLAIN]


def attend(module: nn.Module, inputs: dict, v: Tensor) -> Tensor:
    return module(**{**inputs, "v": v})


@cases(case for case in drawing if case.name in DRAWS or not case.causal)
def test_a_pass_that_is_repeated_draws_the_same(case):
    """Activation checkpointing of a pass in training, with dropout of sources; afterwards, counts are the same."""
    results, modules = [], []
    for recompute in (False, True):
        module = case.build().train()
        inputs = {**tensors(module, 9), "dropout_p": 0.4}
        torch.default_generator.manual_seed(3)
        arguments = module, inputs, inputs["v"]
        out = checkpoint(attend, *arguments, use_reentrant=False) if recompute else attend(*arguments)
        torch.default_generator.manual_seed(4)
        results.append([out, *gradients(out, leaves(inputs, module).values())])
        modules.append(module)
    assert_all_close(["out", *leaves(inputs, modules[0])], *results)
    assert getattr(modules[0], "passes", 0) == getattr(modules[1], "passes", 0)


@cases(DEFAULTS, causal=True)
def test_an_output_and_a_state_may_be_changed_in_place_before_the_backward_pass(case, monkeypatch):
    """Gradients stay, or torch refuses what they are computed from, with kernels for CPUs as without."""
    refused = []
    for kernels in "10":
        monkeypatch.setenv(VARIABLE, kernels)
        expected = gradients_after_change(case, "nothing")
        for changed in ("output", "state"):
            try:
                found = gradients_after_change(case, changed)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                refused.append((kernels, changed))
            else:
                assert all(x is y is None or torch.equal(x, y) for x, y in zip(found, expected)), (kernels, changed)
    if case.build().state_tokens() == 0:  # other states hold tokens
        assert ("1", "state") not in refused and ("0", "state") not in refused
    with_kernels, plainly = ({changed for kernels, changed in refused if kernels == x} for x in "10")
    if case.name == "flow" and case.forget == "none":
        plainly |= {"output"}  # its backward pass by kernels reads it
    assert with_kernels == plainly


def gradients_after_change(case: Case, changed: str) -> tuple[Tensor | None, ...]:
    module = case.build(torch.float32)
    inputs = tensors(module, 9, dtype=torch.float32)
    _, state = module.extend(**at(inputs, slice(0, 5)))
    out, state = module.extend(**at(inputs, slice(5, 9)), state=state)
    loss = (out * torch.linspace(1, 2, out.numel()).view(out.shape)).sum()
    with torch.no_grad():
        for x in {"nothing": [], "output": [out], "state": state.values()}[changed]:
            x.zero_()
    return torch.autograd.grad(loss, list(leaves(inputs, module).values()), allow_unused=True)
