"""``--criterion awac``: the losses of advantage-weighted actor critic, from recorded episodes only.

Nair, Gupta, Dalal, Levine: *AWAC: Accelerating Online Reinforcement Learning with Offline Datasets* (2020).
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from torch import Tensor, nn
from torch.nn import functional as F

from ..loading.known_options import option_field


@dataclass
class AWACConfig(FairseqDataclass):
    """Options of ``awac``, with common defaults, which were not checked against the paper's settings."""

    awac_lambda: float = option_field(1.0, "an action weighs exp(advantage / lambda)")
    awac_discount: float = option_field(0.99, "what a reward is worth a step later")
    awac_max_weight: float = option_field(100.0, "the highest weight of an action")


class Transitions(NamedTuple):
    """N steps of the data, each with its outcome."""

    states: Tensor  # (N, S)
    actions: Tensor  # (N, A)
    rewards: Tensor  # (N,), not scaled
    next_states: Tensor  # (N, S); arbitrary where the episode ends
    ends: Tensor  # (N,), bool: the environment ended the episode after this step


def transitions(net_input: dict[str, Tensor], scale: float, context: int | None, longest: int) -> Transitions:
    """The transitions in the windows (B, K) of a batch, padded at the end.

    A window that is shorter than ``context``, or a whole episode (None), ends with its episode. An episode of
    ``longest`` steps ended by the time limit, not by the environment: the state after its last step is not known, so
    that step is left out. So is the last step of a window that does not end its episode.
    """
    padding, returns, states = net_input["padding_mask"], net_input["returns"][..., 0], net_input["states"]
    real = ~padding
    next_real = F.pad(real[:, 1:], (0, 1))
    whole = torch.ones_like(real) if context is None else (real.sum(1, keepdim=True) < context).expand_as(real)
    ends = real & ~next_real & whole & (net_input["timesteps"] + 1 < longest)
    valid = (real & next_real) | ends
    next_returns = F.pad(returns[:, 1:], (0, 1)).masked_fill(~next_real, 0.0)
    next_states = F.pad(states[:, 1:], (0, 0, 0, 1))
    rewards = scale * (returns.float() - next_returns.float())
    return Transitions(states[valid], net_input["actions"][valid], rewards[valid], next_states[valid], ends[valid])


@register_criterion("awac", dataclass=AWACConfig)
class AWACCriterion(FairseqCriterion):
    """The squared errors of two critics, and the weighted log-likelihood of the data's actions under the policy.

    The critics learn r + discount * min Q'(s', a'), with a' from the policy and Q' of their slow copies. The weight of
    an action is exp((min Q(s, a) - min Q(s, a')) / lambda), with a' from the policy in s. Neither loss has gradients
    for the other part. Both are computed in float32. ``action_mse`` is logged as ``--criterion action_mse`` computes
    it.
    """

    def __init__(self, task, awac_lambda: float, awac_discount: float, awac_max_weight: float) -> None:
        super().__init__(task)
        for name, value in (("lambda", awac_lambda), ("max-weight", awac_max_weight)):
            if not 0.0 < value < math.inf:
                raise ValueError(f"--awac-{name} is {value}; allowed: above 0 and finite")
        if not 0.0 <= awac_discount <= 1.0:
            raise ValueError(f"--awac-discount is {awac_discount}; allowed: 0 to 1")
        if task.context == 1:
            raise ValueError("--context is 1; allowed with --criterion awac: at least 2, or full")
        self.temperature, self.discount, self.max_weight = awac_lambda, awac_discount, awac_max_weight

    def forward(self, model: nn.Module, sample: dict[str, Any], reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The sum of both losses over the transitions of ``sample``, their number, and the logging output.

        With ``reduce`` False, the first is the loss of each transition, (N,).
        """
        net_input, task = sample["net_input"], self.task
        steps = transitions(net_input, task.cfg.return_scale, task.context, task.description.longest)
        values = model.values(steps.states, steps.actions).float()
        errors = (values - self.critic_targets(model, steps)[:, None]).square().sum(1)
        likelihood = model.distribution(steps.states).log_prob(steps.actions).float().sum(1)
        losses = errors - self.weights(model, steps) * likelihood
        with torch.no_grad():
            real = ~net_input["padding_mask"]
            action_errors = (model(**net_input).float()[real] - sample["target"].float()[real]).square()
        logging_output = {
            "loss": losses.sum().detach(),
            "critic_loss": errors.sum().detach(),
            "sample_size": len(losses),
            "action_errors": action_errors.sum(),
            "action_numbers": action_errors.numel(),
            "nsentences": sample["nsentences"],
            "ntokens": sample["ntokens"],
        }
        return losses.sum() if reduce else losses, len(losses), logging_output

    @torch.no_grad()
    def critic_targets(self, model: nn.Module, steps: Transitions) -> Tensor:
        """The target of the critics for each transition, r + discount * min Q'(s', a'): (N,)."""
        next_values = model.values(steps.next_states, model.sample(steps.next_states), targets=True).float().amin(1)
        return steps.rewards + self.discount * next_values.masked_fill(steps.ends, 0.0)

    @torch.no_grad()
    def weights(self, model: nn.Module, steps: Transitions) -> Tensor:
        """The weight of the action of each transition in the likelihood, at most ``max_weight``: (N,)."""
        data_values = model.values(steps.states, steps.actions).float().amin(1)
        policy_values = model.values(steps.states, model.sample(steps.states)).float().amin(1)
        return ((data_values - policy_values) / self.temperature).exp().clamp(max=self.max_weight)

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict[str, Any]]) -> None:
        """Log the means over all workers."""
        sums = {name: sum(log.get(name, 0) for log in logging_outputs) for name in logging_outputs[0]}
        size, numbers = sums["sample_size"], sums["action_numbers"]
        metrics.log_scalar("loss", sums["loss"] / size, size, round=6)
        metrics.log_scalar("critic_loss", sums["critic_loss"] / size, size, round=6)
        metrics.log_scalar("action_mse", sums["action_errors"] / numbers, numbers, round=6)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        """fairseq's hook: True."""
        return True
