"""The mechanisms that the contract tests: every registered one, or those of modules that ``--mechanism`` names."""

from collections.abc import Sequence

from common.attention import ATTENTIONS, InnerAttention, import_own

#: Mechanisms by name.
KINDS: dict[str, type[InnerAttention]] = dict(ATTENTIONS)


def choose(modules: Sequence[str]) -> None:
    """Restrict the contract to the mechanisms that ``modules`` register, whose names or paths are given.

    Raises:
        ValueError: they cannot be imported, or register none.
    """
    imported = import_own(",".join(modules), "--mechanism")
    chosen = {name: kind for name, kind in ATTENTIONS.items() if kind.__module__ in imported}
    if not chosen:
        raise ValueError(f"--mechanism is {', '.join(modules)}; allowed: modules that register a mechanism")
    KINDS.clear()
    KINDS.update(chosen)
