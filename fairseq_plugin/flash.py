"""The causal language models of the FLASH paper: FLASH, FLASH-Quad and the columns of its tables they stand beside.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, Tables 8-10. All are pre-norm with a final norm,
embed positions as scaled sinusoids (``--decoder-learned-pos`` for learned ones) and do not scale token embeddings.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.utils import safe_getattr
from torch import nn

from common.norms import NORMS
from common.ops.score_kernels import SCORE_KERNELS
from common.positions import RELATIVE_BIASES

from .attention import LayerDesign
from .gau_layer import GatedAttentionUnitDecoderLayer
from .language_model import LinearTimeLanguageModel, plain
from .positions import scaled_sin_positions


@dataclass
class FlashFamilyConfig(TransformerLanguageModelConfig):
    """Options of ``transformer_lm`` and what all columns of the paper's tables share."""

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
    flash_norm: ChoiceEnum(tuple(NORMS)) = field(
        default="layernorm", metadata={"help": "normalisation; the paper's is scalenorm in masked models only"}
    )
    flash_no_rotary: bool = field(default=False, metadata={"help": "no rotary positions of queries and keys"})


class FlashFamilyLanguageModel(LinearTimeLanguageModel):
    """A language model of the paper's tables; subclasses say what a layer is."""

    #: The feed-forward width (or e) over the embedding width where none is given.
    expansion: float

    @classmethod
    def decoder_options(cls, args) -> Dict[str, Any]:
        """Scaled sinusoids, and the norm that the layers have."""
        positions = partial(scaled_sin_positions, max_positions=args.max_target_positions)
        return {"build_positions": positions, "norm": plain(safe_getattr(args, "flash_norm", "layernorm"))}

    @classmethod
    def build_model(cls, args, task):
        """Build the model; ``LinearTimeLanguageModel.build_model``, with widths that follow the embedding's."""
        args.no_scale_embedding = True
        args.decoder_input_dim = args.decoder_input_dim or args.decoder_embed_dim
        args.decoder_output_dim = args.decoder_output_dim or args.decoder_embed_dim
        args.decoder_ffn_embed_dim = args.decoder_ffn_embed_dim or inner_width(args.decoder_embed_dim, cls.expansion)
        return super().build_model(args, task)


def inner_width(embed_dim: int, expansion: float) -> int:
    """``expansion`` times ``embed_dim``, up to the next multiple of 8 where that is no integer."""
    width = expansion * embed_dim
    return round(width) if abs(width - round(width)) < 1e-6 else -(-int(width) // 8) * 8


def option(args, config: type, name: str) -> Any:
    """An option of ``args``; one that an older checkpoint lacks has the default of ``config``."""
    return plain(safe_getattr(args, name, getattr(config, name)))


# ---- Gated attention units: FLASH and FLASH-Quad


@dataclass
class GatedAttentionUnitConfig(FlashFamilyConfig):
    """Options of the gated attention unit, quadratic or not."""

    decoder_layers: int = field(default=12, metadata={"help": "num decoder layers, two for one of a Transformer"})
    decoder_attention_heads: int = field(default=1, metadata={"help": "num attention heads; the paper has one"})
    activation_fn: ChoiceEnum(("silu",)) = field(
        default="silu", metadata={"help": "activation function of the gated attention unit; there is one"}
    )
    flash_query_dim: int = field(default=128, metadata={"help": "width s of queries and keys; 512 in fine-tuning"})
    flash_kernel: ChoiceEnum(SCORE_KERNELS) = field(
        default="relu2", metadata={"help": "what turns scores into weights (Table 2); laplace as in Mega"}
    )
    flash_relative_bias: ChoiceEnum(RELATIVE_BIASES) = field(
        default="auto",
        metadata={
            "help": "learned bias on scores by distance: toeplitz, one per distance; rotary, from two rotated vectors; "
            "auto: toeplitz below 512 tokens (a chunk's, or the position limit of FLASH-Quad), else rotary"
        },
    )
    flash_no_gate: bool = field(default=False, metadata={"help": "no gate U (ablation)"})


class GatedAttentionUnitLanguageModel(FlashFamilyLanguageModel):
    """A stack of gated attention units; subclasses add what is their own."""

    expansion = 2.0
    config: type

    @classmethod
    def unit_options(cls, args) -> Dict[str, Any]:
        """Arguments of ``common.gau.GatedAttentionUnit`` beside width, heads and dropout."""
        return gau_options(args, cls.config)

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig, no_encoder_attn: bool) -> nn.Module:
        """One gated attention unit."""
        return GatedAttentionUnitDecoderLayer(cfg, cls.unit_options(args))


def gau_options(args, config: type) -> Dict[str, Any]:
    """What ``flash_*`` options say of any gated attention unit."""
    return {
        "query_dim": option(args, config, "flash_query_dim"),
        "kernel": option(args, config, "flash_kernel"),
        "bias": option(args, config, "flash_relative_bias"),
        "norm": option(args, config, "flash_norm"),
        "gate": not option(args, config, "flash_no_gate"),
        "rotary": not option(args, config, "flash_no_rotary"),
    }


@dataclass
class FlashLanguageModelConfig(GatedAttentionUnitConfig):
    """Options of FLASH."""

    flash_chunk_size: int = field(
        default=256, metadata={"help": "tokens C in a chunk; the paper's large models have 512"}
    )
    flash_no_local: bool = field(default=False, metadata={"help": "no attention inside chunks (Figure 7)"})
    flash_no_linear: bool = field(default=False, metadata={"help": "no linear attention across chunks (Figure 7)"})


@register_model("flash_lm", dataclass=FlashLanguageModelConfig)
class FlashLanguageModel(GatedAttentionUnitLanguageModel):
    """FLASH: mixed chunk attention in gated attention units, O(T), decoding state of constant size."""

    config = FlashLanguageModelConfig

    @classmethod
    def unit_options(cls, args) -> Dict[str, Any]:
        """Those of any unit, and the chunks."""
        return {**super().unit_options(args), **chunk_options(args, cls.config)}


def chunk_options(args, config: type) -> Dict[str, Any]:
    """What ``flash_*`` options say of mixed chunk attention in a gated attention unit."""
    return {
        "chunk_size": option(args, config, "flash_chunk_size"),
        "local": not option(args, config, "flash_no_local"),
        "linear": not option(args, config, "flash_no_linear"),
    }


@dataclass
class FlashQuadLanguageModelConfig(GatedAttentionUnitConfig):
    """Options of FLASH-Quad."""

    flash_divisor: Optional[int] = field(
        default=None,
        metadata={
            "help": "what scores are divided by, a constant of the model; default: the position limit, which is "
            "--tokens-per-sample unless --max-target-positions is given. Softmax does not use it"
        },
    )


@register_model("flash_quad_lm", dataclass=FlashQuadLanguageModelConfig)
class FlashQuadLanguageModel(GatedAttentionUnitLanguageModel):
    """FLASH-Quad: quadratic relu² attention in gated attention units, O(T²) time, O(T) memory."""

    config = FlashQuadLanguageModelConfig

    @classmethod
    def unit_options(cls, args) -> Dict[str, Any]:
        """Those of any unit, and the length that scores are divided by."""
        limit, divisor = args.max_target_positions, option(args, cls.config, "flash_divisor")
        return {**super().unit_options(args), "chunk_size": None, "max_positions": limit, "divisor": divisor}


# ---- Transformers: Transformer+, Transformer++, MC-TFM++, Performer and Combiner


@dataclass
class FlashTransformerConfig(FlashFamilyConfig):
    """Options of the Transformers of the paper's tables."""

    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = field(
        default="gelu", metadata={"help": "activation function to use"}
    )
    flash_attention_gate: bool = field(
        default=False, metadata={"help": "a SiLU gate on what attention gives (Table 2)"}
    )


class FlashTransformerLanguageModel(FlashFamilyLanguageModel):
    """A Transformer with rotary positions; subclasses name its attention."""

    config: type = FlashTransformerConfig
    gated_ffn = False
    expansion = 4.0

    @classmethod
    def layer_design(cls, args) -> LayerDesign:
        """The column of the table as the parts of a layer."""
        return transformer_design(cls, args)


def transformer_design(model, args) -> LayerDesign:
    """The layers of ``model``, causal or masked: its ``attention_for``, and what ``flash_*`` options say."""
    name, options = model.attention_for(args)
    return LayerDesign(
        name,
        options,
        rotary=not option(args, model.config, "flash_no_rotary"),
        attention_gate=option(args, model.config, "flash_attention_gate"),
        gated_ffn=model.gated_ffn,
        norm=option(args, model.config, "flash_norm"),
    )


@dataclass
class TransformerPlusConfig(FlashTransformerConfig):
    """Options of Transformer+ and Transformer++."""

    flash_kernel: ChoiceEnum(SCORE_KERNELS) = field(
        default="softmax",
        metadata={"help": "what turns scores into weights (Table 2); relu2 and laplace divide by the position limit"},
    )


@register_model("transformer_plus_lm", dataclass=TransformerPlusConfig)
class TransformerPlusLanguageModel(FlashTransformerLanguageModel):
    """Transformer+: softmax attention through torch's fused kernel, with scaled sinusoids and rotary positions."""

    config = TransformerPlusConfig

    @classmethod
    def attention_for(cls, args):
        """Fused softmax attention, or the quadratic one of another kernel."""
        return kernel_attention(option(args, cls.config, "flash_kernel"), args.max_target_positions)


def kernel_attention(kernel: str, divisor: Optional[float]):
    """Name and options of multi-head attention with ``kernel``; ``divisor`` None counts the tokens a query sees."""
    if kernel == "softmax":
        return "softmax", {}
    return "quadratic", {"kernel": kernel, "divisor": None if divisor is None else float(divisor)}


@register_model("transformer_pp_lm", dataclass=TransformerPlusConfig)
class TransformerPlusPlusLanguageModel(TransformerPlusLanguageModel):
    """Transformer++: Transformer+ with a gated feed-forward block (GLU) of the same parameter count."""

    gated_ffn = True
    expansion = 8 / 3


@dataclass
class MixedChunkTransformerConfig(FlashTransformerConfig):
    """Options of MC-TFM++."""

    flash_chunk_size: int = field(default=256, metadata={"help": "tokens C in a chunk"})
    flash_kernel: ChoiceEnum(SCORE_KERNELS) = field(
        default="softmax", metadata={"help": "what turns scores into weights inside a chunk"}
    )


@register_model("mc_transformer_pp_lm", dataclass=MixedChunkTransformerConfig)
class MixedChunkTransformerLanguageModel(FlashTransformerLanguageModel):
    """MC-TFM++ (Table 5): mixed chunk attention on Transformer++'s heads, O(T), decoding state of constant size."""

    config = MixedChunkTransformerConfig
    gated_ffn = True
    expansion = 8 / 3

    @classmethod
    def attention_for(cls, args):
        """Mixed chunk attention."""
        return mixed_chunk_attention_of(cls, args)


def mixed_chunk_attention_of(model, args):
    """Name and options of mixed chunk attention on a Transformer's heads."""
    kernel = option(args, model.config, "flash_kernel")
    return "mixed_chunk", {"chunk_size": option(args, model.config, "flash_chunk_size"), "kernel": kernel}


@dataclass
class PerformerConfig(FlashTransformerConfig):
    """Options of Performer."""

    linear_chunk_size: int = field(
        default=64,
        metadata={"help": "tokens computed at once by the causal form: speed and memory, never the result"},
    )


@register_model("performer_lm", dataclass=PerformerConfig)
class PerformerLanguageModel(FlashTransformerLanguageModel):
    """Performer with its relu kernel (without random projections) and rotary positions, O(T), constant state."""

    config = PerformerConfig

    @classmethod
    def attention_for(cls, args):
        """Linear attention with relu features."""
        return "linear", {"phi": "relu", "chunk_size": option(args, cls.config, "linear_chunk_size")}


@dataclass
class CombinerConfig(FlashTransformerConfig):
    """Options of Combiner."""

    flash_row_length: int = field(
        default=128, metadata={"help": "tokens in a row; the authors' language model has 128, cost is least at √T"}
    )


@register_model("combiner_lm", dataclass=CombinerConfig)
class CombinerLanguageModel(FlashTransformerLanguageModel):
    """Combiner, row-major axial, with rotary positions, O(T √T); decoding keeps and revisits every token."""

    config = CombinerConfig

    @classmethod
    def attention_for(cls, args):
        """Combiner's attention."""
        return "combiner", {"row_length": option(args, cls.config, "flash_row_length")}


# ---- Sizes of Tables 8 and 9

GAU_SIZES = {
    "base": {"embed_dim": 768, "layers": 24, "attention_heads": 1},
    "large": {"embed_dim": 1024, "layers": 72, "attention_heads": 1},
}
TRANSFORMER_SIZES = {
    "base": {"embed_dim": 768, "layers": 12, "attention_heads": 12},
    "large": {"embed_dim": 1024, "layers": 36, "attention_heads": 16},
}
#: Chunk lengths of the two sizes.
CHUNK_SIZES = {"base": 256, "large": 512}
_CHUNKED = ("flash", "mc_transformer_pp")


def set_size(args, side: str, family: str, size: str) -> None:
    """Fill in what the command line left open: width, depth, heads (of ``side`` encoder or decoder) and chunk."""
    sizes = GAU_SIZES if family in ("flash", "flash_quad") else TRANSFORMER_SIZES
    for name, value in sizes[size].items():
        setattr(args, f"{side}_{name}", safe_getattr(args, f"{side}_{name}", value))
    if family in _CHUNKED:
        args.flash_chunk_size = safe_getattr(args, "flash_chunk_size", CHUNK_SIZES[size])


FAMILIES = (
    "flash",
    "flash_quad",
    "transformer_plus",
    "transformer_pp",
    "mc_transformer_pp",
    "performer",
    "combiner",
)


def _size(family: str, size: str):
    def architecture(args) -> None:
        args.share_decoder_input_output_embed = safe_getattr(args, "share_decoder_input_output_embed", True)
        set_size(args, "decoder", family, size)

    return architecture


for _family in FAMILIES:
    for _name in GAU_SIZES:
        register_model_architecture(f"{_family}_lm", f"{_family}_lm_{_name}")(_size(_family, _name))
