"""Facts about a mechanism for people to read: the tables of the READMEs are generated from them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class About(NamedTuple):
    """The name of a mechanism in prose, its paper, and its cost; ``make tables`` writes them into the READMEs.

    The first line of the class's docstring says what the mechanism computes.

    In formulas n is the number of tokens, d the channels of a head, and ``a b`` a product; ``sizes`` maps the other
    letters to options.
    """

    title: str
    paper: str
    #: Multiplications of one head, up to a constant factor.
    cost: str
    #: Size of one head's decoding state after n tokens, in numbers, up to a few; empty if it cannot decode.
    state: str = ""
    #: Options by their letter in ``cost`` and ``state``.
    sizes: Mapping[str, str] = MappingProxyType({})
    #: The map that ``record_attention(model, maps=True)`` records, if it is not simply the weights of the values.
    map: str = ""
    #: Where the paper is read; empty for mechanisms of our own.
    url: str = ""
