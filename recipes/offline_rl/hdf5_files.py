"""Read episodes from HDF5 files: D4RL's layout, and the ``main_data.hdf5`` of Minari, without either package."""

from pathlib import Path
from typing import Any

import numpy as np

from fairseq_plugin.data.episode_folder import Episode, check_episode

from ..shared.scripts import RecipeFailed

_D4RL = ("observations", "actions", "rewards", "terminals", "timeouts")
_MINARI = ("observations", "actions", "rewards", "terminations", "truncations")
_ALLOWED = f"D4RL's layout ({', '.join(_D4RL)}), or Minari's (episode_0, ... with {', '.join(_MINARI)})"


def read_hdf5(path: Path) -> list[Episode]:
    """The episodes of a file, in order, each to its end; what follows D4RL's last end is no whole episode and left out.

    Raises:
        ValueError: no such file, one that is cut short or of another layout, lacks a key, or has arrays of unequal
            lengths, discrete actions, values that are not finite, or no episode.
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
    except (OSError, RuntimeError) as error:  # RuntimeError: data that cannot be decompressed
        raise ValueError(f"{path} cannot be read: {error}; allowed: a whole HDF5 file, {_ALLOWED}") from error
    if not episodes:
        raise ValueError(f"{path} has no episode that ends; allowed: at least one step in terminals or timeouts")
    return [check_episode(one, f"{path}: episode {i}") for i, one in enumerate(episodes)]


def _read_d4rl(path: Path, file: Any) -> list[Episode]:
    arrays = {name: _array(path, file, name) for name in _D4RL}
    lengths = {name: len(values) for name, values in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{path} has arrays of {_shown(lengths)} steps; allowed: one length")
    ended = arrays["terminals"].astype(bool) | arrays["timeouts"].astype(bool)
    ends = np.flatnonzero(ended.reshape(-1)) + 1
    parts = ([values[begin:end] for values in arrays.values()] for begin, end in zip([0, *ends[:-1]], ends))
    return [Episode(states, actions, rewards.reshape(-1)) for states, actions, rewards, *_ in parts]


def _read_minari(path: Path, file: Any) -> list[Episode]:
    """Each group has one observation more than steps: the last was seen after the last action."""
    episodes = []
    for name in sorted((name for name in file if name.startswith("episode_")), key=lambda x: int(x.split("_")[1])):
        arrays = {key: _array(path, file, f"{name}/{key}") for key in _MINARI}
        steps = {key: len(values) for key, values in arrays.items()}
        steps["observations"] -= 1
        if len(set(steps.values())) > 1:
            found = _shown({**steps, "observations": steps["observations"] + 1})
            raise ValueError(f"{path}: {name} has arrays of {found} steps; allowed: one length, observations one more")
        episodes.append(Episode(arrays["observations"][:-1], arrays["actions"], arrays["rewards"]))
    return episodes


def _array(path: Path, file: Any, name: str) -> np.ndarray:
    if name not in file:
        raise ValueError(f"{path} lacks {name}; allowed: {_ALLOWED}")
    if not hasattr(file[name], "shape"):
        inside = ", ".join(file[name])
        raise ValueError(f"{path}: {name} is a group ({inside}); allowed: an array, states of one kind")
    return np.asarray(file[name])


def _shown(lengths: dict[str, int]) -> str:
    return ", ".join(f"{name} {length}" for name, length in lengths.items())
