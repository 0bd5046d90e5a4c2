"""The module of a mechanism by name, with the gates and the convolution around it, and the options of all of these."""

import functools
from dataclasses import make_dataclass

from ..modules.forget_gate import NONE
from ..ops.shared.checks import check_choice, check_positive_int
from ._base import InnerAttention
from ._forget import ForgetAttention, ForgetOptions
from ._options import AttentionOptions
from ._registry import ATTENTIONS
from ._short_conv import ShortConvAttention, ShortConvOptions, takes_short_conv


@functools.cache
def options_of(name: str, causal: bool) -> type[AttentionOptions]:
    """A dataclass of all options that ``build_attention(name, causal)`` accepts, for the command line of a host.

    These are the mechanism's own options, and ``forget`` and ``short_conv`` where these are allowed.
    """
    attention = ATTENTIONS[name]
    shared = (ForgetOptions,) if causal and "forget" in attention.supports else ()
    shared += (ShortConvOptions,) if causal and takes_short_conv(attention) else ()
    if not shared:
        return attention.Options
    # A dataclass lists the fields of its last base first.
    return make_dataclass("CausalOptions", (), bases=(*reversed(shared), attention.Options), frozen=True)


def build_attention(
    name: str,
    causal: bool = False,
    *,
    num_heads: int | None = None,
    head_dim: int | None = None,
    max_tokens: int | None = None,
    spatial_dims: int = 1,
    forget: str = NONE,
    short_conv: int | None = None,
    **options,
) -> InnerAttention:
    """The attention module called ``name``; the arguments before ``forget`` are those of ``InnerAttention``.

    ``forget``, "head" or "channel", wraps it in a ``ForgetAttention``; ``short_conv``, a number of taps, wraps that
    in a ``ShortConvAttention``. Both need ``num_heads`` and ``head_dim``.

    Raises:
        ValueError: an unknown name, an option the mechanism does not have or a value it does not allow, or a missing
            fact that it needs; ``forget`` where ``ForgetAttention`` refuses it, ``short_conv`` where
            ``ShortConvAttention`` does.
    """
    check_choice("attention", name, tuple(ATTENTIONS))
    attention = ATTENTIONS[name](
        causal, num_heads=num_heads, head_dim=head_dim, max_tokens=max_tokens, spatial_dims=spatial_dims, **options
    )
    forget, taps = ForgetOptions(forget).forget, ShortConvOptions(short_conv).short_conv
    if forget != NONE:
        for fact, value in {"num_heads": num_heads, "head_dim": head_dim}.items():
            check_positive_int(fact, value)
        attention = ForgetAttention(attention, forget, num_heads, head_dim)
    return attention if taps is None else ShortConvAttention(attention, taps, num_heads, head_dim)
