"""Toy text: a dictionary of made-up words, sequences of them, and files to train on."""

import random
from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

PAD = 1


def dictionary(words: int = 60) -> Dictionary:
    """A dictionary of ``words`` made-up words beside fairseq's four special symbols."""
    symbols = Dictionary()
    for i in range(words):
        symbols.add_symbol(f"w{i}")
    return symbols


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random real tokens (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 60, (batch, length), generator=generator)


def padded(sequence: Tensor, left: int, right: int) -> Tensor:
    """sequence (B, T) -> (B, left + T + right), with padding around it."""
    return nn.functional.pad(sequence, (left, right), value=PAD)


def write_text(folder: Path, seed: int = 0) -> None:
    """train.txt, valid.txt and test.txt of sentences with something to learn: a word foretells the next one."""
    rng = random.Random(seed)
    for split, lines in (("train", 300), ("valid", 40), ("test", 20)):
        sentences = []
        for _ in range(lines):
            word = rng.randrange(60)
            sentence = []
            for _ in range(rng.randrange(5, 12)):
                sentence.append(f"w{word}")
                word = (7 * word + rng.randrange(3)) % 60
            sentences.append(" ".join(sentence))
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")


def write_sentence_pairs(folder: Path, seed: int = 0) -> None:
    """{train,valid,test}.{in,out}: the target has each word of the source, from the last to the first, in capitals."""
    write_text(folder, seed)
    for split in ("train", "valid", "test"):
        text = folder / f"{split}.txt"
        lines = text.read_text().splitlines()
        text.rename(folder / f"{split}.in")
        turned = (" ".join(word.upper() for word in reversed(line.split())) for line in lines)
        (folder / f"{split}.out").write_text("\n".join(turned) + "\n")


def write_labelled_text(folder: Path, seed: int = 0) -> None:
    """{train,valid}.{input0,label}: the label is whether most words of a sentence are of the first half."""
    rng = random.Random(seed)
    for split, lines in (("train", 400), ("valid", 80)):
        sentences, labels = [], []
        for _ in range(lines):
            label = rng.randrange(2)
            words = [rng.randrange(30) + 30 * (label if rng.random() < 0.9 else 1 - label) for _ in range(15)]
            sentences.append(" ".join(f"w{word}" for word in words[: rng.randrange(11, 16)]))
            labels.append(str(label))
        (folder / f"{split}.input0").write_text("\n".join(sentences) + "\n")
        (folder / f"{split}.label").write_text("\n".join(labels) + "\n")
