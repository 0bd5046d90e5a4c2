"""``--bpe lineartime_characters``: texts of several lines as characters.

fairseq's own ``characters`` drops the ends of lines, and the command line of fairseq 0.12 does not find it.
"""

from dataclasses import dataclass

from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass

#: Characters at which fairseq would split tokens, and the tokens for them.
_MARKS = {" ": "▁", "\n": "⏎"}
_ENCODED, _DECODED = str.maketrans(_MARKS), str.maketrans({mark: space for space, mark in _MARKS.items()})


@dataclass
class CharacterTextConfig(FairseqDataclass):
    """No options; fairseq's command line needs the class."""


@register_bpe("lineartime_characters", dataclass=CharacterTextConfig)
class CharacterText:
    """A character is a token: "▁" for the space, and "⏎" for the end of a line within a text."""

    def __init__(self, config: CharacterTextConfig) -> None:
        self.config = config

    @staticmethod
    def encode(text: str) -> str:
        """Characters separated by spaces: "a b" becomes "a ▁ b"."""
        return " ".join(text.translate(_ENCODED))

    @staticmethod
    def decode(tokens: str) -> str:
        """The text of such tokens."""
        return tokens.replace(" ", "").translate(_DECODED)
