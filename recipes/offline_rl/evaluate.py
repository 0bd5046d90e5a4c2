"""Returns of trained models: ``python -m recipes.offline_rl.evaluate CHECKPOINT --targets 3000 1000``.

Pass several checkpoints for trainings of one model with several seeds.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fairseq_plugin.data.episode_folder import EpisodeDescription
from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_hub_interface import FULL, DecisionHubInterface
from fairseq_plugin.tasks.offline_rl import read_context

from ..runs import spread
from .collect import make
from .data import D4RL

#: Robot -> D4RL's returns of scores 0 and 100, and the authors' targets.
ROBOTS = {
    "halfcheetah": (-280.178953, 12135.0, [12000.0, 6000.0]),
    "hopper": (-20.272305, 3234.3, [3600.0, 1800.0]),
    "walker2d": (1.629008, 4592.3, [5000.0, 2500.0]),
}
AT_ONCE = 32  # episodes


def scale(described: EpisodeDescription) -> tuple[float, float, list[float]]:
    """The returns of scores 0 and 100, and the usual targets: D4RL's, else by the lowest and highest in the data."""
    if described.name in D4RL:
        return ROBOTS[described.name.partition("-")[0]]
    return described.lowest, described.highest, [described.highest, described.average]


def score(described: EpisodeDescription, total: float) -> float:
    """The normalised score of a return; 0 if all returns in the data are equal."""
    low, high, _ = scale(described)
    return 100.0 * (total - low) / (high - low) if high > low else 0.0


def play(
    hub: DecisionHubInterface, name: str, rows: Sequence[tuple[float, int]], context: int | str | None
) -> pd.DataFrame:
    """Play an episode for each target and seed, side by side; ``context`` is as for ``DecisionHubInterface.reset``.

    One that has ended keeps its last state and gets no reward, which does not affect the others.
    """
    environments = [make(name) for _ in rows]
    low, high = environments[0].action_space.low, environments[0].action_space.high
    if not (np.allclose(low, hub.described.low) and np.allclose(high, hub.described.high)):
        raise SystemExit(
            f"--env is {name}, whose actions are {low.tolist()} to {high.tolist()}; allowed for this checkpoint: "
            f"{hub.described.low} to {hub.described.high}, as in {hub.described.name}"
        )
    states = np.stack([environment.reset(seed=seed)[0] for environment, (_, seed) in zip(environments, rows)])
    hub.reset([target for target, _ in rows], context)
    totals, steps, running = np.zeros(len(rows)), np.zeros(len(rows), int), set(range(len(rows)))
    rewards, seconds, calls = None, 0.0, 0
    while running:
        started = time.perf_counter()
        actions = hub.act(states, rewards)
        seconds, calls = seconds + time.perf_counter() - started, calls + 1
        rewards = np.zeros(len(rows))
        for i in sorted(running):
            action = actions[i].astype(environments[i].action_space.dtype)
            states[i], rewards[i], terminated, truncated, _ = environments[i].step(action)
            steps[i] += 1
            if terminated or truncated:
                running.discard(i)
                environments[i].close()
        totals += rewards
    played = pd.DataFrame(rows, columns=["target", "seed"])
    return played.assign(total=totals, steps=steps, milliseconds=1000.0 * seconds / calls)


def table(described: EpisodeDescription, played: pd.DataFrame) -> pd.DataFrame:
    """A row for each target: deviations are over all episodes, and over checkpoints."""
    rows = []
    for target, found in played.groupby("target", sort=False):
        means = found.groupby("checkpoint").total.mean()
        row = {"return, over episodes": spread(0)(found.total), "over checkpoints": spread(0)(means)}
        row |= {"score": spread(1)(means.map(lambda mean: score(described, mean)))}
        row |= {"least": f"{found.total.min():,.0f}", "most": f"{found.total.max():,.0f}"}
        rows.append({"target": f"{target:,.0f}", **row, "episodes": len(found)})
    return pd.DataFrame(rows)


def main(arguments: list[str] | None = None) -> None:
    """Play, and print the returns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT", help="one for each seed")
    parser.add_argument("--env", metavar="NAME", help="of gymnasium; default: that of the training data")
    parser.add_argument("--targets", type=float, nargs="+", help="returns that are wanted; default: see the README")
    parser.add_argument("--episodes", type=int, default=10, help="for each target (%(default)s)")
    about = "steps that an action is computed from, anew; full: all of them, from a state; default: as in training"
    parser.add_argument("--context", metavar=f"K|{FULL}", help=about)
    parser.add_argument("--seed", type=int, default=0, help="of the first episode (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print every episode as JSON in place of a table")
    options = parser.parse_args(arguments)
    context = None if options.context is None else read_context("--context", options.context) or FULL
    hubs = [DecisionModel.from_pretrained(str(x.parent.absolute()), x.name) for x in options.checkpoints]
    described = hubs[0].described
    if any(hub.described != described for hub in hubs):
        parser.error("CHECKPOINT are trainings on different data; allowed: on the same data")
    name = options.env or described.environment
    if not options.env and (not name or ":" in name):  # gymnasium imports the module before a colon
        parser.error(
            f"--env is not given, and the data names {name!r}; allowed: your word for it, --env {name or 'NAME'}"
        )
    targets = options.targets or scale(described)[2]
    rows = [(float(target), options.seed + i) for target in targets for i in range(options.episodes)]
    parts = [
        play(hub, name, rows[i : i + AT_ONCE], context).assign(checkpoint=str(path))
        for hub, path in zip(hubs, options.checkpoints)
        for i in range(0, len(rows), AT_ONCE)
    ]
    played = pd.concat(parts, ignore_index=True)
    if options.json:
        print(json.dumps(played.to_dict("records")))
        return
    low, high, _ = scale(described)
    print(f"\n{table(described, played).to_markdown(index=False, disable_numparse=True)}\n")
    print(f"* score: 0 for a return of {low:,.1f}, 100 for {high:,.1f}")
    low, high = described.lowest, described.highest
    print(f"* {described.name}: returns {low:,.0f} to {high:,.0f}, mean {described.average:,.0f}")
    print(f"* an action took {played.milliseconds.mean():.1f} ms, of up to {AT_ONCE} episodes side by side together")


if __name__ == "__main__":
    main()
