"""Texts as data that fairseq reads: downloads, corpora, and any text in words, subwords, characters or bytes.

What is complete is not made again; the file that is written last marks that. Nothing is replaced: the error names what
an interruption left half-written, and you remove it.
"""

import gzip
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import torch
from fairseq.data import indexed_dataset
from tqdm import tqdm

from fairseq_plugin.data.indexed_sums import write_sums

from . import runs

#: The parts of one text, in order, and their shares.
SPLITS = {"train": 0.9, "valid": 0.05, "test": 0.05}
#: Reads documents, each a list of lines.
Documents = Callable[[], Iterable[list[str]]]
SPACE = "▁"  # as sentencepiece and ``spell`` write a space
#: Wiki-40B's markers for the beginning of titles, headings and paragraphs, and for a line's end inside a paragraph.
_WIKI40B_MARKERS = re.compile("_START_ARTICLE_|_START_SECTION_|_START_PARAGRAPH_|_NEWLINE_")


def download(url: str, path: Path, sha256: str | None = None) -> Path:
    """``path``, downloaded from ``url`` unless it is there; RuntimeError if its checksum is another one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), sha256)
    return path


def hub_files(dataset: str, revision: str, patterns: Sequence[str], folder: Path) -> list[Path]:
    """Files of a data set on the Hugging Face Hub whose paths match ``patterns``, downloaded to ``folder``."""
    from huggingface_hub import snapshot_download

    snapshot_download(dataset, repo_type="dataset", revision=revision, allow_patterns=list(patterns), local_dir=folder)
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a file in UTF-8, with their ends; other line separators of Unicode stay inside their line."""
    with open(path, encoding="utf-8", newline="\n") as file:
        yield from file


def new_file(path: Path) -> Path:
    """``path``, with its folder; SystemExit if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        raise SystemExit(f"{path} was left by a run that did not complete its data; remove it or choose another --out")
    return path


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, which have their ends, to a new file."""
    with open(new_file(path), "x", encoding="utf-8", newline="\n") as file:
        file.writelines(lines)


def cut(count: int, what: str) -> dict[str, range]:
    """Split -> the indices of its lines or files out of ``count``, in order; SystemExit if ``what`` are too few."""
    if count < 20:
        raise SystemExit(f"{what} are {count}; allowed: at least 20, for 90 % train, 5 % valid and 5 % test")
    ends = [round(share * count) for share in itertools.accumulate(SPLITS.values())]
    return {split: range(start, end) for split, start, end in zip(SPLITS, [0, *ends], ends)}


def split_lines(path: Path, limit: int | None = None) -> dict[str, Callable[[], Iterator[str]]]:
    """A function for each split that reads its lines: parts of a text, or wiki.SPLIT.tokens in a folder.

    ``limit`` is how many lines of the text, or of each file, are used, from the first one.
    """
    if path.is_dir():
        files = {split: next(iter(sorted(path.rglob(f"wiki.{split}.tokens"))), None) for split in SPLITS}
        if None in files.values():
            raise SystemExit(f"--file is the folder {path}; allowed: one that holds wiki.{{train,valid,test}}.tokens")
        return {split: lambda file=file: itertools.islice(read_lines(file), limit) for split, file in files.items()}
    try:
        parts = cut(sum(1 for _ in itertools.islice(read_lines(path), limit)), f"the lines of {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--file is {path}: {error}; allowed: a text in UTF-8") from error
    return {x: lambda x=x: itertools.islice(read_lines(path), parts[x].start, parts[x].stop) for x in parts}


def read_documents(path: Path) -> Iterator[str]:
    """The texts of a file of a corpus: rows of Parquet, lines of JSON, or one whole book in a .txt."""
    if path.suffix == ".parquet":
        from pyarrow import parquet  # pyarrow 22 needs numpy 2, with which fairseq fails

        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256, columns=["text"]):
                yield from batch.column(0).to_pylist()
    elif path.suffix == ".txt":
        yield path.read_text(encoding="utf-8")
    else:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                yield json.loads(line)["text"]


def paragraphs(text: str) -> list[str]:
    """The lines of ``text`` that are not blank, with single spaces and without Wiki-40B's markers."""
    lines = _WIKI40B_MARKERS.sub("\n", text).splitlines()
    return [line for line in (" ".join(line.split()) for line in lines) if line]


def spell(line: str) -> str:
    """A line, with its end, as tokens of one character; fairseq makes the end of the line a token by itself.

    A space becomes "▁". "▁" and other whitespace, at which fairseq would split, become their numbers, as "U+0009".
    """
    tokens = (f"U+{ord(x):04X}" if x == SPACE or x.isspace() and x != " " else x for x in line.removesuffix("\n"))
    return " ".join(SPACE if x == " " else x for x in tokens) + "\n"


def preprocess(texts: dict[str, Path], data_bin: Path, *options: object, languages: Sequence[str] = ()) -> None:
    """Run fairseq-preprocess on the text of each split, unless that is done; it logs beside ``data_bin``.

    ``languages`` are source and target, the endings of two files of each split.
    """
    ending = f".{'-'.join(languages)}.{languages[1]}" if languages else ""
    if (data_bin / f"{list(texts)[-1]}{ending}.idx").exists():  # the last file
        return
    sides = ("--source-lang", languages[0], "--target-lang", languages[1]) if languages else ("--only-source",)
    prefixes = (word for split, path in texts.items() for word in (f"--{split}pref", path))
    command = ("-m", "fairseq_cli.preprocess", *sides, *prefixes, "--destdir", data_bin, *options)
    runs.run(command, data_bin.with_name("preprocess.log"))


def described(file: Path, **made: object) -> dict[str, object]:
    """The facts that tell the data of a text from other data, for ``stored``."""
    return {"file": str(file.absolute()), "bytes": file.stat().st_size if file.is_file() else None, **made}


def stored(out: Path, made: dict[str, object]) -> dict | None:
    """The content of text.json, which is written last; None without it, and SystemExit if it is not about ``made``."""
    if not (out / "text.json").exists():
        return None
    content = json.loads((out / "text.json").read_text(encoding="utf-8"))
    if content | made != content:
        raise SystemExit(f"{out} has the text {content}, not {made}; choose another --out")
    return content


def store(out: Path, made: dict[str, object], counts: dict) -> None:
    """Write text.json."""
    (out / "text.json").write_text(json.dumps({**made, "counts": counts}), encoding="utf-8")


def text_data(file: Path, out: Path, unit: str, limit: int | None = None, workers: int = 1) -> dict[str, int]:
    """Write a text as ``out``/data-bin, line by line, unless it is there; returns the tokens of each split.

    Args:
        unit: "words", "characters" or "subwords:N", which are learned from the train part; N counts fairseq's symbols.
        limit: see ``split_lines``.
    """
    made = described(file, unit=unit, limit=limit)
    if content := stored(out, made):
        return content["counts"]
    lines = split_lines(file, limit)
    tokens = {"words": lambda line: line, "characters": spell}.get(unit)
    if tokens is None:
        learned_from = (line.rstrip("\n") for line in lines["train"]())
        model = train_sentencepiece(learned_from, out / "sentencepiece.model", int(unit.removeprefix("subwords:")))
        tokens = lambda line: " ".join(model.encode(line.rstrip("\n"), out_type=str)) + "\n"  # noqa: E731
    texts = {split: out / "text" / f"{split}.txt" for split in SPLITS}
    for split, path in texts.items():
        write_lines(path, map(tokens, lines[split]()))
    preprocess(texts, out / "data-bin", "--workers", workers)
    counts = {split: count_tokens(out / "data-bin", split) for split in SPLITS}
    store(out, made, counts)
    return counts


class Counts(NamedTuple):
    """Size of a split in subwords. Perplexity per word is perplexity per token to the power of tokens / words."""

    documents: int  # empty ones, which are not written, included
    words: int  # between whitespace
    tokens: int  # with one </s> per document, as fairseq counts them


def train_sentencepiece(
    lines: Iterable[str], path: Path, rows: int, masked: bool = False, threads: int = 1, **options: object
) -> sentencepiece.SentencePieceProcessor:
    """Learn subwords, unless ``path`` is there: unigrams with byte fallback, or as ``options`` of the trainer say.

    Args:
        rows: of the embedding: the subwords, fairseq's four symbols, three of which sentencepiece has, too, and, if
            ``masked``, its <mask>.
    """
    if not path.exists():
        options = {
            **{"vocab_size": rows - 1 - masked, "model_type": "unigram", "byte_fallback": True},
            **{"character_coverage": 0.9999, "num_threads": threads, "minloglevel": 2},
            # Of random lines, which sentencepiece keeps with an index in memory, none longer than so many bytes.
            **{"input_sentence_size": 500_000, "shuffle_input_sentence": True, "max_sentence_length": 16_384},
            **options,
        }
        sentencepiece.set_random_generator_seed(1)
        buffer = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=buffer, **options)
        except RuntimeError as error:
            raise SystemExit(f"{rows} subwords, {1 + masked} of them fairseq's own: {error}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(buffer.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def write_dictionary(model: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """Write all subwords of ``model`` as a fairseq dictionary, so that no split has an unknown one."""
    subwords = (model.id_to_piece(i) for i in range(len(model)) if not (model.is_control(i) or model.is_unknown(i)))
    # fairseq's format has a count per entry, which our models ignore.
    path.write_text("".join(f"{subword} 1\n" for subword in subwords), encoding="utf-8")


def encode(
    documents: Iterable[list[str]], model: sentencepiece.SentencePieceProcessor, path: Path, threads: int = 1
) -> Counts:
    """Write ``documents``, lists of lines, to ``path`` as subwords, one document per line, unless that is done."""
    mark = path.with_suffix(".json")
    if mark.exists():
        return Counts(*json.loads(mark.read_text(encoding="utf-8")))
    counts = np.zeros(len(Counts._fields), int)

    def encoded() -> Iterator[str]:
        left = iter(tqdm(documents, desc=path.stem, unit=" documents", disable=None))
        while batch := list(itertools.islice(left, 32)):  # threads share the lines of a batch
            lines = [line for document in batch for line in document]
            pieces = iter(model.encode(lines, out_type=str, num_threads=threads))
            for document in batch:
                tokens = list(itertools.chain.from_iterable(itertools.islice(pieces, len(document))))
                counts[:] += (1, sum(line.count(" ") + 1 for line in document), len(tokens) + bool(document))
                if document:
                    yield " ".join(tokens) + "\n"

    write_lines(path, encoded())
    mark.write_text(json.dumps(counts.tolist()), encoding="utf-8")
    return Counts(*counts.tolist())


def subword_data(
    documents: dict[str, Documents],
    out: Path,
    rows: int,
    masked: bool = False,
    workers: int = 1,
    learned_from: Documents | None = None,
    **made: object,
) -> dict[str, Counts]:
    """Write documents, lists of lines, as ``out``/data-bin; its subwords are learned from ``learned_from``, or train.

    ``out`` also gets sentencepiece.model and dict.txt, for other data of the same subwords; ``made``: see ``stored``.
    """
    made |= {"unit": f"subwords:{rows}", "masked": masked}
    if content := stored(out, made):
        return {split: Counts(*count) for split, count in content["counts"].items()}
    lines = (line for document in (learned_from or documents["train"])() for line in document)
    model = train_sentencepiece(lines, out / "sentencepiece.model", rows, masked, workers)
    write_dictionary(model, out / "dict.txt")
    texts = {split: out / "pieces" / f"{split}.txt" for split in documents}
    counts = {split: encode(documents[split](), model, path, workers) for split, path in texts.items()}
    if not all(count.tokens for count in counts.values()):
        raise SystemExit(f"{out / 'pieces'} has an empty split; allowed: at least one line of text in each")
    preprocess(texts, out / "data-bin", "--srcdict", out / "dict.txt", "--workers", workers)
    store(out, made, counts)
    return counts


def write_split(folder: Path, split: str, sequences: Iterable[np.ndarray], symbols: int) -> None:
    """Write sequences of tokens (T,), below ``symbols``, as a split that fairseq's loaders read; checksums last.

    fairseq-preprocess accepts only lines of words, and ends each line with ``</s>``.
    """
    prefix = str(folder / split)
    data = new_file(Path(indexed_dataset.data_file_path(prefix)))
    builder = indexed_dataset.make_builder(str(data), "mmap", vocab_size=symbols)
    for sequence in sequences:
        builder.add_item(torch.from_numpy(sequence))
    builder.finalize(indexed_dataset.index_file_path(prefix))
    write_sums(folder / split)


def count_tokens(folder: Path, split: str) -> int:
    """The number of tokens of a split that fairseq's loader sees."""
    dataset = indexed_dataset.make_dataset(str(folder / split), "mmap")  # keep a reference: its sizes are freed with it
    return int(dataset.sizes.sum(dtype=np.int64))
