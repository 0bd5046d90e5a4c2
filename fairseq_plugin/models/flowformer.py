"""``flowformer_lm`` with the paper's size, and its baselines: linear and softmax attention."""

from dataclasses import dataclass

from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import TransformerLanguageModel

from ._language_model import (
    LinearTimeLanguageModel,
    LinearTimeLanguageModelConfig,
    complete_size,
    register_language_model,
)
from ._options import attention_config


@dataclass
class FlowformerLanguageModelConfig(attention_config("flow", causal=True, clamp=5.0), LinearTimeLanguageModelConfig):
    """Options of ``transformer_lm`` and of Flow-Attention, with the defaults of the released language model."""


@register_language_model("flowformer_lm", dataclass=FlowformerLanguageModelConfig)
class FlowformerLanguageModel(LinearTimeLanguageModel):
    """Flowformer language model (Wu et al., ICML 2022, section 4.2), O(T), decoding state of constant size."""

    attention_name = option_prefix = "flow"
    stock_model = TransformerLanguageModel
    options_class = FlowformerLanguageModelConfig


@dataclass
class LinearLanguageModelConfig(
    attention_config("linear", only=["chunk_size", "forget", "short_conv"], causal=True), LinearTimeLanguageModelConfig
):
    """Options of ``transformer_lm`` and of linear attention."""


@register_language_model("linear_lm", dataclass=LinearLanguageModelConfig)
class LinearLanguageModel(LinearTimeLanguageModel):
    """The linear-attention baseline (Katharopoulos et al., ICML 2020; elu+1), O(T), constant decoding state."""

    attention_name = option_prefix = "linear"
    stock_model = TransformerLanguageModel
    options_class = LinearLanguageModelConfig


@register_language_model("softmax_lm", dataclass=LinearTimeLanguageModelConfig)
class SoftmaxLanguageModel(LinearTimeLanguageModel):
    """``transformer_lm`` with torch's fused softmax attention: the baseline for speed comparisons, O(T²) time."""

    attention_name = option_prefix = "softmax"
    stock_model = TransformerLanguageModel


@register_model_architecture("flowformer_lm", "flowformer_lm_wiki103")
def flowformer_lm_wiki103(args) -> None:
    """The paper's WikiText-103 model (section 4.2): 6 layers, width 512, 8 heads, FFN 2048, shared embeddings.

    Layers are pre-norm, as in all models here but NAME_time_series; ``--lineartime-post-norm`` makes them those of the
    paper's equation 9.
    """
    size = {
        "dropout": 0.1,
        "share_decoder_input_output_embed": True,
        "decoder_layers": 6,
        "decoder_embed_dim": 512,
        "decoder_ffn_embed_dim": 2048,
        "decoder_attention_heads": 8,
    }
    complete_size(args, size)
