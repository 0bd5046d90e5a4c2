"""Language models with linear-time attention: everything ``transformer_lm`` takes and does."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig, base_lm_architecture
from fairseq.utils import safe_getattr
from torch import nn

from common.ops.feature_maps import FEATURE_MAPS
from common.ops.flow_options import ALLOCATIONS, COMPETITIONS, FORMS

from .attention import LayerDesign
from .checkpoints import CheckedLoading
from .decoder import LinearTimeDecoder
from .layers import LinearTimeDecoderLayer
from .options import option


@dataclass
class LinearTimeLanguageModelConfig(TransformerLanguageModelConfig):
    """Options of ``transformer_lm``, in whose place these models stand, and what all of them add.

    Layers are pre-norm, as the released models' are and as every named architecture of ``transformer_lm`` is;
    ``--arch transformer_lm`` itself needs ``--decoder-normalize-before`` to be compared with them.
    """

    lineartime_post_norm: bool = field(
        default=False,
        metadata={
            "help": "LayerNorm after each block, as in the Flowformer paper's equation 9; "
            "--decoder-normalize-before is the default otherwise"
        },
    )


class LinearTimeLanguageModel(CheckedLoading, TransformerLanguageModel):
    """fairseq's Transformer language model around ``LinearTimeDecoder``; subclasses name the attention."""

    attention_name: str

    @classmethod
    def hub_models(cls) -> Dict[str, Any]:
        """No downloads: the stock ones hold softmax attention."""
        return {}

    @classmethod
    def attention_options(cls, args) -> Dict[str, Any]:
        """Constructor arguments of the attention, from the model's configuration."""
        return {}

    @classmethod
    def layer_design(cls, args) -> LayerDesign:
        """The parts of a layer, from the model's configuration."""
        return LayerDesign(cls.attention_name, cls.attention_options(args))

    @classmethod
    def build_layer(cls, args, cfg: TransformerConfig, no_encoder_attn: bool) -> nn.Module:
        """One layer of the decoder, not yet wrapped."""
        return LinearTimeDecoderLayer(cfg, no_encoder_attn, design=cls.layer_design(args))

    @classmethod
    def decoder_options(cls, args) -> Dict[str, Any]:
        """Further arguments of ``LinearTimeDecoder``."""
        return {}

    @classmethod
    def build_model(cls, args, task):
        """Build the model as fairseq does, embeddings and all, and give it our decoder.

        Raises:
            ValueError: an option the attention does not allow, or a head count that does not divide the width.
        """
        args.decoder_normalize_before = not safe_getattr(args, "lineartime_post_norm", False)
        if args.offload_activations:  # as its help says, and as fairseq's named architectures do
            args.checkpoint_activations = True
        # The stock decoder is built for its embeddings and checks alone, so without layers.
        layers, args.decoder_layers = args.decoder_layers, 0
        kept, args.decoder_layers_to_keep = args.decoder_layers_to_keep, None  # would bring layers back
        try:
            stock = super().build_model(args, task).decoder
        finally:
            args.decoder_layers, args.decoder_layers_to_keep = layers, kept
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        decoder = LinearTimeDecoder(
            args, task.target_dictionary, stock.embed_tokens, partial(cls.build_layer, args), no_encoder_attn=True,
            **cls.decoder_options(args),
        )  # fmt: skip
        return cls(decoder)


@dataclass
class FlowformerLanguageModelConfig(LinearTimeLanguageModelConfig):
    """Options of ``transformer_lm`` and of Flow-Attention; the defaults are those of the released language model."""

    flow_form: ChoiceEnum(tuple(FORMS)) = field(
        default="released",
        metadata={
            "help": "paper: Algorithms 1 and 2 of the Flowformer paper to the letter; released: the authors' scaling, "
            "1e-6 and clamp, which released weights need; released_vision: their image model's extra 1e-6 as well"
        },
    )
    flow_clamp: float = field(
        default=5.0,
        metadata={
            "help": "bound on the conserved outgoing flow in the released forms; the authors' language model was "
            "trained with 5, their core module has 1; inf for none; --flow-form paper has none and ignores it"
        },
    )
    flow_phi: ChoiceEnum(FEATURE_MAPS) = field(
        default="sigmoid", metadata={"help": "feature map of queries and keys (Table 10 of the Flowformer paper)"}
    )
    flow_competition: ChoiceEnum(COMPETITIONS) = field(
        default="softmax", metadata={"help": "how sources compete, none being an ablation (Table 11)"}
    )
    flow_allocation: ChoiceEnum(ALLOCATIONS) = field(
        default="sigmoid", metadata={"help": "how sinks are gated, none being an ablation (Table 11)"}
    )
    flow_chunk_size: int = field(
        default=64,
        metadata={"help": "tokens computed at once by the causal form: speed and memory, never the result"},
    )


@register_model("flowformer_lm", dataclass=FlowformerLanguageModelConfig)
class FlowformerLanguageModel(LinearTimeLanguageModel):
    """Flowformer language model (Wu et al., ICML 2022, section 4.2), O(T), decoding state of constant size."""

    attention_name = "flow"
    takes_stock_weights = True

    @classmethod
    def attention_options(cls, args) -> Dict[str, Any]:
        """The ``--flow-...`` options; one that an older checkpoint lacks takes its default."""
        names = ("form", "clamp", "phi", "competition", "allocation", "chunk_size")
        return {name: option(args, FlowformerLanguageModelConfig, f"flow_{name}") for name in names}


@dataclass
class LinearLanguageModelConfig(LinearTimeLanguageModelConfig):
    """Options of ``transformer_lm`` and of linear attention."""

    linear_chunk_size: int = field(
        default=64,
        metadata={"help": "tokens computed at once by the causal form: speed and memory, never the result"},
    )


@register_model("linear_lm", dataclass=LinearLanguageModelConfig)
class LinearLanguageModel(LinearTimeLanguageModel):
    """The linear-attention baseline (Katharopoulos et al., ICML 2020; elu+1), O(T), constant decoding state."""

    attention_name = "linear"
    takes_stock_weights = True

    @classmethod
    def attention_options(cls, args) -> Dict[str, Any]:
        """The ``--linear-...`` options."""
        return {"chunk_size": option(args, LinearLanguageModelConfig, "linear_chunk_size")}


@register_model("softmax_lm", dataclass=LinearTimeLanguageModelConfig)
class SoftmaxLanguageModel(LinearTimeLanguageModel):
    """``transformer_lm`` on torch's fused softmax attention: the peer to compare speed with, O(T²) time."""

    attention_name = "softmax"
    takes_stock_weights = True


@register_model_architecture("flowformer_lm", "flowformer_lm_wiki103")
def flowformer_lm_wiki103(args) -> None:
    """The paper's WikiText-103 model (section 4.2): 6 layers, width 512, 8 heads, FFN 2048, shared embeddings."""
    args.dropout = safe_getattr(args, "dropout", 0.1)
    args.share_decoder_input_output_embed = safe_getattr(args, "share_decoder_input_output_embed", True)
    args.decoder_layers = safe_getattr(args, "decoder_layers", 6)
    args.decoder_embed_dim = safe_getattr(args, "decoder_embed_dim", 512)
    args.decoder_ffn_embed_dim = safe_getattr(args, "decoder_ffn_embed_dim", 2048)
    args.decoder_attention_heads = safe_getattr(args, "decoder_attention_heads", 8)
    base_lm_architecture(args)
