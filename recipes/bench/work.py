"""What a case is made of: forms that do the same work, and how each is shown to be right before it is timed."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: What is run of a form, and the columns of the tables.
FORWARD, BACKWARD, TRAINING, DECODING = "forward", "forward + backward", "training step", "decoding step"


class Settings(NamedTuple):
    """What holds for all cases of one run."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    quick: bool = False

    def to(self, x: Any) -> Any:
        """A tensor or a module on the device, in the dtype."""
        return x.to(self.device, self.dtype)


class Comparison(NamedTuple):
    """How far one tensor of a form is from the same tensor of its reference."""

    tensor: str
    error: float  # relative root mean square; infinite where a number is not finite or the shape is another
    allowed: float


class Form(NamedTuple):
    """One way of doing the work, at one size."""

    name: str
    size: int
    units: float  # tokens or images of one run
    #: What is run -> the function that does it, returning every tensor that has to exist afterwards.
    runs: dict[str, Callable[[], Sequence[Tensor]]]
    #: Compares with the reference, forward and gradients; called once, before any run.
    check: Callable[[], list[Comparison]]
    input_bytes: int = 0  # of q, k and v, where memory is counted in them


class Absent(NamedTuple):
    """A form that cannot be run here, and why."""

    name: str
    size: int
    reason: str


class Case(NamedTuple):
    """A line of the benchmark: the same forms at several sizes, built one size at a time."""

    name: str
    title: str
    unit: str  # "tokens" or "images", of a form's ``units``
    axis: str  # what a size counts
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    build: Callable[[Settings, int], list[Form | Absent]]
    devices: tuple[str, ...] = ("cpu", "cuda")
    memory: bool = True  # whether memory is measured as well
    plotted: bool = True
    note: str = ""

    def sizes_of(self, settings: Settings) -> tuple[int, ...]:
        """The sizes of a run; none on a device the case is not for."""
        if settings.device not in self.devices:
            return ()
        return self.quick_sizes if settings.quick else self.sizes


def attention_runs(attention: Callable[..., Tensor], inputs: Sequence[Tensor]) -> dict[str, Callable]:
    """The forward pass, and with the backward pass, of ``attention(*inputs)``; the inputs are leaves."""
    with torch.no_grad():
        weights = torch.randn_like(attention(*inputs))

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [attention(*inputs)]

    def backward() -> list[Tensor]:
        out = attention(*inputs)
        return [out, *torch.autograd.grad(out, inputs, weights)]

    return {FORWARD: forward, BACKWARD: backward}


def random_inputs(settings: Settings, *shapes: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Normal leaves that want gradients, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return [settings.to(torch.randn(*shape, generator=generator)).requires_grad_() for shape in shapes]
