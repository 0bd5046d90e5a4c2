"""fairseq's commands as processes, and the arguments of short trainings on a CPU."""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import processes
from tests.compare import weights
from tests.processes import CHECKOUT, Command, Forked

from . import encoder_decoders, language_models, masked_models

USER_DIR = str(CHECKOUT / "fairseq_plugin")
#: The training reads its batches itself. By default fairseq reads ahead in a daemon thread; where ``--max-update`` ends
#: a training while that thread is inside of torch, the process aborts: "terminate called without an active exception".
NO_READER_THREAD = ("--num-workers", "0", "--data-buffer-size", "0")


def run_in_turn(*commands: tuple[str, Sequence[str], str], cwd: str = "") -> list[str]:
    """The outputs of ``commands``, each a module or a script, its arguments and its stdin, all in one new process."""
    return processes.run_in_turn(*(_command(*command) for command in commands), cwd=cwd)


class NamedRuns(NamedTuple):
    """Files that commands left in a folder, and what each printed, by its name."""

    folder: Path
    outputs: dict[str, str]

    def stored(self, name: str) -> dict[str, Any]:
        """Content of a file, or of the last checkpoint in a folder."""
        path = self.folder / name
        return torch.load(path if path.is_file() else path / "checkpoint_last.pt", weights_only=False)

    def weights(self, name: str) -> dict[str, Tensor]:
        """The tensors of its model, without records of options and fairseq's version numbers."""
        tensors = {key: x for key, x in self.stored(name)["model"].items() if isinstance(x, Tensor)}
        return {key: x for key, x in weights(tensors).items() if "version" not in key}


def run_named(folder: Path, commands: Mapping[str, tuple[str, Sequence[str], str]]) -> NamedRuns:
    """``run_in_turn`` of ``commands`` that write into ``folder``."""
    return NamedRuns(folder, dict(zip(commands, run_in_turn(*commands.values()))))


def run_module(module: str, arguments: Sequence[str], stdin: str = "", cwd: str = "") -> str:
    """Run ``python -m MODULE ARGUMENTS`` in a new process and return its output, stderr included; it must succeed."""
    return run_in_turn((module, arguments, stdin), cwd=cwd)[0]


def _command(module: str, arguments: Sequence[str], stdin: str = "") -> Command:
    return Command(module, [*arguments, *(NO_READER_THREAD if module == "fairseq_cli.train" else ())], stdin)


#: Of every short training, whatever its task and model.
_SHORT = (
    "--dropout 0.1 --max-tokens 384 --optimizer adam --lr 3e-3 --max-update 6 --log-format json "
    "--log-interval 1 --cpu --seed 1"
).split()


def _training_command(data: str, save_dir: str, model: Sequence[str], *arguments: str) -> list[str]:
    tokens = () if "translation" in model else ("--tokens-per-sample", "48")
    return [data, "--user-dir", USER_DIR, *model, *_SHORT, *tokens, "--save-dir", save_dir, *arguments]


def training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` of a language model on the CPU; later ``arguments`` win."""
    model = ["--task", "language_modeling", "--arch", arch, *language_models.small(arch)]
    return _training_command(data, save_dir, model, *arguments)


def masked_training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """``training_command`` of a masked model."""
    model = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", arch, *masked_models.small(arch)]
    return _training_command(data, save_dir, model, *arguments)


def translation_training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """``training_command`` of an encoder-decoder."""
    model = ["--task", "translation", "--arch", arch, *encoder_decoders.SMALL]
    return _training_command(data, save_dir, model, *arguments)


def run_two_processes(command: Sequence[str]) -> list[str]:
    """The outputs of ``fairseq-train COMMAND`` in two gloo processes that train together; both must succeed."""
    both = start_processes(2, command)
    for process in both:
        process.wait()
    return [process.outputs()[0] for process in both]


def start_processes(count: int, command: Sequence[str]) -> list[Forked]:
    """``fairseq-train COMMAND`` in ``count`` gloo processes that train together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed = (
        f"--distributed-no-spawn --distributed-world-size {count} --distributed-backend gloo --ddp-backend legacy_ddp "
        f"--distributed-init-method tcp://127.0.0.1:{port} --distributed-rank"
    ).split()
    return [Forked(_command("fairseq_cli.train", [*command, *distributed, str(rank)])) for rank in range(count)]
