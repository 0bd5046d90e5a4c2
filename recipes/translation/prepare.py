"""Make a translation data set of a machine's message catalogues: ``python -m recipes.translation.prepare``.

Run it from the checkout's root. ``fairseq-train --task translation`` reads the result. Nothing is downloaded.
"""

import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import sacrebleu
import sentencepiece

from common.command_parser import CommandParser

from ..shared.commands import shown_path
from ..shared.json_files import read_json, write_json
from ..shared.scripts import positive_int, script
from ..shared.settings import check_settings, keep_settings
from ..shared.split_text import preprocess
from ..shared.subword_text import encode, train_sentencepiece, write_dictionary
from ..shared.text_files import TRIAL_PARTS, write_lines
from ..shared.working_folder import working_folder
from .catalogues import ENGLISH, FOLDERS, Pair, read_messages
from .parts import Parts, split

COMMAND = "recipes.translation.prepare"
#: The command that owns the folders data-bin, also in the comparison.
WRITER = COMMAND
SUBWORDS = 3_000
FOLDER_HELP = "with LANGUAGE/LC_MESSAGES/PROGRAM.mo; default: those of Linux systems"
SOURCE_HELP = "language to translate from; en: the messages as programs have them (%(default)s)"
TARGET_HELP = "language to translate to, or en (%(default)s)"
SUBWORDS_HELP = "rows of the embedding, shared by both languages (%(default)s)"


class Settings(NamedTuple):
    """How messages become a data set."""

    source: str
    target: str
    subwords: int
    seed: int = 1  # of the division of programs

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        return self.source, self.target


def prepare(folders: Sequence[Path], out: Path, settings: Settings) -> dict[str, Any]:
    """Make the data in ``out``, unless it exists; returns its manifest.

    Raises:
        CommandFailed: fairseq-preprocess failed.
        ValueError: there are no catalogues or too few, or ``out`` has data of others, or files of another command.
    """
    with working_folder(out, COMMAND, whole={"data-bin": WRITER}):
        messages = read_messages(folders, settings.source, settings.target)
        for path, reason in messages.skipped.items():
            print(f"  {path} is left out: {reason}", file=sys.stderr)
        parts = split(messages.pairs, settings.seed)
        found = {"messages": len(messages.pairs), "messages_sha256": _digest(messages.pairs)}
        check_settings(out / "data.json", {**settings._asdict(), **found})
        if not (out / "manifest.json").exists():
            tokens = _to_data_bin(parts, out, settings)
            # Not before: the folder does not keep settings that these messages do not allow.
            keep_settings(out / "data.json", {**settings._asdict(), **found})
            left_out = {**messages.left_out, "nearly the same in another part": parts.near}
            about = {**settings._asdict(), **found, "left_out": left_out, "skipped": messages.skipped}
            parts_about = {part: _describe(getattr(parts, part), tokens[part]) for part in TRIAL_PARTS}
            # The score of a translator that only copies, since names and places to fill in are the same in both.
            texts = [pair.source for pair in parts.test], [[pair.target for pair in parts.test]]
            about["copied_bleu"] = sacrebleu.corpus_bleu(*texts).score
            write_json(out / "manifest.json", {**about, "parts": parts_about})
        return read_json(out / "manifest.json", parts=dict[str, dict], skipped=dict, left_out=dict, copied_bleu=float)


def text_path(out: Path, part: str, language: str) -> Path:
    """The messages of a part in one language as text, one a line."""
    return out / "text" / f"{part}.{language}"


def subwords_path(out: Path) -> Path:
    """The model of sentencepiece."""
    return out / "sentencepiece.model"


def _digest(pairs: Iterable[Pair]) -> str:
    return hashlib.sha256("\n".join("\t".join(pair) for pair in pairs).encode()).hexdigest()


def _describe(pairs: Sequence[Pair], tokens: dict[str, int]) -> dict[str, Any]:
    """A part in the manifest: its size, and the number of pairs of each program."""
    return {"pairs": len(pairs), "tokens": tokens, "programs": dict(Counter(pair.program for pair in pairs))}


def _to_data_bin(parts: Parts, out: Path, settings: Settings) -> dict[str, dict[str, int]]:
    """Write ``out``/data-bin in subwords of the train part; returns part -> language -> tokens, ends included."""
    subwords, dictionary = subwords_path(out), out / "dict.txt"
    lines = [text for pair in parts.train for text in (pair.source, pair.target)]
    train_sentencepiece(lines, subwords, settings.subwords, masked=False, threads=1, option="--subwords")
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords))
    write_dictionary(model, dictionary)
    tokens: dict[str, dict[str, int]] = {}
    for part in TRIAL_PARTS:
        tokens[part] = {}
        for language, side in zip(settings.languages, ("source", "target")):
            texts = [getattr(pair, side) for pair in getattr(parts, part)]
            write_lines(text_path(out, part, language), (text + "\n" for text in texts))
            path = out / "pieces" / f"{part}.{language}"
            tokens[part][language] = encode([[text] for text in texts], model, path, threads=1).tokens
    prefixes = {part: out / "pieces" / part for part in TRIAL_PARTS}
    options = ("--srcdict", dictionary, "--joined-dictionary")
    preprocess(prefixes, out / "data-bin", WRITER, out / "preprocess.log", *options, languages=settings.languages)
    return tokens


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, nargs="+", metavar="DIR", default=list(FOLDERS), help=FOLDER_HELP)
    parser.add_argument("--source", default=ENGLISH, metavar="LANGUAGE", help=SOURCE_HELP)
    parser.add_argument("--target", default="de", metavar="LANGUAGE", help=TARGET_HELP)
    parser.add_argument("--subwords", type=positive_int, default=SUBWORDS, help=SUBWORDS_HELP)
    parser.add_argument("--seed", type=int, default=1, help="of the division of programs (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("work/translation"), help="default: %(default)s")
    return parser


@script("prepare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    settings = Settings(options.source, options.target, options.subwords, options.seed)
    manifest = prepare(options.folder, options.out.absolute(), settings)
    for part, about in manifest["parts"].items():
        print(f"  {part:<5}  {about['pairs']:7,d} messages of {len(about['programs'])} programs")
    for reason, number in manifest["left_out"].items():
        print(f"  left out: {number:,d} messages, {reason}")
    print(f"  left out: {len(manifest['skipped'])} catalogues that gettext cannot read")
    print(f"Ready: {shown_path(options.out / 'data-bin')}. How to train is in recipes/translation/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
