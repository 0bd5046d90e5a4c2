"""``lstm_time_series`` and ``tcn_time_series``: the networks without attention in the Flowformer paper's Table 6.

They are trained like the Transformers: by the same task, on the same data, with the same training options.
"""

from argparse import Namespace
from dataclasses import dataclass

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqEncoder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from common.ops.shared.padding import real_positions

from ..loading.known_options import option_field
from ..modules.multihead_attention import read_padding
from ._registration import register_checked
from ._time_series import EncoderSizes, Pooling, TimeSeriesClassifier, check_batch, place_steps, pooling_field

#: The negative slope of LeakyReLU in Franceschi's encoder, which is torch's default.
_SLOPE = 0.01


@dataclass
class LstmTimeSeriesConfig(EncoderSizes):
    """Options of ``lstm_time_series``; the paper states none, so layers and width are those of the Transformers."""

    dropout: float = option_field(0.1, "dropout probability")
    pooling: Pooling = pooling_field("last")


@dataclass
class TcnTimeSeriesConfig(FairseqDataclass):
    """Options of ``tcn_time_series``; the defaults are the sizes of Franceschi et al. (2019) for the UEA archive."""

    encoder_layers: int = option_field(10, "num residual blocks before the last one")
    encoder_embed_dim: int = option_field(160, "width of the features, which the last block makes")
    tcn_channels: int = option_field(40, "width of the residual blocks before the last one")
    tcn_kernel_size: int = option_field(3, "steps that a convolution weighs")
    dropout: float = option_field(0.1, "dropout probability of the features, before the classes")
    pooling: Pooling = pooling_field("max")


class CausalBlock(nn.Module):
    """Two causal dilated convolutions with LeakyReLU, and a residual: x (B, channels, T) -> (B, out, T); O(T).

    Franceschi, Dieuleveut, Jaggi: *Unsupervised Scalable Representation Learning for Multivariate Time Series* (2019),
    Figure 2: weight normalisation, and a convolution of kernel size 1 if the residual has other channels.
    """

    def __init__(self, channels: int, out: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.past = (kernel_size - 1) * dilation
        self.first = weight_norm(nn.Conv1d(channels, out, kernel_size, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(out, out, kernel_size, dilation=dilation))
        self.residual = nn.Conv1d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, channels, T) -> (B, out, T); a step depends on itself and on earlier steps."""
        y = F.leaky_relu(self.first(F.pad(x, (self.past, 0))), _SLOPE)
        return F.leaky_relu(self.second(F.pad(y, (self.past, 0))), _SLOPE) + self.residual(x)


class CausalEncoder(FairseqEncoder):
    """A causal encoder of series: source (B, T, channels) -> features (B, T, D).

    Real steps are moved to the front before encoding and back afterwards, so padding on any side has no influence.

    Raises:
        ValueError: a series has more steps than ``limit``, or a different number of channels.
    """

    def __init__(self, channels: int, limit: int) -> None:
        super().__init__(None)
        self.channels, self.limit = channels, limit

    def max_positions(self) -> int:
        """fairseq's hook: the number of steps of the longest series."""
        return self.limit

    def forward(self, source: Tensor, padding_mask: Tensor) -> Tensor:
        """source (B, T, channels), padding_mask (B, T) with True = padding -> (B, T, D)."""
        padding_mask = read_padding(padding_mask)
        check_batch(source, padding_mask, self.channels, self.limit)
        features = self.read(place_steps(source, padding_mask, source.shape[1]))
        positions = real_positions(padding_mask).masked_fill(padding_mask, 0)
        features = features.gather(1, positions[..., None].expand(-1, -1, features.shape[2]))
        return features.masked_fill(padding_mask[..., None], 0.0)

    def read(self, source: Tensor) -> Tensor:
        """Causal features (B, T, D) of source (B, T, channels), whose padding is at the end; subclasses define it."""
        raise TypeError(f"{type(self).__name__} reads nothing; allowed: a subclass that defines read")


class LstmEncoder(CausalEncoder):
    """torch's LSTM (Hochreiter and Schmidhuber, 1997), O(T), sequential over steps."""

    def __init__(self, args: Namespace, channels: int) -> None:
        super().__init__(channels, args.max_source_positions)
        layers = args.encoder_layers
        dropout = args.dropout if layers > 1 else 0.0  # torch applies no dropout after the last layer
        self.lstm = nn.LSTM(channels, args.encoder_embed_dim, layers, batch_first=True, dropout=dropout)

    def read(self, source: Tensor) -> Tensor:
        """source (B, T, channels) -> the hidden state of the last layer at each step, (B, T, D).

        Autocast on a CPU does not change its dtype: it would call oneDNN's LSTM in bfloat16, which many CPUs have not.
        """
        with torch.autocast("cpu", enabled=False):
            return self.lstm(source)[0]


class TcnEncoder(CausalEncoder):
    """Residual blocks of causal convolutions whose dilation doubles, as in Franceschi's encoder; O(T)."""

    def __init__(self, args: Namespace, channels: int) -> None:
        super().__init__(channels, args.max_source_positions)
        widths = [channels, *([args.tcn_channels] * args.encoder_layers), args.encoder_embed_dim]
        self.blocks = nn.Sequential(
            *(CausalBlock(*widths[i : i + 2], args.tcn_kernel_size, 2**i) for i in range(len(widths) - 1))
        )

    def read(self, source: Tensor) -> Tensor:
        """The channels of the last block at each step."""
        return self.blocks(source.transpose(1, 2)).transpose(1, 2)


@register_checked("lstm_time_series", LstmTimeSeriesConfig)
class LstmTimeSeriesClassifier(TimeSeriesClassifier):
    """An LSTM, and a linear layer on its state after the last step."""

    options_class, option_prefix = LstmTimeSeriesConfig, "lstm"
    sizes = ("encoder_layers", "encoder_embed_dim")
    head_activation = nn.Identity()

    @classmethod
    def build_encoder(cls, args: Namespace, channels: int) -> FairseqEncoder:
        """The LSTM."""
        return LstmEncoder(args, channels)


@register_checked("tcn_time_series", TcnTimeSeriesConfig)
class TcnTimeSeriesClassifier(TimeSeriesClassifier):
    """The causal dilated convolutions of the paper's column "Unsuper.", max pooling and a linear layer.

    The paper trains the encoder without labels, with a triplet loss, and a support vector machine classifies its
    features; here it is trained with the labels, like the Transformers.
    """

    options_class, option_prefix = TcnTimeSeriesConfig, "tcn"
    sizes = ("encoder_layers", "encoder_embed_dim", "tcn_channels", "tcn_kernel_size")
    head_activation = nn.Identity()

    @classmethod
    def build_encoder(cls, args: Namespace, channels: int) -> FairseqEncoder:
        """The residual blocks."""
        return TcnEncoder(args, channels)
