"""What every refusal says: the argument, what was given, what is allowed."""

import re

import pytest


def refused(argument: str, given: str, allowed: str):
    """Expect a ValueError with the message "<argument> ... <given> ... allowed ...: ... <allowed>"."""
    parts = (re.escape(part) for part in (given, "allowed", allowed))
    return pytest.raises(ValueError, match="^" + re.escape(argument) + " .*" + ".*".join(parts))
