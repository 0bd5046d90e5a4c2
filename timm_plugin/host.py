"""What timm_plugin needs from the machine it runs on, checked once, before anything else is imported.

Every failure is one ImportError: its cause, and the command that mends it.
"""

import importlib
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Tuple

#: The first timm that makes a model by the arguments it finds in a checkpoint's folder; setup.cfg asks for the same.
MINIMUM_TIMM = (1, 0, 31)

#: The value of ``common.DISTRIBUTION`` by which our ``common`` is told from any other.
DISTRIBUTION = "lineartime"

_INSTALL_TIMM = f"pip install 'timm>={'.'.join(map(str, MINIMUM_TIMM))}' torchvision"


def check_host() -> None:
    """Check ``common``, torchvision and timm, in this order.

    Raises:
        ImportError: one of them is missing, broken, too old or not the right one.
    """
    check_common()
    check_torchvision()
    check_timm()


def check_common() -> None:
    """Raise ImportError unless the package ``common`` that Python finds is this project's."""
    root = Path(__file__).resolve().parents[1]
    mend = f"export PYTHONPATH='{root}'\"${{PYTHONPATH:+:$PYTHONPATH}}\""
    try:
        common = importlib.import_module("common")
    except ModuleNotFoundError as error:
        if error.name != "common":
            raise
        raise ImportError(
            f"timm_plugin needs the package common of {DISTRIBUTION}, which is not on the path. Run: {mend}"
        ) from error
    if getattr(common, "DISTRIBUTION", None) != DISTRIBUTION:
        raise ImportError(
            f"timm_plugin needs the package common of {DISTRIBUTION}, but Python found another one in "
            f"{_location(common)}. Run: {mend} (if that one is in the folder of your script, rename it)"
        )


def check_torchvision() -> None:
    """Raise ImportError unless torchvision imports; one built for another torch fails in many ways."""
    import torch

    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise ImportError(f"timm_plugin needs torchvision, which is not installed. Run: {_INSTALL_TIMM}") from error
    except Exception as error:
        raise ImportError(
            f"timm_plugin needs a torchvision that matches torch {torch.__version__}; the installed one fails with: "
            f"{error}. Run: pip install --upgrade --force-reinstall torch torchvision"
        ) from error


def check_timm() -> None:
    """Raise ImportError unless timm imports and is at least ``MINIMUM_TIMM``."""
    mend = f"Run: {_INSTALL_TIMM}"
    try:
        timm = importlib.import_module("timm")
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise ImportError(f"timm_plugin needs timm, whose import fails with: {error}. {mend}") from error
        raise ImportError(f"timm_plugin needs timm, which is not installed. {mend}") from error
    except Exception as error:
        raise ImportError(f"timm_plugin needs timm, whose import fails with: {error}. {mend}") from error
    version = getattr(timm, "__version__", "0")
    if version_numbers(version) < MINIMUM_TIMM:
        needed = ".".join(map(str, MINIMUM_TIMM))
        raise ImportError(f"timm_plugin needs timm {needed} or newer; {version} is in {_location(timm)}. {mend}")


def version_numbers(version: str) -> Tuple[int, ...]:
    """The leading numbers of a version: "1.0.29.dev0" -> (1, 0, 29)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in numbers.group().split(".")) if numbers else (0,)


def _location(module: ModuleType) -> str:
    """The folder of a package, or the file of a module; a namespace package has only a search path."""
    if getattr(module, "__file__", None):
        path = Path(module.__file__)
        return str(path.parent if path.name == "__init__.py" else path)
    return os.pathsep.join(getattr(module, "__path__", ["an unknown place"]))
