"""The options of Flow-Attention, and the constants in which the paper and the authors' code differ."""

import math
from typing import NamedTuple

from torch import Tensor

from ..shared.checks import ArgumentError, check_choice
from ..shared.feature_maps import FEATURE_MAPS

#: "softmax_heads", over the heads of each source, is from the authors' long-range-arena code.
COMPETITIONS = ("softmax", "sigmoid", "none", "softmax_heads")
ALLOCATIONS = ("sigmoid", "softmax", "none")


class FlowForm(NamedTuple):
    """The constants in which the paper and the authors' released modules differ."""

    eps: float  # added to q, k and their sums inside every flow
    outer_eps: float  # added to every flow as a whole
    rescale: bool  # softmax over m sources times m, incoming flow times n / m, outgoing flow clamped


FORMS: dict[str, FlowForm] = {
    # Algorithms 1 and 2 exactly.
    "paper": FlowForm(eps=0.0, outer_eps=0.0, rescale=False),
    # The authors' Flow_Attention.py and their fairseq module.
    "released": FlowForm(eps=1e-6, outer_eps=0.0, rescale=True),
    # The authors' image model.
    "released_vision": FlowForm(eps=1e-6, outer_eps=1e-6, rescale=True),
}


class FlowDefaults(NamedTuple):
    """Default options of ``flow_attention`` and of its variants; ``flow_attention`` describes them."""

    form: str = "released"
    clamp: float | None = 1.0
    phi: str = "sigmoid"
    competition: str = "softmax"
    allocation: str = "sigmoid"


DEFAULTS = FlowDefaults()


class FlowOptions(NamedTuple):
    """The checked options of ``flow_attention``, from ``flow_options``."""

    form: FlowForm
    clamp: float  # inf for no clamp
    phi: str
    competition: str
    allocation: str


def flow_options(
    form: str = DEFAULTS.form,
    clamp: float | None = DEFAULTS.clamp,
    phi: str = DEFAULTS.phi,
    competition: str = DEFAULTS.competition,
    allocation: str = DEFAULTS.allocation,
    causal: bool = False,
) -> FlowOptions:
    """Check the options of ``flow_attention`` and put them into one tuple; ValueError names the wrong one."""
    check_choice("form", form, tuple(FORMS))
    check_choice("phi", phi, FEATURE_MAPS)
    check_choice("competition", competition, COMPETITIONS)
    check_choice("allocation", allocation, ALLOCATIONS)
    if causal and competition == "softmax_heads":
        allowed = ", ".join(name for name in COMPETITIONS if name != "softmax_heads")
        raise ArgumentError(f"`competition` is 'softmax_heads'; allowed with causal attention: {allowed}")
    if clamp is not None and not (isinstance(clamp, (int, float)) and clamp > 0.0):
        raise ValueError(f"clamp is {clamp!r}; allowed: a number above 0, or None (or inf) for no clamp")
    unclamped = clamp is None or not FORMS[form].rescale
    return FlowOptions(FORMS[form], math.inf if unclamped else float(clamp), phi, competition, allocation)


def replace_zero_by_one(flow: Tensor) -> Tensor:
    """``flow`` with 1 in place of 0, so that 1 / flow is finite: padding and underflowed features have no flow."""
    return flow.masked_fill(flow < 1e-18, 1.0)


def clamp_flow(outgoing: Tensor, clamp: float) -> Tensor:
    """``outgoing`` limited to [-clamp, clamp]; unchanged for an infinite clamp."""
    # Not isinf: torch.compile may represent the number by a symbol, for which isinf is not traced.
    return outgoing.clamp(-clamp, clamp) if clamp < math.inf else outgoing


def excluded_logit() -> float:
    """The logit of padding in a softmax over tokens (a function, because TorchScript cannot read module globals).

    Finite, because a softmax over only -inf is NaN.
    """
    return -1e30
