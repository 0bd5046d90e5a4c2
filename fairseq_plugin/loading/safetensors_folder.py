"""Language models in folders without pickled files, and those that are part of this package.

Such a folder has three files: ``model.safetensors``, the weights; ``dict.txt``, the dictionary; and ``config.json``,
the groups of fairseq's configuration that say how the model is built, reads text and generates. ``to_safetensors``
writes it. fairseq itself reads only checkpoints of torch, so ``write_checkpoint`` turns a folder into one.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from common.files.json_files import read, typed
from common.files.tensor_files import read_safetensors, save

from .checkpoint_config import check_configuration

WEIGHTS, CONFIG, DICTIONARY = "model.safetensors", "config.json", "dict.txt"
#: The checkpoint that is made of a folder; the name that fairseq's hub expects.
CHECKPOINT = "model.pt"
#: The trained models that are part of this package, one folder each.
PACKAGED = Path(__file__).resolve().parents[1] / "weights"
_ALLOWED = "a folder that python -m fairseq_plugin.to_safetensors wrote"


class StoredConfig(NamedTuple):
    """The content of ``config.json``: the number of updates of the training, and fairseq's configuration by group."""

    updates: int
    cfg: dict[str, Any]


def packaged_models() -> dict[str, str]:
    """Names of the trained models in this package, ARCHITECTURE.DATA, and their folders."""
    return {path.parent.name: str(path.parent) for path in sorted(PACKAGED.glob(f"*/{WEIGHTS}"))}


def write_checkpoint(source: Path, target: Path) -> Path:
    """Write the model in the folder ``source`` to the folder ``target``: a checkpoint of fairseq and its dictionary.

    Returns the path of the checkpoint. Weights keep their precision.

    Raises:
        ValueError: a file is missing or damaged, has a configuration that is not only data, or was written otherwise.
    """
    tensors, _ = read_safetensors(source / WEIGHTS)
    config = typed(read(source / CONFIG, _ALLOWED), StoredConfig, str(source / CONFIG))
    lacking = [name for name in ("model", "task") if not isinstance(config.cfg.get(name), dict)]
    if lacking:
        raise ValueError(f"{str(source / CONFIG)!r} has no options of the {lacking[0]}; allowed: {_ALLOWED}")
    if not (source / DICTIONARY).is_file():
        raise ValueError(f"{str(source)!r} has no {DICTIONARY}; allowed: {_ALLOWED}")
    history = {"criterion_name": "CrossEntropyCriterion", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    state = {
        "args": None,
        "cfg": config.cfg,
        "model": tensors,
        "optimizer_history": [{**history, "num_updates": config.updates}],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
    }
    check_configuration(state, str(source / CONFIG))
    shutil.copyfile(source / DICTIONARY, target / DICTIONARY)
    save(state, target / CHECKPOINT)
    return target / CHECKPOINT


@contextmanager
def readable_by_fairseq(folder: str, checkpoint_file: str) -> Iterator[tuple[str, str]]:
    """Yield a folder and the name of a checkpoint in it that fairseq can read, for the time of the ``with`` block.

    ``model.safetensors`` is read if ``checkpoint_file`` names it, or if that is ``model.pt`` and does not exist;
    otherwise the arguments are returned.
    """
    path = Path(folder)
    is_replaced = checkpoint_file == CHECKPOINT and (path / WEIGHTS).exists() and not (path / CHECKPOINT).exists()
    if checkpoint_file != WEIGHTS and not is_replaced:
        yield folder, checkpoint_file
        return
    with tempfile.TemporaryDirectory(prefix="lineartime-", ignore_cleanup_errors=True) as temporary:
        yield temporary, write_checkpoint(path, Path(temporary)).name
