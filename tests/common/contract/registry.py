"""The mechanisms that the contract tests: every registered one, or those of modules that ``--mechanism`` names."""

import importlib
from collections.abc import Sequence

from common.attention import ATTENTIONS, InnerAttention, OpAttention

#: Mechanisms by name.
KINDS: dict[str, type[InnerAttention]] = dict(ATTENTIONS)


def choose(modules: Sequence[str]) -> None:
    """Restrict the contract to the mechanisms that importing ``modules`` registers.

    Raises:
        ValueError: they do not exist, register none, or one without what the contract calls.
    """
    others = set(ATTENTIONS)
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if f"{module}.".startswith(f"{error.name}."):
                raise ValueError(f"--mechanism is {module}; allowed: a module that Python finds from here") from error
            raise
    chosen = {name: kind for name, kind in ATTENTIONS.items() if name not in others}
    if not chosen:
        raise ValueError(f"--mechanism is {', '.join(modules)}; allowed: modules that register a mechanism")
    for name, kind in chosen.items():
        for needed in ("op", "reference_op") if issubclass(kind, OpAttention) else ("forward", "reference"):
            if not hasattr(kind, needed):
                raise ValueError(
                    f"{kind.__module__}.{kind.__qualname__}, attention {name!r}, has no {needed}; allowed: a class "
                    "with it, since the contract compares what a mechanism computes with its literal formula"
                )
    KINDS.clear()
    KINDS.update(chosen)
