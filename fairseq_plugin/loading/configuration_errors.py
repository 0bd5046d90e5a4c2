"""The errors that reading a malformed configuration raises, as one ValueError that names the checkpoint."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from common.ops.shared.checks import ArgumentError

from .known_options import ConfigurationError

#: Errors raised for options of wrong types.
_FAULTS = (
    OmegaConfBaseException,
    HydraException,
    AssertionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@contextmanager
def configuration_errors(path: str, overrides: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn any error from reading a malformed configuration inside the ``with`` block into one ValueError.

    ``path`` is the checkpoint of the configuration, and ``overrides`` are the user's options that replace stored ones.
    """
    try:
        yield
    except _FAULTS as error:
        source = f"the checkpoint {path!r}" + (f" with `model_overrides` {overrides!r}" if overrides else "")
        if isinstance(error, ConfigurationError):
            raise ArgumentError(f"{source} has a configuration that cannot be read: {error}") from error
        foreign = isinstance(error, OmegaConfBaseException) or not isinstance(error, ValueError)
        if not foreign and "allowed" in str(error):  # the message is complete
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ArgumentError(
            f"{source} has a configuration that cannot be read ({reason}); allowed: what "
            "fairseq-train writes, and options of the kinds that the model declares"
        ) from error
