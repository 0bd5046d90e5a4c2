"""The state of causal gau_attention, every token so far: pieces, padding in between, beams, refused arguments."""

import hypothesis
import torch
from hypothesis import strategies as st

from common.ops import gau_attention
from common.ops.shared.score_kernels import SCORE_KERNELS
from tests.common.inputs import padding, qkv
from tests.compare import assert_close


def in_pieces(inputs, pieces, mask=None, bias=None, **options):
    """Output and last state of ``inputs`` in ``pieces`` of these lengths; ``bias(m)`` is the bias for m tokens."""
    outputs, state, start = [], None, 0
    for length in pieces:
        part = slice(start, start + length)
        start += length
        out, state = gau_attention(
            *(x[..., part, :] for x in inputs),
            causal=True,
            key_padding_mask=None if mask is None else mask[:, part],
            bias=None if bias is None else bias(start),
            initial_state=state,
            return_state=True,
            **options,
        )
        outputs.append(out)
    assert start == inputs[0].shape[-2]
    return torch.cat(outputs, dim=-2), state


@hypothesis.given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    side=st.sampled_from(["none", "left", "holes", "all"]),
    kernel=st.sampled_from(SCORE_KERNELS),
    divisor=st.sampled_from([None, 3.0]),
)
@hypothesis.settings(max_examples=40)
def test_any_cut_gives_the_whole(pieces, side, kernel, divisor):
    tokens = sum(pieces)
    inputs, mask = [x[:, 0] for x in qkv(tokens)], padding(side, 2, tokens)
    options = {"kernel": kernel, "divisor": divisor}
    out, state = in_pieces(inputs, pieces, mask, **options)
    assert_close("out", out, gau_attention(*inputs, causal=True, key_padding_mask=mask, **options))
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    assert shapes == {"k": (2, 1, tokens, 5), "v": (2, 1, tokens, 3), "padding_mask": (2, tokens)}
