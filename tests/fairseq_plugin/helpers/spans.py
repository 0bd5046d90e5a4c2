"""Questions whose answers are spans of documents, in a folder that ``--task span_extraction`` reads."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from fairseq.data import Dictionary, ListDataset

from fairseq_plugin.data.span_folder import DOCUMENT, QUESTION, Question, SpanSplit, write_questions
from recipes.texts import write_split

from .commands import USER_DIR
from .masked_models import small

FILLER = [f"▁w{i}" for i in range(20)]
FIRST = [f"▁Ada{i}" for i in range(6)]
LAST = [f"▁Frost{i}" for i in range(6)]
TASK = "--task span_extraction --criterion span_extraction".split()
#: Windows that are so short that most documents have several.
WINDOWS = "--max-positions 32 --max-question-length 6 --max-answer-length 4".split()


def span_dictionary() -> Dictionary:
    """The dictionary of all words, without the ``<mask>`` that tasks add."""
    symbols = Dictionary()
    for word in (*FILLER, *FIRST, *LAST):
        symbols.add_symbol(word)
    return symbols


def write_names(folder: Path, counts: dict[str, int] | None = None, seed: int = 0) -> Path:
    """Documents of 10 to 59 words with a name of two words in each, which is the answer; returns ``folder``."""
    rng = np.random.default_rng(seed)
    symbols = span_dictionary()
    for kind in (QUESTION, DOCUMENT):
        (folder / kind).mkdir(parents=True)
    symbols.save(str(folder / "dict.txt"))
    for split, count in (counts or {"train": 96, "valid": 24}).items():
        questions, asked, documents, spans = [], [], [], []
        for number in range(count):
            words = [str(word) for word in rng.choice(FILLER, rng.integers(10, 60))]
            place = int(rng.integers(0, len(words) - 1))
            words[place : place + 2] = name = [str(rng.choice(FIRST)), str(rng.choice(LAST))]
            question = [str(word) for word in rng.choice(FILLER, rng.integers(2, 8))]
            for texts, one in ((documents, words), (asked, question)):
                texts.append(np.array([symbols.index(word) for word in one], dtype=np.int32))
            spans.append((place, place + 1))
            questions.append(Question(f"{split} {number}", [" ".join(name).replace("▁", "")]))
        write_split(folder / QUESTION, split, asked, len(symbols))
        write_split(folder / DOCUMENT, split, documents, len(symbols))
        write_questions(questions, folder / f"{split}.json")
        pairs = np.stack([np.arange(count)] * 2, 1)
        np.savez(folder / f"{split}.npz", pairs=pairs, counts=np.ones(count, int), spans=np.array(spans))
    return folder


def split_of(
    questions: Sequence[int], documents: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]
) -> SpanSplit:
    """A split in memory: questions and documents of these lengths, question i to document i, which has ``spans[i]``."""
    texts = []
    for lengths in (questions, documents):
        texts.append(ListDataset([torch.arange(length) % 20 + 4 for length in lengths], np.array(lengths)))
    pairs = np.stack([np.arange(len(documents))] * 2, 1)
    flat = np.array([span for of_one in spans for span in of_one], dtype=np.int32).reshape(-1, 2)
    ends = np.cumsum([0, *map(len, spans)])
    named = [SimpleNamespace(name=str(i), answers=[f"answer {i}"]) for i in range(len(questions))]
    return SpanSplit(named, *texts, pairs, flat, ends)


def training_command(data: Path, save_dir: str, arch: str, *arguments: str) -> list[str]:
    """Arguments of a short ``fairseq-train --task span_extraction`` on the CPU; later ``arguments`` win."""
    numbers = "--cpu --seed 1 --log-format json --log-interval 1 --optimizer adam --lr 5e-3 --batch-size 16".split()
    always = ["--required-batch-size-multiple", "1", "--no-epoch-checkpoints", "--save-dir", save_dir]
    model = [*TASK, *WINDOWS, "--arch", arch, *small(arch)]
    return [str(data), "--user-dir", USER_DIR, *model, *numbers, *always, *arguments]
