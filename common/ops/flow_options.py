"""The options of Flow-Attention, and what its forms share. Legend: ``flow_attention``."""

import math
from typing import Dict, NamedTuple, Optional

from torch import Tensor

from .checks import check_choice
from .feature_maps import FEATURE_MAPS

COMPETITIONS = ("softmax", "sigmoid", "none")
ALLOCATIONS = ("sigmoid", "softmax", "none")


class FlowForm(NamedTuple):
    """The constants in which the paper and the authors' released modules differ."""

    eps: float  # added to q, k and their sums inside every flow
    outer_eps: float  # added to every flow as a whole
    rescale: bool  # softmax over m sources times m, incoming flow times n / m, outgoing flow clamped


FORMS: Dict[str, FlowForm] = {
    # Algorithms 1 and 2 to the letter.
    "paper": FlowForm(eps=0.0, outer_eps=0.0, rescale=False),
    # The authors' Flow_Attention.py and their fairseq module.
    "released": FlowForm(eps=1e-6, outer_eps=0.0, rescale=True),
    # The authors' image model.
    "released_vision": FlowForm(eps=1e-6, outer_eps=1e-6, rescale=True),
}


class FlowOptions(NamedTuple):
    """Everything that shapes the mechanism apart from its tensors; see ``flow_attention``."""

    form: FlowForm
    clamp: float
    phi: str
    competition: str
    allocation: str


def flow_options(
    form: str = "released",
    clamp: Optional[float] = 1.0,
    phi: str = "sigmoid",
    competition: str = "softmax",
    allocation: str = "sigmoid",
) -> FlowOptions:
    """Check the options of ``flow_attention`` and put them into one tuple; raises ValueError naming the wrong one."""
    check_choice("form", form, tuple(FORMS))
    check_choice("phi", phi, FEATURE_MAPS)
    check_choice("competition", competition, COMPETITIONS)
    check_choice("allocation", allocation, ALLOCATIONS)
    if clamp is not None and not (isinstance(clamp, (int, float)) and clamp > 0.0):
        raise ValueError(f"clamp is {clamp!r}; allowed: a number above 0, or None (or inf) for no clamp")
    unclamped = clamp is None or not FORMS[form].rescale
    return FlowOptions(FORMS[form], math.inf if unclamped else float(clamp), phi, competition, allocation)


def positive(flow: Tensor) -> Tensor:
    """``flow`` with 1 where nothing flows (padding, features that underflow): 1/flow would turn a 0 into NaN."""
    return flow.masked_fill(flow < 1e-18, 1.0)


def bounded(outgoing: Tensor, clamp: float) -> Tensor:
    """``outgoing`` within -clamp and clamp."""
    # Not isinf: torch.compile, which may make a symbol of a number, does not trace it.
    return outgoing.clamp(-clamp, clamp) if clamp < math.inf else outgoing
