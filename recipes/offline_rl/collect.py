"""Collect your own data of graded quality: ``python -m recipes.offline_rl.collect --env HalfCheetah-v5``.

Augmented random search (Mania, Guy and Recht, 2018, version V2-t) improves a linear policy. Policies from the first to
the best then play, with some noise on their actions, and their episodes are the data. This is not D4RL.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
from tqdm import tqdm

from fairseq_plugin.data.episode_folder import Episode

from . import data


class Settings(NamedTuple):
    """Directions that are tried, the best ones that are used, and the sizes of the noise and of a step."""

    directions: int = 16
    best: int = 8
    noise: float = 0.03
    step: float = 0.02
    alive: float = 0.0  # reward for each step without a fall, which the search ignores


#: Deviation of the noise on actions of -1 to 1 in the data.
NOISE = 0.1
#: Robots that can fall: the paper's settings, with fewer directions.
SETTINGS = {"Hopper": Settings(8, 4, 0.025, 0.01, 1.0), "Walker2d": Settings(16, 8, 0.025, 0.03, 1.0)}


class Policy(NamedTuple):
    """action = weights · (state - mean) / std, clipped to -1 to 1 and scaled to the environment's range."""

    weights: np.ndarray  # (A, S)
    mean: np.ndarray  # (S,)
    std: np.ndarray  # (S,)
    total: float = 0.0  # the return of one episode


def make(name: str) -> gymnasium.Env:
    """An environment whose states and actions are vectors of real numbers, and whose episodes end."""
    environment = gymnasium.make(name)
    for kind, space in (("states", environment.observation_space), ("actions", environment.action_space)):
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise SystemExit(f"--env is {name}, whose {kind} are {space}; allowed: a Box of one dimension")
    if not np.isfinite([environment.action_space.low, environment.action_space.high]).all():
        raise SystemExit(f"--env is {name}, whose actions have no finite range; allowed: a finite one")
    if environment.spec.max_episode_steps is None:
        raise SystemExit(f"--env is {name}, whose episodes may never end; allowed: a limit, max_episode_steps")
    return environment


def play(environment: gymnasium.Env, policy: Policy, seed: int, rng: np.random.Generator | None = None) -> Episode:
    """Play an episode, with Gaussian noise on actions in -1 to 1 if there is ``rng``."""
    low, high = environment.action_space.low, environment.action_space.high
    steps: list[tuple] = []
    state, _ = environment.reset(seed=seed)
    over = False
    while not over:
        action = policy.weights @ ((state - policy.mean) / policy.std)
        if rng is not None:
            action = action + NOISE * rng.standard_normal(len(action))
        action = ((low + high) / 2 + (high - low) / 2 * np.clip(action, -1, 1)).astype(environment.action_space.dtype)
        after, reward, terminated, truncated, _ = environment.step(action)
        steps.append((state, action, float(reward)))
        state, over = after, terminated or truncated
    return Episode(*(np.asarray(values, dtype=np.float32) for values in zip(*steps)))


def search(environment: gymnasium.Env, settings: Settings, iterations: int) -> list[Policy]:
    """The first policy, which does nothing, and the one after each iteration."""
    size = environment.observation_space.shape[0]
    # Count, mean and sum of squared deviations of all states that were seen.
    seen, mean, squares = 0, np.zeros(size), np.zeros(size)
    policy, policies = Policy(np.zeros((environment.action_space.shape[0], size)), np.zeros(size), np.ones(size)), []

    def kept(policy: Policy, rng: np.random.Generator) -> Policy:
        policies.append(policy._replace(total=play(environment, policy, int(rng.integers(2**31))).total))
        return policies[-1]

    policy = kept(policy, np.random.default_rng((1, 0)))
    for iteration in (bar := tqdm(range(1, iterations + 1), "search")):
        rng = np.random.default_rng((1, iteration))
        directions = rng.standard_normal((settings.directions, *policy.weights.shape))
        totals = np.zeros((settings.directions, 2))  # with the direction added and subtracted
        for i, direction in enumerate(directions):
            for j, sign in enumerate((1.0, -1.0)):
                changed = policy._replace(weights=policy.weights + sign * settings.noise * direction)
                episode = play(environment, changed, int(rng.integers(2**31)))
                totals[i, j] = episode.total - settings.alive * len(episode.states)
                states = episode.states.astype(np.float64)
                seen += len(states)
                share, shift = len(states) / seen, states.mean(axis=0) - mean
                squares += ((states - states.mean(axis=0)) ** 2).sum(axis=0) + shift**2 * len(states) * (1 - share)
                mean = mean + share * shift
        best = np.argsort(-totals.max(axis=1))[: settings.best]
        change = np.tensordot(totals[best, 0] - totals[best, 1], directions[best], axes=1) / settings.best
        weights = policy.weights + settings.step * change / (totals[best].std() + 1e-8)
        std = np.sqrt(squares / max(seen - 1, 1))
        policy = kept(Policy(weights, mean, np.where(std > 1e-7, std, 1.0)), rng)
        bar.set_postfix_str(f"best return {max(policy.total for policy in policies):,.0f}")
    return policies


def collect(name: str, out: Path, iterations: int, grades: int = 5, episodes: int = 20) -> None:
    """Write episodes of ``grades`` policies, about evenly spaced by their returns, to ``out``."""
    environment = make(name)
    policies = search(environment, SETTINGS.get(name.partition("-")[0], Settings()), iterations)
    totals = np.array([policy.total for policy in policies])
    chosen = [int(np.abs(totals - x).argmin()) for x in np.linspace(totals[0], totals.max(), grades)]
    rng = np.random.default_rng((1, 2**31))
    chosen = tqdm(np.repeat(chosen, episodes), "episodes")
    played = [play(environment, policies[i], int(rng.integers(2**31)), rng) for i in chosen]
    space = environment.action_space
    data.write(out, played, f"{name}, own data", name, (space.low, space.high))


def main(arguments: list[str] | None = None) -> None:
    """Collect."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="HalfCheetah-v5", metavar="NAME", help="of gymnasium (%(default)s)")
    parser.add_argument("--iterations", type=int, default=100, help="of the search (%(default)s)")
    parser.add_argument("--grades", type=int, default=5, help="policies that play (%(default)s)")
    parser.add_argument("--episodes", type=int, default=20, help="of each policy (%(default)s)")
    parser.add_argument("--out", type=Path, help="default: work/offline_rl/ENV")
    options = parser.parse_args(arguments)
    out = options.out or Path("work/offline_rl") / options.env
    collect(options.env, out, options.iterations, options.grades, options.episodes)


if __name__ == "__main__":
    main()
