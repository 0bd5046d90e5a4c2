"""Checks, before anything else is imported, of the packages that timm_plugin needs.

Every failure is one ImportError: its cause, and the command that helps.
"""

import importlib
import runpy
from pathlib import Path

#: The oldest timm that this plugin works with; setup.cfg asks for the same.
MINIMUM_TIMM = (1, 0, 31)


def check_host() -> None:
    """Check ``common``, torchvision and timm, in this order.

    Raises:
        ImportError: one of them is missing, broken, too old or not the right one.
    """
    check_common()
    check_torchvision()
    check_timm()


def check_common() -> None:
    """Raise ImportError unless the package ``common`` that Python finds belongs to this project.

    The check is in the ``common`` next to this plugin, if there is one, whatever Python finds by that name.
    """
    path = Path(__file__).resolve().parents[1] / "common" / "_installed.py"
    checks = runpy.run_path(str(path)) if path.is_file() else vars(importlib.import_module("common._installed"))
    checks["check_common"]("timm_plugin")


def check_torchvision() -> None:
    """Raise ImportError unless torchvision can be imported; a build for another torch fails in many ways."""
    from common._installed import import_for, install_command

    command = f"{install_command('timm')}; if it is installed: pip install --force-reinstall torch torchvision"
    import_for("timm_plugin", "torchvision", command)


def check_timm() -> None:
    """Raise ImportError unless timm imports and is at least ``MINIMUM_TIMM``."""
    from common._installed import import_for, install_command, location, version_numbers

    command = install_command("timm")
    timm = import_for("timm_plugin", "timm", command)
    version = getattr(timm, "__version__", "0")
    if version_numbers(version) < MINIMUM_TIMM:
        needed = ".".join(map(str, MINIMUM_TIMM))
        raise ImportError(f"timm_plugin needs timm {needed} or newer; {version} is in {location(timm)}. Run: {command}")
