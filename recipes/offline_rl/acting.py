"""Let a trained model act in an environment, many episodes at once."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_hub_interface import DecisionHubInterface

from .environments import make_for

#: Episodes that are played side by side.
AT_ONCE = 32


class Played(NamedTuple):
    """One episode."""

    target: float
    seed: int
    total: float  # its return
    steps: int


class Evaluation(NamedTuple):
    """Episodes of one model, and what its actions cost, of all side by side, without the environment."""

    episodes: list[Played]
    milliseconds: float  # an action, the mean


def load(checkpoint: Path) -> DecisionHubInterface:
    """The model of a checkpoint.

    Raises:
        ValueError: the file does not exist or holds none that acts.
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
    """Play ``episodes`` episodes of the environment ``name`` for each target, with seeds from ``seed`` on.

    ``context`` is as for ``DecisionHubInterface.reset``.

    Raises:
        ValueError: an environment that does not fit the model (see ``make_for``), or a context that the model does not
            allow.
    """
    rows = [(float(target), seed + i) for target in targets for i in range(episodes)]
    played: list[Played] = []
    seconds, steps = 0.0, 0
    with tqdm(total=len(rows), desc="  episodes", unit="", leave=False, disable=None) as bar:
        for begin in range(0, len(rows), AT_ONCE):
            chosen = rows[begin : begin + AT_ONCE]
            part, spent, count = _play_together(hub, name, chosen, context)
            played, seconds, steps = [*played, *part], seconds + spent, steps + count
            bar.update(len(chosen))
    return Evaluation(played, 1000.0 * seconds / steps)


def _play_together(
    hub: DecisionHubInterface, name: str, rows: Sequence[tuple[float, int]], context: int | str | None
) -> tuple[list[Played], float, int]:
    """The episodes, seconds for actions, and how often actions were asked for.

    A row that has ended keeps its last state and gets no reward, which changes nothing for the others.
    """
    environments = [make_for(name, hub.described, hub.task.max_episode_length) for _ in rows]
    states = np.stack([one.reset(seed=seed)[0] for one, (_, seed) in zip(environments, rows)])
    hub.reset([target for target, _ in rows], context)
    totals, lengths, running = np.zeros(len(rows)), np.zeros(len(rows), dtype=int), set(range(len(rows)))
    rewards: np.ndarray | None = None
    seconds, asked = 0.0, 0
    while running:
        started = time.perf_counter()
        actions = hub.act(states, rewards)
        seconds, asked = seconds + time.perf_counter() - started, asked + 1
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
    return played, seconds, asked
