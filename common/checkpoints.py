"""State dicts: read without running code from a file, and checked completely before loading.

Legend: a state dict maps names to tensors; a model's own is ``model.state_dict()``.
"""

import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .files.tensor_files import check_parts
from .modules.stored_options import StoresOptions, is_extra_state, read_extra_state, spelled

#: Number of names of each kind in a message.
_SHOWN = 4


class LoadReport(NamedTuple):
    """Result of transferring a foreign state dict to a model: which tensors were taken, left out, or are new."""

    taken: list[str]  # the model's names whose tensors come from the source, unchanged or resampled
    left_out: list[str]  # the source's names without a counterpart in the model
    new: list[str]  # the model's names that keep, fully or partly, their initial weights

    def summary(self) -> str:
        """One line for a log. It claims no equivalence: weights of another attention are a starting point."""
        counts = (f"{len(names)} {kind}{listed(names)}" for kind, names in zip(("left out", "new"), self[1:]))
        return f"{len(self.taken)} tensors taken as a starting point; {'; '.join(counts)}"


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, on the CPU: ``.safetensors``, or torch's format, read with ``weights_only``.

    No code from the file is run; classes other than tensors and plain containers must have been allowed by name
    (``torch.serialization.add_safe_globals``).

    Raises:
        ValueError: the file is missing, cut short, damaged or of another format, or it would run code.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the checkpoint {str(path)!r} is no file; allowed: a file of torch.save, or .safetensors")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        is_zip = zipfile.is_zipfile(path)
        if is_zip:
            check_parts(path)
        # Mapped into memory if torch's format allows it: tensors occupy memory only once they are used.
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"the checkpoint {str(path)!r} {_why_refused(path, error)}; allowed: tensors, plain containers and the "
            "host's configuration objects, as torch.save or safetensors write them"
        ) from error
    except Exception as error:  # torch's and safetensors' readers raise arbitrary exceptions for a broken file
        raise ValueError(
            f"the checkpoint {str(path)!r} cannot be read, it may be cut short or damaged: {_first_line(error)}; "
            "allowed: a whole file of torch.save, or .safetensors"
        ) from error
    if not isinstance(contents, dict):
        raise ValueError(f"the checkpoint {str(path)!r} holds a {type(contents).__name__}; allowed: a dictionary")
    return contents


def check_state_dict(state_dict: dict[str, Any], model: nn.Module, shapes_only: bool = False) -> None:
    """Raise ValueError, before anything is loaded, unless names and shapes are those of ``model``.

    ``shapes_only`` checks only names that both have, as loading with ``strict=False`` does. A module may accept a
    tensor of another shape for its weight, by a method ``takes_stored(tensor)``, or tensors of an earlier version,
    which it names in ``former_names``. Records of options (``stored_options``) may be missing. O(number of
    tensors).
    """
    expected = {
        name: x for name, x in model.state_dict().items() if not is_extra_state(name) and not is_read(name, model)
    }
    shapes = [
        f"{name} {_shape(state_dict[name])}, not {_shape(tensor)}"
        for name, tensor in expected.items()
        if name in state_dict and not _fits(state_dict[name], tensor, name, model)
    ]
    missing = [] if shapes_only else [name for name in expected if name not in state_dict]
    further = [] if shapes_only else [name for name in state_dict if name not in expected and not is_read(name, model)]
    faults = [("of other shapes", shapes), ("missing", missing), ("not of this model", further)]
    if any(names for _, names in faults):
        text = "; ".join(f"{len(names)} {fault}{listed(names)}" for fault, names in faults if names)
        raise ValueError(
            f"the checkpoint does not fit {type(model).__name__}: {text}; allowed: the tensors of this architecture "
            "with the same options. Nothing was loaded"
        )


def leave_out_foreign_extra_states(state_dict: dict[str, Any], model: nn.Module) -> None:
    """Remove from ``state_dict``, in place and with a warning, records of options that no module of ``model`` reads.

    In that case weights of one of our attention modules are loaded into another module, which computes something else.
    """
    for name in [name for name in state_dict if is_extra_state(name) and not is_read(name, model)]:
        record = read_extra_state(state_dict.pop(name))
        trained = "an attention of lineartime" if record is None else spelled(record["options"])
        warnings.warn(
            f"{type(model).__name__}: the weights that are loaded are those of {trained}; where they were, this model "
            "has no attention of lineartime, and so it is another function of them",
            stacklevel=2,
        )


def _fits(stored: Any, own: Tensor, name: str, model: nn.Module) -> bool:
    if not isinstance(stored, Tensor):
        return False
    if stored.shape == own.shape:
        return True
    takes = getattr(model.get_submodule(name.rpartition(".")[0]), "takes_stored", None)
    return takes is not None and takes(stored)


def is_read(name: str, model: nn.Module) -> bool:
    """Whether a module of ``model`` reads the entry ``name`` of a file, a record or a tensor of an earlier version."""
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return False
    return last in getattr(module, "former_names", ()) or (is_extra_state(name) and isinstance(module, StoresOptions))


def _shape(stored: Any) -> str:
    return str(tuple(stored.shape)) if isinstance(stored, Tensor) else f"a {type(stored).__name__}"


def _why_refused(path: Path, error: Exception) -> str:
    """The reason why torch refused a file with ``weights_only``, for a message."""
    try:
        classes = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # it reads only torch's current format; in any format the error names the first class
        classes = re.findall(r"GLOBAL ([A-Za-z_][\w.]+)", str(error))[:1]
    return f"holds code or classes that are not allowed: {', '.join(classes)}" if classes else "is no checkpoint"


def listed(names: list[str]) -> str:
    """The first few of ``names`` in brackets, after a space; empty if there are no names."""
    if not names:
        return ""
    return f" ({', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''})"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0].split(". ")[0]
