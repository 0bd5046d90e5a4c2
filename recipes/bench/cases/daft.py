"""DAFT-conv, causal, beside one direct convolution."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from common.ops import daft_conv
from common.ops.daft_conv_reference import daft_conv_reference

from ..compare import compare_attention
from ..peers import attention_maps, direct_convolution
from ..work import Absent, Case, Comparison, Form, Settings, attention_runs, random_inputs

OURS, DIRECT = "daft_conv", "direct convolution"
WIDTH, HEADS, WINDOW = 512, 8, 64
NAMES = ("q", "k", "v", "r")
#: Tokens of the comparisons with the literal reference, a loop, and with a map.
_SHORT, _MAP = 75, 700


def causal(settings: Settings, size: int) -> list[Form | Absent]:
    """Both forms at ``size`` tokens."""
    return [
        _form(OURS, partial(daft_conv, causal=True), settings, size),
        _form(DIRECT, direct_convolution.daft_conv, settings, size),
    ]


def _form(name: str, attention: Callable[..., Tensor], settings: Settings, size: int) -> Form:
    inputs = _inputs(settings, size)

    def check() -> list[Comparison]:
        longer = _inputs(settings, min(size, _MAP))
        return [
            *compare_attention(attention, _literal, _inputs(settings, _SHORT), NAMES),
            *compare_attention(attention, attention_maps.daft_conv, longer, NAMES),
        ]

    nbytes = sum(x.numel() * x.element_size() for x in inputs[:3])
    return Form(name, size, size, attention_runs(attention, inputs), check, nbytes)


def _literal(q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
    return daft_conv_reference(q, k, v, r, causal=True)


def _inputs(settings: Settings, size: int) -> list[Tensor]:
    return random_inputs(settings, (1, size, WIDTH), (1, size, HEADS), (1, size, WIDTH), (HEADS, WINDOW))


CASES = (
    Case(
        "daft_conv",
        "DAFT-conv, causal",
        "tokens",
        "tokens",
        (512, 1024, 2048, 4096),
        (512,),
        causal,
        note=f"B = 1, d = {WIDTH}, {HEADS} heads, window {WINDOW}",
    ),
)
