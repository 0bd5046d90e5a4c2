"""A trained Decision Transformer in Python: ``DecisionTransformer.from_pretrained(...)``, ``reset`` and ``act``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from common.ops.shared.checks import check_positive_int

from ..data.episodes import TOKENS
from ..data.stored_arrays import as_float32
from ._hub_model import HubInterface

FULL = "full"


class DecisionHubInterface(HubInterface):
    """A model of the task ``offline_rl`` that acts step by step, with the statistics of its training data::

        model.reset(target=3000.0)
        action = model.act(state)
        while ...:  # the environment executes the action
            action = model.act(state, reward)

    States, actions and rewards are those of the environment. Attributes: ``cfg``, ``task``, ``model`` and
    ``described``, the description of the training data.
    """

    def __init__(self, cfg: Any, task: FairseqTask, model: BaseFairseqModel) -> None:
        super().__init__(cfg, task, model)
        self.described = task.description
        self._step: int | None = None

    def reset(self, target: float | Sequence[float], context: int | str | None = None) -> None:
        """Begin an episode with the wanted return ``target``, or N episodes at once with N targets.

        Args:
            context: the number of last steps from which each action is computed, all of them anew; or "full", all steps
            of the episode through a state that is updated, at constant cost per step if the attention's state has
            constant size. Default: as in training.

        Raises:
            ValueError: a target is not finite, or overflows float32 when divided by --return-scale; a context is
                invalid, or longer than the model allows.
        """
        targets = np.asarray(target, dtype=np.float64)
        if targets.ndim > 1 or not targets.size or not np.isfinite(targets).all():
            raise ValueError(f"target is {target!r}; allowed: a finite number, or several")
        self._scaled("target", targets)
        self._context = self._checked_context(context)
        self._single, self._step = targets.ndim == 0, 0
        self._targets = targets.reshape(-1, 1)
        self._memory: dict[str, Any] = {}
        self._window: list[dict[str, Tensor]] = []
        self._last_actions: Tensor | None = None

    @torch.no_grad()
    def act(self, states: np.ndarray, rewards: float | Sequence[float] | None = None) -> np.ndarray:
        """The actions (N, A) for ``states`` (N, S), or (A,) for a state (S,) after ``reset`` with one target.

        ``rewards`` are the rewards of the last actions, (N,) or a number; None at the first step.

        Raises:
            ValueError: ``reset`` was not called; states or rewards have a wrong shape or are not finite, also in the
                precision of the model; rewards are missing after the first step or given at it; there are more steps
                than the model has embeddings for. The episode is not changed then.
        """
        states, rewards = self._checked_step(states, rewards)
        targets, step = self._targets - rewards, f"at step {self._step}"
        return_name = f"the return that remains {step}"
        returns = self.as_input(return_name, self._scaled(return_name, targets))
        standardised = self.described.standardise(states, f"a state {step}")
        model_states = self.as_input(f"a state {step}", torch.from_numpy(standardised))
        self._targets = targets
        timesteps = torch.full((len(states),), self._step, device=model_states.device)
        if self._context == FULL:
            actions = self.model.extend(self._memory, returns, model_states, timesteps, self._last_actions)
        else:
            actions = self._recompute(returns, model_states, timesteps)
        self._last_actions = actions
        self._step += 1
        unscaled = self.described.unscale(actions.float().cpu().numpy())
        return unscaled[0] if self._single else unscaled

    def _scaled(self, what: str, targets: np.ndarray) -> Tensor:
        """Scaled returns in float32, as the model reads them; ValueError that names ``what`` if one overflows."""
        return torch.as_tensor(as_float32(what, targets / self.task.cfg.return_scale, targets))

    def _recompute(self, returns: Tensor, states: Tensor, timesteps: Tensor) -> Tensor:
        """The actions, computed anew from the last steps; the current action is not read and is 0."""
        if self._window:
            self._window[-1]["actions"] = self._last_actions
        actions = states.new_zeros(len(states), self.described.action_size)
        step = {"returns": returns, "states": states, "actions": actions, "timesteps": timesteps}
        self._window = [*self._window, step][-self._context :]
        window = {name: torch.stack([earlier[name] for earlier in self._window], dim=1) for name in step}
        return self.model(**window)[:, -1]

    def _checked_context(self, context: int | str | None) -> int | str:
        if context is None:
            context = self.task.context or FULL
        if context != FULL:
            check_positive_int("context", context)
        limit, longest = self.model.max_tokens, self.task.max_episode_length
        steps = longest if context == FULL else min(context, longest)
        if limit is not None and TOKENS * steps > limit:
            raise ValueError(
                f"context is {context!r}, {steps} steps; allowed for this attention: at most {limit // TOKENS}, which "
                "--context set in training"
            )
        return context

    def _checked_step(self, states: np.ndarray, rewards: Any) -> tuple[np.ndarray, np.ndarray]:
        """States (N, S) and rewards (N, 1)."""
        if self._step is None:
            raise ValueError("act was called before reset; allowed: reset(target), then act")
        limit, count = self.task.max_episode_length, len(self._targets)
        if self._step >= limit:
            raise ValueError(
                f"the episode has more than {limit} steps; allowed: {limit}, as --max-episode-length set in training"
            )
        shape = (self.described.state_size,) if self._single else (count, self.described.state_size)
        states = np.asarray(states, dtype=np.float64)
        if states.shape != shape or not np.isfinite(states).all():
            fault = f"shape {states.shape}" if states.shape != shape else "a value that is not finite"
            raise ValueError(f"states have {fault} at step {self._step}; allowed: {shape}, finite numbers")
        if (rewards is None) != (self._step == 0):
            allowed = "None at step 0" if self._step == 0 else "those of the last actions"
            raise ValueError(f"rewards are {rewards} at step {self._step}; allowed: {allowed}")
        rewards = np.asarray(0.0 if rewards is None else rewards, dtype=np.float64)
        if rewards.shape not in ((), (count,)) or not np.isfinite(rewards).all():
            raise ValueError(f"rewards are {rewards} at step {self._step}; allowed: {count} finite numbers")
        return states.reshape(count, -1), np.broadcast_to(rewards.reshape(-1, 1), (count, 1))
