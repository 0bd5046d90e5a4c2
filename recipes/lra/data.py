"""Write a task of the Long Range Arena for fairseq: ``python -m recipes.lra.data listops --out work/lra/listops``.

ListOps is generated; Text (IMDb) and Image (CIFAR-10) are downloaded, unless their archives are in the folder. For
Retrieval and Pathfinder unpack https://storage.googleapis.com/long-range-arena/lra_release.gz (8.2 GB) and give its
folder: ``--release DIR``, which ListOps takes, too.
"""

import argparse
import itertools
import multiprocessing
import random
import re
import statistics
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset
from PIL import Image
from tqdm import tqdm

from fairseq_plugin.data.pixels import FIRST_TOKEN, pixel_dictionary

Examples = Iterable[tuple[list[np.ndarray], int]]  # the symbols of one or two sequences, and the class

# ListOps by the rules of the Arena's generator: [MAX 2 9 [MIN 4 7 ] 0 ] is a digit, and so are its parts.
OPERATORS = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),  # rounded down
    "[SM": lambda values: sum(values) % 10,
}
SYMBOLS = [*"0123456789", *OPERATORS, "]"]
DEPTH, ARGUMENTS, OPERATOR_PROBABILITY, BLOCK = 10, 10, 0.25, 500
#: The file of a data set that is written last.
LAST = Path("data-bin/label/dict.txt")


def tree(rng: random.Random, depth: int, symbols: list[str], limit: int) -> int:
    """Append a random expression to ``symbols``, and return its value; OverflowError if it becomes too long."""
    if depth >= DEPTH or rng.random() > OPERATOR_PROBABILITY:
        symbols.append(str(rng.randrange(10)))
        return int(symbols[-1])
    count, place, values = rng.randint(2, ARGUMENTS), len(symbols), []
    symbols.append("")  # the operator, which is drawn after its arguments
    for _ in range(count):
        values.append(tree(rng, depth + 1, symbols, limit))
        if len(symbols) >= limit:
            raise OverflowError
    symbols[place] = list(OPERATORS)[rng.randrange(len(OPERATORS))]
    symbols.append("]")
    return OPERATORS[symbols[place]](values)


def block(shortest: int, longest: int, number: int) -> list[tuple[str, int]]:
    """``BLOCK`` expressions of more than ``shortest`` and fewer than ``longest`` symbols, and their values."""
    rng, found = random.Random(f"ListOps 1 {number}"), []
    while len(found) < BLOCK:
        symbols: list[str] = []
        try:
            value = tree(rng, 1, symbols, longest)
        except OverflowError:
            continue
        if shortest < len(symbols) < longest:
            found.append((" ".join(symbols), value))
    return found


def listops(sizes: dict[str, int], shortest: int, longest: int) -> dict[str, Examples]:
    """Different expressions for each split, always the same ones; their lengths are between the two given ones."""
    seen: dict[str, int] = {}
    total, blocks = sum(sizes.values()), partial(block, shortest, longest)
    with multiprocessing.get_context("fork").Pool() as pool, tqdm(total=total, desc="ListOps") as bar:
        for start in itertools.count(0, 8):
            for text, value in itertools.chain(*pool.map(blocks, range(start, start + 8))):
                seen.setdefault(text, value)
            if len(seen) == bar.n:
                raise SystemExit(f"only {len(seen):,} expressions of {shortest} to {longest} symbols were found")
            bar.update(len(seen) - bar.n)
            if len(seen) >= total:
                break
    left = iter(seen.items())
    return {
        split: [([encode(text)], value) for text, value in itertools.islice(left, size)]
        for split, size in sizes.items()
    }


def encode(text: str) -> np.ndarray:
    """The numbers of an expression's symbols."""
    return np.array([SYMBOLS.index(symbol) for symbol in text.split()])


def in_release(release: Path, name: str) -> Path:
    """A file or folder of the release."""
    found = sorted(release.rglob(name))
    if not found:
        raise SystemExit(f"--release is {release}, which has no {name}; allowed: the folder of lra_release.gz")
    return found[0]


def released_listops(release: Path) -> dict[str, Examples]:
    """The Arena's own expressions, without the parentheses that group pairs of symbols."""

    def read(name: str) -> Iterator[tuple[list[np.ndarray], int]]:
        for line in in_release(release, f"basic_{name}.tsv").read_text(encoding="utf-8").splitlines()[1:]:
            text, value = line.split("\t")
            yield [encode(re.sub(r"[()]", " ", text))], int(value)

    return {split: read(name) for split, name in {"train": "train", "valid": "val", "test": "test"}.items()}


def text(archive: Path, longest: int = 1000) -> dict[str, Examples]:
    """IMDb in bytes; the last tenth of each class of the training reviews is held out."""
    reviews: dict[tuple[str, str], list] = {}
    with tarfile.open(archive) as opened:
        for member in tqdm(opened, "reading"):
            if found := re.search(r"(train|test)/(neg|pos)/(\d+)_\d+\.txt$", member.name):
                content = np.frombuffer(opened.extractfile(member).read(), np.uint8)[:longest]
                reviews.setdefault((found[1], found[2]), []).append((int(found[3]), content))
    ordered = {key: [content for _, content in sorted(found, key=lambda x: x[0])] for key, found in reviews.items()}
    splits: dict[str, Examples] = {"train": [], "valid": [], "test": []}
    for label, name in enumerate(("neg", "pos")):
        learn, end = ordered["train", name], round(0.9 * len(ordered["train", name]))
        parts = {"train": learn[:end], "valid": learn[end:], "test": ordered["test", name]}
        for split, contents in parts.items():
            splits[split] += [([content], label) for content in contents]
    return splits


def image(folder: Path) -> dict[str, Examples]:
    """CIFAR-10 in grey; the last 5,000 training images are held out."""
    from torchvision.datasets import CIFAR10  # downloads it unless it is there, and checks the MD5

    def grey(train: bool) -> list:
        data = CIFAR10(str(folder), train=train, download=True)
        greys = (data.data.astype(np.float32) @ np.array([0.2989, 0.587, 0.114], np.float32)).astype(np.uint8)
        return [([pixels.ravel()], label) for pixels, label in zip(greys, data.targets)]

    learn = grey(train=True)
    return {"train": learn[:-5000], "valid": learn[-5000:], "test": grey(train=False)}


def retrieval(release: Path, longest: int = 4000) -> dict[str, Examples]:
    """Pairs of papers in bytes, and whether one cites the other."""

    def read(path: Path) -> Iterator[tuple[list[np.ndarray], int]]:
        with open(path, encoding="utf-8", newline="\n") as lines:
            for line in lines:
                label, _, _, *texts = line.rstrip("\r\n").split("\t")
                yield [np.frombuffer(x.encode()[:longest], np.uint8) for x in texts], int(float(label))

    names = {"train": "train", "valid": "eval", "test": "test"}
    return {split: read(in_release(release, f"new_aan_pairs.{name}.tsv")) for split, name in names.items()}


def pathfinder(release: Path) -> dict[str, Examples]:
    """Images of 32 x 32 pixels, and whether a path of 14 dashes joins two circles; cut 80, 10 and 10 per cent."""
    folder = in_release(release, "pathfinder32/curv_contour_length_14")
    lines = [
        line.split()
        for file in sorted((folder / "metadata").glob("*.npy"), key=lambda path: int(path.stem))
        for line in file.read_text().splitlines()
    ]
    listed = [(folder / line[0] / line[1], int(line[3])) for line in lines]
    listed = [(path, label) for path, label in listed if path.stat().st_size]  # the release has one empty file
    ends = [0, round(0.8 * len(listed)), round(0.9 * len(listed)), len(listed)]
    return {
        split: (([np.asarray(Image.open(path).convert("L")).ravel()], label) for path, label in listed[a:b])
        for split, a, b in zip(("train", "valid", "test"), ends, ends[1:])
    }


def write(out: Path, splits: dict[str, Examples], symbols: Dictionary, classes: Sequence[int]) -> None:
    """Write ``out``/data-bin/{input0,input1,label}/SPLIT, as fairseq's task sentence_prediction reads them."""
    folder = out / "data-bin"
    if folder.exists():
        raise SystemExit(f"{folder} exists, complete or interrupted; allowed: a new folder")
    for split, examples in splits.items():
        builders, count = {}, 0
        for inputs, label in tqdm(examples, split):
            numbered = {f"input{i}": values for i, values in enumerate(inputs)} | {"label": np.array([label])}
            for kind, values in numbered.items():
                if kind not in builders:
                    (folder / kind).mkdir(parents=True, exist_ok=True)
                    path = indexed_dataset.data_file_path(str(folder / kind / split))
                    builders[kind] = indexed_dataset.make_builder(path, "mmap", vocab_size=len(symbols))
                builders[kind].add_item(torch.from_numpy(values.astype(np.int32) + FIRST_TOKEN))
            count += 1
        for kind, builder in builders.items():
            builder.finalize(indexed_dataset.index_file_path(str(folder / kind / split)))
        print(f"  {split}: {count:,} examples")
    for kind in builders:  # the label's is the last
        (dictionary(map(str, classes)) if kind == "label" else symbols).save(str(folder / kind / "dict.txt"))


def dictionary(symbols: Iterable[str]) -> Dictionary:
    """fairseq's dictionary of ``symbols``."""
    made = Dictionary()
    for symbol in symbols:
        made.add_symbol(symbol)
    return made


def main(arguments: list[str] | None = None) -> None:
    """Write a task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=("listops", "text", "image", "retrieval", "pathfinder"))
    parser.add_argument("--out", type=Path, help="default: work/lra/TASK")
    parser.add_argument("--release", type=Path, metavar="DIR", help="the unpacked lra_release.gz")
    options = parser.parse_args(arguments)
    out, release = options.out or Path("work/lra") / options.task, options.release
    if release is None and options.task in ("retrieval", "pathfinder"):
        parser.error(f"--release is needed for {options.task}: the unpacked lra_release.gz")
    out.mkdir(parents=True, exist_ok=True)
    if options.task == "listops":
        sizes = {"train": 96_000, "valid": 2_000, "test": 2_000}
        splits = released_listops(release) if release else listops(sizes, 500, 2_000)
        write(out, splits, dictionary(SYMBOLS), range(10))
    elif options.task == "text":
        from torchvision.datasets.utils import download_url  # checks the MD5, and keeps a file that has it

        url = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
        download_url(url, str(out), md5="7c2ac02c03563afcf9b574c7e56c153a")
        write(out, text(out / "aclImdb_v1.tar.gz"), pixel_dictionary(), range(2))
    elif options.task == "image":
        write(out, image(out), pixel_dictionary(), range(10))
    else:
        splits = retrieval(release) if options.task == "retrieval" else pathfinder(release)
        write(out, splits, pixel_dictionary(), range(2))


if __name__ == "__main__":
    main()
