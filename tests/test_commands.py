"""Every ``python -m`` command of the three packages: full option names, negative numbers, one-line errors.

All commands run in this process, by their main functions, and are refused before they start to work.
"""

import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from timm.utils import ParseKwargs

from common.command_parser import CommandParser
from tests.processes import CHECKOUT

PACKAGES = ("common", "fairseq_plugin", "timm_plugin")
#: It passes all of its options to a script of timm.
LAUNCHER = "timm_plugin.__main__"

#: Command lines with one wrong path. {file} stands for a missing path or a folder instead of a file; {folder} for a
#: missing path or a file instead of a folder; {format} for both, and for a file in another format; {missing} for a
#: missing path.
WRONG_PATHS = """
fairseq_plugin.convert {format} new.pt
fairseq_plugin.convert text.txt {missing}
fairseq_plugin.export_hf {format} new
fairseq_plugin.export_hf text.txt {missing}
fairseq_plugin.export_step {format} new.onnx
fairseq_plugin.export_step text.txt {missing}.onnx
fairseq_plugin.from_safetensors {folder} new
fairseq_plugin.import_hf {format} new.pt
fairseq_plugin.import_hf folder {missing}
fairseq_plugin.to_safetensors {format} new --dict text.txt
timm_plugin {file}
timm_plugin.convert daft_full_s {format} new.pth
timm_plugin.transfer --teacher test_vit --attn flow --output x.pth --data-dir . --teacher-checkpoint={format}
timm_plugin.transfer --teacher test_vit --attn flow --output x.pth --data-dir {missing}
timm_plugin.transfer --teacher local-dir:{folder} --attn flow --output x.pth --data-dir .
"""
PLACES = {"missing": "nothing/here", "folder": "folder", "text": "text.txt"}
WRONG = {
    "file": ("missing", "folder"),
    "folder": ("missing", "text"),
    "format": ("missing", "folder", "text"),
    "missing": ("missing",),
}
#: Command lines with another error, and the word that the message contains.
MISTAKES = {
    "timm_plugin.transfer --teacher test_vit --attn flow --output x.pth --data-dir . --model X": "--model",
    "timm_plugin.convert daft_full_s text.txt new.pth --model X": "--model",
    "timm_plugin.convert daft_full_s text.txt new.pth --model-kwargs nonsense": "nonsense",
    "timm_plugin.transfer --teacher nosuch --attn flow --output x.pth --data-dir .": "nosuch",
    "timm_plugin.convert nosuch text.txt new.pth": "nosuch",
    "fairseq_plugin --options nosuch": "nosuch",
    "fairseq_plugin.convert text.txt new.pt --model-overrides nonsense": "nonsense",
}


def commands() -> Iterator[str]:
    """The modules that run as commands."""
    for package in PACKAGES:
        for path in sorted((CHECKOUT / package).rglob("*.py")):
            if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
                yield ".".join(path.relative_to(CHECKOUT).with_suffix("").parts)


COMMANDS = list(commands())
with_parser = pytest.mark.parametrize("name", [name for name in COMMANDS if name != LAUNCHER])


class _Found(Exception):
    """Carries a command's parser out of its main function."""


def parser_of(name: str) -> CommandParser:
    """The parser that the command ``name`` uses for its command line, with nothing required."""

    def found(parser: CommandParser, *_: object) -> None:
        raise _Found(parser)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Found) as caught:
        for method in ("parse_args", "parse_known_args"):
            patch.setattr(CommandParser, method, found)
        importlib.import_module(name).main([])
    parser = caught.value.args[0]
    for group in parser._mutually_exclusive_groups:
        group.required = False
    return parser


def values_of(action: Any) -> int:
    """The minimum number of values of an option; 0 for a flag, and for NAME=VALUE."""
    if action.nargs == 0 or isinstance(action, ParseKwargs):
        return 0
    return action.nargs if isinstance(action.nargs, int) else 1


def required(parser: CommandParser) -> list[str]:
    """Valid words for everything that the command requires."""
    words = []
    for action in (action for action in parser._actions if action.required):
        value = str(next(iter(action.choices))) if action.choices else "1"
        words += [*action.option_strings[:1], *[value] * values_of(action)]
    return words


@pytest.fixture
def logging_as_before() -> Iterator[None]:
    """Undo the logging settings of a command, which normally has its own process."""
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys, logging_as_before):
    """Runs a command that must be refused in one line, in its own folder, and returns the line."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text.txt").write_text("Words that are no other format.\n" * 50)
    Image.new("RGB", (8, 8)).save("image.png")

    def run(name: str, words: list[str]) -> str:
        package = CHECKOUT / name.replace(".", "/")
        try:
            status = importlib.import_module(f"{name}.__main__" if package.is_dir() else name).main(words)
        except SystemExit as error:
            status = error.code
        printed = f"{capsys.readouterr().err}{status if isinstance(status, str) else ''}"
        assert status and "Traceback" not in printed
        return printed.rstrip("\n").splitlines()[-1]

    return run


def is_number(action: Any) -> bool:
    """Whether the values of an option are numbers or lists of numbers."""
    if action.type is None or not values_of(action):
        return False
    try:
        value = action.type("5")
    except Exception:  # any error of a type of names or paths
        return False
    return all(isinstance(x, (int, float)) for x in (value if isinstance(value, (list, tuple)) else [value]))


@with_parser
def test_no_option_is_abbreviated_and_each_takes_a_negative_number(name):
    parser = parser_of(name)
    options = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    option_names = {option for action in options for option in action.option_strings}
    for action in parser._actions:
        action.required, action.type, action.choices = False, None, None
    for action in options:
        for option in (x for x in action.option_strings if x.startswith("--")):
            for word in {option[:length] for length in range(3, len(option))} - option_names:
                assert word in parser.parse_known_args([word, "X"])[1], f"{word} is read as {option}"
        for number in ("-5", "-.5", "-200,-800", "-1e-3", "-inf"):
            numbers = [number] * values_of(action)
            if numbers:
                value = vars(parser.parse_args([action.option_strings[0], *numbers]))[action.dest]
                assert number in (value if isinstance(value, list) else [value]), (action.option_strings, number)


@with_parser
def test_mistakes_in_the_command_line_are_one_line_that_names_them(name, refused):
    """An unknown option; text in place of a number; no arguments at all, if some are required."""
    parser = parser_of(name)
    needed = required(parser)
    assert "--no-such-option" in refused(name, [*needed, "--no-such-option"])
    if required(parser):
        assert "required" in refused(name, [])
    for action in filter(is_number, parser._actions):
        word = action.option_strings[:1]
        line = refused(name, [*needed, *word, *["some-text"] * values_of(action)])
        assert "some-text" in line and re.search("|".join(action.option_strings) or action.dest, line)


@pytest.mark.parametrize("words", WRONG_PATHS.strip().splitlines())
def test_wrong_paths_are_one_line_that_names_them(words, refused):
    (kind,) = re.findall(r"{(\w+)}", words)
    for wrong in WRONG[kind]:
        name, *arguments = words.format(**{kind: PLACES[wrong]}).split()
        assert PLACES[wrong] in refused(name, arguments)


@pytest.mark.parametrize("words", MISTAKES)
def test_other_mistakes_are_one_line_that_names_them(words, refused):
    name, *arguments = words.split()
    assert MISTAKES[words] in refused(name, arguments)


def test_no_command_that_takes_paths_is_left_out():
    with_paths = {name for name in COMMANDS if name != LAUNCHER for x in parser_of(name)._actions if x.type is Path}
    tried = {words.split()[0] for words in WRONG_PATHS.strip().splitlines()}
    assert {name.removesuffix(".__main__") for name in with_paths} <= tried
