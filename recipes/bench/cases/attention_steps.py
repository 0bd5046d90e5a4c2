"""One decoding step of every causal attention alone, without the layers around it; derived from the declarations.

A decoding step of a language model (``decoding``) also contains the products with its weights.
"""

import torch
from torch import Tensor

from common.attention import ATTENTIONS

from ..harness.compare import TOLERANCES, compare
from ..harness.work import DECODING, Candidate, Case, Comparison, Settings, random_inputs
from .attentions import HEAD_DIM, HEADS, SOFTMAX, build, is_causal, shapes_of

#: Tokens before the one that is timed: two whole chunks of 64, and a part of one.
POSITION = 135


def candidates(settings: Settings, size: int) -> list[Candidate]:
    """Every attention that supports causal, softmax with its cache first: the token after ``size`` others."""
    names = (name for name in ATTENTIONS if is_causal(name) and name != SOFTMAX)
    return [_candidate(name, settings, size) for name in (SOFTMAX, *names)]


def _candidate(name: str, settings: Settings, size: int) -> Candidate:
    attention = build(name, True, settings, size + 1, HEADS)
    shapes = shapes_of(attention, size + 1)
    inputs = [x.detach() for x in random_inputs(settings, *shapes.values())]
    named = dict(zip(shapes, inputs))
    projected = [named.pop(x, None) for x in ("q", "k", "v")]

    def inputs_of(start: int, stop: int) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """The inputs of tokens ``start`` to ``stop``; the tokens are dimension -2 of each."""
        cut = [None if x is None else x[..., start:stop, :] for x in projected]
        return cut, {key: x[..., start:stop, :] for key, x in named.items()}

    earlier, token = inputs_of(0, size), inputs_of(size, size + 1)
    with torch.no_grad():
        _, state = attention.extend(*earlier[0], **earlier[1])

    def step() -> list[Tensor]:
        with torch.no_grad():
            out, after = attention.extend(*token[0], state=state, **token[1])
        return [out, *after.values()]

    def check() -> list[Comparison]:
        with torch.no_grad():
            expected = attention.forward(*projected, **named)[..., -1:, :]
        return [compare("output", step()[0], expected, TOLERANCES[settings.dtype])]

    return Candidate(name, size, 1, {DECODING: step}, check)


CASES = (
    Case(
        "attention_steps",
        "One decoded token of every causal attention by itself",
        "tokens",
        "position",
        (POSITION,),
        (POSITION,),
        candidates,
        memory=False,
        plotted=False,
        note=f"default options; B = 1, H = {HEADS}, d = {HEAD_DIM}; one token again and again, not the end of a chunk",
    ),
)
