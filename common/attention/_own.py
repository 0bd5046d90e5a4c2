"""Mechanisms of the user's own: the modules and files that the user names are imported, and nothing else."""

import importlib
import importlib.util
import sys
from pathlib import Path

#: The environment variable that names them, so that every process of a host has it: torchrun's, data loaders'.
VARIABLE = "LINEARTIME_MECHANISMS"


def how_to_import(module: str) -> str:
    """The end of a message about a mechanism of ``module`` that nobody has imported."""
    return f"allowed: with {VARIABLE}={module} in the environment, or the path of that module's file"


def import_own(names: str, argument: str = VARIABLE) -> list[str]:
    """Import ``names``, modules or paths of files that end in .py, with commas between them; the modules' names.

    Raises:
        ValueError: one of them does not exist or fails, or the stem of a file is the name of another module.
    """
    return [_import(name.strip(), argument) for name in names.split(",") if name.strip()]


def _import(name: str, argument: str) -> str:
    path = Path(name).expanduser()
    is_file = path.suffix == ".py"
    module = path.stem if is_file else name
    try:
        if is_file:
            _import_file(module, path.resolve(strict=True))
        else:
            importlib.import_module(module)
    except ValueError as error:  # a refusal of ours, such as a name that is taken
        raise ValueError(f"{argument} is {name}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{argument} is {name}, which cannot be imported ({type(error).__name__}: {error}); allowed: modules that "
            "Python finds from here, or paths that end in .py, with commas between them"
        ) from error
    return module


def _import_file(module: str, path: Path) -> None:
    """Import the file ``path`` as ``module``, once."""
    present = sys.modules.get(module)
    spec = getattr(present, "__spec__", None) if present is not None else importlib.util.find_spec(module)
    origin = getattr(present, "__file__", None) or getattr(spec, "origin", None)
    if origin is not None and not (Path(origin).exists() and path.samefile(origin)):
        raise ValueError(f"{module} is the name of {origin}; allowed: another file name")
    if present is not None:
        return
    spec = importlib.util.spec_from_file_location(module, path)
    sys.modules[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(sys.modules[module])
    except BaseException:
        del sys.modules[module]
        raise
