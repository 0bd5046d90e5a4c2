"""Flow-Attention, causal and not, beside the authors' formulas and torch's fused softmax attention."""

from collections.abc import Callable
from functools import lru_cache, partial

import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from common.ops import flow_attention
from common.ops.flow_attention_reference import flow_attention_reference

from ..compare import compare_attention
from ..packages import missing
from ..peers import released_attention
from ..peers.attention_maps import softmax_attention
from ..work import Absent, Case, Comparison, Form, Settings, attention_runs, random_inputs

OURS, AUTHORS, SOFTMAX, FLA = "flow_attention", "authors' form", "fused softmax", "flash-linear-attention"
#: One sequence, as everywhere where nothing else is said.
HEADS, HEAD_DIM = 8, 64
NAMES = ("q", "k", "v")
#: Tokens of the comparison with the literal reference.
_SHORT = 97
#: Of v, that the authors' causal form is given at once where it is a reference.
_CHANNELS = 8
#: A clamp that no flow reaches. At the usual one, 1, where flows abound, a gradient jumps, and of a million flows some
#: lie so close to it that they are on the other side in float64.
_NEVER = 20.0
#: Longest sequence for comparing softmax attention with its map.
_MAP = 1024
#: What the authors' causal form may take of the memory that is free, and the longest it is run at: times would be
#: minutes beyond.
_SHARE, _AUTHORS_LONGEST = 0.3, 2048
#: (n, d, e) tensors that are alive at the peak of its backward pass.
_PRODUCTS = 5


def causal(settings: Settings, size: int) -> list[Form | Absent]:
    """Causal forms at ``size`` tokens."""
    return _forms(settings, size, True)


def full(settings: Settings, size: int) -> list[Form | Absent]:
    """Forms that are not causal, at ``size`` tokens."""
    return _forms(settings, size, False)


def _forms(settings: Settings, size: int, causal: bool) -> list[Form | Absent]:
    inputs = random_inputs(settings, *[(1, HEADS, size, HEAD_DIM)] * 3)
    authors = released_attention.causal if causal else released_attention.full
    ours = partial(flow_attention, causal=causal)
    softmax = partial(F.scaled_dot_product_attention, is_causal=causal)

    def check_ours() -> list[Comparison]:
        # The literal reference at a short length; the authors' form at the timed one, on the last head.
        reference = partial(_in_parts, partial(authors, clamp=_NEVER))
        return [
            *_literally(settings, flow_attention, causal),
            *compare_attention(partial(ours, clamp=_NEVER), reference, inputs, NAMES, heads=1),
        ]

    def check_softmax() -> list[Comparison]:
        short = [x.detach()[:, :, :_MAP].clone().requires_grad_() for x in inputs]
        return compare_attention(softmax, partial(softmax_attention, causal=causal), short, NAMES)

    forms: list[Form | Absent] = [_form(OURS, ours, inputs, check_ours), _form(SOFTMAX, softmax, inputs, check_softmax)]
    reason = _too_large(inputs) if causal else None
    if reason is not None:
        return [*forms, Absent(AUTHORS, size, reason)]
    return [*forms, _form(AUTHORS, authors, inputs, lambda: _literally(settings, authors, causal))]


def _in_parts(attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``attention`` for a few channels of v at a time, which do not touch one another: else gigabytes."""
    parts = [checkpoint(attention, q, k, part, use_reentrant=False) for part in v.split(_CHANNELS, dim=-1)]
    return torch.cat(parts, dim=-1)


def _form(name: str, attention: Callable[..., Tensor], inputs: list[Tensor], check: Callable) -> Form:
    size, nbytes = inputs[0].shape[2], sum(x.numel() * x.element_size() for x in inputs)
    return Form(name, size, size, attention_runs(attention, inputs), check, nbytes)


@lru_cache
def _literally(settings: Settings, attention: Callable[..., Tensor], causal: bool) -> list[Comparison]:
    """``attention`` beside the literal reference, a loop over tokens, at a length that no chunk divides."""
    inputs = random_inputs(settings, *[(1, HEADS, _SHORT, HEAD_DIM)] * 3)
    form = partial(attention, causal=causal) if attention is flow_attention else attention
    return compare_attention(form, partial(flow_attention_reference, causal=causal), inputs, NAMES, heads=1)


def _too_large(inputs: list[Tensor]) -> str | None:
    """Why the authors' causal form, which sums kᵀv over every position, is not run; None if it is."""
    q, v = inputs[0], inputs[2]
    needed = _PRODUCTS * q.numel() * v.shape[3] * q.element_size()
    free = torch.cuda.mem_get_info()[0] if q.device.type == "cuda" else psutil.virtual_memory().available
    if needed > _SHARE * free:
        return f"it needs {needed / 2**30:.1f} GiB; allowed here: {_SHARE * free / 2**30:.1f}"
    if q.shape[2] > _AUTHORS_LONGEST:
        return f"it needs {needed / 2**30:.1f} GiB and more time than the rest; run up to {_AUTHORS_LONGEST:,} tokens"
    return None


def with_fla(settings: Settings, size: int) -> list[Form | Absent]:
    """Causal Flow-Attention and softmax attention as above, and flash-linear-attention's linear attention."""
    forms = [form for form in _forms(settings, size, True) if form.name != AUTHORS]
    reason = missing("fla")
    if reason is not None:
        return [*forms, Absent(FLA, size, reason)]
    from fla.ops.linear_attn import chunk_linear_attn

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Its layout is (B, n, H, d), of which these are views.
        out, _ = chunk_linear_attn(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.0, normalize=False)
        return out.transpose(1, 2)

    def literal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-2, -1)).tril() @ v

    def check() -> list[Comparison]:
        short = random_inputs(settings, *[(1, HEADS, min(size, _MAP), HEAD_DIM)] * 3)
        return compare_attention(attention, literal, short, NAMES)

    return [*forms, _form(FLA, attention, random_inputs(settings, *[(1, HEADS, size, HEAD_DIM)] * 3), check)]


_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NOTE = f"B = 1, H = {HEADS}, d = {HEAD_DIM}; released form, clamp 1"
_AXIS = ("tokens", "tokens")
CASES = (
    Case("causal_flow", "Causal Flow-Attention", *_AXIS, _LENGTHS, (128, 512, 1024), causal, note=_NOTE),
    Case("full_flow", "Flow-Attention, not causal", *_AXIS, _LENGTHS[:-1], (128, 512, 1024), full, note=_NOTE),
    Case(
        "causal_flow_cuda",
        "Causal Flow-Attention on a GPU",
        *_AXIS,
        tuple(2**i for i in range(10, 18)),
        (1024, 8192),
        with_fla,
        ("cuda",),
        note=f"{_NOTE}; {FLA} is unnormalised linear attention, another function of the same products",
    ),
)
