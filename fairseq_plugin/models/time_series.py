"""``NAME_time_series`` for every attention NAME that sees the whole sequence, and ``flash_time_series``.

Classifiers of time series in the size of the Flowformer paper's Table 6. The names and the ``--NAME-...`` options
follow from the declaration of each mechanism.
"""

from argparse import Namespace
from dataclasses import dataclass
from typing import Optional

from fairseq.dataclass import ChoiceEnum

from ..loading.known_options import option_field
from . import _flash_options as flash_options
from . import time_series_baselines  # noqa: F401  registers lstm_time_series and tcn_time_series
from ._encoder import BuildLayer
from ._flash_variants import VARIANTS
from ._options import attention_config
from ._registration import derive, register_checked, register_variant
from ._time_series import TimeSeriesClassifier, TimeSeriesConfig, TransformerTimeSeriesConfig

#: Default options that the authors use for time series, by mechanism.
_DEFAULTS = {"flow": {"clamp": None}}


@dataclass
class FlashTimeSeriesConfig(flash_options.MixedChunkOptions, TimeSeriesConfig):
    """Options of ``flash_time_series``."""

    encoder_layers: int = option_field(4, "num gated attention units, two for a Transformer layer")
    encoder_attention_heads: int = option_field(1, "num encoder attention heads; the paper has one")
    encoder_ffn_embed_dim: Optional[int] = option_field(
        None, "width of U and V in a unit; default: twice the width of the encoder"
    )
    activation_dropout: float = option_field(0.1, "dropout probability of what goes into the last projection of a unit")
    activation_fn: ChoiceEnum(("silu",)) = option_field(
        "silu", "activation function of the gated attention unit; there is one"
    )


@register_checked("flash_time_series", FlashTimeSeriesConfig)
class FlashTimeSeriesClassifier(TimeSeriesClassifier):
    """Gated attention units with mixed chunk attention (FLASH), O(T); each unit normalises its input (pre-norm)."""

    options_class = FlashTimeSeriesConfig
    option_prefix = "flash"

    @classmethod
    def complete_options(cls, args: Namespace) -> None:
        """Fill in the width of U and V."""
        args.encoder_ffn_embed_dim = args.encoder_ffn_embed_dim or VARIANTS["flash"].inner_width(args.encoder_embed_dim)

    @classmethod
    def layer_builder(cls, args: Namespace) -> BuildLayer:
        """A function that builds a gated attention unit."""
        return lambda cfg: VARIANTS["flash"].build_layer(args, cfg, args.max_source_positions, False)


def _register(prefix: str, attention: str) -> None:
    options = attention_config(attention, **_DEFAULTS.get(attention, {}))
    register_variant(prefix, "time_series", attention, TimeSeriesClassifier, options, TransformerTimeSeriesConfig)


derive("bidirectional", _register)
