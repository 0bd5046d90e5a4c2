"""The masked language models of the FLASH paper, for fairseq's ``masked_lm`` and ``sentence_prediction`` tasks.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 4, 6 and 8. All are pre-norm with a final
norm, ScaleNorm as in the paper, and embed positions as scaled sinusoids.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_REGISTRY, register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.utils import safe_getattr
from torch import nn

from ..modules.positions import scaled_sin_positions
from . import _flash_variants as flash_variants
from ._configuration import register_architecture
from ._flash_variants import VARIANTS, Variant
from ._masked_model import LinearTimeMaskedModel
from ._options import option


@dataclass
class FirstTokenOptions(FairseqDataclass):
    """The fine-tuning forms of Table 4, of FLASH and FLASH-Quad."""

    flash_first_softmax: bool = field(
        default=False, metadata={"help": "the first token attends with softmax, whatever the kernel (Table 4)"}
    )


@dataclass
class FirstToAllOptions(FirstTokenOptions):
    """The fine-tuning forms of Table 4, of FLASH: those of ``FirstTokenOptions`` and one of FLASH alone."""

    flash_first_to_all: bool = field(
        default=False,
        metadata={"help": "the first token of each chunk attends to the whole sequence with softmax (Table 4)"},
    )


class FlashFamilyMaskedModel(LinearTimeMaskedModel):
    """A masked model of the paper's tables; subclasses name their ``Variant``."""

    option_prefix = "flash"
    variant: Variant
    #: Options beside those of the variant and of all masked models.
    further_options: type = FairseqDataclass

    @classmethod
    def add_args(cls, parser) -> None:
        """RoBERTa's options and ours."""
        super().add_args(parser)
        for options in (cls.variant.options, cls.further_options):
            gen_parser_from_dataclass(parser, options(), delete_default=True)

    @classmethod
    def complete_options(cls, args) -> None:
        """Fill in what the command line left open: the paper's base size, then the defaults of all masked models."""
        cls.complete_size(args, "base")

    @classmethod
    def complete_size(cls, args, size: str) -> None:
        """Fill in what the command line left open: the paper's ``size``, then the defaults of all masked models."""
        cls.variant.set_size(args, "encoder", size)
        ffn = safe_getattr(args, "encoder_ffn_embed_dim") or cls.variant.inner_width(args.encoder_embed_dim)
        args.encoder_ffn_embed_dim = ffn
        args.flash_norm = safe_getattr(args, "flash_norm", "scalenorm")
        for name in ("dropout", "attention_dropout"):
            setattr(args, name, safe_getattr(args, name, 0.0))
        super().complete_options(args)

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig) -> nn.Module:
        """One layer of the encoder, not yet wrapped."""
        return cls.variant.build_layer(args, cfg, args.max_positions, False)

    @classmethod
    def encoder_options(cls, args) -> dict[str, Any]:
        """Scaled sinusoids, and the norm that the layers have."""
        return {"build_positions": scaled_sin_positions, "norm": option(args, cls.variant.options, "flash_norm")}


@register_model("flash_mlm")
class FlashMaskedModel(FlashFamilyMaskedModel):
    """FLASH, O(T)."""

    variant = flash_variants.FLASH
    further_options = FirstToAllOptions


@register_model("flash_quad_mlm")
class FlashQuadMaskedModel(FlashFamilyMaskedModel):
    """FLASH-Quad, O(T²) time, O(T) memory."""

    variant = flash_variants.FLASH_QUAD
    further_options = FirstTokenOptions


@register_model("transformer_plus_mlm")
class TransformerPlusMaskedModel(FlashFamilyMaskedModel):
    """Transformer+."""

    variant = flash_variants.TRANSFORMER_PLUS


@register_model("transformer_pp_mlm")
class TransformerPlusPlusMaskedModel(FlashFamilyMaskedModel):
    """Transformer++."""

    variant = flash_variants.TRANSFORMER_PLUS_PLUS


@register_model("mc_transformer_pp_mlm")
class MixedChunkTransformerMaskedModel(FlashFamilyMaskedModel):
    """MC-TFM++, O(T)."""

    variant = flash_variants.MIXED_CHUNK_TRANSFORMER


@register_model("performer_mlm")
class PerformerMaskedModel(FlashFamilyMaskedModel):
    """Performer with its relu kernel, O(T)."""

    variant = flash_variants.PERFORMER


@register_model("combiner_mlm")
class CombinerMaskedModel(FlashFamilyMaskedModel):
    """Combiner, row-major axial, O(T √T)."""

    variant = flash_variants.COMBINER


for _name, _variant in VARIANTS.items():
    _model = MODEL_REGISTRY[f"{_name}_mlm"]
    register_architecture(f"{_name}_mlm", f"{_name}_mlm")(_model.complete_options)
    for _size in _variant.sizes:
        _architecture = partial(_model.complete_size, size=_size)
        register_architecture(f"{_name}_mlm", f"{_name}_mlm_{_size}")(_architecture)
