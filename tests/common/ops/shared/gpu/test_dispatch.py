"""When kernels are used, the environment variable, and the handling of failing kernels; needs no GPU."""

import math
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from common.ops import flow_attention, mixed_chunk_attention
from common.ops.flow.causal import attention_in_chunks
from common.ops.flow.gpu import causal
from common.ops.mixed_chunk.gpu import sequence
from common.ops.mixed_chunk.sequence import MixedChunkOptions, Tokens
from common.ops.shared.gpu import dispatch, first_use
from tests.common.inputs import mixed_chunk_inputs, qkv
from tests.compare import assert_close

ROOT = Path(__file__).parents[5]


@pytest.fixture
def on_cpu_too(monkeypatch):
    """Pretend that Triton is installed with its interpreter on, so that kernels can be replaced.

    The variable itself is not set: if torch imported Triton meanwhile, the process would interpret from then on.
    """
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.setenv(dispatch.VARIABLE, "1")
    monkeypatch.setattr(dispatch, "failed", set())
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)


def missing(*args, **kwargs):
    raise RuntimeError("there is no kernel")


@pytest.fixture
def kernel(on_cpu_too, monkeypatch):
    """Replace the kernels of causal Flow-Attention by a function; until then they fail."""

    def replace(function):
        monkeypatch.setattr(causal, "causal_attention", function)

    replace(missing)
    return replace


def chunks_apply(q, v, kernel="relu2", **options):
    return sequence.applies(Tokens(q, q, q, q, v), MixedChunkOptions(4, kernel=kernel, **options))


def float32(n=9):
    return qkv(n, dtype=torch.float32)


# --- the environment variable --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["yes", "2", "off"])
def test_another_value_of_the_variable_is_refused(given, monkeypatch):
    monkeypatch.setenv("LINEARTIME_TRITON", given)
    message = rf"LINEARTIME_TRITON is '{given}'; allowed: '0' \(off\), '1' \(on, without a check\), or none"
    with pytest.raises(ValueError, match=message):
        flow_attention(*float32(), causal=True)
    with pytest.raises(ValueError, match=message):
        mixed_chunk_attention(*mixed_chunk_inputs(9, dtype=torch.float32), chunk_size=4)


@pytest.mark.parametrize("given, on", [("0", False), ("1", True), ("", True), (None, True)])
def test_the_variable_turns_kernels_off(given, on, on_cpu_too, monkeypatch):
    monkeypatch.delenv("LINEARTIME_TRITON")
    if given is not None:
        monkeypatch.setenv("LINEARTIME_TRITON", given)
    assert causal.applies(*float32()) is on
    assert chunks_apply(*float32()[1:]) is on


# --- what they are for ---------------------------------------------------------------------------------------------


def test_widths_and_options(on_cpu_too):
    for d in (128, 129):
        q, k, v = qkv(3, d=d, e=200, dtype=torch.float32)
        assert causal.applies(q, k, v) is (d == 128)
        assert chunks_apply(q, v, "laplace") is (d == 128)
    assert not chunks_apply(q[..., :4], v, "softmax")
    assert not chunks_apply(q[..., :4], v, first_softmax=True)


def test_other_devices_subclasses_and_mixed_devices_have_none(on_cpu_too):
    class Subclass(torch.Tensor):
        pass

    q, k, v = float32()
    meta = q.to("meta")
    assert causal.applies(torch.nn.Parameter(q), k, v)
    assert not causal.applies(q.as_subclass(Subclass), k, v)
    assert not causal.applies(meta, meta, meta)
    assert not causal.applies(q, k, meta)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_transforms_and_graphs_have_none(kernel):
    """torch.func transforms, forward-mode gradients and tracing need to see through the PyTorch form."""
    q, k, v = (x.detach() for x in float32())
    expected = flow_attention(q.double(), k.double(), v.double(), causal=True).float()

    def attend(q):
        return flow_attention(q, k, v, causal=True)

    assert_close("trace", torch.jit.trace(attend, q, check_trace=False)(q), expected)
    assert_close("vmap", torch.func.vmap(attend)(q[None])[0], expected)
    assert_close("jvp", torch.func.jvp(attend, (q,), (q,))[0], expected)
    with forward_ad.dual_level():
        assert_close("dual", forward_ad.unpack_dual(attend(forward_ad.make_dual(q, q))).primal, expected)
    with pytest.warns(UserWarning, match="kernels of flow_attention failed"):  # there are none, but they were requested
        assert_close("eager", attend(q), expected)


def test_on_a_cpu_torch_compile_sees_plain_pytorch(monkeypatch):
    """With kernels, it would see operators, which ``kernels/test_operators.py`` tests."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")
    seen = []

    def backend(graph, example):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    q, k, v = float32()
    out = torch.compile(flow_attention, backend=backend, fullgraph=True)(q, k, v, causal=True)
    assert_close("out", out, flow_attention(q.double(), k.double(), v.double(), causal=True).float())
    assert seen and not [name for name in seen if "lineartime" in name]


# --- Triton --------------------------------------------------------------------------------------------------------

WITHOUT = """
import importlib, pkgutil, sys
import common
sys.modules["common.huggingface"] = None  # it imports transformers, which may import Triton
for module in pkgutil.walk_packages(common.__path__, "common."):
    if not module.name.endswith(("huggingface", ".kernels", "_kernels", ".tiles")):  # the latter run on the device
        importlib.import_module(module.name)
import torch
from common.ops import flow_attention, mixed_chunk_attention
x = torch.randn(1, 2, 9, 4, requires_grad=True)
flow_attention(x, x, x, causal=True).sum().backward()
mixed_chunk_attention(x, x, x, x, x, chunk_size=4, causal=True).sum().backward()
print([name for name in sys.modules if name.partition(".")[0] == "triton"])
"""


def test_triton_is_never_imported_on_a_machine_without_a_gpu(monkeypatch):
    for name in ("TRITON_INTERPRET", dispatch.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.fixture
def forgotten_triton():
    """Triton is looked up again in the test and after it."""
    dispatch.has_triton.cache_clear()
    yield
    dispatch.has_triton.cache_clear()


@pytest.mark.parametrize(
    "module, problem",
    [
        (None, r"Triton cannot be imported \(.*\)"),
        (types.SimpleNamespace(__version__="3.1.0"), r"Triton 3\.1\.0 is too old"),
    ],
)
def test_without_a_triton_there_is_one_warning_and_the_pytorch_form(module, problem, forgotten_triton, monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", module)
    inputs = float32()
    with pytest.warns(UserWarning, match=problem) as seen:
        outputs = [flow_attention(*inputs, causal=True) for _ in range(3)]
    assert len(seen) == 1 and "LINEARTIME_TRITON=0" in str(seen[0].message)
    monkeypatch.setattr(dispatch, "interpreted", lambda: False)
    for out in outputs:
        assert_close("out", out, flow_attention(*inputs, causal=True))


# --- failures ------------------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_gives_way_once_and_for_all(kernel, monkeypatch):
    calls = []

    def broken(*args):
        calls.append(args)
        raise RuntimeError("out of resource: shared memory")

    kernel(broken)
    inputs = float32()
    message = r"kernels of flow_attention failed \(RuntimeError: out of resource: shared memory\).*LINEARTIME_TRITON=0"
    with pytest.warns(UserWarning, match=message) as seen:
        outputs = [flow_attention(*inputs, causal=True) for _ in range(3)]
    assert len(seen) == len(calls) == 1
    assert chunks_apply(*inputs[1:])  # other kernels may work
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    for out in outputs:
        assert_close("out", out, flow_attention(*inputs, causal=True))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("memory"), ValueError("value"), KeyboardInterrupt()])
def test_what_is_no_failure_of_a_kernel_is_raised(error, kernel):
    def broken(*args):
        raise error

    kernel(broken)
    with pytest.raises(type(error)):
        flow_attention(*float32(), causal=True)
    assert causal.applies(*float32())


# --- the check before the first use --------------------------------------------------------------------------------


@pytest.fixture
def checked(kernel, monkeypatch):
    """Replaceable kernels of causal Flow-Attention that are checked, and that count their calls."""
    monkeypatch.delenv(dispatch.VARIABLE)
    monkeypatch.setattr(dispatch, "right", right := set())
    monkeypatch.setattr(first_use, "right", right)
    calls = []

    def replace(change=lambda out: out):
        def kernels(inputs):
            calls.append(inputs.q.dtype)
            out, state = attention_in_chunks(inputs)
            return change(out.to(inputs.v.dtype)), state

        kernel(kernels)
        return calls

    return replace


def test_kernels_are_compared_once_for_each_dtype_size_and_option(checked):
    calls = checked()
    inputs = float32()
    for _ in range(2):
        flow_attention(*inputs, causal=True)
    assert len(calls) == 3
    half = [x.bfloat16() for x in inputs]
    for call in (lambda: flow_attention(*half, causal=True), lambda: flow_attention(*inputs, causal=True, phi="relu")):
        before = len(calls)
        call(), call()
        assert len(calls) == before + 3
    wide = qkv(9, d=6, e=7, dtype=torch.float32)
    mask = torch.zeros(wide[0].shape[0], 9, dtype=torch.bool)
    flow_attention(*wide, causal=True)
    flow_attention(*wide, causal=True, key_padding_mask=mask)
    assert len(calls) == 3 * 3 + 2 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change, what",
    [
        (lambda out: 1.1 * out, "output"),
        (lambda out: out.roll(1, 2), "output"),
        (lambda out: out * math.nan, "output"),
        (lambda out: out + 0.1 * (out - out.detach()), "gradient"),
    ],
    ids=["scaled", "shifted", "nan", "gradients"],
)
def test_wrong_kernels_are_never_used(change, what, dtype, checked):
    """There is one warning, and the PyTorch form is used from then on."""
    calls = checked(change)
    inputs = qkv(9, dtype=dtype)
    message = f"flow_attention failed .KernelsDiffer: .*{what}.*LINEARTIME_TRITON=0"
    with pytest.warns(UserWarning, match=message) as seen:
        outputs = [flow_attention(*inputs, causal=True) for _ in range(3)]
    assert len(seen) == len(calls) == 1
    expected = flow_attention(*(x.double() for x in inputs), causal=True)
    for out in outputs:
        assert_close("out", out, expected.to(dtype))


def test_the_variable_turns_them_on_without_a_check(checked, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "1")
    calls = checked()
    flow_attention(*float32(), causal=True)
    assert len(calls) == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_check_shows_nowhere(use_reentrant, checked):
    """The check changes no random numbers, activation checkpointing, or calls under autocast or without gradients."""
    checked()
    random = torch.get_rng_state()
    q, k, v = float32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = checkpoint(lambda *x: flow_attention(*x, causal=True), q, k, v, use_reentrant=use_reentrant)
    out.sum().backward()
    with torch.inference_mode():
        flow_attention(q, k, v, causal=True, phi="relu")
    assert torch.equal(torch.get_rng_state(), random) and q.grad is not None


def test_an_error_of_earlier_work_is_raised_and_not_held_against_the_kernels(checked, monkeypatch):
    """On a GPU, such an error is found when the device is synchronised."""

    def found(device):
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(dispatch, "wait_for", found)
    calls = checked()
    with pytest.raises(RuntimeError, match="device-side assert"):
        flow_attention(*float32(), causal=True)
    assert not calls and not dispatch.failed


def test_while_a_graph_is_captured_only_kernels_that_were_compared_are_used(checked, monkeypatch):
    calls = checked()
    inputs = float32()
    monkeypatch.setattr(dispatch, "is_capturing", lambda device: True)
    flow_attention(*inputs, causal=True)
    assert not calls
    monkeypatch.setattr(dispatch, "is_capturing", lambda device: False)
    flow_attention(*inputs, causal=True)
    monkeypatch.setattr(dispatch, "is_capturing", lambda device: True)
    flow_attention(*inputs, causal=True)
    assert len(calls) == 3
