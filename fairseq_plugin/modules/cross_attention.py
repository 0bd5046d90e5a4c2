"""A decoder's attention to the encoder's output, with a mechanism that sums over the source once."""

from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.modules import MultiheadAttention
from torch import Tensor

from common.attention import build_attention
from common.ops.shared.checks import ArgumentError
from common.ops.shared.padding import both_masks
from common.ops.shared.state import State

from .multihead_attention import IncrementalState, check_heads, check_no_mask, read_padding, split_heads

#: The entry of the decoding state with the number of target tokens so far.
_COUNT = "target_count"


@dataclass(frozen=True)
class CrossDesign:
    """The design of a decoder layer's cross-attention, which replaces fairseq's softmax attention."""

    attention: str  # a name of common.attention.ATTENTIONS that supports "source"
    options: dict[str, Any] = field(default_factory=dict)  # of its constructor
    max_tokens: int | None = None  # of the longest source or target


class InnerCrossAttention(MultiheadAttention):
    """Cross-attention: fairseq's projections around an ``InnerAttention`` that supports "source"; O(n + m).

    Parameter names, initialisation and quantisation noise are those of ``fairseq.modules.MultiheadAttention``.
    While decoding, the sums over the source are computed once: the state has d x e numbers per head, for any source
    length, and the ``beam_size`` rows of a source share it. Attention dropout drops whole sources.

    Raises:
        ValueError: the number of heads does not divide the width, an option is only for softmax attention, or the
            encoder has another width and the mechanism also projects its output to queries.
    """

    def __init__(self, embed_dim: int, num_heads: int, source_dim: int, design: CrossDesign, **host_options) -> None:
        check_heads(num_heads, {"embed_dim": embed_dim})
        if host_options.get("xformers_att_config"):
            raise ArgumentError(
                f"`xformers_att_config` is {host_options['xformers_att_config']!r}; allowed with "
                f"`lineartime_cross_attention` {design.attention}: unset"
            )
        super().__init__(
            embed_dim, num_heads, kdim=source_dim, vdim=source_dim, encoder_decoder_attention=True, **host_options
        )
        shape = {"num_heads": num_heads, "head_dim": self.head_dim, "max_tokens": design.max_tokens}
        self.inner = build_attention(design.attention, **shape, **design.options)
        #: (B, T), True = padding, of the targets of a call; fairseq's layer does not pass it to this module.
        self.target_padding_mask: Tensor | None = None
        if "source_q" in self.inner.needs and source_dim != embed_dim:
            raise ArgumentError(
                f"--encoder-embed-dim is {source_dim}; allowed with `lineartime_cross_attention` {design.attention}, "
                f"which projects the encoder's output to queries too: `embed_dim`, {embed_dim}"
            )

    def make_generation_fast_(self, need_attn: bool = False, **further: Any) -> None:
        """fairseq's hook before generation; ValueError if attention weights are needed, as for alignment.

        No such weights are computed.
        """
        if need_attn:
            raise ValueError(
                f"--print-alignment is given; allowed with --lineartime-cross-attention {self.inner.name}: not given "
                "(softmax has the weights that an alignment is made of)"
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, None]:
        """query (T, B, C), key (S, B, C), key_padding_mask (B, S) with True = padding -> (T, B, C) and no weights.

        ``value`` is ``key``. With ``incremental_state``, the T tokens continue the target of that state, and ``key`` is
        only read at the first of them. The returned weights are None, also for fairseq's layers that request them in
        evaluation.

        Raises:
            ValueError: an ``attn_mask`` is given, ``value`` is not ``key``, or ``before_softmax`` is True.
        """
        check_no_mask(attn_mask)
        key_padding_mask = read_padding(key_padding_mask)
        if value is not key or before_softmax:
            raise ValueError("value is not key, or before_softmax is True; allowed: the encoder's output twice, False")
        q = split_heads(self.q_proj(query), self.num_heads)  # (B, H, T, d)
        if incremental_state is None:
            k, v, extra_inputs = self._project(key)
            dropping = self.training or self.dropout_module.apply_during_inference
            dropout_p = self.dropout_module.p if dropping else 0.0
            masks = both_masks(q, k, self.target_padding_mask, key_padding_mask)
            out = self.inner(q, k, v, *masks, dropout_p=dropout_p, **extra_inputs)
        else:
            out = self._continue(q, key, key_padding_mask, incremental_state)
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None  # B x H x T x D -> T x B x C

    def _project(self, source: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Keys and values of ``source`` (S, B, C), and the additional inputs of the mechanism."""
        k, v = (split_heads(project(source), self.num_heads) for project in (self.k_proj, self.v_proj))
        return k, v, self.extra_inputs(source)

    def extra_inputs(self, source: Tensor) -> dict[str, Tensor]:
        """Inputs that the inner attention needs in addition to q, k and v, computed from a source (S, B, C)."""
        if "source_q" not in self.inner.needs:
            return {}
        return {"source_q": split_heads(self.q_proj(source), self.num_heads)}

    def _continue(
        self, q: Tensor, source: Tensor, padding_mask: Tensor | None, incremental_state: IncrementalState
    ) -> Tensor:
        """Attention of the next tokens, with queries q (B, H, n, d), to the source in the state."""
        state = self._get_input_buffer(incremental_state) or self._read(source, padding_mask)
        count, sums = state[_COUNT], {name: x for name, x in state.items() if name != _COUNT}
        rows, n = q.shape[0] // len(count), q.shape[2]  # adjacent rows that share a source
        positions = count.unsqueeze(1) + torch.arange(n, device=q.device)  # (sources, n)
        grouped = q.unflatten(0, (-1, rows)).transpose(1, 2).flatten(2, 3)  # (sources, H, rows * n, d)
        out = self.inner.attend_source(grouped, sums, positions=positions.repeat(1, rows))
        self._set_input_buffer(incremental_state, {**sums, _COUNT: count + n})
        return out.unflatten(2, (rows, n)).transpose(1, 2).flatten(0, 1)

    def _read(self, source: Tensor, padding_mask: Tensor | None) -> State:
        """The decoding state at the beginning of a target; reads one of the ``beam_size`` equal rows per source."""
        source = source[:, :: self.beam_size]
        if padding_mask is not None:
            padding_mask = padding_mask[:: self.beam_size]
        k, v, extra_inputs = self._project(source)
        state = self.inner.source_state(k, v, key_padding_mask=padding_mask, **extra_inputs)
        return {**state, _COUNT: torch.zeros(source.shape[1], dtype=torch.int64, device=source.device)}

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor
    ) -> IncrementalState | None:
        """fairseq's hook: row i of the target continues from row ``new_order[i]``; rows of a source still share it."""
        state = self._get_input_buffer(incremental_state)
        if state:
            sources = (new_order // self.beam_size).view(-1, self.beam_size)
            shared = bool((sources == sources[:, :1]).all())
            indices = sources[:, 0] if shared else sources.flatten()
            self._set_input_buffer(incremental_state, {name: x.index_select(0, indices) for name, x in state.items()})
        return incremental_state
