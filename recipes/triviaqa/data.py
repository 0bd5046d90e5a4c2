"""Write TriviaQA for ``--task span_extraction``: ``python -m recipes.triviaqa.data wikipedia --file triviaqa-rc ...``.

Nothing is downloaded. The subwords are those that the model was pretrained with, in a folder of recipes.flash.data or
recipes.prepare_text.
"""

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import sentencepiece
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_plugin.data.span_folder import DICTIONARY_FILE, DOCUMENT, QUESTION, Question, write_questions

from .. import texts
from .gold_spans import SpelledDocument, answer_pattern
from .questions import DOMAINS, SPLITS, Asked, find, read_questions


class Subwords:
    """A sentencepiece model and the dictionary of the same subwords, in a folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
        self.dictionary = Dictionary.load(str(folder / DICTIONARY_FILE))
        self.workers = workers

    def split(self, text: str) -> list[str]:
        """Split ``text`` into subwords line by line, as those of pretraining were."""
        lines = self.model.encode(texts.paragraphs(text), out_type=str, num_threads=self.workers)
        return [subword for line in lines for subword in line]

    def numbers(self, subwords: Sequence[str]) -> np.ndarray:
        """The tokens (T,) of ``subwords``, int32."""
        return np.array([self.dictionary.index(subword) for subword in subwords], dtype=np.int32)


def write_split(folder: Path, split: str, source: Path, asked: Sequence[Asked], subwords: Subwords) -> None:
    """Write a split into ``folder``, its arrays last; a document is written once for all of its questions.

    The training split drops pairs whose document contains no gold answer, since the document may still answer the
    question in other words.
    """
    questions_of: dict[str, list[int]] = {}
    for number, question in enumerate(asked):
        for name in question.documents:
            questions_of.setdefault(name, []).append(number)
    patterns, size = [answer_pattern(question.answers) for question in asked], len(subwords.dictionary)
    pairs: list[tuple[int, int]] = []
    spans: list[np.ndarray] = []

    def documents() -> Iterator[np.ndarray]:
        written = 0
        for name, questions in tqdm(questions_of.items(), desc=split, unit=" documents", leave=False, disable=None):
            pieces = subwords.split(find(source, f"evidence/{name}").read_text(encoding="utf-8"))
            document = SpelledDocument(pieces)
            matches = {question: document.find(patterns[question]) for question in questions}
            kept = [question for question in questions if pieces and (split != "train" or len(matches[question]))]
            if kept:
                pairs.extend((question, written) for question in kept)
                spans.extend(matches[question] for question in kept)
                written += 1
                yield subwords.numbers(pieces)

    texts.write_split(folder / DOCUMENT, split, documents(), size)
    if not pairs:
        raise SystemExit(f"no document of {split} has an answer of its questions; allowed: at least one")
    questions = (subwords.numbers(subwords.split(question.question)) for question in asked)
    texts.write_split(folder / QUESTION, split, questions, size)
    write_questions([Question(question.name, list(question.answers)) for question in asked], folder / f"{split}.json")
    counts, found = np.array([len(one) for one in spans]), np.concatenate(spans)
    np.savez(folder / f"{split}.npz", pairs=np.array(pairs), counts=counts, spans=found)
    left_out = sum(map(len, questions_of.values())) - len(pairs)
    print(
        f"{split}: {len(asked):,} questions, {pairs[-1][1] + 1:,} documents, {len(found):,} gold spans in "
        f"{len(pairs):,} pairs; {left_out:,} pairs left out"
    )


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("domain", choices=DOMAINS, help="questions with pages of Wikipedia, or of the web")
    parser.add_argument("--file", type=Path, required=True, metavar="FOLDER", help="triviaqa-rc, with qa and evidence")
    parser.add_argument("--subwords", type=Path, required=True, metavar="FOLDER", help="the data of pretraining")
    parser.add_argument("--out", type=Path, help="default: work/triviaqa/DOMAIN")
    parser.add_argument("--limit", type=int, metavar="N", help="for a trial: the first questions of each split")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="threads of sentencepiece")
    options = parser.parse_args()
    folder = (options.out or Path("work/triviaqa") / options.domain) / "data-bin"
    if not (options.subwords / "sentencepiece.model").is_file():
        parser.error(f"--subwords is {options.subwords}, without sentencepiece.model; allowed: of recipes.prepare_text")
    subwords, questions = Subwords(options.subwords, options.workers), {}
    for split, official in SPLITS.items():
        questions[split] = read_questions(find(options.file, f"qa/{options.domain}-{official}.json"))[: options.limit]
        for name in (name for question in questions[split] for name in question.documents):
            find(options.file, f"evidence/{name}")
    for split, asked in questions.items():
        write_split(folder, split, options.file, asked, subwords)
    subwords.dictionary.save(str(folder / DICTIONARY_FILE))


if __name__ == "__main__":
    main()
