"""The language models of the DAFT paper: attention-free Transformers, over characters and over pixels.

*A Dot Product Attention Free Transformer*: DAFT-full and DAFT-conv in place of a Transformer's attention.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq.models import register_model_architecture
from fairseq.utils import safe_getattr

from common.ops.shared.checks import check_positive_int

from ..loading.known_options import option_field
from ._language_model import (
    LinearTimeLanguageModel,
    LinearTimeLanguageModelConfig,
    complete_size,
    register_language_model,
)
from ._options import attention_config, option


@dataclass
class DaftFullConfig(attention_config("daft_full", only=["query"], prefix="daft"), LinearTimeLanguageModelConfig):
    """Options of ``transformer_lm`` and of ``daft_full_lm``."""

    decoder_attention_heads: int = option_field(
        1, "without effect but that it must divide the width: DAFT-full has no heads"
    )
    # In the mechanism a width of 0 means a free matrix, which has its own flag here.
    daft_bias_dim: int = option_field(
        128, "width n of the two factors of the position bias (the paper: 128, pixels 256)"
    )
    daft_free_bias: bool = option_field(
        False, "a free matrix of position biases, tokens x tokens, in place of two factors (Table 6)"
    )


@register_language_model("daft_full_lm", dataclass=DaftFullConfig)
class DaftFullLanguageModel(LinearTimeLanguageModel):
    """DAFT-full: O(T²) time in two matrix products, O(T² + T d) memory; T is at most --tokens-per-sample.

    Decoding keeps every key and value. ``--max-target-positions``, by default --tokens-per-sample, is the number of
    positions that have a bias; a longer input raises ValueError.
    """

    attention_name, option_prefix, options_class = "daft_full", "daft", DaftFullConfig

    @classmethod
    def attention_options(cls, args) -> dict[str, Any]:
        """The ``--daft-...`` options; an option that an older checkpoint lacks has its default."""
        bias_dim: int | None = None
        if not option(args, DaftFullConfig, "daft_free_bias"):
            bias_dim = option(args, DaftFullConfig, "daft_bias_dim")
            check_positive_int("--daft-bias-dim", bias_dim)
        return {**super().attention_options(args), "bias_dim": bias_dim}


_CONV_OPTIONS = attention_config(
    "daft_conv",
    only=["window", "query", "local_only", "gumbel_temperature", "short_conv"],
    prefix="daft",
    causal=True,
    window=64,
)


@dataclass
class DaftConvConfig(_CONV_OPTIONS, LinearTimeLanguageModelConfig):
    """Options of ``transformer_lm`` and of ``daft_conv_lm``."""

    decoder_attention_heads: int = option_field(8, "num heads h: each has one key per token and one filter")
    daft_plain_filter: bool = option_field(False, "filters that are not standardised and scaled (ablation, Table 7)")


@register_language_model("daft_conv_lm", dataclass=DaftConvConfig)
class DaftConvLanguageModel(LinearTimeLanguageModel):
    """DAFT-conv: O(T window), any length; decoding state of constant size, a window of tokens and two sums."""

    attention_name, option_prefix, options_class = "daft_conv", "daft", DaftConvConfig

    @classmethod
    def attention_options(cls, args) -> dict[str, Any]:
        """The ``--daft-...`` options; an option that an older checkpoint lacks has its default."""
        return {
            **super().attention_options(args),
            "reparameterize": not option(args, DaftConvConfig, "daft_plain_filter"),
        }


#: Both experiments: 12 layers of width 512 (Tables 4 and 5). The FFN width is stated for Enwik8 only.
_PAPER = {"decoder_layers": 12, "decoder_embed_dim": 512, "decoder_ffn_embed_dim": 2048, "dropout": 0.1}
#: Options that differ between the experiments, by architecture.
_SIZES = {
    "daft_full_lm_enwik8": {"daft_bias_dim": 128, "decoder_attention_heads": 1},
    "daft_full_lm_cifar10": {"daft_bias_dim": 256, "decoder_attention_heads": 1},
    "daft_conv_lm_enwik8": {"daft_window": 64},
    "daft_conv_lm_cifar10": {"daft_window": 256},
}


def _complete(args, size: dict[str, Any]) -> None:
    """Fill in options that a command line left open; DAFT-conv has 512 heads, a key and a filter for each channel."""
    width = safe_getattr(args, "decoder_embed_dim", _PAPER["decoder_embed_dim"])
    complete_size(args, {**_PAPER, "decoder_attention_heads": width, **size})


for _name, _size in _SIZES.items():
    register_model_architecture(_name.rpartition("_")[0], _name)(partial(_complete, size=_size))
