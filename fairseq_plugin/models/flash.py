"""The causal language models of the FLASH paper: FLASH, FLASH-Quad and those it compares them with.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 8-10. All are pre-norm with a final norm,
embed positions as scaled sinusoids (``--decoder-learned-pos`` for learned ones) and do not scale token embeddings.
"""

from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.utils import safe_getattr
from torch import nn

from ..modules.positions import scaled_sin_positions
from . import _flash_options as flash_options
from . import _flash_variants as flash_variants
from ._flash_variants import VARIANTS, Variant
from ._language_model import LinearTimeLanguageModel, check_command_line, register_language_model
from ._options import DocumentOptions, option
from ._weight_decay import DecayOptions


@dataclass
class FlashFamilyConfig(DocumentOptions, DecayOptions, TransformerLanguageModelConfig):
    """Options of ``transformer_lm``, with the defaults of the paper's models."""

    dropout: float = field(default=0.0, metadata={"help": "dropout probability; the paper uses none"})
    decoder_ffn_embed_dim: Optional[int] = field(
        default=None,
        metadata={
            "help": "width inside a feed-forward block, or of U and V in a gated attention unit; default: 4, 8/3 with "
            "GLU, or 2 times the embedding dimension"
        },
    )
    decoder_input_dim: Optional[int] = field(
        default=None, metadata={"help": "decoder input dimension; default: the embedding dimension"}
    )
    decoder_output_dim: Optional[int] = field(
        default=None, metadata={"help": "decoder output dimension; default: the embedding dimension"}
    )


@dataclass
class GatedAttentionUnitConfig(FlashFamilyConfig):
    """Options of the paper's models of gated attention units."""

    decoder_layers: int = field(default=12, metadata={"help": "num decoder layers, two for one of a Transformer"})
    decoder_attention_heads: int = field(default=1, metadata={"help": "num attention heads; the paper has one"})
    activation_fn: ChoiceEnum(("silu",)) = field(
        default="silu", metadata={"help": "activation function of the gated attention unit; there is one"}
    )


@dataclass
class FlashTransformerConfig(FlashFamilyConfig):
    """Options of the paper's models that are Transformers."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = field(
        default="gelu", metadata={"help": "activation function to use"}
    )


class FlashFamilyLanguageModel(LinearTimeLanguageModel):
    """A language model of the paper's tables; subclasses name their ``Variant``."""

    option_prefix = "flash"
    variant: Variant

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None) -> nn.Embedding:
        """fairseq's hook: token embeddings, drawn as the variant wants them."""
        embedding = super().build_embedding(args, dictionary, embed_dim, path)
        if cls.variant.embedding_std is not None:
            nn.init.normal_(embedding.weight, std=cls.variant.embedding_std)
            nn.init.zeros_(embedding.weight[dictionary.pad()])
        return embedding

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig, no_encoder_attn: bool) -> nn.Module:
        """One layer of the variant."""
        return cls.variant.build_layer(args, cfg, args.max_target_positions, True, no_encoder_attn)

    @classmethod
    def decoder_options(cls, args) -> dict[str, Any]:
        """Scaled sinusoids, and the norm that the layers have."""
        return {"build_positions": scaled_sin_positions, "norm": option(args, cls.variant.options, "flash_norm")}

    @classmethod
    def build_model(cls, args, task):
        """Build the model; ``LinearTimeLanguageModel.build_model``, with widths that follow the embedding's."""
        args.no_scale_embedding = True
        args.decoder_input_dim = args.decoder_input_dim or args.decoder_embed_dim
        args.decoder_output_dim = args.decoder_output_dim or args.decoder_embed_dim
        args.decoder_ffn_embed_dim = args.decoder_ffn_embed_dim or cls.variant.inner_width(args.decoder_embed_dim)
        return super().build_model(args, task)


@dataclass
class FlashLanguageModelConfig(flash_options.CausalMixedChunkOptions, GatedAttentionUnitConfig):
    """Options of ``flash_lm``."""


@register_language_model("flash_lm", dataclass=FlashLanguageModelConfig)
class FlashLanguageModel(FlashFamilyLanguageModel):
    """FLASH: mixed chunk attention in gated attention units, O(T), decoding state of constant size."""

    variant = flash_variants.FLASH


@dataclass
class FlashQuadLanguageModelConfig(flash_options.QuadraticOptions, GatedAttentionUnitConfig):
    """Options of ``flash_quad_lm``."""


@register_language_model("flash_quad_lm", dataclass=FlashQuadLanguageModelConfig)
class FlashQuadLanguageModel(FlashFamilyLanguageModel):
    """FLASH-Quad: quadratic relu² attention in gated attention units, O(T²) time, O(T) memory."""

    variant = flash_variants.FLASH_QUAD


@dataclass
class TransformerPlusConfig(flash_options.SoftmaxTransformerOptions, FlashTransformerConfig):
    """Options of ``transformer_plus_lm`` and ``transformer_pp_lm``."""


@register_language_model("transformer_plus_lm", dataclass=TransformerPlusConfig)
class TransformerPlusLanguageModel(FlashFamilyLanguageModel):
    """Transformer+: softmax attention through torch's fused kernel, with scaled sinusoids and rotary positions."""

    variant = flash_variants.TRANSFORMER_PLUS


@register_language_model("transformer_pp_lm", dataclass=TransformerPlusConfig)
class TransformerPlusPlusLanguageModel(FlashFamilyLanguageModel):
    """Transformer++: Transformer+ with a gated feed-forward block (GLU) of the same parameter count."""

    variant = flash_variants.TRANSFORMER_PLUS_PLUS


@dataclass
class MixedChunkTransformerConfig(flash_options.MixedChunkTransformerOptions, FlashTransformerConfig):
    """Options of ``mc_transformer_pp_lm``."""


@register_language_model("mc_transformer_pp_lm", dataclass=MixedChunkTransformerConfig)
class MixedChunkTransformerLanguageModel(FlashFamilyLanguageModel):
    """MC-TFM++ (Table 5): mixed chunk attention on Transformer++'s heads, O(T), decoding state of constant size."""

    variant = flash_variants.MIXED_CHUNK_TRANSFORMER


@dataclass
class PerformerConfig(flash_options.CausalPerformerOptions, FlashTransformerConfig):
    """Options of ``performer_lm``."""


@register_language_model("performer_lm", dataclass=PerformerConfig)
class PerformerLanguageModel(FlashFamilyLanguageModel):
    """Performer with its relu kernel (without random projections) and rotary positions, O(T), constant state."""

    variant = flash_variants.PERFORMER


@dataclass
class CombinerConfig(flash_options.CombinerOptions, FlashTransformerConfig):
    """Options of ``combiner_lm``."""


@register_language_model("combiner_lm", dataclass=CombinerConfig)
class CombinerLanguageModel(FlashFamilyLanguageModel):
    """Combiner, row-major axial, with rotary positions, O(T √T); decoding keeps and revisits every token."""

    variant = flash_variants.COMBINER


def _architecture(variant: Variant, size: str):
    def architecture(args) -> None:
        check_command_line(args)
        args.share_decoder_input_output_embed = safe_getattr(args, "share_decoder_input_output_embed", True)
        variant.set_size(args, "decoder", size)

    return architecture


for _name, _variant in VARIANTS.items():
    for _size in _variant.sizes:
        register_model_architecture(f"{_name}_lm", f"{_name}_lm_{_size}")(_architecture(_variant, _size))
