"""Every row's commands, from data to evaluation: programs accept them, and models have the published parameters."""

import functools
import importlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
from fairseq import options, tasks
from torch import nn
from torch.overrides import TorchFunctionMode

import timm_plugin  # noqa: F401  (registers the models)
from common.attention import FlowAttention
from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.data.series_folder import Description
from recipes.models import dictionary_of, model_options
from recipes.papers.__main__ import main
from recipes.papers.rows import PAPERS, groups, printed, sections
from recipes.runs import ROOT, published
from tests.recipes import timm_options

#: Stands for every program: notes its name and arguments.
PROGRAM = """#!/bin/sh
printf '%s\\0' "${0##*/}" "$@" >> "$CALLS"; printf '\\036' >> "$CALLS"
"""
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-validate": options.get_validation_parser,
}
ROWS = [
    (paper, number, group, row)
    for paper in PAPERS
    for number, listed in groups(paper).items()
    for group in listed
    for row, commands in group["rows"].items()
    if commands or "no command" not in group.get("note", "")
]
#: Table -> the column, or the row where columns are models, with millions of parameters.
PARAMETERS = {
    ("flowformer", "5"): "PARAMS",
    **dict.fromkeys([("flash", "1"), ("flash", "2")], "Params"),
    **dict.fromkeys([("flash", "8"), ("flash", "9"), ("flash", "10")], "Params (M)"),
    **dict.fromkeys([("daft", "2"), ("daft", "3")], "#Params"),
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs shell commands in a folder with recipes/, where programs only note their arguments; returns these."""
    folder, path = tmp_path_factory.mktemp("rows"), tmp_path_factory.mktemp("bin")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    for name in ("python", "torchrun", "git", *PARSERS):
        (path / name).write_text(PROGRAM)
        (path / name).chmod(0o755)

    @functools.cache
    def run(command: str) -> list[list[str]]:
        calls = path / "calls"
        calls.write_text("")
        variables = {"PATH": f"{path}{os.pathsep}{os.defpath}", "CALLS": str(calls)}
        subprocess.run(["bash", "-e", "-c", command], cwd=folder, env=variables, check=True)
        return [call.split("\0")[:-1] for call in calls.read_text().split("\036")[:-1]]

    return run


class WithoutValues(TorchFunctionMode):
    """Skips the drawing of weights, which has no effect on the meta device; RoBERTa would copy them from the CPU."""

    DRAWING = frozenset({"cpu", "add_", "clamp_", "div_", "erfinv_", "fill_", "mul_", "normal_", "uniform_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        tensor = next(iter((*args, *(kwargs or {}).values())), None)
        if getattr(func, "__name__", "") in self.DRAWING and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    with torch.device("meta"), WithoutValues():
        yield


@functools.cache
def fairseq_model(*words: str) -> nn.Module:
    """The model of a command of fairseq-train, without data: stand-ins have what is read of a task."""
    parsed = model_options(words)
    symbols = dictionary_of(32_000)
    longest = getattr(parsed, "max_positions", None) or getattr(parsed, "tokens_per_sample", None)
    task = SimpleNamespace(
        **dict.fromkeys(("source_dictionary", "target_dictionary", "dictionary"), symbols),
        max_positions=lambda: longest,
    )
    if parsed.task == "time_series_classification":  # as JapaneseVowels
        described = Description([str(i) for i in range(9)], [0.0] * 12, [1.0] * 12, 29)
        task = SimpleNamespace(description=described, max_length=29)
    if parsed.task == "offline_rl":  # as HalfCheetah
        state, action = ([0.0] * 17, [1.0] * 17), ([-1.0] * 6, [1.0] * 6)
        described = EpisodeDescription("random", "", *state, *action, 1000, 0.0, 0.0, 0.0)
        task = SimpleNamespace(description=described, context=int(parsed.context), max_episode_length=1000)
    with without_memory():
        return tasks.FairseqTask.build_model(task, parsed)


@functools.cache
def timm_model(*words: str) -> nn.Module:
    """The model of a command of timm's train.py or validate.py."""
    given = " ".join(words).partition(" --model ")[2].split(" --")
    kwargs = model_kwargs(next((word for word in given if word.startswith("model-kwargs ")), ""))
    with without_memory():
        return timm.create_model(given[0], **kwargs)


def model_kwargs(typed: str) -> dict[str, Any]:
    """The arguments of ``--model-kwargs``, as timm's scripts read them."""
    pairs = dict(pair.split("=") for pair in typed.split()[1:])
    return {name: {"True": True, "False": False}.get(x, int(x) if x.isdigit() else x) for name, x in pairs.items()}


@functools.cache
def accepted(*words: str) -> nn.Module | None:
    """Let the program of a command refuse it, before it reads data; the model that it builds, if it trains one."""
    if words[0] in PARSERS:
        arguments = options.parse_args_and_arch(PARSERS[words[0]](), input_args=list(words[1:]))
        assert arguments
        return fairseq_model(*words[1:]) if words[0] == "fairseq-train" else None
    if any(word.startswith("work/timm-scripts/") for word in words):
        script = next(i for i, word in enumerate(words) if word.startswith("work/timm-scripts/"))
        assert {word for word in words[script:] if word.startswith("--")} <= timm_options.OPTIONS
        assert "--config" not in words or (ROOT / words[words.index("--config") + 1]).is_file()
        return timm_model(*words[script:])
    if words[:2] == ("python", "-m") and words[2].startswith("recipes."):
        assert refused_options(words[2], words[3:]) == ["--nosuch"], words
    return None


def refused_options(module: str, words: tuple[str, ...]) -> list[str]:
    """What the parser of ``python -m MODULE`` refuses of its arguments and a further one."""
    package = ROOT.joinpath(*module.split(".")).is_dir()
    main = importlib.import_module(f"{module}.__main__" if package else module).main
    said = io.StringIO()
    with redirect_stderr(said), pytest.raises(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *words, "--nosuch"])
        main()
    return said.getvalue().partition("unrecognized arguments: ")[2].split()


def said(note: str, row: str, number: str) -> bool:
    """Whether a note says a number of this row, or of models, in a part that begins with its name, as "ROW: ..."."""
    parts = [part.partition(":") for part in note.split("; ")]
    return any(number in text and (row.startswith(name) or name.startswith("models ")) for name, _, text in parts)


def published_millions(paper: str, number: str, row: str) -> float | None:
    """The published parameters of a row or of a column."""
    where = PARAMETERS.get((paper, number))
    if where is None or row == "ResNet50":
        return None
    cells = published(paper, number)
    return float(cells[row][where] if row in cells.columns else printed(paper, number, row, where))


@pytest.mark.parametrize(("paper", "number", "group", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_row_is_accepted_by_its_programs_and_has_the_published_parameters(shell, paper, number, group, row) -> None:
    """Within 1 %, or the row says how many; it also says how Flow-Attention is clamped. A minute in all."""
    count = published_millions(paper, number, row)
    for command in group["rows"][row]:
        built = [accepted(*words) for words in shell(command.replace("TEXT", "any.txt"))]
        for model in list(filter(None, built))[:1]:  # that of the shortest length, whose positions are fewest
            millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            if count:
                near = abs(millions / count - 1) <= 0.01
                assert near or said(group.get("note", ""), row, f"{millions:.1f} M"), (
                    f"{millions:.2f} M, published {count}"
                )
            clamps = {module.options.clamp for module in model.modules() if isinstance(module, FlowAttention)}
            if clamps and len(group["rows"][row]) < 3 and "for model" not in command:
                number_said = re.search(r"(?:--flow-clamp |clamp=)(\d+)|no clamp", group.get("note", ""))
                assert clamps == {float(number_said[1]) if number_said[1] else None}
    assert built


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_of_all_rows_in_small_are_accepted(shell, paper) -> None:
    for command in {group["small"] for listed in groups(paper).values() for group in listed if "small" in group}:
        for words in shell(command.replace("TEXT", "any.txt")):
            accepted(*words)


def test_every_training_has_a_folder_of_its_own(shell) -> None:
    """In a shared one, fairseq would load the other model's checkpoint and consider it finished."""
    owners: dict[str, list[str]] = {}
    for *_, group, row in ROWS:
        for words in (words for command in group["rows"][row] for words in shell(command.replace("TEXT", "any.txt"))):
            for option in {"--save-dir", "--experiment"}.intersection(words):
                folder = words[words.index(option) + 1]
                assert owners.setdefault(folder, words) == words


def test_every_row_is_in_its_table() -> None:
    for paper, number, group, _ in ROWS:
        names = group["rows"]
        if number == "figures":
            assert all(f"\n{name}. " in sections(paper)[number] for name in names)
            continue
        heading = next(iter(re.findall(r"Table (.*?):", sections(paper)[number])))
        cells = published(paper, heading)
        for name in names:
            first = name.split(", ")[0]
            assert any(printed_name.startswith((name, first)) for printed_name in (*cells.index, *cells.columns)), name


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", ["beside-figure-1", "Table A", "figures"]),
        ("flowformer 5", ["| FLOWFORMER |", "cannot include", "sh recipes/imagenet/train.sh", "recipes.papers.images"]),
        ("flowformer 4 --row cosFormer", ["cosformer_lm_wiki103", "Equation 9"]),
        ("flowformer 6 --row soft", ["no command"]),
        ("daft 2 --row daft-full", ["daft_conv_s daft_full_s"]),
        ("daft figures --row 4", ["recipes.cifar10_pixels.complete"]),
    ],
)
def test_the_command_prints_tables_and_rows(arguments: str, shown: list[str], capsys) -> None:
    main(arguments.split())
    text = capsys.readouterr().out
    assert all(word in text for word in shown)


@pytest.mark.parametrize("arguments", ["flash nosuch", "flash 4 --row FLASH", "daft 2 --row nosuch"])
def test_what_is_not_there_is_refused_with_what_is(arguments: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert f"is {arguments.split()[-1]}; allowed: " in capsys.readouterr().err
