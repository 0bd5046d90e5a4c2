"""The training of a table's row: host, model, options, settings, and the commands from data to evaluation."""

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

#: Longest line of a printed command.
_WIDTH = 118


class Block(NamedTuple):
    """Shell commands that are typed together."""

    title: str
    commands: tuple[str, ...]
    #: Loops around all commands, the outermost first: a variable of the shell and its values.
    loops: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def printed(self) -> str:
        """The block as it is typed in a shell."""
        heads = [f"for {name} in {' '.join(values)}; do" for name, values in self.loops]
        lines = [f"# {self.title}", *heads, *map(wrapped, self.commands), *["done"] * len(heads)]
        return "\n".join(lines)

    def first(self) -> list[list[str]]:
        """The words of each command, with the first value of each loop's variable."""
        values = {name: first for name, (first, *_) in self.loops}
        filled = (re.sub(r"\$(\w+)", lambda found: values[found[1]], command) for command in self.commands)
        return [shlex.split(command, comments=True) for command in filled]


@dataclass(frozen=True)
class Training:
    """How the model of a row is trained and evaluated here, with the paper's hardware and number of parameters.

    Attributes:
        host: "fairseq" or "timm"; empty for a method that a recipe implements.
        model: the architecture or model, with its options, as it is typed.
        settings: the training's settings by name: task, data, length, schedule, batch.
        hardware: the paper's hardware.
        blocks: the commands, from data to evaluation.
        published: number of parameters in the paper, in millions; None if the paper states none.
        difference: why our number differs from it by more than 1 %.
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
    """A row for which no model of ours is trained.

    Attributes:
        reason: what it is instead, or why it is not trained.
        blocks: commands that make or measure it; empty if there are none.
        is_model: whether it is a model, which has no command without ``blocks``.
    """

    reason: str
    blocks: tuple[Block, ...] = ()
    is_model: bool = False

    @property
    def lacks_command(self) -> bool:
        """Whether it is a model without a command."""
        return self.is_model and not self.blocks

    def label(self) -> str:
        """The reason, with the command if it is a single one, or the remark that a model has none."""
        if self == HEADING:
            return ""
        if self.lacks_command:
            return f"no command: {self.reason}"
        commands = [command for block in self.blocks for command in block.commands]
        return f"{self.reason}: `{commands[0]}`" if len(commands) == 1 else self.reason


#: A row that is a heading for the rows below it.
HEADING = NotTrained("a heading")
#: A row that compares models has several trainings.
Entry = Training | NotTrained | tuple[Training, ...]


def trainings_of(entry: Entry) -> tuple[Training, ...]:
    """The trainings of an entry: none, one or several."""
    if isinstance(entry, NotTrained):
        return ()
    return (entry,) if isinstance(entry, Training) else entry


def here(entry: Entry) -> str:
    """The cell of an entry in a table, as Markdown: its models, or why it is not trained."""
    if isinstance(entry, NotTrained):
        return entry.label()
    return ", ".join(dict.fromkeys(f"`{training.model}`" for training in trainings_of(entry)))


def blocks_of(entry: Entry) -> list[Block]:
    """The blocks of an entry; those that several of its trainings share appear once, where they are first needed."""
    if isinstance(entry, NotTrained):
        return list(entry.blocks)
    return list(dict.fromkeys(block for training in trainings_of(entry) for block in training.blocks))


def script(blocks: Iterable[Block]) -> str:
    """Blocks as one shell command: a subshell that ends at its first error, also where it is pasted into a shell."""
    return "\n\n".join(["(set -e", *(block.printed() for block in blocks), ")"])


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
