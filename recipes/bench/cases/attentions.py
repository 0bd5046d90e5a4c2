"""One case for every registered attention, derived from its declaration: a new attention needs no edit here.

The attention runs with default options, causal if it supports that, next to fused softmax attention. It is compared
with its own ``reference`` at a short length, and with itself in float64 at the timed length.
"""

import copy
import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from common.attention import ATTENTIONS, InnerAttention, build_attention

from ..harness.compare import compare_attention
from ..harness.work import Absent, Candidate, Case, Comparison, Settings, attention_runs, random_inputs

SOFTMAX = "softmax"
HEADS, HEAD_DIM = 8, 64
#: Squares, so that an attention that needs the shape of an image gets one.
LENGTHS, QUICK_LENGTHS = (256, 1024, 4096), (256,)
#: Tokens and heads of the comparison with the reference, which may be a slow loop; most tokens of that in float64.
_REFERENCE, _REFERENCE_HEADS, _FLOAT64 = 36, 2, 1024
#: Standard deviation of the noise on parameters: some start at 0, which would hide an error in their use.
_NOISE = 0.1


def candidates(name: str, settings: Settings, size: int) -> list[Candidate | Absent]:
    """The attention ``name`` and fused softmax attention at ``size`` tokens."""
    causal = is_causal(name)
    return [_candidate(attention, causal, settings, size) for attention in (name, SOFTMAX)]


def is_causal(name: str) -> bool:
    """Whether the attention ``name`` supports causal; its case is causal then."""
    return "causal" in ATTENTIONS[name].supports


def is_of_sequences(name: str) -> bool:
    """Whether ``name`` accepts sequences, not only images. SOFT does not, and needs minutes for 4,096 tokens."""
    return "spatial_shape" not in ATTENTIONS[name].needs


def _candidate(name: str, causal: bool, settings: Settings, size: int) -> Candidate:
    attention = build(name, causal, settings, size, HEADS)
    shapes = shapes_of(attention, size)
    inputs = random_inputs(settings, *shapes.values())

    def check() -> list[Comparison]:
        return [
            *_compare(name, causal, settings, _REFERENCE, _REFERENCE_HEADS, "reference"),
            *_compare(name, causal, settings, min(size, _FLOAT64), HEADS, "forward"),
        ]

    nbytes = sum(x.numel() * x.element_size() for x in inputs)
    # The parameters are inputs as well, so that they get gradients.
    runs = attention_runs(_called(attention, "forward", shapes), [*inputs, *attention.parameters()])
    return Candidate(name, size, size, runs, check, nbytes)


def build(name: str, causal: bool, settings: Settings, tokens: int, heads: int) -> InnerAttention:
    """The attention ``name`` with default options and random parameters, for sequences of ``tokens``."""
    torch.manual_seed(1)
    dims = 1 if is_of_sequences(name) else 2
    shape = {"num_heads": heads, "head_dim": HEAD_DIM, "max_tokens": tokens, "spatial_dims": dims}
    attention = build_attention(name, causal, **shape)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=_NOISE)
    return settings.to(attention).eval()


@lru_cache  # several cases and sizes share the comparisons of the reference and of softmax
def _compare(
    name: str, causal: bool, settings: Settings, tokens: int, heads: int, method: str
) -> tuple[Comparison, ...]:
    """Compare the attention with its ``method`` in float64, at ``tokens`` tokens."""
    attention = build(name, causal, settings, tokens, heads)
    shapes = shapes_of(attention, tokens)
    forward, expected = (
        _called(attention, "forward", shapes),
        _called(copy.deepcopy(attention).double(), method, shapes),
    )
    return tuple(compare_attention(forward, expected, random_inputs(settings, *shapes.values()), list(shapes)))


def shapes_of(attention: InnerAttention, tokens: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors that ``attention`` accepts: its projections and its further inputs."""
    heads = attention.shape.num_heads
    shapes = {name: (1, heads, tokens, width) for name, width in attention.projections(HEAD_DIM).items()}
    return {**shapes, **attention.inputs(x=(1, tokens, heads * HEAD_DIM), source_q=(1, heads, tokens, HEAD_DIM))}


def _called(attention: nn.Module, method: str, shapes: dict[str, tuple[int, ...]]) -> Callable[..., Tensor]:
    """``method`` of ``attention`` as a function of the tensors in ``shapes``; further arguments are ignored."""

    def call(*tensors: Tensor) -> Tensor:
        named = dict(zip(shapes, tensors))
        side = math.isqrt(shapes["v"][2])
        projected = [named.pop(name, None) for name in ("q", "k", "v")]
        return getattr(attention, method)(*projected, **named, **attention.inputs(spatial_shape=(side, side)))

    return call


def _cases() -> Iterator[Case]:
    for name in ATTENTIONS:
        if name != SOFTMAX:
            yield Case(
                f"attention_{name}",
                f"The registered attention {name!r}" + (", causal" if is_causal(name) else ""),
                "tokens",
                "tokens",
                LENGTHS if is_of_sequences(name) else LENGTHS[:2],
                QUICK_LENGTHS,
                partial(candidates, name),
                plotted=False,
                note=f"default options, causal where that is supported; B = 1, H = {HEADS}, d = {HEAD_DIM}",
                family="Every registered attention, beside fused softmax attention",
            )


CASES = tuple(_cases())
