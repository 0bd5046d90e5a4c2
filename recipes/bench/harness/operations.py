"""Operations as data: a row names the functions to compare, their inputs, and the reference of each."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from .compare import compare_attention
from .packages import missing
from .work import Absent, Amount, Candidate, Case, Comparison, Settings, attention_runs, random_inputs

Attention = Callable[..., Tensor]


class Check(NamedTuple):
    """One comparison of a function with a reference, which gets float64."""

    reference: Attention
    tokens: int | None = None  # compare at no more tokens than this; None: at the timed length
    heads: int | None = None  # compute the reference only for this many last heads, dimension 1 of all inputs
    function: Attention | None = None  # compare this instead of the timed function, for instance with another option


class Function(NamedTuple):
    """One implementation of an operation."""

    name: str
    call: Attention
    checks: tuple[Check, ...]
    package: str | None = None  # the module that it needs, a key of ``packages.INSTALL``
    refusal: Callable[[Settings, int], str | None] | None = None  # why it is not run at a size; None: it is run


class Operation(NamedTuple):
    """One row of the registry: functions of the same inputs."""

    name: str
    title: str
    inputs: tuple[str, ...]
    shapes: Callable[[int], Sequence[Sequence[int]]]  # tokens -> the shape of every input; q, k and v come first
    functions: tuple[Function, ...]
    sizes: tuple[int, ...]
    quick_sizes: tuple[int, ...]
    note: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    plotted: bool = True
    least_work: Callable[[str, int, str], Amount | None] | None = None

    def case(self) -> Case:
        """The case of the benchmark that runs this row."""
        return Case(
            self.name,
            self.title,
            "tokens",
            "tokens",
            self.sizes,
            self.quick_sizes,
            partial(candidates, self),
            self.devices,
            plotted=self.plotted,
            note=self.note,
            least_work=self.least_work,
        )


def candidates(operation: Operation, settings: Settings, size: int) -> list[Candidate | Absent]:
    """Every function of ``operation`` at ``size`` tokens, or why it is not run."""
    inputs = random_inputs(settings, *operation.shapes(size))
    return [_candidate(operation, function, settings, size, inputs) for function in operation.functions]


def _candidate(
    operation: Operation, function: Function, settings: Settings, size: int, inputs: list[Tensor]
) -> Candidate | Absent:
    reason = None if function.package is None else missing(function.package)
    if reason is None and function.refusal is not None:
        reason = function.refusal(settings, size)
    if reason is not None:
        return Absent(function.name, size, reason)

    def check() -> list[Comparison]:
        comparisons = []
        for comparison in function.checks:
            tokens = size if comparison.tokens is None else min(size, comparison.tokens)
            comparisons += _compare(operation, comparison.function or function.call, comparison, settings, tokens)
        return comparisons

    nbytes = sum(x.numel() * x.element_size() for x in inputs[:3])
    tokens = inputs[0].shape[0] * size
    return Candidate(function.name, size, tokens, attention_runs(function.call, inputs), check, nbytes)


@lru_cache  # references at a fixed length are slow loops, and the same at every timed length
def _compare(
    operation: Operation, call: Attention, check: Check, settings: Settings, tokens: int
) -> tuple[Comparison, ...]:
    inputs = random_inputs(settings, *operation.shapes(tokens))
    return tuple(compare_attention(call, check.reference, inputs, operation.inputs, heads=check.heads))
