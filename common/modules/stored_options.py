"""A record in the state dict of options that no tensor shows, such as the formula of an attention."""

import json
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

#: The last part of a record's name in a state dict: torch's name for a module's extra state.
EXTRA_STATE = "_extra_state"
#: The length of every record is a multiple of this, so that options and counts rarely change it: torch's distributed
#: checkpoints and averages of files need tensors of the same shape.
_LENGTH = 512
#: Digits of a count: a fixed width, so that the average of two records that differ only in a count can be parsed.
_DIGITS = 19


class StoresOptions(nn.Module):
    """Base class of modules that record the options of their weights, such as the mechanism and form of an attention.

    ``state_dict()`` holds a record of them, torch's extra state: JSON, one byte in each number of a float32 tensor. It
    survives everything that hosts do to a state dict: copies key by key, safetensors, half precision, averages of
    several files, moving averages. ``load_state_dict`` warns if weights are loaded with other options, and if a file
    has no record, such as files of stock models and of lineartime 0.1. Python shows each warning text once.

    A record also stores integers of at least 0: the attributes that ``counts`` names. Loading restores them.
    """

    #: Names of integer attributes that change a result: a seed, passes in training.
    counts: ClassVar[tuple[str, ...]] = ()
    #: Names of tensors in state dicts of earlier versions, which ``restore_former`` loads.
    former_names: ClassVar[frozenset[str]] = frozenset()
    #: A noun for the options, in the warning about a file without a record.
    belongs_to: ClassVar[str] = "attention"

    def stored_options(self) -> dict[str, str | int | float | bool | None]:
        """Names and values of the options to record; subclasses override it."""
        return {}

    def stored_module(self) -> str | None:
        """Return the name of the module that the class needs, if it is a user's own."""
        return None

    def restore_counts(self, counts: dict[str, int]) -> None:
        """Restore ``counts`` after weights were loaded with them; empty for older files."""
        for name, value in counts.items():
            setattr(self, name, value)

    def restore_former(self, tensors: dict[str, Tensor]) -> None:
        """Load the tensors of ``former_names`` that came with the weights; called after loading."""

    def get_extra_state(self) -> Tensor:
        """torch's hook: the record."""
        counts = {name: f"{getattr(self, name):0{_DIGITS}d}" for name in self.counts}
        module = self.stored_module()
        own = {} if module is None else {"module": module}
        text = json.dumps({"options": self.stored_options(), "counts": counts, **own})
        text = text.ljust(-(-len(text) // _LENGTH) * _LENGTH)
        # Floating point, because fairseq's moving average multiplies all tensors; half precision is exact for bytes.
        return torch.tensor(list(text.encode()), dtype=torch.float32, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """torch's hook: compare the record of a file with this module."""
        if isinstance(state, Tensor) and state.is_meta:  # weights on "meta" have no values either
            return
        record = read_extra_state(state)
        if record is None:
            self._warn(f"the record of weights that are loaded cannot be read; here they are used with {self._own()}")
            return
        self._compare(record["options"])
        self.restore_counts({name: int(digits) for name, digits in record["counts"].items() if name in self.counts})

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        former = {name: state_dict[prefix + name] for name in self.former_names if prefix + name in state_dict}
        if former:
            unexpected_keys[:] = [name for name in unexpected_keys if name.removeprefix(prefix) not in former]
            shapes = {name: (tuple(x.shape), tuple(getattr(self, name).shape)) for name, x in former.items()}
            error_msgs += [f"{prefix}{name} has shape {x}, not {y}" for name, (x, y) in shapes.items() if x != y]
            if not error_msgs:
                self.restore_former(former)
        name = prefix + EXTRA_STATE
        if name in state_dict:
            return
        if name in missing_keys:
            missing_keys.remove(name)
        self.restore_counts({})
        if "options" in local_metadata:  # version 0.2 kept them there
            self._compare(local_metadata["options"])
        elif self.stored_options() and _is_loaded(prefix, state_dict, missing_keys):
            self._warn(
                f"the weights that are loaded do not say which {self.belongs_to} they belong to (those of stock models "
                f"and of earlier versions do not); here they are used with {self._own()}. If they were trained "
                "with these options, save them again, and the new file says so; if not, build the model with those of "
                "the training, or train it further"
            )

    def _compare(self, stored: dict[str, Any]) -> None:
        current = _as_stored(self.stored_options())
        stored = _as_stored(stored)
        changed = [name for name in current if name in stored and stored[name] != current[name]]
        if changed:
            there, here = (spelled({name: options[name] for name in changed}) for options in (stored, current))
            self._warn(
                f"the weights that are loaded are those of {there}; here they are used with {here}, which is another "
                "function of them"
            )

    def _own(self) -> str:
        return spelled(self.stored_options())

    def _warn(self, message: str) -> None:
        # The text omits the module's place in the model, so that Python shows the warning once for all layers.
        warnings.warn(f"{type(self).__name__}: {message}", stacklevel=2)


class StoredOptions(StoresOptions):
    """A child module that records ``options`` for a module of a host; no parameters, no forward.

    Values must fit JSON: text, numbers, True and False, None, and lists of these.
    """

    belongs_to = "options"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def stored_options(self) -> dict[str, str | int | float | bool | None]:
        """Return the options that were given."""
        return self.options


def is_extra_state(name: str) -> bool:
    """Whether ``name`` is the name of a record in a state dict."""
    return name.rpartition(".")[2] == EXTRA_STATE


def read_extra_state(stored: Any) -> dict[str, Any] | None:
    """``{"options": ..., "counts": ...}`` of a record in a state dict.

    It also has "module" if a class of a user's own wrote it. None if it is not a readable record.
    """
    try:
        record = json.loads(bytes(round(x) for x in stored.tolist()).decode())
        options, counts = record["options"], record["counts"]
        valid = isinstance(options, dict) and all(map(_is_count, counts.values()))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return None  # an average of files with different options, or a foreign tensor
    return record if valid else None


def own_modules(state_dict: dict[str, Any]) -> dict[str, str]:
    """The modules of a user's own that the weights ``state_dict`` need, by the name of the mechanism."""
    records = [read_extra_state(x) for name, x in state_dict.items() if is_extra_state(name)]
    named = [x for x in records if x is not None and isinstance(x.get("module"), str)]
    return {str(x["options"].get("attention")): x["module"] for x in named}


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS


def _is_loaded(prefix: str, state_dict: dict[str, Any], missing_keys: list[str]) -> bool:
    """Whether weights of the module at ``prefix`` or of its sibling modules are being loaded.

    torch passes a module only its own part of ``state_dict``. Siblings that were loaded before it have already added
    their missing tensors to ``missing_keys``.
    """
    if not prefix:
        return bool(state_dict)
    parent = prefix[:-1].rpartition(".")[0]
    return not any(name.startswith(f"{parent}." if parent else prefix) for name in missing_keys)


def _as_stored(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` after a round trip through JSON, where a pair becomes a list."""
    return json.loads(json.dumps(options))


def spelled(options: dict[str, Any]) -> str:
    """Names and values as text for a message."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
