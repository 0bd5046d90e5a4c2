"""Tokens per second of a training step at several lengths: ``python -m recipes.demo.lengths DATA``.

Builds the models as fairseq-train does and times forward, backward and update on random tokens. A step has 4096 tokens,
or one sequence if that is longer, so that only the length changes along a row of the table.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch.nn import functional as F

from .. import models
from .text import ARCHITECTURES, model_arguments


def measure(dictionary: Dictionary, architecture: str, length: int, tokens_per_step: int, least: float) -> float:
    """Tokens per second of the fastest of at least two steps that take ``least`` seconds."""
    torch.manual_seed(1)
    task = ("--task", "language_modeling")
    model = models.build([*task, *model_arguments(architecture, length)], dictionary).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    tokens = torch.randint(dictionary.nspecial, len(dictionary), (max(1, tokens_per_step // length), length))

    def step() -> float:
        started = time.perf_counter()
        logits, _ = model(tokens)
        F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten(), reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step()
    seconds = [step(), step()]
    while sum(seconds) < least:
        seconds.append(step())
    return tokens.numel() / min(seconds)


def main(arguments: list[str] | None = None) -> None:
    """Print a line of JSON for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data-bin folder; its dictionary alone is used")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="tokens per sequence")
    parser.add_argument("--step", type=int, default=4096, help="tokens of a step, or one sequence if that is longer")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    options = parser.parse_args(arguments)
    dictionary = Dictionary.load(str(options.data / "dict.txt"))
    for length in options.lengths:
        for architecture in ARCHITECTURES:
            speed = round(measure(dictionary, architecture, length, options.step, options.seconds), 1)
            print(json.dumps({"model": architecture, "length": length, "tokens/s": speed}), flush=True)


if __name__ == "__main__":
    main()
