"""The nine MuJoCo data sets of D4RL in the Flowformer paper's Table 7: where they are, and how returns are scored."""

from pathlib import Path
from typing import NamedTuple

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.download import DownloadFailed, check_digest, download

ADDRESS = "http://rail.eecs.berkeley.edu/datasets/offline_rl/gym_mujoco_v2"


class Robot(NamedTuple):
    """An environment of D4RL: gymnasium's name, sizes, the returns that score 0 and 100, and the authors' targets."""

    environment: str
    state_size: int
    action_size: int
    random_return: float
    expert_return: float
    targets: tuple[float, float]


class File(NamedTuple):
    """Size in bytes and checksum of a data set's file, as TensorFlow Datasets lists them."""

    size: int
    sha256: str


#: The version -v4, because -v5 changed the rewards. D4RL itself ran MuJoCo 2.0 and older versions.
ROBOTS = {
    "halfcheetah": Robot("HalfCheetah-v4", 17, 6, -280.178953, 12135.0, (12000.0, 6000.0)),
    "hopper": Robot("Hopper-v4", 11, 3, -20.272305, 3234.3, (3600.0, 1800.0)),
    "walker2d": Robot("Walker2d-v4", 17, 6, 1.629008, 4592.3, (5000.0, 2500.0)),
}
FILES = {
    "halfcheetah-medium-expert-v2": File(
        474_567_252, "015db75dae5bbe8e94029b71fa0bafc2073365df0c94744e71031189f3f79c06"
    ),
    "hopper-medium-expert-v2": File(304_537_315, "9d51ad87f8c905be3880d84c6140bcdb7fbf39a19e046a237f238ba34fec9e26"),
    "walker2d-medium-expert-v2": File(462_197_079, "6b8d7f868c45bbaedf460be797fb7271b46dee6ebe45fe7a64319f2005b59a04"),
    "halfcheetah-medium-v2": File(237_727_262, "41324e8487a9556d8cfa4538827f8937f4d63dae3030825ebc9f3a726ed08ca0"),
    "hopper-medium-v2": File(152_756_557, "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0"),
    "walker2d-medium-v2": File(232_254_996, "cf00f43add04c17fdfc2958dd581dea0851b2e5bedbe6fda073758a8f841aeda"),
    "halfcheetah-medium-replay-v2": File(
        59_448_533, "48d494a4770c11f48260736dec090b78bdca8375647ed4d24bfa5b6610c7f683"
    ),
    "hopper-medium-replay-v2": File(75_854_457, "e121c5f7c9857a307baa9edc6a2c3b48e85fedb9ac316ecddd0f48ca7ef4e39b"),
    "walker2d-medium-replay-v2": File(86_323_963, "e75de96a4f77acf7d4e0d6fdf0d7ccb177c26c44bb4388e4fd99f543ccfa18db"),
}


def robot_of(dataset: str) -> Robot | None:
    """The environment of one of the nine data sets; None for any other data set."""
    return ROBOTS[dataset.partition("-")[0]] if dataset in FILES else None


def fetch(dataset: str, downloads: Path) -> Path:
    """Download the file of a data set unless it is there; returns it.

    Raises:
        ValueError: what is there is another file.
        DownloadFailed: it could not be downloaded whole.
    """
    name = dataset.replace("-", "_").replace("_v2", "-v2") + ".hdf5"
    path, file = downloads / name, FILES[dataset]
    if path.exists():
        check_digest(path, file.sha256)
    else:
        try:
            download(f"{ADDRESS}/{name}", path, file.size, file.sha256)
        except DownloadFailed as error:
            raise DownloadFailed(f"{error}. Run again to continue, or give a copy you have: --file {name}") from error
    return path


def score_range(described: EpisodeDescription) -> tuple[float, float]:
    """The returns that score 0 and 100: D4RL's constants for its data sets, else the data's own lowest and highest."""
    robot = robot_of(described.name)
    return (described.lowest, described.highest) if robot is None else (robot.random_return, robot.expert_return)


def score(described: EpisodeDescription, total: float) -> float:
    """The normalised score of a return; 0 where all returns of the data are one."""
    low, high = score_range(described)
    return 100.0 * (total - low) / (high - low) if high > low else 0.0
