"""The mechanisms of this project, in the same sizes as the public versions."""

from typing import Any

from torch import Tensor

from common.attention import build_attention, supporting

from .measure import CHANNELS, HEADS, TOKENS, Attend, merged, projected

#: Options of each mechanism that has a public version to compare with, in the order of the table.
OPTIONS: dict[str, dict[str, Any]] = {
    "favor": {},
    "local": {"window": 48},
    "longformer": {"window": 33},
    "bigbird": {"chunk_size": 16},
    "nystrom": {"landmarks": 16},
    "linformer": {"projected_length": 32},
    "reformer": {"chunk_size": 16, "directions": 8},
    "yoso": {},
    "sinkhorn": {"chunk_size": 16},
}


def forms(name: str) -> list[bool]:
    """The values of ``causal`` that the mechanism ``name`` supports."""
    return [causal for causal, kind in ((False, "bidirectional"), (True, "causal")) if name in supporting(kind)]


def ours(name: str) -> Attend:
    """The mechanism ``name`` with linear layers for those of queries, keys and values that it uses."""

    def attend(x: Tensor, padding: Tensor | None, causal: bool) -> Tensor:
        sizes = {"num_heads": HEADS, "head_dim": CHANNELS, "max_tokens": TOKENS}
        module = build_attention(name, causal, **sizes, **OPTIONS[name]).eval()
        heads = projected(x, module.projections(CHANNELS))
        return merged(module(heads.get("q"), heads.get("k"), heads["v"], padding, padding))

    return attend
