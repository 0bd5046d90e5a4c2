"""Build the source archive and the wheel, check their metadata and files, and try both in environments of their own.

``make package``, or ``python -m recipes.package`` in a git checkout with the extras ``fairseq``, ``timm`` and
``package``. Archives that pass are in the folder of ``--out``, ready for ``twine upload``.
"""

import shutil
import sys
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import TemporaryDirectory

from common.command_parser import CommandParser

from ..shared.commands import ROOT
from ..shared.scripts import RecipeFailed, script
from ..shared.working_folder import atomic_write, working_folder
from .environment import Environment, create_environment, run

COMMAND = "recipes.package"
PACKAGES = ("common", "fairseq_plugin", "timm_plugin")
EXTRAS = "fairseq,timm"
_TOOLS = ("build", "twine")
#: Prints where the packages are and timm's names of our models, and loads the models whose weights are in the package.
_IMPORT = """
import common, fairseq_plugin, timm, timm_plugin
for package in (common, fairseq_plugin, timm_plugin):
    print(package.__file__)
print(*timm.list_models("flowformer*"))
for name in timm.list_pretrained("flowformer*"):
    timm.create_model(name, pretrained=True)
fairseq_plugin.LinearTimeLanguageModel.from_pretrained("gated_delta_lm.shakespeare")
"""


def checkout_files() -> set[str]:
    """Files of the checkout: tracked by git, or new and not ignored."""
    names = run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], ROOT).splitlines()
    return {name for name in names if (ROOT / name).exists()}


def copy_checkout(folder: Path, files: Iterable[str]) -> Path:
    """A copy of the checkout's ``files`` in ``folder``, so that no other file gets into an archive."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


def build(source: Path, folder: Path) -> list[Path]:
    """Build the source archive of ``source`` and the wheel of that archive in ``folder``, and check their metadata.

    Raises:
        RecipeFailed: a tool is missing or fails; twine checks the description and the names of fields.
    """
    for tool in _TOOLS:
        try:
            distribution(tool)
        except PackageNotFoundError as error:
            raise RecipeFailed(f"{tool} is not installed; pip install '.[package]' installs it") from error
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source], source.parent)
    archives = sorted(folder.iterdir())
    run([sys.executable, "-m", "twine", "check", "--strict", *archives], source.parent)
    return archives


def check_files(environment: Environment, expected: set[str]) -> None:
    """Compare the installed files of the three packages with ``expected``, those of the checkout.

    Raises:
        RecipeFailed: a file is missing, or there is one more.
    """
    paths = [path for package in PACKAGES for path in (environment.packages / package).rglob("*")]
    installed = {
        str(path.relative_to(environment.packages))
        for path in paths
        if path.is_file() and path.parent.name != "__pycache__"
    }
    if different := sorted(installed ^ expected):
        raise RecipeFailed(f"the installed files are not those of the checkout: {', '.join(different)}")


def try_commands(environment: Environment, folder: Path) -> None:
    """Import the packages and start the hosts' commands in ``folder``, which is empty.

    Raises:
        RecipeFailed: a command fails or does not print what it should.
    """
    plugin = str(environment.packages / "fairseq_plugin")
    paths = [str(environment.packages / package / "__init__.py") for package in PACKAGES]
    train = ("-m", "fairseq_cli.train", "--help", "--user-dir")
    for arguments, words in (
        (("-c", _IMPORT), (*paths, "flowformer_hier_s")),
        ((*train, "fairseq_plugin"), ("lineartime_adam",)),
        ((*train, plugin), ("lineartime_adam",)),
        (("-m", "fairseq_plugin"), (plugin,)),
        (("-m", "timm_plugin", "--help"), ("usage: python -m timm_plugin",)),
    ):
        output = run([environment.python, *arguments], folder)
        if missing := [word for word in words if word not in output]:
            raise RecipeFailed(f"python {' '.join(arguments)} does not print {', '.join(missing)}:\n{output[-2000:]}")


def try_archive(archive: Path, folder: Path, expected: set[str]) -> None:
    """Install an archive in a new environment in ``folder``, compare its files with ``expected``, and run it.

    The wheel is built from the source archive, so that only one of both needs to run all commands.
    """
    environment = create_environment(folder / "environment")
    environment.install(archive, EXTRAS)
    check_files(environment, expected)
    empty = folder / "empty"
    empty.mkdir()
    if archive.suffix == ".whl":
        try_commands(environment, empty)
    else:
        run([environment.python, "-c", "from common.attention import build_attention"], empty)


@script("package")
def main(arguments: Iterable[str] | None = None) -> int:
    """Build both archives, try them, and print their paths; 0."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--out", type=Path, default=Path("work/package"), help="folder of the archives; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    start = time.monotonic()
    with working_folder(options.out, COMMAND), TemporaryDirectory() as temporary:
        files = checkout_files()
        source = copy_checkout(Path(temporary, "source"), files)
        expected = {name for name in files if name.split("/")[0] in PACKAGES}
        for archive in build(source, Path(temporary, "archives")):
            try_archive(archive, Path(temporary, archive.suffix[1:]), expected)
            with atomic_write(options.out / archive.name) as part:
                shutil.copyfile(archive, part)
            print(f"{options.out / archive.name}: {archive.stat().st_size / 1024:,.0f} KiB", flush=True)
    print(f"Both work where nothing else of the checkout is, after {time.monotonic() - start:.0f} seconds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
