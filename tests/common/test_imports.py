"""The core only needs torch."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import torch
from common.attention import build_attention, record_attention
from common.attention import RotaryAttention
from common.modules import GatedAttentionUnit, ScaledSin, build_norm
import common, common.ops.flow.reference, common.ops.linear.reference
import common.ops.combiner.reference, common.ops.mixed_chunk.reference
x = torch.randn(1, 2, 9, 4)
for name in ("flow", "linear", "quadratic", "softmax"):
    for causal in (False, True):
        module = build_attention(name, causal=causal)
        assert module(x, x, x).shape == x.shape
        assert RotaryAttention(module, 4)(x, x, x).shape == x.shape
tokens = torch.randn(1, 9, 8)
for causal in (False, True):
    module = build_attention("mixed_chunk", causal=causal, num_heads=2, head_dim=4, chunk_size=4)
    assert module(x, x, x).shape == x.shape
    module = build_attention("combiner", causal=causal, num_heads=2, head_dim=4, row_length=4)
    assert module(x, x, x, x=tokens).shape == x.shape
    for form in ({"chunk_size": 4}, {"chunk_size": None, "max_positions": 9}):
        module = GatedAttentionUnit(8, query_dim=4, causal=causal, norm="scalenorm", **form)
        assert module(tokens + ScaledSin(8)(torch.arange(9))).shape == tokens.shape
assert build_norm("layernorm", 8)(tokens).shape == tokens.shape
recorded = torch.nn.Sequential(build_attention("flow"))
with record_attention(recorded) as records:
    recorded[0](x, x, x)
assert common.DISTRIBUTION == "lineartime"
"""


#: The hosts and their requirements, of which Numba compiles kernels at their first use.
BLOCKED = "fairseq", "timm", "numba", "torchvision", "torchaudio", "omegaconf", "hydra", "PIL", "scipy", "sklearn"


def run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_imports_no_host_and_nothing_torch_does_not():
    """Importing the core adds only itself and the standard library to sys.modules when the hosts are missing."""
    code = f"import sys, torch, torch._dynamo\nfor name in {BLOCKED}: sys.modules[name] = None\n"
    code += "before = set(sys.modules)\n" + USE + "print(*set(sys.modules) - before)"
    added = {name.partition(".")[0] for name in run(code).split()}
    assert added - set(sys.stdlib_module_names) - {"torch"} == {"common"}


def test_numba_is_imported_at_the_first_use_of_a_kernel():
    code = "import sys\n" + USE.partition("x = torch.randn")[0] + "print('numba' in sys.modules)\n"
    code += "x = torch.randn(1, 2, 9, 4)\nbuild_attention('linear', causal=True)(x, x, x)\n"
    code += "print('numba' in sys.modules)"
    assert run(code).split() == ["False", "True"]


#: Imports each mechanism in a child of one process that has torch. Packages whose ``__init__`` imports all of their
#: files, which no reader of one mechanism opens, are empty there.
CLOSURES = """
import os, sys, types, torch
for name in sys.argv[1:]:
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        for package in ("common", "common.attention", "common.modules", "common.ops"):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [package.replace(".", "/")]
        __import__(f"common.attention.{name}")
        paths = {x.__file__ for x in list(sys.modules.values()) if x.__name__.startswith("common.") and x.__spec__}
        print(name, len(paths), sum(len(open(path).readlines()) for path in paths), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
#: The most files of this project, and lines, that a reader of a mechanism may need.
SUMS = dict.fromkeys(("linear", "t2r", "hedgehog"), (30, 3200)) | dict.fromkeys(
    ("favor", "rfa", "gla", "cosformer"), (30, 3300)
)
LARGEST = SUMS | {
    "softmax": (18, 1900),
    "local": (20, 2400),
    "rfa_gate": (32, 3400),
    "retention": (31, 3500),
    "lolcats": (35, 3900),
    "flow": (55, 6000),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_mechanism_imports_only_what_it_is_made_of():
    for line in run(CLOSURES, *LARGEST).splitlines():
        name, files, lines = line.split()
        assert int(files) <= LARGEST[name][0] and int(lines) <= LARGEST[name][1], line


def test_its_checks_survive_python_without_asserts():
    code = USE.replace("assert ", "pass; ") + (
        "\ntry: build_attention('flow', clamp=-1)\nexcept ValueError: print('refused')"
        "\ntry: build_attention('flow')(x, x, x[0])\nexcept ValueError: print('refused')"
        "\ntry: build_attention('quadratic')(x, x, x[0])\nexcept ValueError: print('refused')"
        "\ntry: GatedAttentionUnit(8, chunk_size=0)\nexcept ValueError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["refused"] * 4


def test_one_package_alone_imports_transformers():
    importing = {
        path.parent.name
        for path in (ROOT / "common").rglob("*.py")
        if re.search(r"^\s*(from|import)\s+transformers\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {"huggingface"}
