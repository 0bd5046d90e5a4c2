"""Optional packages that a candidate may need."""

import importlib.util

#: Module -> the command that installs it.
INSTALL = {
    "fairseq": "pip install '.[fairseq]'",
    "timm": "pip install '.[timm]'",
    "flash_pytorch": "pip install '.[bench]'",
    "local_attention": "pip install '.[bench]'",
    "performer_pytorch": "pip install '.[bench]'",
    "fla": "pip install flash-linear-attention",
}


def missing(module: str) -> str | None:
    """Why a candidate did not run, for the results; None if ``module`` is installed."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"not installed: {INSTALL[module]}"
