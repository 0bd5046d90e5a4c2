"""Ways to damage a file by its format: bytes, JSON, arrays. Each yields names and functions of a path."""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

#: A name, and a function that damages the file at a path.
Damage = tuple[str, Callable[[Path], Any]]


def of_bytes(whole: bytes) -> Iterator[Damage]:
    """Damages of any file: missing, no file, nearly whole, of another format; see also ``other_bytes``."""
    yield "no file", Path.unlink
    yield "a folder", _into(Path.mkdir)
    yield "a pipe", _into(os.mkfifo)
    parts = {"empty": b"", "half": whole[: len(whole) // 2], "no end": whole[:-1], "longer": whole + b"\0garbage"}
    zeros = whole[: len(whole) // 2] + bytes(16) + whole[len(whole) // 2 + 16 :]
    for name, content in {**parts, "zeros": zeros, "zip": _zip(), "an object": b"{}", "no text": b"\xff\xfe"}.items():
        yield name, _write(content)


def other_bytes(whole: bytes) -> st.SearchStrategy[bytes]:
    """``whole`` cut anywhere, with a bit flipped, or with bytes inserted."""
    places = st.integers(0, len(whole) - 1)
    bits = st.tuples(places, st.integers(0, 7))
    inserted = st.tuples(places, st.binary(min_size=1, max_size=20))
    return (
        places.map(lambda i: whole[:i])
        | bits.map(lambda x: whole[: x[0]] + bytes([whole[x[0]] ^ 1 << x[1]]) + whole[x[0] + 1 :])
        | inserted.map(lambda x: whole[: x[0]] + x[1] + whole[x[0] :])
    )


def of_json(whole: bytes, nested: bool = True) -> Iterator[Damage]:
    """Damages of a JSON object, with no checksum: other types, ``nested`` ones too, names, numbers."""
    content = json.loads(whole)
    content.pop("sha256", None)
    for name, other in {"a list": [], "a number": 3, "a text": "x", "null": None, "nothing": {}}.items():
        yield name, _write(json.dumps(other).encode())
    yield "lists in lists", _write(b"[" * 100_000)
    yield "a further name", _write(json.dumps({**content, "a further name" * 200: 1}).encode())
    for name in content:
        yield f"without {name}", _write(json.dumps({k: x for k, x in content.items() if k != name}).encode())
        yield f"{name} twice", _write(json.dumps(content)[:-1].encode() + f', "{name}": 1}}'.encode())
        huge = json.dumps({**content, name: 1}).replace(f'"{name}": 1', f'"{name}": {"7" * 5000}')
        yield f"{name} of 5,000 digits", _write(huge.encode())
    for path, value in _values(content):
        if len(path) > 1 and not nested:
            continue
        for other in ("x" * 2000, 0.5, -1, None, [], {}, True):
            if type(other) is not type(value) and not (type(value) is float and type(other) is int):
                yield f"{path} is {other!r:.20}", _write(json.dumps(_changed(content, path, other)).encode())


def _values(content: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """Every value within ``content`` with its path, of a list the first."""
    if path:
        yield path, content
    for name in content if isinstance(content, dict) else [0] if isinstance(content, list) and content else []:
        yield from _values(content[name], (*path, name))


def _changed(content: Any, path: tuple, value: Any) -> Any:
    """A copy of ``content`` with another value at ``path``."""
    if not path:
        return value
    copy = content.copy()
    copy[path[0]] = _changed(content[path[0]], path[1:], value)
    return copy


def of_arrays(whole: bytes) -> Iterator[Damage]:
    """Damages of each array of a numpy file, in an intact zip file."""
    with np.load(io.BytesIO(whole)) as stored:
        arrays = dict(stored)
    yield "a further array", _save({**arrays, "a further array": np.zeros(3)})
    for name, array in arrays.items():
        yield f"without {name}", _save({x: y for x, y in arrays.items() if x != name})
        yield f"{name} by another name", _save({f"{x}_" if x == name else x: y for x, y in arrays.items()})
        others = {"as text": array.astype(str), "as objects": array.astype(object), "as complex": array.astype(complex)}
        others |= {"with a dimension": array[..., None], "empty": array.reshape(-1)[:0]}
        if array.ndim:
            others["cut"] = array[:-1]
        if array.size and array.dtype.kind == "f":
            others |= {"with NaN": _with(array, np.nan), "with inf": _with(array, np.inf)}
        elif array.size:
            others |= {"with -1": _with(array, -1), "with 10**9": _with(array, 10**9)}
        for label, other in others.items():
            yield f"{name} {label}", _save({**arrays, name: other})


def _write(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


def _save(arrays: dict[str, np.ndarray]) -> Callable[[Path], Any]:
    return lambda path: np.savez(path, **arrays)


def _with(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.copy()
    changed[(-1,) * array.ndim] = value
    return changed


def _into(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: (path.unlink(), make(path))


def _zip() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros(2))
    return file.getvalue()


def copied(source: Path, target: Path) -> Path:
    """Copy the folder ``source`` to ``target``, replacing it."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
