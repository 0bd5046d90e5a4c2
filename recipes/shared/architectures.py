"""Architectures of fairseq that share the end of their names, as an option of a comparison takes them."""

import argparse
from collections.abc import Callable

from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_plugin  # noqa: F401  registers the architectures


def known_names(suffix: str) -> list[str]:
    """The architectures whose names end with ``suffix``, without it."""
    return [name.removesuffix(suffix) for name in sorted(ARCH_MODEL_REGISTRY) if name.endswith(suffix)]


def architectures_of(suffix: str) -> Callable[[str], list[str]]:
    """The type of an option: comma-separated names of architectures, with or without ``suffix``, none twice."""

    def architectures(text: str) -> list[str]:
        names, known = list(dict.fromkeys(name.removesuffix(suffix) for name in text.split(","))), known_names(suffix)
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name}; allowed: {', '.join(known)}")
        return names

    return architectures
