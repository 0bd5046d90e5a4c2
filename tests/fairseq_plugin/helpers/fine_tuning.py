"""Labelled sentences, and fairseq's commands that fine-tune a masked model on them and validate it."""

from collections.abc import Sequence
from pathlib import Path

from .commands import USER_DIR
from .masked_models import small
from .text import write_labelled_text

#: Positions of the models, in pretraining and in fine-tuning.
LIMIT = ("--max-positions", "48")
_TASK = (
    "--task sentence_prediction --criterion sentence_prediction --num-classes 2 --init-token 0 --batch-size 16 --cpu "
    "--log-format json"
).split()
#: fairseq's GLUE recipe, for a toy.
_SHORT = (
    "--reset-optimizer --reset-dataloader --reset-meters --separator-token 2 --required-batch-size-multiple 1 "
    "--optimizer adam --lr 2e-3 --max-epoch 3 --best-checkpoint-metric accuracy "
    "--maximize-best-checkpoint-metric --no-epoch-checkpoints --log-interval 1 --seed 1 --num-workers 0"
).split()


def preprocessing(text: Path, dictionary: str) -> list[tuple[str, Sequence[str], str]]:
    """Write labelled sentences to the new folder ``text``; the commands that make ``text / "bin"`` of them."""
    text.mkdir()
    write_labelled_text(text)
    return [_preprocess(text, "input0", "--srcdict", dictionary), _preprocess(text, "label")]


def fine_tuning(data: str, pretrained: Path, save_dir: Path, arch: str, *arguments: str) -> list[str]:
    """Arguments of ``fairseq-train`` that fine-tune the checkpoint ``pretrained``; later ``arguments`` win."""
    model = ["--arch", arch, *small(arch), *LIMIT, "--restore-file", str(pretrained), "--save-dir", str(save_dir)]
    return [data, "--user-dir", USER_DIR, *_TASK, *model, *_SHORT, *arguments]


def validation(data: str, save_dir: Path) -> list[str]:
    """Arguments of ``fairseq-validate`` for what a fine-tuning left in ``save_dir``."""
    path = str(save_dir / "checkpoint_last.pt")
    return [data, "--user-dir", USER_DIR, *_TASK, "--path", path, "--valid-subset", "valid"]


def _preprocess(text: Path, kind: str, *arguments: str) -> tuple[str, Sequence[str], str]:
    splits = [f"--{split}pref={text / split}.{kind}" for split in ("train", "valid")]
    destination = ["--destdir", str(text / "bin" / kind), "--workers", "1"]
    return "fairseq_cli.preprocess", ["--only-source", *splits, *destination, *arguments], ""
