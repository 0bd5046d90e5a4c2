"""Seconds of a training step at several lengths: ``python -m recipes.demo.lengths --help``.

Builds the models as fairseq-train does and times forward, backward and update on random tokens. A step has 4096 tokens,
or one sequence if that is longer, so that only the length changes along a row of the table.
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
#: Duration of the measurement; at least two steps are timed.
SECONDS = 4.0


def measure(data: Path, architecture: str, length: int) -> float:
    """Training speed of ``architecture`` on sequences of ``length``: tokens per second of the fastest step."""
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
    parsed = parser.parse_args(arguments)
    check_dictionary(parsed.data, "DATA")
    for length in parsed.lengths:
        for architecture in ARCHITECTURES:
            speed = measure(parsed.data, architecture, length)
            measurement = {"architecture": architecture, "length": length, "tokens_per_second": round(speed, 1)}
            print(json.dumps(measurement), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
