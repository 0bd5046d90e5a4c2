"""Make questions and documents laid out as TriviaQA's: ``python -m recipes.triviaqa.generated --out DIR``.

A document is a page about a village where each person keeps one thing; a question asks who keeps a certain thing. With
these files all commands can be tried in minutes, without the data set.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.command_parser import CommandParser
from fairseq_plugin.data.span_answers import normalise_answer

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, script
from ..shared.working_folder import atomic_write, working_folder, write_text
from .questions import SPLITS

COMMAND = "recipes.triviaqa.generated"
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


class Sizes(NamedTuple):
    """How much to generate."""

    questions: dict[str, int]  # split -> number of questions
    people: int  # per page
    seed: int


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


def generate(out: Path, sizes: Sizes) -> None:
    """Write the folders ``qa`` and ``evidence``, and the training pages as text for pretraining, one page per line."""
    for number, (split, count) in enumerate(sizes.questions.items()):
        generator = random.Random(f"{sizes.seed} {number}")
        pages = [make_page(sizes.people, generator) for _ in range(count)]
        entries = []
        for i, page in enumerate(pages):
            file = f"{SPLITS[split]}_{i}.txt"
            write_text(out / "evidence" / "wikipedia" / file, page.text)
            entries.append(entry(f"{SPLITS[split]}_{i}", file, page))
        content = {
            "Data": entries,
            "Domain": "Wikipedia",
            "Split": SPLITS[split],
            "VerifiedEval": False,
            "Version": 1.0,
        }
        write_text(out / "qa" / f"wikipedia-{SPLITS[split]}.json", json.dumps(content, indent=1) + "\n")
        if split == "train":
            with atomic_write(out / "pages.txt") as part:
                lines = (" ".join([*page.text.splitlines(), page.question]) + "\n" for page in pages)
                part.write_text("".join(lines), encoding="utf-8")


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog=f"python -m {COMMAND}", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("work/triviaqa/generated"), help="default: %(default)s")
    parser.add_argument("--train", type=positive_int, default=2000, help="questions to train on (%(default)s)")
    parser.add_argument("--valid", type=positive_int, default=200, help="questions to validate on (%(default)s)")
    parser.add_argument(
        "--people", type=positive_int, default=6, help=f"on a page, at most {MOST_PEOPLE} (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn (%(default)s)")
    return parser


@script("generated")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.people > MOST_PEOPLE:
        raise ValueError(f"--people is {options.people}; allowed: at most {MOST_PEOPLE}")
    out = options.out.absolute()
    with working_folder(out, COMMAND):
        generate(out, Sizes({"train": options.train, "valid": options.valid}, options.people, options.seed))
    print(f"Ready: {shown_path(out)}. The commands to go on with are in recipes/triviaqa/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
