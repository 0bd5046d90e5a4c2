"""Tensors that are saved are read again, and a full disk is an OSError."""

import errno
from pathlib import Path

import pytest
import torch

from common.tensor_files import save

FULL = Path("/dev/full")


def test_what_is_saved_is_read(tmp_path):
    save({"x": torch.arange(3)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", weights_only=True)["x"].tolist() == [0, 1, 2]


@pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")
def test_a_full_disk_is_an_os_error():
    with pytest.raises(OSError) as error:
        save({"x": torch.zeros(100_000)}, FULL)
    assert error.value.errno == errno.ENOSPC


class Unwritable:
    """What cannot be pickled, for a reason of its own."""

    def __reduce__(self):
        raise RuntimeError("not to be written")


def test_another_error_stays_what_it_is(tmp_path):
    with pytest.raises(RuntimeError, match="not to be written"):
        save({"x": Unwritable()}, tmp_path / "x.pt")
