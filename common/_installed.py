"""Imports of the packages that a plugin needs; each failure is an ImportError with its cause and a command.

A plugin runs this file by its path, since the package ``common`` that Python finds may be another one.
"""

import importlib
import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType


def check_common(plugin: str) -> None:
    """Raise ImportError unless the package ``common`` that Python finds belongs to this project, as ``plugin`` needs.

    An error inside this project's ``common``, for example because torch is missing, is raised unchanged.
    """
    folder = Path(__file__).resolve().parent
    try:
        common = importlib.import_module("common")
        reason = f"Python found another one in {location(common)}"
    except Exception as error:  # another package of that name may raise anything
        spec = None if getattr(error, "name", None) == "common" else importlib.util.find_spec("common")
        origin = getattr(spec, "origin", None)
        if origin is not None and Path(origin).resolve().parent == folder:
            raise
        common = None
        failed = f"Python found another one in {origin}, which fails: {type(error).__name__}: {error}"
        reason = "it is not on the path" if spec is None else failed
    if getattr(common, "DISTRIBUTION", None) != "lineartime":
        raise ImportError(
            f"{plugin} needs lineartime's package common, but {reason}. Run: export PYTHONPATH='{folder.parent}'"
            '"${PYTHONPATH:+:$PYTHONPATH}" (if another common is in the folder of your script, rename it)'
        )


def install_command(extra: str) -> str:
    """The command that installs what the plugin for ``extra``, "fairseq" or "timm", needs."""
    return f"pip install '.[{extra}]' (in a checkout of lineartime)"


def import_for(plugin: str, name: str, command: str) -> ModuleType:
    """Import the module ``name``, which ``plugin`` needs.

    Raises:
        ImportError: it is missing, or importing it raises any exception; the message says to run ``command``.
    """
    try:
        return importlib.import_module(name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ImportError(f"{plugin} needs {name}, which is not installed. Run: {command}") from error
        raise ImportError(f"{plugin} needs {name}, whose import fails with: {error}. Run: {command}") from error


def location(module: ModuleType) -> str:
    """The folder of a package, or the file of a module; a namespace package has only a search path."""
    if getattr(module, "__file__", None):
        path = Path(module.__file__)
        return str(path.parent if path.name == "__init__.py" else path)
    return os.pathsep.join(getattr(module, "__path__", ["an unknown place"]))


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "1.0.29.dev0" -> (1, 0, 29)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers.group().split(".")) if numbers else (0,)
