"""The report ``python -m common.kernels``, its table of mechanisms with kernels for CPUs, and what switches change."""

import sys
from collections import defaultdict

import pytest
import torch

from common import kernels
from common.ops import gated_delta_attention
from common.ops.shared.cpu import dispatch, threads
from tests.common.contract.mechanisms import CASES, Case, at, tensors
from tests.compare import assert_close
from tests.processes import CHECKOUT, run_program

numba = pytest.importorskip("numba")
#: The modules of the kernels in the table.
MODULES = {
    "sums": "common.ops.shared.cpu.sums_kernels",
    "flow": "common.ops.flow.cpu.kernels",
    "all to all": "common.ops.flow.cpu.full_kernels",
    "delta rule": "common.ops.gated_delta.cpu.kernels",
}


@pytest.fixture
def report(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Print the report, without the variables of whoever runs the tests; its lines about a CPU, a GPU and fla."""
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("LINEARTIME_TRITON", raising=False)

    def lines() -> list[str]:
        dispatch.has_numba.cache_clear()
        assert kernels.main([]) == 0
        printed = capsys.readouterr().out
        for table in (kernels.CPU_KERNELS, kernels.GPU_KERNELS, kernels.FLA_KERNELS):
            for name, mechanisms in table.items():
                assert name in printed and all(mechanism in printed for mechanism in mechanisms)
        return [line for line in printed.splitlines() if line.startswith("On a ")]

    yield lines
    dispatch.has_numba.cache_clear()


def test_it_says_what_runs_and_why(report, tmp_path, monkeypatch):
    """Kernels and the version of Numba, no GPU, a variable that turns kernels off or is wrong, and why Numba is not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu, on_gpu, by_fla = report()
    assert on_cpu.startswith("On a CPU: kernels") and numba.__version__ in on_cpu
    assert on_gpu.startswith("On a GPU: no kernels")
    assert by_fla.startswith(("On a GPU, by fla: no kernels", "On a GPU, by fla: plain PyTorch"))
    for line, variable in enumerate((dispatch.VARIABLE, "LINEARTIME_TRITON", "LINEARTIME_TRITON")):
        for value, said in (("0", "plain PyTorch, because"), ("2", "an error:")):
            with monkeypatch.context() as patch:
                patch.setenv(variable, value)
                assert said in report()[line] and variable in report()[line]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        assert report()[0].startswith("On a CPU: plain PyTorch") and "pip install numba" in report()[0]
    (tmp_path / "numba.py").write_text("raise OSError('libllvmlite.so is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    assert "libllvmlite.so is missing" in report()[0] and "plain PyTorch" in report()[0]


PROGRAM = """
import torch; from common import kernels; from common.ops import gated_delta_attention as attend
print("said:", kernels.cpu_status())
x = torch.linspace(-1, 1, 60).view(1, 2, 10, 3).requires_grad_()
out = attend(x, x.flip(3), x.flip(2), beta=x[..., 0].sigmoid())
print(*torch.cat([out, *torch.autograd.grad(out.sum(), x)]).flatten().tolist())
"""
#: Switches of Numba, Triton and torch, set before anything is imported, and what the report says then.
SWITCHES = [
    ("plain PyTorch, because NUMBA_DISABLE_JIT", {"NUMBA_DISABLE_JIT": "1"}),
    (
        "kernels",
        {
            **{"NUMBA_NUM_THREADS": "1", "NUMBA_THREADING_LAYER": "omp", "NUMBA_CACHE_DIR": "/dev/null/no folder"},
            **{"NUMBA_DEBUG_CACHE": "0", "NUMBA_OPT": "0", "NUMBA_BOUNDSCHECK": "1", "TRITON_INTERPRET": "1"},
            **{"TORCH_COMPILE_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1"},
        },
    ),
]


def test_switches_of_what_kernels_use_change_no_result(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    x = torch.linspace(-1, 1, 60).view(1, 2, 10, 3).requires_grad_()
    out = gated_delta_attention(x, x.flip(3), x.flip(2), beta=x[..., 0].sigmoid())
    expected = torch.cat([out, *torch.autograd.grad(out.sum(), x)]).flatten()
    monkeypatch.delenv(dispatch.VARIABLE)
    for said, switches in SWITCHES:
        lines = run_program(["-c", PROGRAM], cwd=str(CHECKOUT), environment=switches).splitlines()[-2:]
        assert lines[0].startswith(f"said: {said}")
        assert_close(str(switches), torch.tensor([float(x) for x in lines[1].split()]), expected)


def kernels_of(case: Case) -> set[str]:
    """The modules of kernels that some tokens and, if causal, then one more go through."""
    used, run = set(), threads.run

    def recorded(kernel, *arguments) -> None:
        used.add(kernel.py_func.__module__)
        run(kernel, *arguments)

    module = case.build(torch.float32)
    inputs = tensors(module, 9, dtype=torch.float32, grad=False)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(threads, "run", recorded)
        if case.causal:
            _, state = module.extend(**at(inputs, slice(0, 8)))
            module.extend(**at(inputs, slice(8, 9)), state=state)
        else:
            module(**inputs)
    return used


def test_the_table_of_mechanisms_with_kernels_for_cpus_is_right():
    """Each mechanism, with every option. Those with gates are named if they need them for a kernel."""
    named, with_gates = defaultdict(set), defaultdict(set)
    for case in CASES:
        if not (case.image or case.rotary or case.short_conv):
            name = case.name if case.causal else f"{case.name}, not causal"
            for module in kernels_of(case):
                (named if case.forget == "none" else with_gates)[module].add(name)
    assert set(MODULES) == set(kernels.CPU_KERNELS)
    for name, module in MODULES.items():
        gated = {f"{mechanism} with gates" for mechanism in with_gates[module] - named[module]}
        assert set(kernels.CPU_KERNELS[name]) == named[module] | gated
