"""The core needs torch alone."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

USE = """
import torch
from common.attention import build_attention, record_attention
import common, common.ops.flow_attention_reference, common.ops.linear_attention_reference
x = torch.randn(1, 2, 9, 4)
for name in ("flow", "linear", "softmax"):
    for causal in (False, True):
        module = build_attention(name, causal=causal)
        assert module(x, x, x).shape == x.shape
with record_attention(torch.nn.Sequential(build_attention("flow"))) as records:
    pass
assert common.DISTRIBUTION == "lineartime"
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_imports_no_host_and_nothing_torch_does_not():
    """What the core adds to sys.modules is the core and the standard library."""
    code = "import sys, torch, torch._dynamo\nbefore = set(sys.modules)\n" + USE + "print(*set(sys.modules) - before)"
    added = {name.partition(".")[0] for name in run(code).split()}
    assert added - set(sys.stdlib_module_names) - {"torch"} == {"common"}


def test_it_works_where_the_hosts_and_their_requirements_are_missing():
    blocked = "fairseq", "timm", "numpy", "torchvision", "torchaudio", "omegaconf", "hydra", "PIL", "scipy", "sklearn"
    run(f"import sys\nfor name in {blocked}: sys.modules[name] = None\n" + USE)


def test_its_checks_survive_python_without_asserts():
    code = USE.replace("assert ", "pass; ") + (
        "\ntry: build_attention('flow', clamp=-1)\nexcept ValueError: print('refused')"
        "\ntry: build_attention('flow')(x, x, x[0])\nexcept ValueError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused", "refused"]
