"""``bc_decision`` and ``awac_decision``: the columns BC and AWAC of the Flowformer paper's Table 7, without attention.

They act on the state alone and ignore the wanted return. They are trained and evaluated like Decision Transformers.
"""

import copy
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from ..loading.known_options import option_field
from ..modules.multihead_attention import IncrementalState, zeros_at_padding
from ._decision import DecisionModel
from ._options import option
from ._registration import register_checked

#: Bounds of the log standard deviation of a policy, as in AWAC's released code.
_LOG_STD = (-6.0, 0.0)


@dataclass
class BcDecisionConfig(FairseqDataclass):
    """Options of ``bc_decision``."""

    decoder_layers: int = option_field(2, "num hidden layers")
    decoder_embed_dim: int = option_field(256, "width of hidden layers")
    dropout: float = option_field(0.0, "dropout probability after each hidden layer")


@dataclass
class AwacDecisionConfig(BcDecisionConfig):
    """Options of ``awac_decision``; the policy and each critic have the same number of layers."""

    decoder_layers: int = option_field(3, "num hidden layers of the policy and of each critic")
    awac_target_rate: float = option_field(0.005, "by how much the target critics follow the critics in an update")


def perceptron(args: Namespace, size: int, out: int) -> nn.Sequential:
    """Hidden layers with ReLU and dropout, then a linear layer: (..., ``size``) -> (..., ``out``)."""

    def hidden() -> Iterator[nn.Module]:
        for i in range(args.decoder_layers):
            yield nn.Linear(size if i == 0 else args.decoder_embed_dim, args.decoder_embed_dim)
            yield nn.ReLU()
            yield FairseqDropout(args.dropout, module_name="perceptron")

    return nn.Sequential(*hidden(), nn.Linear(args.decoder_embed_dim, out))


class StatePolicy(DecisionModel):
    """A perceptron from a standardised state to an action in -1 to 1, through tanh; O(1) per step."""

    def __init__(self, args: Namespace, state_size: int, action_size: int) -> None:
        super().__init__(args, state_size, action_size)
        self.policy = nn.Sequential(perceptron(args, state_size, action_size), nn.Tanh())

    def forward(
        self, returns: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """The action at each step, from its state: (B, K, A), -1 to 1. Arguments as in ``DecisionTransformer.forward``.

        Raises:
            ValueError: wrong shapes, or a step later than ``--max-episode-length``.
        """
        self.check_window(returns, states, actions, timesteps)
        return self.policy(zeros_at_padding(states, padding_mask))

    def extend(
        self,
        state: IncrementalState,
        returns: Tensor,
        states: Tensor,
        timesteps: Tensor,
        last_actions: Tensor | None,
    ) -> Tensor:
        """The action (B, A) in states (B, S); the incremental state is not used."""
        return self.policy(states)


@register_checked("bc_decision", BcDecisionConfig)
class BehaviourCloning(StatePolicy):
    """Behaviour cloning: predicts the data's action from its state, trained on all data with ``action_mse``."""

    options_class, option_prefix = BcDecisionConfig, "bc"


@register_checked("awac_decision", AwacDecisionConfig)
class AdvantageWeightedActorCritic(StatePolicy):
    """AWAC without online episodes: Nair, Gupta, Dalal, Levine, *AWAC: Accelerating Online RL with Offline Datasets*.

    The policy is normal with the mean that ``forward`` gives and a learned deviation for each component of an action.
    It has two critics Q(state, action) and a slow copy of them. The criterion ``awac`` trains it.
    """

    options_class, option_prefix = AwacDecisionConfig, "awac"
    criterion = "awac"

    def __init__(self, args: Namespace, state_size: int, action_size: int) -> None:
        super().__init__(args, state_size, action_size)
        self.target_rate = option(args, AwacDecisionConfig, "awac_target_rate")
        if not 0.0 < self.target_rate <= 1.0:
            raise ValueError(f"--awac-target-rate is {self.target_rate}; allowed: above 0, up to 1")
        self.log_std = nn.Parameter(torch.zeros(action_size))
        self.critics = nn.ModuleList(perceptron(args, state_size + action_size, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def distribution(self, states: Tensor) -> torch.distributions.Normal:
        """The policy's distribution of actions in states (N, S)."""
        return torch.distributions.Normal(self.policy(states), self.log_std.clamp(*_LOG_STD).exp())

    def sample(self, states: Tensor) -> Tensor:
        """Actions (N, A) drawn from the policy in states (N, S), clamped to -1 to 1."""
        return self.distribution(states).sample().clamp(-1.0, 1.0)

    def values(self, states: Tensor, actions: Tensor, targets: bool = False) -> Tensor:
        """Q values (N, 2) of both critics, or of their slow copies, for states (N, S) and actions (N, A)."""
        inputs = torch.cat([states, actions], dim=-1)
        return torch.cat([critic(inputs) for critic in (self.targets if targets else self.critics)], dim=-1)

    @torch.no_grad()
    def set_num_updates(self, num_updates: int) -> None:
        """fairseq's hook before an update: after each update, the slow copies move towards the critics."""
        super().set_num_updates(num_updates)
        if num_updates > int(self.updates):
            for slow, fast in zip(self.targets.parameters(), self.critics.parameters()):
                slow.lerp_(fast, self.target_rate)
            self.updates.fill_(num_updates)
