"""The training of a table's row: host, model, options, settings, and the commands from data to evaluation."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Longest line of a printed command.
_WIDTH = 118


class Block(NamedTuple):
    """Commands of a shell that are typed together."""

    title: str
    commands: tuple[str, ...]
    #: A variable of the shell and its values, for which all commands are repeated; the outermost first.
    loops: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def printed(self) -> str:
        """The block as it is typed."""
        heads = [f"for {name} in {' '.join(values)}; do" for name, values in self.loops]
        lines = [f"# {self.title}", *heads, *map(wrapped, self.commands), *["done"] * len(heads)]
        return "\n".join(lines)

    def first(self) -> list[list[str]]:
        """The words of each command, with the first value of each variable in its place."""
        values = {name: first for name, (first, *_) in self.loops}
        filled = (re.sub(r"\$(\w+)", lambda found: values[found[1]], command) for command in self.commands)
        return [shlex.split(command, comments=True) for command in filled]


@dataclass(frozen=True)
class Training:
    """How the model of a row is trained and evaluated here, beside the paper's hardware and parameters.

    Attributes:
        host: "fairseq" or "timm"; empty for a method of a recipe of our own.
        model: the architecture or model, with its options, as it is typed.
        settings: of the training, by name: task, data, length, schedule, batch.
        hardware: on which the paper trained.
        blocks: the commands, from data to evaluation.
        published: number of parameters in the paper, in millions; None if it prints none.
        difference: why ours is not within 1 % of that number.
        symbols: size of the dictionary with which parameters are counted.
    """

    host: str
    model: str
    settings: dict[str, str]
    hardware: str
    blocks: tuple[Block, ...]
    published: float | None = None
    difference: str = ""
    symbols: int = 0
    note: str = ""

    def commands(self) -> Iterator[list[str]]:
        """Every command as words."""
        for block in self.blocks:
            yield from block.first()


class NotTrained(NamedTuple):
    """Why nothing trains a row here."""

    reason: str


#: A row above others, which says what they are of.
HEADING = NotTrained("a heading")
#: Several trainings where a row compares models.
Entry = Training | NotTrained | tuple[Training, ...]


def trainings_of(entry: Entry) -> tuple[Training, ...]:
    """The trainings of an entry: none, one or several."""
    if isinstance(entry, NotTrained):
        return ()
    return (entry,) if isinstance(entry, Training) else entry


def here(entry: Entry) -> str:
    """The cell of an entry in a table, as Markdown: its models, or why nothing trains it."""
    if isinstance(entry, NotTrained):
        return "" if entry is HEADING else entry.reason
    return ", ".join(dict.fromkeys(f"`{one.model}`" for one in trainings_of(entry)))


def blocks_of(entries: Iterable[Training]) -> list[Block]:
    """The blocks of several trainings; what they share stands once, where it is first needed."""
    return list(dict.fromkeys(block for one in entries for block in one.blocks))


def wrapped(command: str) -> str:
    """A command on lines of at most 118 characters, each but the last with a backslash at its end."""
    options = re.split(r" (?=--[a-z])", command)
    lines: list[str] = []
    for option in options:
        if lines and len(lines[-1]) + len(option) + 3 <= _WIDTH:
            lines[-1] += f" {option}"
        else:
            lines.append(f"  {option}" if lines else option)
    return " \\\n".join(lines)
