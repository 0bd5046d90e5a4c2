"""Collect your own data of graded quality: ``python -m recipes.offline_rl.collect --env HalfCheetah-v5 --minutes 2``.

Random search improves a linear policy. Policies from the first to the best then play, with some noise on their actions,
and their episodes are the data. An interrupted search continues where it stopped. This is not D4RL.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tqdm import tqdm

from common.command_parser import CommandParser
from common.files.output_files import new_folder
from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription, write_folder

from ..shared.commands import shown_path
from ..shared.scripts import positive_int, positive_number, script
from ..shared.settings import keep_settings
from ..shared.working_folder import working_folder
from .environments import make
from .prepare import summary
from .random_search import SETTINGS, Search, Settings, play

COMMAND = "recipes.offline_rl.collect"


def collect(
    name: str, minutes: float, out: Path, *, grades: int = 5, episodes: int = 20, noise: float = 0.1, seed: int = 1
) -> EpisodeDescription:
    """Search for ``minutes`` in ``out``/search.npz, and write episodes of graded policies to the folder ``out``/data.

    Args:
        grades: number of policies that play, about evenly spaced by return.
        episodes: number of episodes per policy.
        noise: standard deviation of the noise on actions, which are in -1 to 1.

    Raises:
        ValueError: the environment is not supported, or ``out`` contains a search with another environment or seed,
            or other files.
    """
    with working_folder(out, COMMAND, whole={"data": COMMAND}):
        return _collect(name, minutes, out, grades, episodes, noise, seed)


def _collect(
    name: str, minutes: float, out: Path, grades: int, episodes: int, noise: float, seed: int
) -> EpisodeDescription:
    environment = make(name)
    if environment.spec.max_episode_steps is None:
        raise ValueError(f"--env is {name}, whose episodes may never end; allowed: a limit, max_episode_steps")
    settings = SETTINGS.get(name.partition("-")[0], Settings())
    keep_settings(out / "search.json", {"--env": name, "--seed": seed})
    search = Search(environment, settings, seed, out / "search.npz")
    print(f"Searching for {minutes:g} minutes; then {grades} policies play {episodes} episodes each.", flush=True)
    with tqdm(total=60.0 * minutes, desc="search", unit="s", disable=None, bar_format="{l_bar}{bar}{postfix}") as bar:

        def show(search: Search) -> None:
            best = max(policy.total for policy in search.policies)
            bar.set_postfix_str(f"{len(search.policies) - 1} iterations, best return {best:,.0f}")
            bar.update(min(search.seconds, bar.total) - bar.n)

        search.run(60.0 * minutes, show)
    rng = np.random.default_rng((seed, 2**31))
    episodes_played: list[Episode] = []
    with tqdm(total=grades * episodes, desc="episodes", unit="", disable=None) as bar:
        for policy in search.graded(grades):
            for _ in range(episodes):
                episodes_played.append(play(environment, policy, int(rng.integers(2**31)), noise, rng))
                bar.update()
    space = environment.action_space
    with new_folder(out / "data", COMMAND) as folder:
        return write_folder(folder, {"train": episodes_played}, f"{name}, own data", name, (space.low, space.high))


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.offline_rl.collect", description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="HalfCheetah-v5", metavar="NAME", help="of gymnasium (%(default)s)")
    parser.add_argument("--minutes", type=positive_number, default=2.0, help="of search (%(default)s)")
    parser.add_argument("--grades", type=positive_int, default=5, help="policies that play (%(default)s)")
    parser.add_argument("--episodes", type=positive_int, default=20, help="of each policy (%(default)s)")
    parser.add_argument("--noise", type=float, default=0.1, help="deviation of it on actions of -1 to 1 (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: work/offline_rl/ENV; the data is in DIR/data")
    return parser


@script("collect")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    if not 0.0 <= options.noise < float("inf") or options.seed < 0:
        raise ValueError(f"--noise is {options.noise} and --seed {options.seed}; allowed: at least 0 and finite")
    out = (options.out or Path("work/offline_rl") / options.env).absolute()
    description = collect(
        options.env,
        options.minutes,
        out,
        grades=options.grades,
        episodes=options.episodes,
        noise=options.noise,
        seed=options.seed,
    )
    print(f"  {summary(description)}")
    print(f"Ready: {shown_path(out / 'data')}. The commands to train with are in recipes/offline_rl/README.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
