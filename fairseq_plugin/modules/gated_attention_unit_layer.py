"""The gated attention unit as a layer of fairseq's decoder and of its encoder."""

from typing import Any

from fairseq.incremental_decoding_utils import with_incremental_state
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.relative_bias import ToeplitzBias
from common.ops.shared.checks import ArgumentError

from .multihead_attention import IncrementalState, check_no_mask, read_padding
from .not_exportable import NoTorchScript

_STATE = "attn_state"


class _GatedAttentionUnitLayer(NoTorchScript, nn.Module):
    """fairseq's dropout and quantisation noise around ``GatedAttentionUnit(dim, **unit)``.

    Raises:
        ValueError: an option of fairseq's Transformer layers that does not exist for this block, which combines
            attention and feed-forward, or an option that ``GatedAttentionUnit`` refuses.
    """

    __jit_unused_properties__ = ("max_tokens",)
    causal: bool

    def __init__(self, cfg: TransformerConfig, unit: dict[str, Any]) -> None:
        super().__init__()
        side = cfg.decoder if self.causal else cfg.encoder
        for option in ("scale_attn", "scale_fc", "scale_heads", "scale_resids"):
            if getattr(cfg, option, False):
                raise ArgumentError(f"`{option}=True` is given; allowed: not for gated attention units")
        if side.xformers_att_config:
            raise ArgumentError("`xformers_att_config` is given; allowed: not for gated attention units")
        self.unit = GatedAttentionUnit(
            side.embed_dim,
            expanded_dim=side.ffn_embed_dim,
            heads=side.attention_heads,
            causal=self.causal,
            dropout=float(cfg.dropout),
            attention_dropout=float(cfg.attention_dropout),
            activation_dropout=float(cfg.activation_dropout or cfg.relu_dropout or 0.0),
            dropout_layer=lambda p: FairseqDropout(p, module_name=type(self).__name__),
            **unit,
        )
        parts = [self.unit] if self.unit.ffn is None else [self.unit, self.unit.ffn]
        for linear in (linear for part in parts for linear in (part.in_proj, part.out_proj)):
            quant_noise(linear, cfg.quant_noise.pq, cfg.quant_noise.pq_block_size)  # a hook, in place

    @property
    def max_tokens(self) -> int | None:
        """The longest input that a Toeplitz bias of FLASH-Quad has parameters for; None for any length."""
        quadratic = self.unit.chunk_size is None
        return self.unit.max_positions if quadratic and isinstance(self.unit.bias, ToeplitzBias) else None


@with_incremental_state
class GatedAttentionUnitDecoderLayer(_GatedAttentionUnitLayer):
    """A causal gated attention unit with a decoding state, in place of ``TransformerDecoderLayerBase``."""

    causal = True

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        prev_self_attn_state: Any | None = None,
        prev_attn_state: Any | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, None, None]:
        """x (T, B, C), self_attn_padding_mask (B, T) with True = padding -> (T, B, C), and no weights.

        With ``incremental_state``, the T tokens continue the sequence of that state. ``self_attn_mask`` is None, since
        the unit itself is causal. ``need_attn`` returns no weights, as in fairseq's own language models.
        ``segment_ids`` (B, T) are the documents of a row, which do not see each other.

        Raises:
            ValueError: an encoder's output, another layer's state, or a ``self_attn_mask`` is given.
        """
        if encoder_out is not None or prev_self_attn_state is not None or prev_attn_state is not None:
            raise ValueError("encoder_out or prev_*_state is given; allowed: None, there is no attention to an encoder")
        check_no_mask(self_attn_mask)
        tokens, padding_mask = x.transpose(0, 1), read_padding(self_attn_padding_mask)  # T x B x C -> B x T x C
        if incremental_state is None:
            out = self.unit(tokens, padding_mask, segment_ids)
        else:
            state = self.get_incremental_state(incremental_state, _STATE)
            out, state = self.unit.extend(tokens, padding_mask, state, segment_ids)
            self.set_incremental_state(incremental_state, _STATE, state)
        return out.transpose(0, 1), None, None

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """Beam search: row i continues from row ``new_order[i]``."""
        state = self.get_incremental_state(incremental_state, _STATE)
        if state is not None:
            state = {name: value.index_select(0, new_order) for name, value in state.items()}
            self.set_incremental_state(incremental_state, _STATE, state)


class GatedAttentionUnitEncoderLayer(_GatedAttentionUnitLayer):
    """A bidirectional gated attention unit, in place of ``TransformerEncoderLayerBase``."""

    causal = False

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        attn_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """x (T, B, C), encoder_padding_mask (B, T) with True = padding -> (T, B, C).

        ``segment_ids`` (B, T) are the documents of a row, which do not see each other.

        Raises:
            ValueError: an ``attn_mask`` is given.
        """
        check_no_mask(attn_mask)
        padding_mask = read_padding(encoder_padding_mask)
        return self.unit(x.transpose(0, 1), padding_mask, segment_ids).transpose(0, 1)  # through B x T x C

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """fairseq calls this on every encoder layer; no name has changed here."""
