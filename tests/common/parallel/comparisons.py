"""Comparisons of several processes with one, and processes that fail; each process runs these functions."""

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from common.attention import build_attention
from common.modules import GatedAttentionUnit
from common.ops.shared.cpu.dispatch import VARIABLE
from common.parallel import ContextGroup, context_parallel, own_part, part_length
from tests.common.contract.mechanisms import CASES, DEFAULTS, at, both, is_linear, leaves, tensors
from tests.compare import assert_all_close, assert_close

#: Sequence length: no multiple of a chunk, a window or the number of processes.
TOKENS = 37


def causal_cases():
    """Every causal mechanism with a state of constant size, and some with wrappers."""
    return [case for case in DEFAULTS if case.causal and is_linear(case.build())]


def masks() -> dict[str, Tensor | None]:
    """Padding (2, TOKENS): none, on both sides and in between, and enough to cover whole parts."""
    sparse, dense = (torch.zeros(2, TOKENS, dtype=torch.bool) for _ in range(2))
    sparse[0, :7], sparse[0, 20:23], sparse[1, 31:] = True, True, True
    dense[0, :25], dense[1, 6:] = True, True
    return {"no": None, "some": sparse, "much": dense}


def every_mechanism(rank: int) -> None:
    """Compare outputs and gradients of each mechanism in groups of two and of four."""
    four, mesh = ContextGroup(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    two = ContextGroup(mesh["context"])
    for i, case in enumerate(causal_cases()):
        for group, name in ((four, "much"), ((two, "some"), (four, "no"))[i % 2]):
            module, mask, label = case.build(), masks()[name], f"{case}, {group.size} processes, {name} padding"
            inputs = tensors(module, TOKENS)
            expected = module(**inputs, **both(mask))
            out = _part(module, group, inputs, mask)
            _compare(label, group, out, expected, mask, leaves(inputs, module))


def _part(module: nn.Module, group: ContextGroup, inputs: dict[str, Any], mask: Tensor | None) -> Tensor:
    length = part_length(TOKENS, group.size)
    padding = torch.zeros(len(inputs["v"]), TOKENS, dtype=torch.bool) if mask is None else mask
    padding = own_part(padding, group.rank, length, True)
    padded = {name: _padded(x, length * group.size, 1 if name == "x" else 2) for name, x in inputs.items()}
    own = at(padded, slice(group.rank * length, (group.rank + 1) * length))
    with context_parallel(module, group, (~padding).sum(1)):
        return module(**own, **both(padding))


def _padded(x: Any, length: int, dim: int) -> Any:
    if not isinstance(x, Tensor):
        return x
    return torch.cat([x, x.new_full([length - n if i == dim else n for i, n in enumerate(x.shape)], 3.0)], dim)


def _compare(
    label: str, group: ContextGroup, out: Tensor, expected: Tensor, mask: Tensor | None, leaves: dict[str, Tensor]
) -> None:
    """Compare this process's part of the output, and the sums of the gradients over all processes."""
    length, generator = out.shape[-2], torch.Generator().manual_seed(0)
    weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    if mask is not None:
        weights = weights.masked_fill(mask.view(len(mask), *[1] * (expected.dim() - 3), -1, 1), 0.0)
    parts = [own_part(x, group.rank, length, 0.0, x.dim() - 2) for x in (expected, weights)]
    real = parts[1] != 0.0
    assert_close(label, torch.where(real, out, 0.0), torch.where(real, parts[0], 0.0), floor=1e-3)
    whole = torch.autograd.grad((expected * weights).sum(), leaves.values(), allow_unused=True, materialize_grads=True)
    (out * parts[1]).sum().backward()
    own = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
    for x in own:
        dist.all_reduce(x, group=group.group)
    assert_all_close([f"{name}, {label}" for name in leaves], own, whole)


def training_under_data_parallelism(rank: int) -> None:
    """Layers in torch's data parallelism, each with activation checkpointing, which runs it twice."""
    group = ContextGroup()
    torch.manual_seed(1)
    units = (GatedAttentionUnit(12, query_dim=6, causal=True, chunk_size=5) for _ in range(2))
    model = Checkpointed(Attending(), *units, Attending()).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, TOKENS, 12, dtype=torch.float64)
    weights, mask = torch.randn_like(x), torch.zeros(3, TOKENS, dtype=torch.bool)
    mask[0, :9], mask[2, 11:] = True, True
    (model(x, mask) * weights).sum().backward()
    expected = [x.grad for x in model.parameters()]
    model.zero_grad(set_to_none=True)
    length = part_length(TOKENS, group.size)
    x, weights = (own_part(y, rank, length, 0.0) for y in (x, weights))
    mask = own_part(mask, rank, length, True)
    parallel = DistributedDataParallel(model)
    with context_parallel(parallel, group, (~mask).sum(1)):
        (parallel(x, mask) * weights).sum().backward()
    sums = [x.grad * group.size for x in model.parameters()]  # it averages gradients
    assert_all_close([name for name, _ in model.named_parameters()], sums, expected)


class Checkpointed(nn.Sequential):
    """Modules in sequence, with both kinds of torch's activation checkpointing in training."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x (B, n, D), mask (B, n)."""
        for i, module in enumerate(self):
            x = checkpoint(module, x, mask, use_reentrant=i == 1)
        return x


class Attending(nn.Module):
    """A layer whose last operation is its attention."""

    def __init__(self, name: str = "linear", **options: Any) -> None:
        super().__init__()
        shape = {"num_heads": 3, "head_dim": 4, "max_tokens": TOKENS}
        self.proj, self.attention = nn.Linear(12, 12), build_attention(name, True, **shape, **options)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, n, 12), mask (B, n)."""
        q = self.proj(x).unflatten(2, (3, 4)).transpose(1, 2)
        return self.attention(q, q, q, mask, mask, **self.attention.inputs(x=x)).transpose(1, 2).flatten(2)


def gradients_of_gradients_are_refused(rank: int) -> None:
    """Each process refuses at once, whether sums are gathered or a state is passed along."""
    group = ContextGroup()
    for case in causal_cases():
        if case.name in ("linear", "gla"):
            inputs = tensors(module := case.build(), TOKENS)
            out = _part(module, group, inputs, None)
            with pytest.raises(ValueError, match="create_graph is True.*allowed"):
                torch.autograd.grad(out.sum(), inputs["v"], create_graph=True)


def many_rows(rank: int) -> None:
    """More rows and heads than are sent in turn, so that groups of them have two sizes."""
    group, module = ContextGroup(), build_attention("local", causal=True, window=5).double()
    inputs = tensors(module, TOKENS, batch=7)
    _compare("many rows", group, _part(module, group, inputs, None), module(**inputs), None, leaves(inputs, module))


def compiled_window(rank: int) -> None:
    """Under torch.compile, processes send the state that others expect, even if the window is not full."""
    module, group = build_attention("local", True, window=64).double(), ContextGroup()
    torch.manual_seed(0)
    x = torch.randn(2, 2, 24, 4, dtype=torch.float64)
    part = slice(8 * rank, 8 * rank + 8)
    with context_parallel(nn.ModuleList([module]), group, torch.tensor([8, 8])):
        out = torch.compile(module, backend="aot_eager")(*[x[:, :, part]] * 3)
    assert_close("out", out, module(x, x, x)[:, :, part])


def flow_of_one_row(rank: int) -> None:
    """Flow-Attention with each of its options and fewer heads than processes."""
    group, mask = ContextGroup(), masks()["much"][:1]
    for case in (case for case in CASES if case.name == "flow" and case.causal and case.forget == "none"):
        inputs = tensors(module := case.build(), TOKENS, batch=1)
        expected, out = module(**inputs, **both(mask)), _part(module, group, inputs, mask)
        _compare(f"{case}", group, out, expected, mask, inputs)


def gated_attention_units(rank: int) -> None:
    """Parts that begin at a chunk boundary, with and without padding, and parts that begin anywhere."""
    group = ContextGroup()
    for options, padding in (
        ({"chunk_size": 5}, 0),
        ({"chunk_size": 4}, 9),
        ({"chunk_size": 5, "local": False}, 30),
        ({"chunk_size": 7}, -6),
        ({"chunk_size": 4, "forget": "channel"}, 9),
    ):
        torch.manual_seed(1)
        unit, chunk_size = GatedAttentionUnit(12, query_dim=6, heads=2, causal=True, **options), options["chunk_size"]
        unit.double()
        for parameter in unit.parameters():
            nn.init.normal_(parameter, std=0.3)
        x, mask = torch.randn(2, TOKENS, 12, dtype=torch.float64, requires_grad=True), torch.zeros(2, TOKENS).bool()
        mask[1, slice(TOKENS - padding, None) if padding > 0 else slice(0, -padding)] = True
        expected, length = unit(x, mask), part_length(TOKENS, group.size, chunk_size)
        own = [_padded(y, length * group.size, 1).narrow(1, rank * length, length) for y in (x, mask)]
        with context_parallel(unit, group, (~own[1]).sum(1)) as context:
            assert context.starts_at_multiples(chunk_size) == (padding >= 0)
            out = unit(*own)
        _compare(f"{options}", group, out, expected, mask, leaves({"x": x}, unit))


def random_draws(rank: int) -> None:
    """Directions that training draws in each pass equal those of one process, pass after pass."""
    group = ContextGroup()
    for name, options in (("rfa", {}), ("favor", {"redraw": 1})):
        passes = []
        for parallel in (False, True):
            torch.manual_seed(1)
            attention = build_attention(name, causal=True, num_heads=2, head_dim=4, features=8, **options).double()
            inputs = tensors(attention, TOKENS)
            torch.manual_seed(2)
            passes.append([_part(attention, group, inputs, None) if parallel else attention(**inputs) for _ in "ab"])
        for expected, part in zip(*passes):
            real = own_part(expected, rank, part.shape[2], 0.0, 2)
            assert_close(name, part[:, :, : TOKENS - rank * part.shape[2]], real[:, :, : TOKENS - rank * part.shape[2]])
        assert not torch.allclose(*passes[0])


def counted_bytes(rank: int) -> None:
    """The bytes that a training step sends do not grow with the tokens."""
    group, sent = ContextGroup(), []
    attention = build_attention("flow", causal=True)
    for tokens in (8, 800):
        q = torch.randn(2, 3, tokens, 16, requires_grad=True)
        group.bytes_sent = group.messages_sent = 0
        with context_parallel(attention, group, torch.full((2,), tokens)):
            attention(q, q, q).sum().backward()
        sent.append((group.bytes_sent, group.messages_sent))
    assert sent[0] == sent[1] and sent[0][0] > 0
    # Each head sends d e + 4 d + 2 numbers, forward or back, and each row its count, forward and to all.
    numbers = 2 * 3 * (16 * 16 + 4 * 16 + 2) * 4
    ways = (rank < group.size - 1) + (rank > 0)
    assert numbers * ways <= sent[0][0] <= 1.1 * numbers * ways + 100


def of_three(rank: int) -> None:
    """Run what three processes do one after another: only the start takes long."""
    for comparison in (
        *(training_under_data_parallelism, gated_attention_units, compiled_window, flow_of_one_row),
        *(many_rows, gradients_of_gradients_are_refused, random_draws, counted_bytes),
    ):
        print(comparison.__name__, flush=True)
        comparison(rank)


#: Rank that fails, out of three.
FAILING = 1
#: Timeout in seconds of the other processes, and how long the failing one sleeps.
TIMEOUT, SLEEP = 3, 6


def one_fails(rank: int, how: str) -> None:
    """Train without end; in the second step, one process is killed, raises an error, or sleeps."""
    os.environ[VARIABLE] = "0"  # each process would load kernels for a second
    group = ContextGroup(dist.new_group([0, 1, 2], timeout=timedelta(seconds=TIMEOUT if how == "sleeps" else 100)))
    attention = build_attention("flow", causal=True)
    q = torch.randn(1, 2, 50, 8, requires_grad=True)
    everyone = ContextGroup(together="train together")
    for step in range(1000):
        with context_parallel(attention, group, torch.tensor([50])):
            if rank == FAILING and step == 1 and how != "is killed after its step":
                _fail(how)
            attention(q, q, q).sum().backward()
        if rank == FAILING and step == 1:
            _fail(how)
        everyone.meet(q.device)


def _fail(how: str) -> None:
    if how.startswith("is killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise KeyError("a mistake of its own")
    time.sleep(SLEEP)
