"""Prepare recorded episodes for fairseq: ``python -m recipes.offline_rl.prepare --dataset hopper-medium-v2``.

The nine MuJoCo data sets of D4RL are downloaded. ``--file`` uses an HDF5 file of any data set that you already have, in
D4RL's layout or Minari's (``main_data.hdf5``).
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription, write_folder

from ..shared.commands import shown_path
from ..shared.download import find_file
from ..shared.scripts import script
from ..shared.sources import D4RL, SOURCES
from .d4rl import Robot, robot_of
from .hdf5_files import read_hdf5

COMMAND = "recipes.offline_rl.prepare"


def prepare(
    name: str,
    out: Path,
    file: Path | None = None,
    environment: str | None = None,
    action_range: tuple[float, float] = (-1.0, 1.0),
) -> EpisodeDescription:
    """Write data set ``name`` to the folder ``out``; downloads are kept next to it.

    Raises:
        ValueError: the name, the file or the range of actions is invalid, or ``out`` contains files that this function
            did not write; nothing is written then.
        DownloadFailed: the download failed or is incomplete.
    """
    robot = robot_of(name)
    if file is None and robot is None:
        raise ValueError(f"--dataset is {name}; allowed without --file: {', '.join(D4RL)}")
    with new_folder(out, COMMAND) as folder:
        episodes = _read(name, robot, file or find_file(None, SOURCES[name], out.parent / "downloads"))
        low, high = action_range
        environment = environment or (robot.environment if robot else "")
        return write_folder(folder, {"train": episodes}, name, environment, ([low], [high]))


def _read(name: str, robot: Robot | None, file: Path) -> list[Episode]:
    """Read the episodes in ``file``; their sizes must be those of ``robot`` unless that is None."""
    episodes = read_hdf5(file)
    sizes = (episodes[0].states.shape[1], episodes[0].actions.shape[1])
    if robot is not None and sizes != (robot.state_size, robot.action_size):
        raise ValueError(
            f"{name} has states and actions of {sizes[0]} and {sizes[1]} numbers; allowed: {robot.state_size} and "
            f"{robot.action_size}, as {robot.environment}, or another --dataset"
        )
    return episodes


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.offline_rl.prepare", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True, metavar="NAME", help=f"{', '.join(D4RL)}; or any with --file")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: work/offline_rl/NAME")
    parser.add_argument("--file", type=Path, metavar="HDF5", help="a file you have, of D4RL or Minari")
    parser.add_argument("--env", metavar="NAME", help="gymnasium's name of the environment; known for the nine sets")
    parser.add_argument(
        "--action-range",
        type=float,
        nargs=2,
        default=(-1.0, 1.0),
        metavar=("LOW", "HIGH"),
        help="of each number of an action (-1 1)",
    )
    return parser


@script("prepare")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    out = (options.out or Path("work/offline_rl") / options.dataset).absolute()
    description = prepare(options.dataset, out, options.file, options.env, tuple(options.action_range))
    print(f"  {summary(description)}")
    print(f"Ready: {shown_path(out)}. The commands to train with are in recipes/offline_rl/README.md.")
    return 0


def summary(described: EpisodeDescription) -> str:
    """Sizes and returns of a data set in one line."""
    return (
        f"{described.name}: states of {described.state_size} numbers, actions of {described.action_size}, up to "
        f"{described.longest} steps; returns {described.lowest:,.0f} to {described.highest:,.0f}, "
        f"mean {described.average:,.0f}"
    )


if __name__ == "__main__":
    sys.exit(main())
