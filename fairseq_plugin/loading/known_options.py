"""The options of models: declaring a field, listing the options allowed with a checkpoint, and errors."""

import argparse
import difflib
from collections.abc import Iterable
from dataclasses import field, is_dataclass
from typing import Any

from fairseq.dataclass.configs import FairseqConfig
from fairseq.registry import REGISTRIES


def option_field(default: Any, help: str) -> Any:
    """A field of a dataclass of options, with its ``default`` and its ``help`` text."""
    return field(default=default, metadata={"help": help})


class ConfigurationError(ValueError):
    """A key or value that a model does not have; the message says what is allowed, but does not name the file."""


class _Parser(argparse.ArgumentParser):
    """A parser that records its options."""

    def __init__(self) -> None:
        self.declared: dict[str, argparse.Action] = {}
        super().__init__(allow_abbrev=False, add_help=False)

    def add_argument(self, *flags: Any, **description: Any) -> argparse.Action:
        """As argparse's; also records the option in ``declared``."""
        action = super().add_argument(*flags, **description)
        return self.declared.setdefault(action.dest, action)


def declared_options(model: type) -> dict[str, argparse.Action]:
    """The command-line options of a fairseq model, by name."""
    parser = _Parser()
    model.add_args(parser)
    return parser.declared


def flag_of(name: str) -> str:
    """The command-line spelling of an option: ``flash_chunk_size`` -> ``--flash-chunk-size``."""
    return f"--{name.replace('_', '-')}"


def model_options(model: type) -> set[str]:
    """The names of the options of a fairseq model."""
    return set(declared_options(model))


def checkpoint_options(model: type, state: dict[str, Any]) -> set[str]:
    """The names of the options with which ``model`` can be loaded from the checkpoint ``state``.

    These are fairseq's groups of options, the stored options, and those of the model, which may be newer than the file.
    """
    names = {"generation_args", *model_options(model)}
    for group, options in vars(FairseqConfig()).items():
        names |= {group, *(vars(options) if is_dataclass(options) else ())}
    for registry in REGISTRIES.values():
        for options in filter(is_dataclass, registry["dataclass_registry"].values()):
            names |= options.__dataclass_fields__.keys()
    if state.get("args") is not None:
        return names | vars(state["args"]).keys()
    groups = [x if hasattr(x, "keys") else getattr(x, "__dict__", {}) for x in state["cfg"].values()]
    return names.union(*(group.keys() for group in groups))


def check_names(what: str, names: Iterable[Any], known: set[str], listed: set[str]) -> None:
    """ValueError for the first of ``names`` not in ``known``; suggests similar names, otherwise those in ``listed``."""
    for name in map(str, names):
        if name not in known:
            near = difflib.get_close_matches(name, known)
            raise ValueError(f"{what} has {name}; allowed: {', '.join(near or sorted(listed))}")
