"""Make questions and documents laid out as TriviaQA's: ``python -m recipes.triviaqa.generated --out DIR``.

A document is a page about a village where each person keeps one thing; a question asks who keeps a certain thing. With
these files all commands can be tried in minutes, without the data set.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_plugin.data.span_answers import normalise_answer

from ..texts import write_lines
from .questions import SPLITS

_FIRST = "Ada Bela Cato Dora Emil Fina Gero Hana Ivo Jana Kuno Lea Milo Nora Otto Pia".split()
_LAST = "Ashford Birch Cole Dunmore Elder Finch Grove Hale Ingram Jessop Kemp Lindon".split()
_COLOURS = "blue red green yellow silver black".split()
_THINGS = "lantern kettle compass saddle violin ladder barrel anchor mirror pistol ribbon candle".split()
_VILLAGES = "Oakham Redford Stanley Thornby Ulverton Wexcombe".split()
_ASIDES = (
    "The harvest was late that year.",
    "Rain fell on the harbour all night.",
    "The old road leads over the hills.",
    "Few letters came by the river.",
)
MOST_PEOPLE = min(len(_THINGS), len(_LAST))


class Page(NamedTuple):
    """A document and one question about it."""

    text: str
    question: str
    aliases: list[str]


def make_page(people: int, generator: random.Random) -> Page:
    """A page about ``people``, at most ``MOST_PEOPLE``; no two share a last name or keep the same kind of thing."""
    things = generator.sample(_THINGS, people)
    names = [(generator.choice(_FIRST), last) for last in generator.sample(_LAST, people)]
    belongings = [f"{generator.choice(_COLOURS)} {thing}" for thing in things]
    village = generator.choice(_VILLAGES)
    lines = [f"{village} is a village."]
    for (first, last), belonging in zip(names, belongings):
        lines.append(f"{first} {last} keeps the {belonging}.")
        if generator.random() < 0.25:
            lines.append(generator.choice(_ASIDES))
    asked = generator.randrange(people)
    first, last = names[asked]
    return Page("\n".join(lines) + "\n", f"Who in {village} keeps the {belongings[asked]}?", [f"{first} {last}", last])


def entry(name: str, file: str, page: Page) -> dict[str, Any]:
    """A question in the format of TriviaQA's JSON."""
    normalised = [normalise_answer(alias) for alias in page.aliases]
    answer = {
        "Aliases": page.aliases,
        "NormalizedAliases": normalised,
        "NormalizedValue": normalised[0],
        "Type": "FreeForm",
        "Value": page.aliases[0],
    }
    pages = [{"DocSource": "TagMe", "Filename": file, "Title": file.removesuffix(".txt")}]
    return {
        "Answer": answer,
        "EntityPages": pages,
        "Question": page.question,
        "QuestionId": name,
        "QuestionSource": "generated",
        "SearchResults": [],
    }


def generate(out: Path, sizes: dict[str, int], people: int, seed: int) -> None:
    """Write the folders ``qa`` and ``evidence``, and the training pages as text for pretraining, one page per line."""
    for number, (split, count) in enumerate(sizes.items()):
        generator = random.Random(f"{seed} {number}")
        pages = [make_page(people, generator) for _ in range(count)]
        names = [f"{SPLITS[split]}_{i}" for i in range(count)]
        for name, page in zip(names, pages):
            write_lines(out / "evidence" / "wikipedia" / f"{name}.txt", [page.text])
        entries = [entry(name, f"{name}.txt", page) for name, page in zip(names, pages)]
        content = {
            "Data": entries,
            "Domain": "Wikipedia",
            "Split": SPLITS[split],
            "VerifiedEval": False,
            "Version": 1.0,
        }
        write_lines(out / "qa" / f"wikipedia-{SPLITS[split]}.json", [json.dumps(content, indent=1) + "\n"])
        if split == "train":
            lines = (" ".join([*page.text.splitlines(), page.question]) + "\n" for page in pages)
            write_lines(out / "pages.txt", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work/triviaqa/generated"))
    parser.add_argument("--train", type=int, default=2000, help="questions to train on")
    parser.add_argument("--valid", type=int, default=200, help="questions to validate on")
    parser.add_argument("--people", type=int, default=6, choices=range(1, MOST_PEOPLE + 1), help="on a page")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    options = parser.parse_args(arguments)
    generate(options.out, {"train": options.train, "valid": options.valid}, options.people, options.seed)


if __name__ == "__main__":
    main()
