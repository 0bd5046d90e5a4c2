"""Time training steps of the models of the paper's Table 11 in turns, and show them over those of Transformer++.

``python -m recipes.flash.speed`` from the checkout's root; with ``LINEARTIME_CPU_KERNELS=0`` in front of it, sums of
Performer-Matmul are products of matrices on a CPU, too. Run again, it goes on where it was interrupted.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from common.ops.shared.cpu.dispatch import VARIABLE, has_numba, switched_on

from ..bench.harness.timing import interleave, ratio, synchronizer
from ..shared.comparison import Column, Results, by_length, table
from ..shared.experiment import PARAMETERS, Data, Experiment, Options, Record, mean, option
from ..shared.json_files import read_json, write_json
from ..shared.tables import Table
from ..shared.working_folder import atomic_write
from .compare import numbers
from .measurements import ATTENTION, FUSED, TITLE
from .models import MODELS, SHAPE, Shape
from .widths import build, equal_widths

COMMAND = "recipes.flash.speed"
#: The rows of Table 11: Performer and Performer-Matmul are one model.
TABLE_11 = (FUSED, "performer_lm.scan", "performer_lm", "flash_lm")
#: The time of one thread on a processor hardly depends on other work on the machine; of several threads it is a sum.
CLOCKS = {"processor time": time.process_time, "time": time.perf_counter}


@dataclass(frozen=True, kw_only=True)
class Steps(Options):
    """The options: models and lengths, and the size of a step and of every model."""

    models: Sequence[str] = option(
        TABLE_11, "default: %(default)s", setting=False, nargs="+", choices=MODELS, metavar="NAME"
    )
    lengths: Sequence[int] = option(
        (512, 1024, 2048), "default: 512,1024,2048", quick=[64, 128], setting=False, type=numbers
    )
    seeds: int = option(3, "runs at each length (%(default)s)", setting=False)
    jobs: int = 1
    tokens: int = option(2048, "of a step (%(default)s); at least one sequence", quick=128)
    width: int = option(SHAPE.width, "of every model (%(default)s)", quick=32)
    layers: int = option(SHAPE.layers, "of every model (%(default)s)")
    heads: int = option(SHAPE.heads, "of every model (%(default)s)")
    vocabulary: int = option(2000, "subwords (%(default)s)")

    def completed(self) -> "Steps":
        """The options.

        Raises:
            ValueError: no Transformer++, over whose times all others are shown.
        """
        if FUSED not in self.models:
            raise ValueError(f"--models is {' '.join(self.models)}; allowed: {FUSED}, and others beside it")
        return self

    def as_dict(self) -> Record:
        """See ``Options``; the lengths, which may be added later."""
        return {**super().as_dict(), "lengths": list(self.lengths)}

    def batch(self, length: int) -> int:
        """Sequences in a step."""
        return max(1, self.tokens // length)

    def arguments(self, name: str, widths: dict[str, int]) -> list[str]:
        """The options of fairseq-train for a model."""
        return Shape(self.width, self.layers, self.heads).arguments(name, widths.get(name))


def prepare(options: Steps) -> Data:
    """A dictionary of so many symbols; the facts are the inner ``widths`` of models, and what the machine uses."""
    dictionary = Dictionary()
    for i in range(options.vocabulary - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    with atomic_write(options.out / "dict.txt") as part:
        dictionary.save(str(part))
    shape = Shape(options.width, options.layers, options.heads)
    equal = [name for name in options.models if MODELS[name].shape is None]
    widths = equal_widths(options.out, equal, options.lengths[0], shape)
    threads, kernels = torch.get_num_threads(), switched_on() and has_numba()
    clock = "processor time" if threads == 1 and not torch.cuda.is_available() else "time"
    return Data(options.out, {"widths": widths, "threads": threads, "kernels": kernels, "clock": clock})


def train(options: Steps, data: Data) -> Results:
    """The records of all runs; one that is stored of the same models, threads and kernels is not repeated."""
    runs = [(length, seed) for seed in range(1, options.seeds + 1) for length in options.lengths]
    records: list[Record] = []
    made_with = {"models": list(options.models), **{name: data.facts[name] for name in ("threads", "kernels", "clock")}}
    for length, seed in tqdm(runs, desc="runs", unit="", disable=None):
        path = options.out / "runs" / f"{length}.{seed}.json"
        if not path.exists() or read_json(path, made_with=dict)["made_with"] != made_with:
            write_json(path, {"made_with": made_with, "times": measure(options, data, length, seed)})
        records += read_json(path, times=list)["times"]
    return Results(sorted(records, key=lambda record: options.models.index(record["model"])), {})


def measure(options: Steps, data: Data, length: int, seed: int) -> list[Record]:
    """A record of each model: the median ``seconds`` of a step, and the median ``ratio`` to Transformer++'s."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    models = {}
    for name in options.models:
        models[name] = build(data.folder, options.arguments(name, data.facts["widths"]), length).to(device)
    tokens = torch.randint(4, options.vocabulary, (options.batch(length), length + 1)).to(device)
    steps = [_step(model, tokens) for model in models.values()]
    times = interleave(steps, synchronizer(device), CLOCKS[data.facts["clock"]])
    fused = times[options.models.index(FUSED)]
    return [
        {"model": name, "seed": seed, "length": length}
        | {"parameters": sum(weight.numel() for weight in model.parameters())}
        | {"seconds": statistics.median(rounds), "ratio": ratio(fused, rounds)}
        | {"tokens_per_second": options.batch(length) * length / statistics.median(rounds)}
        for (name, model), rounds in zip(models.items(), times)
    ]


def _step(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    """A function that computes the loss of ``tokens`` (B, n + 1) and all gradients, without an update."""

    def step() -> None:
        scores, _ = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()

    return step


def columns(options: Steps, facts: Record) -> list[Column]:
    """The columns of ratios."""
    return [TITLE, ATTENTION, PARAMETERS, *by_length(options.lengths, mean("ratio"))]


def notes(options: Steps, facts: Record) -> list[str]:
    """Notes below the ratios."""
    kernels = "on; they compute the sums of Performer" if facts["kernels"] else "off"
    return [
        f"median {facts['clock']} of loss and gradients of {options.tokens:,} tokens, without an update, over that of "
        f"Transformer++ in the same rounds: models run in turns; mean ± standard deviation; runs: {options.seeds}",
        "Table 11 has Performer (scan) as Performer, and Performer as Performer-Matmul",
        f"{options.layers} layers (FLASH twice as many units) of width {options.width}, {options.heads} heads, "
        f"{options.vocabulary:,} subwords, which are random; threads: {facts['threads']}",
        f"kernels for CPUs ({VARIABLE}): {kernels}",
    ]


def extra_tables(options: Steps, facts: Record, records: list[Record]) -> list[Table]:
    """The seconds behind the ratios."""
    title, seconds = f"Seconds per step of {options.tokens:,} tokens", by_length(options.lengths, mean("seconds", 3))
    return [table(title, [TITLE, *seconds], options.models, Results(records, {}), [])]


EXPERIMENT = Experiment(
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=Steps,
    title="Time of a training step over Transformer++'s, by sequence length",
    columns=columns,
    notes=notes,
    prepare=prepare,
    train=train,
    extra_tables=extra_tables,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
