"""fairseq's multi-head attention with another attention inside it."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Tuple

from fairseq.modules import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import ATTENTIONS, InnerAttention, RotaryAttention, build_attention

IncrementalState = Dict[str, Dict[str, Optional[Tensor]]]


@dataclass(frozen=True)
class LayerDesign:
    """What a Transformer layer of ours has in place of fairseq's."""

    attention: str  # a name of common.attention.ATTENTIONS
    options: Dict[str, Any] = field(default_factory=dict)  # of its constructor
    rotary: bool = False  # rotary positions of queries and keys
    attention_gate: bool = False  # a gate on what attention gives (FLASH, Table 2)
    gated_ffn: bool = False  # GLU: the activation of one projection times another
    norm: str = "layernorm"  # a name of common.norms.NORMS

    def build_inner(self, causal: bool, num_heads: int, head_dim: int) -> InnerAttention:
        """The inner attention of ``num_heads`` heads of ``head_dim`` channels."""
        allowed = ATTENTIONS[self.attention].option_names()
        known = {"num_heads": num_heads, "head_dim": head_dim, "rotary": self.rotary}
        options = {**self.options, **{name: value for name, value in known.items() if name in allowed}}
        inner = build_attention(self.attention, causal=causal, **options)
        return RotaryAttention(inner, head_dim) if self.rotary and "rotary" not in allowed else inner


class InnerMultiheadAttention(MultiheadAttention):
    """Self-attention: fairseq's projections around the ``InnerAttention`` of a ``LayerDesign``, causal or not.

    Parameter names, initialisation, quantisation noise, head pruning and the reordering of the decoding state are
    those of ``fairseq.modules.MultiheadAttention``, so its checkpoints fit. The decoding state is the inner
    attention's, of constant size where that is. The projection to queries is None where the inner attention has none,
    and that to keys is as wide as its keys. Attention dropout drops whole sources (see ``drop_sources``), or
    entries of the attention map where the inner attention has one.

    Raises:
        ValueError: a head count that does not divide the width, or an option that only softmax attention has.
    """

    def __init__(self, embed_dim: int, num_heads: int, design: LayerDesign, causal: bool, **host_options) -> None:
        side = "decoder" if causal else "encoder"
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"{side}_attention_heads is {num_heads}; allowed: a divisor of the width {embed_dim}")
        for option in ("add_bias_kv", "add_zero_attn", "xformers_att_config"):
            if host_options.get(option):
                raise ValueError(f"{option} is {host_options[option]!r}; allowed with {design.attention}: unset")
        super().__init__(embed_dim, num_heads, self_attention=True, **host_options)
        self.inner = design.build_inner(causal, num_heads, embed_dim // num_heads)
        noise = (host_options.get("q_noise", 0.0), host_options.get("qn_block_size", 8))
        if not self.inner.query:
            self.q_proj = None
        if self.inner.key_channels is not None:
            k_proj = nn.Linear(embed_dim, num_heads * self.inner.key_channels, bias=self.k_proj.bias is not None)
            nn.init.xavier_uniform_(k_proj.weight, gain=2**-0.5)  # as fairseq's reset_parameters
            self.k_proj = quant_noise(k_proj, *noise)
        self.gate_proj = quant_noise(nn.Linear(embed_dim, embed_dim), *noise) if design.attention_gate else None

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
        are not read. See ``common.ops`` for costs.

        Raises:
            ValueError: a mask or a state where attention is not causal, neither of them where it is, attention to
                something other than ``query``, or weights that do not exist.
        """
        check_marker(self.inner.causal, attn_mask, incremental_state)
        if (key is not None and key is not query) or (value is not None and value is not query):
            raise ValueError("key or value is not query; allowed: self-attention")
        if static_kv or before_softmax or need_weights or need_head_weights:
            raise ValueError(
                "static_kv, before_softmax, need_weights or need_head_weights is True; allowed: False, since no "
                "attention weights are formed (common.attention.record_attention shows what there is)"
            )
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (None if project is None else self._split_heads(project(query)) for project in projections)
        more = {"x": query.transpose(0, 1)} if self.inner.needs_input else {}
        if incremental_state is None:
            dropping = self.training or self.dropout_module.apply_during_inference
            out = self.inner(
                q, k, v, key_padding_mask=key_padding_mask, query_padding_mask=key_padding_mask,
                dropout_p=self.dropout_module.p if dropping else 0.0, **more,
            )  # fmt: skip
        else:
            state = self._get_input_buffer(incremental_state) or None
            out, state = self.inner.extend(q, k, v, key_padding_mask, state, **more)
            self._set_input_buffer(incremental_state, state)
        out = out.permute(2, 0, 1, 3).flatten(2)  # B x H x T x D -> T x B x C
        if self.gate_proj is not None:
            out = F.silu(self.gate_proj(query)) * out
        return self.out_proj(out), None

    def _split_heads(self, x: Tensor) -> Tensor:
        # T x B x C -> T x B x H x D -> B x H x T x D
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)


def check_marker(causal: bool, attn_mask: Optional[Tensor], incremental_state: Optional[IncrementalState]) -> None:
    """Raise ValueError unless a layer was called as its attention is.

    A causal one has its decoder's marker or decodes; one that is not has neither mask nor state.
    """
    if causal and attn_mask is None and incremental_state is None:
        raise ValueError(
            "attn_mask is None outside of incremental decoding, as full_context_alignment asks for; "
            "allowed for this causal decoder: full_context_alignment=False"
        )
    if not causal and (attn_mask is not None or incremental_state is not None):
        raise ValueError("attn_mask or incremental_state is given; allowed for attention that is not causal: neither")
