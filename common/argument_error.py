"""An error about options whose names a host can replace by those that its user typed."""

import re
from collections.abc import Mapping

_NAME = re.compile(r"`([^`]*)`")


class ArgumentError(ValueError):
    """A ValueError about options, whose names are in backquotes in its text and bare in its message.

    A host can substitute command line options: ``error.with_names({"heads": "--attention-heads"})``. A flag that is on
    or off is named with its value, as in "local=False", since a command line has one word for both.
    """

    def __str__(self) -> str:
        return self.with_names({})

    def with_names(self, names: Mapping[str, str]) -> str:
        """The message with the option names replaced by ``names``."""
        return _NAME.sub(lambda found: names.get(found[1], found[1]), self.args[0])
