"""Windows, chunks and landmarks of the attentions in a comparison of short sequences."""

import math

from common.attention import ATTENTIONS

#: What part of a sequence a window or chunk is, or so many sums or landmarks stand for it, by mechanism.
_PARTS = {
    "local": {"window": 4},
    "longformer": {"window": 4},
    "bigbird": {"chunk_size": 32},  # a token sees eight chunks
    "sinkhorn": {"chunk_size": 8},  # a token sees two
    "linformer": {"projected_length": 4},
    "nystrom": {"landmarks": 4},
}


def reach_arguments(name: str, length: int) -> list[object]:
    """Arguments of fairseq-train with which mechanism ``name`` sees about a quarter of a sequence of ``length`` tokens.

    Its defaults, made for thousands of tokens, are all of a short sequence; where they are less, they stay. FLASH and
    mixed chunk attention are not among these: their chunks differ between comparisons.
    """
    if name == "sparse":  # as the paper chooses the stride; of each other chunk a quarter is seen
        sizes = {"stride": math.isqrt(length), "columns": math.isqrt(length) // 4}
    else:
        sizes = {option: length // part for option, part in _PARTS.get(name, {}).items()}
    defaults = ATTENTIONS[name].Options() if sizes else None
    arguments: list[object] = []
    for option, size in sizes.items():
        arguments += [f"--{name}-{option.replace('_', '-')}", min(getattr(defaults, option), max(1, size))]
    return arguments
