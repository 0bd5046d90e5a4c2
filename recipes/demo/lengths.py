"""Seconds of a training step at several lengths: ``python -m recipes.demo.lengths --help``.

Builds the models as fairseq-train would and times forward, backward and update on random tokens. A step has 4096
tokens, or one sequence where that is longer, so that a row of the table shows the cost of length alone.
"""

import json
import sys
import time
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from common.command_parser import CommandParser

from ..shared.indexed_files import check_dictionary
from ..shared.scripts import positive_int, script
from .text import ARCHITECTURES, model_arguments

TOKENS_PER_STEP = 4096
#: How long steps are timed; at least two steps are.
SECONDS = 4.0


def measure(data: Path, architecture: str, length: int) -> float:
    """Tokens per second of training steps of ``architecture`` on sequences of ``length``, by the fastest step."""
    arguments = [str(data), "--user-dir", "fairseq_plugin", "--task", "language_modeling"]
    arguments += model_arguments(architecture, length)
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    task = tasks.setup_task(config.task)
    torch.manual_seed(1)
    model = task.build_model(config.model).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    criterion = task.build_criterion(config.criterion)
    tokens = torch.randint(task.dictionary.nspecial, len(task.dictionary), (max(1, TOKENS_PER_STEP // length), length))
    sample = {
        "net_input": {"src_tokens": tokens, "src_lengths": torch.full((len(tokens),), length)},
        "target": tokens.roll(-1, 1),
        "ntokens": tokens.numel(),
    }

    def step() -> float:
        started = time.perf_counter()
        loss, _, _ = criterion(model, sample)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started

    step()
    seconds = [step(), step()]
    while sum(seconds) < SECONDS:
        seconds.append(step())
    return tokens.numel() / min(seconds)


@script("lengths")
def main(arguments: list[str] | None = None) -> int:
    """Print one JSON object per measurement; returns the exit status."""
    parser = CommandParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="a data-bin folder; its dictionary alone is used")
    parser.add_argument(
        "--lengths", type=positive_int, nargs="+", default=[512, 2048, 8192], help="tokens per sequence"
    )
    chosen = parser.parse_args(arguments)
    check_dictionary(chosen.data, "DATA")
    for length in chosen.lengths:
        for architecture in ARCHITECTURES:
            speed = measure(chosen.data, architecture, length)
            measurement = {"architecture": architecture, "length": length, "tokens_per_second": round(speed, 1)}
            print(json.dumps(measurement), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
