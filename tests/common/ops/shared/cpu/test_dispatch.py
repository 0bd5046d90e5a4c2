"""Where kernels for CPUs are used, and where plain PyTorch is, with the same result."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from common.attention import build_attention
from common.ops import linear_attention
from common.ops.shared.cpu import dispatch, threads
from common.ops.shared.feature_sums import causal_sums
from tests.common.inputs import qkv
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import NEWER_THAN_2_6

pytest.importorskip("numba")

needs_operators_in_graphs = pytest.mark.skipif(
    not NEWER_THAN_2_6, reason="torch 2.6 cannot tell torch.compile from torch.export, and compiles plain PyTorch"
)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have turned kernels off."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)


class Calls:
    """Counts calls of kernels."""

    def __init__(self) -> None:
        self.count = 0

    def used(self) -> int:
        """Calls since the last question."""
        count, self.count = self.count, 0
        return count


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    counter, run = Calls(), threads.run

    def counted(*arguments) -> None:
        counter.count += 1
        run(*arguments)

    monkeypatch.setattr(threads, "run", counted)
    return counter


@pytest.fixture
def nothing_compiled_before() -> None:
    """Discard the graphs of other tests."""
    torch._dynamo.reset()


def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    return linear_attention(q, k, v, causal=True, **options)


def without_kernels(function: Callable, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "0")
        return function(*arguments)


# --- the environment variable, and Numba -----------------------------------------------------------------------------


def test_the_variable_turns_kernels_off(calls, monkeypatch):
    inputs = qkv(9)
    for value, used in (("0", 0), ("1", 2), ("", 2), (None, 2)):
        monkeypatch.delenv(dispatch.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(dispatch.VARIABLE, value)
        out = attend(*inputs)
        gradients(out, inputs)
        assert calls.used() == used


@pytest.mark.parametrize("value", ["yes", "2", "off"])
def test_another_value_of_the_variable_is_refused(value, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, value)
    with pytest.raises(ValueError, match=f"{dispatch.VARIABLE} is {value!r}"):
        attend(*qkv(9))


@pytest.fixture
def forgotten_numba() -> Iterator[None]:
    """Numba is looked for again in the test and after it."""
    dispatch.has_numba.cache_clear()
    yield
    dispatch.has_numba.cache_clear()


@pytest.fixture
def broken_numba(forgotten_numba, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a package in the place of Numba whose import fails."""

    def replace(statement: str) -> None:
        (tmp_path / "numba").mkdir()
        (tmp_path / "numba" / "__init__.py").write_text(statement)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "numba")

    return replace


def test_without_numba_plain_pytorch_is_used_and_nothing_said(forgotten_numba, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    inputs = qkv(9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = attend(*inputs)
    assert calls.used() == 0
    assert_close("out", out, without_kernels(attend, *inputs), 0.0)


@pytest.mark.parametrize(
    "statement",
    [
        "raise ImportError('Numba needs another NumPy')",
        "raise OSError('libllvmlite.so is missing')",
        "import numpy; numpy.no_such_name",
    ],
)
def test_a_numba_that_cannot_be_imported_is_one_warning_and_plain_pytorch(statement, broken_numba, calls):
    broken_numba(statement)
    inputs = qkv(9)
    with pytest.warns(UserWarning, match="Numba cannot be imported") as seen:
        outputs = [attend(*inputs) for _ in range(3)]
    assert len(seen) == 1 and f"{dispatch.VARIABLE}=0" in str(seen[0].message)
    assert calls.used() == 0
    assert_close("out", outputs[-1], without_kernels(attend, *inputs), 0.0)


def test_a_numba_that_cannot_be_imported_is_not_imported_if_kernels_are_off(broken_numba, monkeypatch):
    broken_numba("raise ImportError")
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*qkv(9))


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_every_dtype_goes_through_kernels(dtype, calls):
    inputs = qkv(20, dtype=dtype)
    out = attend(*inputs)
    actual = gradients(out, inputs)
    assert calls.used() == 2 and out.dtype == dtype and {x.dtype for x in actual} == {dtype}
    double = [x.detach().double().requires_grad_() for x in inputs]
    expected = without_kernels(attend, *double)
    assert_close("out", out, expected)
    assert_all_close("qkv", actual, gradients(expected, double))


def test_under_autocast_they_compute_in_float32(calls):
    inputs = qkv(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*inputs)
    actual = gradients(out, inputs)
    assert calls.used() == 2
    expected = attend(*inputs)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, actual, gradients(expected, inputs)))


class Subclass(torch.Tensor):
    """A tensor that may change what operations do."""


def test_other_devices_subclasses_fake_and_empty_tensors_have_none(calls):
    q, k, v = (x.detach() for x in qkv(9, dtype=torch.float32))
    assert dispatch.applies(torch.nn.Parameter(q), k, v)
    meta = [x.to("meta") for x in (q, k, v)]
    assert attend(*meta).shape == v.shape
    with FakeTensorMode() as mode:
        assert attend(*(mode.from_tensor(x) for x in (q, k, v))).shape == v.shape
    assert not dispatch.applies(q, k, meta[2]) and not dispatch.applies(q, k.double(), v)
    assert type(attend(q.as_subclass(Subclass), k, v)) is Subclass
    for empty in ((q[:0], k[:0], v[:0]), (q[:, :, :0], k[:, :, :0], v[:, :, :0]), (q, k, v[..., :0])):
        assert causal_sums(*empty, 64, None)[0].shape == empty[2].shape
    assert calls.used() == 0


def test_views_whose_memory_holds_the_opposite_numbers_have_none(calls):
    """The imaginary part of a conjugate; with one channel its layout would be that of any other tensor."""
    x = torch.randn(1, 2, 9, 1, dtype=torch.complex128).conj().imag
    expected = attend(*[x.clone()] * 3)
    assert x.is_neg() and calls.used() == 1
    assert_close("out", attend(x, x, x), expected)
    assert calls.used() == 0


def test_inference_mode_gives_the_same_bits(calls):
    inputs = qkv(20, dtype=torch.float32)
    expected = attend(*inputs).detach()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(attend(*inputs), expected)
    assert calls.used() == 3


# --- transforms and modes --------------------------------------------------------------------------------------------


def test_a_fake_mode_with_a_real_input_reads_no_memory(calls):
    """The results are allocated without memory."""
    x = torch.rand(1, 2, 9, 4)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attend(x, x, x).shape == x.shape
    assert calls.used() == 0


def test_make_fx_records_what_is_computed():
    q, k, v = (x.detach() for x in qkv(9))
    graph = make_fx(lambda q, k, v: attend(q, k, v))(q, k, v)
    assert_close("other inputs", graph(k, q, 2 * v), attend(k, q, 2 * v))


def test_vmap_and_gradients_of_torch_func_go_through_plain_pytorch(calls):
    q, k, v = (x.detach() for x in qkv(9))
    expected = without_kernels(attend, q, k, v)
    assert_close("vmap", torch.func.vmap(lambda q: attend(q, k, v))(torch.stack([q, q]))[1], expected)
    leaf = q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(without_kernels(attend, leaf, k, v).square().sum(), leaf)
    assert_close("grad", torch.func.grad(lambda q: attend(q, k, v).square().sum())(q), gradient)
    assert calls.used() == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "sum_kv", "sum_k"])
def test_a_tangent_of_any_input_reaches_the_results(name):
    """Forward mode, by dual numbers and by torch.func: PyTorch would take an operator's tangents as 0."""
    q, k, v = (x.detach() for x in qkv(9))
    tensors = {"q": q, "k": k, "v": v, "log_decay": -torch.rand(q.shape[:3], dtype=q.dtype)}
    tensors |= {"sum_kv": torch.rand(*q.shape[:2], 5, 3, dtype=q.dtype), "sum_k": torch.rand(*q.shape[:2], 5).double()}
    tangent = torch.rand_like(tensors[name])

    def sums(x: Tensor) -> Tensor:
        used = {**tensors, name: x}
        state = {key: used.pop(key) for key in ("sum_kv", "sum_k")}
        values, weights, after = causal_sums(**used, chunk_size=64, state=state)
        return torch.cat([y.flatten() for y in (values, weights, *after.values())])

    step = 1e-6 * tangent
    expected = (sums(tensors[name] + step) - sums(tensors[name] - step)) / 2e-6
    assert_close("torch.func", torch.func.jvp(sums, (tensors[name],), (tangent,))[1], expected, 1e-6)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(sums(forward_ad.make_dual(tensors[name], tangent)))
    assert_close("dual", dual.tangent, expected, 1e-6)


def test_the_operator_itself_refuses_a_tangent():
    x = torch.rand(1, 2, 9, 4)
    causal_sums(x, x, x, 64, None)  # makes the operator
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="causal_sums"):
        dual = forward_ad.make_dual(x, x)
        torch.ops.lineartime.causal_sums(dual, x, x, None, None, None, True, False, 0.0, 0.0, 0)


@pytest.mark.parametrize("gates", [None, (2, 2, 9), (2, 2, 9, 5)], ids=["none", "head", "channel"])
def test_gradients_of_gradients_and_batches_of_gradients(gates, calls):
    inputs = list(qkv(9)) + ([] if gates is None else [-torch.rand(gates).double().requires_grad_()])

    def attend_(q, k, v, log_decay=None):
        return attend(q, k, v, log_decay=log_decay)

    out, expected = attend_(*inputs), without_kernels(attend_, *inputs)
    assert calls.used() == 1
    second = []
    for result in (out, expected):
        first = torch.autograd.grad(result.square().sum(), inputs, create_graph=True)
        second.append(torch.autograd.grad(sum(x.square().sum() for x in first), inputs))
    assert_all_close(range(4)[: len(inputs)], *second)
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    pair = (torch.autograd.grad(attend_(*inputs), inputs, grads, is_grads_batched=True), [])
    for grad in grads:
        pair[1].append(torch.autograd.grad(without_kernels(attend_, *inputs), inputs, grad))
    assert_all_close(range(4)[: len(inputs)], pair[0], map(torch.stack, zip(*pair[1])))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_traced_and_exported_graphs_hold_only_operators_of_pytorch(calls):
    q, k, v = (x.detach() for x in qkv(9, dtype=torch.float32))
    traced = torch.jit.trace(attend, (q, k, v), check_trace=False)
    assert calls.used() == 0 and "lineartime" not in str(traced.graph)
    assert_close("traced", traced(k, q, v), attend(k, q, v))
    module = build_attention("linear", causal=True)
    calls.used()
    exported = torch.export.export(module, (q, k, v))
    assert calls.used() == 0 and "lineartime" not in str(exported.graph)
    assert_close("exported", exported.module()(k, q, v), module(k, q, v))


# --- torch.compile, and PyTorch's check of operators -----------------------------------------------------------------


@needs_operators_in_graphs
def test_torch_compile_calls_kernels_in_both_passes_for_any_length(calls, nothing_compiled_before):
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (64, 100, 130):
        inputs = qkv(n, dtype=torch.float32)
        expected = attend(*inputs)
        expected_gradients = gradients(expected, inputs)
        calls.used()
        with torch.compiler.set_stance("fail_on_recompile" if n != 64 else "default"):
            out = compiled(*inputs)
        actual = gradients(out, inputs)
        assert calls.used() == 2
        assert_close("out", out, expected)
        assert_all_close("qkv", actual, expected_gradients)


@needs_operators_in_graphs
def test_inductor_calls_kernels_with_gates_and_a_state(calls, nothing_compiled_before):
    """Inductor chooses its own strides."""
    q, k, v = qkv(20, dtype=torch.float32)
    log_decay = -torch.rand(2, 2, 20).requires_grad_()
    state = {"sum_kv": torch.rand(2, 2, 5, 3).requires_grad_(), "sum_k": torch.rand(2, 2, 5).requires_grad_()}

    def attend_(q, k, v, log_decay, state):
        k, v = (x.transpose(-1, -2).sigmoid().transpose(-1, -2) for x in (k, v))
        values, weights, after = causal_sums(q, k, v, 64, state, log_decay)
        return torch.cat([x.flatten() for x in (values / (weights + 1), *after.values())])

    inputs = (q, k, v, log_decay, *state.values())
    expected = attend_(q, k, v, log_decay, state)
    calls.used()
    out = torch.compile(attend_, fullgraph=True)(q, k, v, log_decay, state)
    actual = gradients(out, inputs)
    assert calls.used() == 2
    assert_close("out", out, expected)
    assert_all_close(range(6), actual, gradients(expected, inputs))


@needs_operators_in_graphs
def test_a_compiled_function_has_tangents(nothing_compiled_before):
    """Compiled before or in forward mode, and forward mode inside a compiled function."""
    q, k, v = (x.detach() for x in qkv(9))
    expected = torch.func.jvp(attend, (q, k, v), (k, q, v))[1]
    compiled = torch.compile(attend, backend="aot_eager")
    for _ in range(2):
        with forward_ad.dual_level():
            duals = (forward_ad.make_dual(x, y) for x, y in zip((q, k, v), (k, q, v)))
            tangent = forward_ad.unpack_dual(compiled(*duals)).tangent
        assert_close("dual", tangent, expected)
        assert_close("torch.func", torch.func.jvp(compiled, (q, k, v), (k, q, v))[1], expected)
        compiled(q, k, v)
    inside = torch.compile(lambda *x: torch.func.jvp(attend, x, (k, q, v))[1], backend="aot_eager")
    assert_close("inside", inside(q, k, v), expected)


@needs_operators_in_graphs
def test_compiled_autograd_sees_the_operator_of_the_backward_pass(calls, nothing_compiled_before):
    inputs = qkv(9)
    expected = gradients(attend(*inputs), inputs)
    out = attend(*inputs)
    calls.used()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        actual = gradients_by_backward(out, inputs)
    assert calls.used() == 1
    assert_all_close("qkv", actual, expected)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("begun", [False, True], ids=["start", "continued"])
def test_pytorch_accepts_the_operator(begun):
    """Its schema, its results without memory, its gradients, and all that under tracing."""
    q, k, v = qkv(5)
    attend(q, k, v)  # makes the operator
    before = (torch.rand(2, 2, 5, 3).double().requires_grad_(), torch.rand(2, 2, 5).double().requires_grad_())
    gates = -torch.rand(2, 2, 5, 5).double().requires_grad_()
    arguments = (q, k, v, gates, *before) if begun else (q, k, v, None, None, None)
    torch.library.opcheck(torch.ops.lineartime.causal_sums.default, (*arguments, True, True, 1e-3, 0.5, 2))


# --- hooks, checkpoints and copies -----------------------------------------------------------------------------------


def gradients_by_backward(out: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """``tests.compare.gradients``, for what torch.autograd.grad does not support."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    (out * weights).sum().backward()
    return [x.grad for x in inputs]


def test_hooks_of_saved_tensors_may_move_them(calls):
    """The pack hook keeps them elsewhere and in another layout."""
    inputs = qkv(20, dtype=torch.float32)
    expected = gradients(attend(*inputs), inputs)
    calls.used()

    def unpack(kept: tuple[Tensor, tuple[int, ...]]) -> Tensor:
        numbers, shape = kept
        return numbers.reshape(*reversed(shape)).permute(*reversed(range(len(shape)))) if shape else numbers

    def pack(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return x.detach().permute(*reversed(range(x.dim()))).contiguous().clone(), tuple(x.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = attend(*inputs)
    actual = gradients(out, inputs)
    assert calls.used() == 2
    assert_all_close("qkv", actual, expected)
