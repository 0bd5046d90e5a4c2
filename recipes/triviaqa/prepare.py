"""Make a folder for ``--task span_extraction`` of TriviaQA's files: ``python -m recipes.triviaqa.prepare wikipedia``.

Run from the checkout's root. Nothing is downloaded. The subwords are those that the model was pretrained with, in a
folder of ``recipes.flash.prepare``.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
from fairseq.data import Dictionary
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.data.span_folder import DICTIONARY_FILE, DOCUMENT, QUESTION, Question, write_questions

from ..shared.commands import shown_path
from ..shared.documents import paragraphs
from ..shared.indexed_files import split_writer, write_dictionary
from ..shared.scripts import positive_int, script
from ..shared.working_folder import working_folder
from .gold_spans import SpelledDocument, answer_pattern
from .questions import DOMAINS, SPLITS, Asked, find_document, find_questions, read_questions

COMMAND = "recipes.triviaqa.prepare"
#: The recorded writer of data-bin folders.
WRITER = COMMAND


class Subwords(NamedTuple):
    """A sentencepiece model and the dictionary of the same subwords."""

    model: sentencepiece.SentencePieceProcessor
    dictionary: Dictionary
    workers: int

    def split(self, text: str) -> list[str]:
        """Split ``text`` into subwords line by line, as ``recipes.flash.prepare`` does."""
        lines = self.model.encode(paragraphs(text), out_type=str, num_threads=self.workers)
        return [subword for line in lines for subword in line]

    def numbers(self, subwords: Sequence[str]) -> np.ndarray:
        """The tokens (T,) of ``subwords``, int32."""
        return np.array([self.dictionary.index(subword) for subword in subwords], dtype=np.int32)


class Counts(NamedTuple):
    """The size of a split."""

    questions: int
    documents: int
    pairs: int  # (question, document)
    spans: int
    tokens: int  # of the documents, each counted once
    left_out: int  # pairs without a gold span


def load_subwords(folder: Path, workers: int) -> Subwords:
    """Load the subwords from a folder of ``recipes.flash.prepare``.

    Raises:
        ValueError: the folder has no subwords.
    """
    for name in ("sentencepiece.model", DICTIONARY_FILE):
        if not (folder / name).is_file():
            raise ValueError(
                f"--subwords is {folder}, which has no {name}; allowed: a folder of python -m recipes.flash.prepare"
            )
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    return Subwords(model, Dictionary.load(str(folder / DICTIONARY_FILE)), workers)


def write_split(folder: Path, split: str, source: Path, asked: Sequence[Asked], subwords: Subwords) -> Counts:
    """Write a split into ``folder``; a document with several questions is written once.

    The training split drops pairs whose document contains no gold answer, since the document may still answer the
    question in other words.

    Raises:
        ValueError: a document is missing or not text, or no pair remains.
    """
    questions_of: dict[str, list[int]] = {}
    for number, question_record in enumerate(asked):
        for name in question_record.documents:
            questions_of.setdefault(name, []).append(number)
    patterns = [answer_pattern(question_record.answers) for question_record in asked]
    pairs, spans, documents_written, tokens, left_out = [], [], 0, 0, 0
    size = len(subwords.dictionary)
    with split_writer(folder / DOCUMENT, split, size) as write:
        for name, questions in tqdm(questions_of.items(), desc=split, unit=" documents", leave=False, disable=None):
            pieces = subwords.split(_read_document(source, name))
            document = SpelledDocument(pieces)
            matches = {question: document.find(patterns[question]) for question in questions}
            kept_questions = [
                question for question in questions if pieces and (split != "train" or len(matches[question]))
            ]
            left_out += len(questions) - len(kept_questions)
            if kept_questions:
                write(subwords.numbers(pieces))
                pairs += [(question, documents_written) for question in kept_questions]
                spans += [matches[question] for question in kept_questions]
                documents_written, tokens = documents_written + 1, tokens + len(pieces)
    if not pairs:
        raise ValueError(f"no document of {split} has an answer of its questions; allowed: at least one")
    _write_questions(folder, split, asked, subwords)
    arrays = {
        "pairs": np.array(pairs),
        "counts": np.array([len(question_record) for question_record in spans]),
        "spans": np.concatenate(spans),
    }
    np.savez(folder / f"{split}.npz", **arrays)
    return Counts(len(asked), documents_written, len(pairs), len(arrays["spans"]), tokens, left_out)


def _write_questions(folder: Path, split: str, asked: Sequence[Asked], subwords: Subwords) -> None:
    with split_writer(folder / QUESTION, split, len(subwords.dictionary)) as write:
        for question in asked:
            pieces = subwords.split(question.question)
            if not pieces:
                raise ValueError(f"the question {question.name} is empty; allowed: a text")
            write(subwords.numbers(pieces))
    write_questions([Question(question.name, list(question.answers)) for question in asked], folder / f"{split}.json")


def _read_document(source: Path, name: str) -> str:
    path = find_document(source, name)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error}; allowed: a document of TriviaQA") from error


def prepare(options: argparse.Namespace) -> dict[str, Counts]:
    """Write data-bin from the data set's files; returns the size of each split.

    Raises:
        ValueError: see the functions above.
    """
    subwords = load_subwords(options.subwords, options.workers)
    questions = {
        split: read_questions(find_questions(options.file, options.domain, split))[: options.limit] for split in SPLITS
    }
    with new_folder(options.out / "data-bin", WRITER) as folder:
        for kind in (QUESTION, DOCUMENT):
            (folder / kind).mkdir()
        write_dictionary(folder, subwords.dictionary)
        return {split: write_split(folder, split, options.file, questions[split], subwords) for split in SPLITS}


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("domain", choices=DOMAINS, help="which questions: with pages of Wikipedia, or of the web")
    parser.add_argument("--file", type=Path, required=True, metavar="FOLDER", help="triviaqa-rc, with qa and evidence")
    parser.add_argument(
        "--subwords", type=Path, required=True, metavar="FOLDER", help="of recipes.flash.prepare, as in pretraining"
    )
    parser.add_argument("--out", type=Path, help="default: work/triviaqa/DOMAIN")
    parser.add_argument(
        "--limit", type=positive_int, metavar="N", help="for a trial: the first questions of each split"
    )
    parser.add_argument("--workers", type=positive_int, default=os.cpu_count() or 1, help="threads of sentencepiece")
    return parser


@script("prepare")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options: Any = parser().parse_args(arguments)
    options.out = (options.out or Path("work/triviaqa") / options.domain).absolute()
    with working_folder(options.out, COMMAND, whole={"data-bin": WRITER}):
        counts = prepare(options)
    for split, count in counts.items():
        print(
            f"  {split:<5} {count.questions:7,d} questions  {count.documents:7,d} documents  {count.tokens:12,d} tokens"
            f"  {count.spans:10,d} gold spans in {count.pairs:,d} pairs; {count.left_out:,d} pairs left out"
        )
    print(
        f"Ready: {shown_path(options.out / 'data-bin')}. The commands to train with are in recipes/triviaqa/README.md."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
