"""The argparse action of options whose values are NAME=VALUE, as in timm's scripts."""

import argparse
from collections.abc import Sequence
from typing import Any

from timm.utils import ParseKwargs


class NamedValues(ParseKwargs):
    """timm's ``ParseKwargs``, which also refuses a value without a name; timm's fails to unpack it."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Sequence[str], option_string: str | None = None
    ) -> None:
        for value in values:
            if value and not all(value.partition("=")[:2]):
                raise argparse.ArgumentError(self, f"{value}; allowed: NAME=VALUE")
        super().__call__(parser, namespace, values, option_string)
