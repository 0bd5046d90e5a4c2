"""Make linear-time image models of a trained vision transformer, and print what of its lead each form wins back.

``python -m recipes.from_softmax.images`` from the checkout's root, on scikit-learn's handwritten digits, or with
``--cifar10 FILE`` on CIFAR-10. Models, loaders and tasks are timm's. Run again, it goes on with the next form.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
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

from common import tensor_files
from common.checkpoints import read_checkpoint
from common.command_parser import CommandParser
from common.output_files import new_folder

from ..cifar10_pixels.prepare import check, read_labelled
from ..demo.digits import write_digits
from ..shared.comparison import Compared, show
from ..shared.json_files import measured
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.working_folder import own_file, working_folder
from .forms import Form, add_forms, add_stages, form
from .image_models import ENTROPY, MODEL, PATCH, SIDE, build, exchange, losses, train, transfer_task
from .parts import PARTS, attending
from .plan import DISTILLED, EXCHANGED, SCRATCH, TEACHER, TRANSFERRED, check_division, divided, folder_name
from .results import TEST, Outcome, Ran, Shown, report

COMMAND = "recipes.from_softmax.images"
EPOCHS, QUICK_EPOCHS = 40, 10
#: The folder of the images.
IMAGES = "images"
#: The folder of what is trained.
RUNS = "runs"
_DECAY, _SMOOTHING = 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class ImagePlan:
    """The budget of a teacher, ``epochs``, and of what is made of it; ``models`` are names of forms."""

    data: str
    models: list[str]
    seeds: int
    epochs: int
    width: int
    layers: int
    heads: int
    lr: float
    window: int
    window_weight: float
    share: float
    transfer_share: float
    transfer_lr: float
    distillation_lr: float
    temperature: float
    weight: float

    def check(self) -> None:
        """Raise ValueError if a number or a form is not possible."""
        check_division(self.epochs, self.share, self.transfer_share, "--epochs")
        for name in self.models:
            self.form(name)

    def form(self, name: str) -> Form:
        """The form of this name."""
        return form(name, self.layers, self.window, self.window_weight)

    def epochs_of(self, stage: str) -> int:
        """The epochs of a training; a form from scratch has as many as both stages together."""
        return divided(self.epochs, self.share, self.transfer_share)[stage]

    def settings(self) -> dict[str, Any]:
        """Settings that all outcomes in a folder share: all but models and seeds, which may be added later."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in ("models", "seeds")}


class Learned(NamedTuple):
    """Stored results of the training of a teacher; see ``Ran``."""

    losses: dict[str, float]
    parameters: int
    seconds: float


class Made(NamedTuple):
    """Stored results of a form of a teacher; see ``Outcome``."""

    parameters: int
    learned: int
    losses: dict[str, dict[str, float]]
    parts: dict[str, dict[str, float]]
    seconds: dict[str, float]


class Conversions:
    """Trains a teacher for each seed, converts it to each form of a plan, and keeps the results in ``out``."""

    def __init__(self, plan: ImagePlan, out: Path) -> None:
        self.plan, self.out, self.images = plan, out, out / IMAGES

    def run(self) -> tuple[list[Ran], list[Outcome]]:
        """Train and measure what is not yet; the teachers, and what was made of them, a form and a seed each."""
        teachers, outcomes = [], []
        for seed in range(1, self.plan.seeds + 1):
            folder = self.out / RUNS
            path = folder / f"{folder_name(TEACHER, TEACHER, seed)}.json"
            found = measured(path, functools.partial(self._train_teacher, seed), Learned)
            teacher = Ran(TEACHER, seed, TEACHER, folder, command="", **found._asdict())
            teachers.append(teacher)
            for name in self.plan.models:
                path = folder / f"{folder_name(name, name, seed)}.json"
                found = measured(path, functools.partial(self._convert, name, seed), Made)
                outcomes.append(Outcome(name, seed, teacher=teacher.losses, commands={}, **found._asdict()))
        return teachers, sorted(outcomes, key=lambda one: self.plan.models.index(one.model))

    def _train_teacher(self, seed: int) -> dict[str, Any]:
        model = self._new(seed)
        seconds = self._train(TEACHER, _classification(model), seed, TEACHER)
        with own_file(self._weights(seed)) as part:
            tensor_files.save(model.state_dict(), part)
        return Learned(losses(model, self.images), _count(model), seconds)._asdict()

    def _teacher(self, seed: int) -> nn.Module:
        """The teacher of a seed, trained."""
        model = self._new(seed)
        model.load_state_dict(read_checkpoint(self._weights(seed)))
        return model.eval()

    def _convert(self, name: str, seed: int) -> dict[str, Any]:
        """Convert the teacher of a seed to the form ``name``, and train the form from scratch; see ``Made``."""
        form, teacher = self.plan.form(name), self._teacher(seed)
        random_seed(seed)
        transfer = transfer_task(teacher, form)
        found, seconds = {EXCHANGED: losses(transfer.get_eval_model(), self.images)}, {}
        learned = sum(x.numel() for x in transfer.get_trainable_module().parameters() if x.requires_grad)
        seconds[TRANSFERRED] = self._train(TRANSFERRED, transfer, seed, name)
        student = transfer.converted()
        found[TRANSFERRED] = losses(student, self.images)
        seconds[DISTILLED] = self._train(DISTILLED, self._distillation(student, teacher), seed, name)
        found[DISTILLED], parts = losses(student, self.images), {}
        for part in PARTS if form.windowed else ():
            with attending(student, part):
                parts[part] = losses(student, self.images)
        scratch = exchange(self._new(seed), form)
        seconds[SCRATCH] = self._train(SCRATCH, _classification(scratch), seed, name)
        found[SCRATCH] = losses(scratch, self.images)
        return Made(_count(student), learned, found, parts, seconds)._asdict()

    def _distillation(self, student: nn.Module, teacher: nn.Module) -> LogitDistillationTask:
        """Stage 2, by timm's own task."""
        return LogitDistillationTask(
            student,
            teacher,
            LabelSmoothingCrossEntropy(_SMOOTHING),
            distill_loss_weight=self.plan.weight,
            task_loss_weight=1.0 - self.plan.weight,
            temperature=self.plan.temperature,
            verbose=False,
        )

    def _new(self, seed: int) -> nn.Module:
        return build(self.plan.width, self.plan.layers, self.plan.heads, seed)

    def _weights(self, seed: int) -> Path:
        return self.out / RUNS / f"{folder_name(TEACHER, TEACHER, seed)}.pth"

    def _train(self, stage: str, task: TrainingTask, seed: int, name: str) -> float:
        """Train for as long as a stage lasts; the seconds."""
        plan, title = self.plan, f"{name}, {stage}, seed {seed}"
        lr = {TRANSFERRED: plan.transfer_lr, DISTILLED: plan.distillation_lr}.get(stage, plan.lr)
        decay = 0.0 if stage == TRANSFERRED else _DECAY
        return train(task, self.images, plan.epochs_of(stage), lr, decay, seed, title)


def _classification(model: nn.Module) -> ClassificationTask:
    return ClassificationTask(model, LabelSmoothingCrossEntropy(_SMOOTHING), verbose=False)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(out: Path, cifar10: Path | None) -> None:
    """Write the images to ``out``, a folder of files for each split and class, unless they are there.

    Raises:
        ValueError: ``cifar10`` is not CIFAR-10's archive.
    """
    folder = out / IMAGES
    if folder.exists():
        return
    if cifar10 is not None:
        check(cifar10)
    with new_folder(folder, COMMAND) as new:
        if cifar10 is None:
            write_digits(new)
        else:
            write_labelled(read_labelled(cifar10), new)


def write_labelled(parts: dict[str, tuple[np.ndarray, np.ndarray]], folder: Path) -> None:
    """Write train and test images (N, H, W, C), uint8, as files below ``folder``/{train,validation}/LABEL."""
    for split, part in (("train", "train"), ("validation", "test")):
        images, labels = parts[part]
        for i, (image, label) in enumerate(zip(tqdm(images, desc=split, leave=False, disable=None), labels)):
            path = folder / split / str(label) / f"{i:05d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("--cifar10", type=Path, metavar="FILE", help="cifar-10-binary.tar.gz, in place of the digits")
    parser.add_argument("--out", type=Path, default=Path("work/from_softmax/images"), help="default: %(default)s")
    add_forms(parser)
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--epochs", type=positive_int, help=f"of the teacher; default: {EPOCHS}")
    parser.add_argument(
        "--lr", type=positive_number, default=2e-3, help="highest, of the teacher and from scratch (%(default)s)"
    )
    for name, default in {"width": 64, "layers": 4, "heads": 4}.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    add_stages(parser)
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


@script("images")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    given = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(ImagePlan)}
    given |= {
        "data": "digits" if options.cifar10 is None else "CIFAR-10",
        "models": list(dict.fromkeys(options.models)),
        "epochs": options.epochs or (QUICK_EPOCHS if options.quick else EPOCHS),
    }
    plan = ImagePlan(**given)
    plan.check()
    out = options.out.absolute()
    with working_folder(out, COMMAND, whole={IMAGES: COMMAND}):
        started = time.monotonic()
        keep_settings(out / "settings.json", plan.settings())
        prepare(out, options.cifar10)
        teachers, outcomes = Conversions(plan, out).run()
        content = {"plan": dataclasses.asdict(plan)}
        found = report(plan.models, shown(plan), content, teachers, Compared(outcomes, {}))
        show(out, found, command_line(COMMAND, arguments), started)
    return 0


def shown(plan: ImagePlan) -> Shown:
    """How the comparison is shown."""
    first, second, both = map(plan.epochs_of, (TRANSFERRED, DISTILLED, SCRATCH))
    teacher_notes = [
        f"{MODEL} of timm for {SIDE} x {SIDE} pixels in patches of {PATCH} x {PATCH}, {plan.layers} layers of width "
        f"{plan.width}, {plan.heads} heads; {plan.data}, highest learning rate {plan.lr:g}",
        "error of the held-out images after the last epoch, mean ± standard deviation over seeds",
    ]
    notes = [
        "error of the held-out images in per cent, mean ± standard deviation over seeds, each with its own teacher",
        "exchanged: the teacher's weights under another attention, before any update; stage 1: attention transfer, "
        f"{first} epochs, learning rate {plan.transfer_lr:g}; stage 2: timm's LogitDistillationTask, {second} epochs, "
        f"learning rate {plan.distillation_lr:g}, temperature {plan.temperature:g}, weight {plan.weight:g}; from "
        f"scratch: {both} epochs, learning rate {plan.lr:g}",
        "won back: (exchanged - converted) / (exchanged - teacher), of errors; from scratch, %: the same of the model "
        "that is trained from scratch",
        "stage 1 teaches maps where each linear layer has some, else the projections of its attention",
        f"lolcats has a softmax window of {plan.window} tokens, which weighs {plan.window_weight:g} at first; "
        "lolcats_relu is lolcats with relu maps",
    ]
    return Shown(
        "From softmax to linear time",
        plan.form,
        {TEST: "error, %", ENTROPY: "cross-entropy"},
        "error, held-out images, %",
        float,
        2,
        True,
        f"{plan.epochs} epochs",
        teacher_notes,
        notes,
    )


if __name__ == "__main__":
    sys.exit(main())
