"""The mechanisms that the contract tests: every registered one, or those of modules that ``--mechanism`` names."""

import importlib
from collections.abc import Sequence

from common.attention import ATTENTIONS, InnerAttention

#: Mechanisms by name.
KINDS: dict[str, type[InnerAttention]] = dict(ATTENTIONS)


def choose(modules: Sequence[str]) -> None:
    """Restrict the contract to the mechanisms that importing ``modules`` registers.

    Raises:
        ValueError: they register none.
    """
    others = set(ATTENTIONS)
    for module in modules:
        importlib.import_module(module)
    chosen = {name: kind for name, kind in ATTENTIONS.items() if name not in others}
    if not chosen:
        raise ValueError(f"--mechanism is {', '.join(modules)}; allowed: modules that register a mechanism")
    KINDS.clear()
    KINDS.update(chosen)
