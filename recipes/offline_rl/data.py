"""Write recorded episodes for fairseq: ``python -m recipes.offline_rl.data hopper-medium-v2 --out work/hopper``.

The nine MuJoCo data sets of D4RL are downloaded. ``--file`` takes an HDF5 file of any other data set, in D4RL's layout
or Minari's (``main_data.hdf5``).
"""

import argparse
import itertools
import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch

from fairseq_plugin.data.episode_folder import Episode, write_folder

URL = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"
#: D4RL's data set -> the SHA-256 of its file, as TensorFlow Datasets lists it.
D4RL = {
    "halfcheetah-medium-expert-v2": "015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06",
    "hopper-medium-expert-v2": "9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26",
    "walker2d-medium-expert-v2": "6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04",
    "halfcheetah-medium-v2": "41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0",
    "hopper-medium-v2": "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0",
    "walker2d-medium-v2": "cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda",
    "halfcheetah-medium-replay-v2": "48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683",
    "hopper-medium-replay-v2": "e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b",
    "walker2d-medium-replay-v2": "e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db",
}
#: Robot -> gymnasium's environment. Version 5 changed the rewards; D4RL itself had MuJoCo 2.0 and older versions.
ROBOTS = {"halfcheetah": "HalfCheetah-v4", "hopper": "Hopper-v4", "walker2d": "Walker2d-v4"}


def read_hdf5(path: Path) -> list[Episode]:
    """The episodes of a file, in order; in D4RL's layout, steps after the last end of an episode are skipped."""
    with h5py.File(path) as file:
        groups = sorted((name for name in file if name.startswith("episode_")), key=lambda name: int(name[8:]))
        if groups:  # Minari's, with an observation after the last action
            read = [[file[f"{name}/{key}"][:] for key in ("observations", "actions", "rewards")] for name in groups]
            return [Episode(states[:-1], actions, rewards.reshape(-1)) for states, actions, rewards in read]
        states, actions, rewards, *ends = (
            file[key][:] for key in ("observations", "actions", "rewards", "terminals", "timeouts")
        )
    cuts = np.flatnonzero(sum(end.reshape(-1) for end in ends)) + 1
    return [
        Episode(states[a:b], actions[a:b], rewards[a:b].reshape(-1)) for a, b in itertools.pairwise([0, *cuts.tolist()])
    ]


def write(out: Path, episodes: list[Episode], *about: object) -> None:
    """Write episodes to a new folder, and print their sizes; ``about`` is as for ``write_folder``."""
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} has files, of earlier data or of something else; allowed: a new folder")
    made = write_folder(out, {"train": episodes}, *about)
    print(f"  {made.name}: {len(episodes):,} episodes of up to {made.longest} steps")
    print(f"  states of {made.state_size} and actions of {made.action_size} numbers")
    print(f"  returns {made.lowest:,.0f} to {made.highest:,.0f}, mean {made.average:,.0f}")


def main(arguments: list[str] | None = None) -> None:
    """Write a data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help=f"{', '.join(D4RL)}; or any with --file")
    parser.add_argument("--out", type=Path, help="default: work/offline_rl/NAME")
    parser.add_argument("--file", type=Path, metavar="HDF5", help="a file of D4RL or Minari")
    parser.add_argument("--env", metavar="NAME", help="gymnasium's name of the environment; known for the nine sets")
    parser.add_argument("--action-range", type=float, nargs=2, default=(-1.0, 1.0), metavar=("LOW", "HIGH"))
    options = parser.parse_args(arguments)
    if not options.file and options.name not in D4RL:
        parser.error(f"NAME is {options.name}; allowed without --file: {', '.join(D4RL)}")
    with tempfile.TemporaryDirectory() as folder:
        file = options.file or Path(folder) / "episodes.hdf5"
        if not options.file:
            url = f"{URL}/{options.name.removesuffix('-v2').replace('-', '_')}-v2.hdf5"
            torch.hub.download_url_to_file(url, str(file), D4RL[options.name])
        episodes = read_hdf5(file)
    environment = options.env or (ROBOTS[options.name.partition("-")[0]] if options.name in D4RL else "")
    low, high = options.action_range
    out = options.out or Path("work/offline_rl") / options.name
    write(out, episodes, options.name, environment, ([low], [high]))


if __name__ == "__main__":
    main()
