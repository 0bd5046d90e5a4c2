"""Write any text for fairseq: ``python -m recipes.prepare_text words --file any.txt --out work/mine``.

The result is OUT/data-bin with 90 % of the lines, or bytes, as train, 5 % as valid and 5 % as test.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from tqdm import tqdm

from . import texts

#: Longer sequences of bytes are cut; fairseq joins sequences, so the result is the same.
_LONGEST_SEQUENCE = 1 << 16


def byte_symbols() -> tuple[Dictionary, np.ndarray]:
    """The symbols of bytes, and the token of each byte (256,): its value in decimal, the newline fairseq's ``</s>``."""
    symbols = Dictionary()
    tokens = [symbols.add_symbol(str(byte)) if byte != ord("\n") else symbols.eos() for byte in range(256)]
    return symbols, np.array(tokens, dtype=np.int32)


def byte_data(file: Path, out: Path, limit: int | None = None) -> dict[str, int]:
    """Write the first bytes of a file as ``out``/data-bin: a token for each byte, a sequence for each line.

    Returns the bytes of each split. fairseq-preprocess does almost the same, but where a split ends inside a line it
    adds a ``</s>`` for no byte.
    """
    made = texts.described(file, unit="bytes", limit=limit)
    if content := texts.stored(out, made):
        return content["counts"]
    dictionary, table = byte_symbols()
    size = min(file.stat().st_size, limit or file.stat().st_size)
    if size < 20:
        raise SystemExit(f"{file} has {size} bytes to use; allowed: at least 20")
    sizes = {split: int(size * share) for split, share in texts.SPLITS.items()}
    sizes["train"] = size - sizes["valid"] - sizes["test"]
    with open(file, "rb") as opened:

        def sequences(left: int) -> Iterator[np.ndarray]:
            while line := opened.readline(min(left, _LONGEST_SEQUENCE)):
                left -= len(line)
                yield table[np.frombuffer(line, np.uint8)]

        for split, count in sizes.items():
            lines = tqdm(sequences(count), desc=split, unit=" lines", disable=None)
            texts.write_split(out / "data-bin", split, lines, len(dictionary))
    dictionary.save(str(out / "data-bin" / "dict.txt"))
    texts.store(out, made, sizes)
    return sizes


def subword_data(
    file: Path, out: Path, rows: int, limit: int | None = None, masked: bool = False, workers: int = 1
) -> dict[str, texts.Counts]:
    """Write a text as ``out``/data-bin of subwords; each line that is not blank is a document."""
    lines = texts.split_lines(file, limit)
    documents = {split: lambda read=read: map(texts.paragraphs, read()) for split, read in lines.items()}
    return texts.subword_data(documents, out, rows, masked, workers, **texts.described(file, limit=limit))


def main() -> None:
    """Write a text."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("unit", choices=("words", "subwords", "characters", "bytes"), help="what a token is")
    parser.add_argument("--file", type=Path, required=True, help="a text in UTF-8; bytes: any file")
    parser.add_argument("--out", type=Path, default=Path("work/text"), help="folder of the data and what it is made of")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first lines, or bytes")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="subwords, with fairseq's symbols")
    parser.add_argument("--masked", action="store_true", help="subwords of masked models, whose symbols have a <mask>")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes and threads")
    options = parser.parse_args()
    if not options.file.exists():
        parser.error(f"--file is {options.file}, which does not exist")
    if options.unit == "bytes":
        counts = byte_data(options.file, options.out, options.limit)
    elif options.unit == "subwords":
        more = (options.limit, options.masked, options.workers)
        counts = subword_data(options.file, options.out, options.vocabulary, *more)
        print("tokens for each word:", {split: round(count.tokens / count.words, 4) for split, count in counts.items()})
        counts = {split: count.tokens for split, count in counts.items()}
    else:
        counts = texts.text_data(options.file, options.out, options.unit, options.limit, options.workers)
    print(f"tokens in {options.out / 'data-bin'}:", counts)


if __name__ == "__main__":
    main()
