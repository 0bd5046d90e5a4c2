"""Facts about a mechanism that a person reads: the tables of the READMEs are made of them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class About(NamedTuple):
    """The name of a mechanism in prose, its paper, and its cost; ``make tables`` writes them into the READMEs.

    What it computes is the first line of its class's docstring.

    In formulas n is the number of tokens, d the channels of a head, and ``a b`` a product; ``sizes`` names the options
    that other letters stand for.
    """

    title: str
    paper: str
    #: Multiplications of one head, up to a constant factor.
    cost: str
    #: Numbers that the decoding state of one head holds after n tokens, up to a few; empty where it does not decode.
    state: str = ""
    #: Options by their letter in ``cost`` and ``state``.
    sizes: Mapping[str, str] = MappingProxyType({})
    #: What ``record_attention(model, maps=True)`` records, where it is not simply the weights of the values.
    map: str = ""
