"""A description of the machine that the benchmark runs on."""

import datetime
import os
import platform
import subprocess
from importlib import metadata

import psutil
import torch

from ...shared.commands import ROOT
from .records import Machine
from .work import Settings

_PACKAGES = (
    "torch",
    "fairseq-fixed",
    "timm",
    "triton",
    "FLASH-pytorch",
    "local-attention",
    "performer-pytorch",
    "flash-linear-attention",
)


def describe(command: str, settings: Settings) -> Machine:
    """The present machine, packages, commit and date."""
    return Machine(
        command=command,
        date=datetime.date.today().isoformat(),
        commit=_commit(),
        processor=_processor(),
        cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        load=round(os.getloadavg()[0], 1),
        python=platform.python_version(),
        versions=", ".join(filter(None, map(_version, _PACKAGES))),
        device=torch.cuda.get_device_name() if settings.device == "cuda" else "CPU",
        dtype=str(settings.dtype).removeprefix("torch."),
    )


def text(machine: Machine) -> str:
    """The machine in one line."""
    return (
        f"{machine.processor}, {machine.cores} cores, {machine.threads} threads, {machine.memory_gib:.0f} GiB memory, "
        f"{platform.system()} {platform.machine()}; computed on: {machine.device}, {machine.dtype}; "
        f"load before it {machine.load}"
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    """The model name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or a processor without a name
        return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of the checkout, and whether files differ from it."""
    try:
        commit = _git("rev-parse", "--short", "HEAD").strip()
        return commit + (" with changes" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
