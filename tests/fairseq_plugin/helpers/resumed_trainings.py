"""A program: trainings that are stopped in the middle of an epoch and go on, many in one process.

``python resumed_trainings.py CASES.json``: a dictionary from a name to arguments of fairseq-train. Each training runs
twice. The second time begins at the checkpoint that the first one wrote after ``STOP`` updates, with other random
numbers around it than the first. What both gave is printed as JSON, one line for each training.
"""

import contextlib
import copy
import io
import json
import logging
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train

from tests.fairseq_plugin.helpers.logs import entries
from tests.processes import end_readers

#: The update after which a training is stopped, in the middle of its second epoch.
STOP = 5
#: What a checkpoint holds of a training.
PARTS = ("model", "last_optimizer_state")


def training(configuration: Any, seed: int) -> str:
    """What a training logs. Nothing may depend on the generators as they were before it."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    handler.setFormatter(logging.Formatter("| %(name)s | %(message)s"))
    logging.root.handlers[:] = [handler]
    with contextlib.redirect_stdout(sys.stderr):
        train.main(copy.deepcopy(configuration))
    end_readers()
    return printed.getvalue()


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Names of what is not the same in two states."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [x for key in {**one, **other} for x in differences(one.get(key), other.get(key), f"{name}.{key}")]
    if isinstance(one, (list, tuple)):
        return [x for i, both in enumerate(zip(one, other, strict=True)) for x in differences(*both, f"{name}.{i}")]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [name]


def stopped_and_resumed(arguments: list[str]) -> dict[str, Any]:
    """Losses of the whole training and of what was resumed, the epochs that were over then, what differs in the end."""
    parsed = options.parse_args_and_arch(
        options.get_training_parser(), [*arguments, "--save-interval-updates", str(STOP)]
    )
    configuration = convert_namespace_to_omegaconf(parsed)
    folder = Path(parsed.save_dir)
    last = folder / "checkpoint_last.pt"
    logs, states = [], []
    for seed in (1, 2):
        logs.append(training(configuration, seed))
        states.append({name: torch.load(last, weights_only=False)[name] for name in PARTS})
        for stopped in folder.glob(f"checkpoint_*_{STOP}.pt"):  # there is one, of the first time
            stopped.rename(last)
    whole, resumed = (entries(log, "train_inner") for log in logs)
    return {
        "whole": [entry["loss"] for entry in whole],
        "resumed": [entry["loss"] for entry in resumed],
        "epochs": whole[STOP - 1]["update"],
        "differs": differences(*states),
    }


if __name__ == "__main__":
    for name, arguments in json.loads(Path(sys.argv[1]).read_text()).items():
        print("RESUMED", json.dumps({name: stopped_and_resumed(arguments)}), flush=True)
