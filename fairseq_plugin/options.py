"""Reading a model's options, whichever of fairseq's two configuration systems holds them."""

from typing import Any

from fairseq.utils import safe_getattr


def option(args, config: type, name: str) -> Any:
    """An option of ``args``, without its enumeration; one that is missing has the default of the dataclass ``config``.

    Missing are options that are newer than a checkpoint, and those a command line left open.
    """
    value = safe_getattr(args, name, getattr(config, name))
    return getattr(value, "value", value)
