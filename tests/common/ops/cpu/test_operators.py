"""Kernels for CPUs behind public functions: where they are used, and that nothing around a call shows that they are."""

import math
import re
import warnings

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

from tests.common.inputs import new_memory_is_nan
from tests.common.ops.cpu.kernels import (
    OPERATORS,
    ROWS,
    VARIABLE,
    Operators,
    attend,
    draw,
    everything,
    numbers,
    results,
    total,
)
from tests.compare import assert_all_close, assert_close
from tests.processes import CHECKOUT, run_program
from tests.torch_versions import NEWER_THAN_2_6

pytest.importorskip("numba")

names = pytest.mark.parametrize("name", ROWS)
operators = pytest.mark.parametrize("operator", OPERATORS)
needs_operators_in_graphs = pytest.mark.skipif(
    not NEWER_THAN_2_6, reason="torch 2.6 cannot tell torch.compile from torch.export, and compiles plain PyTorch"
)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have turned kernels off."""
    monkeypatch.delenv(VARIABLE, raising=False)


def plainly(function, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "0")
        return function(*arguments)


# --- where they are used ---------------------------------------------------------------------------------------------


@operators
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_both_passes_are_kernels_unless_the_variable_says_no(dtype, operator, monkeypatch):
    tensors = draw(OPERATORS[operator], 9, dtype=dtype)
    for value, used in (("0", set()), ("1", {operator, f"{operator}_backward"}), ("", {operator})):
        monkeypatch.setenv(VARIABLE, value)
        with Operators() as seen:
            found = everything(OPERATORS[operator], tensors)
        assert used <= set(seen.calls) and (used or not seen.calls)
        assert all(x.dtype == dtype for x in (found[0], *found[-len(tensors) :]))


@pytest.mark.parametrize("value", ["yes", "2", "off"])
def test_another_value_of_the_variable_is_refused(value, monkeypatch):
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ValueError, match=f"{VARIABLE} is {value!r}.*allowed"):
        attend("flow", draw("flow", 9))


class Subclass(torch.Tensor):
    """A tensor that may change what operations do."""


def test_what_is_no_ordinary_tensor_goes_through_plain_pytorch():
    """Other devices, fake tensors, subclasses, no numbers, and views whose memory holds the opposite numbers."""
    tensors = {x: y.detach() for x, y in draw("flow", 9).items()}
    x = torch.randn(1, 2, 9, 1, dtype=torch.complex128).conj().imag
    expected = attend("flow", dict.fromkeys("qkv", x.clone()))
    with Operators() as seen:
        attend("flow", {name: y.to("meta") for name, y in tensors.items()})
        attend("flow", {**tensors, "q": tensors["q"].as_subclass(Subclass)})
        attend("flow", {name: y[:0] for name, y in tensors.items()})
        assert_close("opposite numbers", attend("flow", dict.fromkeys("qkv", x)), expected)
    assert x.is_neg() and not seen.calls
    with FakeTensorMode() as mode:
        attend("flow", {name: mode.from_tensor(y) for name, y in tensors.items()})
    with FakeTensorMode(allow_non_fake_inputs=True):
        attend("flow", tensors)


#: Each case in a child of a process that has not imported Numba: with a package in its place, and with the variable.
NUMBA = """
import os, sys, tempfile, warnings
import torch
from common.ops import linear_attention
assert "numba" not in sys.modules
x = torch.rand(1, 2, 9, 4)
def attend():
    return linear_attention(x, x, x, causal=True)
os.environ["LINEARTIME_CPU_KERNELS"] = "0"
expected = attend()
for statement, value in ((None, "1"), ("raise ImportError('needs another NumPy')", ""),
                         ("raise OSError('libllvmlite.so is missing')", ""), ("import numpy; numpy.no_such_name", ""),
                         ("raise ImportError", "0")):
    child = os.fork()
    if child == 0:
        os.environ["LINEARTIME_CPU_KERNELS"] = value
        if statement is None:
            sys.modules["numba"] = None
        else:
            folder = tempfile.mkdtemp()
            os.mkdir(folder + "/numba")
            with open(folder + "/numba/__init__.py", "w") as file:
                file.write(statement)
            sys.path.insert(0, folder)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            outputs = [attend() for _ in range(3)]
        assert all(torch.equal(out, expected) for out in outputs)
        print(len(seen), *(w.message for w in seen), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def test_without_a_numba_that_can_be_imported_there_is_plain_pytorch():
    """One warning if it is there and broken, however it breaks; none if it is not there, or not wanted."""
    absent, *broken, unwanted = run_program(["-c", NUMBA], cwd=str(CHECKOUT)).splitlines()
    assert absent == unwanted == "0" and len(broken) == 3
    assert all(line.startswith("1 Numba cannot be imported") and f"{VARIABLE}=0" in line for line in broken)


# --- results that do not depend on what is around a call ------------------------------------------------------------


@names
def test_autocast_in_either_pass_changes_no_bit_nor_does_the_mode_of_gradients(name):
    tensors = draw(name, 20, dtype=torch.float32)
    expected = everything(name, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        out = results(name, tensors)
    grads = torch.autograd.grad(total(out), list(tensors.values()))
    assert all(map(torch.equal, [*out.values(), *grads], expected))
    out = results(name, tensors)
    loss, through_torch = total(out), tensors.keys() & {"x", "directions"}  # torch's own backward passes are rounded
    with torch.autocast("cpu", torch.bfloat16, enabled=not through_torch):
        grads = torch.autograd.grad(loss, list(tensors.values()), retain_graph=True)
        again = torch.autograd.grad(loss, list(tensors.values()), create_graph=True)
    assert all(map(torch.equal, grads, expected[len(out) :]))
    assert_all_close(tensors, again, expected[len(out) :])
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert all(map(torch.equal, results(name, tensors).values(), expected))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.causal])
def test_a_step_without_gradients_is_that_of_plain_pytorch(name):
    """Kernels of their own compute one token; the state that they get does not change."""
    tensors, token = draw(name, 9), draw(name, 1, seed=1)
    token = {x: token[x] if x in ("q", "k", "v", "x", "beta", "log_decay") else tensors[x] for x in tensors}
    _, state = attend(name, tensors, return_state=True)
    state = {entry: x.detach() for entry, x in state.items()}
    before = {entry: x.clone() for entry, x in state.items()}
    turned = {
        entry: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x for entry, x in state.items()
    }
    expected, after = plainly(lambda: attend(name, token, initial_state=state, return_state=True))
    for given in (state, turned):
        with torch.inference_mode():
            out, new = attend(name, token, initial_state=given, return_state=True)
        found, wanted = ([x.double() for x in numbers(name, sums).values()] for sums in (new, after))
        assert_all_close(["out", *numbers(name, new)], [out, *found], [expected, *wanted])
    assert all(torch.equal(state[entry], x) for entry, x in before.items())


LAYOUTS = {
    "a host's": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels apart": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "amidst NaN": lambda x: torch.stack([x, torch.full_like(x, math.nan)], dim=-1).flatten(-2)[..., ::2],
    "batch last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@names
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_of_inputs_of_gradients_and_of_saved_tensors(layout, name):
    """Hooks give saved tensors back in a layout that no input has."""
    tensors, found = draw(name, 9), []
    strided = {x: LAYOUTS[layout](y.detach()).requires_grad_() for x, y in tensors.items() if y.dim() > 2}

    def turned(x: Tensor) -> Tensor:
        order = tuple(reversed(range(x.dim())))
        return x.detach().permute(order).contiguous().permute(order)

    for given, change, pack in ((tensors, lambda x: x, lambda x: x), ({**tensors, **strided}, LAYOUTS[layout], turned)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = results(name, given)
        loss = total({x: change(y) if y.dim() > 2 else y for x, y in out.items()})
        found.append([*out.values(), *torch.autograd.grad(loss, list(given.values()))])
    assert_all_close(range(len(found[0])), found[1], found[0])


@names
def test_one_number_in_the_place_of_many(name):
    """Views with a stride of 0 in each dimension, and gradients with one, as those of a sum."""
    tensors = draw(name, 6)
    for dimension in range(4):
        small = {x: y.detach().narrow(min(dimension, y.dim() - 1), 0, 1).requires_grad_() for x, y in tensors.items()}

        def grads(small=small):
            full = {x: y.expand(tensors[x].shape) for x, y in small.items()}
            return torch.autograd.grad(sum(x.sum() for x in results(name, full).values()), list(small.values()))

        assert_all_close(small, grads(), plainly(grads))


@names
def test_gradients_of_any_one_input_and_through_any_one_result(name):
    tensors = draw(name, 9)
    fixed = {x: y.detach() for x, y in tensors.items()}
    wanted = everything(name, tensors)[-len(tensors) :]
    for (x, y), expected in zip(tensors.items(), wanted):
        (found,) = torch.autograd.grad(total(results(name, {**fixed, x: y})), [y])
        assert_close(f"gradient of {x} alone", found, expected)
    for entry in results(name, tensors):

        def through(entry=entry):
            options = {"allow_unused": True, "materialize_grads": True}
            loss = total({entry: results(name, tensors)[entry]}) + 0 * tensors["q"].sum()
            return torch.autograd.grad(loss, list(tensors.values()), **options)

        assert_all_close(tensors, through(), plainly(through))


def test_no_index_of_a_kernel_is_outside_its_array():
    """Of every kernel, as plain Python with a check of each index and vector, in a process of its own."""
    called = run_program(["-m", "tests.common.ops.cpu.interpreted"], cwd=str(CHECKOUT)).split()
    kernels = {
        f"{path.parts[-3]}.cpu.{path.stem}.{name}"
        for path in (CHECKOUT / "common" / "ops").glob("*/cpu/*kernels.py")
        for name in re.findall(r"^@kernel\ndef (\w+)", path.read_text(), flags=re.MULTILINE)
    }
    assert set(called) == kernels and len(kernels) > 10


@names
def test_what_was_in_new_memory_does_not_matter(name):
    for n, d, e in ((1, 7, 5), (3, 16, 17), (66, 3, 1)):
        tensors = draw(name, n, d, e)
        clean = everything(name, tensors)
        with new_memory_is_nan():
            poisoned = everything(name, tensors)
        assert all(map(torch.equal, poisoned, clean))


# --- transforms -----------------------------------------------------------------------------------------------------


@names
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_a_tangent_of_any_input_reaches_the_results(name):
    """Forward mode: PyTorch would take the tangents of an operator as 0."""
    tensors = {x: y.detach() for x, y in draw(name, 6, batch=1).items()}
    for which, x in tensors.items():

        def sums(y, which=which):
            return torch.cat([z.flatten() for z in results(name, {**tensors, which: y}).values()])

        tangent = torch.rand_like(x)
        expected = (sums(x + 1e-6 * tangent) - sums(x - 1e-6 * tangent)) / 2e-6
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(sums(forward_ad.make_dual(x, tangent)))
        assert_close(f"tangent of {which}", dual.tangent, expected, 1e-5)
        assert_close("torch.func", torch.func.jvp(sums, (x,), (tangent,))[1], expected, 1e-5)


@operators
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_function_transforms_batches_of_gradients_and_traces_see_plain_pytorch(operator):
    name = OPERATORS[operator]
    tensors = draw(name, 9)
    fixed = {x: y.detach() for x, y in tensors.items()}
    q = fixed["q"]

    def first(q):
        return attend(name, {**fixed, "q": q})

    expected = first(q)
    with Operators() as seen:
        assert_close("vmap", torch.func.vmap(first, randomness="error")(torch.stack([q, q]))[1], expected)
        torch.func.grad(lambda q: first(q).square().sum())(q)
        traced = torch.jit.trace(first, q, check_trace=False)
    assert not seen.calls and "lineartime" not in str(traced.graph)
    out = attend(name, tensors)
    grads, leaves = torch.randn(3, *out.shape, dtype=out.dtype), list(tensors.values())
    batched = torch.autograd.grad(out, leaves, grads, is_grads_batched=True, retain_graph=True)
    for i, grad in enumerate(grads):
        wanted = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        assert_all_close(tensors, [x[i] for x in batched], wanted)


@operators
def test_second_derivatives_where_one_tensor_is_all_three(operator):
    """Each use of the tensor contributes once."""
    name = OPERATORS[operator]
    tensors = draw(name, 9, 4, 4)
    x = tensors["q"]

    def second():
        first = attend(name, {**tensors, "q": x, "k": x, "v": x}).square().sum()
        (grad,) = torch.autograd.grad(first, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    assert_close("second derivative", second(), plainly(second))


@needs_operators_in_graphs
@operators
def test_torch_compile_calls_kernels_in_both_passes_for_any_length(operator):
    """What AOT Autograd makes of an operator, ``test_pytorch_accepts_the_operator`` shows in less time."""
    torch._dynamo.reset()
    name, code = OPERATORS[operator], []

    def backend(graph, inputs):
        code.append(graph.code)
        return graph

    compiled = torch.compile(lambda tensors: attend(name, tensors), backend=backend, fullgraph=True, dynamic=True)
    for n in (17, 30):
        tensors = draw(name, n, dtype=torch.float32)
        with torch.compiler.set_stance("fail_on_recompile" if n != 17 else "default"):
            out = compiled(tensors)
        with Operators() as seen:
            grads = torch.autograd.grad(out.sum(), list(tensors.values()))
        assert f"{operator}_backward" in seen.calls
        expected = attend(name, tensors)
        assert_close("out", out, expected)
        assert_all_close(tensors, grads, torch.autograd.grad(expected.sum(), list(tensors.values())))
    assert code and all(f"lineartime.{operator}" in x for x in code)


@needs_operators_in_graphs
def test_inductor_chooses_its_own_strides():
    torch._dynamo.reset()
    name = "sums with a gate for each feature"
    tensors = draw(name, 20, dtype=torch.float32)

    def everywhere(tensors):
        changed = {x: tensors[x].transpose(-1, -2).sigmoid().transpose(-1, -2) for x in "qkv"}
        return torch.cat([x.flatten() for x in results(name, {**tensors, **changed}).values()])

    out, expected = torch.compile(everywhere, fullgraph=True)(tensors), everywhere(tensors)
    assert_close("out", out, expected)
    grads, wanted = (torch.autograd.grad(x.square().sum(), list(tensors.values())) for x in (out, expected))
    assert_all_close(tensors, grads, wanted)


@needs_operators_in_graphs
def test_compiled_functions_have_tangents_and_compiled_autograd_sees_backward_passes():
    torch._dynamo.reset()
    q, k, v = (x.detach() for x in draw("flow", 9).values())

    def flow(q, k, v):
        return attend("flow", {"q": q, "k": k, "v": v})

    expected = torch.func.jvp(flow, (q, k, v), (k, q, v))[1]
    compiled = torch.compile(flow, backend="aot_eager")
    for _ in range(2):  # before anything is compiled, and after
        assert_close("torch.func", torch.func.jvp(compiled, (q, k, v), (k, q, v))[1], expected)
        compiled(q, k, v)
    tensors = draw("flow", 9)
    wanted = torch.autograd.grad(attend("flow", tensors).sum(), list(tensors.values()))
    loss = attend("flow", tensors).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.backward()
    assert_all_close(tensors, [x.grad for x in tensors.values()], wanted)


@operators
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_pytorch_accepts_the_operator(operator):
    """Its schema, its results without memory, its gradients, and all that under tracing with changing sizes."""
    tensors = draw(OPERATORS[operator], 5)
    with Operators() as seen:
        attend(OPERATORS[operator], tensors)
    arguments = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in seen.calls[operator]]
    torch.library.opcheck(getattr(torch.ops.lineartime, operator).default, tuple(arguments))


def test_an_operator_that_is_called_by_itself_refuses_a_tangent():
    with Operators() as seen:
        attend("flow both ways", draw("flow both ways", 5))
    q, *others = (x.detach() if isinstance(x, Tensor) else x for x in seen.calls["full_flow"])
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="full_flow"), warnings.catch_warnings():
        torch.ops.lineartime.full_flow(forward_ad.make_dual(q, q), *others)
