"""Tiny files in the layouts that recipes/guides tell users to have, for all tasks."""

import json
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image

#: Pages whose commands start from these files.
_NAMES = ("language_model", "own_data", "own_numbers", "translation", "audio")
PAGES = tuple(f"recipes/guides/{name}.md" for name in _NAMES)


def write(folder: Path) -> None:
    """Write the files of all tasks to ``folder``, except for those of language models and translation."""
    random = np.random.default_rng(0)
    _write_labelled(folder, random)
    _write_questions(folder / "questions", random)
    _write_numbers(folder, random)
    _write_images(folder, random)
    _write_recordings(folder / "recordings")


def _write_labelled(folder: Path, random: np.random.Generator) -> None:
    """{train,valid}.{input0,input1,label}: whether the two texts of a line begin with the same word."""
    for split, count in (("train", 40), ("valid", 12)):
        texts = [[" ".join(words) for words in random.choice(["red", "blue", "green"], (count, 6))] for _ in range(2)]
        labels = ["same" if one.split()[0] == two.split()[0] else "other" for one, two in zip(*texts)]
        for ending, lines in zip(("input0", "input1", "label"), (*texts, labels)):
            (folder / f"{split}.{ending}").write_text("\n".join(lines) + "\n")


def _write_questions(folder: Path, random: np.random.Generator) -> None:
    """Questions with the keys that the page shows, each about a page of its own."""
    for kind in ("qa", "evidence/wikipedia"):
        (folder / kind).mkdir(parents=True)
    number = 0
    for split, count in (("train", 12), ("dev", 6)):
        entries = []
        for _ in range(count):
            number += 1
            colour, name = random.choice(["blue", "red"]), random.choice(["Ada Frost", "Ivo Kemp"])
            page = folder / "evidence" / "wikipedia" / f"page{number}.txt"
            page.write_text(f"Oakham is a village.\n{name} keeps the {colour} lantern.\n")
            entries.append(
                {
                    "QuestionId": f"q{number}",
                    "Question": f"Who keeps the {colour} lantern?",
                    "Answer": {"NormalizedAliases": [name.lower(), name.split()[1].lower()]},
                    "EntityPages": [{"Filename": page.name}],
                }
            )
        content = {"Domain": "Wikipedia", "Data": entries}
        (folder / "qa" / f"wikipedia-{split}.json").write_text(json.dumps(content))


def _write_numbers(folder: Path, random: np.random.Generator) -> None:
    """Series of unequal lengths in folders of their labels, and episodes with two actions between -1 and 1."""
    for number in range(1, 25):
        label, split = ("fast", "slow")[number % 2], "test" if 3 <= number <= 6 else "train"
        path = folder / "series" / split / label / f"{number}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(path, random.normal(size=(random.integers(5, 12), 3)), delimiter=",")
    (folder / "episodes").mkdir()
    for number in range(1, 7):
        steps = random.normal(size=(random.integers(5, 12), 6))
        steps[:, 3:5] = np.tanh(steps[:, 3:5])
        np.savetxt(folder / "episodes" / f"{number}.csv", steps, delimiter=",")


def _write_images(folder: Path, random: np.random.Generator) -> None:
    """24 photos, and a folder of images for each of two classes."""
    paths = [folder / "photos" / f"{number}.png" for number in range(24)]
    for split, number in (("train", 1), ("validation", 2)):
        paths += [folder / "images" / split / label / f"{number}.jpg" for label in ("cat", "dog")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(path)


def _write_recordings(folder: Path) -> None:
    """Lists of two recordings of a second, with transcripts in letters and their dictionary."""
    (folder / "audio").mkdir(parents=True)
    for split, number in (("train", 1), ("valid", 2)):
        soundfile.write(folder / "audio" / f"{number}.wav", np.zeros(16_000), 16_000)
        (folder / f"{split}.tsv").write_text(f"{folder}\naudio/{number}.wav\t16000\n")
        (folder / f"{split}.ltr").write_text("O N E | T W O |\n")
    (folder / "dict.ltr.txt").write_text("".join(f"{letter} 2\n" for letter in "|ONETW"))
