"""Run a trained model in an environment, many episodes at once."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_hub_interface import DecisionHubInterface

from .environments import make_for

#: Episodes that are played in parallel.
AT_ONCE = 32


class Played(NamedTuple):
    """One episode."""

    target: float
    seed: int
    total: float  # the return
    steps: int


class Evaluation(NamedTuple):
    """Episodes of one model, and the time for actions of all parallel episodes, without the environment's time."""

    episodes: list[Played]
    milliseconds: float  # mean per call of ``act``


def load(checkpoint: Path) -> DecisionHubInterface:
    """Load the model of a checkpoint.

    Raises:
        ValueError: the file does not exist or does not contain a decision model.
    """
    if not checkpoint.is_file():
        raise ValueError(f"CHECKPOINT is {checkpoint}, which is no file; allowed: a checkpoint of fairseq-train")
    return DecisionModel.from_pretrained(str(checkpoint.parent.absolute()), checkpoint.name)


def evaluate(
    hub: DecisionHubInterface,
    name: str,
    targets: Sequence[float],
    episodes: int,
    seed: int = 0,
    context: int | str | None = None,
) -> Evaluation:
    """Play ``episodes`` episodes of the environment ``name`` for each target, with seeds starting at ``seed``.

    ``context`` is as for ``DecisionHubInterface.reset``.

    Raises:
        ValueError: the environment does not match the model (see ``make_for``), or the model does not support the
            context.
    """
    runs = [(float(target), seed + i) for target in targets for i in range(episodes)]
    played: list[Played] = []
    seconds, steps = 0.0, 0
    with tqdm(total=len(runs), desc="  episodes", unit="", leave=False, disable=None) as bar:
        for start in range(0, len(runs), AT_ONCE):
            batch = runs[start : start + AT_ONCE]
            batch_played, batch_seconds, batch_steps = _play_together(hub, name, batch, context)
            played, seconds, steps = (
                [*played, *batch_played],
                seconds + batch_seconds,
                steps + batch_steps,
            )
            bar.update(len(batch))
    return Evaluation(played, 1000.0 * seconds / steps)


def _play_together(
    hub: DecisionHubInterface, name: str, rows: Sequence[tuple[float, int]], context: int | str | None
) -> tuple[list[Played], float, int]:
    """Play episodes in parallel; returns the episodes, the seconds spent in ``act``, and the number of its calls.

    A row that has ended keeps its last state and gets no reward, which does not affect the other rows.
    """
    environments = [make_for(name, hub.described, hub.task.max_episode_length) for _ in rows]
    states = np.stack([environment.reset(seed=seed)[0] for environment, (_, seed) in zip(environments, rows)])
    hub.reset([target for target, _ in rows], context)
    totals, lengths, running = np.zeros(len(rows)), np.zeros(len(rows), dtype=int), set(range(len(rows)))
    rewards: np.ndarray | None = None
    seconds, calls = 0.0, 0
    while running:
        started = time.perf_counter()
        actions = hub.act(states, rewards)
        seconds, calls = seconds + time.perf_counter() - started, calls + 1
        rewards = np.zeros(len(rows))
        for i in sorted(running):
            action = actions[i].astype(environments[i].action_space.dtype)
            states[i], rewards[i], terminated, truncated, _ = environments[i].step(action)
            lengths[i] += 1
            if terminated or truncated:
                running.discard(i)
                environments[i].close()
        totals += rewards
    played = [Played(target, seed, float(totals[i]), int(lengths[i])) for i, (target, seed) in enumerate(rows)]
    return played, seconds, calls
