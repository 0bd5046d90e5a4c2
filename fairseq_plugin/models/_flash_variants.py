"""The models of the FLASH paper's Tables 8 to 10 as a table, for causal decoders and masked encoders."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.utils import safe_getattr
from torch import nn

from ..modules.gated_attention_unit_layer import GatedAttentionUnitDecoderLayer, GatedAttentionUnitEncoderLayer
from ..modules.multihead_attention import LayerDesign
from ..modules.transformer_layer import LinearTimeDecoderLayer, LinearTimeEncoderLayer
from . import _flash_options as flash_options
from ._options import attention_options, option

#: Embedding width, layers and heads by size; w512 to w1024 are the widths in Figure 3.
Sizes = dict[str, tuple[int, int, int]]
_UNITS: Sizes = {"base": (768, 24, 1), "large": (1024, 72, 1)}
_MORE_UNITS: Sizes = {**_UNITS, "w512": (512, 15, 1), "w768": (768, 22, 1), "w1024": (1024, 46, 1)}
_TRANSFORMERS: Sizes = {"base": (768, 12, 12), "large": (1024, 36, 16)}
# Heads have 64 channels, as in Tables 8 to 10; the table next to Figure 3 does not state them.
_MORE_TRANSFORMERS: Sizes = {**_TRANSFORMERS, "w512": (512, 8, 8), "w768": (768, 12, 12), "w1024": (1024, 24, 16)}
_CHUNK_SIZES = {"base": 256, "large": 512}


@dataclass(frozen=True, kw_only=True)
class Variant(ABC):
    """One model of the paper, a column of Tables 8 to 10, from which a causal and a masked model are built."""

    #: The prefix of its class names, and their docstring.
    title: str
    summary: str
    #: Its ``--flash-...`` options; those of its language model, if different; additional ones of its masked model.
    options: type
    causal_options: type | None = None
    masked_options: type = FairseqDataclass
    sizes: Sizes
    #: The option that is 256 in the base size and 512 in the large one; None for a model without chunks.
    chunk_option: str | None = None
    #: Initial standard deviation of token embeddings in causal models; None for fairseq's own 1/√d.
    embedding_std: float | None = None

    @property
    @abstractmethod
    def expansion(self) -> float:
        """The default ratio of the feed-forward width (e in a gated attention unit) to the embedding width."""

    @abstractmethod
    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        """One layer, not yet wrapped; ``limit`` is the model's position limit."""

    def option_classes(self, causal: bool) -> tuple[type, ...]:
        """The dataclasses of the options of the language model or of the masked model."""
        return (self.causal_options or self.options,) if causal else (self.options, self.masked_options)

    def inner_width(self, embed_dim: int) -> int:
        """The default feed-forward width, rounded up to a multiple of 8 if ``expansion`` gives no integer."""
        width = self.expansion * embed_dim
        return round(width) if abs(width - round(width)) < 1e-6 else -(-int(width) // 8) * 8

    def set_size(self, args, side: str, size: str) -> None:
        """Fill in options of ``size`` that the command line left open; ``side`` is encoder or decoder."""
        names = (f"{side}_{name}" for name in ("embed_dim", "layers", "attention_heads"))
        values = dict(zip(names, self.sizes[size]))
        if self.chunk_option is not None:
            values[self.chunk_option] = _CHUNK_SIZES[size]
        for name, value in values.items():
            setattr(args, name, safe_getattr(args, name, value))


@dataclass(frozen=True, kw_only=True)
class UnitVariant(Variant):
    """A stack of gated attention units; without ``chunk_option``, attention is quadratic."""

    # As for the weights of units. With a larger one, units predict their own input token at first, since their
    # branch is near zero. Transformers learn faster with fairseq's: perplexity 136 instead of 168 after 150 updates at
    # 512 tokens of recipes.flash.compare on tinyshakespeare; FLASH 113 instead of 96 (2026-11-20, one seed).
    embedding_std: float | None = 0.02
    expansion = 2.0

    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        """One gated attention unit; the option ``flash_NAME`` is its argument NAME, and ``flash_no_NAME`` negates."""
        unit: dict[str, Any] = {} if self.chunk_option else {"chunk_size": None, "max_positions": limit}
        for options in self.option_classes(causal):
            for name in (name for name in options.__dataclass_fields__ if name.startswith("flash_")):
                argument, value = name.removeprefix("flash_"), option(args, options, name)
                if argument.startswith("no_"):
                    argument, value = argument.removeprefix("no_"), not value
                unit["bias" if argument == "relative_bias" else argument] = value
        layer = GatedAttentionUnitDecoderLayer if causal else GatedAttentionUnitEncoderLayer
        return layer(cfg, unit)


@dataclass(frozen=True, kw_only=True)
class TransformerVariant(Variant):
    """A Transformer with rotary positions and ``attention``, a name in ``common.attention.ATTENTIONS``."""

    options: type = flash_options.TransformerOptions
    attention: str
    gated_ffn: bool = True

    @property
    def expansion(self) -> float:
        """4; 8/3 with GLU, which has a third matrix."""
        return 8 / 3 if self.gated_ffn else 4.0

    def attention_of(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        """The name of the attention, and the options of its constructor."""
        options = self.option_classes(causal)[0]
        if self.attention == "softmax":
            kernel = option(args, options, "flash_kernel")
            divisor = float(limit) if causal else None
            return ("softmax", {}) if kernel == "softmax" else ("quadratic", {"kernel": kernel, "divisor": divisor})
        fixed = {"phi": "relu"} if self.attention == "linear" else {}
        return self.attention, {**fixed, **attention_options(args, self.attention, options, "flash")}

    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        """One Transformer layer."""
        design = LayerDesign(
            *self.attention_of(args, limit, causal),
            rotary=not option(args, self.options, "flash_no_rotary"),
            attention_gate=option(args, self.options, "flash_attention_gate"),
            gated_ffn=self.gated_ffn,
            norm=option(args, self.options, "flash_norm"),
        )
        layer = LinearTimeDecoderLayer if causal else LinearTimeEncoderLayer
        return layer(cfg, *host_options, design=design)


class _CombinerVariant(TransformerVariant):
    def set_size(self, args, side: str, size: str) -> None:
        """Fill in options of ``size`` that the command line left open; ``side`` is encoder or decoder.

        Checkpoints of masked models from before ``size`` set the row length keep the length of their training.
        """
        if safe_getattr(args, "max_source_positions") is not None:  # no typed option: completed before
            args.flash_row_length = option(args, self.options, "flash_row_length")
        super().set_size(args, side, size)


#: The variants, by the prefix of their architecture names.
VARIANTS: dict[str, Variant] = {
    "flash": UnitVariant(
        title="Flash",
        summary="FLASH: mixed chunk attention in gated attention units, O(T), decoding state of constant size.",
        options=flash_options.MixedChunkOptions,
        causal_options=flash_options.CausalMixedChunkOptions,
        masked_options=flash_options.FirstToAllOptions,
        sizes=_UNITS,
        chunk_option="flash_chunk_size",
    ),
    "flash_quad": UnitVariant(
        title="FlashQuad",
        summary="FLASH-Quad: quadratic relu² attention in gated attention units, O(T²) time, O(T) memory.",
        options=flash_options.QuadraticOptions,
        masked_options=flash_options.FirstTokenOptions,
        sizes=_MORE_UNITS,
    ),
    "transformer_plus": TransformerVariant(
        title="TransformerPlus",
        summary="Transformer+: softmax attention through torch's fused kernel, scaled sinusoids and rotary positions.",
        options=flash_options.SoftmaxTransformerOptions,
        attention="softmax",
        gated_ffn=False,
        sizes=_MORE_TRANSFORMERS,
    ),
    "transformer_pp": TransformerVariant(
        title="TransformerPlusPlus",
        summary="Transformer++: Transformer+ with a gated feed-forward block (GLU) of the same parameter count.",
        options=flash_options.SoftmaxTransformerOptions,
        attention="softmax",
        sizes=_MORE_TRANSFORMERS,
    ),
    "mc_transformer_pp": TransformerVariant(
        title="MixedChunkTransformer",
        summary="MC-TFM++ (Table 5): mixed chunk attention on Transformer++'s heads, O(T), constant decoding state.",
        options=flash_options.MixedChunkTransformerOptions,
        attention="mixed_chunk",
        sizes=_TRANSFORMERS,
        chunk_option="flash_chunk_size",
    ),
    "performer": TransformerVariant(
        title="Performer",
        summary="Performer with its relu kernel (no random projections), rotary positions, O(T), constant state.",
        causal_options=flash_options.CausalPerformerOptions,
        attention="linear",
        gated_ffn=False,
        sizes=_TRANSFORMERS,
    ),
    "combiner": _CombinerVariant(
        title="Combiner",
        summary="Combiner, row-major axial, with rotary positions, O(T √T); decoding keeps and revisits every token.",
        options=flash_options.CombinerOptions,
        attention="combiner",
        gated_ffn=False,
        sizes=_TRANSFORMERS,
        chunk_option="flash_row_length",  # called a chunk in the tables: the tokens that a query sees one by one
    ),
}
