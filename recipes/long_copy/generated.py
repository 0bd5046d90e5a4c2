"""Read a log of fairseq-generate, and count the tokens that are right."""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_LINE = re.compile(r"^([TH])-(\d+)\t(.*)$")
_TIME = re.compile(r"Translated ([\d,]+) sentences \([\d,]+ tokens\) in ([\d.]+)s")


class Counted(NamedTuple):
    """Accuracy of generated targets in per cent, and the time of generation."""

    exact: float  # targets that are right from the first token to the last, without further tokens
    passages: float  # passages with every token right and in its place
    tokens: float  # tokens that are right and in their places
    milliseconds: float  # per source: the encoder and all steps of the decoder


def count(lines: Iterable[str], span_tokens: int) -> Counted:
    """Compare the best hypothesis of each source in a log of fairseq-generate with its target.

    Raises:
        ValueError: the log ends too early.
    """
    texts: dict[str, dict[int, list[str]]] = {"T": {}, "H": {}}
    seconds = None
    for line in lines:
        if match := _LINE.match(line):
            # A hypothesis follows its score; the first one of a source is the best.
            texts[match[1]].setdefault(int(match[2]), match[3].rpartition("\t")[2].split())
        elif match := _TIME.search(line):
            seconds = float(match[2])
    if seconds is None or not texts["T"]:
        raise ValueError("the log of fairseq-generate has no end; allowed: a complete one")
    pairs = [(target, texts["H"][number]) for number, target in texts["T"].items()]
    right = [right_tokens(target, hypothesis) for target, hypothesis in pairs]
    spans = [all(hits[i : i + span_tokens]) for hits in right for i in range(0, len(hits), span_tokens)]
    return Counted(
        percentage([target == hypothesis for target, hypothesis in pairs]),
        percentage(spans),
        percentage([token for hits in right for token in hits]),
        1000.0 * seconds / len(pairs),
    )


def right_tokens(target: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """For each token of ``target``, whether ``hypothesis`` has it in the same place."""
    return [i < len(hypothesis) and hypothesis[i] == token for i, token in enumerate(target)]


def percentage(values: Sequence[bool]) -> float:
    """The share of True in ``values``, in per cent."""
    return 100.0 * sum(values) / len(values)
