"""A case of the benchmark: candidates that do the same work, each checked against a reference before it is timed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Names of the runs of a candidate, in results.json and in the tables.
FORWARD, BACKWARD, TRAINING, DECODING = "forward", "forward + backward", "training step", "decoding step"


class Settings(NamedTuple):
    """Settings of one run of the benchmark, which hold for all its cases."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    quick: bool = False

    def to(self, x: Any) -> Any:
        """Move a tensor or a module to the device and the dtype."""
        return x.to(self.device, self.dtype)


class Comparison(NamedTuple):
    """How far one tensor of a candidate is from the same tensor of its reference."""

    tensor: str
    error: float  # relative root mean square; infinite where a number is not finite or the shape differs
    allowed: float


class Candidate(NamedTuple):
    """One implementation or one model that does the work of a case, at one size."""

    name: str
    size: int
    units: float  # tokens or images of one run
    #: Name of a run -> the function that does it, which returns every tensor that must exist afterwards.
    runs: dict[str, Callable[[], Sequence[Tensor]]]
    #: Compares outputs and gradients with the reference; called once, before any run.
    check: Callable[[], list[Comparison]]
    input_bytes: int = 0  # of q, k and v, or of a decoding state, if reported: see ``Case.inputs``


class Absent(NamedTuple):
    """A candidate that cannot run here, and why."""

    name: str
    size: int
    reason: str


class Amount(NamedTuple):
    """The work that no implementation of an operation can avoid."""

    operations: float  # floating-point
    numbers: float  # moved from or to memory


class Case(NamedTuple):
    """Candidates that are compared at several sizes; they are built for one size at a time."""

    name: str
    title: str
    unit: str  # of a candidate's ``units``: "tokens" or "images"
    axis: str  # what a size counts
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    build: Callable[[Settings, int], list[Candidate | Absent]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    memory: bool = True  # whether memory is measured as well
    plotted: bool = True
    note: str = ""
    inputs: str = "q, k, v"  # what the ``input_bytes`` of a candidate are
    family: str = ""  # the title of one table for many cases, of the first candidate of each, over the second one
    #: Candidate, size and run -> the least amount of work; None for a candidate without a floor.
    least_work: Callable[[str, int, str], Amount | None] | None = None

    def sizes_of(self, settings: Settings) -> tuple[int, ...]:
        """The sizes of one run of the benchmark; empty if the case does not run on the device."""
        if settings.device not in self.devices:
            return ()
        return self.quick_sizes if settings.quick else self.sizes


def attention_runs(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, Callable]:
    """``attention(*inputs)`` forward, and forward with backward to all of ``inputs``, which are leaves."""
    with torch.no_grad():
        weights = torch.randn_like(attention(*inputs))

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(*inputs)]

    def backward() -> list[Tensor]:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, weights, materialize_grads=True)]

    return {FORWARD: forward, BACKWARD: backward}


def random_inputs(settings: Settings, *shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Normal random leaves that require gradients; the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [settings.to(torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]
