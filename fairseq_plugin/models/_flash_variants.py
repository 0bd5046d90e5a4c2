"""The models of the FLASH paper's Tables 8 to 10 as layers, for the causal decoder and the masked encoder alike."""

from abc import ABC, abstractmethod
from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.utils import safe_getattr
from torch import nn

from common.modules.forget_gate import NONE

from ..modules.gated_attention_unit_layer import GatedAttentionUnitDecoderLayer, GatedAttentionUnitEncoderLayer
from ..modules.multihead_attention import LayerDesign
from ..modules.transformer_layer import LinearTimeDecoderLayer, LinearTimeEncoderLayer
from . import _flash_options as flash_options
from ._options import attention_options, option


class Variant(ABC):
    """One model of the paper, a column of Tables 8 to 10: its options, its inner width and its layer."""

    #: The dataclass of its ``--flash-...`` options.
    options: type
    #: The feed-forward width (e in a gated attention unit) over the embedding width where none is given.
    expansion: float
    #: Of token embeddings at first, in causal models; None for fairseq's own 1/√d.
    embedding_std: float | None = None
    #: Embedding width, layers and heads of the paper's sizes (Tables 8 to 10, and by its width a size of Figure 3), and
    #: C where there are chunks.
    sizes: dict[str, dict[str, int]]

    @abstractmethod
    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        """One layer, not yet wrapped; ``limit`` is the model's position limit."""

    def inner_width(self, embed_dim: int) -> int:
        """The default feed-forward width, up to the next multiple of 8 where ``expansion`` gives no integer."""
        width = self.expansion * embed_dim
        return round(width) if abs(width - round(width)) < 1e-6 else -(-int(width) // 8) * 8

    def set_size(self, args, side: str, size: str) -> None:
        """Fill in what the command line left open of ``size``; ``side`` is encoder or decoder."""
        for name, value in self.sizes[size].items():
            name = name if name.startswith("flash_") else f"{side}_{name}"
            setattr(args, name, safe_getattr(args, name, value))


def _with_chunks(sizes: dict[str, dict[str, int]], option: str = "flash_chunk_size") -> dict[str, dict[str, int]]:
    """The base and large ``sizes``, each with the paper's chunk size as ``option`` (Tables 8 to 10)."""
    chunk_sizes = {"base": 256, "large": 512}
    return {size: {**sizes[size], option: chunk_size} for size, chunk_size in chunk_sizes.items()}


class _GatedAttentionUnitVariant(Variant):
    """A stack of gated attention units."""

    expansion = 2.0
    # As every weight of the paper. With larger ones, units whose branch is near zero at first foretell the token they
    # are given. Transformers learn faster with fairseq's: perplexity 136 against 168 after 150 updates at 512 tokens of
    # recipes.flash.compare on tinyshakespeare; FLASH 113 against 96 (2026-11-20, one seed).
    embedding_std = 0.02
    sizes = {
        "base": {"embed_dim": 768, "layers": 24, "attention_heads": 1},
        "large": {"embed_dim": 1024, "layers": 72, "attention_heads": 1},
    }

    def unit(self, args, limit: int) -> dict[str, Any]:
        """Arguments of ``common.modules.GatedAttentionUnit`` beside width, heads and dropout."""
        return {
            "query_dim": option(args, self.options, "flash_query_dim"),
            "kernel": option(args, self.options, "flash_kernel"),
            "bias": option(args, self.options, "flash_relative_bias"),
            "norm": option(args, self.options, "flash_norm"),
            "gate": not option(args, self.options, "flash_no_gate"),
            "separate_ffn": option(args, self.options, "flash_separate_ffn"),
            "rotary": not option(args, self.options, "flash_no_rotary"),
            "first_softmax": safe_getattr(args, "flash_first_softmax", False),  # of masked models
        }

    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        layer = GatedAttentionUnitDecoderLayer if causal else GatedAttentionUnitEncoderLayer
        return layer(cfg, self.unit(args, limit))


class _Flash(_GatedAttentionUnitVariant):
    options = flash_options.MixedChunkOptions
    sizes = _with_chunks(_GatedAttentionUnitVariant.sizes)

    def unit(self, args, limit: int) -> dict[str, Any]:
        return {
            **super().unit(args, limit),
            "chunk_size": option(args, self.options, "flash_chunk_size"),
            "local": not option(args, self.options, "flash_no_local"),
            "linear": not option(args, self.options, "flash_no_linear"),
            "overlap": option(args, self.options, "flash_overlap"),
            "chunk_summaries": option(args, self.options, "flash_chunk_summaries"),
            "first_to_all": safe_getattr(args, "flash_first_to_all", False),  # of masked models
            "forget": safe_getattr(args, "flash_forget", NONE),  # of language models
        }


class _FlashQuad(_GatedAttentionUnitVariant):
    options = flash_options.QuadraticOptions
    sizes = {
        **_GatedAttentionUnitVariant.sizes,
        "w512": {"embed_dim": 512, "layers": 15, "attention_heads": 1},
        "w768": {"embed_dim": 768, "layers": 22, "attention_heads": 1},
        "w1024": {"embed_dim": 1024, "layers": 46, "attention_heads": 1},
    }

    def unit(self, args, limit: int) -> dict[str, Any]:
        divisor = option(args, self.options, "flash_divisor")
        return {**super().unit(args, limit), "chunk_size": None, "max_positions": limit, "divisor": divisor}


class _TransformerVariant(Variant):
    """A Transformer with rotary positions; subclasses name its attention."""

    options = flash_options.TransformerOptions
    gated_ffn = False
    sizes = {
        "base": {"embed_dim": 768, "layers": 12, "attention_heads": 12},
        "large": {"embed_dim": 1024, "layers": 36, "attention_heads": 16},
    }

    @property
    def expansion(self) -> float:
        """4, or 8/3 with GLU, which has a third matrix."""
        return 8 / 3 if self.gated_ffn else 4.0

    @abstractmethod
    def attention(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        """A name of ``common.attention.ATTENTIONS``, and options of its constructor."""

    def build_layer(self, args, cfg: TransformerConfig, limit: int, causal: bool, *host_options) -> nn.Module:
        design = LayerDesign(
            *self.attention(args, limit, causal),
            rotary=not option(args, self.options, "flash_no_rotary"),
            attention_gate=option(args, self.options, "flash_attention_gate"),
            gated_ffn=self.gated_ffn,
            norm=option(args, self.options, "flash_norm"),
        )
        layer = LinearTimeDecoderLayer if causal else LinearTimeEncoderLayer
        return layer(cfg, *host_options, design=design)


class _TransformerPlus(_TransformerVariant):
    options = flash_options.SoftmaxTransformerOptions
    # Heads have 64 channels, as in Tables 8 to 10; the table beside Figure 3 names none.
    sizes = {
        **_TransformerVariant.sizes,
        "w512": {"embed_dim": 512, "layers": 8, "attention_heads": 8},
        "w768": {"embed_dim": 768, "layers": 12, "attention_heads": 12},
        "w1024": {"embed_dim": 1024, "layers": 24, "attention_heads": 16},
    }

    def attention(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        kernel = option(args, self.options, "flash_kernel")
        if kernel == "softmax":
            return "softmax", {}
        divisor: float | None = float(limit) if causal else None
        return "quadratic", {"kernel": kernel, "divisor": divisor}


class _TransformerPlusPlus(_TransformerPlus):
    gated_ffn = True


class _MixedChunkTransformer(_TransformerVariant):
    options = flash_options.MixedChunkTransformerOptions
    gated_ffn = True
    sizes = _with_chunks(_TransformerVariant.sizes)

    def attention(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        return "mixed_chunk", attention_options(args, "mixed_chunk", self.options, "flash")


class _Performer(_TransformerVariant):
    def attention(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        if not causal:
            return "linear", {"phi": "relu"}
        computed = option(args, flash_options.CausalPerformerOptions, "flash_cumulative_sum")
        return "linear", {"phi": "relu", "cumulative_sum": computed}


class _Combiner(_TransformerVariant):
    options = flash_options.CombinerOptions
    # What the tables call a chunk is Combiner's row: the tokens that a query sees one by one.
    sizes = _with_chunks(_TransformerVariant.sizes, "flash_row_length")

    def set_size(self, args, side: str, size: str) -> None:
        """Fill in what the command line left open of ``size``; ``side`` is encoder or decoder.

        A masked model's checkpoint from before ``size`` set the row length keeps the length it was trained with.
        """
        if safe_getattr(args, "max_source_positions") is not None:  # nobody types it: completed once already
            args.flash_row_length = option(args, self.options, "flash_row_length")
        super().set_size(args, side, size)

    def attention(self, args, limit: int, causal: bool) -> tuple[str, dict[str, Any]]:
        return "combiner", attention_options(args, "combiner", self.options, "flash")


FLASH = _Flash()
FLASH_QUAD = _FlashQuad()
TRANSFORMER_PLUS = _TransformerPlus()
TRANSFORMER_PLUS_PLUS = _TransformerPlusPlus()
MIXED_CHUNK_TRANSFORMER = _MixedChunkTransformer()
PERFORMER = _Performer()
COMBINER = _Combiner()

#: By the name that architectures begin with.
VARIANTS: dict[str, Variant] = {
    "flash": FLASH,
    "flash_quad": FLASH_QUAD,
    "transformer_plus": TRANSFORMER_PLUS,
    "transformer_pp": TRANSFORMER_PLUS_PLUS,
    "mc_transformer_pp": MIXED_CHUNK_TRANSFORMER,
    "performer": PERFORMER,
    "combiner": COMBINER,
}
