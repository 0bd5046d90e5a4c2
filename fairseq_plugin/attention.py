"""fairseq's multi-head attention with another attention inside it."""

from typing import Dict, Optional, Tuple

from fairseq.modules import MultiheadAttention
from torch import Tensor

from common.attention import InnerAttention

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]


class InnerMultiheadAttention(MultiheadAttention):
    """Self-attention of a causal decoder: fairseq's projections around an ``InnerAttention``.

    Parameter names, initialisation, quantisation noise, head pruning and the reordering of the decoding state are
    those of ``fairseq.modules.MultiheadAttention``, so its checkpoints fit. The decoding state is the inner
    attention's, of constant size where that is. Attention dropout drops whole sources (see ``drop_sources``), or
    entries of the attention map where the inner attention has one.

    Raises:
        ValueError: a head count that does not divide the width, or an option that only softmax attention has.
    """

    def __init__(self, embed_dim: int, num_heads: int, inner: InnerAttention, **host_options) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"decoder_attention_heads is {num_heads}; allowed: a divisor of the width {embed_dim}")
        for option in ("add_bias_kv", "add_zero_attn", "xformers_att_config"):
            if host_options.get(option):
                raise ValueError(f"{option} is {host_options[option]!r}; allowed with {type(inner).__name__}: unset")
        super().__init__(embed_dim, num_heads, **host_options)
        self.inner = inner

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        incremental_state: Optional[IncrementalState] = None,
        need_weights: bool = False,
        static_kv: bool = False,
        attn_mask: Optional[Tensor] = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> Tuple[Tensor, Optional[Tensor]]:
        """query (T, B, C), key_padding_mask (B, T) with True = padding -> (T, B, C) and no weights.

        Self-attention: ``key`` and ``value`` are ``query``. With ``incremental_state``, the T tokens continue the
        sequence whose state it holds. ``attn_mask`` is the decoder's marker that attention is causal; its entries
        are not read. O(T), see ``common.ops``.

        Raises:
            ValueError: attention to the whole sequence is asked for (no ``attn_mask`` outside of decoding), or
                attention to something other than ``query``, or weights that do not exist.
        """
        if attn_mask is None and incremental_state is None:
            raise ValueError(
                "attn_mask is None outside of incremental decoding, as full_context_alignment asks for; "
                "allowed for this causal decoder: full_context_alignment=False"
            )
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("key or value is not query; allowed: self-attention")
        if static_kv or before_softmax or need_weights or need_head_weights:
            raise ValueError(
                "static_kv, before_softmax, need_weights or need_head_weights is True; allowed: False, since no "
                "attention weights are formed (common.attention.record_attention shows what there is)"
            )
        q, k, v = (self._split_heads(project(query)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if incremental_state is None:
            dropping = self.training or self.dropout_module.apply_during_inference
            out = self.inner(
                q, k, v, key_padding_mask=key_padding_mask, query_padding_mask=key_padding_mask,
                dropout_p=self.dropout_module.p if dropping else 0.0,
            )  # fmt: skip
        else:
            state = self._get_input_buffer(incremental_state) or None
            out, state = self.inner.extend(q, k, v, key_padding_mask, state)
            self._set_input_buffer(incremental_state, state)
        out = out.permute(2, 0, 1, 3).flatten(2)  # B x H x T x D -> T x B x C
        return self.out_proj(out), None

    def _split_heads(self, x: Tensor) -> Tensor:
        # T x B x C -> T x B x H x D -> B x H x T x D
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)
