"""Architectures of fairseq whose names share a suffix, as the values of a comparison's option."""

import argparse
from collections.abc import Callable

from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_plugin  # noqa: F401  registers the architectures

from .variants import mechanism_of, with_variants


def known_names(suffix: str) -> list[str]:
    """The architectures whose names end with ``suffix``, without it."""
    return [name.removesuffix(suffix) for name in sorted(ARCH_MODEL_REGISTRY) if name.endswith(suffix)]


def option_prefix(architecture: str) -> str:
    """The prefix of the options of an architecture's mechanism, such as ``--linear-``."""
    return f"--{ARCH_MODEL_REGISTRY[architecture].option_prefix}-".replace("_", "-")


def architectures_of(suffix: str, additions: bool = False) -> Callable[[str], list[str]]:
    """The type of an option: comma-separated names of architectures, with or without ``suffix``, without duplicates.

    Args:
        additions: also allow NAME+forget and so on, with the additions that the mechanism of NAME supports.
    """

    def architectures(text: str) -> list[str]:
        names = list(dict.fromkeys(without_suffix(name, suffix) for name in text.split(",")))
        all_names = known_names(suffix)
        for name in names:
            plain = mechanism_of(name)
            allowed = _with_additions(plain, suffix) if additions and plain in all_names else all_names
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(allowed)}")
        return names

    return architectures


def with_suffix(name: str, suffix: str) -> str:
    """The name of an architecture with its suffix before the additions, such as linear_decision+forget."""
    plain, plus, additions = name.partition("+")
    return plain + suffix + plus + additions


def without_suffix(name: str, suffix: str) -> str:
    """The name, which may have additions, without the suffix of its architecture."""
    plain, plus, additions = name.partition("+")
    return plain.removesuffix(suffix) + plus + additions


def _with_additions(plain: str, suffix: str) -> list[str]:
    """The architecture's name alone and, if it has a mechanism, with every addition that the mechanism supports."""
    attention = getattr(ARCH_MODEL_REGISTRY[plain + suffix], "attention_name", None)
    return [plain + name.removeprefix(attention) for name in with_variants(attention)] if attention else [plain]
