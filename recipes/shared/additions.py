"""How comparisons name a mechanism with additions of ours: NAME+forget, NAME+short_conv, NAME+forget+short_conv."""

from itertools import product

from common.attention import options_of

#: Taps of a short convolution, as today's layers of linear attention have.
_TAPS = 4
#: What follows a mechanism's name, in this order: the option that it stands for, and its value.
_ADDITIONS = {
    "+forget": ("forget", "head"),
    "+forget_channel": ("forget", "channel"),
    "+short_conv": ("short_conv", _TAPS),
}
#: Gates that do not read the tokens, of the --user-dir ``recipes/wikitext103/gate_variants``: NAME+fixed, NAME+learned.
GATES = ("fixed", "learned")
#: After a model's name: it has no positions.
NO_POSITIONS = "+no_positions"
#: Explanations of all of them for notes below tables.
_NOTES = {
    "+forget": "gates of each head, read from the tokens, by which its sums forget; ours, in none of the papers",
    "+forget_channel": "the same with a gate for each channel of the keys",
    "+short_conv": f"a causal convolution of {_TAPS} taps in front of q, k and v; ours, in none of the papers",
    "+fixed": "gates of each head that stay as they are at first: 32 to 1,024 tokens are remembered",
    "+learned": "gates of each head that are learned, the same for every token",
    NO_POSITIONS: "tokens have no positions; their order is in the sums alone",
}


def mechanism_of(name: str) -> str:
    """The mechanism's own name."""
    return name.partition("+")[0]


def with_additions(mechanism: str) -> list[str]:
    """The mechanism's name, and its name with every addition and pair of additions that it takes when causal."""
    takes = options_of(mechanism, True).described()
    gates, convs = (
        [""] + [x for x, (option, _) in _ADDITIONS.items() if option == wanted and option in takes]
        for wanted in ("forget", "short_conv")
    )
    return [mechanism + gate + conv for gate, conv in product(gates, convs)]


def addition_arguments(name: str, prefix: str) -> list[object]:
    """The additions of a name that ``with_additions`` gives, as options of fairseq that begin with ``prefix``."""
    arguments = []
    for addition in name.split("+")[1:]:
        option, value = _ADDITIONS[f"+{addition}"]
        arguments += [prefix + option.replace("_", "-"), value]
    return arguments


def addition_notes(names: list[str]) -> list[str]:
    """A note for each addition that one of the models ``names`` has."""
    used = {f"+{addition}" for name in names for addition in name.partition("/")[0].split("+")[1:]}
    return [f"{addition}: {note}" for addition, note in _NOTES.items() if addition in used]
