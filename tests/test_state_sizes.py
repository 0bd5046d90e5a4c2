"""The sizes of decoding states in the README's table of mechanisms are those of real states."""

import math
import re
from pathlib import Path

import torch

from common.attention import ATTENTIONS, build_attention

ROOT = Path(__file__).parent.parent
#: The mechanisms that decode, in the order of the table.
NAMES = (
    "flow linear cosformer favor rfa rfa_gate t2r hedgehog lolcats retention gla gated_delta synthesizer reformer yoso "
    "local longformer sparse mixed_chunk quadratic combiner daft_conv daft_full softmax"
).split()
CHANNELS, LENGTHS = 64, (64, 4096)


@torch.no_grad()
def kibibytes(name: str, n: int) -> int:
    """KiB of the state of one head after n tokens, rounded up."""
    attention = build_attention(name, True, num_heads=1, head_dim=CHANNELS, max_tokens=n).eval()
    widths = attention.projections(CHANNELS)
    projected = {x: torch.ones(1, 1, n, widths[x]) if x in widths else None for x in ("q", "k", "v")}
    _, state = attention.extend(**projected, **attention.inputs(x=torch.ones(1, n, CHANNELS)))
    return math.ceil(sum(x.nbytes for x in state.values()) / 1024)


def test_the_table_of_mechanisms_says_how_large_states_are():
    assert set(NAMES) == {name for name, kind in ATTENTIONS.items() if "causal" in kind.supports}
    rows = re.findall(r"^\|.*\| yes.*\|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    written = [numbers for row in rows for numbers in re.findall(r"\(([\d,]+(?:; [\d,]+)?)\)", row.split("|")[-2])]
    found = []
    for name in NAMES:
        sizes = dict.fromkeys(f"{kibibytes(name, n):,}" for n in LENGTHS)
        found.append("; ".join(sizes))
    assert dict(zip(NAMES, written)) == dict(zip(NAMES, found)) and len(written) == len(NAMES)
