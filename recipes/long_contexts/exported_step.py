"""Size and time per token of an exported decoding step, compared with fairseq's own step of the same checkpoint.

``python -m recipes.long_contexts.exported_step checkpoint.pt step.onnx --data data-bin``: both read the same random
tokens, one by one, and are timed around some positions; their logits are compared there.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import pandas as pd
import torch
from tqdm import tqdm

from fairseq_plugin.export_step import load

from .generate import Graph

#: Steps up to a position whose median is its time.
AROUND = 50
Step = Callable[[int], numpy.ndarray]  # the number of a token -> the logits (V,) after it


def walk(step: Step, positions: Sequence[int]) -> tuple[dict[int, float], dict[int, numpy.ndarray]]:
    """The milliseconds of a step around each position, and the logits there."""
    seconds, logits = [], {}
    for i in tqdm(range(max(positions)), desc="tokens", unit="", leave=False, disable=None):
        started = time.perf_counter()
        output = step(i)
        seconds.append(time.perf_counter() - started)
        if i + 1 in positions:
            logits[i + 1] = output
    return {x: 1000 * statistics.median(seconds[max(0, x - AROUND) : x]) for x in positions}, logits


def in_onnxruntime(graph: Graph, tokens: torch.Tensor) -> Step:
    """Steps of ``graph`` over tokens (n,), one row."""
    state, numbers = graph.beginning(), tokens.numpy()

    def step(i: int) -> numpy.ndarray:
        nonlocal state
        logits, state = graph(numbers[None, i : i + 1], [0], state)
        return logits[0]

    return step


def in_fairseq(model: torch.nn.Module, tokens: torch.Tensor) -> Step:
    """Steps of fairseq's generator over tokens (n,), one row; each step gets all tokens so far."""
    state: dict = {}

    @torch.no_grad()
    def step(i: int) -> numpy.ndarray:
        return model.decoder(tokens[None, : i + 1], incremental_state=state)[0][0, -1].numpy()

    return step


def main(arguments: Sequence[str] | None = None) -> None:
    """Walk with both, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="the one that was exported")
    parser.add_argument("graph", type=Path, help="what python -m fairseq_plugin.export_step made of it")
    parser.add_argument("--data", help="folder with dict.txt; default: the checkpoint's")
    parser.add_argument("--positions", type=int, nargs="+", default=[100, 1_000, 10_000], help="%(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    graph = Graph(options.graph)
    longest = graph.about["longest_sequence"]
    if longest is not None and max(options.positions) > longest:
        parser.error(f"--positions has {max(options.positions)}; allowed: at most {longest}, the model's positions")
    architecture, model, dictionary, _ = load(options.checkpoint, options.data)
    if (architecture, dictionary.symbols) != (graph.about["architecture"], graph.about["symbols"]):
        parser.error(f"{options.graph} is of another model than {options.checkpoint}; allowed: its export")
    model.eval()
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (max(options.positions),), generator=generator)
    tokens[0] = graph.about["begins_with"]
    ours, our_logits = walk(in_onnxruntime(graph, tokens), options.positions)
    host, host_logits = walk(in_fairseq(model, tokens), options.positions)
    rows = [
        {
            "position": f"{position:,}",
            "onnxruntime": f"{ours[position]:.2f}",
            "fairseq": f"{host[position]:.2f}",
            "difference": f"{abs(our_logits[position] - host_logits[position]).max():.1e}",
        }
        for position in options.positions
    ]
    print(pd.DataFrame(rows).to_markdown(index=False, disable_numparse=True))
    state, parameters = sum(x.numpy().nbytes for x in graph.beginning()), sum(x.numel() for x in model.parameters())
    print(f"\n* {architecture}, {parameters:,} parameters")
    print(f"* bytes: file {len(options.graph.read_bytes()):,}, state {state:,}")
    print("* milliseconds of a token on one thread, median of the steps up to a position; largest difference of logits")


if __name__ == "__main__":
    main()
