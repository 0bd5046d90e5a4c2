"""fairseq's Transformer decoder with its self-attention replaced."""

from typing import Any, Dict

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerDecoder
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from common.attention import build_attention

from .attention import InnerMultiheadAttention
from .positions import count_real_tokens

# NormFormer options of transformer_lm that fairseq's own TransformerConfig does not carry on to the layers.
_NORMFORMER = ("scale_attn", "scale_fc", "scale_heads", "scale_resids")


class LinearTimeDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer of fairseq whose self-attention is ``build_attention(name, causal=True, **options)``."""

    def __init__(self, cfg: TransformerConfig, no_encoder_attn: bool, name: str, options: Dict[str, Any]) -> None:
        # Plain attributes, which nn.Module takes before its own __init__; build_self_attention runs inside of it.
        self.attention_name, self.attention_options = name, options
        super().__init__(cfg, no_encoder_attn)

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> InnerMultiheadAttention:
        """fairseq's hook: the self-attention of this layer."""
        return InnerMultiheadAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            build_attention(self.attention_name, causal=True, **self.attention_options),
            dropout=cfg.attention_dropout,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            self_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )


class LinearTimeDecoder(TransformerDecoder):
    """``fairseq.models.transformer.TransformerDecoder`` over ``LinearTimeDecoderLayer``.

    ``attention_name`` and ``attention_options`` choose the attention. Positions count real tokens in every mode, and
    nothing of size T x T is allocated.
    """

    def __init__(
        self, args, dictionary, embed_tokens, attention_name: str, attention_options: Dict[str, Any], **host_options
    ) -> None:
        # Plain attributes, read by build_decoder_layer inside of __init__.
        self.attention_name, self.attention_options = attention_name, attention_options
        super().__init__(args, dictionary, embed_tokens, **host_options)
        if self.embed_positions is not None:
            self.embed_positions = count_real_tokens(self.embed_positions)

    def build_decoder_layer(self, args: TransformerConfig, no_encoder_attn: bool = False) -> nn.Module:
        """fairseq's hook: one layer, wrapped for activation checkpointing and sharding as fairseq wraps its own."""
        cfg = TransformerConfig.from_namespace(args)
        for option in _NORMFORMER:
            setattr(cfg, option, getattr(self.args, option, False))
        layer = LinearTimeDecoderLayer(cfg, no_encoder_attn, self.attention_name, self.attention_options)
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """An empty tensor where fairseq builds a (T, T) one: the marker by which layers know attention is causal."""
        return tensor.new_empty(0)
