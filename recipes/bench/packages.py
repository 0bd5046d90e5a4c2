"""Packages that a form needs and that may not be there."""

import importlib.util

#: What a user installs, by the name of the module.
INSTALL = {
    "fairseq": "pip install '.[fairseq]'",
    "timm": "pip install '.[timm]'",
    "flash_pytorch": "pip install '.[bench]'",
    "performer_pytorch": "pip install '.[bench]'",
    "fla": "pip install flash-linear-attention",
}


def missing(module: str) -> str | None:
    """The line that stands in the results where ``module`` is not installed; None where it is."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"not installed: {INSTALL[module]}"
