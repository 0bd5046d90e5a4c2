"""Steps per second and memory of training and inference at several lengths, all models in turns.

``python -m recipes.lra.speed --lengths 1024 2048 ...`` prints them as JSON. ``recipes.lra.compare`` runs this command
in a separate process, so that its memory is free again for the trainings.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from fairseq import tasks
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import fairseq_plugin  # noqa: F401  registers the architectures
from common.command_parser import CommandParser
from fairseq_plugin.data.pixels import FIRST_TOKEN

from ..bench.harness.memory import peak_beyond
from ..bench.harness.timing import interleave, ratio, synchronizer
from ..shared.fairseq_models import model_options
from ..shared.scripts import positive_int, script
from .examples import symbol_dictionary
from .listops_rules import SYMBOLS
from .plan import MODELS, TASKS, Arena, task_arguments

TRAINING, INFERENCE = "training", "inference"


class Speed(NamedTuple):
    """One model at one length."""

    model: str
    length: int
    kind: str  # TRAINING or INFERENCE
    steps_per_second: float  # the median
    faster: float | None  # speed relative to softmax in the same rounds; None without softmax
    peak_bytes: int  # of a step, without the weights and their gradients


def measure(options: Arena, lengths: list[int], batch_size: int) -> list[Speed]:
    """Measure every model of ``options`` at every length; a step has ``batch_size`` sequences of random symbols."""
    speeds = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    bar = tqdm(total=2 * len(lengths), desc="speed", unit="", disable=None)
    for length in lengths:
        models = {name: build(options, name, length).to(device) for name in options.models}
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(FIRST_TOKEN, FIRST_TOKEN + len(SYMBOLS), (batch_size, length), generator=generator)
        labels = torch.randint(0, TASKS[options.task].classes, (batch_size,), generator=generator)
        tokens, labels = tokens.to(device), labels.to(device)
        for kind in (TRAINING, INFERENCE):
            steps = {name: _step(model, tokens, labels, kind) for name, model in models.items()}
            times = dict(zip(steps, interleave(list(steps.values()), synchronizer(device))))
            for name, step in steps.items():
                median = sorted(times[name])[len(times[name]) // 2]
                faster = ratio(times[name], times["softmax"]) if "softmax" in times else None
                speeds.append(Speed(name, length, kind, 1.0 / median, faster, peak_beyond(step, device)))
            bar.update()
    bar.close()
    return speeds


def build(options: Arena, name: str, length: int) -> nn.Module:
    """The model ``name`` for sequences of ``length`` symbols, as fairseq-train builds it."""
    command = [*task_arguments(options.task, Path("data"), length), *options.model_arguments(name)]
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=symbol_dictionary(SYMBOLS), max_positions=lambda: length)
    model = tasks.FairseqTask.build_model(task, model_options(command))
    model.register_classification_head("head", num_classes=TASKS[options.task].classes)
    return model


def _step(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, kind: str):
    """A function that runs one step; a training step computes the loss and all gradients, without an update."""

    def train() -> list[torch.Tensor]:
        model.train()
        scores, _ = model(tokens, classification_head_name="head")
        loss = F.cross_entropy(scores, labels)
        for parameter in model.parameters():
            parameter.grad = None
        loss.backward()
        return [loss, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    def infer() -> list[torch.Tensor]:
        model.eval()
        with torch.no_grad():
            return [model(tokens, classification_head_name="head")[0]]

    return train if kind == TRAINING else infer


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.lra.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["softmax", "flow"], help="default: %(default)s")
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[1024, 2048], help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=1, help="default: %(default)s")
    parser.add_argument(
        "--trained-length",
        type=positive_int,
        default=2000,
        metavar="TOKENS",
        help="length that windows and chunks are chosen for (%(default)s)",
    )
    parser.add_argument("--task", choices=TASKS, default="listops", help="default: %(default)s")
    for name, default in {"width": 64, "layers": 2, "heads": 2}.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    return parser


@script("speed")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parsed = parser().parse_args(arguments)
    sizes = {name: getattr(parsed, name) for name in ("models", "task", "width", "layers", "heads")}
    speeds = measure(Arena(**sizes, length=parsed.trained_length), parsed.lengths, parsed.batch_size)
    print(json.dumps([speed._asdict() for speed in speeds]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
