"""A fresh virtual environment, made in a second: its packages are links to those of this environment."""

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import DISTRIBUTION

from ..shared.scripts import RecipeFailed

#: fairseq looks for ``--user-dir`` also beside its own folder, which therefore must not be a link.
_REAL_FOLDERS = ("fairseq",)
_TAIL_LINES = 15


class Environment(NamedTuple):
    """A virtual environment: its interpreter, and the folder of its installed packages."""

    python: Path
    packages: Path

    def install(self, archive: Path, extras: str) -> None:
        """Install a wheel or a source archive with ``extras``; nothing is downloaded.

        Raises:
            RecipeFailed: it cannot be installed, or requires what this environment lacks.
        """
        pip = [sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check", "install"]
        offline = ["--no-index", "--no-build-isolation", "--no-compile"]
        run([*pip, *offline, f"{DISTRIBUTION}[{extras}] @ {archive.resolve().as_uri()}"], archive.parent)


def create_environment(folder: Path) -> Environment:
    """A virtual environment in ``folder`` with everything that this one has installed, except this project.

    ``.pth`` files are left out too, since an editable install of this project is one.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        target = packages / installed.name
        if installed.suffix == ".pth" or DISTRIBUTION in installed.name:
            continue
        if installed.name in _REAL_FOLDERS:
            target.mkdir()
            for part in installed.iterdir():
                (target / part.name).symlink_to(part)
        else:
            target.symlink_to(installed)
    return Environment(python, packages)


def run(command: Sequence[str | Path], folder: Path) -> str:
    """Run ``command`` in ``folder``, which alone provides modules beside installed ones; returns what it prints.

    Raises:
        RecipeFailed: it ends with an error; the message has the command and the end of what it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment, **streams)
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-_TAIL_LINES:])
        raise RecipeFailed(f"{' '.join(map(str, command))} ended with exit status {done.returncode}:\n{tail}")
    return done.stdout
