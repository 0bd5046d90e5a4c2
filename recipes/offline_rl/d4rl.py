"""The nine MuJoCo data sets of D4RL in the Flowformer paper's Table 7: their robots, and normalised scores."""

from typing import NamedTuple

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.sources import D4RL


class Robot(NamedTuple):
    """An environment of D4RL: gymnasium's name, sizes, the returns of scores 0 and 100, and the authors' targets."""

    environment: str
    state_size: int
    action_size: int
    random_return: float
    expert_return: float
    targets: tuple[float, float]


#: Versions are -v4, because -v5 changed the rewards. D4RL itself used MuJoCo 2.0 and older versions.
ROBOTS = {
    "halfcheetah": Robot("HalfCheetah-v4", 17, 6, -280.178953, 12135.0, (12000.0, 6000.0)),
    "hopper": Robot("Hopper-v4", 11, 3, -20.272305, 3234.3, (3600.0, 1800.0)),
    "walker2d": Robot("Walker2d-v4", 17, 6, 1.629008, 4592.3, (5000.0, 2500.0)),
}


def robot_of(dataset: str) -> Robot | None:
    """The environment of one of the nine data sets; None for any other data set."""
    return ROBOTS[dataset.partition("-")[0]] if dataset in D4RL else None


def score_range(described: EpisodeDescription) -> tuple[float, float]:
    """The returns of scores 0 and 100: D4RL's constants for its data sets, else the lowest and highest in the data."""
    robot = robot_of(described.name)
    return (described.lowest, described.highest) if robot is None else (robot.random_return, robot.expert_return)


def score(described: EpisodeDescription, total: float) -> float:
    """The normalised score of a return; 0 if all returns in the data are equal."""
    low, high = score_range(described)
    return 100.0 * (total - low) / (high - low) if high > low else 0.0
