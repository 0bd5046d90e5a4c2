"""The base of all Decision Transformers, for the task ``offline_rl``.

The model of the Flowformer paper's Table 7, as its authors released it: Chen et al., *Decision Transformer* (NeurIPS
2021), with another attention. A step is three tokens: the wanted return, the state and the action. Each token is a
linear embedding plus a learned embedding of the step number. Then follow a LayerNorm, pre-norm layers with ReLU and a
final LayerNorm; the action is predicted from the token of the state, through tanh.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Optional

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout, LayerNorm
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from common.attention import InnerAttention
from common.ops.shared.tracing import may_be_exported

from ..data.episodes import TOKENS
from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import option_field
from ..modules.multihead_attention import IncrementalState, read_padding, zeros_at_padding
from ..modules.not_exportable import NoTorchScript
from ..modules.positions import find_max_tokens
from ..modules.transformer_layer import LinearTimeDecoderLayer
from ._decoder import wrap_layer
from ._hub_model import HubModel
from ._layers import DesignsLayers
from ._options import (
    checkpointing_field,
    complete_checkpointing,
    errors_with_options,
    offloading_field,
    plain_options_with_sizes,
)
from ._weight_decay import DecayOptions, MarksDecay
from .decision_hub_interface import DecisionHubInterface


@dataclass
class DecisionConfig(DecayOptions):
    """Options of all Decision Transformers; the defaults are those of the Flowformer paper's script."""

    decoder_layers: int = option_field(3, "num decoder layers")
    decoder_embed_dim: int = option_field(256, "width of the decoder")
    decoder_ffn_embed_dim: Optional[int] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None, "width inside a feed-forward block; default: four times the width"
    )
    decoder_attention_heads: int = option_field(4, "num decoder attention heads")
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option_field(
        "relu", "activation function of the feed-forward blocks"
    )
    dropout: float = option_field(0.1, "dropout probability")
    attention_dropout: float = option_field(0.0, "dropout probability for sources of attention")
    activation_dropout: float = option_field(0.0, "dropout probability after the activation of a feed-forward block")
    checkpoint_activations: bool = checkpointing_field()
    offload_activations: bool = offloading_field()


class DecisionModel(NoTorchScript, MarksDecay, CheckedLoading, HubModel, BaseFairseqModel):
    """The base of all models for the task ``offline_rl``: returns, states and actions -> the action at each step.

    ``DecisionModel.from_pretrained`` loads every subclass as a ``DecisionHubInterface``, without the data folder.
    """

    hub_interface = DecisionHubInterface
    #: The dataclass of all options.
    options_class: type
    #: The prefix of the options of its attention.
    option_prefix: str
    #: Options that must be positive integers.
    sizes = ("decoder_layers", "decoder_embed_dim")
    #: The criterion that trains it.
    criterion = "action_mse"
    #: The longest input that the model has parameters for, in tokens; None for any length.
    max_tokens: int | None = None

    def __init__(self, args: Namespace, state_size: int, action_size: int) -> None:
        super().__init__()
        self.args, self.state_size, self.action_size = args, state_size, action_size

    @classmethod
    def build_model(cls, args, task) -> "DecisionModel":
        """Build the model for the states, the actions and the context of ``task``.

        Raises:
            ValueError: an option has a value that the layers do not allow, or the task is not supported.
        """
        if not hasattr(task, "max_episode_length"):
            raise ValueError(f"--task is {type(task).__name__}; allowed with {cls.__name__}: offline_rl")
        args = plain_options_with_sizes(args, cls.sizes)
        args.max_episode_length = task.max_episode_length
        args.max_target_positions = TOKENS * min(task.context or task.max_episode_length, task.max_episode_length)
        cls.complete_options(args)
        with errors_with_options(cls, cls.option_prefix, "decoder"):
            model = cls(args, task.description.state_size, task.description.action_size)
        model.mark_decay(args)
        return model

    @classmethod
    def complete_options(cls, args: Namespace) -> None:
        """Fill in options that follow from others."""

    def check_window(self, returns: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor) -> None:
        """Raise ValueError unless shapes are (B, K, 1), (B, K, S), (B, K, A), (B, K), and steps are not too late."""
        sizes = {"returns": 1, "states": self.state_size, "actions": self.action_size}
        inputs = {"returns": returns, "states": states, "actions": actions}
        for name, size in sizes.items():
            if inputs[name].shape != (*timesteps.shape, size) or timesteps.dim() != 2:
                shape, steps = tuple(inputs[name].shape), tuple(timesteps.shape)
                raise ValueError(f"{name} has shape {shape}; allowed: (batch, steps, {size}), timesteps having {steps}")
        limit = self.args.max_episode_length
        if may_be_exported() or not timesteps.numel():  # values cannot be checked
            return
        if not 0 <= int(timesteps.min()) <= int(timesteps.max()) < limit:
            raise ValueError(
                f"timesteps are {int(timesteps.min())} to {int(timesteps.max())}; allowed: 0 to {limit - 1}, as "
                "--max-episode-length set in training"
            )


class DecisionTransformer(DesignsLayers, DecisionModel):
    """A causal Transformer: returns, states and actions -> the action at each step; subclasses name the attention.

    Padding on any side does not affect real steps. ``DecisionTransformer.from_pretrained`` loads every subclass as a
    ``DecisionHubInterface``, without the data folder.
    """

    sizes = ("decoder_layers", "decoder_embed_dim", "decoder_attention_heads")

    def __init__(self, args: Namespace, state_size: int, action_size: int) -> None:
        super().__init__(args, state_size, action_size)
        dim = args.decoder_embed_dim
        self.embed_timestep = nn.Embedding(args.max_episode_length, dim)
        self.embed_return = nn.Linear(1, dim)
        self.embed_state = nn.Linear(state_size, dim)
        self.embed_action = nn.Linear(action_size, dim)
        self.embed_ln = LayerNorm(dim)
        self.dropout_module = FairseqDropout(args.dropout, module_name=type(self).__name__)
        cfg = TransformerConfig.from_namespace(args)
        designs = self.designs(args, "decoder", True, args.max_target_positions)
        layer = self.in_turn("decoder", designs, LinearTimeDecoderLayer)
        layers = (wrap_layer(layer(cfg, True), cfg) for _ in range(args.decoder_layers))
        self.layers = _init_as_gpt2(nn.ModuleList(layers))
        self.layer_norm = LayerNorm(dim)
        self.predict_action = nn.Sequential(nn.Linear(dim, action_size), nn.Tanh())
        self.max_tokens = find_max_tokens(self.layers)

    @classmethod
    def complete_options(cls, args: Namespace) -> None:
        """Fill in the width of feed-forward blocks, and make layers pre-norm as in the authors' model."""
        args.decoder_ffn_embed_dim = args.decoder_ffn_embed_dim or 4 * args.decoder_embed_dim
        complete_checkpointing(args)
        args.decoder_normalize_before = True

    def forward(
        self, returns: Tensor, states: Tensor, actions: Tensor, timesteps: Tensor, padding_mask: Tensor | None = None
    ) -> Tensor:
        """The action at each step, from all inputs up to the state of that step: (B, K, A), -1 to 1.

        Args:
            returns: returns to go, divided by ``--return-scale``, (B, K, 1).
            states: standardised, (B, K, S).
            actions: scaled to -1 to 1, (B, K, A).
            timesteps: the number of each step in its episode, from 0, (B, K).
            padding_mask: (B, K), True = padding.

        Raises:
            ValueError: wrong shapes, a step without an embedding, or more steps than an attention accepts.
        """
        self.check_window(returns, states, actions, timesteps)
        padding_mask = read_padding(padding_mask)
        returns, states, actions = (zeros_at_padding(x, padding_mask) for x in (returns, states, actions))
        embedded = (self.embed_return(returns), self.embed_state(states), self.embed_action(actions))
        tokens = torch.stack(embedded, dim=2) + self.embed_timestep(timesteps)[:, :, None]  # (B, K, 3, D)
        if padding_mask is not None:
            padding_mask = padding_mask.repeat_interleave(TOKENS, dim=1)  # (B, 3K)
        features = self._decode(tokens.flatten(1, 2), padding_mask)  # (B, 3K, D)
        return self.predict_action(features[:, 1::TOKENS])

    def extend(
        self,
        state: IncrementalState,
        returns: Tensor,
        states: Tensor,
        timesteps: Tensor,
        last_actions: Tensor | None,
    ) -> Tensor:
        """The action (B, A) at the next step of the episodes in ``state``; the same result as ``forward``.

        returns (B, 1), states (B, S), timesteps (B,), and the actions (B, A) of the previous step, None at the first.
        ``state`` is fairseq's incremental state, a dictionary that is empty before the first step and updated in place.
        The cost per step is constant if the attention's state has constant size.
        """
        steps = self.embed_timestep(timesteps)[:, None]  # (B, 1, D)
        tokens = [self.embed_return(returns)[:, None] + steps, self.embed_state(states)[:, None] + steps]
        if last_actions is not None:
            before = self.embed_timestep(timesteps - 1)[:, None]
            tokens.insert(0, self.embed_action(last_actions)[:, None] + before)
        return self.predict_action(self._decode(torch.cat(tokens, dim=1), None, state)[:, -1])

    def _decode(self, tokens: Tensor, padding_mask: Tensor | None, state: IncrementalState | None = None) -> Tensor:
        """tokens (B, n, D), padding_mask (B, n) -> features (B, n, D)."""
        x = self.dropout_module(self.embed_ln(tokens)).transpose(0, 1)  # (n, B, D), as fairseq's layers read it
        for layer in self.layers:
            x, *_ = layer(x, incremental_state=state, self_attn_padding_mask=padding_mask)
        return self.layer_norm(x).transpose(0, 1)


def _init_as_gpt2(layers: nn.Module) -> nn.Module:
    """``layers`` with matrices from N(0, 0.02) and biases of 0; parameters inside an attention are not changed.

    Biases of gates set how long tokens are remembered at initialisation: 0 would be two tokens.
    """
    inner_ids = {id(x) for module in layers.modules() if isinstance(module, InnerAttention) for x in module.modules()}
    return layers.apply(lambda module: module if id(module) in inner_ids else init_bert_params(module))
