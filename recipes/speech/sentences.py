"""Short sentences to be spoken: of a text, or commands that are put together here.

Their letters are exactly what is spoken: no digits, abbreviations or other signs that a voice reads as words.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

#: The ends of a sentence or of a part of it.
_ENDS = re.compile(r"[.!?;:,\n\r\t()\"“”]+|--|—")
FEWEST_WORDS, MOST_WORDS = 2, 8

_DIGITS = "zero one two three four five six seven eight nine".split()
_DEVICES = "light radio heater fan music camera window oven printer kettle television lamp".split()
_ROOMS = "kitchen garden bedroom office hall garage cellar attic bathroom workshop".split()
_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()
_MINUTES = "ten fifteen twenty thirty forty fifty".split()


def read_sentences(path: Path) -> list[str]:
    """The different sentences of a text of ``FEWEST_WORDS`` to ``MOST_WORDS`` words, in small letters, in order.

    Commas end a sentence too. Sentences with signs other than letters and apostrophes are left out, and
    those with a word of apostrophes alone, which no voice speaks.
    """
    text = path.read_text(encoding="utf-8")
    words = (part.lower().replace("’", "'").replace("-", " ").split() for part in _ENDS.split(text))
    fitting = (" ".join(part) for part in words if FEWEST_WORDS <= len(part) <= MOST_WORDS)
    return list(dict.fromkeys(x for x in fitting if all(word.replace("'", "").isalpha() for word in x.split())))


def commands(generator: random.Random) -> Iterator[str]:
    """Commands to a house and numbers, without end; a few may come twice."""
    draw = generator.choice
    while True:
        yield " ".join(draw(_DIGITS) for _ in range(generator.randint(3, 6)))
        yield f"turn {draw(('on', 'off'))} the {draw(_DEVICES)} in the {draw(_ROOMS)} for {draw(_MINUTES)} minutes"
        yield f"set the {draw(('alarm', 'timer', 'clock'))} to {draw(_DAYS)} at {draw(_DIGITS[1:])} {draw(_MINUTES)}"


def split_sentences(path: Path | None, count: int, seed: int) -> dict[str, list[str]]:
    """Split -> ``count`` sentences in all of the text at ``path``, in random order; None: commands."""
    generator = random.Random(seed)
    if path is None:
        drawn: dict[str, None] = {}
        spoken = commands(generator)
        while len(drawn) < count:
            drawn[next(spoken)] = None
        sentences = list(drawn)
    else:
        sentences = read_sentences(path)
        generator.shuffle(sentences)
        sentences = sentences[:count]
    if len(sentences) < 20:
        raise ValueError(
            f"{path or '--sentences'} gives {len(sentences)} sentences of {FEWEST_WORDS} to {MOST_WORDS} words; "
            "allowed: at least 20"
        )
    first, second = round(0.9 * len(sentences)), round(0.95 * len(sentences))
    return {"train": sentences[:first], "valid": sentences[first:second], "test": sentences[second:]}
