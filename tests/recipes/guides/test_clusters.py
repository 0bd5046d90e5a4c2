"""The commands for clusters: real parsers read what SLURM scripts start, which run with stand-ins for its programs."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import timm
from fairseq import options
from torch.distributed.run import get_args_parser

import fairseq_plugin  # noqa: F401  registers what the commands name
import timm_plugin  # noqa: F401
from tests.processes import CHECKOUT
from tests.readmes import blocks, commands
from tests.recipes import timm_options

GUIDES = CHECKOUT / "recipes" / "guides"
#: What the page's commands of several processes are, in words; those that leave options out are not read by fairseq.
TYPED = [words for block in blocks(GUIDES / "clusters.md") if block.language == "shell" for words in commands(block)]
#: Of four machines, as ``scontrol show hostnames`` prints them, and what srun was asked to start, a word in each line.
PROGRAMS = {
    "scontrol": 'test "$*" = "show hostnames m[1-4]" && printf "m%s\\n" 1 2 3 4',
    "srun": 'printf "%s\\n" "$@" > "$STARTED"',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job of SLURM in ``tmp_path``, with stand-ins for its programs."""
    for name, line in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "47",
        "SLURM_JOB_NODELIST": "m[1-4]",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_GPUS_ON_NODE": "8",
    }
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **slurm, "PATH": path, "STARTED": str(tmp_path / "started")}


def started(script: str, arguments: list[str], cluster: dict[str, str], folder: Path) -> Namespace:
    """What ``sbatch SCRIPT ARGUMENTS`` starts on each machine, as torchrun reads it."""
    subprocess.run(["bash", GUIDES / script, *arguments], env=cluster, cwd=folder, check=True)
    own, program, *words = Path(cluster["STARTED"]).read_text().splitlines()
    assert (own, program) == ("--kill-on-bad-exit=1", "torchrun")
    read = get_args_parser().parse_args(words)
    assert (read.nnodes, read.nproc_per_node, read.rdzv_id) == ("4", "8", "47")
    assert (read.rdzv_backend, read.rdzv_endpoint) == ("c10d", "m1:20047")
    return read


def check_train_py(words: list[str]) -> None:
    """Assert that these arguments of ``-m timm_plugin`` are those of a training with timm's script."""
    assert words[0] == "train.py"
    assert {word for word in words if word.startswith("--")} <= timm_options.OPTIONS
    assert timm.is_model(words[words.index("--model") + 1])


def of_the_page(script: str) -> list[str]:
    """The arguments that the page gives to ``script``."""
    (words,) = (words for words in TYPED if words[0] == "sbatch" and script in words)
    return words[words.index(script) + 1 :]


@pytest.mark.parametrize("script", ["fairseq.sbatch", "timm.sbatch"])
def test_a_script_is_valid_and_names_what_is_missing(script: str, cluster: dict[str, str]) -> None:
    subprocess.run(["bash", "-n", GUIDES / script], check=True)
    del cluster["SLURM_GPUS_ON_NODE"]
    done = subprocess.run(["bash", GUIDES / script, "data", "name"], env=cluster, capture_output=True, text=True)
    assert done.returncode != 0 and "--gpus-per-node" in done.stderr


def test_the_script_of_fairseq(cluster: dict[str, str], tmp_path: Path) -> None:
    arguments = of_the_page("fairseq.sbatch")
    read = started("fairseq.sbatch", arguments, cluster, tmp_path)
    assert Path(read.training_script).name == "fairseq-train"
    args = options.parse_args_and_arch(options.get_training_parser(), read.training_script_args)
    assert (args.data, args.save_dir) == tuple(arguments[:2])
    assert args.arch == arguments[arguments.index("--arch") + 1]
    assert args.max_update == int(arguments[arguments.index("--max-update") + 1])
    assert args.distributed_world_size == 32 and args.load_checkpoint_on_all_dp_ranks


def test_the_script_of_timm_goes_on_from_the_last_checkpoint(cluster: dict[str, str], tmp_path: Path) -> None:
    arguments = of_the_page("timm.sbatch")
    for resumed in (False, True):
        read = started("timm.sbatch", arguments, cluster, tmp_path)
        assert read.module and read.training_script == "timm_plugin"
        words = read.training_script_args
        check_train_py(words)
        assert words[words.index("--data-dir") + 1] == arguments[0]
        last = Path(words[words.index("--output") + 1], words[words.index("--experiment") + 1], "last.pth.tar")
        assert last.parent.name == arguments[1]
        assert ("--resume" in words) == resumed
        assert not resumed or Path(words[words.index("--resume") + 1]) == last
        (tmp_path / last).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / last).touch()


def test_what_the_page_starts_with_torchrun() -> None:
    """In words of a process of two where the command has its environment's."""
    typed = [words for words in TYPED if words[0] == "torchrun"]
    assert len(typed) > 4
    for words in typed:
        text = "\n".join(words).replace("$(which\nfairseq-train)", "fairseq-train")
        read = get_args_parser().parse_args(text.split("\n")[1:])
        if read.module:
            check_train_py(read.training_script_args)
        elif read.no_python:
            (command,) = read.training_script_args[1:]
            program, *arguments = command.replace("$WORLD_SIZE", "2").replace("$RANK", "1").replace("'", "").split()
            assert (read.training_script, program) == ("bash", "fairseq-train")
            args = options.parse_args_and_arch(options.get_training_parser(), arguments)
            assert (args.distributed_rank, args.distributed_world_size, args.distributed_no_spawn) == (1, 2, True)
        else:
            assert read.training_script == "fairseq-train" and "--distributed-world-size" in read.training_script_args
