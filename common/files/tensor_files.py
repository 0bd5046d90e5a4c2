"""Tensors on disk, written by torch or as safetensors; see ``checkpoints`` for reading torch's files.

Damaged files are rejected: safetensors files hold a digest of their content, and the zip files of torch and numpy
have checksums. torch does not check them, and numpy only those of arrays that are read.
"""

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: The key of the digest in the metadata of a safetensors file.
DIGEST = "sha256"
_READ_AT_ONCE = 2**22


def save(content: Any, path: Path) -> None:
    """``torch.save`` to ``path``.

    Raises:
        OSError: the file cannot be written, for example on a full disk, for which torch's own error is about positions.
    """
    with open(path, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def save_safetensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` and text ``metadata`` to ``path`` as safetensors, with a digest of both.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors.torch import save as to_bytes

    copies = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}  # no shared memory
    with open(path, "wb") as file:
        file.write(to_bytes(copies, {**metadata, DIGEST: digest(copies, metadata)}))


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors, on the CPU, and the metadata in a file of ``save_safetensors``. No code from the file is run.

    Raises:
        ValueError: the file is missing, cut short, of another format, or without the digest of its content.
    """
    from safetensors import safe_open

    if not path.is_file():
        raise ValueError(f"{str(path)!r} is no file; allowed: a file of safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            tensors, about = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except Exception as error:  # safetensors raises arbitrary exceptions for a broken file
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{str(path)!r} cannot be read ({reason}); allowed: a whole file of safetensors") from error
    stored = about.pop(DIGEST, None)
    if stored is None:
        raise ValueError(f"{str(path)!r} has no digest of its content; allowed: a file that this version wrote")
    if stored != digest(tensors, about):
        raise ValueError(f"{str(path)!r} is damaged: its digest is of another content; allowed: the file as written")
    return tensors, about


def digest(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> str:
    """SHA-256 of names, shapes, dtypes and values of ``tensors``, and of the metadata ``about`` them; O(size)."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        # contiguous_format, because a tensor of one number may have any stride
        dense = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        sha.update(dense.reshape(-1).view(torch.uint8).numpy())
    for name, text in sorted((about or {}).items()):
        sha.update(f"{len(name)} {len(text)} {name}{text}\n".encode())
    return sha.hexdigest()


def check_parts(path: Path) -> None:
    """Raise ValueError unless each part of a zip file of torch or numpy matches the checksum in its header.

    A checksum of 0 is ignored: torch writes it if computing checksums is turned off. O(unpacked size of the parts), in
    constant memory: the whole file is read once, which takes 0.2 s for a checkpoint of 500 MB in the system's cache.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                with archive.open(part) as content:
                    while part.CRC and content.read(_READ_AT_ONCE):
                        pass
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile also raises arbitrary exceptions for a broken file, which may quote all of it
        reason = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ValueError(f"a part of it is damaged ({reason})") from error
