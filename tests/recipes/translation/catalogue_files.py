"""Message catalogues in gettext's binary format, written by tests."""

import struct
from collections.abc import Mapping
from pathlib import Path

HEADER = "Content-Type: text/plain; charset={charset}\nPlural-Forms: nplurals=2; plural=(n != 1);\n"


def write_catalogue(
    folder: Path, program: str, messages: Mapping[str, str], language: str = "de", charset: str = "UTF-8"
) -> Path:
    """Write FOLDER/LANGUAGE/LC_MESSAGES/PROGRAM.mo, encoded in ``charset``; forms of a plural are separated by NUL."""
    path = folder / language / "LC_MESSAGES" / f"{program}.mo"
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"": HEADER.format(charset=charset), **messages}
    texts = [text.encode(charset) for entry in sorted(described.items()) for text in entry]
    begin, places = 28 + 8 * len(texts), []
    for text in texts:
        places.append((len(text), begin))
        begin += len(text) + 1
    count = len(described)
    head = struct.pack("<7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    tables = b"".join(struct.pack("<2I", *place) for place in [*places[::2], *places[1::2]])
    path.write_bytes(head + tables + b"".join(text + b"\0" for text in texts))
    return path


def write_programs(folder: Path, programs: int = 24, messages: int = 12) -> None:
    """Write catalogues of so many programs, whose messages have no words in common but a frequent one.

    A word of a message is its translation reversed.
    """
    for program in range(programs):
        lines = (
            ["the", *(_word(program * messages + message, place) for place in range(5))] for message in range(messages)
        )
        translated = {" ".join(line): " ".join(word[::-1] for word in line) for line in lines}
        write_catalogue(folder, f"program{program:02d}", translated)


def _word(number: int, place: int) -> str:
    """A word of letters, another for each number and place."""
    return "x".join(chr(ord("a") + int(digit)) for digit in f"{number:03d}{place}")
