"""Compile one language model in this process and print what it cost as JSON; ``__main__`` runs it for each model."""

import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor, nn

from common.command_parser import CommandParser

from ...shared.scripts import script
from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.work import Settings
from ..models.fairseq_models import build, random_tokens

MODULE = "recipes.bench.compile_time.one"
WIDTH, LAYERS, ROWS = 256, 2, 2
LENGTHS = (64, 100, 130)


class Cost(NamedTuple):
    """Cost of torch.compile for one model."""

    python: float  # seconds of processor time of the process
    compiler: float  # seconds of processor time of the C++ compiler
    operations: int  # of the graphs that inductor was given
    graphs: int
    kernels: int  # different C++ kernels
    difference: float  # of the logits and gradients from those without torch.compile; relative


class _Counted:
    """Inductor's hook in front of its passes: counts graphs and their operations."""

    def __init__(self) -> None:
        self.operations = self.graphs = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.graphs += 1
        self.operations += sum(node.op == "call_function" for node in graph.nodes)


def compile_cost(model: nn.Module, inputs: list[Tensor], seconds: Callable[[], tuple[float, float]]) -> Cost:
    """Compile ``model`` for each of ``inputs`` in turn, and the backward pass of the last; into an empty cache.

    ``seconds`` returns the processor time so far of this process and of its children.
    """
    counted = _Counted()
    # torch's own random numbers, so that random features draw the same directions as in the eager pass.
    settings = {"fx_graph_cache": False, "compile_threads": 1, "fallback_random": True}
    settings["post_grad_custom_pre_pass"] = counted
    compiled = torch.compile(model)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        with inductor.patch(settings), functorch.patch(enable_autograd_cache=False):
            before = seconds()
            logits = _logits(compiled, inputs)
            gradients = _gradients(model, logits[-1])
            after = seconds()
        kernels = len({path.name for path in Path(folder).rglob("*.main.cpp")})
    expected = _logits(model, inputs)
    actual = torch.cat([x.detach().flatten() for x in (*logits, gradients)])
    reference = torch.cat([x.detach().flatten() for x in (*expected, _gradients(model, expected[-1]))])
    error = compare("logits and gradients", actual, reference, MODEL_TOLERANCES[torch.float32]).error
    python, compiler = (round(end - begin, 2) for begin, end in zip(before, after))
    return Cost(python, compiler, counted.operations, counted.graphs, kernels, error)


def _logits(model: Callable[[Tensor], Any], inputs: list[Tensor]) -> list[Tensor]:
    """The logits of each input, with the model's random numbers from a fixed seed."""
    torch.manual_seed(3)
    return [model(tokens)[0] for tokens in inputs]


def _gradients(model: nn.Module, logits: Tensor) -> Tensor:
    """Gradients of the mean square of ``logits`` for all parameters that have one, in one vector."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
    return torch.cat([x.flatten() for x in gradients if x is not None])


def processor_seconds() -> tuple[float, float]:
    """User and system time of this process, and of its children that have ended."""
    usages = (resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return tuple(usage.ru_utime + usage.ru_stime for usage in usages)


def language_model(architecture: str) -> nn.Module:
    """Two layers of width 256 (FLASH: two gated attention units), from a fixed seed, in training mode."""
    layers = LAYERS // 2 if architecture == "flash_lm" else LAYERS  # ``build`` counts two units as one layer
    return build(architecture, WIDTH, layers, 2 * max(LENGTHS), Settings()).train()


@script("one")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the cost of the given architecture as one line of JSON."""
    parser = CommandParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("architecture", help="of a language model, as --arch names it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    inputs = [random_tokens(Settings(), length, ROWS) for length in LENGTHS]
    print(json.dumps(compile_cost(language_model(options.architecture), inputs, processor_seconds)._asdict()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
