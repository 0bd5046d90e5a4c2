"""A record in the state dict of what weights mean although no tensor shows it, such as the formula of an attention."""

import json
import warnings
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

#: How the names of records end in a state dict; torch's own name for what a module adds to it.
RECORD = "_extra_state"
#: Records have a length that is a multiple of this, whatever the options and counts: torch's distributed checkpoints
#: and averages of files take tensors of one shape.
_LENGTH = 512
#: Digits of a count: one width, so that the average of two records that differ in a count alone is legible.
_DIGITS = 19


class RemembersOptions(nn.Module):
    """Base class of modules whose weights belong to certain options, such as the mechanism and form of an attention.

    ``state_dict()`` holds a record of them, torch's extra state: JSON, one byte in each number of a float32 tensor.
    Whatever a host does to a state dict leaves it legible: copies key by key, safetensors, half precision, averages of
    several files, moving averages. ``load_state_dict`` warns where weights are loaded under other options, and where
    a file does not say what its weights belong to, as files of stock models and of lineartime 0.1 do not. Python shows
    a warning of one text once.

    A record also keeps integers, at least 0: those of the attributes that ``counts`` names. Loading restores them.
    """

    #: Names of attributes that are integers and change a result: a seed, passes in training.
    counts: ClassVar[tuple[str, ...]] = ()
    #: Names of tensors that state dicts of earlier versions held, and that ``restore_former`` takes.
    former_names: ClassVar[frozenset[str]] = frozenset()
    #: What weights belong to, for the warning about a file that does not say it.
    belongs_to: ClassVar[str] = "attention"

    def remembered_options(self) -> dict[str, str | int | float | bool | None]:
        """Names and values of the options; a subclass says which."""
        return {}

    def restore_counts(self, counts: dict[str, int]) -> None:
        """Called when weights have been loaded, with the counts that came with them; none from older files."""
        for name, value in counts.items():
            setattr(self, name, value)

    def restore_former(self, tensors: dict[str, Tensor]) -> None:
        """Called when weights have been loaded that came with tensors of ``former_names``."""

    def get_extra_state(self) -> Tensor:
        """torch's hook: the record."""
        counts = {name: f"{getattr(self, name):0{_DIGITS}d}" for name in self.counts}
        text = json.dumps({"options": self.remembered_options(), "counts": counts})
        text = text.ljust(-(-len(text) // _LENGTH) * _LENGTH)
        # Floating point, because fairseq's moving average multiplies everything; bytes are exact in half precision.
        return torch.tensor(list(text.encode()), dtype=torch.float32, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """torch's hook: compare the record of a file with this module."""
        if isinstance(state, Tensor) and state.is_meta:  # nor do weights on "meta" have values
            return
        record = read_record(state)
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
            error_msgs += [f"{prefix}{name} has shape {x}, not {own}" for name, (x, own) in shapes.items() if x != own]
            if not error_msgs:
                self.restore_former(former)
        name = prefix + RECORD
        if name in state_dict:
            return
        if name in missing_keys:
            missing_keys.remove(name)
        self.restore_counts({})
        if "options" in local_metadata:  # version 0.2 kept them there
            self._compare(local_metadata["options"])
        elif self.remembered_options() and _is_loaded(prefix, state_dict, missing_keys):
            self._warn(
                f"the weights that are loaded do not say which {self.belongs_to} they belong to (those of stock models "
                f"and of earlier versions do not); here they are used with {self._own()}"
            )

    def _compare(self, stored: dict[str, Any]) -> None:
        own = _as_stored(self.remembered_options())
        stored = _as_stored(stored)
        other = [name for name in own if name in stored and stored[name] != own[name]]
        if other:
            there, here = (spelled({name: options[name] for name in other}) for options in (stored, own))
            self._warn(
                f"the weights that are loaded are those of {there}; here they are used with {here}, which is another "
                "function of them"
            )

    def _own(self) -> str:
        return spelled(self.remembered_options())

    def _warn(self, message: str) -> None:
        # Without the module's place in the model: Python then shows the warning once for all layers of a model.
        warnings.warn(f"{type(self).__name__}: {message}", stacklevel=2)


class Remembered(RemembersOptions):
    """A record of ``options`` for a module of a host, which gets this one as a child; no parameters, no forward.

    Values are what JSON has: text, numbers, True and False, None, and lists of these.
    """

    belongs_to = "options"

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def remembered_options(self) -> dict[str, str | int | float | bool | None]:
        """Return the options that were given."""
        return self.options


def is_record(name: str) -> bool:
    """Whether ``name`` is that of a record in a state dict."""
    return name.rpartition(".")[2] == RECORD


def read_record(stored: Any) -> dict[str, dict[str, Any]] | None:
    """``{"options": ..., "counts": ...}`` of a record in a state dict; None where it is none, or cannot be read."""
    try:
        record = json.loads(bytes(round(x) for x in stored.tolist()).decode())
        options, counts = record["options"], record["counts"]
        legible = isinstance(options, dict) and all(map(_is_count, counts.values()))
    except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError):
        return None  # averages of files of several options, or another's tensor
    return {"options": options, "counts": counts} if legible else None


def _is_count(digits: str) -> bool:
    return digits.isascii() and digits.isdecimal() and len(digits) <= _DIGITS


def _is_loaded(prefix: str, state_dict: dict[str, Any], missing_keys: list[str]) -> bool:
    """Whether weights of the module at ``prefix``, or of those beside it, are loaded, and not of other modules alone.

    torch gives a module the part of ``state_dict`` that is its own. Modules beside it that came before have told of
    what they miss.
    """
    if not prefix:
        return bool(state_dict)
    parent = prefix[:-1].rpartition(".")[0]
    return not any(name.startswith(f"{parent}." if parent else prefix) for name in missing_keys)


def _as_stored(options: dict[str, Any]) -> dict[str, Any]:
    """As JSON has them: a pair is a list there."""
    return json.loads(json.dumps(options))


def spelled(options: dict[str, Any]) -> str:
    """Names and values for a message."""
    return ", ".join(f"{name}={value!r}" for name, value in options.items())
