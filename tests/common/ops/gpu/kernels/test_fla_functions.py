"""fla's own kernels behind running sums and the delta rule: those in chunks on a GPU, otherwise those for decoding.

The kernels in chunks do not run in Triton's interpreter, and some for decoding have no gradients.
"""

import importlib
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from common.ops import gated_delta_attention, kimi_delta_attention, linear_attention
from common.ops.shared.gpu import fla
from common.ops.shared.gpu.launch import interpreted
from tests.compare import assert_close, gradients

TOKENS, HEADS, CHANNELS = (5, 1, 16) if interpreted() else (133, 2, 64)


@pytest.fixture
def functions(monkeypatch):
    """fla's functions, for tensors in float32 that are on a CPU in the interpreter; the names that were called."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")
    found, called = _for_decoding(monkeypatch) if interpreted() else fla.functions(), []

    def recorded(name):
        def attend(*args, **kwargs):
            called.append(name)
            return found[name](*args, **kwargs)

        return attend

    monkeypatch.setattr(fla, "functions", lambda: {name: recorded(name) for name in found})
    yield called
    torch.set_float32_matmul_precision(before)


def _for_decoding(monkeypatch):
    """Without the file of ``fla.ops``, which imports all of them and takes many seconds."""
    from triton.runtime.autotuner import Autotuner

    package = types.ModuleType("fla.ops")
    package.__path__ = [str(Path(importlib.util.find_spec("fla").origin).parent / "ops")]
    monkeypatch.setitem(sys.modules, "fla.ops", package)
    monkeypatch.setattr(Autotuner, "_bench", lambda *args, **kwargs: [1.0, 1.0, 1.0])  # any configuration will do

    def renamed(name, module):
        function = getattr(importlib.import_module(f"fla.ops.{module}"), name.replace("chunk", "fused_recurrent"))
        if module != "gla":
            return function
        return lambda *args, g, **kwargs: function(*args, gk=g, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        return {name: renamed(name, module) for name, module in fla.FUNCTIONS.items()}


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_tokens(*channels, seed):
    return numbers(2, HEADS, TOKENS, *channels, seed=seed)


@pytest.mark.parametrize("attention", ["sums", "by head", "by channel", "delta", "kimi"])
def test_they_give_what_plain_pytorch_gives(attention, functions):
    """Outputs, states after a first state, and gradients where the kernels have them."""
    device = "cpu" if interpreted() else "cuda"
    q, k, v = (of_tokens(CHANNELS, seed=seed) for seed in range(3))
    beta, gate = of_tokens(seed=3).sigmoid(), -0.1 * of_tokens(seed=4).abs()
    gates = -0.1 * of_tokens(CHANNELS, seed=5).abs()
    memory = {"memory": numbers(2, HEADS, CHANNELS, CHANNELS, seed=6)}
    sums = {"sum_k": numbers(2, HEADS, CHANNELS, seed=7).abs(), "sum_kv": memory["memory"]}
    function, options, state, name = {
        "sums": (linear_attention, {}, sums, "chunk_simple_gla"),
        "by head": (linear_attention, {"log_decay": gate}, sums, "chunk_simple_gla"),
        "by channel": (linear_attention, {"log_decay": gates}, sums, "chunk_gla"),
        "delta": (gated_delta_attention, {"beta": beta, "log_decay": gate}, memory, "chunk_gated_delta_rule"),
        "kimi": (kimi_delta_attention, {"beta": beta, "log_decay": gates}, memory, "chunk_kda"),
    }[attention]

    def attend(dtype, device):
        leaves = [x.to(device, dtype).requires_grad_() for x in (q, normalize(k, dim=-1), v, *options.values())]
        given = {key: x.to(device, dtype) for key, x in state.items()}
        named = dict(zip(options, leaves[3:]))
        return leaves, *function(*leaves[:3], **named, causal=True, initial_state=given, return_state=True)

    tolerance = 1e-5 if interpreted() else 3e-3
    leaves, out, after = attend(torch.float32, device)
    assert functions == [name]
    exact, expected, wanted_after = attend(torch.float64, "cpu")
    assert_close("out", out.cpu(), expected, tolerance)
    for key, x in after.items():
        assert_close(key, x.cpu(), wanted_after[key], tolerance)
    if function is linear_attention or not interpreted():
        for x, y in zip(gradients(out.cpu(), leaves), gradients(expected, exact)):
            assert_close("gradient", x.cpu(), y, tolerance)
