"""fairseq's multi-head attention with another attention inside it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import InnerAttention, build_rotary_attention
from common.ops.shared.checks import ArgumentError

IncrementalState = dict[str, dict[str, Tensor | None]]


@dataclass(frozen=True)
class LayerDesign:
    """The design of one of our Transformer layers: its attention, and other parts that replace fairseq's."""

    attention: str  # a name of common.attention.ATTENTIONS
    options: dict[str, Any] = field(default_factory=dict)  # of its constructor
    rotary: bool = False  # rotary positions of queries and keys
    attention_gate: bool = False  # a gate on the output of attention (FLASH, Table 2)
    gated_ffn: bool = False  # GLU: the activation of one projection times another
    norm: str = "layernorm"  # a name of common.modules.NORMS
    max_tokens: int | None = None  # of the longest sequence
    attention_dim: int | None = None  # channels of all heads together; default: the width
    projection_bias: bool = True  # whether the projections of attention have biases
    reads_source: bool = False  # a decoder's self-attention also sees the source, before the target

    def build_inner(self, causal: bool, num_heads: int, head_dim: int) -> InnerAttention:
        """The inner attention of ``num_heads`` heads of ``head_dim`` channels."""
        shape = {"num_heads": num_heads, "head_dim": head_dim, "max_tokens": self.max_tokens}
        return build_rotary_attention(self.attention, causal, self.rotary, **shape, **self.options)


class NoProjection(nn.Module):
    """Replaces a projection that a mechanism does not use: returns None and has no parameters.

    A module instead of None, since RoBERTa's initialisation accesses the ``weight`` of all three projections.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0)

    def forward(self, x: Tensor) -> None:
        """x (T, B, C) -> None."""
        return None


class InnerMultiheadAttention(MultiheadAttention):
    """Self-attention: fairseq's projections around the ``InnerAttention`` of a ``LayerDesign``, causal or not.

    Parameter names, initialisation, quantisation noise and the reordering of the decoding state are those of
    ``fairseq.modules.MultiheadAttention``, so its checkpoints fit. fairseq's head pruning is supported if
    ``has_prunable_heads``. The decoding state is that of the inner attention. Projections that the inner attention does
    not use are ``NoProjection``, and the projection to keys is as wide as its keys. Attention dropout drops whole
    sources (see ``drop_sources``), or entries of the attention map if the inner attention has one.

    Raises:
        ValueError: the number of heads does not divide the width, or an option is only for softmax attention.
    """

    __jit_unused_properties__ = ("has_prunable_heads",)
    #: The document (B, T) of each token, set by the layer during a call; see ``modules/documents.py``.
    segment_ids: Tensor | None = None

    def __init__(self, embed_dim: int, num_heads: int, design: LayerDesign, causal: bool, **host_options) -> None:
        dim = design.attention_dim or embed_dim
        check_heads(num_heads, {"embed_dim": embed_dim, "encoder_attention_dim": dim})
        for option in ("add_bias_kv", "add_zero_attn", "xformers_att_config"):
            if host_options.get(option):
                value = host_options[option]
                raise ArgumentError(f"`{option}` is {value!r}; allowed with {design.attention} attention: unset")
        super().__init__(embed_dim, num_heads, self_attention=True, bias=design.projection_bias, **host_options)
        self.head_dim = dim // num_heads
        self.inner = design.build_inner(causal, num_heads, self.head_dim)
        if "x" in self.inner.needs and dim != embed_dim:
            raise ArgumentError(
                f"`encoder_attention_dim` is {dim}; allowed with {design.attention} attention, which takes the tokens "
                f"as they are: `embed_dim`, {embed_dim}"
            )
        noise = (host_options.get("q_noise", 0.0), host_options.get("qn_block_size", 8))
        channels = self.inner.projections(self.head_dim)
        for name in ("q", "k", "v"):
            stock_projection = getattr(self, f"{name}_proj")
            if name not in channels:
                setattr(self, f"{name}_proj", NoProjection())
            elif num_heads * channels[name] != embed_dim:
                projection = nn.Linear(embed_dim, num_heads * channels[name], bias=stock_projection.bias is not None)
                nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)  # as fairseq's reset_parameters
                setattr(self, f"{name}_proj", quant_noise(projection, *noise))
        if dim != embed_dim:
            self.out_proj = quant_noise(nn.Linear(dim, embed_dim, bias=design.projection_bias), *noise)
            self._reset_output()
        self.gate_proj = quant_noise(nn.Linear(embed_dim, dim), *noise) if design.attention_gate else None
        self.reads_source = design.reads_source

    def reset_parameters(self) -> None:
        """Draw the projections as fairseq does; other parts have a ``reset_parameters`` of their own."""
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            if not isinstance(projection, NoProjection):
                nn.init.xavier_uniform_(projection.weight, gain=2**-0.5)
        self._reset_output()

    def _reset_output(self) -> None:
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @property
    def has_prunable_heads(self) -> bool:
        """Whether attention still works after fairseq's head pruning, which cuts the four projections."""
        return self.gate_proj is None and not any(True for _ in self.inner.parameters())

    def extra_inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        """Inputs that the inner attention needs in addition to q, k and v, computed from tokens (T, B, C)."""
        inner = self.inner
        return inner.inputs(x=tokens.transpose(0, 1)) if inner.needs else {}

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = False,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """query (T, B, C), key_padding_mask (B, T) with True = padding -> (T, B, C) and no weights.

        Self-attention: ``key`` and ``value`` are ``query``, or with ``--cross-self-attention`` the S tokens of a source
        followed by those of ``query``, (S + T, B, C), with a mask (B, S + T). With ``incremental_state``, the T tokens
        continue the sequence of that state. ``attn_mask`` is None, since causality is a property of the module. See
        ``common.ops`` for costs.

        Raises:
            ValueError: an ``attn_mask`` is given, a state is given although attention is not causal, ``key`` is not
                ``query``, or weights are requested.
        """
        check_no_mask(attn_mask)
        key_padding_mask = read_padding(key_padding_mask)
        tokens = query if key is None else key
        if (value is not None and value is not tokens) or (tokens is not query and not self.reads_source):
            raise ValueError("key or value is not query; allowed: self-attention")
        if static_kv or before_softmax or need_weights or need_head_weights:
            raise ValueError(
                "static_kv, before_softmax, need_weights or need_head_weights is True; allowed: False, since no "
                "attention weights are formed (common.attention.record_attention shows what there is)"
            )
        state = None if incremental_state is None else self._get_input_buffer(incremental_state) or None
        if state is not None and tokens is not query:  # fairseq's layer prepends the source at every step
            tokens = query
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[:, -query.shape[0] :]
        q, k, v = project_heads(self, tokens, tokens)
        extra_inputs = self.extra_inputs(tokens)
        if self.segment_ids is not None:
            extra_inputs["segment_ids"] = self.segment_ids
        if self.training or self.dropout_module.apply_during_inference:
            extra_inputs["dropout_p"] = self.dropout_module.p
        if incremental_state is None:
            out = self.inner(
                q,
                k,
                v,
                key_padding_mask=key_padding_mask,
                query_padding_mask=key_padding_mask,
                **extra_inputs,
            )
        else:
            out, state = self.inner.extend(q, k, v, key_padding_mask, state, **extra_inputs)
            self._set_input_buffer(incremental_state, state)
        out = join_heads(out)
        if tokens is not query:
            out = out[-query.shape[0] :]
        if self.gate_proj is not None:
            out = F.silu(self.gate_proj(query)) * out
        return self.out_proj(out), None


def project_heads(attention: MultiheadAttention, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
    """q (B, H, T, d) from query (T, B, C), k and v (B, H, S, d) from key (S, B, C), for fairseq's or our attention."""
    projected = attention.q_proj(query), attention.k_proj(key), attention.v_proj(key)
    return tuple([split_heads(x, attention.num_heads) for x in projected])


def split_heads(x: Tensor | None, num_heads: int) -> Tensor | None:
    """x (T, B, C) -> (B, H, T, C / H) with H = ``num_heads``; None -> None."""
    if x is None:
        return None
    tokens, batch, channels = x.shape
    if tokens == 1:  # a view alone: in decoding, calls take most of the time
        return x.view(batch, num_heads, 1, channels // num_heads)
    return x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)


def join_heads(x: Tensor) -> Tensor:
    """x (B, H, T, d) -> (T, B, H d), the inverse of ``split_heads``."""
    if x.shape[2] == 1:
        return x.reshape(1, x.shape[0], x.shape[1] * x.shape[3])
    return x.permute(2, 0, 1, 3).flatten(2)


def check_heads(num_heads: int, widths: dict[str, int]) -> None:
    """Raise ValueError unless ``num_heads`` divides each of ``widths``, which has argument names as keys."""
    for name, width in widths.items():
        if num_heads < 1 or width % num_heads:
            raise ArgumentError(f"`num_heads` is {num_heads}; allowed: a divisor of `{name}`, {width}")


def read_padding(padding_mask: Tensor | None) -> Tensor | None:
    """A padding mask of fairseq, of any dtype, as bool: True, padding, where it is not 0, as in fairseq's attention."""
    return None if padding_mask is None else padding_mask.to(torch.bool)


def zeros_at_padding(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """x (B, T, C) with zeros at padding: its NaN would be in the gradients of the layer that reads ``x``."""
    return x if padding_mask is None else x.masked_fill(read_padding(padding_mask)[..., None], 0.0)


def check_no_mask(attn_mask: Tensor | None) -> None:
    """Raise ValueError for a mask of pairs of tokens, which none of our attentions supports."""
    if attn_mask is not None:
        raise ValueError("attn_mask is a tensor; allowed: None, attention is causal or not as the model was built")
