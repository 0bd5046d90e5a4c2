"""Saved tensors can be read again, and a full disk is an OSError."""

import errno
from pathlib import Path

import pytest
import torch

from common.files.tensor_files import read_safetensors, save, save_safetensors

FULL = Path("/dev/full")


def test_what_is_saved_is_read(tmp_path):
    save({"x": torch.arange(3)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["x"].tolist() == [0, 1, 2]


def test_safetensors_are_read_with_what_is_said_of_them(tmp_path):
    whole = torch.arange(6).view(2, 3)
    tensors = {"x": whole, "transposed": whole.t(), "half": torch.ones(2, dtype=torch.float16), "one": torch.tensor(3)}
    save_safetensors(tensors, tmp_path / "x", {"format": "mine"})
    actual, metadata = read_safetensors(tmp_path / "x")
    assert metadata == {"format": "mine"} and actual.keys() == tensors.keys()
    assert all(torch.equal(actual[name], x) and actual[name].dtype == x.dtype for name, x in tensors.items())


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: x[: len(x) // 2], lambda x: b"", lambda x: b"PK" + x])
def test_damaged_safetensors_are_refused(damage, tmp_path):
    save_safetensors({"x": torch.arange(100)}, tmp_path / "x", {})
    (tmp_path / "x").write_bytes(damage((tmp_path / "x").read_bytes()))
    with pytest.raises(ValueError, match="x' cannot be read .* allowed: a whole file"):
        read_safetensors(tmp_path / "x")
    with pytest.raises(ValueError, match="is no file"):
        read_safetensors(tmp_path / "y")


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
@pytest.mark.parametrize("write", [save, lambda tensors, path: save_safetensors(tensors, path, {})])
def test_a_full_disk_is_an_os_error(write):
    with pytest.raises(OSError) as error:
        write({"x": torch.zeros(100_000)}, FULL)
    assert error.value.errno == errno.ENOSPC
