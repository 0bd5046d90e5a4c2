"""Checks, before anything else is imported, of the packages that timm_plugin needs.

Every failure is one ImportError: its cause, and the command that helps.
"""

import importlib
import importlib.util
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
    """Raise ImportError unless the package ``common`` that Python finds is this project's.

    An error inside this project's ``common``, such as a missing torch, is raised unchanged.
    """
    root = Path(__file__).resolve().parents[1]
    try:
        common = importlib.import_module("common")
        location = getattr(common, "__file__", None) or list(getattr(common, "__path__", ["an unknown place"]))
        problem = f"Python found another one in {location}"
    except Exception as error:  # whatever another package of that name raises
        spec = None if getattr(error, "name", None) == "common" else importlib.util.find_spec("common")
        location = getattr(spec, "origin", None)
        if location is not None and Path(location).resolve().parent == root / "common":
            raise
        common = None
        failure = f"Python found another one in {location}, which fails: {type(error).__name__}: {error}"
        problem = "it is not on the path" if spec is None else failure
    if getattr(common, "DISTRIBUTION", None) != "lineartime":
        raise ImportError(
            f"timm_plugin needs lineartime's package common, but {problem}. Run: export PYTHONPATH='{root}'"
            '"${PYTHONPATH:+:$PYTHONPATH}" (if another common is in the folder of your script, rename it)'
        )


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
