"""The cost of an action as an episode grows: ``python -m recipes.offline_rl.cost --models flowformer softmax``.

In milliseconds of CPU time on one thread, for models of the paper's size, with random weights and inputs. An action is
computed from the decoding state, from a window of the last steps, and from all steps; models take turns at every step.
"""

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace

import pandas as pd
import torch
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import FairseqTask
from tqdm import tqdm

from fairseq_plugin import DecisionTransformer
from fairseq_plugin.data.episode_folder import EpisodeDescription

from .. import models
from .compare import SUFFIX

#: Numbers of HalfCheetah's states and actions; steps whose median is taken; repetitions of the slower ways.
STATE, ACTION, RECENT, REPEATS = 17, 6, 20, 5


def build(name: str, steps: int) -> DecisionTransformer:
    """A model of the paper's size for episodes of ``steps`` steps."""
    words = ["data", "--task", "offline_rl", "--criterion", "action_mse", "--arch", name + SUFFIX]
    options = models.model_options(words)
    sizes = ([0.0] * STATE, [1.0] * STATE, [-1.0] * ACTION, [1.0] * ACTION)
    described = EpisodeDescription("random", "", *sizes, steps, 0.0, 0.0, 0.0)
    task = SimpleNamespace(description=described, context=None, max_episode_length=steps)
    return FairseqTask.build_model(task, options).eval()


def milliseconds(function: Callable, *arguments: object) -> float:
    """CPU time of a call."""
    started = time.process_time()
    function(*arguments)
    return 1000.0 * (time.process_time() - started)


@torch.no_grad()
def measure(names: list[str], points: list[int], context: int) -> pd.DataFrame:
    """A row for each model, way and timed call, at each of the steps ``points``."""
    built, rows = {name: build(name, max(points)) for name in names}, []
    sizes = {"returns": 1, "states": STATE, "actions": ACTION}
    episode = {name: torch.randn(1, max(points), size) for name, size in sizes.items()}
    episode["timesteps"] = torch.arange(max(points))[None]
    memories: dict[str, dict] = {name: {} for name in names}
    for step in tqdm(range(1, max(points) + 1), "steps", leave=False):
        now = {name: values[:, step - 1] for name, values in episode.items()}
        action = episode["actions"][:, step - 2] if step > 1 else None
        point = next((x for x in points if x - RECENT < step <= x), None)
        for name, model in built.items():
            tokens = (memories[name], now["returns"], now["states"], now["timesteps"], action)
            rows.append((name, "the state", point, milliseconds(model.extend, *tokens)))
        for way, steps in (("all steps anew", step), (f"the last {context} steps anew", min(step, context))):
            window = [values[:, step - steps : step] for values in episode.values()]
            for _ in range(REPEATS if step in points else 0):
                rows += [(name, way, point, milliseconds(model, *window)) for name, model in built.items()]
    return pd.DataFrame(rows, columns=["architecture", "an action from", "step", "ms"]).dropna()


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    known = sorted(name.removesuffix(SUFFIX) for name in ARCH_MODEL_REGISTRY if name.endswith(SUFFIX))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = ["flowformer", "softmax", "linear"]
    parser.add_argument("--models", nargs="+", choices=known, default=usual, metavar="NAME")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 100, 300, 1000], help="(%(default)s)")
    parser.add_argument("--context", type=int, default=20, metavar="K", help="steps of a window (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = measure(options.models, sorted(options.steps), options.context)
    table = found.pivot_table("ms", ["architecture", "an action from"], "step", aggfunc="median", sort=False).round(1)
    print("Milliseconds of CPU time for an action, one episode, one thread:\n")
    print(table.reset_index().to_markdown(index=False))


if __name__ == "__main__":
    main()
