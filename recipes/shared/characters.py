"""Text as a sequence of characters: one token each, the end of a line included, for texts too small for words."""

from pathlib import Path

from .text_files import read_lines, write_lines

_SPACE = "▁"


def spell(line: str) -> str:
    """A line, with its end, as tokens of one character; fairseq makes the end of the line a token by itself.

    A space becomes "▁". "▁" and other whitespace, at which fairseq would split, become their numbers, as "U+0009".
    """
    return " ".join(_token(character) for character in line.removesuffix("\n")) + "\n"


def spell_file(path: Path) -> None:
    """Rewrite ``path`` in characters."""
    write_lines(path, map(spell, read_lines(path)))


def _token(character: str) -> str:
    if character == " ":
        return _SPACE
    return f"U+{ord(character):04X}" if character.isspace() or character == _SPACE else character
