"""The stages that turn a softmax teacher into a form of attention, and their options."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..shared.experiment import Options, option
from ..shared.scripts import fraction
from .forms import DEFAULT, WINDOW_WEIGHT, Form, Windows, form

TEACHER = "teacher"
#: The stages that are measured for every form, in this order; all but the first are trainings.
EXCHANGED, TRANSFERRED, DISTILLED, SCRATCH = ("exchanged", "transfer", "distillation", "scratch")


def name_of_form(text: str) -> str:
    """The type of ``--models``: a pattern of known names; ``form`` checks that it fits the layers.

    Raises:
        argparse.ArgumentTypeError: it is not such a pattern.
    """
    try:
        form(text, layers=1_000, windows=Windows(1))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--models ")) from error
    return text


def models_option(default: Sequence[str]) -> list[str]:
    """The field ``models`` of options, with its ``default``."""
    help_text = (
        "what takes the place of softmax attention, NAME or a pattern as in flow*3,softmax; default: %(default)s"
    )
    return option(tuple(default), help_text, setting=False, nargs="+", type=name_of_form, metavar="NAME")


@dataclass(frozen=True, kw_only=True)
class Forms(Options):
    """The options of an experiment that converts a teacher to forms in two stages."""

    models: Sequence[str] = models_option(DEFAULT)
    transfer_lr: float = option(1e-2, "highest, of stage 1 (%(default)s)")
    distillation_lr: float = option(1e-3, "highest, of stage 2 (%(default)s)")
    window: int = option(16, "tokens, of lolcats, local and longformer (%(default)s)")
    window_weight: float = option(WINDOW_WEIGHT, "of lolcats' window, at first (%(default)s)", type=float)
    sinks: int = option(Windows(1).sinks, "first tokens that longformer sees beside its window (%(default)s)")

    @property
    def windows_of_forms(self) -> Windows:
        """The sizes of the forms with a window."""
        return Windows(self.window, self.window_weight, self.sinks)

    def window_note(self) -> str:
        """A note below a table: the sizes of the forms with a window."""
        return (
            f"lolcats: a softmax window of {self.window} tokens, which weighs {self.window_weight:g} at first; "
            f"lolcats_relu is lolcats with relu maps; local: a window of {self.window} tokens alone; longformer: such "
            f"a window, and the first {self.sinks} tokens of the sequence, the sinks"
        )


@dataclass(frozen=True, kw_only=True)
class Stages(Forms):
    """The options of an experiment that trains the teacher too; a subclass has ``layers`` and ``lr``."""

    share: float = option(0.2, "of the teacher's training, both stages (%(default)s)", type=float)
    transfer_share: float = option(0.5, "of that share, stage 1 (%(default)s)", type=float)
    temperature: float = option(1.0, "of stage 2 (%(default)s)")
    weight: float = option(0.5, "of the teacher in stage 2's loss (%(default)s)", type=fraction)
    no_scratch: bool = option(False, "train no form from scratch")

    def lasts(self, whole: int) -> dict[str, int]:
        """The number of updates or epochs of each training, if the teacher has ``whole``.

        Both stages together have ``share`` of these, and so has training from scratch. Stage 1 has ``transfer_share``
        of that.
        """
        both = round(self.share * whole)
        first = round(self.transfer_share * both)
        return {TEACHER: whole, TRANSFERRED: first, DISTILLED: both - first, SCRATCH: both}

    def check(self, whole: int, option: str) -> None:
        """Raise ValueError for an invalid form, or if ``whole``, the value of ``option``, leaves a stage empty."""
        for name, value in (("--share", self.share), ("--transfer-share", self.transfer_share)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} is {value:g}; allowed: above 0 and below 1")
        lasts = self.lasts(whole)
        first, second = lasts[TRANSFERRED], lasts[DISTILLED]
        if min(first, second) < 1:
            raise ValueError(
                f"{option} is {whole}, with {first} in stage 1 and {second} in stage 2; allowed: at least 1 in each"
            )
        for name in self.models:
            self.form(name)

    def form(self, name: str) -> Form:
        """The form of this name."""
        return form(name, self.layers, self.windows_of_forms)

    def rate(self, stage: str) -> float:
        """The highest learning rate of a training."""
        return {TRANSFERRED: self.transfer_lr, DISTILLED: self.distillation_lr}.get(stage, self.lr)


def folder_name(name: str, stage: str, seed: int) -> str:
    """The name of the folder of a training."""
    return ".".join([re.sub(r"\W+", "-", name), *([stage] if stage != name else []), str(seed)])
