"""A corpus as subwords for fairseq: a sentencepiece model of its training split, its dictionary, and encoded splits."""

import io
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import sentencepiece
from tqdm import tqdm

from .working_folder import atomic_write, write_text

#: fairseq's own symbols: <s>, <pad>, </s>, <unk>; sentencepiece has three of them.
FAIRSEQ_SYMBOLS = 4
_SENTENCEPIECE_SYMBOLS = 3
#: Number of random lines that a model is trained on. sentencepiece keeps them and an index in memory.
SAMPLE_LINES = 500_000
#: Longer lines are left out of the training.
_MAX_LINE_BYTES = 16_384
BATCH_CHARACTERS = 4_000_000
_TOO_MANY = re.compile(r"Vocabulary size too high \(\d+\)\. Please set it to a value <= (\d+)")
_TOO_FEW = re.compile(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)")


class SplitCounts(NamedTuple):
    """Size of a split. Perplexity per word is perplexity per token to the power of tokens / words."""

    documents: int
    empty_documents: int  # are not written
    words: int  # between whitespace
    text_bytes: int  # in UTF-8, with one space or line's end after each line
    tokens: int  # with one </s> per document, as fairseq counts them

    @property
    def tokens_per_word(self) -> float:
        """Tokens per word, for comparing perplexities of different subwords."""
        return self.tokens / self.words


def train_sentencepiece(
    lines: Iterable[str], path: Path, vocabulary: int, masked: bool, threads: int, option: str = "--vocabulary"
) -> None:
    """Train a unigram model with byte fallback on ``lines`` and write it to ``path``.

    Args:
        vocabulary: rows of the model's embedding: the subwords, fairseq's four symbols and, if ``masked``, its <mask>.
        option: name of ``vocabulary`` on the command line.

    Raises:
        ValueError: no text, or a vocabulary that this text does not allow.
    """
    extra = FAIRSEQ_SYMBOLS - _SENTENCEPIECE_SYMBOLS + masked
    buffer = io.BytesIO()
    sentencepiece.set_random_generator_seed(1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=buffer,
            model_type="unigram",
            vocab_size=vocabulary - extra,
            byte_fallback=True,
            character_coverage=0.9999,
            input_sentence_size=SAMPLE_LINES,
            shuffle_input_sentence=True,
            max_sentence_length=_MAX_LINE_BYTES,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(_explain(str(error), option, vocabulary, extra)) from error
    with atomic_write(path) as part:
        part.write_bytes(buffer.getvalue())


def _explain(error: str, option: str, vocabulary: int, extra: int) -> str:
    for pattern, bound in ((_TOO_MANY, "at most"), (_TOO_FEW, "at least")):
        match = pattern.search(error)
        if match is not None:
            return f"{option} is {vocabulary}; allowed for this text: {bound} {int(match[1]) + extra}"
    if "!sentences_.empty()" in error:
        return "the training split is empty; allowed: at least one line of text, of at most 16,384 bytes"
    return f"sentencepiece: {error}"


def write_dictionary(model: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """Write all subwords of ``model`` as a fairseq dictionary, so that no split has an unknown one."""
    subwords = (model.id_to_piece(i) for i in range(len(model)) if not (model.is_control(i) or model.is_unknown(i)))
    # fairseq's format has a count per entry, which our models ignore.
    write_text(path, "".join(f"{subword} 1\n" for subword in subwords))


def encode(
    documents: Iterable[list[str]],
    model: sentencepiece.SentencePieceProcessor,
    path: Path,
    threads: int,
    total: int | None = None,
) -> SplitCounts:
    """Write ``documents``, lists of lines, to ``path`` as subwords, one document per line; ``total`` is for the bar."""
    counts = SplitCounts(0, 0, 0, 0, 0)
    bar = tqdm(documents, total=total, desc=path.stem, unit=" documents", leave=False, disable=None)
    with atomic_write(path) as part, bar, open(part, "w", encoding="utf-8", newline="\n") as file:
        for batch in _batches(bar):
            lines = [line for document in batch for line in document]
            pieces = iter(model.encode(lines, out_type=str, num_threads=threads))
            tokens = 0
            for document in filter(None, batch):
                encoded = list(itertools.chain.from_iterable(itertools.islice(pieces, len(document))))
                tokens += len(encoded) + 1
                file.write(" ".join(encoded) + "\n")
            batch_counts = SplitCounts(
                documents=len(batch),
                empty_documents=sum(not document for document in batch),
                words=sum(line.count(" ") + 1 for line in lines),
                text_bytes=sum(len(line.encode()) + 1 for line in lines),
                tokens=tokens,
            )
            counts = SplitCounts(*(before + new for before, new in zip(counts, batch_counts)))
    return counts


def _batches(documents: Iterable[list[str]]) -> Iterator[list[list[str]]]:
    """``documents`` in batches of limited size; sentencepiece's threads share the lines of a batch."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += sum(map(len, document)) + 1
        if size > BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
