"""Reading files without executing them, and checking complete state dicts."""

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
from common.modules.relative_bias import ToeplitzBias

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}


class _Attack:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


class _Unknown:
    """A class that is on no list of allowed classes."""


def _torch(state: Any, **options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(state, path, **options)


def _truncated(share: float, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        torch.save(STATE, path, **options)
        whole = path.read_bytes()
        path.write_bytes(whole[: int(share * len(whole))])

    return write


OLD = {"_use_new_zipfile_serialization": False}


@pytest.mark.parametrize("name", ["c.pt", "old.pt", "c.safetensors"])
@pytest.mark.parametrize("as_string", [True, False])
def test_reads_what_was_written(tmp_path: Path, name: str, as_string: bool) -> None:
    """Both of torch's formats, and safetensors, from a path object or a string."""
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(STATE, path)
    else:
        torch.save(STATE, path, **(OLD if name == "old.pt" else {}))
    content = read_checkpoint(str(path) if as_string else path)
    assert content.keys() == STATE.keys() and all(torch.equal(content[key], STATE[key]) for key in STATE)


def test_tensors_are_read_when_they_are_used(tmp_path: Path) -> None:
    """Reading a large file's configuration does not read its tensors: the file is mapped and unchanged."""
    torch.save(STATE, tmp_path / "c.pt")
    before = (tmp_path / "c.pt").read_bytes()
    weight = read_checkpoint(tmp_path / "c.pt")["weight"]
    assert str(tmp_path / "c.pt") in Path("/proc/self/maps").read_text()
    weight += 1
    assert (tmp_path / "c.pt").read_bytes() == before


REFUSED = {
    "half of a file": (_truncated(0.5), "cannot be read, it may be cut short"),
    "a file without its last bytes": (_truncated(0.97), "cannot be read, it may be cut short"),
    "half of an old file": (_truncated(0.5, **OLD), "cannot be read, it may be cut short"),
    "an empty file": (lambda path: path.write_bytes(b""), "cannot be read, it may be cut short"),
    "text": (lambda path: path.write_text("hello\nworld\n"), "cannot be read, it may be cut short"),
    "a pickle that runs code": (_torch({"a": _Attack()}), "code or classes that are not allowed: posix.system"),
    "an old one": (_torch({"a": _Attack()}, **OLD), "code or classes that are not allowed: posix.system"),
    "a plain one": (lambda path: path.write_bytes(pickle.dumps(_Attack())), "is no checkpoint"),
    "a class": (_torch({"a": _Unknown()}), r"not allowed: .*test_checkpoints\._Unknown"),
    "a list": (_torch([1]), "holds a list; allowed"),
    "a folder": (lambda path: path.mkdir(), "is no file"),
    "nothing": (lambda path: None, "is no file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """One ValueError names the file and what is allowed; nothing in the file is executed."""
    monkeypatch.chdir(tmp_path)
    write, reason = REFUSED[case]
    path = tmp_path / "c.pt"
    write(path)
    with pytest.raises(ValueError, match=f"(?s)c.pt' .*{reason}.*") as refusal:
        read_checkpoint(path)
    assert "allowed: " in str(refusal.value) and "\n" not in str(refusal.value)
    assert not Path("executed").exists()


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 10**9) + b"{}"], ids=["empty", "short", "huge"])
def test_refuses_broken_safetensors(tmp_path: Path, content: bytes) -> None:
    """The errors are those for torch's files."""
    (tmp_path / "c.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="c.safetensors' cannot be read"):
        read_checkpoint(tmp_path / "c.safetensors")


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
        (_changed(linear__weight=torch.tensor(1.0)), ["linear.weight (), not (2, 3)"]),
        (_changed(linear__weight=[1.0]), ["linear.weight a list, not (2, 3)"]),
        (_changed(bias__weight=torch.ones(1, 5)), ["bias.weight (1, 5), not (1, 7)"]),
        (_changed(linear__bias=None, a=torch.ones(1), linear__weight=torch.ones(1)), ["1 of", "1 missing", "1 not"]),
        ({}, ["3 missing (linear.weight, linear.bias, bias.weight)"]),
        (_changed(**{f"x{i}": torch.ones(1) for i in range(6)}), ["6 not of this model (x0, x1, x2, x3, ...)"]),
    ],
)
def test_check_says_all_that_is_wrong(state: dict[str, Any], parts) -> None:
    """Every kind of mismatch, with names and shapes, in one ValueError that names the model."""
    with pytest.raises(ValueError, match="does not fit _Model: .*allowed: .*Nothing was loaded") as refusal:
        check_state_dict(state, _Model())
    assert all(part in str(refusal.value) for part in parts)


def test_check_accepts_what_fits() -> None:
    """A longer relative bias is also accepted, and cut; with ``shapes_only``, so are other names."""
    check_state_dict(_changed(), _Model())
    check_state_dict(_changed(bias__weight=torch.ones(1, 9)), _Model())
    check_state_dict(_changed(linear__bias=None, more=torch.ones(1)), _Model(), shapes_only=True)
    with pytest.raises(ValueError, match="1 of other shapes"):
        check_state_dict(_changed(linear__bias=torch.ones(1)), _Model(), shapes_only=True)


def test_summary_counts_and_names() -> None:
    """The summary does not claim that the model is the same."""
    summary = LoadReport(["a", "b"], ["c"], [f"d{i}" for i in range(5)]).summary()
    assert summary == "2 tensors taken as a starting point; 1 left out (c); 5 new (d0, d1, d2, d3, ...)"
    assert LoadReport(["a"], [], []).summary() == "1 tensors taken as a starting point; 0 left out; 0 new"
