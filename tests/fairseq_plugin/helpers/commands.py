"""fairseq's commands as processes, and the arguments of short trainings on a CPU."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests.processes import CHECKOUT, run_program

from . import language_models, masked_models

USER_DIR = str(CHECKOUT / "fairseq_plugin")
#: The training reads its batches itself. By default fairseq reads ahead in a daemon thread; where ``--max-update`` ends
#: a training while that thread is inside of torch, the process aborts: "terminate called without an active exception".
NO_READER_THREAD = ("--num-workers", "0", "--data-buffer-size", "0")


def run_module(module: str, arguments: Sequence[str], stdin: str = "", cwd: str = "") -> str:
    """Run ``python -m MODULE ARGUMENTS`` in a new process and return its output, stderr included; it must succeed."""
    return run_program(["-m", module, *_arguments(module, arguments)], stdin, cwd)


def _arguments(module: str, arguments: Sequence[str]) -> list[str]:
    return [*arguments, *(NO_READER_THREAD if module == "fairseq_cli.train" else ())]


# One process that runs several commands, each as ``python -m`` would: importing fairseq takes longer than most of them.
_IN_TURN = """
import io, json, runpy, sys
for module, arguments, stdin in json.loads(sys.argv[1]):
    print("\\nNEXT COMMAND", flush=True)
    sys.argv, sys.stdin = [module, *arguments], io.StringIO(stdin)
    run = runpy.run_path if module.endswith(".py") else runpy.run_module
    run(module, run_name="__main__")
"""


def run_in_turn(*commands: tuple[str, Sequence[str], str]) -> list[str]:
    """The outputs of ``commands``, each a module or a script, its arguments and its stdin, all in one new process."""
    complete = [(module, _arguments(module, arguments), stdin) for module, arguments, stdin in commands]
    outputs = run_program(["-c", _IN_TURN, json.dumps(complete)]).split("\nNEXT COMMAND\n")[1:]
    assert len(outputs) == len(commands)
    return outputs


#: Of every short training, whatever its task and model.
_SHORT = (
    "--dropout 0.1 --tokens-per-sample 48 --max-tokens 384 --optimizer adam --lr 3e-3 --max-update 6 --log-format json "
    "--log-interval 1 --cpu --seed 1"
).split()


def training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train`` on the CPU; later ``arguments`` win."""
    model = ["--task", "language_modeling", "--arch", arch, *language_models.small(arch)]
    return [data, "--user-dir", USER_DIR, *model, *_SHORT, "--save-dir", save_dir, *arguments]


def masked_training_command(data: str, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train --task masked_lm`` on the CPU; later ``arguments`` win."""
    model = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", arch, *masked_models.small(arch)]
    return [data, "--user-dir", USER_DIR, *model, *_SHORT, "--save-dir", save_dir, *arguments]


def run_two_processes(command: Sequence[str]) -> list[str]:
    """The outputs of ``fairseq-train COMMAND`` in two gloo processes that train together; both must succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    distributed = [
        "--distributed-no-spawn",
        "--distributed-world-size",
        "2",
        "--distributed-backend",
        "gloo",
        "--distributed-init-method",
        f"tcp://127.0.0.1:{port}",
        "--ddp-backend",
        "legacy_ddp",
        "--distributed-rank",
    ]
    program = [sys.executable, "-W", "ignore", "-m", "fairseq_cli.train", *command, *NO_READER_THREAD, *distributed]
    processes = [
        subprocess.Popen(
            [*program, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-2000:]
    return outputs
