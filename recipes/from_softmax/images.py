"""Make linear-time image models of a trained vision transformer, and print what of its lead each form wins back.

``python -m recipes.from_softmax.images`` from the checkout's root, on scikit-learn's handwritten digits, or with
``--cifar10 FILE`` on CIFAR-10. Models, loaders and tasks are timm's. Another run continues with the next form.
"""

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from timm.loss import LabelSmoothingCrossEntropy
from timm.task import ClassificationTask, LogitDistillationTask, TrainingTask
from timm.utils import random_seed
from torch import nn
from tqdm import tqdm

from common.checkpoints import read_checkpoint
from common.files import tensor_files
from common.files.output_files import new_folder

from ..shared.cifar10 import check_cifar10, read_labelled
from ..shared.comparison import Results, make_records
from ..shared.digits import write_digits
from ..shared.experiment import Data, Record, option
from ..shared.json_files import read_record
from ..shared.tables import counted
from ..shared.working_folder import atomic_write
from .image_models import ENTROPY, MODEL, PATCH, SIDE, build, exchange, losses, train, transfer_task
from .parts import PARTS, attending
from .results import TEST, Measure, experiment, with_shares
from .stages import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED, Stages, folder_name

COMMAND = "recipes.from_softmax.images"
#: The folder of the images.
IMAGES = "images"
#: The folder of trainings.
RUNS = "runs"
_DECAY, _SMOOTHING = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class ImageConversion(Stages):
    """The options of a teacher, which is trained for ``epochs``, and of its conversion."""

    cifar10: Path | None = option(
        None, "cifar-10-binary.tar.gz, in place of the digits", setting=False, type=Path, metavar="FILE"
    )
    epochs: int = option(40, "of the teacher (%(default)s)", quick=10)
    lr: float = option(2e-3, "highest, of the teacher and from scratch (%(default)s)")
    width: int = option(64)
    layers: int = option(4)
    heads: int = option(4)
    jobs: int = 1
    # The class token alone sees all, and is seen by all.
    sinks: int = option(1, "first tokens that longformer sees beside its window (%(default)s)")

    @property
    def images(self) -> str:
        """The name of the images."""
        return "digits" if self.cifar10 is None else "CIFAR-10"

    def completed(self) -> "ImageConversion":
        """The options; ValueError if a number or a form is invalid."""
        self.check(self.epochs, "--epochs")
        return self

    def settings(self) -> Record:
        """See ``Options``."""
        return {"data": self.images, **super().settings()}


class Learned(NamedTuple):
    """Stored results of the training of a teacher; see ``results``."""

    losses: dict[str, float]
    parameters: int
    seconds: float


class Made(NamedTuple):
    """Stored results of a form of a teacher; see ``results``."""

    parameters: int
    learned: int
    losses: dict[str, dict[str, float]]
    parts: dict[str, dict[str, float]]
    seconds: dict[str, float]


class Conversions:
    """Trains a teacher for each seed, converts it to each form, and keeps the results in the experiment's folder."""

    def __init__(self, options: ImageConversion, data: Data) -> None:
        self.options, self.runs, self.images = options, options.out / RUNS, data.folder

    def run(self) -> Results:
        """Train and measure what is missing; returns the records of the teachers, and of each form and seed."""
        names = [TEACHER, *self.options.models]
        paths = {
            (name, seed): self.runs / f"{folder_name(name, name, seed)}.json"
            for seed in range(1, self.options.seeds + 1)
            for name in names  # the teacher of a seed is trained before its forms
        }
        compared = make_records((path, functools.partial(self._make, *key)) for key, path in paths.items())
        records, teachers = [], {}
        for (name, seed), path in paths.items():
            if not path.exists():
                continue
            known = {"model": name, "seed": seed}
            if name == TEACHER:
                teachers[seed] = read_record(path, Learned)
                records.append(known | teachers[seed]._asdict())
            else:
                made = read_record(path, Made)._asdict()
                records.append(with_shares({**known, **made, "teacher": teachers[seed].losses, "commands": {}}))
        return compared._replace(outcomes=sorted(records, key=lambda record: names.index(record["model"])))

    def _make(self, name: str, seed: int) -> dict[str, Any]:
        """The results of a teacher or of a form for a seed."""
        return self._train_teacher(seed) if name == TEACHER else self._convert(name, seed)

    def _train_teacher(self, seed: int) -> dict[str, Any]:
        model = self._new(seed)
        seconds = self._train(TEACHER, _classification(model), seed, TEACHER)
        with atomic_write(self._weights(seed)) as part:
            tensor_files.save(model.state_dict(), part)
        return Learned(losses(model, self.images), _count(model), seconds)._asdict()

    def _teacher(self, seed: int) -> nn.Module:
        """The trained teacher of a seed."""
        model = self._new(seed)
        model.load_state_dict(read_checkpoint(self._weights(seed)))
        return model.eval()

    def _convert(self, name: str, seed: int) -> dict[str, Any]:
        """Convert the teacher of a seed to the form ``name``, and train the form from scratch; see ``Made``."""
        form, teacher = self.options.form(name), self._teacher(seed)
        random_seed(seed)
        transfer = transfer_task(teacher, form)
        stage_losses, seconds = {EXCHANGED: losses(transfer.get_eval_model(), self.images)}, {}
        learned = sum(x.numel() for x in transfer.get_trainable_module().parameters() if x.requires_grad)
        seconds[TRANSFERRED] = self._train(TRANSFERRED, transfer, seed, name)
        student = transfer.converted()
        stage_losses[TRANSFERRED] = losses(student, self.images)
        seconds[DISTILLED] = self._train(DISTILLED, self._distillation(student, teacher), seed, name)
        stage_losses[DISTILLED], parts = losses(student, self.images), {}
        for part in PARTS if form.windowed else ():
            with attending(student, part):
                parts[part] = losses(student, self.images)
        if not self.options.no_scratch:
            scratch = exchange(self._new(seed), form)
            seconds[SCRATCH] = self._train(SCRATCH, _classification(scratch), seed, name)
            stage_losses[SCRATCH] = losses(scratch, self.images)
        return Made(_count(student), learned, stage_losses, parts, seconds)._asdict()

    def _distillation(self, student: nn.Module, teacher: nn.Module) -> LogitDistillationTask:
        """Stage 2, as timm's own task."""
        return LogitDistillationTask(
            student,
            teacher,
            LabelSmoothingCrossEntropy(_SMOOTHING),
            distill_loss_weight=self.options.weight,
            task_loss_weight=1.0 - self.options.weight,
            temperature=self.options.temperature,
            verbose=False,
        )

    def _new(self, seed: int) -> nn.Module:
        return build(self.options.width, self.options.layers, self.options.heads, seed)

    def _weights(self, seed: int) -> Path:
        return self.runs / f"{folder_name(TEACHER, TEACHER, seed)}.pth"

    def _train(self, stage: str, task: TrainingTask, seed: int, name: str) -> float:
        """Train for the epochs of a stage; returns the seconds."""
        epochs, lr = self.options.lasts(self.options.epochs)[stage], self.options.rate(stage)
        decay = 0.0 if stage == TRANSFERRED else _DECAY
        return train(task, self.images, epochs, lr, decay, seed, f"{name}, {stage}, seed {seed}")


def _classification(model: nn.Module) -> ClassificationTask:
    return ClassificationTask(model, LabelSmoothingCrossEntropy(_SMOOTHING), verbose=False)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(options: ImageConversion) -> Data:
    """Write the images, a folder of files for each split and class, unless they exist.

    Raises:
        ValueError: ``--cifar10`` is not CIFAR-10's archive.
    """
    folder = options.out / IMAGES
    if folder.exists():
        return Data(folder, {})
    if options.cifar10 is not None:
        check_cifar10(options.cifar10)
    with new_folder(folder, COMMAND) as new:
        if options.cifar10 is None:
            write_digits(new)
        else:
            write_labelled(read_labelled(options.cifar10), new)
    return Data(folder, {})


def write_labelled(parts: dict[str, tuple[np.ndarray, np.ndarray]], folder: Path) -> None:
    """Write train and test images (N, H, W, C), uint8, as files below ``folder``/{train,validation}/LABEL."""
    for split, part in (("train", "train"), ("validation", "test")):
        images, labels = parts[part]
        for i, (image, label) in enumerate(zip(tqdm(images, desc=split, leave=False, disable=None), labels)):
            path = folder / split / str(label) / f"{i:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def teacher_notes(options: ImageConversion, facts: Record) -> list[str]:
    """Notes below the table of the teacher."""
    return [
        f"{MODEL} of timm for {SIDE} x {SIDE} pixels in patches of {PATCH} x {PATCH}, {options.layers} layers of width "
        f"{options.width}, {options.heads} heads; {options.images}, highest learning rate {options.lr:g}",
        "error of the held-out images after the last epoch, mean ± standard deviation over seeds",
    ]


def notes(options: ImageConversion, facts: Record) -> list[str]:
    """Notes below the table of the forms."""
    lasts = options.lasts(options.epochs)
    return [
        "error of the held-out images in per cent, mean ± standard deviation over seeds, each with its own teacher",
        "exchanged: the teacher's weights under another attention, before any update; stage 1: attention transfer, "
        f"{lasts[TRANSFERRED]} epochs, learning rate {options.transfer_lr:g}; stage 2: timm's LogitDistillationTask, "
        f"{lasts[DISTILLED]} epochs, learning rate {options.distillation_lr:g}, temperature {options.temperature:g}, "
        f"weight {options.weight:g}; from scratch: {lasts[SCRATCH]} epochs, learning rate {options.lr:g}",
        "won back: (exchanged - converted) / (exchanged - teacher), of errors; from scratch, %: the same of the model "
        "that is trained from scratch",
        "stage 1 teaches maps where each linear layer has some, else the projections of its attention",
        options.window_note(),
    ]


EXPERIMENT = experiment(
    Measure(
        columns={TEST: "error, %", ENTROPY: "cross-entropy"},
        label="error, held-out images, %",
        of=float,
        whole=lambda options: counted(options.epochs, "epoch"),
        teacher_notes=teacher_notes,
        notes=notes,
    ),
    command=COMMAND,
    about=__doc__.splitlines()[0],
    options=ImageConversion,
    prepare=prepare,
    train=lambda options, data: Conversions(options, data).run(),
    whole={IMAGES: COMMAND},
    runs=RUNS,
)
main = EXPERIMENT.main

if __name__ == "__main__":
    sys.exit(main())
