"""fla's kernels behind running sums and the delta rule: when they are used, what they get, and if they fail.

Recurrences, written out, stand in the place of its kernels, on a CPU. They are compared with fla's own reference
functions where the package is installed, and its kernels for decoding run in Triton's interpreter.
"""

import importlib
import importlib.metadata
import math
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from common.kernels import FLA_KERNELS
from common.ops import gated_delta_attention, linear_attention, retention_attention
from common.ops.shared.gpu import dispatch, first_use, fla, launch
from tests.common.contract.mechanisms import (
    DEFAULTS,
    PLAIN,
    both,
    cases,
    cast,
    leaves,
    run_in_parts,
    tensors,
    tolerance_of,
)
from tests.common.inputs import padding, qkv
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import NEWER_THAN_2_6

VARIABLE = "LINEARTIME_TRITON"
TOKENS = 21


def recurrence(q, k, v, gate, beta, scale, initial):
    """Outputs (B, n, H, e) and the last sum of tokens (B, n, H, c), one after the other, in float32."""
    dtype = v.dtype
    q, k, v, gate = (x.double() if x.dtype == torch.float64 else x.float() for x in (q, k, v, gate))
    total = k.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[3]) if initial is None else initial
    out = []
    for i in range(q.shape[1]):
        total = total * gate[:, i].exp().reshape(*total.shape[:2], -1, 1)
        new = v[:, i]
        if beta is not None:
            new = (new - torch.einsum("bhc,bhce->bhe", k[:, i], total)) * beta[:, i, :, None]
        total = total + k[:, i, :, :, None] * new[:, :, None]
        out.append(scale * torch.einsum("bhc,bhce->bhe", q[:, i], total))
    return torch.stack(out, 1).to(dtype), total


class Opaque(torch.autograd.Function):
    """``recurrence`` with a backward pass that has no derivative, as that of kernels."""

    @staticmethod
    def forward(ctx, scale, *tensors):
        ctx.scale = scale
        ctx.save_for_backward(*tensors)
        return recurrence(*tensors[:5], scale, tensors[5])

    @staticmethod
    def backward(ctx, *grads):
        inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = recurrence(*inputs[:5], ctx.scale, inputs[5])
        found = iter(torch.autograd.grad(outputs, [x for x in inputs if x is not None], grads, allow_unused=True))
        return (None, *(None if x is None else next(found) for x in inputs))


def stand_in(name, calls, change):
    """A function with the signature of fla's NAME that records its calls."""

    def attend(q, k, v, *, scale, initial_state, output_final_state, g=None, beta=None):
        assert output_final_state and all(x.is_contiguous() for x in (q, k, v))
        assert g is None or g.dtype == torch.float32
        assert name != "chunk_simple_gla" or (
            q.shape[3] % 2 == 0 and v.shape[3] % 2 == 0
        )  # it refuses others in bfloat16
        calls.append((name, q.dtype))
        gate = torch.zeros_like(q[..., 0], dtype=torch.float32) if g is None else g
        out, last = Opaque.apply(scale, q, k, v, gate, beta, initial_state)
        return change(out), last

    return attend


@pytest.fixture
def kernels(monkeypatch):
    """Put recurrences in the place of fla's kernels, as if there were a GPU; returns the calls."""
    monkeypatch.setattr(launch, "interpreted", lambda: True)
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "failed", {"flow_attention", "mixed_chunk_attention"})  # these would run
    monkeypatch.setattr(dispatch, "right", right := set())
    monkeypatch.setattr(first_use, "right", right)
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")
    monkeypatch.setenv(VARIABLE, "1")
    calls = []

    def replace(change=lambda out: out):
        found = {name: stand_in(name, calls, change) for name in fla.FUNCTIONS}
        monkeypatch.setattr(fla, "functions", lambda: found)
        return calls

    return replace


@pytest.fixture
def tf32():
    """As after ``torch.set_float32_matmul_precision("high")``."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def goes_through_fla(case):
    declared = {name for names in FLA_KERNELS.values() for name in names}
    return case.name in declared or (f"{case.name} with gates" in declared and case.forget != "none")


# --- one result ------------------------------------------------------------------------------------------------------


@cases(DEFAULTS, causal=True)
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_causal_mechanism_agrees_with_its_reference(dtype, side, case, kernels, tf32):
    """Outputs and gradients. bfloat16 reaches the kernels as it is, float16 in float32, whose range its sums need."""
    calls = kernels()
    module, exact = case.build(dtype), case.build(dtype).double()
    inputs, mask = tensors(module, TOKENS, dtype=dtype), padding(side, 2, TOKENS)
    # In bfloat16 features are rounded, as in fla's own layers.
    doubled, tolerance = cast(inputs, torch.float64), (1 + (dtype == torch.bfloat16)) * tolerance_of(module, dtype)
    out, expected = module(**inputs, **both(mask)), exact(**doubled, **both(mask))
    assert bool(calls) == goes_through_fla(case)
    assert {dtype for _, dtype in calls} <= {torch.bfloat16 if dtype == torch.bfloat16 else torch.float32}
    assert_close("out", out, expected, tolerance)
    wanted = gradients(expected, leaves(doubled, exact).values())
    assert_all_close(leaves(inputs, module), gradients(out, leaves(inputs, module).values()), wanted, tolerance)


@cases([case for case in DEFAULTS if goes_through_fla(case)], causal=True)
def test_a_sequence_in_parts(case, kernels, tf32):
    """States go in and out, and one more token does not go through fla."""
    calls = kernels()
    module = case.build(torch.float32)
    inputs, mask = tensors(module, TOKENS, dtype=torch.float32), padding("left", 2, TOKENS)
    out, states = run_in_parts(module, inputs, [9, 1, 8, 3], mask)
    assert {name for name, _ in calls} and all(x.dtype != torch.bfloat16 for x in states[-1].values())
    before = len(calls)
    run_in_parts(module, inputs, [1, 1])
    assert len(calls) == before or case.name == "lolcats"  # which reads its window again
    exact = case.build(torch.float32).double()
    doubled = cast(inputs, torch.float64)
    expected, others = run_in_parts(exact, doubled, [TOKENS], mask)
    assert_close("out", out, expected)
    wanted = gradients(expected, leaves(doubled, exact).values())
    assert_all_close(leaves(inputs, module), gradients(out, leaves(inputs, module).values()), wanted)
    for name, x in states[-1].items():
        assert_close(name, x, others[-1][name], 1e-5)


def test_packed_documents(kernels):
    """Each is a row of a call."""
    calls, inputs = kernels(), qkv(12, dtype=torch.bfloat16)
    ids = torch.tensor([[0] * 7 + [1] * 5, [3] * 2 + [4] * 10])
    out = linear_attention(*inputs, causal=True, segment_ids=ids)
    assert calls
    assert_close("out", out, linear_attention(*(x.double() for x in inputs), causal=True, segment_ids=ids))


def test_gates_that_are_the_same_for_all_tokens(kernels):
    """One of each head, as in retention, or of each row as well, without memory of their own."""
    calls, (q, k, v) = kernels(), qkv(9, dtype=torch.bfloat16)
    doubled, of_rows = [x.double() for x in (q, k, v)], torch.tensor([[-0.1, -1.0], [-2.0, -0.5]])
    for attend in (
        lambda *x: retention_attention(*x),
        lambda *x: linear_attention(*x, causal=True, log_decay=of_rows.unsqueeze(2).expand(2, 2, 9)),
    ):
        out = attend(q, k, v)
        assert calls.pop()
        assert_close("out", out, attend(*doubled))


# --- when they are used ----------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """A tensor that may change what operations do."""


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_what_fla_is_not_for_goes_through_plain_pytorch(kernels):
    calls = kernels()

    def attend(q, k, v):
        return linear_attention(q, k, v, causal=True)

    q, k, v = (x.detach() for x in qkv(9, dtype=torch.bfloat16))
    attend(q.double(), k.double(), v.double())
    attend(q.float(), k.float(), v.float())  # exact, since TF32 is not allowed
    attend(q.to("meta"), k.to("meta"), v.to("meta"))
    attend(q.as_subclass(Subclass), k, v)
    attend(q[:, :, :1], k[:, :, :1], v[:, :, :1])
    attend(q[:0], k[:0], v[:0])
    torch.jit.trace(lambda q: attend(q, k, v), q, check_trace=False)(q)
    torch.func.vmap(lambda q: attend(q, k, v))(q[None])
    torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))
    torch.export.export(_Module(attend), (q, k, v))
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(q, q), k, v)
    assert not calls
    attend(q, k, v)
    assert calls


class _Module(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.forward = attend


@pytest.mark.parametrize("given, used", [("0", 0), ("1", 1), ("", 2)])
def test_the_variable_turns_them_off_or_on_without_a_check(given, used, kernels, monkeypatch):
    calls = kernels()
    monkeypatch.setenv(VARIABLE, given)
    linear_attention(*qkv(9, dtype=torch.bfloat16), causal=True)
    assert len(calls) == used


def test_gradients_of_gradients_are_right(kernels, tf32):
    """fla's backward passes have no derivative."""
    kernels()
    q, k, v = qkv(9, dtype=torch.float32)
    beta = torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(0))

    def second(attend, *inputs):
        first = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)]

    for attend in (
        lambda *x: linear_attention(*x, causal=True),
        lambda *x: gated_delta_attention(*x, beta=beta.to(x[0])),
    ):
        doubled = [x.detach().double().requires_grad_() for x in (q, k, v)]
        for found, expected in zip(second(attend, q, k, v), second(attend, *doubled)):
            assert_close("gradient", found, expected, 1e-4)
        out = attend(q, k, v)
        both_signs = torch.stack([out, -out]).detach()
        batched = torch.autograd.grad(out, (q, k, v), both_signs, is_grads_batched=True, retain_graph=True)
        for x, y in zip(batched, torch.autograd.grad(out, (q, k, v), out.detach())):
            assert_close("in a batch", x, torch.stack([y, -y]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpoints(use_reentrant, kernels):
    calls, inputs = kernels(), qkv(9, dtype=torch.bfloat16)
    checkpoint(lambda *x: linear_attention(*x, causal=True), *inputs, use_reentrant=use_reentrant).sum().backward()
    found = [x.grad for x in inputs]
    expected = torch.autograd.grad(linear_attention(*inputs, causal=True).sum(), inputs)
    assert all(map(torch.equal, found, expected)) and len(calls) == 3


@pytest.mark.skipif(not NEWER_THAN_2_6, reason="torch 2.6 compiles plain PyTorch")
@pytest.mark.parametrize(
    "dtype, precision, used",
    [(torch.bfloat16, "highest", True), (torch.float32, "high", True), (torch.float32, "highest", False)],
    ids=str,
)
def test_compiled_graphs_call_them_as_one_operator(dtype, precision, used, kernels, tf32):
    torch.set_float32_matmul_precision(precision)
    calls, inputs = kernels(), qkv(9, dtype=dtype)
    torch._dynamo.reset()
    expected = linear_attention(*inputs, causal=True)
    compiled = torch.compile(lambda *x: linear_attention(*x, causal=True), backend="aot_eager", fullgraph=True)
    before = len(calls)
    out = compiled(*inputs)
    assert (len(calls) > before) == used
    assert_close("out", out, expected)
    for x, y in zip(gradients(out, inputs), gradients(expected, inputs)):
        assert_close("gradient", x, y)
    with torch.no_grad():
        assert_close("without gradients", compiled(*inputs), expected)


@pytest.mark.skipif(not NEWER_THAN_2_6, reason="torch 2.6 compiles plain PyTorch")
@cases(case for case in PLAIN if case.causal and case.name in ("gla", "gated_delta", "kimi_delta"))
def test_compiled_modules(case, kernels):
    """One for each of fla's functions, with norm and gate."""
    calls, module = kernels(), case.build(torch.bfloat16)
    torch._dynamo.reset()
    inputs = tensors(module, TOKENS, dtype=torch.bfloat16)
    expected = module(**inputs)
    before, named = len(calls), leaves(inputs, module)
    out = torch.compile(module, backend="aot_eager", fullgraph=True)(**inputs)
    assert len(calls) > before
    assert_close("out", out, expected)
    assert_all_close(named, gradients(out, named.values()), gradients(expected, named.values()))


# --- failures --------------------------------------------------------------------------------------------------------


def fail(out):
    raise AssertionError("even K")


@pytest.mark.parametrize(
    "change, checks, what",
    [
        (fail, False, "AssertionError: even K"),
        (fail, True, "AssertionError: even K"),
        (lambda out: out.roll(1, 1), True, "KernelsDiffer"),
        (lambda out: out * math.nan, True, "KernelsDiffer"),
    ],
    ids=["fails", "fails in the check", "shifted", "nan"],
)
def test_kernels_that_fail_or_are_wrong_are_used_no_more_for_that_size(change, checks, what, kernels, monkeypatch):
    if checks:
        monkeypatch.delenv(VARIABLE)
    calls, inputs = kernels(change), qkv(9, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=f"chunk_simple_gla of fla for 6 channels.*{what}") as seen:
        outputs = [linear_attention(*inputs, causal=True) for _ in range(3)]
    assert len(seen) == len(calls) == 1
    for out in outputs:
        assert_close("out", out, linear_attention(*(x.double() for x in inputs), causal=True))


@pytest.fixture
def forgotten(kernels, monkeypatch):
    """fla is looked up again in the test and after it."""
    looked_up = fla.functions
    kernels()
    monkeypatch.setattr(fla, "functions", looked_up)
    fla.forget()
    yield
    fla.forget()


@pytest.mark.parametrize("version, problem", [("0.5.1", "has version 0.5.1"), ("0.6.0", "ImportError|ModuleNotFound")])
def test_another_version_and_a_failing_import_are_one_warning(version, problem, forgotten, monkeypatch):
    package = types.ModuleType("fla")
    package.__spec__ = importlib.machinery.ModuleSpec("fla", None)
    monkeypatch.setitem(sys.modules, "fla", package)
    monkeypatch.setitem(sys.modules, "fla.ops", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    inputs = qkv(9, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=problem) as seen:
        outputs = [linear_attention(*inputs, causal=True) for _ in range(3)]
    assert len(seen) == 1 and f"{VARIABLE}=0" in str(seen[0].message)
    for out in outputs:
        assert_close("out", out, linear_attention(*(x.double() for x in inputs), causal=True))


def test_without_fla_nothing_is_said(forgotten, monkeypatch, recwarn):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    linear_attention(*qkv(9, dtype=torch.bfloat16), causal=True)
    assert not recwarn.list


# --- fla itself ------------------------------------------------------------------------------------------------------


def random_tokens(by_channel, tokens=77):
    """q, k, v, g, beta and a first sum, in fla's layout."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k = (torch.nn.functional.normalize(normal(2, tokens, 2, 16), dim=-1) for _ in range(2))
    g = -0.1 * normal(2, tokens, 2, *([16] if by_channel else [])).abs()
    return q, k, normal(2, tokens, 2, 24), g, normal(2, tokens, 2).sigmoid(), normal(2, 2, 16, 24)


@pytest.mark.parametrize(
    "name, module, by_channel, with_beta",
    [
        ("naive_recurrent_simple_gla", "simple_gla", False, False),
        ("naive_recurrent_gla", "gla", True, False),
        ("naive_recurrent_gated_delta_rule", "gated_delta_rule", False, True),
        ("naive_recurrent_kda", "kda", True, True),
    ],
)
def test_the_recurrences_are_flas_reference_functions(name, module, by_channel, with_beta):
    """From their files, since importing a module of ``fla.ops`` imports all of it, in many seconds."""
    path = Path(pytest.importorskip("fla").__file__).parent / "ops" / module / "naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{module}", path)
    spec.loader.exec_module(reference := importlib.util.module_from_spec(spec))
    q, k, v, g, beta, initial = random_tokens(by_channel)
    gates = {"gk" if module == "gla" else "g": g, **({"beta": beta} if with_beta else {})}
    scale = {} if module == "gla" else {"scale": 0.25}  # gla's is always 1 / √16
    out, last = getattr(reference, name)(q, k, v, **gates, **scale, initial_state=initial, output_final_state=True)
    expected, total = recurrence(q, k, v, g, beta if with_beta else None, 0.25, initial)
    assert_close("out", out, expected)
    assert_close("last", last, total)
