"""The text half: train fairseq's transformer_lm on a text, then our models from its weights and from random ones."""

from pathlib import Path

from ..shared import fairseq_log
from ..shared.commands import python_command
from ..shared.comparison import NO_READER, PlannedTraining, Results, train_and_read
from ..shared.experiment import Record
from ..shared.fairseq_training import last_validation, train
from ..shared.json_files import measured, read_json
from ..shared.trainings import PROGRAM, Training, TrainingResult
from .starts import RANDOM, STOCK, record, with_both_starts

#: The stock model, and ours.
SOURCE, NAMES = f"transformer_lm.{RANDOM}", with_both_starts(("flowformer_lm", "linear_lm"))
LENGTH, TOKENS_PER_UPDATE = 512, 4096
#: One shape for all; ``--decoder-normalize-before`` is for transformer_lm, whose default is post-norm.
SHAPE = [
    *("--decoder-embed-dim", 128, "--decoder-input-dim", 128, "--decoder-output-dim", 128),
    *("--decoder-ffn-embed-dim", 512, "--decoder-layers", 2, "--decoder-attention-heads", 4),
    *("--decoder-normalize-before", "--share-decoder-input-output-embed", "--dropout", 0.1),
]
_LOG_POINTS = 20
#: In the folder of a training: the loss of its start.
_BEFORE = "before.json"


def train_arguments(data: Path, architecture: str, updates: int, lr: float, *more: object) -> list[object]:
    """Arguments of fairseq-train with one validation, at the end."""
    return [
        *(data, "--user-dir", "fairseq_plugin", "--task", "language_modeling"),
        *("--arch", architecture, *SHAPE, "--tokens-per-sample", LENGTH, "--sample-break-mode", "none"),
        *("--max-tokens", TOKENS_PER_UPDATE, *NO_READER),
        *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.01", "--clip-norm", "1.0"),
        *("--lr", lr, "--lr-scheduler", "polynomial_decay"),
        *("--warmup-updates", max(1, updates // 10), "--total-num-update", updates, "--max-update", updates),
        *("--validate-interval", 1_000_000, "--seed", 1),
        *("--log-interval", max(1, updates // _LOG_POINTS), *more),
    ]


def validation_loss(log: Path, updates: int) -> float:
    """The loss on the valid split at the end of a training of ``updates`` updates, in bits per token.

    Raises:
        ValueError: its log does not end with a validation.
    """
    points = fairseq_log.parse_training(log.read_text(encoding="utf-8").splitlines())
    return last_validation(points, log, updates).values["loss"]


def compare_text(runs: Path, data: Path, source_updates: int, updates: int) -> Results:
    """Train the stock model, then ours from its weights and from random ones, unless ``runs`` has them; a record each.

    Raises:
        ValueError: a log does not end with a validation.
    """

    def arguments(name: str, updates: int, lr: float = 0.003) -> list[object]:
        model, start = name.split(".")
        if name == SOURCE:
            return train_arguments(data, model, updates, lr, "--no-epoch-checkpoints")
        checkpoint = runs / SOURCE / "checkpoints" / "checkpoint_last.pt"
        flags = ("--finetune-from-model", checkpoint) if start == STOCK else ()
        return train_arguments(data, model, updates, lr, "--no-save", *flags)

    def measure_start(folder: Path) -> None:
        def loss() -> dict[str, float]:
            # An update with a learning rate of 0 changes nothing, so the validation after it is that of the start.
            first = [*arguments(folder.name, 1, 0.0), "--save-dir", folder / "checkpoints", "--log-format", "json"]
            train(python_command(*PROGRAM, *first), folder / "before.log", 1, f"{folder.name}, before")
            return {"before": validation_loss(folder / "before.log", 1)}

        measured(folder / _BEFORE, loss, dict[str, float])

    def read(name: str, seed: int, folder: Path, trained: TrainingResult) -> Record | None:
        if name != SOURCE and not (folder / _BEFORE).exists():
            return None
        before = {} if name == SOURCE else read_json(folder / _BEFORE, before=float)
        return record(name, {**before, "after": validation_loss(folder / "train.log", lasts[name])})

    def planned(name: str) -> PlannedTraining:
        return PlannedTraining(name, 1, Training(name, arguments(name, lasts[name]), threads=None))

    lasts = {SOURCE: source_updates} | dict.fromkeys(NAMES, updates)
    source = train_and_read([planned(SOURCE)], runs, 1, read)
    if source.missing:
        return source
    ours = train_and_read([planned(name) for name in NAMES], runs, 1, read, measure_start)
    return ours._replace(outcomes=[*source.outcomes, *ours.outcomes])
