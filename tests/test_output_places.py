"""No command of the plugins replaces or removes a file that it did not create, wherever the user lets it write.

The commands are found in the code: each module that can be run and has an option that names an output path. A module
that is missing in ``COMMANDS`` fails, so that a new one is not forgotten.
"""

import ast
import importlib
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.processes import CHECKOUT

#: Options and arguments that name an output path.
PLACES = ("--out", "--output", "--records", "--save", "--target", "--destination", "target")
SOURCE = "SOURCE"
FOLDER, FILE = "folder", "file"


class Case(NamedTuple):
    """A command: whether it writes a folder or a file, and its other arguments; SOURCE is a path to a user's file."""

    kind: str
    place: str
    arguments: str = ""


COMMANDS = {
    "fairseq_plugin.convert": Case(FILE, "", SOURCE),
    "fairseq_plugin.export_hf": Case(FOLDER, "", SOURCE),
    "fairseq_plugin.export_step": Case(FILE, "", SOURCE),
    "fairseq_plugin.from_safetensors": Case(FILE, "", SOURCE),
    "fairseq_plugin.import_hf": Case(FILE, "", SOURCE),
    "fairseq_plugin.to_safetensors": Case(FILE, "", f"{SOURCE} --dict {SOURCE}"),
    "timm_plugin.convert": Case(FILE, "", f"flowformer_deit_ti {SOURCE}"),
}
#: How a user can name an output path that contains files of others.
IN_FOLDERS = ["a stranger's file", "names of ours", "here", "a link", "a link to nothing", "a file", "the source in it"]
IN_FILES = ["a file", "here", "a folder", "a link", "a link to nothing", "the source", "a link to the source"]


def writes(path: Path) -> bool:
    """Whether a module can be run, and has an option for an output path, or another's parser."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) and node.level for alias in node.names}
    options = {
        node.args[0].value
        for node in calls
        if getattr(node.func, "attr", "") == "add_argument" and node.args and isinstance(node.args[0], ast.Constant)
    }
    names_a_place = "parser" in imported or any(str(name).startswith(PLACES) for name in options)
    return '__name__ == "__main__"' in path.read_text() and names_a_place


def test_every_command_that_writes_is_here():
    paths = [path for folder in ("fairseq_plugin", "timm_plugin") for path in (CHECKOUT / folder).rglob("*.py")]
    commands_found = [".".join(path.relative_to(CHECKOUT).with_suffix("").parts) for path in paths if writes(path)]
    assert sorted(commands_found) == sorted(COMMANDS)


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything below a folder: files with their bytes, links with their targets, folders."""
    entries: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        content = None if path.is_dir() else path.read_bytes() if path.exists() else ""
        entries[str(path.relative_to(folder))] = os.readlink(path) if path.is_symlink() else content
    return entries


def place_of(kind: str, way: str, root: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """The output path and the source as the user types them; ``root`` has a folder and files of the user."""
    if way in ("a link", "a link to nothing"):
        (root / "link").symlink_to(root / "mine" if way == "a link" and kind == FOLDER else root / "thesis.txt")
        if way == "a link to nothing":
            (root / "thesis.txt").unlink()
        return str(root / "link"), source
    if way == "here":
        monkeypatch.chdir(root / "mine")
        return ".", source
    if way == "names of ours":
        for name in ("train.npz", "results.md", "settings.json", "train.py", "data-bin/dict.txt", "text/train.tokens"):
            (root / "ours" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "ours" / name).write_text("the user's")
        return str(root / "ours"), source
    if way == "the source in it":
        inside = root / "mine" / source.name
        source.rename(inside)
        return str(root / "mine"), inside
    if way == "a link to the source":
        os.link(source, root / "hard.pt")
        return str(root / "hard.pt"), source
    named = {"a stranger's file": "mine", "a folder": "mine", "a file": "thesis.txt", "the source": source.name}
    return str(root / named[way]), source


@pytest.mark.parametrize("module", COMMANDS)
@pytest.mark.parametrize("number", range(len(IN_FOLDERS)))
def test_files_of_the_user_stay(module, number, tmp_path, monkeypatch, capsys):
    """The command ends before any work with one line that names the path, and nothing has changed."""
    case = COMMANDS[module]
    way = (IN_FOLDERS if case.kind == FOLDER else IN_FILES)[number]
    (tmp_path / "mine" / "notes").mkdir(parents=True)
    (tmp_path / "mine" / "thesis.txt").write_text("years of work\n")
    (tmp_path / "thesis.txt").write_text("another copy\n")
    source = tmp_path / "source.pt"
    source.write_text("a line of text\n" * 100)
    output_path, source = place_of(case.kind, way, tmp_path, source, monkeypatch)
    before = tree(tmp_path)
    arguments = [str(source) if word == SOURCE else word for word in case.arguments.split()]
    main = importlib.import_module(module).main
    try:
        status = main([*arguments, *([case.place] if case.place else []), output_path])
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr().err + str(status)
    assert status not in (0, None) and output.strip().count("\n") <= 1
    named = (
        Path(os.path.realpath(output_path)).name
        if case.kind == FOLDER and way != "a link to nothing"
        else Path(output_path).name
    )
    assert named in output and "allowed" in output
    assert tree(tmp_path) == before
