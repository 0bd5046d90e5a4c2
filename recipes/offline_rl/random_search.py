"""Augmented random search: improves a linear policy by trying small changes to it, without gradients.

Mania, Guy, Recht, *Simple random search provides a competitive approach to reinforcement learning* (2018), version
V2-t. All policies are kept, so that data of graded quality can be generated.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairseq_plugin.data import stored_arrays
from fairseq_plugin.data.episode_folder import Episode

from ..shared.working_folder import atomic_write


class Settings(NamedTuple):
    """Settings of the search: number of directions tried, number of best ones used, size of the noise and of a step."""

    directions: int = 16
    best: int = 8
    noise: float = 0.03
    step: float = 0.02
    alive: float = 0.0  # reward per step for not falling, which the search ignores


#: Name in gymnasium, without the version -> the paper's settings for robots that can fall, with fewer directions.
SETTINGS = {"Hopper": Settings(8, 4, 0.025, 0.01, 1.0), "Walker2d": Settings(16, 8, 0.025, 0.03, 1.0)}

#: The arrays of a search on disk: time and statistics of states, then the parameters and returns of all policies.
_KEPT = ("seconds", "seen", "mean", "squares", "weights", "means", "stds", "totals")


class Policy(NamedTuple):
    """action = weights · (state - mean) / std, clipped to -1 to 1 and scaled to the environment's range."""

    weights: np.ndarray  # (A, S)
    mean: np.ndarray  # (S,)
    std: np.ndarray  # (S,)
    total: float  # the return of one episode


class Search:
    """A search that continues from the file ``path`` if it exists; its random numbers depend only on the seed.

    Attributes: ``policies``, one before the search and one per iteration; ``seconds``, the time spent so far.
    """

    def __init__(self, environment: Any, settings: Settings, seed: int, path: Path) -> None:
        self.environment, self.settings, self.seed, self.path = environment, settings, seed, path
        states, actions = environment.observation_space.shape[0], environment.action_space.shape[0]
        self.policies: list[Policy] = []
        self.seconds = 0.0
        # Count, mean and sum of squared deviations of all states seen so far (Welford).
        self.seen, self.mean, self.squares = 0, np.zeros(states), np.zeros(states)
        if path.exists():
            self._read()
        else:
            first = Policy(np.zeros((actions, states)), np.zeros(states), np.ones(states), 0.0)
            self._keep(first, np.random.default_rng((seed, 0)))

    def run(self, seconds: float, on_iteration: Callable[["Search"], None]) -> None:
        """Search for ``seconds`` in total, at least one iteration; every iteration is saved."""
        while len(self.policies) == 1 or self.seconds < seconds:
            started = time.monotonic()
            self._iterate(np.random.default_rng((self.seed, len(self.policies))))
            self.seconds += time.monotonic() - started
            self._write()
            on_iteration(self)

    def graded(self, count: int) -> list[Policy]:
        """``count`` policies with about evenly spaced returns, from the first policy to the best one."""
        totals = np.array([policy.total for policy in self.policies])
        targets = np.linspace(totals[0], totals.max(), count)
        return [self.policies[int(np.abs(totals - target).argmin())] for target in targets]

    def _iterate(self, rng: np.random.Generator) -> None:
        """Update the policy along the directions with the highest returns."""
        policy, settings = self.policies[-1], self.settings
        directions = rng.standard_normal((settings.directions, *policy.weights.shape))
        totals = np.zeros((settings.directions, 2))  # with the direction added and subtracted
        for i, direction in enumerate(directions):
            for j, sign in enumerate((1.0, -1.0)):
                changed = policy._replace(weights=policy.weights + sign * settings.noise * direction)
                totals[i, j] = self._play(changed, rng, learn=True)
        best = np.argsort(-totals.max(axis=1))[: settings.best]
        deviation = totals[best].std()
        change = np.tensordot(totals[best, 0] - totals[best, 1], directions[best], axes=1) / settings.best
        weights = policy.weights + settings.step * change / (deviation + 1e-8)
        std = np.sqrt(self.squares / max(self.seen - 1, 1))
        self._keep(Policy(weights, self.mean.copy(), np.where(std > 1e-7, std, 1.0), 0.0), rng)

    def _keep(self, policy: Policy, rng: np.random.Generator) -> None:
        total = self._play(policy, rng, learn=False)
        self.policies.append(policy._replace(total=total))

    def _play(self, policy: Policy, rng: np.random.Generator, learn: bool) -> float:
        """Play an episode; returns its return. ``learn`` updates the statistics of states and subtracts ``alive``."""
        episode = play(self.environment, policy, int(rng.integers(2**31)))
        if not learn:
            return episode.total
        self.seen += len(episode.states)
        states = episode.states.astype(np.float64)
        share = len(states) / self.seen
        shift = states.mean(axis=0) - self.mean
        self.squares += ((states - states.mean(axis=0)) ** 2).sum(axis=0) + shift**2 * len(states) * (1 - share)
        self.mean += share * shift
        return episode.total - self.settings.alive * len(states)

    def _read(self) -> None:
        states, actions = len(self.mean), self.environment.action_space.shape[0]
        allowed = "the search that was kept there; without the file it begins anew"
        seconds, seen, mean, squares, *parts = stored_arrays.read_file(self.path, _KEPT, allowed)
        count = parts[-1].size
        shapes = ((), (), (states,), (states,), (count, actions, states), (count, states), (count, states), (count,))
        for name, values, shape in zip(_KEPT, (seconds, seen, mean, squares, *parts), shapes):
            stored_arrays.check_numbers(f"{self.path}: {name}", values, shape)
        if not count or seconds < 0 or seen < 0 or not (parts[2] > 0).all():
            raise ValueError(f"{self.path} holds no policies, or negative numbers; allowed: {allowed}")
        self.seconds, self.seen, self.mean, self.squares = float(seconds), int(seen), mean, squares
        self.policies = [Policy(*values[:3], float(values[3])) for values in zip(*parts)]

    def _write(self) -> None:
        weights, means, stds, totals = map(np.stack, zip(*self.policies))
        with atomic_write(self.path) as part, open(part, "wb") as file:
            state = {"seconds": self.seconds, "seen": self.seen, "mean": self.mean, "squares": self.squares}
            np.savez(file, weights=weights, means=means, stds=stds, totals=totals, **state)


def play(
    environment: Any, policy: Policy, seed: int, noise: float = 0.0, rng: np.random.Generator | None = None
) -> Episode:
    """Play one episode of ``policy``; ``noise`` is the deviation of Gaussian noise on actions in -1 to 1."""
    low, high = environment.action_space.low, environment.action_space.high
    centre, half = (low + high) / 2.0, (high - low) / 2.0
    states, actions, rewards = [], [], []
    state, _ = environment.reset(seed=seed)
    ended = False
    while not ended:
        scaled_action = policy.weights @ ((state - policy.mean) / policy.std)
        if noise:
            scaled_action = scaled_action + noise * rng.standard_normal(len(scaled_action))
        action = (centre + half * np.clip(scaled_action, -1.0, 1.0)).astype(environment.action_space.dtype)
        states.append(state)
        actions.append(action)
        state, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        ended = terminated or truncated
    return Episode(*(np.asarray(values, dtype=np.float32) for values in (states, actions, rewards)))
