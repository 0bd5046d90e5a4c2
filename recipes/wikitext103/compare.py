"""Train a language model with every causal attention on any text, with one budget; print perplexity, speed and memory.

``python -m recipes.wikitext103.compare --file FILE --seeds 3`` from the checkout's root, through fairseq-train. Run
again, it goes on where it was interrupted.
"""

import argparse
import functools
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common.command_parser import CommandParser

from ..flash.subword_text import encode, train_sentencepiece
from ..shared.characters import spell_file
from ..shared.comparison import Compared, Report, show, train_and_read
from ..shared.json_files import read_json, write_json
from ..shared.scripts import command_line, positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.subwords import load_sentencepiece
from ..shared.text_files import read_lines
from ..shared.trainings import Trained, read_parameters, read_points
from ..shared.working_folder import working_folder
from .plan import Plan, default_names, model_names
from .prepare import SPLITS, WRITER, binarise, count, split_path, take_file
from .results import Result, report

COMMAND = "recipes.wikitext103.compare"
#: A text of fewer bytes is read in characters: words would be too few to learn from, and most parameters theirs.
WORDS_FROM_BYTES = 20_000_000
UPDATES, EVALUATIONS = 1_600, 8
FILE_HELP = "any text, or WikiText-103 as prepare --file takes it"
#: To see that everything runs; nothing is learned.
QUICK_UPDATES, QUICK_LINES = 8, 400


def prepare(path: Path, out: Path, characters: bool, limit: int | None, subwords: int | None = None) -> dict[str, int]:
    """Put the text at ``path`` into ``out``/data-bin, unless it is there; returns the tokens of each split.

    Args:
        characters: a token is a character; else a word, or a subword.
        limit: lines of a text file that are used, from the first one; None: all.
        subwords: how many there are, fairseq's four symbols included; None: tokens are no subwords.

    Raises:
        ValueError: no text, too little for so many subwords, or ``out`` was begun with another one.
    """
    if not path.exists():
        raise ValueError(f"--file is {path}, which does not exist; allowed: a text file, or what prepare --file takes")
    size = sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else [path]))
    settings = {"file": path.name, "bytes": size, "characters": characters, "lines": limit}
    keep_settings(out / "text.json", settings | ({"subwords": subwords} if subwords else {}))
    done = out / "tokens.json"
    if not done.exists():
        take_file(path, out / "text", limit)
        if subwords:
            _into_subwords(out / "text", subwords)
        for split in SPLITS if characters else ():
            spell_file(split_path(out / "text", split))
        binarise(out / "text", out / "data-bin", workers=1)
        tokens = {split: count(split_path(out / "text", split)).tokens for split in SPLITS}
        write_json(done, tokens)
    return read_json(done, **dict.fromkeys(SPLITS, int))


def _into_subwords(folder: Path, number: int) -> None:
    """Write the three splits anew, in subwords of a model of the train split, which is kept beside them."""
    prefix = folder / "sentencepiece"
    lines = (line.rstrip("\n") for line in read_lines(split_path(folder, "train")))
    train_sentencepiece(lines, prefix.with_suffix(".model"), number, masked=False, threads=1, option="--subwords")
    model = load_sentencepiece(prefix)
    for split in SPLITS:
        path = split_path(folder, split)
        encode([[line.rstrip("\n")] for line in read_lines(path)], model, path, threads=1)


def read_result(name: str, seed: int, folder: Path, trained: Trained) -> Result:
    """A complete training; the test text's perplexity is that of the checkpoint best on valid."""
    points = read_points(folder)
    valid = {point.update: point.values["ppl"] for point in points if point.split == "valid"}
    test = {point.update: point.values["ppl"] for point in points if point.split == "test"}
    best = min(valid, key=valid.__getitem__)
    return Result(
        name,
        seed,
        read_parameters(folder),
        test[best],
        best,
        sorted(valid.items()),
        # Of four intervals one has an evaluation in it.
        statistics.median(point.values["wps"] for point in points if point.split == "train_inner"),
        trained.peak_bytes,
        trained.seconds,
        trained.command,
    )


def parser(
    command: str,
    description: str,
    known: Sequence[str] = (),
    default: Sequence[str] = (),
    takes_file: bool = True,
    updates: int = UPDATES,
) -> CommandParser:
    """The options of ``command``, which trains some models of the names ``known``, by ``default`` those, ``updates``.

    Without ``known``, ``--models`` is left to the command; without ``takes_file``, ``--file`` is.
    """
    parser = CommandParser(prog=f"python -m {command}", description=description)
    if takes_file:
        parser.add_argument("--file", type=Path, required=True, help=FILE_HELP)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--characters", action="store_true", help="a character is a token: the default for small texts")
    kinds.add_argument(
        "--words", action="store_true", help=f"a word is a token: the default from {WORDS_FROM_BYTES:,} bytes on"
    )
    kinds.add_argument("--subwords", type=positive_int, metavar="N", help="N subwords, learned from the train part")
    parser.add_argument("--limit", type=positive_int, metavar="LINES", help="only the first lines of a text file")
    out = Path("work/wikitext103") / command.rpartition(".")[2]
    parser.add_argument("--out", type=Path, default=out, help="default: %(default)s")
    if known:
        parser.add_argument(
            "--models",
            nargs="+",
            type=functools.partial(model, known=known),
            default=default,
            metavar="NAME",
            help="mechanisms, also with additions, as in NAME+forget+short_conv; default: %(default)s",
        )
    parser.add_argument("--seeds", type=positive_int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--jobs", type=positive_int, default=1, help="trainings at a time, a thread each (%(default)s)")
    parser.add_argument("--updates", type=positive_int, help=f"of every training; default: {updates:,}")
    parser.set_defaults(usual_updates=updates)
    parser.add_argument(
        "--lr", type=positive_number, default=3e-3, help="highest learning rate, of all models (%(default)s)"
    )
    sizes = {"batch-tokens": 2048, "tokens-per-sample": 256, "width": 128, "layers": 2, "heads": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive_int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--more", default="", metavar="ARGUMENTS", help='of fairseq-train, as in --more "--lineartime-post-norm"'
    )
    parser.add_argument("--quick", action="store_true", help="only see that everything runs: nothing is learned")
    return parser


def model(name: str, known: Sequence[str] | None = None) -> str:
    """A name of a model, one of ``known``, or of ``model_names()`` if None.

    Raises:
        argparse.ArgumentTypeError: there is none of that name.
    """
    known = model_names() if known is None else known
    if name not in known:
        raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(known)}")
    return name


@script("compare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser(COMMAND, __doc__.splitlines()[0], model_names(), default_names()).parse_args(arguments)
    return compare(options, Plan, COMMAND, arguments)


def compare(
    options: argparse.Namespace,
    kind: type[Plan],
    command: str,
    arguments: Sequence[str] | None,
    evaluations: int = EVALUATIONS,
    shown: Callable[[Plan, dict[str, int], str, Compared], Report] = report,
) -> int:
    """Train the models of ``options`` as a plan of this ``kind`` says, and show them; returns the exit status.

    Args:
        command: the module whose ``arguments`` the options are, and whose folder is ``--out``.
        evaluations: during each training, unless there are fewer updates.
        shown: the report of a plan, the tokens of each split, what a token is, and the outcomes.
    """
    plan = kind.chosen(
        options,
        updates=options.updates or (QUICK_UPDATES if options.quick else options.usual_updates),
        evaluations=min(evaluations, options.updates or evaluations),
        more=shlex.split(options.more),
    )
    out = options.out.absolute()
    with working_folder(out, command, whole={"data-bin": WRITER}):
        return _compare(options, plan, out, command_line(command, arguments), shown)


def _compare(options: argparse.Namespace, plan: Plan, out: Path, command: str, shown: Callable[..., Report]) -> int:
    started = time.monotonic()
    keep_settings(out / "settings.json", plan.settings())
    tokens, unit = prepare_chosen(options, out)
    compared = train_and_read(plan.trainings(out / "data-bin"), out / "runs", options.jobs, read_result)
    show(out, shown(plan, tokens, unit, compared), command, started)
    return compared.status


def prepare_chosen(options: argparse.Namespace, out: Path) -> tuple[dict[str, int], str]:
    """``prepare`` the text of ``options``; the tokens of each split, and what a token is, as "characters"."""
    size = options.file.stat().st_size if options.file.is_file() else WORDS_FROM_BYTES
    small = size < WORDS_FROM_BYTES and not (options.words or options.subwords)
    characters = options.characters or small
    unit = "characters" if characters else "subwords" if options.subwords else "words"
    limit = options.limit or (QUICK_LINES if options.quick else None)
    tokens = prepare(options.file.absolute(), out, characters, limit, options.subwords)
    return tokens, unit


if __name__ == "__main__":
    sys.exit(main())
