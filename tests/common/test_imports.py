"""The core only needs torch, a mechanism only what it is made of, and checks do not depend on assert."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
ROOT = Path(__file__).parents[2]
#: The hosts and their requirements.
BLOCKED = "fairseq", "timm", "numba", "torchvision", "torchaudio", "omegaconf", "hydra", "PIL", "scipy", "sklearn"
#: The most files of this project, and lines, that a reader of a mechanism may need.
SUMS = dict.fromkeys(("linear", "t2r", "hedgehog"), (32, 3350)) | dict.fromkeys(
    ("favor", "rfa", "gla", "cosformer"), (32, 3450)
)
LARGEST = SUMS | {
    "softmax": (18, 1900),
    "local": (20, 2400),
    "gla": (33, 3500),
    "rfa_gate": (34, 3550),
    "retention": (33, 3700),
    "lolcats": (37, 4050),
    "flow": (55, 6000),
}
IMPORTS = """
from common.attention import RotaryAttention, build_attention, record_attention
from common.modules import GatedAttentionUnit, ScaledSin, build_norm
import common, common.ops.flow.reference, common.ops.linear.reference
import common.ops.combiner.reference, common.ops.mixed_chunk.reference
"""
USE = f"""
for name in {BLOCKED}: sys.modules[name] = None
before = set(sys.modules)
{IMPORTS}
x, tokens = torch.randn(1, 2, 9, 4), torch.randn(1, 9, 8)
for causal in (False, True):
    for name in ("flow", "linear", "quadratic", "softmax"):
        RotaryAttention(build_attention(name, causal=causal), 4)(x, x, x)
    build_attention("mixed_chunk", causal=causal, num_heads=2, head_dim=4, chunk_size=4)(x, x, x)
    build_attention("combiner", causal=causal, num_heads=2, head_dim=4, row_length=4)(x, x, x, x=tokens)
    for form in ({{"chunk_size": 4}}, {{"chunk_size": None, "max_positions": 9}}):
        unit = GatedAttentionUnit(8, query_dim=4, causal=causal, norm="scalenorm", **form)
        unit(build_norm("layernorm", 8)(tokens) + ScaledSin(8)(torch.arange(9)))
recorded = build_attention("flow")
with record_attention(recorded):
    recorded(x, x, x)
added = {{name.partition(".")[0] for name in set(sys.modules) - before}}
print(*added - set(sys.stdlib_module_names) - {{"torch"}})
for wrong in (lambda: build_attention("flow", clamp=-1), lambda: build_attention("flow")(x, x, x[0]),
              lambda: build_attention("quadratic")(x, x, x[0]), lambda: GatedAttentionUnit(8, chunk_size=0)):
    try: wrong()
    except ValueError: print("refused")
"""
NUMBA = f"""
{IMPORTS}
print("numba" in sys.modules)
x = torch.randn(1, 2, 9, 4)
build_attention("linear", causal=True)(x, x, x)
print("numba" in sys.modules)
"""
#: Packages whose ``__init__`` imports all of their files, which no reader of one mechanism opens, are empty.
CLOSURE = """
for package in ("common", "common.attention", "common.modules", "common.ops"):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = [package.replace(".", "/")]
__import__("common.attention.{name}")
paths = {{x.__file__ for x in list(sys.modules.values()) if x.__name__.startswith("common.") and x.__spec__}}
print(len(paths), sum(len(open(path).readlines()) for path in paths))
"""
PROGRAMS = {"use": USE, "numba": NUMBA, **{name: CLOSURE.format(name=name) for name in LARGEST}}
#: Runs each program in a child of one process that has torch and, since it is started with -O, no asserts.
PARENT = f"""
import os, sys, types, torch, torch._dynamo
for name, program in {PROGRAMS}.items():
    print("PROGRAM", name, flush=True)
    if (child := os.fork()) == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]: sys.exit(name)
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    """The words that each program printed."""
    done = subprocess.run([sys.executable, "-O", "-c", PARENT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = (part.split() for part in done.stdout.split("PROGRAM")[1:])
    return {name: words for name, *words in parts}


def test_without_hosts_and_asserts_it_imports_nothing_that_torch_does_not_and_refuses(printed):
    assert printed["use"] == ["common", *["refused"] * 4]


def test_numba_is_imported_at_the_first_use_of_a_kernel(printed):
    assert printed["numba"] == ["False", "True"]


def test_a_mechanism_imports_only_what_it_is_made_of(printed):
    for name, most in LARGEST.items():
        files, lines = map(int, printed[name])
        assert files <= most[0] and lines <= most[1], (name, files, lines)


def test_one_package_alone_imports_transformers():
    importing = {
        path.parent.name
        for path in (ROOT / "common").rglob("*.py")
        if re.search(r"^\s*(from|import)\s+transformers\b", path.read_text(), re.MULTILINE)
    }
    assert importing == {"huggingface"}
