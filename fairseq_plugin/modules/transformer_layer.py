"""fairseq's Transformer layers with the parts of a ``LayerDesign``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq import utils
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from common.modules.norms import build_norm

from .cross_attention import CrossDesign, InnerCrossAttention
from .multihead_attention import InnerMultiheadAttention, LayerDesign, read_padding
from .not_exportable import NoTorchScript


class GatedLinear(nn.Module):
    """GLU: act(x W) ⊙ (x V), replaces a feed-forward block's first layer (Shazeer, 2020); (..., d) -> (..., ffn)."""

    def __init__(self, input_dim: int, output_dim: int, activation_fn: str, q_noise: float, qn_block_size: int) -> None:
        super().__init__()
        self.proj = quant_noise(nn.Linear(input_dim, 2 * output_dim), q_noise, qn_block_size)
        self.activation_fn = utils.get_activation_fn(activation_fn)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., ffn)."""
        gate, value = self.proj(x).chunk(2, dim=-1)
        return self.activation_fn(gate) * value


class _DesignedLayer(NoTorchScript):
    """Builds a fairseq layer through its hooks, as the ``LayerDesign`` says; a mixin for decoder and encoder layers."""

    causal: bool

    def __init__(self, cfg: TransformerConfig, *host_options: Any, design: LayerDesign) -> None:
        # Plain attributes, which nn.Module allows before its __init__, in which the hooks run.
        self.design, self.activation_name = design, cfg.activation_fn
        super().__init__(cfg, *host_options)
        if design.gated_ffn:
            self.activation_fn = nn.Identity()  # fc1 applies it
        if design.norm != "layernorm":
            self.self_attn_layer_norm = build_norm(design.norm, self.embed_dim)
            self.final_layer_norm = build_norm(design.norm, self.embed_dim)

    def build_fc1(self, input_dim: int, output_dim: int, q_noise: float, qn_block_size: int) -> nn.Module:
        """fairseq's hook: the first layer of the feed-forward block."""
        if not self.design.gated_ffn:
            return super().build_fc1(input_dim, output_dim, q_noise, qn_block_size)
        return GatedLinear(input_dim, output_dim, self.activation_name, q_noise, qn_block_size)

    def build_self_attention(
        self, embed_dim: int, cfg: TransformerConfig, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> InnerMultiheadAttention:
        """fairseq's hook: the self-attention of this layer."""
        side = cfg.decoder if self.causal else cfg.encoder
        return InnerMultiheadAttention(
            embed_dim,
            side.attention_heads,
            self.design,
            self.causal,
            dropout=cfg.attention_dropout,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=side.xformers_att_config,
        )


@contextmanager
def _packed(attention: InnerMultiheadAttention, segment_ids: Tensor) -> Iterator[None]:
    """Inside, ``attention.segment_ids`` (B, T) are the documents of its tokens."""
    attention.segment_ids = segment_ids
    try:
        yield
    finally:
        del attention.segment_ids


class LinearTimeDecoderLayer(_DesignedLayer, TransformerDecoderLayerBase):
    """A causal decoder layer of fairseq with the parts of a ``LayerDesign``.

    ``cross`` is the design of its attention to an encoder, None for fairseq's own.
    """

    causal = True

    def __init__(
        self, cfg: TransformerConfig, *host_options: Any, design: LayerDesign, cross: CrossDesign | None = None
    ) -> None:
        self.cross = cross  # a plain attribute, read by build_encoder_attention inside __init__
        super().__init__(cfg, *host_options, design=design)

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """fairseq's hook: the attention of this layer to the encoder."""
        if self.cross is None:
            return super().build_encoder_attention(embed_dim, cfg)
        return InnerCrossAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            cfg.encoder.embed_dim,
            self.cross,
            dropout=cfg.attention_dropout,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(
        self,
        *arguments: Any,
        self_attn_padding_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple:
        """As fairseq's; also passes the padding of targets to cross-attention, whose positions count real targets.

        ``self_attn_padding_mask`` is (B, T), True = padding. ``segment_ids`` (B, T) are the documents of a row, which
        do not see each other.
        """
        if segment_ids is not None:
            with _packed(self.self_attn, segment_ids):
                return self._forward(*arguments, self_attn_padding_mask=self_attn_padding_mask, **options)
        return self._forward(*arguments, self_attn_padding_mask=self_attn_padding_mask, **options)

    def _forward(self, *arguments: Any, self_attn_padding_mask: Tensor | None, **options: Any) -> tuple:
        if not isinstance(self.encoder_attn, InnerCrossAttention):
            return super().forward(*arguments, self_attn_padding_mask=self_attn_padding_mask, **options)
        self.encoder_attn.target_padding_mask = read_padding(self_attn_padding_mask)
        try:
            return super().forward(*arguments, self_attn_padding_mask=self_attn_padding_mask, **options)
        finally:
            self.encoder_attn.target_padding_mask = None


class LinearTimeEncoderLayer(_DesignedLayer, TransformerEncoderLayerBase):
    """A bidirectional encoder layer of fairseq with the parts of a ``LayerDesign``."""

    causal = False

    def forward(self, *arguments: Any, segment_ids: Tensor | None = None, **options: Any) -> Any:
        """As fairseq's; ``segment_ids`` (B, T) are the documents of a row, which do not see each other."""
        if segment_ids is None:
            return super().forward(*arguments, **options)
        with _packed(self.self_attn, segment_ids):
            return super().forward(*arguments, **options)
