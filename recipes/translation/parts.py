"""Train, valid and test of messages: whole programs, and no message of one part is nearly the same in another."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..shared.text_files import TRIAL_PARTS
from .catalogues import Pair, words

#: Two sources that have this share of their words in common are nearly the same.
NEAR = 0.75


class Parts(NamedTuple):
    """The pairs of each part."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    near: int  # pairs left out of train or valid since a later part has nearly the same source


def split(pairs: Sequence[Pair], seed: int) -> Parts:
    """Put each program into one part; the order in which programs are taken depends on ``seed`` and their names alone.

    Test and valid get programs while they have at most their shares of ``TRIAL_PARTS``, train gets all others.

    Raises:
        ValueError: there are too few programs, so that a part is empty.
    """
    sizes = Counter(pair.program for pair in pairs)
    room = {part: TRIAL_PARTS[part] * len(pairs) for part in ("test", "valid")}
    part_of = {}
    for program in sorted(sizes, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()):
        part = next((part for part in room if sizes[program] <= room[part]), "train")
        part_of[program] = part
        if part in room:
            room[part] -= sizes[program]
    parts = {part: [pair for pair in pairs if part_of[pair.program] == part] for part in TRIAL_PARTS}
    valid = without_near(parts["valid"], parts["test"])
    train = without_near(parts["train"], [*valid, *parts["test"]])
    divided = Parts(train, valid, parts["test"], len(pairs) - len(train) - len(valid) - len(parts["test"]))
    empty = [part for part in TRIAL_PARTS if not getattr(divided, part)]
    if empty:
        raise ValueError(
            f"{len(pairs)} messages of {len(sizes)} programs leave none for {', '.join(empty)}; allowed: catalogues of "
            f"more programs, some with at most {TRIAL_PARTS['test']:.0%} of all messages"
        )
    return divided


def without_near(pairs: Sequence[Pair], others: Sequence[Pair]) -> list[Pair]:
    """The ``pairs`` whose source is not nearly the same as one of ``others``.

    Sets of words x and y are near if |x & y| >= ``NEAR`` |x | y|. Then each has at least one of its |x| - NEAR |x| + 1
    rarest words among those of the other, so that only few sets are compared.
    """
    bags = [words(pair.source) for pair in pairs]
    other_bags = {words(pair.source) for pair in others}
    frequency = Counter(word for bag in (*bags, *other_bags) for word in bag)

    def rarest(bag: frozenset[str]) -> list[str]:
        ordered = sorted(bag, key=lambda word: (frequency[word], word))
        return ordered[: len(bag) - math.ceil(NEAR * len(bag)) + 1]

    having = defaultdict(list)
    for bag in other_bags:
        for word in rarest(bag):
            having[word].append(bag)

    def is_near(bag: frozenset[str]) -> bool:
        candidates = (other for word in rarest(bag) for other in having[word])
        return any(len(bag & other) >= NEAR * len(bag | other) for other in candidates)

    return [pair for pair, bag in zip(pairs, bags) if not is_near(bag)]
