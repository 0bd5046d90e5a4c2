"""Arrays of ``.npz`` files, and numbers of descriptions, as prepared folders hold them: checked field by field."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.json_files import check_file, read, signed
from common.ops.shared.checks import shortened
from common.tensor_files import check_parts


def read_arrays(folder: Path, split: str, names: Sequence[str], allowed: str) -> list[np.ndarray]:
    """The arrays ``names`` of ``folder``/``split``.npz; nothing but arrays of plain values is read.

    Raises:
        ValueError: no such split, a file that is damaged or too large for the memory, or one that lacks an array. The
            message says what is ``allowed``.
    """
    path = folder / f"{split}.npz"
    if not path.exists():
        found = ", ".join(sorted(x.stem for x in folder.glob("*.npz")))
        raise ValueError(f"{folder} has no split {split}; allowed: {found or 'none'}")
    return read_file(path, names, allowed)


def read_file(path: Path, names: Sequence[str], allowed: str) -> list[np.ndarray]:
    """The arrays ``names`` of a file of ``np.savez``; see ``read_arrays``."""
    check_file(path, allowed)
    try:
        check_parts(path)
        with np.load(path, allow_pickle=False) as stored:
            arrays = [stored[name] for name in names]
    except (ValueError, TypeError, KeyError, EOFError, OSError, MemoryError) as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {allowed}") from error
    for name, array in zip(names, arrays):
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{path}: {name} is no array; allowed: {allowed}")
    return arrays


def check_integers(where: str, values: np.ndarray, least: int, most: float = math.inf) -> None:
    """ValueError, which says ``where``, unless ``values`` are one or more integers (N,) from ``least`` to ``most``."""
    bounds = f"{least} to {most}" if most < math.inf else f"at least {least}"
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise ValueError(f"{where} has shape {values.shape} and type {values.dtype}; allowed: integers (N,), {bounds}")
    wrong = values[(values < least) | (values > most)]
    if len(wrong):
        raise ValueError(f"{where} has {wrong[0]}; allowed: {bounds}")


def check_numbers(where: str, values: np.ndarray, shape: tuple[int, ...]) -> None:
    """ValueError, which says ``where``, unless ``values`` are finite real numbers of ``shape``."""
    if values.shape != shape or values.dtype.kind not in "fiu":
        raise ValueError(f"{where} has shape {values.shape} and type {values.dtype}; allowed: {shape}, real numbers")
    if not np.isfinite(values).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise ValueError(f"{where} is {values[place]} at {place}; allowed: finite numbers")


def check_real(name: str, value: Any, above: float = -math.inf, least: float = -math.inf) -> None:
    """ValueError unless the field ``name`` is a finite number, larger than ``above`` and not smaller than ``least``."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not real or not above < value < math.inf or value < least:
        bound = f" above {above:g}" if above > -math.inf else f" of at least {least:g}" if least > -math.inf else ""
        raise ValueError(f"{name} is {shortened(value)}; allowed: a finite number{bound}")


def check_reals(name: str, values: Any, count: int | None = None, **bounds: float) -> None:
    """ValueError unless the field ``name`` is a list of finite numbers in ``bounds``, ``count`` of them if given."""
    if not isinstance(values, list) or not values or count not in (None, len(values)):
        raise ValueError(f"{name} is {shortened(values)}; allowed: a list of {count or 'at least 1'} numbers")
    for i, value in enumerate(values):
        check_real(f"{name}[{i}]", value, **bounds)


def check_whole(name: str, value: Any) -> None:
    """ValueError unless the field ``name`` of a description is an integer of at least 1."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shortened(value)}; allowed: an integer of at least 1")


def as_float32(where: str, values: np.ndarray, given: np.ndarray) -> np.ndarray:
    """``values`` as float32; what they were made of, ``given``, has their shape and stands in the message.

    Raises:
        ValueError: one is finite no more in float32.
    """
    with np.errstate(over="ignore"):
        cast = values.astype(np.float32)
    if not np.isfinite(cast).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(cast))[0])
        at, largest = f" at {place}" if place else "", np.finfo(np.float32).max
        raise ValueError(
            f"{where} is {np.broadcast_to(given, cast.shape)[place]:g}{at}, which is {values[place]:g} for the model; "
            f"allowed: what is finite in float32, up to {largest:.2g}"
        )
    return cast


def checked_cast(where: str, values: Tensor, weight: Tensor) -> Tensor:
    """``values``, finite in float32, on the device and in the precision of ``weight``.

    Raises:
        ValueError: one is finite no more there, as half precision ends at 65504; the message says ``where``.
    """
    cast = values.to(weight.device, weight.dtype)
    if not torch.isfinite(cast).all():
        raise ValueError(
            f"{where} is up to {values.abs().max():g} once standardised; allowed: what is finite in the model's "
            f"{weight.dtype}, up to {torch.finfo(weight.dtype).max:g}"
        )
    return cast


def read_description(kind: type, path: Path, writers: str) -> Any:
    """The description, of the dataclass ``kind``, in the file ``path`` of a folder that ``writers`` write.

    Raises:
        ValueError: there is none, or it is damaged or another; the message names the file and the field.
    """
    if not path.exists():
        raise ValueError(f"{path.parent} lacks {path.name}; allowed: a folder that {writers} has written")
    return described_by(kind, read(path, f"JSON with {', '.join(kind.__dataclass_fields__)}"), str(path))


def write_description(described: Any, path: Path) -> None:
    """Write a dataclass as JSON with a checksum, which ``read_description`` reads."""
    text = json.dumps(signed(asdict(described)), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def described_by(kind: type, found: Any, where: str) -> Any:
    """The description, of the dataclass ``kind``, whose fields are the dictionary ``found``.

    Raises:
        ValueError: it is none; the message says ``where`` it was found.
    """
    fields = ", ".join(kind.__dataclass_fields__)
    if not isinstance(found, dict) or set(map(str, found)) != set(kind.__dataclass_fields__):
        held = shortened(list(found)) if isinstance(found, dict) else f"a {type(found).__name__}"
        raise ValueError(f"{where} cannot be read: it holds {held}; allowed: {fields}")
    try:
        return kind(**found)
    except ValueError as error:
        raise ValueError(f"{where} cannot be read: {error} (fields: {fields})") from error
