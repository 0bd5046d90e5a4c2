"""Windows, chunks and landmarks of the attentions in a comparison of short sequences."""

import math

from common.attention import ATTENTIONS

#: Mechanism -> option and divisor: its window, chunk or number of landmarks is the length over the divisor.
_PARTS = {
    "local": {"window": 4},
    "longformer": {"window": 4},
    "bigbird": {"chunk_size": 32},  # a token sees eight chunks
    "sinkhorn": {"chunk_size": 8},  # a token sees two
    "linformer": {"projected_length": 4},
    "nystrom": {"landmarks": 4},
}


def scaled_window_arguments(name: str, length: int) -> list[object]:
    """Arguments of fairseq-train with which mechanism ``name`` sees about a quarter of a sequence of ``length`` tokens.

    The defaults, for thousands of tokens, would cover a whole short sequence; smaller defaults are kept. FLASH and
    mixed chunk attention are not included: their chunks differ between comparisons.
    """
    if name == "sparse":  # the paper's choice of the stride; a quarter of each other chunk is visible
        sizes = {"stride": math.isqrt(length), "columns": math.isqrt(length) // 4}
    else:
        sizes = {option: length // part for option, part in _PARTS.get(name, {}).items()}
    defaults = ATTENTIONS[name].Options() if sizes else None
    arguments: list[object] = []
    for option, size in sizes.items():
        arguments += [f"--{name}-{option.replace('_', '-')}", min(getattr(defaults, option), max(1, size))]
    return arguments
