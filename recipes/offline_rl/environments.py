"""Environments of gymnasium whose states and actions are real numbers."""

import functools
import importlib.util
import sys
from typing import Any

import numpy as np

from fairseq_plugin.data.episode_folder import EpisodeDescription

from ..shared.scripts import RecipeFailed

_INSTALL = "Run: pip install '.[fairseq,rl]'"


def make(name: str) -> Any:
    """Create gymnasium's environment ``name``.

    Raises:
        ValueError: the environment does not exist, its states or actions are not vectors of real numbers (for example
            discrete actions), or the range of actions is not finite.
        RecipeFailed: gymnasium, or a dependency of the environment, is not installed.
    """
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise RecipeFailed(f"environments need gymnasium ({error}). {_INSTALL}") from error
    if importlib.util.find_spec("mujoco"):
        import mujoco

        mujoco.set_mju_user_warning(
            _show_once
        )  # mujoco's default repeats each warning per environment, and writes a file
    try:
        environment = gymnasium.make(name)
    except gymnasium.error.DependencyNotInstalled as error:
        raise RecipeFailed(f"--env {name} needs more than gymnasium: {error}. {_INSTALL}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"--env is {name}: {error}; allowed: an environment of gymnasium") from error
    states, actions = environment.observation_space, environment.action_space
    for kind, space in (("states", states), ("actions", actions)):
        if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
            raise ValueError(
                f"--env is {name}, whose {kind} are {space}; allowed: {kind} of real numbers, a Box of one dimension"
            )
    if not (np.isfinite(actions.low).all() and np.isfinite(actions.high).all()):
        raise ValueError(f"--env is {name}, whose actions are {actions}; allowed: actions of a finite range")
    return environment


@functools.cache
def _show_once(warning: str) -> None:
    print(f"mujoco: {warning}", file=sys.stderr)


def make_for(name: str, described: EpisodeDescription, limit: int) -> Any:
    """Create the environment ``name`` for a model trained on ``described`` that has embeddings for ``limit`` steps.

    Raises:
        ValueError: as ``make``, or states or actions differ from training, or episodes may be longer than ``limit``.
    """
    environment = make(name)
    states, actions = environment.observation_space.shape[0], environment.action_space.shape[0]
    if (states, actions) != (described.state_size, described.action_size):
        raise ValueError(
            f"--env is {name}, which has states of {states} numbers and actions of {actions}; allowed for this "
            f"checkpoint: {described.state_size} and {described.action_size}, as in {described.name}"
        )
    low, high = environment.action_space.low, environment.action_space.high
    if not (np.allclose(low, described.low) and np.allclose(high, described.high)):
        raise ValueError(
            f"--env is {name}, whose actions are {low.tolist()} to {high.tolist()}; allowed for this checkpoint: "
            f"{described.low} to {described.high}, as in {described.name}"
        )
    steps = environment.spec.max_episode_steps
    if steps is None or steps > limit:
        raise ValueError(
            f"--env is {name}, whose episodes have up to {steps or 'any number of'} steps; allowed: at most {limit}, "
            "as --max-episode-length set in training"
        )
    return environment
