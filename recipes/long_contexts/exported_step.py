"""Size and time per token of an exported decoding step, compared with fairseq's own step of the same checkpoint.

``python -m recipes.long_contexts.exported_step checkpoint.pt step.onnx --data data-bin``: both read the same random
tokens, one by one, and are timed around some positions; their logits are compared there.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from tqdm import tqdm

from common import __version__
from common.command_parser import CommandParser
from fairseq_plugin.export_step import load

from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import Table, as_text, describe_run
from .generate import Graph

COMMAND = "recipes.long_contexts.exported_step"


class Timed(NamedTuple):
    """The median milliseconds of a step around each position, and the logits (V,) at each."""

    milliseconds: dict[int, float]
    logits: dict[int, numpy.ndarray]


def walk(step: Callable[[int], numpy.ndarray], positions: Sequence[int], around: int) -> Timed:
    """Call ``step(i)``, which returns the logits after token i, up to the last of ``positions``, and time it there.

    A position's time is the median of the ``around`` steps up to it.
    """
    seconds, logits = [], {}
    for i in tqdm(range(max(positions)), desc="tokens", unit="", leave=False, disable=None):
        started = time.perf_counter()
        output = step(i)
        seconds.append(time.perf_counter() - started)
        if i + 1 in positions:
            logits[i + 1] = output
    return Timed(
        {position: 1000 * statistics.median(seconds[max(0, position - around) : position]) for position in positions},
        logits,
    )


def in_onnxruntime(graph: Graph, tokens: torch.Tensor) -> Callable[[int], numpy.ndarray]:
    """Steps of ``graph`` over tokens (n,), one row."""
    state, numbers = graph.beginning(), tokens.numpy()

    def step(i: int) -> numpy.ndarray:
        nonlocal state
        logits, state = graph(numbers[None, i : i + 1], [0], state)
        return logits[0]

    return step


def in_fairseq(model: torch.nn.Module, tokens: torch.Tensor) -> Callable[[int], numpy.ndarray]:
    """Steps of fairseq's generator over tokens (n,), one row; each step gets all tokens so far."""
    state: dict = {}

    @torch.no_grad()
    def step(i: int) -> numpy.ndarray:
        return model.decoder(tokens[None, : i + 1], incremental_state=state)[0][0, -1].numpy()

    return step


def table(graph: Graph, path: Path, ours: Timed, host: Timed, parameters: int) -> Table:
    """A row for each position."""
    rows = [
        (
            f"{position:,}",
            f"{ours.milliseconds[position]:.2f}",
            f"{host.milliseconds[position]:.2f}",
            f"{abs(ours.logits[position] - host.logits[position]).max():.1e}",
        )
        for position in ours.milliseconds
    ]
    state, about = sum(value.numpy().nbytes for value in graph.beginning()), graph.about
    notes = [
        f"{about['architecture']}, {parameters:,} parameters; bytes: file {path.stat().st_size:,}, state {state:,}",
        "milliseconds of a token on one thread, median of the steps up to a position; largest difference of logits",
        f"lineartime {__version__}; one text of random tokens",
    ]
    return Table("An exported step", ("position", "onnxruntime", "fairseq", "difference"), rows, notes)


@script("exported_step")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the one that was exported")
    parser.add_argument("graph", type=Path, help="what python -m fairseq_plugin.export_step made of it")
    parser.add_argument("--data", help="folder with dict.txt; default: the checkpoint's")
    parser.add_argument("--positions", type=positive_int, nargs="+", default=[100, 1_000, 10_000], help="%(default)s")
    parser.add_argument("--around", type=positive_int, default=50, help="steps of a median (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    started, command = time.monotonic(), command_line(COMMAND, arguments)
    graph = Graph(options.graph)
    longest = graph.about["longest_sequence"]
    if longest is not None and max(options.positions) > longest:
        raise ValueError(f"--positions has {max(options.positions)}; allowed: at most {longest}, the model's positions")
    architecture, model, dictionary, _ = load(options.checkpoint, options.data)
    if (architecture, dictionary.symbols) != (graph.about["architecture"], graph.about["symbols"]):
        raise ValueError(f"{options.graph} is of another model than {options.checkpoint}; allowed: its export")
    model.eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (max(options.positions),), generator=generator)
    tokens[0] = graph.about["begins_with"]
    exported = walk(in_onnxruntime(graph, tokens), options.positions, options.around)
    host = walk(in_fairseq(model, tokens), options.positions, options.around)
    parameters = sum(x.numel() for x in model.parameters())
    run = describe_run(command, time.monotonic() - started)
    print(as_text([table(graph, options.graph, exported, host, parameters)], run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
