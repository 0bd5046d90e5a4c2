"""The masked language models of the FLASH paper, for fairseq's ``masked_lm`` and ``sentence_prediction`` tasks.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 4, 6 and 8. All are pre-norm with a final
norm, ScaleNorm as in the paper, and embed positions as scaled sinusoids.
"""

from functools import partial
from typing import Any

from fairseq.models import register_model
from fairseq.utils import safe_getattr

from ..modules.positions import scaled_sin_positions
from ._configuration import register_architecture
from ._encoder import BuildLayer
from ._flash_variants import VARIANTS, Variant
from ._masked_model import LinearTimeMaskedModel
from ._options import option
from ._registration import make_class


class FlashFamilyMaskedModel(LinearTimeMaskedModel):
    """A masked model of the paper's tables; each class has its ``Variant``."""

    option_prefix = "flash"
    variant: Variant

    @classmethod
    def complete_options(cls, args) -> None:
        """Fill in options that the command line left open: the paper's base size, then masked models' defaults."""
        cls.complete_size(args, "base")

    @classmethod
    def complete_size(cls, args, size: str) -> None:
        """Fill in options that the command line left open: the paper's ``size``, then masked models' defaults."""
        cls.variant.set_size(args, "encoder", size)
        ffn = safe_getattr(args, "encoder_ffn_embed_dim") or cls.variant.inner_width(args.encoder_embed_dim)
        args.encoder_ffn_embed_dim = ffn
        args.flash_norm = safe_getattr(args, "flash_norm", "scalenorm")
        for name in ("dropout", "attention_dropout"):
            setattr(args, name, safe_getattr(args, name, 0.0))
        super().complete_options(args)

    @classmethod
    def layer_builder(cls, args) -> BuildLayer:
        """A function that builds a layer of the variant."""
        return lambda cfg: cls.variant.build_layer(args, cfg, args.max_positions, False)

    @classmethod
    def encoder_options(cls, args) -> dict[str, Any]:
        """Scaled sinusoids, and the same norm as the layers."""
        return {"build_positions": scaled_sin_positions, "norm": option(args, cls.variant.options, "flash_norm")}


for _name, _variant in VARIANTS.items():
    _attributes = {"__doc__": _variant.summary, "variant": _variant, "option_classes": _variant.option_classes(False)}
    _model = make_class(__name__, f"{_variant.title}MaskedModel", FlashFamilyMaskedModel, **_attributes)
    register_architecture(f"{_name}_mlm", f"{_name}_mlm")(register_model(f"{_name}_mlm")(_model).complete_options)
    for _size in _variant.sizes:
        register_architecture(f"{_name}_mlm", f"{_name}_mlm_{_size}")(partial(_model.complete_size, size=_size))
