"""Memory of a step is linear in its length, at most that of softmax attention, without T x T tensors."""

from pathlib import Path

import pytest
import torch

from recipes.bench import models
from recipes.runs import peak_bytes
from tests.common.properties import LargestTensor
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.text import tokens
from tests.processes import Command, run_in_turn

# Peak memory of one training step at each given length, longest last, in bytes above the process's memory
# before it. VmHWM, because ru_maxrss starts with the value of the parent process, and that of a fork with its own.
STEPS = """
import ctypes, sys
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: freed tensors are returned at once, so peaks are repeatable
from tests.fairseq_plugin.helpers.language_models import SMALL, build_model
from tests.fairseq_plugin.helpers.text import tokens
def kilobytes(entry):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(entry))
arch, *lengths = sys.argv[1], *map(int, sys.argv[2:])
heads = "1" if arch.startswith("flash_") else "4"
arguments = ["--tokens-per-sample", str(lengths[-1]), "--decoder-attention-heads", heads]
arguments += ["--share-decoder-input-output-embed"]
model = build_model(arch, *arguments, sizes=SMALL).train()
model(tokens(1, 64))[0].sum().backward()
for length in lengths:
    before = kilobytes("VmRSS")
    model(tokens(1, length))[0].float().logsumexp(-1).mean().backward()
    print("PEAK", 1024 * (kilobytes("VmHWM") - before))
"""


def _step_memory(folder: Path, arch: str, *lengths: int) -> list[int]:
    program = folder / "steps.py"
    program.write_text(STEPS)
    (printed,) = run_in_turn(Command(str(program), [arch, *map(str, lengths)]))
    return [int(line.split()[1]) for line in printed.splitlines() if line.startswith("PEAK")]


@pytest.mark.parametrize(
    ("arch", "length", "bound"),
    [
        ("flowformer_lm", 16384, 2.2),
        ("flash_lm", 8192, 2.1),
        ("flash_quad_lm", 2048, 2.1),  # its time is quadratic
        ("daft_conv_lm", 8192, 2.1),
    ],
)
def test_memory_of_a_step_is_linear(arch: str, length: int, bound: float, tmp_path: Path) -> None:
    """Twice the length needs about twice the memory, measured by the operating system, for each kind of layer.

    For the mechanisms inside, tests/common/contract/test_growth.py counts allocated and saved tensors.
    """
    once, twice = _step_memory(tmp_path, arch, length, 2 * length)
    assert once > 2**25, "too little to measure"
    assert twice <= bound * once, f"{twice / once:.2f} times"


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "mc_transformer_pp_lm", "flash_quad_lm"])
def test_nothing_of_size_t_by_t(arch: str) -> None:
    """No tensor of a step at 4096 tokens is close to 4096 x 4096 elements, also with padding and fairseq's mask.

    For each kind of layer; tests/common/contract/test_growth.py does so for each mechanism.
    """
    model = build_model(arch, "--tokens-per-sample", "4096", "--decoder-attention-heads", "1").train()
    sequence = tokens(1, 4096)
    sequence[0, -100:] = 1
    with LargestTensor() as largest:
        model(sequence)[0].sum().backward()
    assert 4096 * 64 <= largest.numel <= 4096 * 4096 // 8


@pytest.mark.parametrize("arguments", [[], ["--daft-free-bias"]], ids=["factors", "free"])
def test_daft_full_holds_its_bias_and_nothing_larger(arguments) -> None:
    """At 1024 tokens, 1024 x 1024 elements of w, padded to whole blocks, not one such matrix per channel."""
    model = build_model("daft_full_lm", "--tokens-per-sample", "1024", "--dropout", "0", *arguments).train()
    sequence = tokens(1, 1021)
    sequence[0, -100:] = 1
    with LargestTensor() as largest:
        model(sequence)[0].sum().backward()
    assert 1021 * 1021 <= largest.numel <= 1.1 * 1024 * 1024


def _peak(arch: str, width: int, length: int) -> int:
    """Peak bytes of a training step on one sequence, without the model; equal linear layers, no dropout."""
    model = models.language_model(arch, width, 2, length).train()
    sequence = models.tokens(length)

    def step() -> list[torch.Tensor]:
        model(sequence)[0].float().logsumexp(-1).mean().backward()
        model.zero_grad()
        return []

    step()  # positions are computed once
    return peak_bytes(step)


@pytest.mark.parametrize(("width", "length"), [(512, 512), (256, 2048)])
@pytest.mark.parametrize(
    ("arch", "peer", "bound"),
    [
        ("flash_lm", "transformer_pp_lm", 1.0),
        ("flowformer_lm", "softmax_lm", 1.02),
    ],
)
def test_a_step_needs_no_more_memory_than_softmax_attention_does(arch, peer, bound, width, length) -> None:
    """Whole steps at equal sizes; takes seconds. Flow-Attention keeps its flows, a few numbers per token and head."""
    peak, peer_peak = _peak(arch, width, length), _peak(peer, width, length)
    assert peer_peak > 2**24, "too little to compare"
    assert peak <= bound * peer_peak, f"{peak / peer_peak:.3f} times"
