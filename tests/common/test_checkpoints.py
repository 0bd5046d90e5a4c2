"""Reading and writing files of tensors without executing them, and checking complete state dicts."""

import errno
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from common.checkpoints import LoadReport, check_state_dict, read_checkpoint
from common.files.tensor_files import read_safetensors, save, save_safetensors
from common.modules.relative_bias import ToeplitzBias

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
FULL = Path("/dev/full")


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


class _Unknown:
    """A class that is on no list of allowed classes."""


def _torch(state: Any, share: float = 1.0, **options: Any) -> Callable[[Path], None]:
    """Write a part of a file of ``torch.save``."""

    def write(path: Path) -> None:
        torch.save(state, path, **options)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])

    return write


OLD = {"_use_new_zipfile_serialization": False}


@pytest.mark.parametrize("name", ["c.pt", "old.pt", "c.safetensors"])
def test_reads_what_was_written(tmp_path: Path, name: str) -> None:
    """Both of torch's formats, and safetensors, from a path object or a string; a large file is mapped."""
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, **(OLD if name == "old.pt" else {}))
    before = path.read_bytes()
    for given in (path, str(path)):
        content = read_checkpoint(given)
        assert content.keys() == STATE.keys() and all(torch.equal(content[key], STATE[key]) for key in STATE)
    if name == "c.pt":
        assert str(path) in Path("/proc/self/maps").read_text()
        content["weight"] += 1
    assert path.read_bytes() == before


CUT = "cannot be read, it may be cut short"
REFUSED = {
    "half of a file": (_torch(STATE, 0.5), CUT),
    "a file without its last bytes": (_torch(STATE, 0.97), CUT),
    "half of an old file": (_torch(STATE, 0.5, **OLD), CUT),
    "an empty file": (lambda path: path.write_bytes(b""), CUT),
    "text": (lambda path: path.write_text("hello\nworld\n"), CUT),
    "a pickle that runs code": (_torch({"a": _Attack()}), "code or classes that are not allowed: posix.system"),
    "an old one": (_torch({"a": _Attack()}, **OLD), "code or classes that are not allowed: posix.system"),
    "a plain one": (lambda path: path.write_bytes(pickle.dumps(_Attack())), "is no checkpoint"),
    "a class": (_torch({"a": _Unknown()}), r"not allowed: .*test_checkpoints\._Unknown"),
    "a list": (_torch([1]), "holds a list; allowed"),
    "a folder": (lambda path: path.mkdir(), "is no file"),
    "nothing": (lambda path: None, "is no file"),
    "safetensors: empty": (lambda path: path.write_bytes(b""), "cannot be read"),
    "safetensors: short": (lambda path: path.write_bytes(b"abc"), "cannot be read"),
    "safetensors: huge": (lambda path: path.write_bytes(struct.pack("<Q", 10**9) + b"{}"), "cannot be read"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One ValueError names the file and what is allowed; nothing in the file is executed."""
    monkeypatch.chdir(tmp_path)
    write, reason = REFUSED[case]
    path = tmp_path / ("c.safetensors" if case.startswith("safetensors") else "c.pt")
    write(path)
    with pytest.raises(ValueError, match=f"(?s){path.name}' .*{reason}.*") as refusal:
        read_checkpoint(path)
    assert "allowed: " in str(refusal.value) and "\n" not in str(refusal.value)
    assert not Path("executed").exists()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(3, 2), ToeplitzBias(4)


def _changed(**changes: Any) -> dict[str, Any]:
    state = {**_Model().state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        (_changed(linear__bias=None), ["1 missing (linear.bias)"]),
        (_changed(more=torch.ones(1)), ["1 not of this model (more)"]),
        (_changed(linear__weight=torch.ones(3, 2)), ["1 of other shapes (linear.weight (3, 2), not (2, 3))"]),
        (_changed(linear__weight=[1.0]), ["linear.weight a list, not (2, 3)"]),
        (_changed(bias__weight=torch.ones(1, 5)), ["bias.weight (1, 5), not (1, 7)"]),
        (_changed(linear__bias=None, a=torch.ones(1), linear__weight=torch.ones(1)), ["1 of", "1 missing", "1 not"]),
        (_changed(**{f"x{i}": torch.ones(1) for i in range(6)}), ["6 not of this model (x0, x1, x2, x3, ...)"]),
    ],
)
def test_check_says_all_that_is_wrong(state: dict[str, Any], parts) -> None:
    """Every kind of mismatch, with names and shapes, in one ValueError that names the model."""
    with pytest.raises(ValueError, match="does not fit _Model: .*allowed: .*Nothing was loaded") as refusal:
        check_state_dict(state, _Model())
    assert all(part in str(refusal.value) for part in parts)


def test_check_accepts_what_fits_and_a_summary_counts() -> None:
    """A longer relative bias is also accepted, and cut; with ``shapes_only``, so are other names."""
    check_state_dict(_changed(), _Model())
    check_state_dict(_changed(bias__weight=torch.ones(1, 9)), _Model())
    check_state_dict(_changed(linear__bias=None, more=torch.ones(1)), _Model(), shapes_only=True)
    with pytest.raises(ValueError, match="1 of other shapes"):
        check_state_dict(_changed(linear__bias=torch.ones(1)), _Model(), shapes_only=True)
    summary = LoadReport(["a", "b"], ["c"], [f"d{i}" for i in range(5)]).summary()
    assert summary == "2 tensors taken as a starting point; 1 left out (c); 5 new (d0, d1, d2, d3, ...)"


def test_what_is_saved_is_read_with_what_is_said_of_it(tmp_path):
    whole = torch.arange(6).view(2, 3)
    tensors = {"x": whole, "transposed": whole.t(), "half": torch.ones(2, dtype=torch.float16), "one": torch.tensor(3)}
    save(tensors, tmp_path / "x.pt")
    save_safetensors(tensors, tmp_path / "x", {"format": "mine"})
    actual, metadata = read_safetensors(tmp_path / "x")
    assert metadata == {"format": "mine"} and actual.keys() == tensors.keys()
    for read in (actual, torch.load(tmp_path / "x.pt", weights_only=True)):
        assert all(torch.equal(read[name], x) and read[name].dtype == x.dtype for name, x in tensors.items())
    content = (tmp_path / "x").read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], b"", b"PK" + content):
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(ValueError, match="x' cannot be read .* allowed: a whole file"):
            read_safetensors(tmp_path / "x")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("write", [save, lambda tensors, path: save_safetensors(tensors, path, {})])
def test_a_full_disk_is_an_os_error(write):
    with pytest.raises(OSError) as error:
        write({"x": torch.zeros(100_000)}, FULL)
    assert error.value.errno == errno.ENOSPC
