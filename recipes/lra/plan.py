"""The trainings of a comparison: tasks, models of one size, one budget, and the commands they become."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.attention import supporting
from fairseq_plugin.models.long_range_arena import unit_dims

from ..shared.commands import python_command
from ..shared.comparison import Budget
from ..shared.reach import reach_arguments


class Task(NamedTuple):
    """One task of the Arena."""

    title: str  # in the papers' tables
    classes: int
    chance: float  # accuracy of guessing, per cent
    longest: int  # tokens of a sequence, without the first one that stands for the whole
    sequences: int = 1
    first_token: bool = True  # a token that stands for the whole, rather than the mean over all


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
#: All others have their names as titles.
for _name in supporting("bidirectional"):
    MODELS.setdefault(_name, Model(_name, _name))


@dataclass(frozen=True, kw_only=True)
class Plan(Budget):
    """The budget of classifiers on one task."""

    task: str
    length: int  # of the longest sequence, the first token included
    batch_size: int

    def train_arguments(self, data: Path, name: str, seed: int) -> list[object]:
        """See ``Budget``."""
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
        """The architecture ``name`` in the plan's size: with as many parameters as a Transformer with an FFN of twice
        the width, and without dropout, since a short training repeats little."""
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
            *(*arguments, *MODELS[name].options, *reach_arguments(name, self.length), "--classifier-dim", ffn),
            *"--dropout 0.0 --attention-dropout 0.0 --activation-dropout 0.0".split(),
        ]


def task_arguments(task: str, data: Path, length: int) -> list[object]:
    """Arguments for a task and its data that fairseq-train and fairseq-validate both need."""
    kind = "sequence_pair_prediction" if TASKS[task].sequences > 1 else "sentence_prediction"
    return [
        *(data, "--user-dir", "fairseq_plugin", "--task", kind, "--criterion", "sentence_prediction"),
        *("--num-classes", TASKS[task].classes, "--max-positions", length),
        *(["--init-token", 0] if TASKS[task].first_token else []),
    ]


def validate_command(plan: Plan, data: Path, checkpoint: Path, split: str) -> list[str]:
    """fairseq-validate of a checkpoint on one split."""
    return python_command(
        *("-m", "fairseq_cli.validate", *task_arguments(plan.task, data, plan.length)),
        *("--path", checkpoint, "--valid-subset", split, "--batch-size", plan.batch_size),
        *"--required-batch-size-multiple 1 --num-workers 0 --log-format json".split(),
    )
