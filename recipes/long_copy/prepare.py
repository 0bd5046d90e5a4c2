"""Make the data of long copy from any text: ``python -m recipes.long_copy.prepare --file FILE --out DIR``.

A source is a piece of the text, one token per character, with some passages marked. The target is these passages in
order. ``fairseq-train --task translation`` reads the result.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder

from ..shared.characters import spell
from ..shared.commands import shown_path
from ..shared.indexed_files import split_writer, write_dictionary
from ..shared.scripts import positive_int, script
from ..shared.settings import given, keep_settings
from ..shared.text_files import TRIAL_PARTS
from ..shared.working_folder import working_folder
from .passages import Layout, Symbols, draw

COMMAND = "recipes.long_copy.prepare"
#: The command that owns the folders data-bin, also in the comparison.
WRITER = COMMAND
SOURCE, TARGET = "source", "target"
SPLITS = tuple(TRIAL_PARTS)
LAYOUT = Layout(source_tokens=2048, spans=16, span_tokens=1)
EXAMPLES = {"train": 32_000, "valid": 200, "test": 200}


class Data(NamedTuple):
    """Settings of the data made of a text: sizes, number of examples of each split, and seed."""

    layout: Layout
    examples: dict[str, int]
    seed: int


def read_text(path: Path) -> list[str]:
    """The characters of a text as symbols, including the ends of its lines.

    Raises:
        ValueError: there is no such file, or it is not text in UTF-8.
    """
    if not path.is_file():
        raise ValueError(f"--file is {path}, which is no file; allowed: a text file")
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--file is {path}, which is not text in UTF-8: {error}; allowed: a text file") from error
    return spell(text + "\n").split()


def cut(tokens: Sequence[str], layout: Layout) -> dict[str, Sequence[str]]:
    """Train, valid and test of a text, one after another, so that no passage is in two of them.

    Raises:
        ValueError: the smallest part is shorter than a source.
    """
    ends = np.cumsum([0, *TRIAL_PARTS.values()])
    ends = np.round(ends / ends[-1] * len(tokens)).astype(int)
    parts = {split: tokens[start:end] for split, start, end in zip(SPLITS, ends, ends[1:])}
    shortest = min(parts, key=lambda split: len(parts[split]))
    longest = len(parts[shortest])
    if layout.source_tokens > longest:
        raise ValueError(
            f"--source-tokens is {layout.source_tokens}; allowed: at most {longest}, the characters of --file that are "
            f"kept for {shortest}"
        )
    return parts


def prepare(path: Path, out: Path, data: Data) -> Path:
    """Make the data in ``out``, unless it exists; returns the folder that fairseq reads.

    Raises:
        ValueError: the text does not fit the sizes, or ``out`` has data of another text or of other sizes, or files
            of another command.
    """
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        return _prepare(path, out, data)


def _prepare(path: Path, out: Path, data: Data) -> Path:
    data.layout.check()
    tokens = read_text(path)
    parts = cut(tokens, data.layout)
    data_bin = out / "data-bin"
    sizes = {**given("file", path), "characters": len(tokens), "--seed": data.seed}
    keep_settings(out / "data.json", {**sizes, **data.layout._asdict(), **data.examples})
    if data_bin.exists():
        return data_bin
    symbols = Symbols(tokens)
    with new_folder(data_bin, WRITER) as folder:
        for language in (SOURCE, TARGET):
            write_dictionary(folder, symbols.dictionary, f"dict.{language}.txt")
        for number, (split, part) in enumerate(parts.items()):
            generator = np.random.default_rng([data.seed, number])
            _write(folder, split, symbols.numbers(part), data, symbols, generator)
    return data_bin


def _write(
    folder: Path, split: str, text: np.ndarray, data: Data, symbols: Symbols, generator: np.random.Generator
) -> None:
    """Write the examples of a split, both sides at once; each line ends with </s>, as fairseq-preprocess has it."""
    size, name = len(symbols.dictionary), f"{split}.{SOURCE}-{TARGET}"
    end = symbols.dictionary.eos()
    with (
        split_writer(folder, f"{name}.{SOURCE}", size) as write_source,
        split_writer(folder, f"{name}.{TARGET}", size) as write_target,
    ):
        for _ in tqdm(range(data.examples[split]), desc=split, unit=" examples", leave=False, disable=None):
            example = draw(text, data.layout, symbols, generator)
            write_source(np.append(example.source, end))
            write_target(np.append(example.target, end))


def add_options(parser: CommandParser) -> None:
    """Add the options of the data to ``parser``."""
    parser.add_argument("--file", type=Path, required=True, help="any text in UTF-8")
    sizes = {
        "--source-tokens": (LAYOUT.source_tokens, "of each source"),
        "--spans": (LAYOUT.spans, "marked passages of a source, one in each equal part"),
        "--span-tokens": (LAYOUT.span_tokens, "of each passage"),
        "--train": (EXAMPLES["train"], "examples to train on"),
        "--valid": (EXAMPLES["valid"], "examples to select a checkpoint"),
        "--test": (EXAMPLES["test"], "examples to generate from"),
    }
    for option, (default, text) in sizes.items():
        parser.add_argument(option, type=positive_int, default=default, help=f"{text} (%(default)s)")


def chosen_data(options: argparse.Namespace, seed: int) -> Data:
    """The settings of the data, from the values of the options."""
    sizes = vars(options)
    layout = Layout(*(sizes[name] for name in Layout._fields))
    return Data(layout, {split: sizes[split] for split in SPLITS}, seed)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.long_copy.prepare", description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("work/long_copy"), help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (%(default)s)")
    return parser


@script("prepare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    data_bin = prepare(options.file, options.out.absolute(), chosen_data(options, options.seed))
    print(f"Ready: {shown_path(data_bin)}. The commands to train with are in recipes/long_copy/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
