"""The causal language models of the FLASH paper: FLASH, FLASH-Quad and the models they are compared with.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 8-10. All are pre-norm with a final norm,
embed positions as scaled sinusoids (``--decoder-learned-pos`` for learned ones) and do not scale token embeddings.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.utils import safe_getattr
from torch import nn

from ..loading.known_options import option_field
from ..modules.positions import scaled_sin_positions
from ._decoder import BuildLayer
from ._flash_variants import VARIANTS, UnitVariant, Variant
from ._language_model import LinearTimeLanguageModel, check_command_line, register_language_model
from ._options import DocumentOptions, option
from ._registration import make_class, make_config
from ._weight_decay import DecayOptions


@dataclass
class FlashFamilyConfig(DocumentOptions, DecayOptions, TransformerLanguageModelConfig):
    """Options of ``transformer_lm``, with the defaults of the paper's models."""

    dropout: float = option_field(0.0, "dropout probability; the paper uses none")
    decoder_ffn_embed_dim: Optional[int] = option_field(
        None,
        "width inside a feed-forward block, or of U and V in a gated attention unit; default: 4, 8/3 with "
        "GLU, or 2 times the embedding dimension",
    )
    decoder_input_dim: Optional[int] = option_field(None, "decoder input dimension; default: the embedding dimension")
    decoder_output_dim: Optional[int] = option_field(None, "decoder output dimension; default: the embedding dimension")


@dataclass
class GatedAttentionUnitConfig(FlashFamilyConfig):
    """Options of the paper's models of gated attention units."""

    decoder_layers: int = option_field(12, "num decoder layers, two for one of a Transformer")
    decoder_attention_heads: int = option_field(1, "num attention heads; the paper has one")
    activation_fn: ChoiceEnum(("silu",)) = option_field(
        "silu", "activation function of the gated attention unit; there is one"
    )


@dataclass
class FlashTransformerConfig(FlashFamilyConfig):
    """Options of the paper's models that are Transformers."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = option_field("gelu", "activation function to use")


class FlashFamilyLanguageModel(LinearTimeLanguageModel):
    """A language model of the paper's tables; each class has its ``Variant``."""

    option_prefix = "flash"
    variant: Variant

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None) -> nn.Embedding:
        """fairseq's hook: token embeddings, initialised as the variant specifies."""
        embedding = super().build_embedding(args, dictionary, embed_dim, path)
        if cls.variant.embedding_std is not None:
            nn.init.normal_(embedding.weight, std=cls.variant.embedding_std)
            nn.init.zeros_(embedding.weight[dictionary.pad()])
        return embedding

    @classmethod
    def layer_builder(cls, args) -> BuildLayer:
        """A function that builds a layer of the variant."""
        return lambda cfg, *host: cls.variant.build_layer(args, cfg, args.max_target_positions, True, *host)

    @classmethod
    def decoder_options(cls, args) -> dict[str, Any]:
        """Scaled sinusoids, and the same norm as the layers."""
        return {"build_positions": scaled_sin_positions, "norm": option(args, cls.variant.options, "flash_norm")}

    @classmethod
    def build_model(cls, args, task):
        """Build the model as ``LinearTimeLanguageModel`` does; other widths follow from the embedding width."""
        args.no_scale_embedding = True
        args.decoder_input_dim = args.decoder_input_dim or args.decoder_embed_dim
        args.decoder_output_dim = args.decoder_output_dim or args.decoder_embed_dim
        args.decoder_ffn_embed_dim = args.decoder_ffn_embed_dim or cls.variant.inner_width(args.decoder_embed_dim)
        return super().build_model(args, task)


def _complete_size(variant: Variant, size: str, args) -> None:
    check_command_line(args)
    args.share_decoder_input_output_embed = safe_getattr(args, "share_decoder_input_output_embed", True)
    variant.set_size(args, "decoder", size)


for _name, _variant in VARIANTS.items():
    _is_unit, _title = isinstance(_variant, UnitVariant), f"{_variant.title}LanguageModel"
    _bases = *_variant.option_classes(True), GatedAttentionUnitConfig if _is_unit else FlashTransformerConfig
    _config = make_config(__name__, f"{_title if _is_unit else _variant.title}Config", *_bases)
    _model = make_class(__name__, _title, FlashFamilyLanguageModel, variant=_variant, __doc__=_variant.summary)
    register_language_model(f"{_name}_lm", dataclass=_config)(_model)
    for _size in _variant.sizes:
        register_model_architecture(f"{_name}_lm", f"{_name}_lm_{_size}")(partial(_complete_size, _variant, _size))
