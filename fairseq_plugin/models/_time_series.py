"""The base of all classifiers of time series, for the task ``time_series_classification``.

The model of the Flowformer paper's Table 6, as its authors released it: a linear embedding times √D, learned positions,
post-norm layers and a final LayerNorm, gelu, and one linear layer over all steps.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqEncoder, FairseqEncoderModel
from fairseq.modules import FairseqDropout, LayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

from common.modules.stored_options import StoredOptions
from common.ops.shared.padding import real_positions

from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import option_field
from ..modules.multihead_attention import read_padding, zeros_at_padding
from ..modules.not_exportable import NoTorchScript, check_not_exported
from ..modules.transformer_layer import LinearTimeEncoderLayer
from ._encoder import BuildLayer, LinearTimeEncoder
from ._hub_model import HubModel
from ._layers import DesignsLayers
from ._options import (
    checkpointing_field,
    complete_checkpointing,
    errors_with_options,
    offloading_field,
    option,
    plain_options_with_sizes,
)
from ._weight_decay import DecayOptions, MarksDecay
from .time_series_hub_interface import TimeSeriesHubInterface

#: What ``TimeSeriesHead`` classifies.
Pooling = ChoiceEnum(("flat", "mean", "max", "last"))
_POOLING_HELP = (
    "what is classified: flat, the features of all steps side by side; mean, their mean; max, the largest of each; "
    "last, those of the last step"
)
#: The token that represents a real step to fairseq's encoder; padding is 0, as in ``SeriesEmbedding``.
_STEP = 1


def pooling_field(default: str) -> Any:
    """The field of ``--pooling``, of the type ``Pooling``."""
    return option_field(default, _POOLING_HELP)


@dataclass
class EncoderSizes(FairseqDataclass):
    """Number and width of the layers of an encoder, with the authors' defaults."""

    encoder_layers: int = option_field(2, "num encoder layers")
    encoder_embed_dim: int = option_field(512, "width of the encoder")


@dataclass
class TimeSeriesConfig(EncoderSizes, DecayOptions):
    """Options of all classifiers of time series that have attention, with the authors' defaults."""

    encoder_ffn_embed_dim: int = option_field(2048, "width inside a feed-forward block")
    encoder_attention_heads: int = option_field(8, "num encoder attention heads")
    dropout: float = option_field(0.1, "dropout probability")
    attention_dropout: float = option_field(0.0, "dropout probability for sources of attention")
    activation_dropout: float = option_field(0.1, "dropout probability after the activation of a feed-forward block")
    pooling: Pooling = pooling_field("flat")
    checkpoint_activations: bool = checkpointing_field()
    offload_activations: bool = offloading_field()


@dataclass
class TransformerTimeSeriesConfig(TimeSeriesConfig):
    """Options of the classifiers of time series that are Transformers."""

    encoder_normalize_before: bool = option_field(
        False, "LayerNorm before each block; otherwise after it, as in the authors' model"
    )
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option_field(
        "gelu", "activation function of the feed-forward blocks"
    )


class SeriesEmbedding(nn.Linear):
    """Embeds steps (B, T, channels) -> (B, T, D); replaces the token embedding of fairseq's encoder."""

    padding_idx = 0

    @property
    def embedding_dim(self) -> int:
        """D."""
        return self.out_features


class TimeSeriesEncoder(LinearTimeEncoder):
    """fairseq's Transformer encoder over series: source (B, T, channels) -> features (B, T, D).

    Positions count real steps, so padding on any side has no influence on the features of a real one.

    Raises:
        ValueError: a series has more steps than there are positions, or a different number of channels.
    """

    def __init__(self, args: Namespace, channels: int, build_layer: BuildLayer) -> None:
        super().__init__(args, None, SeriesEmbedding(channels, args.encoder_embed_dim), build_layer)
        positions = self.embed_positions.weight
        nn.init.uniform_(positions, -0.02, 0.02)
        nn.init.zeros_(positions[self.padding_idx])
        if self.layer_norm is None:  # fairseq's post-norm encoder has no final norm
            self.layer_norm = LayerNorm(args.encoder_embed_dim)

    def forward(self, source: Tensor, padding_mask: Tensor) -> Tensor:
        """source (B, T, channels), padding_mask (B, T) with True = padding -> (B, T, D)."""
        check_not_exported(self)
        padding_mask = read_padding(padding_mask)
        check_batch(source, padding_mask, self.embed_tokens.in_features, self.max_positions())
        tokens = (~padding_mask).long() * _STEP
        embedded = self.embed_tokens(zeros_at_padding(source, padding_mask))
        features = self.forward_scriptable(tokens, token_embeddings=embedded)["encoder_out"][0]
        return features.transpose(0, 1)  # (T, B, D) -> (B, T, D)


def check_batch(source: Tensor, padding_mask: Tensor, channels: int, limit: int) -> None:
    """Raise ValueError unless source is (B, T, ``channels``) with at most ``limit`` real steps."""
    if source.dim() != 3 or source.shape[2] != channels:
        raise ValueError(f"source has shape {tuple(source.shape)}; allowed: (batch, steps, {channels} channels)")
    if source.shape[1] > limit and (longest := int((~padding_mask).sum(1).max())) > limit:
        raise ValueError(f"a series has {longest} steps; allowed: {limit}, which --max-length set in training")


def place_steps(x: Tensor, padding_mask: Tensor, length: int) -> Tensor:
    """Move the real steps of x (B, T, D) to their positions: (B, ``length``, D), zeros elsewhere."""
    positions = real_positions(padding_mask).masked_fill(padding_mask, length)  # (B, T); the last position is dropped
    result = x.new_zeros(len(x), length + 1, x.shape[2])
    return result.scatter_add(1, positions[..., None].expand_as(x), x)[:, :-1]


class TimeSeriesHead(nn.Module):
    """Activation, dropout, pooling over real steps, and a linear layer: features (B, T, D) -> scores (B, classes).

    ``flat`` has weights for each of ``max_length`` steps; missing steps of a shorter series are zeros. ``activation``
    is gelu by default, as in the authors' model.
    """

    def __init__(
        self,
        embed_dim: int,
        num_classes: int,
        max_length: int,
        pooling: str,
        dropout: float,
        activation: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.max_length, self.pooling, self.activation = max_length, pooling, activation
        self.dropout = FairseqDropout(dropout, module_name=type(self).__name__)
        self.out_proj = nn.Linear(embed_dim * max_length if pooling == "flat" else embed_dim, num_classes)

    def forward(self, features: Tensor, padding_mask: Tensor) -> Tensor:
        """features (B, T, D), padding_mask (B, T) with True = padding -> (B, classes)."""
        padding_mask = read_padding(padding_mask)
        features = self.dropout(self.activation(features)).masked_fill(padding_mask[..., None], 0.0)
        if self.pooling == "flat":
            return self.out_proj(place_steps(features, padding_mask, self.max_length).flatten(1))
        if self.pooling == "max":
            lowest = torch.finfo(features.dtype).min
            largest = features.masked_fill(padding_mask[..., None], lowest).amax(1)
            return self.out_proj(largest.masked_fill(padding_mask.all(1, keepdim=True), 0.0))
        if self.pooling == "last":
            steps = torch.arange(features.shape[1], device=features.device)
            last = (~padding_mask).long().mul(steps).amax(1)  # (B,); for a row of padding the first step, which is 0
            return self.out_proj(features[torch.arange(len(features), device=features.device), last])
        real = (~padding_mask).sum(1, keepdim=True).clamp(min=1)
        # Sum in float32: half precision would lose most of a mean over thousands of steps.
        total = features.sum(1, dtype=torch.promote_types(features.dtype, torch.float32))
        return self.out_proj((total / real).to(features.dtype))

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        return f"max_length={self.max_length}, pooling={self.pooling!r}"


class TimeSeriesClassifier(DesignsLayers, NoTorchScript, MarksDecay, CheckedLoading, HubModel, FairseqEncoderModel):
    """A linear embedding, an encoder over series, and classification heads; subclasses build the layers.

    The task registers a head (``register_classification_head``), and the criterion selects it by name. Padding on any
    side has no influence. ``TimeSeriesClassifier.from_pretrained`` loads every subclass as a
    ``TimeSeriesHubInterface``, without the data folder.
    """

    hub_interface = TimeSeriesHubInterface
    #: The dataclass of all options.
    options_class: type
    #: Options that must be positive integers.
    sizes = ("encoder_layers", "encoder_embed_dim", "encoder_attention_heads")
    #: The activation before the pooling of its heads.
    head_activation: Callable[[Tensor], Tensor] = staticmethod(F.gelu)

    def __init__(self, args: Namespace, encoder: FairseqEncoder) -> None:
        super().__init__(encoder)
        self.args = args
        self.classification_heads = nn.ModuleDict()

    @classmethod
    def build_model(cls, args, task) -> "TimeSeriesClassifier":
        """Build the model for the channels and the longest series of ``task``.

        Raises:
            ValueError: an option has a value that the layers do not allow, or the task is not supported.
        """
        if not hasattr(task, "description"):
            raise ValueError(
                f"--task is {type(task).__name__}; allowed with {cls.__name__}: time_series_classification"
            )
        args = plain_options_with_sizes(args, cls.sizes)
        args.max_source_positions = task.max_length
        cls.complete_options(args)
        with errors_with_options(cls, cls.option_prefix, "encoder"):
            model = cls(args, cls.build_encoder(args, task.description.channels))
        model.mark_decay(args)
        return model

    @classmethod
    def build_encoder(cls, args: Namespace, channels: int) -> FairseqEncoder:
        """The encoder from series with ``channels`` channels to features."""
        complete_checkpointing(args)
        args.encoder_learned_pos = True
        return TimeSeriesEncoder(args, channels, cls.layer_builder(args))

    @classmethod
    def complete_options(cls, args: Namespace) -> None:
        """Fill in options that follow from others."""

    @classmethod
    def layer_builder(cls, args: Namespace) -> BuildLayer:
        """A function that builds a layer of the encoder; called once per layer, in order."""
        designs = cls.designs(args, "encoder", False, args.max_source_positions)
        return cls.in_turn("encoder", designs, LinearTimeEncoderLayer)

    def register_classification_head(self, name: str, num_classes: int, labels: Sequence[Any] | None = None) -> None:
        """Add the head ``name`` for ``num_classes`` classes; ``labels`` are the labels of its scores, in order."""
        args = self.args
        head = self.classification_heads[name] = TimeSeriesHead(
            args.encoder_embed_dim,
            num_classes,
            args.max_source_positions,
            option(args, self.options_class, "pooling"),
            args.dropout,
            self.head_activation,
        )
        head.remembered = StoredOptions() if labels is None else StoredOptions(labels=list(labels))
        self.mark_decay(args)

    def forward(
        self,
        source: Tensor,
        padding_mask: Tensor | None = None,
        features_only: bool = True,
        classification_head_name: str | None = None,
    ) -> tuple[Tensor, None]:
        """source (B, T, channels), padding_mask (B, T), True = padding -> scores of a head's classes (B, classes).

        Without a head, returns the features (B, T, D).
        """
        if padding_mask is None:
            padding_mask = source.new_zeros(source.shape[:2], dtype=bool)
        features = self.encoder(source, padding_mask)
        if classification_head_name is None:
            return features, None
        return self.classification_heads[classification_head_name](features, padding_mask), None
