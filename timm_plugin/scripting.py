"""Calling an overridden method of a host from TorchScript, which knows no super()."""

import functools
from types import FunctionType
from typing import Callable


def renamed(method: Callable, name: str) -> Callable:
    """``method`` of a base class by another ``name``, under which a subclass that overrides it can still call it.

    An alias would not do: TorchScript compiles a method under the name its function was defined with.
    """
    copy = FunctionType(method.__code__, method.__globals__, name, method.__defaults__, method.__closure__)
    copy = functools.update_wrapper(copy, method)
    copy.__name__ = name
    return copy
