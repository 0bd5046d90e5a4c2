"""The share of generated targets, passages and tokens that are right, from a log of fairseq-generate."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..shared.fairseq_log import parse_generation


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
    generation = parse_generation(lines)
    pairs = [(target.split(), hypothesis.split()) for target, hypothesis in generation.pairs.values()]
    right = [right_tokens(target, hypothesis) for target, hypothesis in pairs]
    spans = [all(hits[i : i + span_tokens]) for hits in right for i in range(0, len(hits), span_tokens)]
    return Counted(
        percentage([target == hypothesis for target, hypothesis in pairs]),
        percentage(spans),
        percentage([token for hits in right for token in hits]),
        generation.milliseconds,
    )


def right_tokens(target: Sequence[str], hypothesis: Sequence[str]) -> list[bool]:
    """For each token of ``target``, whether ``hypothesis`` has it in the same place."""
    return [i < len(hypothesis) and hypothesis[i] == token for i, token in enumerate(target)]


def percentage(values: Sequence[bool]) -> float:
    """The share of True in ``values``, in per cent."""
    return 100.0 * sum(values) / len(values)
