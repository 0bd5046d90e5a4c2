"""Tasks and models of the Long Range Arena, the options of their comparison, and its commands."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.attention import supporting
from fairseq_plugin.models.long_range_arena import unit_dims

from ..shared.commands import python_command
from ..shared.experiment import Budget, option
from ..shared.scaled_windows import scaled_window_arguments
from ..shared.scripts import positive_int


class Task(NamedTuple):
    """One task of the Arena."""

    title: str  # in the papers' tables
    classes: int
    chance: float  # accuracy of guessing, per cent
    longest: int  # tokens of a sequence, without the first token, which represents the whole sequence
    sequences: int = 1
    first_token: bool = True  # classify the first token instead of the mean over all


TASKS = {
    "listops": Task("ListOps", 10, 10.0, 1_999),
    "text": Task("Text", 2, 50.0, 1_000),
    "retrieval": Task("Retrieval", 2, 50.0, 4_000, sequences=2),
    "image": Task("Image", 10, 10.0, 1_024),
    "pathfinder": Task("Pathfinder", 2, 50.0, 1_024, first_token=False),
}


class Model(NamedTuple):
    """A row of the tables."""

    title: str
    architecture: str  # the beginning of its name, before _lra_TASK
    options: tuple[str, ...] = ()  # of fairseq-train


MODELS = {
    "softmax": Model("Transformer, softmax", "softmax"),
    "flow": Model("Flowformer", "flowformer"),
    "linear": Model("linear attention", "linear"),
    "flash": Model("FLASH, gated attention units", "flash"),
    "daft_full": Model("DAFT-full", "daft_full"),
    "daft_conv": Model("DAFT-conv", "daft_conv"),
    "mixed_chunk": Model("mixed chunk attention", "mixed_chunk"),
    "quadratic": Model("relu² attention", "quadratic"),
    "cosformer": Model("cosFormer", "cosformer"),
    "favor": Model("FAVOR+", "favor"),
    "rfa": Model("RFA", "rfa"),
    "local": Model("local attention", "local"),
    "longformer": Model("Longformer", "longformer"),
    "bigbird": Model("BigBird", "bigbird"),
    "sparse": Model("Sparse Transformer", "sparse"),
    "nystrom": Model("Nyströmformer", "nystrom"),
    "reformer": Model("Reformer", "reformer"),
    "yoso": Model("YOSO-E", "yoso"),
    "linformer": Model("Linformer", "linformer"),
    "synthesizer": Model("Synthesizer", "synthesizer"),
    "sinkhorn": Model("Sinkhorn", "sinkhorn"),
}


def _flowformer(title: str, *options: str) -> Model:
    return Model(f"Flowformer, {title}", "flowformer", options)


#: Reduced and other forms of Flow-Attention, in the Flowformer paper's Tables 2, 10 and 11.
ABLATIONS = {
    "flow+no_competition": _flowformer("without competition", "--flow-competition", "none"),
    "flow+no_allocation": _flowformer("without allocation", "--flow-allocation", "none"),
    "flow+elu": _flowformer("features elu + 1", "--flow-phi", "elu+1"),
    "flow+relu": _flowformer("features relu", "--flow-phi", "relu"),
    "flow+sigmoid_sigmoid": _flowformer("competition sigmoid, allocation sigmoid", "--flow-competition", "sigmoid"),
    "flow+sigmoid_softmax": _flowformer(
        "competition sigmoid, allocation softmax", *"--flow-competition sigmoid --flow-allocation softmax".split()
    ),
    "flow+softmax_softmax": _flowformer("competition softmax, allocation softmax", "--flow-allocation", "softmax"),
}
MODELS |= ABLATIONS
#: The rows of the paper's tables, in their order; Flowformer itself has sigmoid features and softmax competition with
#: sigmoid allocation.
TABLES = {
    "2": [
        *("local", "linear", "reformer", "sparse", "sinkhorn", "linformer", "favor", "synthesizer", "longformer"),
        *("softmax", "bigbird", "cosformer", "flow+no_competition", "flow+no_allocation", "flow"),
    ],
    "10": ["flow+elu", "flow+relu", "flow"],
    "11": ["flow+sigmoid_sigmoid", "flow+sigmoid_softmax", "flow+softmax_softmax", "flow"],
}
#: All other models have their names as titles.
for _name in supporting("bidirectional"):
    MODELS.setdefault(_name, Model(_name, _name))


@dataclass(frozen=True, kw_only=True)
class Arena(Budget):
    """The options of classifiers on one task."""

    task: str = option("listops", choices=tuple(TASKS))
    data: Path | None = option(
        None, "the folder that a prepare command wrote; default: a ListOps that is generated", setting=False, type=Path
    )
    models: Sequence[str] = option(
        ("softmax", "flow", "linear", "flash", "daft_conv", "mixed_chunk"),
        setting=False,
        group="rows",
        nargs="+",
        choices=MODELS,
    )
    table: str | None = option(
        None, "the rows of this table of the Flowformer paper, as --models", setting=False, group="rows", choices=TABLES
    )
    length: int | None = option(
        None, "tokens of the longest sequence, with the first; default: the task's", type=positive_int
    )
    updates: int = option(1_500, quick=8)
    batch_size: int = option(32)
    layers: int = option(1)
    heads: int = option(2)
    speed_lengths: Sequence[int] = option(
        (1024, 2048, 3072, 4096),
        "lengths to time; default: %(default)s",
        quick=[64, 128],
        setting=False,
        nargs="+",
        type=positive_int,
    )
    speed_batch: int = option(2, "sequences in a timed step (%(default)s)", setting=False)

    def completed(self) -> "Arena":
        """Fill in the models of ``--table`` and the length of the task; see ``Options``."""
        if self.data is None and self.task != "listops":
            raise ValueError(f"--task is {self.task} without --data; allowed: the folder of its prepare command, too")
        if self.data is not None and not (self.data / "data-bin").is_dir():
            raise ValueError(f"--data is {self.data}, which has no data-bin; allowed: what a prepare command wrote")
        models = self.models if self.table is None else TABLES[self.table]
        return dataclasses.replace(self, models=models, length=self.length or TASKS[self.task].longest + 1)

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """The arguments of fairseq-train for a model and a seed, without the folder of checkpoints."""
        return [
            *task_arguments(self.task, data, self.length),
            *self.model_arguments(name),
            *self.update_arguments(seed),
            *("--adam-eps", "1e-09", "--weight-decay", "0.1", "--lr-scheduler", "polynomial_decay"),
            *("--warmup-updates", max(1, self.updates // 10), "--total-num-update", self.updates),
            *("--batch-size", self.batch_size, "--valid-subset", "valid,test"),  # the first one selects
            *"--best-checkpoint-metric accuracy --maximize-best-checkpoint-metric".split(),
        ]

    def model_arguments(self, name: str) -> list[object]:
        """The architecture ``name`` in the size of the options: as many parameters as a Transformer with an FFN of
        twice the width, and no dropout, since a short training repeats little data."""
        ffn = 2 * self.width
        arguments = ["--arch", f"{MODELS[name].architecture}_lra_{self.task}", "--encoder-embed-dim", self.width]
        if name == "flash":
            query, inner = unit_dims(self.width, self.width, ffn)
            arguments += ["--encoder-layers", 2 * self.layers, "--encoder-attention-heads", 1]
            arguments += ["--encoder-ffn-embed-dim", inner, "--flash-query-dim", query]
        else:
            arguments += ["--encoder-layers", self.layers, "--encoder-attention-heads", self.heads]
            arguments += ["--encoder-ffn-embed-dim", ffn, "--encoder-attention-dim", self.width]
        return [
            *(*arguments, *MODELS[name].options, *scaled_window_arguments(name, self.length), "--classifier-dim", ffn),
            *"--dropout 0.0 --attention-dropout 0.0 --activation-dropout 0.0".split(),
        ]

    def validate_command(self, data: Path, checkpoint: Path, split: str = "test") -> list[str]:
        """fairseq-validate of a checkpoint on one split."""
        return python_command(
            *("-m", "fairseq_cli.validate", *task_arguments(self.task, data, self.length)),
            *("--path", checkpoint, "--valid-subset", split, "--batch-size", self.batch_size),
            *"--required-batch-size-multiple 1 --num-workers 0 --log-format json".split(),
        )

    def speed_arguments(self) -> list[object]:
        """The command line of ``recipes.lra.speed``."""
        return [
            *(
                "--models",
                *self.models,
                "--lengths",
                *sorted(set(self.speed_lengths)),
                "--batch-size",
                self.speed_batch,
            ),
            *("--trained-length", self.length, "--task", self.task),
            *("--width", self.width, "--layers", self.layers, "--heads", self.heads),
        ]


def task_arguments(task: str, data: Path, length: int) -> list[object]:
    """Arguments for a task and its data that fairseq-train and fairseq-validate both need."""
    kind = "sequence_pair_prediction" if TASKS[task].sequences > 1 else "sentence_prediction"
    return [
        *(data, "--user-dir", "fairseq_plugin", "--task", kind, "--criterion", "sentence_prediction"),
        *("--num-classes", TASKS[task].classes, "--max-positions", length),
        *(["--init-token", 0] if TASKS[task].first_token else []),
    ]
