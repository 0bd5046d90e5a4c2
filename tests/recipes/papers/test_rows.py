"""Every row builds on the meta device with the published number of parameters; its commands are valid."""

import importlib
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fairseq import options

import fairseq_plugin  # noqa: F401  registers the architectures
from recipes.papers.building import count_parameters
from recipes.papers.entries import command_of, entries_of
from recipes.papers.tables import PAPERS, read_paper
from recipes.papers.trainings import Block, NotTrained, blocks_of, here, script, trainings_of, wrapped
from tests.recipes import timm_options

ROOT = Path(__file__).parents[3]
TABLES = [(paper, number) for paper in PAPERS for number in read_paper(paper).tables]
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-validate": options.get_validation_parser,
}
#: Rows of models for which there is no command.
WITHOUT_COMMAND = {"ViT-BASE (2021)", "ViT-LARGE (2021)", "SOFT (2021)", "PixelCNN", "PixelSNAIL"}
#: Notes its command line in a file; fails if that contains a text.
PROGRAM = """#!/bin/sh
echo "${0##*/} $*" >> "$CALLS"
case "${0##*/} $*" in *"$FAILING"*) exit 3;; esac
"""


def trainings(paper: str, number: str) -> list:
    """All trainings of a table, with names."""
    entries = entries_of(paper)[number]
    return [(name, training) for name, entry in entries.items() for training in trainings_of(entry)]


built: dict[tuple, int | None] = {}


@pytest.mark.parametrize("paper, number", TABLES)
def test_every_row_builds_with_the_published_number_of_parameters(paper, number):
    """Takes a second or two per table; 30 in total."""
    for name, training in trainings(paper, number):
        first = next((" ".join(words) for words in training.commands() if words[0] == "fairseq-train"), "")
        key = (training.host, training.model, re.sub(r"(work|checkpoints)/\S+", "", first), training.symbols)
        if key not in built:  # other rows train the same model
            built[key] = count_parameters(training)
        count = built[key]
        assert (count is None) == (training.host == ""), name
        if training.published:
            matches = abs(count / 1e6 / training.published - 1) <= 0.01
            assert matches or training.difference, f"{name}: {count / 1e6:.2f} M, published {training.published} M"


def known_module(words: list[str]) -> None:
    """Assert that the parser of ``python -m recipes.NAME ARGUMENTS`` accepts these arguments."""
    package = ROOT.joinpath(*words[2].split(".")).is_dir()
    module = importlib.import_module(f"{words[2]}.__main__" if package else words[2])
    if hasattr(module, "EXPERIMENT"):
        module.EXPERIMENT.parser().parse_args(words[3:])
    elif hasattr(module, "parser"):
        module.parser().parse_args(words[3:])
    else:
        sources = Path(module.__file__).read_text()
        assert all(f'"{word}"' in sources for word in words[3:] if word.startswith("--"))


def known(words: list[str]) -> None:
    """Raise an error or SystemExit for a command that its program would refuse before reading data."""
    words = words[1:] if words[0] == "PYTHONPATH=." else words
    if words[0] in PARSERS:
        options.parse_args_and_arch(PARSERS[words[0]](), input_args=words[1:])
    elif words[:2] == ["python", "-m"] and words[2].startswith("recipes."):
        known_module(words)
    elif "work/timm-scripts" in " ".join(words):
        script = next(i for i, word in enumerate(words) if word.startswith("work/timm-scripts/"))
        assert {word for word in words[script:] if word.startswith("--")} <= timm_options.OPTIONS
        if "--config" in words:
            assert "model" in yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text())
    else:
        assert words[:3] == ["python", "-m", "timm_plugin.convert"] or words[:2] == ["python", "-c"]


def test_commands_of_timms_scripts_say_that_they_need_a_gpu():
    """They compute on one unless ``--device`` names something else."""
    blocks = [
        block for paper, number in TABLES for entry in entries_of(paper)[number].values() for block in blocks_of(entry)
    ]
    titles = {block.title for block in blocks if any("timm-scripts/" in command for command in block.commands)}
    assert len(titles) > 1 and all("GPU" in title for title in titles)


def test_every_model_has_a_folder_of_its_own():
    """In a shared folder, fairseq would load the other training's checkpoint and consider it finished."""
    owners: dict[str, list[str]] = {}
    for paper, number in TABLES:
        for name, training in trainings(paper, number):
            for words in training.commands():
                for option in {"--save-dir", "--experiment"}.intersection(words):
                    folder = words[words.index(option) + 1]
                    assert owners.setdefault(folder, words) == words, f"Table {number} of {paper}, {name}: {folder}"
                    assert max(map(len, folder.split("/"))) <= 255  # the longest name in a file system


seen = set()


@pytest.mark.parametrize("paper, number", TABLES)
def test_every_command_is_taken_by_its_program(paper, number):
    """Takes half a minute: fairseq parses options slowly."""
    for entry in entries_of(paper)[number].values():
        for words in (words for block in blocks_of(entry) for words in block.first()):
            if tuple(words) not in seen:
                seen.add(tuple(words))
                known(words)


@pytest.mark.parametrize("paper", PAPERS)
def test_every_command_of_a_figure_is_taken_by_its_program(paper):
    commands = {command_of(paper, number) for number in read_paper(paper).figures}
    for command in commands:
        if command.startswith("python "):
            known(shlex.split(command))


def test_a_picture_across_runs_takes_no_run_that_belongs_elsewhere():
    """Runs of tables differ in epochs and in more than the window; the command would refuse or mix them."""
    across = [command for number in ("2", "7") if "--across" in (command := command_of("daft", number))]
    assert len(across) == 2 and not any("output/train" in command for command in across)


class Shell:
    """A bash in which the programs of all commands only note that they were called."""

    def __init__(self, folder: Path) -> None:
        self.calls, self.path = folder / "calls", folder / "bin"
        self.path.mkdir()
        for name in ("python", "torchrun", *PARSERS):
            (self.path / name).write_text(PROGRAM)
            (self.path / name).chmod(0o755)

    def run(self, text: str, failing: str, *options: str) -> tuple[list[str], str]:
        """Type ``text``; commands with ``failing`` in them fail. Returns the calls, and what the shell printed."""
        self.calls.write_text("")
        variables = {"PATH": f"{self.path}{os.pathsep}{os.defpath}", "CALLS": str(self.calls), "FAILING": failing}
        bash = subprocess.run(
            ["bash", "--norc", *options],
            input=text,
            env=variables,
            capture_output=True,
            text=True,
            start_new_session=True,  # without a terminal, which an interactive shell would wait for in the background
        )
        return self.calls.read_text().splitlines(), bash.stdout


def test_every_row_has_a_script_that_stops_at_its_first_error_or_says_why_not(tmp_path):
    """Takes two seconds: bash is started for each of the scripts."""
    shell, scripts, without = Shell(tmp_path), {}, set()
    for paper, number in TABLES:
        for name, entry in entries_of(paper)[number].items():
            if blocks_of(entry):
                scripts[script(blocks_of(entry))] = f"Table {number} of {paper}, {name}"
                continue
            assert isinstance(entry, NotTrained) and entry.reason, f"Table {number} of {paper}, {name}"
            if here(entry).startswith("no command: "):
                without.add(name)
    assert without == WITHOUT_COMMAND and len(scripts) > 100
    for text, row in scripts.items():
        calls, _ = shell.run(text, failing="")
        assert len(calls) == 1, row


@pytest.mark.parametrize("options", [(), ("-i",)])
def test_a_script_whose_command_fails_runs_no_further_one(tmp_path, options):
    """Also where it is pasted into an interactive shell, which goes on and knows the status."""
    shell, entry = Shell(tmp_path), entries_of("flash")["4"]["FLASH, head size = 512"]
    text = script(blocks_of(entry)) + "\necho status $?\n"
    calls, printed = shell.run(text, "--task masked_lm", *options)
    assert [call.split()[0] for call in calls] == ["python", "python", "fairseq-train"]
    assert "status 3" in printed
    calls, printed = shell.run(text, "--lr 3e-05", *options)
    assert len(calls) == 5 and "--lr 3e-05" in calls[-1] and "status 3" in printed
    calls, printed = shell.run(text, "of no command", *options)
    assert len(calls) == 8 and "answers.json" in calls[-1] and "status 0" in printed


def test_a_loop_is_printed_and_filled_in():
    block = Block("titles", ("echo $a $b",), (("a", ("1", "2")), ("b", ("x", "y"))))
    assert block.printed().splitlines() == [
        "# titles",
        "for a in 1 2; do",
        "for b in x y; do",
        "echo $a $b",
        "done",
        "done",
    ]
    assert block.first() == [["echo", "1", "x"]]


def test_a_long_command_is_wrapped_and_stays_the_same():
    command = next(iter(entries_of("flowformer")["4"]["COSFORMER (2022)"].blocks[1].commands))
    lines = wrapped(command).splitlines()
    assert len(lines) > 3 and all(len(line) <= 120 for line in lines)
    assert shlex.split(wrapped(command).replace("\\\n", "")) == shlex.split(command)


def test_what_trainings_share_is_typed_once():
    first, second = (entries_of("flowformer")["4"][row] for row in ("FLOWFORMER", "COSFORMER (2022)"))
    titles = [block.title for block in blocks_of((first, second))]
    assert titles.count("data") == 1 and len(titles) == 5  # the two forms of both rows


def test_a_model_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="daft_huge"):
        count_parameters(replace(entries_of("daft")["2"]["DAFT-full"], model="daft_huge"))
    entry = entries_of("flowformer")["4"]["FLOWFORMER"]
    blocks = tuple(replace_model(block) for block in entry.blocks)
    with pytest.raises(ValueError, match="flowformer_lm_wiki999"):
        count_parameters(replace(entry, blocks=blocks))


def replace_model(block: Block) -> Block:
    """A copy of the block with another architecture."""
    return block._replace(commands=tuple(command.replace("wiki103 ", "wiki999 ") for command in block.commands))
