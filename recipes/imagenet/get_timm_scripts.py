"""Get timm's own train.py, validate.py and so on: ``python -m recipes.imagenet.get_timm_scripts``.

timm's wheel lacks them, and they must match the installed timm, so they are copied, unmodified, from its tag.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import timm

from common.command_parser import CommandParser
from common.files.output_files import new_folder

from ..shared.commands import shown_path
from ..shared.download import DownloadFailed, Source, download
from ..shared.scripts import RecipeFailed, script

COMMAND = "recipes.imagenet.get_timm_scripts"
REPOSITORY = "https://github.com/huggingface/pytorch-image-models"
ARCHIVE = "https://codeload.github.com/huggingface/pytorch-image-models/zip/refs/tags/{tag}"
#: The scripts that are copied; only the first must exist.
SCRIPTS = ("train.py", "validate.py", "inference.py", "benchmark.py", "onnx_export.py", "avg_checkpoints.py")
VERSION_FILE = "timm/version.py"
_GIT_SECONDS = 300


class NotFound(RecipeFailed):
    """No source has the scripts at the tag; the message lists the sources and the reasons."""


def installed_tag() -> str:
    """The tag of the installed timm."""
    return f"v{timm.__version__}"


def read_version(folder: Path) -> str:
    """Read the version of a timm source tree without running its code.

    Raises:
        NotFound: the tree does not contain a version.
    """
    path = folder / VERSION_FILE
    match = path.is_file() and re.search(r"""__version__ = ['"]([^'"]+)['"]""", path.read_text(encoding="utf-8"))
    if not match:
        raise NotFound(f"{path} names no version; allowed: timm's source tree")
    return match[1]


def from_git(source: str, tag: str, folder: Path) -> None:
    """Copy the scripts at ``tag`` of the git repository ``source``, a path or a URL, into ``folder``.

    Raises:
        NotFound: git, the repository or the tag is missing.
    """
    command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, source, "clone"]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            process = subprocess.run(
                command, cwd=temporary, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotFound(f"{source}: {error}") from error
        if process.returncode != 0:
            raise NotFound(f"{source}: {process.stderr.strip()}")
        copy(Path(temporary, "clone"), folder)


def from_archive(url: str, folder: Path) -> None:
    """Copy the scripts in the zip archive at ``url`` into ``folder``.

    Raises:
        NotFound: the archive cannot be downloaded, or is not one of timm.
    """
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary, "timm.zip")
        try:
            download(Source(url), archive)
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(temporary)
        except DownloadFailed as error:
            raise NotFound(str(error)) from error
        except zipfile.BadZipFile as error:
            raise NotFound(f"{url}: {error}") from error
        trees = [path for path in Path(temporary).iterdir() if path.is_dir()]
        if len(trees) != 1:
            raise NotFound(f"{url}: the archive holds {len(trees)} folders; allowed: one, timm's source tree")
        copy(trees[0], folder)


def copy(tree: Path, folder: Path) -> None:
    """Copy the scripts of the source tree ``tree`` into ``folder``, with the file that contains the version.

    Raises:
        NotFound: ``tree`` is not timm's source tree.
    """
    read_version(tree)
    if not (tree / SCRIPTS[0]).is_file():
        raise NotFound(f"{tree} has no {SCRIPTS[0]}; allowed: timm's source tree")
    for name in (*SCRIPTS, "LICENSE"):
        if (tree / name).is_file():
            shutil.copy2(tree / name, folder / name)
    # Not at timm/version.py: a folder named timm next to the scripts would hide the installed package.
    shutil.copy2(tree / VERSION_FILE, folder / "timm_version.txt")


def tags_of(repository: Path) -> list[str]:
    """The newest five tags of a local repository, newest first; empty if git fails."""
    command = ["git", "-C", str(repository), "tag", "--list", "v*", "--sort=-version:refname"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return process.stdout.split()[:5]


def get(out: Path, tag: str, source: Path | None = None) -> str:
    """Write the scripts at ``tag`` to the folder ``out``; returns their version.

    Args:
        source: a local git repository or unpacked source tree; None downloads the scripts.

    Raises:
        ValueError: ``source`` does not exist, or ``out`` contains files that this function did not write.
        NotFound: no source has the scripts, or their version is not that of ``tag``.
    """
    attempts: list[Callable[[Path], None]]
    if source is None:
        attempts = [
            lambda folder: from_git(REPOSITORY, tag, folder),
            lambda folder: from_archive(ARCHIVE.format(tag=tag), folder),
        ]
    elif not source.is_dir():
        raise ValueError(f"--from is {source}, which is no folder; allowed: a git repository or a source tree of timm")
    elif (source / ".git").exists() or (source / "HEAD").is_file():
        attempts = [lambda folder: from_git(source.absolute().as_uri(), tag, folder)]
    else:
        attempts = [lambda folder: copy(source, folder)]
    reasons = []
    for attempt in attempts:
        try:
            with new_folder(out, COMMAND) as folder:
                attempt(folder)
                return _check(folder, tag)
        except NotFound as error:
            reasons.append(str(error))
    raise NotFound("\n  ".join([f"timm's scripts at {tag} were not found:", *reasons, _advice(tag, source)]))


def _check(folder: Path, tag: str) -> str:
    text = (folder / "timm_version.txt").read_text(encoding="utf-8")
    version = re.search(r"""__version__ = ['"]([^'"]+)['"]""", text)[1]
    if f"v{version}" != tag:
        raise NotFound(f"they are of timm {version}, not {tag}")
    return version


def _advice(tag: str, source: Path | None) -> str:
    tags = tags_of(source) if source is not None else []
    hint = f" It has {', '.join(tags)}." if tags else ""
    return (
        f"Name a tag that exists with --tag, the one nearest below {tag} as a rule fits.{hint} Or take a copy you"
        f" have with --from: a git repository or an unpacked source tree of {REPOSITORY}"
    )


@script("get_timm_scripts")
def main(arguments: list[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    parser = CommandParser(prog="python -m recipes.imagenet.get_timm_scripts", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("work/timm-scripts"), help="default: %(default)s")
    parser.add_argument("--tag", default=installed_tag(), help="default: %(default)s, the installed timm's")
    parser.add_argument("--from", dest="source", type=Path, help="a git repository or source tree of timm on this disk")
    options = parser.parse_args(arguments)
    version = get(options.out.absolute(), options.tag, options.source)
    print(f"timm {version}'s scripts are in {shown_path(options.out)}")
    if version != timm.__version__:
        print(f"Note: the timm installed is {timm.__version__}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
