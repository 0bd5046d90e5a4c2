"""Write data for ``fairseq-train --task translation``: ``python -m recipes.translation.data messages``, or ``copy``.

``messages`` are pairs of a machine's message catalogues. ``copy --file FILE`` has pieces of a text with some passages
marked as sources, one token a character, and these passages in order as targets.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import sentencepiece
from fairseq.data import Dictionary
from tqdm import tqdm

from .. import runs, texts
from .messages import ENGLISH, FOLDERS, divide, read_messages

#: The names of source and target of copied passages.
SIDES = ("source", "target")
#: Prefix of the symbols of marked characters. No symbol of a text begins with it.
MARK = "<mark>"


def lines(path: Path) -> list[str]:
    """The lines of a text, without their ends."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def write(kind: str, options: argparse.Namespace, out: Path) -> None:
    """Write ``out``/data-bin, unless it exists, of ``kind`` "messages" or "copy"."""
    if kind == "messages":
        runs.begin(out, [kind, *options.folder, options.source, options.target, options.subwords, options.data_seed])
        write_messages(options, out)
    else:
        sizes = [options.source_tokens, options.spans, options.span_tokens, options.train, options.valid, options.test]
        runs.begin(out, [kind, options.file, *sizes, options.data_seed])
        write_copies(options, out)


def write_messages(options: argparse.Namespace, out: Path) -> None:
    """Write messages as text, in subwords of the train part, and as data-bin."""
    languages, subwords = (options.source, options.target), out / "sentencepiece.model"
    if (out / "data-bin" / f"test.{'-'.join(languages)}.{options.target}.idx").exists():  # written last
        return
    pairs, left_out = read_messages(options.folder, options.source, options.target)
    parts = divide(pairs, options.data_seed)
    both = [text for pair in parts["train"] for text in (pair.source, pair.target)]
    texts.train_sentencepiece(both, subwords, options.subwords)
    model = sentencepiece.SentencePieceProcessor(model_file=str(subwords))
    texts.write_dictionary(model, out / "dict.txt")
    for part, chosen in parts.items():
        for language, side in zip(languages, SIDES):
            for folder, spelled in {"text": str, "pieces": lambda x: " ".join(model.encode(x, out_type=str))}.items():
                path = out / folder / f"{part}.{language}"
                path.parent.mkdir(exist_ok=True)
                written = "".join(f"{spelled(getattr(pair, side))}\n" for pair in chosen)
                path.write_text(written, encoding="utf-8", newline="\n")
        print(f"{part}: {len(chosen):,} messages of {len({pair.program for pair in chosen})} programs")
    left_out["nearly the same in another part"] = len(pairs) - sum(map(len, parts.values()))
    print("left out:", ", ".join(f"{reason} {number:,}" for reason, number in left_out.items()))
    prefixes = {part: out / "pieces" / part for part in parts}
    dictionary = ("--srcdict", out / "dict.txt", "--joined-dictionary")
    texts.preprocess(prefixes, out / "data-bin", *dictionary, languages=languages)


def write_copies(options: argparse.Namespace, out: Path) -> None:
    """Write sources, each cut into as many equal parts as it has passages, with one at a random place in each part."""
    if (out / "data-bin" / "dict.target.txt").exists():
        return
    if not options.file or not options.file.is_file():
        raise ValueError(f"--file is {options.file}; allowed: a text in UTF-8")
    text = texts.spell(options.file.read_bytes().decode("utf-8") + "\n").split()
    ends = np.cumsum([0, *texts.SPLITS.values()])
    ends = np.round(ends / ends[-1] * len(text)).astype(int)
    longest, part = int(np.diff(ends).min()), options.source_tokens // options.spans
    if part < options.span_tokens or options.source_tokens > longest:
        raise ValueError(
            f"--source-tokens is {options.source_tokens}; allowed: from {options.spans * options.span_tokens}, all "
            f"--spans of --span-tokens, to {longest}, the characters of --file that are kept for valid or test"
        )
    symbols, dictionary = sorted(set(text)), Dictionary()
    for symbol in [*symbols, *(MARK + symbol for symbol in symbols)]:
        dictionary.add_symbol(symbol)
    numbers = np.array([dictionary.index(symbol) for symbol in text], dtype=np.int64)

    def examples(stretch: np.ndarray, count: int, generator: np.random.Generator) -> Iterator[tuple]:
        for _ in tqdm(range(count), disable=None, leave=False):
            start = generator.integers(len(stretch) - options.source_tokens + 1)
            piece = stretch[start : start + options.source_tokens]
            places = generator.integers(part - options.span_tokens + 1, size=options.spans)
            places = (np.arange(options.spans) * part + places)[:, None] + np.arange(options.span_tokens)
            source = piece.copy()
            source[places.flatten()] += len(symbols)
            yield tuple(np.append(side, dictionary.eos()) for side in (source, piece[places.flatten()]))

    (out / "data-bin").mkdir(exist_ok=True)
    for number, split in enumerate(texts.SPLITS):
        generator = np.random.default_rng([options.data_seed, number])
        drawn = list(examples(numbers[ends[number] : ends[number + 1]], getattr(options, split), generator))
        for side, sequences in zip(SIDES, zip(*drawn)):
            texts.write_split(out / "data-bin", f"{split}.source-target.{side}", sequences, len(dictionary))
    for side in SIDES:
        dictionary.save(str(out / "data-bin" / f"dict.{side}.txt"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the data, which the comparison has too."""
    parser.add_argument("--folder", type=Path, nargs="+", default=FOLDERS, help="LANGUAGE/LC_MESSAGES/PROGRAM.mo is in")
    parser.add_argument("--source", default=ENGLISH, help="language to translate from; en: as programs have messages")
    parser.add_argument("--target", default="de", help="language to translate to, or en")
    parser.add_argument("--subwords", type=int, default=3_000, help="rows of the embedding, shared by both languages")
    parser.add_argument("--file", type=Path, help="of copied passages: any text in UTF-8")
    parser.add_argument("--source-tokens", type=int, default=2_048, help="characters of each source to copy from")
    parser.add_argument("--spans", type=int, default=16, help="marked passages of a source")
    parser.add_argument("--span-tokens", type=int, default=1, help="characters of each passage")
    for split, count in {"train": 32_000, "valid": 200, "test": 200}.items():
        parser.add_argument(f"--{split}", type=int, default=count, help="examples of copied passages")
    parser.add_argument("--data-seed", type=int, default=1, help="of the division of programs, or what is drawn")


def main() -> None:
    """Write the data."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("kind", choices=("messages", "copy"))
    add_options(parser)
    parser.add_argument("--out", type=Path, default=Path("work/translation"))
    options = parser.parse_args()
    try:
        write(options.kind, options, options.out)
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
