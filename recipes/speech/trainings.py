"""The models of a comparison on speech, and their trainings, which begin with each other's checkpoints."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from common.attention import ATTENTIONS

from ..shared.architectures import known_names
from ..shared.comparison import PlannedTraining, Results, train_and_read
from ..shared.experiment import Budget, Data, Record, option
from ..shared.json_files import measured
from ..shared.scripts import positive_int
from ..shared.trainings import Training, TrainingResult, read_parameters
from . import prepare
from .recognise import Read, recognise
from .recordings import RATE
from .transfer import learns_maps, write_converted, write_joined, write_teacher

SUFFIX = "_wav2vec2"
#: fairseq's own model, and the teacher of attention transfer.
STOCK = "wav2vec2"
MODELS = (STOCK, "flowformer", "linear", "hedgehog", "local", "mixed_chunk")
TRANSFERRED = ("hedgehog", "flowformer")
#: Stages of a transfer -> their columns. All but the first are trainings.
STAGES = {"exchanged": "exchanged", "transfer": "after transfer", "tuned": "after fine-tuning"}
#: The convolutions of the feature extractor: 320 samples are a frame.
EXTRACTOR = "[(64, 40, 20), (64, 8, 4), (96, 8, 4)]"
FRAMES_PER_SECOND = 50
LAST, BEST = (Path("checkpoints") / f"checkpoint_{name}.pt" for name in ("last", "best"))


def attention(without: Sequence[str] = ()) -> Callable[[str], str]:
    """The type of an option: an architecture without ``SUFFIX``, or ``STOCK``, but none of ``without``."""
    allowed = [name for name in (STOCK, *known_names(SUFFIX)) if name not in ("hybrid", *without)]

    def model(name: str) -> str:
        if name not in allowed:
            raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(allowed)}")
        return name

    return model


def of_data(name: str, **arguments: object) -> object:
    """An option of the data, as in ``prepare``."""
    return option(getattr(prepare.Settings(), name), prepare.HELP[name], **arguments)


@dataclass(frozen=True, kw_only=True)
class Speech(Budget):
    """The options of the speech, and of models of CTC that learn from it."""

    most_evaluations: ClassVar[int] = 4

    file: Path | None = of_data("file", setting=False, type=Path)
    voices: Sequence[str] = of_data("voices", nargs="+", metavar="VOICE")
    speed: int = of_data("speed")
    sentences: int = of_data("sentences", quick=60)
    seconds: int = of_data("seconds")
    lengths: Sequence[int] = of_data("lengths", quick=[5, 10], nargs="+", type=positive_int, metavar="SECONDS")
    train: int = of_data("train", quick=8)
    test_seconds: int = of_data("test_seconds", quick=10)
    recordings: Path | None = of_data("recordings", setting=False, type=Path)
    models: Sequence[str] = option(
        MODELS,
        f"architectures without {SUFFIX}, and {STOCK}, fairseq's own; default: %(default)s",
        setting=False,
        nargs="+",
        type=attention(),
        metavar="NAME",
    )
    transfer: Sequence[str] = option(
        TRANSFERRED,
        f"attentions that learn from those of the trained {STOCK}; default: %(default)s",
        setting=False,
        nargs="*",
        type=attention([STOCK, "softmax"]),
        metavar="NAME",
    )
    updates: int = option(300, "of every model of CTC (%(default)s)", quick=4)
    pretraining_updates: int = option(5, "of the wav2vec 2.0 that all begin with (%(default)s)", quick=2)
    transfer_updates: int = option(50, "of attention transfer, and then of fine-tuning, each (%(default)s)", quick=2)
    lr: float = option(2e-3, "highest learning rate, of all models (%(default)s)")
    tuning_lr: float = option(5e-4, "highest learning rate after a transfer (%(default)s)")
    batch_seconds: int = option(20, "of audio in a batch (%(default)s)")
    width: int = option(128)
    layers: int = option(2)

    def settings(self) -> Record:
        """See ``Options``; with the names of what is read."""
        names = {name: getattr(self, name) for name in ("file", "recordings")}
        return {**{name: path and Path(path).name for name, path in names.items()}, **super().settings()}

    @property
    def data(self) -> prepare.Settings:
        """The settings of the data."""
        return prepare.Settings(**{name: getattr(self, name) for name in prepare.Settings._fields if name != "seed"})

    def size_arguments(self) -> list[object]:
        """The arguments of a wav2vec 2.0 without its attention."""
        sizes = [
            *("--conv-feature-layers", EXTRACTOR, "--extractor-mode", "layer_norm", "--layer-norm-first"),
            *("--encoder-layers", self.layers, "--encoder-embed-dim", self.width, "--conv-pos", 32),
            *("--encoder-ffn-embed-dim", 3 * self.width, "--encoder-attention-heads", self.heads),
            *("--conv-pos-groups", 8, "--final-dim", 32, "--quantize-targets", "--latent-vars", 32),
        ]
        # A short training repeats little, so it needs no dropout.
        off = "dropout attention-dropout dropout-input dropout-features encoder-layerdrop".split()
        return [*sizes, *(word for name in off for word in (f"--{name}", 0))]

    def arguments(self, data: Path, seed: int, updates: int, lr: float, *of_task: object) -> list[object]:
        """The arguments of a training of ``updates``."""
        budget = Budget(updates=updates, lr=lr).update_arguments(seed)
        return [
            *(data, "--user-dir", "fairseq_plugin", *of_task, *budget, "--normalize"),
            *("--max-tokens", self.batch_seconds * RATE, "--lr-scheduler", "cosine"),
            *("--warmup-updates", max(1, round(0.3 * updates))),
        ]

    def pretraining(self, data: Path, seed: int) -> list[object]:
        """The arguments of the training of the wav2vec 2.0 that all models of a seed begin with."""
        of_task = ["--task", "audio_pretraining", "--arch", STOCK, *self.size_arguments()]
        of_task += ["--criterion", "wav2vec", "--infonce", "--loss-weights", "[0.1, 10]", "--disable-validation"]
        return self.arguments(data, seed, self.pretraining_updates, self.lr / 4, *of_task)

    def ctc(self, data: Path, encoder: Path, seed: int, joined: Path | None = None) -> list[object]:
        """The arguments of a training with CTC from the wav2vec 2.0 ``encoder``, or from all of ``joined``."""
        of_task = ["--task", "audio_finetuning", "--labels", "ltr", "--arch", "wav2vec_ctc", "--w2v-path", encoder]
        of_task += ["--feature-grad-mult", 1.0, "--criterion", "ctc", "--post-process", "letter", "--zero-infinity"]
        of_task += ["--best-checkpoint-metric", "uer"]
        updates, lr = self.updates, self.lr
        if joined is not None:
            of_task += ["--finetune-from-model", joined]
            updates, lr = self.transfer_updates, self.tuning_lr
        return self.arguments(data, seed, updates, lr, *of_task)

    def transferring(self, data: Path, name: str, seed: int, start: Path, teacher: Path) -> list[object]:
        """The arguments of attention transfer from ``teacher`` to ``start``, which has other attentions."""
        learning = "new" if learns_maps(start) else "attention"
        of_task = ["--task", "audio_pretraining", "--arch", name + SUFFIX, *self.size_arguments(), "--mask-prob", 0]
        of_task += [word for option, value in self.overrides(name).items() for word in (flag(option), value)]
        of_task += ["--criterion", "attention_transfer", "--teacher", teacher, "--finetune-from-model", start]
        of_task += ["--lineartime-trained-parameters", learning, "--disable-validation"]
        return self.arguments(data, seed, self.transfer_updates, self.lr, *of_task)

    def overrides(self, name: str) -> dict[str, int]:
        """Options of an attention that has a constant for each frame: the frames of the longest recording."""
        needs = getattr(ATTENTIONS.get(name), "needs", ())
        return {"lineartime_max_frames": FRAMES_PER_SECOND * max(self.lengths)} if "max_tokens" in needs else {}


def flag(name: str) -> str:
    """The option of fairseq-train for a name in a configuration."""
    return f"--{name.replace('_', '-')}"


class Transferred(NamedTuple):
    """Character errors of a teacher with another attention, by stage; in per cent, of the shortest recordings."""

    cer: dict[str, float]


class Trainings:
    """The trainings of an experiment in its folder, one seed after another, and what their models read."""

    def __init__(self, options: Speech, data: Data) -> None:
        self.options, self.data, self.runs = options, data.folder, options.out / "runs"
        self.pretrained_on = data.folder if options.recordings is None else options.out / "recordings"
        self.records: list[Record] = []
        self.failed: dict[str, str] = {}
        self.missing, self.interrupted = 0, False

    def run(self) -> Results:
        """Train and measure what is missing; returns a record of each model and seed, and of each transfer."""
        for seed in range(1, self.options.seeds + 1):
            start = {"start": self.options.pretraining(self.pretrained_on, seed)}
            if self._train(start, seed, self._known):
                self._train_models(seed)
                self._transfer(seed)
        order = [*self.options.models, *map(transfer_name, self.options.transfer)]
        records = sorted(self.records, key=lambda record: order.index(record["model"]))
        return Results(records, self.failed, self.missing, self.interrupted)

    def _train(self, arguments: dict[str, list[object]], seed: int, read: Callable) -> list[Record]:
        """Train all of ``arguments`` by name, unless the run was interrupted; returns what ``read`` makes of them."""
        if self.interrupted:
            self.missing += len(arguments)
            return []
        planned = [PlannedTraining(x, seed, Training(f"{x}.{seed}", words)) for x, words in arguments.items()]
        trained = train_and_read(planned, self.runs, self.options.jobs, read)
        self.failed |= trained.failed
        self.missing, self.interrupted = self.missing + trained.missing, trained.interrupted
        return trained.outcomes

    def _folder(self, name: str, seed: int) -> Path:
        return self.runs / f"{name}.{seed}"

    def _file(self, name: str, seed: int) -> Path:
        return self.runs / f"{name}.{seed}.pt"

    def _known(self, name: str, seed: int, folder: Path, trained: TrainingResult) -> Record:
        """The part of a record that every training has."""
        known = {"model": name, "seed": seed, "parameters": read_parameters(folder), "seconds": trained.seconds}
        return known | {"peak_bytes": trained.peak_bytes, "command": trained.command}

    def _train_models(self, seed: int) -> None:
        """Train the models with CTC, and let them read the test recordings of all lengths."""
        options, start = self.options, self._folder("start", seed) / LAST
        arguments = {}
        for name in options.models:
            encoder = start if name == STOCK else self._file(f"{name}.start", seed)
            if name != STOCK:
                write_converted(start, encoder, name + SUFFIX, options.overrides(name))
            arguments[name] = options.ctc(self.data, encoder, seed)

        def read(name: str, seed: int, folder: Path, trained: TrainingResult) -> Record:
            lengths = [*options.lengths]
            result = measured(
                folder / "read.json",
                lambda: {"lengths": [x._asdict() for x in recognise(folder / BEST, self.data, lengths, seed == 1)]},
                dict[str, list[Read]],
            )
            return self._known(name, seed, folder, trained) | {"read": [x._asdict() for x in result["lengths"]]}

        self.records += self._train(arguments, seed, read)

    def _transfer(self, seed: int) -> None:
        """Give the trained stock model other attentions, which learn from its own, and then fine-tune it."""
        options, start, tuned = self.options, self._folder("start", seed) / LAST, self._folder(STOCK, seed) / BEST
        if self.interrupted or not (self._folder(STOCK, seed) / "result.json").exists():
            self.missing += len(options.transfer)
            return
        teacher = self._file("teacher", seed)
        write_teacher(start, tuned, teacher)
        transfers = {}
        for name in options.transfer:
            exchanged = self._file(f"{name}.exchanged", seed)
            write_converted(teacher, exchanged, name + SUFFIX, options.overrides(name))
            transfers[f"{name}.transfer"] = options.transferring(self.data, name, seed, exchanged, teacher)
        transferred = {record["model"].partition(".")[0] for record in self._train(transfers, seed, self._known)}
        tunings = {}
        for name in [name for name in options.transfer if name in transferred]:
            encoder = self._folder(f"{name}.transfer", seed) / LAST
            joined = self._file(f"{name}.joined", seed)
            write_joined(tuned, teacher, encoder, joined)
            write_joined(tuned, teacher, self._file(f"{name}.exchanged", seed), self._file(f"{name}.untrained", seed))
            tunings[f"{name}.tuned"] = options.ctc(self.data, encoder, seed, joined)
        self.records += self._train(tunings, seed, self._read_transferred)

    def _read_transferred(self, tuned: str, seed: int, folder: Path, trained: TrainingResult) -> Record:
        """The record of a transfer: the character errors of all of its stages."""
        name, shortest = tuned.partition(".")[0], [min(self.options.lengths)]
        files = [self._file(f"{name}.untrained", seed), self._file(f"{name}.joined", seed), folder / BEST]

        def read() -> Record:
            return {"cer": {x: recognise(file, self.data, shortest, False)[0].cer for x, file in zip(STAGES, files)}}

        result = measured(folder / "read.json", read, Transferred)
        return self._known(transfer_name(name), seed, folder, trained) | result._asdict()


def transfer_name(name: str) -> str:
    """The model in the records of a transfer."""
    return f"{name} from {STOCK}"
