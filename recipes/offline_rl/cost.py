"""The cost of an action as an episode grows: ``python -m recipes.offline_rl.cost --archs flowformer,softmax,linear``.

In milliseconds of CPU time on one thread, for models of the paper's size, with random weights and inputs. An action is
computed in three ways: from a window of the last steps, from all steps, and from the decoding state. The models take
turns at every step, so that other load on the machine affects all of them.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace

import torch
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import FairseqTask
from omegaconf import OmegaConf
from tqdm import tqdm

from common.command_parser import CommandParser
from fairseq_plugin import DecisionTransformer
from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.architectures import architectures_of
from ..shared.scripts import command_line, positive_int, script
from ..shared.tables import Table, as_text, describe_run
from .compare import DEFAULT_NAMES, SUFFIX

#: Sizes of HalfCheetah's states and actions.
_STATE, _ACTION = 17, 6
#: Each number from the state is the median of this many steps; the slower ways are repeated this often.
_RECENT, _REPEATS = 20, 5
#: (architecture, way) -> milliseconds at each measured step.
Costs = dict[tuple[str, str], list[float]]


def build(name: str, steps: int) -> DecisionTransformer:
    """A model of the paper's size for episodes of ``steps`` steps."""
    config = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name + SUFFIX])
    OmegaConf.set_struct(config, False)
    config._name = name + SUFFIX
    sizes = ([0.0] * _STATE, [1.0] * _STATE, [-1.0] * _ACTION, [1.0] * _ACTION)
    description = EpisodeDescription("random", "", *sizes, steps, 0.0, 0.0, 0.0)
    task = SimpleNamespace(description=description, context=None, max_episode_length=steps)
    return FairseqTask.build_model(task, config).eval()


@torch.no_grad()
def measure(names: Sequence[str], points: Sequence[int], context: int) -> Costs:
    """Measure the cost of an action at each of the steps ``points``."""
    last = max(points)
    models = {name: build(name, last) for name in names}
    generator = torch.Generator().manual_seed(0)
    sizes = {"returns": 1, "states": _STATE, "actions": _ACTION}
    episode = {name: torch.randn(1, last, size, generator=generator) for name, size in sizes.items()}
    episode["timesteps"] = torch.arange(last)[None]
    memories: dict[str, dict] = {name: {} for name in names}
    recent: dict[str, list[float]] = {name: [] for name in names}
    costs: Costs = {}
    for step in tqdm(range(1, last + 1), desc="steps", unit="", leave=False, disable=None):
        current = {name: values[:, step - 1] for name, values in episode.items()}
        previous_action = episode["actions"][:, step - 2] if step > 1 else None
        for name, model in models.items():
            tokens = (memories[name], current["returns"], current["states"], current["timesteps"], previous_action)
            recent[name].append(_milliseconds(model.extend, *tokens))
        if step in points:
            for name in names:
                costs.setdefault((name, "from the state"), []).append(statistics.median(recent[name][-_RECENT:]))
            for way, steps in ((f"last {context} anew", min(context, step)), ("all steps anew", step)):
                window = [values[:, step - steps : step] for values in episode.values()]
                timings = [[_milliseconds(model, *window) for model in models.values()] for _ in range(_REPEATS)]
                for name, milliseconds in zip(names, zip(*timings)):
                    costs.setdefault((name, way), []).append(statistics.median(milliseconds))
    return costs


def _milliseconds(function: Callable, *arguments: object) -> float:
    started = time.process_time()
    function(*arguments)
    return 1000.0 * (time.process_time() - started)


def parser() -> CommandParser:
    """The script's options."""
    parser = CommandParser(prog="python -m recipes.offline_rl.cost", description=__doc__.splitlines()[0])
    names = ",".join(DEFAULT_NAMES)
    about = f"comma-separated, any causal ({names})"
    parser.add_argument("--archs", type=architectures_of(SUFFIX), default=names, help=about)
    parser.add_argument("--steps", type=steps, default="10,100,300,1000", help="where it is measured (%(default)s)")
    parser.add_argument("--context", type=positive_int, default=20, metavar="K", help="steps anew (%(default)s)")
    return parser


def steps(text: str) -> list[int]:
    """Option type: comma-separated numbers of steps, sorted."""
    return sorted({positive_int(part) for part in text.split(",")})


@script("cost")
def main(arguments: Iterable[str] | None = None) -> int:
    """Run the script; returns the exit status."""
    options = parser().parse_args(arguments)
    started = time.monotonic()
    torch.set_num_threads(1)
    costs = measure(options.archs, options.steps, options.context)
    rows = [
        (f"{name}{SUFFIX}", way, *(f"{value:.1f}" for value in milliseconds))
        for (name, way), milliseconds in sorted(costs.items())
    ]
    header = ("architecture", "an action from", *(f"step {step}" for step in options.steps))
    run = describe_run(command_line("recipes.offline_rl.cost", arguments), time.monotonic() - started)
    print(as_text([Table("Milliseconds of CPU time for an action, one episode, one thread", header, rows, [])], run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
