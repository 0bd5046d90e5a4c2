"""Read the output of fairseq's commands: training logs (--log-format json), eval-lm's result, samples."""

import itertools
import json
import re
import statistics
from collections.abc import Iterable
from typing import NamedTuple

_VALUES = re.compile(r"\| (\w+) \| (\{.*\})\s*$")
_PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+) \(")
_TOKENS = re.compile(r"Evaluated ([\d,]+) tokens in")
_LOSS = re.compile(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)")
_SAMPLE = re.compile(r"^D-\d+\t[^\t]*\t(.*)$")
_GENERATED = re.compile(r"^([TH])-(\d+)\t(.*)$")
_GENERATION_TIME = re.compile(r"Translated ([\d,]+) sentences \([\d,]+ tokens\) in ([\d.]+)s")


class Point(NamedTuple):
    """One logged line of any training run."""

    split: str  # the evaluated split, or "train_inner" within an epoch and "train" at its end
    epoch: int
    update: int
    values: dict[str, float]  # by name, without the split's prefix


class Evaluation(NamedTuple):
    """eval-lm's result."""

    tokens: int
    bits_per_token: float
    perplexity: float


class Generation(NamedTuple):
    """Targets that fairseq-generate wrote."""

    pairs: dict[int, tuple[str, str]]  # number of a source -> its right target, and the best hypothesis
    milliseconds: float  # per source: the encoder and all steps of the decoder


def parse_values(line: str) -> tuple[str, dict[str, float]] | None:
    """The split in a line of a log (see ``Point``) and its values by name; None if the line has none."""
    match = _VALUES.search(line)
    if match is None:
        return None
    split = match[1]
    return split, {name.removeprefix(f"{split}_"): float(value) for name, value in json.loads(match[2]).items()}


def parse_point(line: str) -> Point | None:
    """The point in a line of a training log; None if the line has none."""
    split, values = parse_values(line) or ("", {})
    if not {"epoch", "num_updates"} <= values.keys():
        return None
    return Point(split, int(values.pop("epoch")), int(values.pop("num_updates")), values)


def parse_validation(lines: Iterable[str], split: str) -> dict[str, float]:
    """Values that fairseq-validate printed for ``split``, by name.

    Raises:
        ValueError: the log has no results of ``split``.
    """
    for result in filter(None, map(parse_values, lines)):
        if result[0] == split:
            return result[1]
    raise ValueError(f"the log has no results of {split}; allowed: those that fairseq-validate prints last")


def parse_points(lines: Iterable[str]) -> list[Point]:
    """Every point of a training log, in order.

    A continued training repeats its updates after the last checkpoint; the later lines count.
    """
    points: list[Point] = []
    for point in filter(None, map(parse_point, lines)):
        count = len(points)
        while count and points[count - 1].update >= point.update:
            count -= 1
            if points[count].update > point.update or points[count].split == point.split:
                del points[count:]
        points.append(point)
    return points


def parse_training(lines: Iterable[str]) -> list[Point]:
    """The points within the training of a language model and its validations, in order.

    fairseq prints no wall time for a validation; it gets that of the point before it.
    """
    points: list[Point] = []
    for point in parse_points(lines):
        if point.split in ("train_inner", "valid"):
            wall = {"wall": points[-1].values["wall"] if points else 0.0}
            points.append(point._replace(values={**wall, **point.values}))
    return points


def median_tokens_per_second(points: Iterable[Point]) -> float:
    """The median of the logged training speeds.

    The first is ignored because the machine still warms up, as are those of an interval with a validation.

    Raises:
        ValueError: no speed remains.
    """
    points = list(points)
    speeds = [
        point.values["wps"]
        for before, point in itertools.pairwise(points)
        if point.split == before.split == "train_inner"
    ]
    if not speeds:
        raise ValueError(f"the log has {len(points)} points; allowed: two training points in a row, see --log-interval")
    return statistics.median(speeds)


def parse_parameters(lines: Iterable[str]) -> int:
    """The number of parameters that fairseq-train prints."""
    return int(_search(_PARAMETERS, lines, "number of parameters")[1].replace(",", ""))


def parse_evaluation(lines: Iterable[str]) -> Evaluation:
    """The scored tokens, bits per token and perplexity that fairseq-eval-lm prints."""
    lines = list(lines)
    tokens = _search(_TOKENS, lines, "number of tokens evaluated")
    loss = _search(_LOSS, lines, "loss")
    return Evaluation(int(tokens[1].replace(",", "")), float(loss[1]), float(loss[2]))


def parse_samples(lines: Iterable[str]) -> list[str]:
    """The texts that fairseq-interactive wrote: one line for each prompt."""
    return [match[1] for match in map(_SAMPLE.match, lines) if match is not None]


def parse_generation(lines: Iterable[str]) -> Generation:
    """The targets and the best hypothesis of each source in a log of fairseq-generate.

    Raises:
        ValueError: the log ends too early.
    """
    texts: dict[str, dict[int, str]] = {"T": {}, "H": {}}
    seconds = None
    for line in lines:
        if match := _GENERATED.match(line):
            # A hypothesis follows its score; the first one of a source is the best.
            texts[match[1]].setdefault(int(match[2]), match[3].rpartition("\t")[2])
        elif match := _GENERATION_TIME.search(line):
            seconds = float(match[2])
    if seconds is None or not texts["T"]:
        raise ValueError("the log of fairseq-generate has no end; allowed: a complete one")
    pairs = {number: (target, texts["H"][number]) for number, target in texts["T"].items()}
    return Generation(pairs, 1000.0 * seconds / len(pairs))


def bits_per_byte(evaluation: Evaluation, text_bytes: int) -> float:
    """The bits of all scored tokens, ends of documents included, over the bytes of the text in UTF-8.

    Unlike perplexity it does not depend on the tokenization.
    """
    if text_bytes < 1:
        raise ValueError(f"text_bytes is {text_bytes}; allowed: at least 1")
    return evaluation.bits_per_token * evaluation.tokens / text_bytes


def _search(pattern: re.Pattern, lines: Iterable[str], what: str) -> re.Match:
    for line in lines:
        match = pattern.search(line)
        if match is not None:
            return match
    raise ValueError(f"the log has no {what}; allowed: a line like {pattern.pattern!r}")


def curves(points: Iterable[Point]) -> dict[str, list[list]]:
    """Curves for a JSON file: split -> [update, loss, wall seconds]."""
    by_split: dict[str, list[list]] = {"train_inner": [], "valid": []}
    for point in points:
        by_split[point.split].append([point.update, point.values["loss"], point.values["wall"]])
    return by_split
