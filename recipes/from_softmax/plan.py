"""The trainings: a softmax teacher, its conversions in two stages, and the same models from scratch."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from ..shared.comparison import Planned
from ..shared.trainings import Training
from ..shared.unported import Plan
from .forms import Form, form

TEACHER = "teacher"
#: What is measured of every form, in this order; all but the first are trainings.
EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH = ("exchanged", "transfer", "distillation", "scratch")
#: The checkpoint that a training leaves.
LAST = Path("checkpoints") / "checkpoint_last.pt"


def divided(whole: int, share: float, transfer_share: float) -> dict[str, int]:
    """How often each training updates, or how many epochs it has, where the teacher has ``whole``.

    Both stages together have ``share`` of that, as training from scratch has, and stage 1 ``transfer_share`` of theirs.
    """
    both = round(share * whole)
    first = round(transfer_share * both)
    return {TEACHER: whole, TRANSFERRED: first, DISTILLED: both - first, SCRATCH: both}


def check_division(whole: int, share: float, transfer_share: float, option: str) -> None:
    """Raise ValueError unless each stage gets something of ``whole``, which ``option`` gives."""
    for name, given in (("--share", share), ("--transfer-share", transfer_share)):
        if not 0.0 < given < 1.0:
            raise ValueError(f"{name} is {given:g}; allowed: above 0 and below 1")
    parts = divided(whole, share, transfer_share)
    first, second = parts[TRANSFERRED], parts[DISTILLED]
    if min(first, second) < 1:
        raise ValueError(
            f"{option} is {whole}, with {first} in stage 1 and {second} in stage 2; allowed: at least 1 in each"
        )


@dataclass(frozen=True, kw_only=True)
class Conversion(Plan):
    """The budget of a teacher, ``updates``, and of what is made of it; ``models`` are names of forms."""

    window: int  # tokens of the softmax window of the forms that have one
    window_weight: float  # what it weighs at first
    share: float  # of the teacher's updates that a conversion has in all
    transfer_share: float  # of these, in stage 1
    transfer_lr: float
    window_dropout: float  # how often in stage 1 the linear part of a form with a window learns by itself
    distillation_lr: float
    temperature: float
    weight: float  # of the teacher's part in the loss of stage 2

    def check(self) -> None:
        """Raise ValueError if a number or a form is not possible."""
        check_division(self.updates, self.share, self.transfer_share, "--updates")
        for name in self.models:
            self.form(name)

    def form(self, name: str) -> Form:
        """The form of this name."""
        return form(name, self.layers, self.window, self.window_weight)

    def updates_of(self, stage: str) -> int:
        """The updates of a training; a form from scratch has as many as both stages together."""
        return divided(self.updates, self.share, self.transfer_share)[stage]

    def planned(self, stage: str, name: str, seed: int, data: Path, runs: Path) -> Planned:
        """The training of the teacher, or of a form in a stage or from scratch; the folders of all are in ``runs``."""
        before = {
            TRANSFERRED: start_path(runs, name, seed),
            DISTILLED: runs / folder_name(name, TRANSFERRED, seed) / LAST,
        }
        rates = {TRANSFERRED: self.transfer_lr, DISTILLED: self.distillation_lr}
        plan = dataclasses.replace(self, updates=self.updates_of(stage), lr=rates.get(stage, self.lr))
        arguments = [*plan.train_arguments(data, name, seed), "--disable-validation"]
        if stage in before:
            teacher = runs / folder_name(TEACHER, TEACHER, seed) / LAST
            arguments += ["--finetune-from-model", before[stage], "--teacher", teacher]
            arguments += self._stage_arguments(stage, name)
        return Planned(name, seed, Training(folder_name(name, stage, seed), arguments))

    def _stage_arguments(self, stage: str, name: str) -> list[object]:
        if stage == TRANSFERRED:
            # An attention without maps of its own has only the projections to learn.
            learning = "new" if self.form(name).learns_maps else "attention"
            arguments = ["--criterion", "attention_transfer", "--lineartime-trained-parameters", learning]
            if self.form(name).windowed:
                arguments += ["--transfer-window-dropout", self.window_dropout]
            return arguments
        temperature = ("--distillation-temperature", self.temperature)
        return ["--criterion", "distillation", *temperature, "--distillation-weight", self.weight]

    def attention_arguments(self, name: str) -> list[object]:
        """The architecture of the teacher, or of a form with its options; see ``Plan``."""
        if name == TEACHER:
            return ["--arch", "transformer_lm", "--decoder-normalize-before"]
        arguments: list[object] = ["--arch", "hybrid_lm"]
        for option, value in self.overrides(name).items():
            arguments += ["--" + option.replace("_", "-"), value]
        return arguments

    def overrides(self, name: str) -> dict[str, object]:
        """The options of the model of a form, as ``--model-overrides`` takes them."""
        ours = self.form(name)
        given = {f"{kind}_{option}": x for kind, options in ours.options.items() for option, x in options.items()}
        return {"lineartime_layers": ours.pattern, **given}


def folder_name(name: str, stage: str, seed: int) -> str:
    """The name of the folder of a training."""
    return ".".join([re.sub(r"\W+", "-", name), *([stage] if stage != name else []), str(seed)])


def start_path(runs: Path, name: str, seed: int) -> Path:
    """The teacher of a seed with the attention of a form, without training."""
    return runs / f"{folder_name(name, EXCHANGED, seed)}.pt"
