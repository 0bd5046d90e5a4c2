"""Read episodes from HDF5 files in D4RL's layout or Minari's (``main_data.hdf5``), without these packages."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fairseq_plugin.data.episode_folder import Episode, check_episode

from ..shared.scripts import RecipeFailed

_D4RL = ("observations", "actions", "rewards", "terminals", "timeouts")
_MINARI = ("observations", "actions", "rewards", "terminations", "truncations")
_ALLOWED = f"D4RL's layout ({', '.join(_D4RL)}), or Minari's (episode_0, ... with {', '.join(_MINARI)})"


def read_hdf5(path: Path) -> list[Episode]:
    """Read the episodes of a file, in order; in D4RL's layout, steps after the last end of an episode are skipped.

    Raises:
        ValueError: the file does not exist, is truncated, has another layout, lacks a key or has no episode; its arrays
            have unequal lengths, wrong dimensions, complex numbers, discrete actions, values that are not finite, or
            more bytes than this machine's memory; or they are stored in other files.
        RecipeFailed: h5py is not installed.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise RecipeFailed(f"HDF5 files need h5py ({error}). Run: pip install '.[fairseq,rl]'") from error
    if not path.is_file():
        raise ValueError(f"--file is {path}, which is no file; allowed: an HDF5 file")
    try:
        with h5py.File(path, "r") as file:
            minari = any(name.startswith("episode_") for name in file)
            episodes = _read_minari(path, file) if minari else _read_d4rl(path, file)
    except (OSError, RuntimeError, KeyError, MemoryError) as error:  # RuntimeError: decompression failed
        raise ValueError(f"{path} cannot be read: {error}; allowed: a whole HDF5 file, {_ALLOWED}") from error
    if not episodes:
        raise ValueError(f"{path} has no episode that ends; allowed: at least one step in terminals or timeouts")
    return [check_episode(episode, f"{path}: episode {i}") for i, episode in enumerate(episodes)]


def _read_d4rl(path: Path, file: Any) -> list[Episode]:
    arrays = {name: _array(path, file, name) for name in _D4RL}
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path} has arrays of {_shown(lengths)} steps; allowed: one length")
    ended = arrays["terminals"].astype(bool) | arrays["timeouts"].astype(bool)
    ends = np.flatnonzero(ended.reshape(-1)) + 1
    episode_arrays = ([values[start:end] for values in arrays.values()] for start, end in zip([0, *ends[:-1]], ends))
    return [Episode(states, actions, rewards.reshape(-1)) for states, actions, rewards, *_ in episode_arrays]


def _read_minari(path: Path, file: Any) -> list[Episode]:
    """Read groups; each has one observation more than steps, the one after the last action."""
    episodes = []
    for name in sorted((name for name in file if name.startswith("episode_")), key=partial(_number, path)):
        arrays = {key: _array(path, file, f"{name}/{key}") for key in _MINARI}
        steps = {key: len(values) for key, values in arrays.items()}
        steps["observations"] -= 1
        if len(set(steps.values())) > 1:
            shown_lengths = _shown({**steps, "observations": steps["observations"] + 1})
            raise ValueError(
                f"{path}: {name} has arrays of {shown_lengths} steps; allowed: one length, observations one more"
            )
        episodes.append(Episode(arrays["observations"][:-1], arrays["actions"], arrays["rewards"].reshape(-1)))
    return episodes


def _number(path: Path, name: str) -> int:
    number = name.removeprefix("episode_")
    if not (number.isascii() and number.isdigit()):
        raise ValueError(f"{path} has the group {name}; allowed: episode_0, episode_1, ...")
    return int(number)


def _array(path: Path, file: Any, name: str) -> np.ndarray:
    """Read an array: states and actions are (T, numbers), all others (T,) or (T, 1)."""
    stored = _inside(path, file, name)
    if not hasattr(stored, "shape"):
        raise ValueError(f"{path}: {name} is a group ({', '.join(stored)}); allowed: an array, states of one kind")
    per_step = name.rpartition("/")[2] not in ("observations", "actions")
    if stored.ndim not in (1, 2) or (per_step and stored.shape[1:] not in ((), (1,))):
        allowed = "(steps,)" if per_step else "(steps, numbers)"
        raise ValueError(f"{path}: {name} has shape {stored.shape}; allowed: {allowed}")
    if stored.dtype.kind not in "biuf":
        raise ValueError(f"{path}: {name} holds {stored.dtype}; allowed: real numbers")
    memory = psutil.virtual_memory().total
    if stored.nbytes > memory:
        raise ValueError(
            f"{path}: {name} has shape {stored.shape}, {stored.nbytes:,} bytes; allowed here: at most {memory:,}, the "
            "memory of this machine"
        )
    return np.asarray(stored)


def _inside(path: Path, file: Any, name: str) -> Any:
    """Return the group or array ``name`` of the file. Links are never followed, not even to check their targets.

    Raises:
        ValueError: ``name`` does not exist, a part of it is a link, or its data is in another file, as HDF5 allows.
    """
    import h5py

    stored, parts = file, name.split("/")
    for i, part in enumerate(parts):
        links = stored.id.links if isinstance(stored, h5py.Group) else None
        if links is None or not links.exists(part.encode()):
            raise ValueError(f"{path} lacks {name}; allowed: {_ALLOWED}")
        if links.get_info(part.encode()).type != h5py.h5l.TYPE_HARD:
            raise ValueError(f"{path}: {'/'.join(parts[: i + 1])} is a link; allowed: arrays in the file itself")
        stored = stored[part]
    if getattr(stored, "is_virtual", False) or getattr(stored, "external", None):
        raise ValueError(f"{path}: {name} lies in another file; allowed: arrays in the file itself")
    return stored


def _shown(lengths: dict[str, int]) -> str:
    return ", ".join(f"{name} {length}" for name, length in lengths.items())
