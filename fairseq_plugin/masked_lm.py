"""The masked language models of the FLASH paper, for fairseq's ``masked_lm`` and ``sentence_prediction`` tasks.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 4, 6 and 8. Everything around the layers is
fairseq's RoBERTa: embeddings, language-model head, classification heads, initialisation N(0, 0.02). All are pre-norm
with a final norm, ScaleNorm as in the paper, and embed positions as scaled sinusoids.
"""

import contextlib
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model, register_model_architecture
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.models.roberta.model import base_architecture
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf, open_dict
from torch import nn

from . import flash_columns
from .checkpoints import CheckedLoading
from .encoder import LinearTimeRobertaEncoder
from .flash_columns import COLUMNS, Column
from .options import option
from .positions import scaled_sin_positions

# Options of fairseq's adaptive pruning, and their values where there is none.
_ADAPTIVE_PRUNING = {
    "mha_reg_scale_factor": 0.0,
    "ffn_reg_scale_factor": 0.0,
    "mha_heads_to_keep": -1,
    "ffn_blocks_to_remove": -1,
}


@dataclass
class MaskedOptions(FairseqDataclass):
    """What fairseq's other encoders have on the command line and its RoBERTa has not."""

    encoder_learned_pos: bool = field(
        default=False, metadata={"help": "use learned positional embeddings in the encoder"}
    )
    checkpoint_activations: bool = field(default=False, metadata={"help": "checkpoint activations at each layer"})
    offload_activations: bool = field(
        default=False, metadata={"help": "move checkpointed activations to CPU; sets --checkpoint-activations"}
    )


@dataclass
class FirstTokenOptions(FairseqDataclass):
    """The fine-tuning forms of Table 4, of FLASH and FLASH-Quad."""

    flash_first_softmax: bool = field(
        default=False, metadata={"help": "the first token attends with softmax, whatever the kernel (Table 4)"}
    )


@dataclass
class FirstToAllOptions(FirstTokenOptions):
    """The same of FLASH alone."""

    flash_first_to_all: bool = field(
        default=False,
        metadata={"help": "the first token of each chunk attends to the whole sequence with softmax (Table 4)"},
    )


class FlashFamilyMaskedModel(CheckedLoading, RobertaModel):
    """fairseq's RoBERTa over layers of a column of the paper's tables, which subclasses name."""

    column: Column
    #: Options beside those of the column and of all masked models.
    further_options: type = FairseqDataclass

    @classmethod
    def hub_models(cls) -> Dict[str, Any]:
        """No downloads: the stock ones hold softmax attention."""
        return {}

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        bpe: Optional[str] = None,
        **options,
    ) -> RobertaHubInterface:
        """As fairseq's, whose default for ``bpe`` is GPT-2's and downloads it; here None, that of the training if any.

        ``encode`` and ``fill_mask``, which take sentences, need one; ``extract_features`` takes tokens.
        """
        return super().from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, bpe=bpe, **options)

    @classmethod
    def add_args(cls, parser) -> None:
        """RoBERTa's options and ours."""
        RobertaModel.add_args(parser)
        for options in (MaskedOptions, cls.column.options, cls.further_options):
            gen_parser_from_dataclass(parser, options(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build the model as ``RobertaModel`` does, with our encoder in it.

        Raises:
            ValueError: an option that the column does not allow.
        """
        with open_dict(args) if OmegaConf.is_config(args) else contextlib.nullcontext():
            masked_architecture(args, cls.column)
            if safe_getattr(args, "max_positions") is None:
                args.max_positions = safe_getattr(args, "tokens_per_sample") or task.max_positions()
            if safe_getattr(args, "offload_activations", False):
                args.checkpoint_activations = True
            encoder = LinearTimeRobertaEncoder(
                args,
                task.source_dictionary,
                build_layer=partial(cls.build_layer, args),
                build_positions=partial(scaled_sin_positions, max_positions=args.max_positions),
                norm=option(args, cls.column.options, "flash_norm"),
            )
        _check_pruning(args, encoder.sentence_encoder.layers)
        return cls(args, encoder)

    @classmethod
    def build_layer(cls, args, cfg) -> nn.Module:
        """One layer of the encoder, not yet wrapped."""
        return cls.column.build_layer(args, cfg, args.max_positions, False)


def _check_pruning(args, layers: nn.ModuleList) -> None:
    """Raise ValueError for options of RoBERTa's adaptive pruning where layers have not the matrices it prunes."""
    if all(isinstance(getattr(layer, "fc1", None), nn.Linear) for layer in layers):
        return
    for name, off in _ADAPTIVE_PRUNING.items():
        given = safe_getattr(args, name, off)
        if given != off:
            raise ValueError(f"{name} is {given}; allowed for gated attention units and with GLU: {off}, no pruning")


def masked_architecture(args, column: Column, size: str = "base") -> None:
    """Fill in what the command line left open: the paper's masked model of ``size``, then RoBERTa's defaults."""
    column.set_size(args, "encoder", size)
    ffn = safe_getattr(args, "encoder_ffn_embed_dim") or column.inner_width(args.encoder_embed_dim)
    args.encoder_ffn_embed_dim = ffn
    args.flash_norm = safe_getattr(args, "flash_norm", "scalenorm")
    args.encoder_normalize_before = True
    args.layernorm_embedding = safe_getattr(args, "layernorm_embedding", False)
    args.encoder_learned_pos = safe_getattr(args, "encoder_learned_pos", False)
    for name in ("dropout", "attention_dropout"):
        setattr(args, name, safe_getattr(args, name, 0.0))
    base_architecture(args)


@register_model("flash_mlm")
class FlashMaskedModel(FlashFamilyMaskedModel):
    """FLASH, O(T)."""

    column = flash_columns.FLASH
    further_options = FirstToAllOptions


@register_model("flash_quad_mlm")
class FlashQuadMaskedModel(FlashFamilyMaskedModel):
    """FLASH-Quad, O(T²) time, O(T) memory."""

    column = flash_columns.FLASH_QUAD
    further_options = FirstTokenOptions


@register_model("transformer_plus_mlm")
class TransformerPlusMaskedModel(FlashFamilyMaskedModel):
    """Transformer+."""

    column = flash_columns.TRANSFORMER_PLUS


@register_model("transformer_pp_mlm")
class TransformerPlusPlusMaskedModel(FlashFamilyMaskedModel):
    """Transformer++."""

    column = flash_columns.TRANSFORMER_PLUS_PLUS


@register_model("mc_transformer_pp_mlm")
class MixedChunkTransformerMaskedModel(FlashFamilyMaskedModel):
    """MC-TFM++, O(T)."""

    column = flash_columns.MIXED_CHUNK_TRANSFORMER


@register_model("performer_mlm")
class PerformerMaskedModel(FlashFamilyMaskedModel):
    """Performer with its relu kernel, O(T)."""

    column = flash_columns.PERFORMER


@register_model("combiner_mlm")
class CombinerMaskedModel(FlashFamilyMaskedModel):
    """Combiner, row-major axial, O(T √T)."""

    column = flash_columns.COMBINER


def _register(name: str, column: Column) -> None:
    register_model_architecture(f"{name}_mlm", f"{name}_mlm")(partial(masked_architecture, column=column))
    for size in column.sizes:
        architecture = partial(masked_architecture, column=column, size=size)
        register_model_architecture(f"{name}_mlm", f"{name}_mlm_{size}")(architecture)


for _name, _column in COLUMNS.items():
    _register(_name, _column)
