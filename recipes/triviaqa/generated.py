"""Make questions and documents laid out as TriviaQA's: ``python -m recipes.triviaqa.generated --out DIR``.

A document is a page about a village where each person keeps one thing; a question asks who keeps a certain thing. With
these files all commands can be tried in minutes, without the data set.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

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


def village_page(people: int, generator: random.Random) -> tuple[str, str, list[str]]:
    """A page, a question about it, and its answers; no two people share a last name or keep the same kind of thing."""
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
    return "\n".join(lines) + "\n", f"Who in {village} keeps the {belongings[asked]}?", [f"{first} {last}", last]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the folders ``qa`` and ``evidence``, and the training pages as text for pretraining, one page per line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("work/triviaqa/generated"))
    parser.add_argument("--train", type=int, default=2000, help="questions to train on")
    parser.add_argument("--valid", type=int, default=200, help="questions to validate on")
    parser.add_argument("--people", type=int, default=6, choices=range(1, len(_LAST) + 1), help="on a page")
    options = parser.parse_args(arguments)
    for number, (split, official) in enumerate(SPLITS.items()):
        generator, entries, lines = random.Random(f"1 {number}"), [], []
        for i in range(vars(options)[split]):
            name, (text, question, aliases) = f"{official}_{i}", village_page(options.people, generator)
            write_lines(options.out / "evidence" / "wikipedia" / f"{name}.txt", [text])
            normalised = [normalise_answer(alias) for alias in aliases]
            answer = {"Value": aliases[0], "Aliases": aliases, "NormalizedAliases": normalised}
            pages = [{"DocSource": "TagMe", "Filename": f"{name}.txt", "Title": name}]
            asked = {"QuestionId": name, "Question": question, "Answer": answer}
            entries.append({**asked, "EntityPages": pages, "SearchResults": []})
            lines.append(" ".join([*text.splitlines(), question]) + "\n")
        content = {"Data": entries, "Domain": "Wikipedia", "VerifiedEval": False, "Version": 1.0}
        write_lines(options.out / "qa" / f"wikipedia-{official}.json", [json.dumps(content, indent=1) + "\n"])
        if split == "train":
            write_lines(options.out / "pages.txt", lines)


if __name__ == "__main__":
    main()
