"""Names of mechanisms with our additions in comparisons: NAME+forget, NAME+short_conv, NAME+forget+short_conv."""

from argparse import Namespace
from itertools import product

from common.attention import options_of

#: Taps of a short convolution, as in today's layers of linear attention.
_TAPS = 4
#: Suffixes of a mechanism's name, in this order -> the option that the suffix sets, and its value.
_ADDITIONS = {
    "+forget": ("forget", "head"),
    "+forget_channel": ("forget", "channel"),
    "+short_conv": ("short_conv", _TAPS),
}
#: Gates that do not read the tokens, of the --user-dir ``recipes/wikitext103/gate_variants``: NAME+fixed, NAME+learned.
GATES = ("fixed", "learned")
#: Suffix of the name of a model without positions.
NO_POSITIONS = "+no_positions"
#: Explanations of all suffixes, for notes below tables.
_NOTES = {
    "+forget": "gates of each head, read from the tokens, by which its sums forget; ours, in none of the papers",
    "+forget_channel": "the same with a gate for each channel of the keys",
    "+short_conv": f"a causal convolution of {_TAPS} taps in front of q, k and v; ours, in none of the papers",
    "+fixed": "gates of each head that stay as they are at first: 32 to 1,024 tokens are remembered",
    "+learned": "gates of each head that are learned, the same for every token",
    NO_POSITIONS: "tokens have no positions; their order is in the sums alone",
}


def mechanism_of(name: str) -> str:
    """The mechanism's name, without additions."""
    return name.partition("+")[0]


def with_variants(mechanism: str) -> list[str]:
    """The mechanism's name alone, and with every addition and pair of additions that it supports when causal."""
    supported = options_of(mechanism, True).described()
    gates, convs = (
        [""] + [x for x, (option, _) in _ADDITIONS.items() if option == kind and option in supported]
        for kind in ("forget", "short_conv")
    )
    return [mechanism + gate + conv for gate, conv in product(gates, convs)]


def variant_arguments(name: str, prefix: str) -> list[object]:
    """The additions of a name that ``with_variants`` gives, as options of fairseq that begin with ``prefix``."""
    arguments = []
    for addition in name.split("+")[1:]:
        option, value = _ADDITIONS[f"+{addition}"]
        arguments += [prefix + option.replace("_", "-"), value]
    return arguments


def additions_of(model: Namespace, prefix: str) -> str:
    """The additions that the options of a trained model have, as the suffix of its name.

    This is the inverse of ``variant_arguments``; other values of an option than its own are written out.
    """
    suffix = ""
    for option in dict(_ADDITIONS.values()):
        value = getattr(model, f"{prefix}{option}".strip("-").replace("-", "_"), None)
        if value not in (None, 0, "none"):
            known = [name for name, addition in _ADDITIONS.items() if addition == (option, value)]
            suffix += known[0] if known else f"+{option}_{value}"
    return suffix


def variant_notes(names: list[str]) -> list[str]:
    """A note for each addition that one of the models ``names`` has."""
    used = {f"+{addition}" for name in names for addition in name.partition("/")[0].split("+")[1:]}
    return [f"{addition}: {note}" for addition, note in _NOTES.items() if addition in used]
