"""When Triton's kernels are used, the environment variable, and what happens if they fail; needs no GPU.

Functions stand in the place of kernels, on a CPU. The tests of the kernels themselves run in Triton's interpreter.
"""

import math
import os
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
from common.ops.shared.gpu import dispatch, first_use
from tests.common.inputs import qkv
from tests.compare import assert_close
from tests.processes import CHECKOUT, run_program
from tests.torch_versions import NEWER_THAN_2_6

VARIABLE = "LINEARTIME_TRITON"


@pytest.fixture
def kernels(monkeypatch):
    """Put a function of the output in the place of kernels of causal Flow-Attention; returns the dtypes of its calls.

    Triton is as if installed with its interpreter on. The variable itself is not set: if torch imported Triton
    meanwhile, the process would interpret from then on.
    """
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.setattr(dispatch, "has_triton", lambda: True)
    monkeypatch.setattr(dispatch, "failed", set())
    monkeypatch.setattr(dispatch, "right", right := set())
    monkeypatch.setattr(first_use, "right", right)
    monkeypatch.setenv(VARIABLE, "1")
    calls = []

    def replace(change=lambda out: out):
        def attend(inputs):
            calls.append(inputs.q.dtype)
            out, state = attention_in_chunks(inputs)
            return change(out.to(inputs.v.dtype)), state

        monkeypatch.setattr(causal, "causal_attention", attend)
        return calls

    return replace


def float32(n=9, **sizes):
    return qkv(n, dtype=torch.float32, **sizes)


def attend(*inputs, **options):
    return flow_attention(*inputs, causal=True, **options)


def exactly(*inputs):
    return attend(*(x.double() for x in inputs)).to(inputs[2].dtype)


# --- when they are used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["yes", "2", "off"])
def test_another_value_of_the_variable_is_refused(given, monkeypatch):
    monkeypatch.setenv(VARIABLE, given)
    q, k, v = float32()
    for call in (lambda: attend(q, k, v), lambda: mixed_chunk_attention(q, k, q, k, v, chunk_size=4)):
        with pytest.raises(ValueError, match=rf"{VARIABLE} is '{given}'; allowed: '0' \(off\)"):
            call()


@pytest.mark.parametrize("given, used", [("0", 0), ("1", 1), ("", 2), (None, 2)])
def test_the_variable_turns_kernels_off_or_on_without_a_check(given, used, kernels, monkeypatch):
    """The check before the first use calls them once more."""
    calls = kernels()
    monkeypatch.delenv(VARIABLE)
    if given is not None:
        monkeypatch.setenv(VARIABLE, given)
    attend(*float32())
    assert len(calls) == used


class Subclass(torch.Tensor):
    """A tensor that may change what operations do."""


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:FutureWarning")
def test_what_kernels_are_not_for_goes_through_plain_pytorch(kernels):
    """Wide heads, other dtypes and devices, subclasses, and what must see through them: transforms and traces."""
    calls = kernels()
    q, k, v = (x.detach() for x in float32())
    expected = exactly(q, k, v)
    attend(*float32(3, d=129))
    attend(q.double(), k.double(), v.double())
    attend(q.to("meta"), k.to("meta"), v.to("meta"))
    attend(q.as_subclass(Subclass), k, v)
    assert_close("trace", torch.jit.trace(lambda q: attend(q, k, v), q, check_trace=False)(q), expected)
    assert_close("vmap", torch.func.vmap(lambda q: attend(q, k, v))(q[None])[0], expected)
    assert_close("jvp", torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))[0], expected)
    with forward_ad.dual_level():
        assert_close("dual", forward_ad.unpack_dual(attend(forward_ad.make_dual(q, q), k, v)).primal, expected)
    assert not calls
    attend(torch.nn.Parameter(q), k, v)
    attend(*float32(3, d=128, e=200))
    assert len(calls) == 2


#: torch.compile, and every file of ``common`` that does not run on the device.
WITHOUT = """
import importlib, pkgutil, sys
import common
sys.modules["common.huggingface"] = None  # it imports transformers, which may import Triton
for module in pkgutil.walk_packages(common.__path__, "common."):
    if not module.name.endswith(("huggingface", ".kernels", "_kernels", ".tiles")):
        importlib.import_module(module.name)
import torch
from common.ops import flow_attention, linear_attention, mixed_chunk_attention
x = torch.randn(1, 2, 9, 4, requires_grad=True)
linear_attention(x.bfloat16(), x.bfloat16(), x.bfloat16(), causal=True).sum().backward()
flow_attention(x, x, x, causal=True).sum().backward()
mixed_chunk_attention(x, x, x, x, x, chunk_size=4, causal=True).sum().backward()
print([name for name in sys.modules if name.partition(".")[0] in ("triton", "fla")])
"""


def test_triton_and_fla_are_never_imported_on_a_machine_without_a_gpu():
    environment = {"TRITON_INTERPRET": "", VARIABLE: ""}
    assert run_program(["-c", WITHOUT], cwd=str(CHECKOUT), environment=environment).splitlines()[-1] == "[]"


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
def test_without_a_triton_there_is_one_warning_and_plain_pytorch(module, problem, forgotten_triton, monkeypatch):
    monkeypatch.setattr(dispatch, "interpreted", lambda: True)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "triton", module)
    inputs = float32()
    with pytest.warns(UserWarning, match=problem) as seen:
        outputs = [attend(*inputs) for _ in range(3)]
    assert len(seen) == 1 and f"{VARIABLE}=0" in str(seen[0].message)
    for out in outputs:
        assert_close("out", out, exactly(*inputs))


# --- failures and the check before the first use ---------------------------------------------------------------------


def fail(out):
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "change, checks, what",
    [
        (fail, False, "RuntimeError: out of resource"),
        (fail, True, "RuntimeError: out of resource"),
        (lambda out: 1.1 * out, True, "KernelsDiffer: .*output"),
        (lambda out: out.roll(1, 2), True, "KernelsDiffer: .*output"),
        (lambda out: out * math.nan, True, "KernelsDiffer: .*output"),
        (lambda out: out + 0.1 * (out - out.detach()), True, "KernelsDiffer: .*gradient"),
    ],
    ids=["fails", "fails in the check", "scaled", "shifted", "nan", "gradients"],
)
def test_kernels_that_fail_or_are_wrong_are_used_no_more(change, checks, what, dtype, kernels, monkeypatch):
    """There is one warning, and plain PyTorch from then on."""
    calls, inputs = kernels(change), qkv(9, dtype=dtype)
    if checks:
        monkeypatch.delenv(VARIABLE)
    with pytest.warns(UserWarning, match=f"flow_attention failed .{what}.*{VARIABLE}=0") as seen:
        outputs = [attend(*inputs) for _ in range(3)]
    assert len(seen) == len(calls) == 1
    for out in outputs:
        assert_close("out", out, exactly(*inputs))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("memory"), ValueError("value"), KeyboardInterrupt()])
def test_what_is_no_failure_of_a_kernel_is_raised(error, kernels):
    def broken(out):
        raise error

    calls = kernels(broken)
    for _ in range(2):
        with pytest.raises(type(error)):
            attend(*float32())
    assert len(calls) == 2


def test_kernels_are_compared_once_for_each_dtype_size_and_option(kernels, monkeypatch):
    calls = kernels()
    monkeypatch.delenv(VARIABLE)
    inputs, wide = float32(), float32(d=6, e=7)
    half = [x.bfloat16() for x in inputs]
    mask = torch.zeros(2, 9, dtype=torch.bool)
    for given, options in (
        (inputs, {}),
        (half, {}),
        (inputs, {"phi": "relu"}),
        (wide, {}),
        (wide, {"key_padding_mask": mask}),
    ):
        before = len(calls)
        attend(*given, **options)
        first = len(calls) - before
        attend(*given, **options)
        assert first > 1 and len(calls) - before == first + 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_check_shows_nowhere(use_reentrant, kernels, monkeypatch):
    """It changes no random numbers, activation checkpointing, or calls under autocast or without gradients."""
    kernels()
    monkeypatch.delenv(VARIABLE)
    random = torch.get_rng_state()
    q, k, v = float32()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = checkpoint(attend, q, k, v, use_reentrant=use_reentrant)
    out.sum().backward()
    with torch.inference_mode():
        attend(q, k, v, phi="relu")
    assert torch.equal(torch.get_rng_state(), random) and q.grad is not None and not dispatch.failed


def test_checkpointing_may_end_a_pass_that_it_repeats_inside_a_kernel(kernels):
    """Without reentrance it stops with an error of its own as soon as it has all saved tensors; nothing has failed."""
    kernels(lambda out: out.exp())  # saves its output, the last tensor that the backward pass needs
    q, k, v = float32()
    checkpoint(attend, q, k, v, use_reentrant=False).sum().backward()
    found = [x.grad for x in (q, k, v)]
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    assert all(map(torch.equal, found, expected)) and not dispatch.failed


def test_an_error_of_earlier_work_is_raised_and_not_held_against_the_kernels(kernels, monkeypatch):
    """On a GPU, such an error is found when the device is synchronised."""

    def found(device):
        raise RuntimeError("device-side assert")

    calls = kernels()
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(dispatch, "wait_for", found)
    with pytest.raises(RuntimeError, match="device-side assert"):
        attend(*float32())
    assert not calls and not dispatch.failed


def test_while_a_graph_is_captured_only_kernels_that_were_compared_are_used(kernels, monkeypatch):
    calls, inputs, used = kernels(), float32(), []
    monkeypatch.delenv(VARIABLE)
    for capturing in (True, False, True):
        monkeypatch.setattr(dispatch, "is_capturing", lambda device, capturing=capturing: capturing)
        before = len(calls)
        attend(*inputs)
        used.append(len(calls) - before)
    assert used[0] == 0 and used[1] > 1 and used[2] == 1


# --- the kernels -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux alone; there its absence is an error")
def test_kernels_in_the_interpreter():
    """In another process: one interprets all kernels or none, as set when it imported Triton."""
    folder = str(Path(__file__).with_name("kernels"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", folder]
    # Without the check before a kernel's first use, which would run everything twice and has its own test.
    env = {**os.environ, "TRITON_INTERPRET": "1", "LINEARTIME_TRITON": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.strip().splitlines()[-1]
    assert " passed" in summary and ("skipped" not in summary or not NEWER_THAN_2_6), summary
