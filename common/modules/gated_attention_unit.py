"""The gated attention unit: attention and feed-forward in one block, FLASH-Quad or FLASH by its chunk size.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022, sections 2 and 3.2.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..ops import mixed_chunk, quadratic
from ..ops.shared.attention_matrix import read_attention_matrix
from ..ops.shared.checks import (
    ArgumentError,
    check_choice,
    check_padding_mask,
    check_positive_int,
    check_probability,
)
from ..ops.shared.documents import attend_by_document
from ..ops.shared.padding import zero_padded_tokens
from ..ops.shared.relative_bias import resize_toeplitz
from ..ops.shared.score_kernels import SCORE_KERNELS
from ..ops.shared.state import State, state_entry
from ..ops.shared.tracing import runs_eagerly
from .feed_forward import FeedForward
from .forget_gate import FORGETS, NONE, ForgetGate
from .norms import build_norm
from .relative_bias import RELATIVE_BIASES, ToeplitzBias, relative_bias
from .rotary import check_even, cos_and_sin, document_positions, rotate_by
from .silu import silu_parts
from .stored_options import StoresOptions

#: From this many numbers in x on, the backward pass recomputes activations; smaller inputs need little memory.
RECOMPUTED_FROM = 2**17


class GatedAttentionUnit(StoresOptions):
    """x + (U ⊙ attention(Q, K, V)) W_o, where U, V and the base Z of Q and K are silu(norm(x) W) (FLASH, section 2).

    With ``chunk_size`` None attention is quadratic, ``gau_attention`` (FLASH-Quad); with C tokens it is mixed chunk
    attention (FLASH), linear in n. B batch, n tokens, d = ``dim``, e = ``expanded_dim``, s = ``query_dim``: x (B, n, d)
    -> (B, n, d). Cost in addition to the attention: O(n d (3e + s)). In training on large inputs it saves x and its
    first projection for the backward pass, which recomputes the other activations.

    Args:
        dim: width d.
        expanded_dim: width e of U and V; None for 2d.
        query_dim: width s of Z, and so of every query and key.
        heads: number of heads; each has its own scales and offsets of Z, and e / heads channels of V.
        causal: a token sees those before it and itself.
        chunk_size: C, or None for FLASH-Quad.
        max_positions: the longest training length of the quadratic form, and the range of a ``toeplitz`` bias. Not
            needed with a chunk size.
        divisor: of the quadratic form's scores, which is not legible in the paper's text. None is ``max_positions``
            when causal, a constant so that a token does not depend on later ones, and otherwise each row's number of
            real tokens. Softmax uses √s instead.
        kernel: ``relu2``, ``softmax`` (divided by √s) or ``laplace``.
        gate: multiply by U; without it the block has no U.
        separate_ffn: a ``FeedForward`` of inner width e after attention, only without a gate. It has as many parameters
            as U and a second W_o, which gives the 131 M of Table 1.
        overlap, chunk_summaries: extra terms of mixed chunk attention (section 3.2.1 and Appendix A); decoding then
            keeps every token and computes the whole sequence at each call.
        local, linear: False drops the quadratic or the linear term of mixed chunk attention (Figure 7).
        forget: gates from norm(x) that make the linear term's sum forget: ``head``, one for each head, ``channel``, one
            for each channel of its keys, or ``none``. Causal only; our addition, not in the FLASH paper.
        rotary: rotate queries and keys by their position among the real tokens.
        bias: relative bias on scores: ``toeplitz``, ``rotary``, ``none``, or ``auto``: toeplitz below 512 tokens.
        norm: ``layernorm`` or ``scalenorm``.
        first_softmax, first_to_all: the fine-tuning forms of Table 4; not causal.
        dropout, attention_dropout, activation_dropout: probabilities for the output of the branch, for whole source
            tokens (in linear time there is no map to drop entries of), and for the input of W_o. The paper uses none.
        dropout_layer: builds a dropout module from its probability, so that a host can pass its own.

    Raises:
        ValueError: a value that is not allowed; an odd ``query_dim`` with rotary positions; an ``expanded_dim`` that is
            no multiple of ``heads``; the quadratic form without ``max_positions``; an option of FLASH-Quad with FLASH,
            or the reverse.
    """

    #: Inside ``common.parallel.context_parallel``, the ``Context`` of this process's part of a sequence; else None.
    context: Any = None

    def __init__(
        self,
        dim: int,
        *,
        expanded_dim: int | None = None,
        query_dim: int = 128,
        heads: int = 1,
        causal: bool = False,
        chunk_size: int | None = 256,
        max_positions: int | None = None,
        divisor: float | None = None,
        kernel: str = "relu2",
        gate: bool = True,
        separate_ffn: bool = False,
        local: bool = True,
        linear: bool = True,
        overlap: bool = False,
        chunk_summaries: bool = False,
        forget: str = NONE,
        rotary: bool = True,
        bias: str = "auto",
        norm: str = "layernorm",
        first_softmax: bool = False,
        first_to_all: bool = False,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        dropout_layer: Callable[[float], nn.Module] = nn.Dropout,
    ) -> None:
        super().__init__()
        expanded_dim = 2 * dim if expanded_dim is None else expanded_dim
        for name, value in (("dim", dim), ("expanded_dim", expanded_dim), ("query_dim", query_dim), ("heads", heads)):
            check_positive_int(name, value)
        if expanded_dim % heads:
            raise ArgumentError(f"`heads` is {heads}; allowed: a divisor of `expanded_dim`, {expanded_dim}")
        if rotary or bias == "rotary":
            check_even("query_dim", query_dim)
        check_choice("kernel", kernel, SCORE_KERNELS)
        check_choice("bias", bias, RELATIVE_BIASES)
        check_choice("forget", forget, (NONE, *FORGETS))
        dropouts = {
            "dropout": dropout,
            "attention_dropout": attention_dropout,
            "activation_dropout": activation_dropout,
        }
        for name, value in dropouts.items():
            check_probability(name, value)
        if divisor is not None and not divisor > 0:
            raise ArgumentError(f"`divisor` is {divisor!r}; allowed: above 0")
        if divisor is not None and (chunk_size is not None or kernel == "softmax"):
            raise ArgumentError(f"`divisor` is {divisor!r}; allowed: without `chunk_size`, and without softmax")
        if separate_ffn and gate:
            raise ArgumentError("`separate_ffn=True` is given; allowed: with `gate=False`")
        self.dim, self.expanded_dim, self.query_dim, self.heads = dim, expanded_dim, query_dim, heads
        self.causal, self.chunk_size, self.max_positions = causal, chunk_size, max_positions
        if divisor is None and chunk_size is None and causal and kernel != "softmax":
            divisor = max_positions
        self.divisor = divisor
        self.kernel, self.gate, self.local, self.linear, self.rotary = kernel, gate, local, linear, rotary
        self.first_softmax, self.first_to_all = first_softmax, first_to_all
        self.overlap, self.chunk_summaries = overlap, chunk_summaries
        self._check_form()
        forgets = causal and chunk_size is not None and linear and not overlap and not chunk_summaries
        if forget != NONE and not forgets:
            terms = "without `linear=False`, `overlap=True` and `chunk_summaries=True`"
            raise ArgumentError(f"`forget` is {forget!r}; allowed: with `causal=True` and `chunk_size`, {terms}")
        self.forget_gate = None if forget == NONE else ForgetGate(forget, dim, heads, query_dim)
        self.norm = build_norm(norm, dim)
        self.widths: list[int] = [expanded_dim, expanded_dim, query_dim] if gate else [expanded_dim, query_dim]
        self.in_proj = nn.Linear(dim, sum(self.widths))
        self.out_proj = nn.Linear(expanded_dim, dim)
        roles = 4 if chunk_size is not None and local and linear else 2  # query and key, for one term or for both
        self.gamma = nn.Parameter(torch.empty(roles, heads, query_dim))
        self.beta = nn.Parameter(torch.empty(roles, heads, query_dim))
        self.bias = relative_bias(bias, self._bias_reach(), query_dim, heads) if local else None
        self.dropout = dropout_layer(dropout)
        self.attention_dropout = dropout_layer(attention_dropout)
        self.activation_dropout = dropout_layer(activation_dropout)
        options = {"dropout": dropout, "activation_dropout": activation_dropout, "dropout_layer": dropout_layer}
        self.ffn = FeedForward(dim, expanded_dim, norm=norm, **options) if separate_ffn else None
        self.reset_parameters()

    def _check_form(self) -> None:
        """Raise ValueError unless the options belong to one form, FLASH-Quad or FLASH."""
        if self.causal and (self.first_softmax or self.first_to_all):
            name = "first_softmax" if self.first_softmax else "first_to_all"
            raise ArgumentError(
                f"`{name}=True` is given; allowed: with causal=False, else a first token sees itself only"
            )
        if self.chunk_size is not None:
            check_positive_int("chunk_size", self.chunk_size)
            if not self.local and (not self.linear or self.first_softmax or self.first_to_all):
                others = "`linear=False`, `first_softmax=True` and `first_to_all=True`"
                raise ArgumentError(f"`local=False` is given; allowed: without {others}")
            mixed_chunk.MixedChunkOptions(**self._chunk_options()).checked()
            return
        if self.max_positions is None:
            raise ArgumentError("`max_positions` is None without `chunk_size`; allowed: the longest training length")
        check_positive_int("max_positions", self.max_positions)
        for name in ("local", "linear", "first_to_all", "overlap", "chunk_summaries"):
            value = getattr(self, name)
            if value != (name in ("local", "linear")):
                raise ArgumentError(f"`{name}={value}` is given; allowed: with `chunk_size`")

    def stored_options(self) -> dict[str, str | int | float | bool | None]:
        """Return the options that change the result, but not the shape of any weight."""
        names = ("causal", "kernel", "chunk_size", "divisor", "local", "linear", "rotary")
        names += ("first_softmax", "first_to_all", "overlap", "chunk_summaries")
        return {"attention": "gated attention unit", **{name: getattr(self, name) for name in names}}

    __jit_unused_properties__ = ("linear_cost", "_keeps_tokens")

    @property
    def linear_cost(self) -> bool:
        """Whether time is linear in the tokens, and the decoding state has a bounded size."""
        return self.chunk_size is not None and not self._keeps_tokens

    def state_tokens(self) -> int | None:
        """The largest number of tokens that a decoding state holds; None if it holds all tokens."""
        return self.chunk_size if self.linear_cost else None

    @property
    def _keeps_tokens(self) -> bool:
        """Whether a decoding state holds every token, and which of them are padding."""
        return self.chunk_size is None or self.overlap or self.chunk_summaries

    def reset_parameters(self) -> None:
        """Initialise dense weights and scales from N(0, 0.02), biases and offsets to 0. FLASH's text states nothing."""
        for linear in (self.in_proj, self.out_proj):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)
        for part in (self.bias, self.ffn, self.forget_gate):
            if part is not None:
                part.reset_parameters()

    def forward(self, x: Tensor, padding_mask: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        """x (B, n, d), ``padding_mask`` bool (B, n) with True = padding, on any side -> (B, n, d).

        ``segment_ids`` (B, n), integers that never decrease along a row, number its packed documents, which do not see
        each other.

        The output of a padded token is its input plus W_o's bias, passed through the ``FeedForward`` with
        ``separate_ffn``; it never affects a real token.

        Raises:
            ValueError: a mask that does not fit, or more real tokens than FLASH-Quad's ``toeplitz`` bias covers.
        """
        return self._attend(x, padding_mask, None, False, segment_ids)[0]

    def extend(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        state: State | None = None,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """The next tokens' outputs and the state after them; arguments as in ``forward``, ``state`` None to start.

        Every tensor of the state has the batch as dimension 0. If ``linear_cost``, its size is bounded; otherwise O(n).
        """
        if not self.causal:
            raise ValueError("causal is False; allowed for extend: a unit built with causal=True")
        return self._attend(x, padding_mask, state, True, segment_ids)

    def attention_matrix(
        self, x: Tensor, padding_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Tensor:
        """The matrix (B, H, n, n) applied to V before the gate U; ``record_attention(model, maps=True)`` records it.

        Without attention dropout. Costs n / (e / H) calls of the attention and O(n²) memory: for short inputs.
        """
        normed = self.norm(x)
        *_, v, z = (F.silu(part) for part in self.in_proj(normed).split(self.widths, dim=-1))
        heads = self._queries_and_keys(z, self._rotation(z, padding_mask, None, segment_ids))
        op = self._quadratic if self.chunk_size is None else self._mixed_chunk
        whole = {"initial_state": None, "return_state": False, "segment_ids": segment_ids}
        whole.update(self._gates(normed, padding_mask))
        return read_attention_matrix(lambda values: op(heads, values, padding_mask, **whole), self._split_heads(v))

    def _attend(
        self,
        x: Tensor,
        padding_mask: Tensor | None,
        state: State | None,
        return_state: bool,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        if x.dim() != 3 or x.shape[2] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: (batch, tokens, {self.dim})")
        check_padding_mask("padding_mask", padding_mask, x.unsqueeze(1))
        if segment_ids is not None and self.context is not None:
            raise ValueError("segment_ids is given; allowed where several processes hold one sequence: None")
        hidden, gates = self._recomputed(self._project, x, padding_mask)
        out, state = self._recomputed(self._branch, hidden, gates, padding_mask, state, return_state, segment_ids)
        x = x + out
        return (x if self.ffn is None else self.ffn(x)), state

    def _recomputed(self, function: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """``function(x, *args)`` for x (B, n, any width); for large inputs the backward pass calls it again.

        The graph then saves only the arguments. Not used where operations are traced or transformed, nor where
        processes share a sequence, since ``function`` then exchanges tensors, which must happen only once.
        """
        eager = torch.is_grad_enabled() and runs_eagerly(x) and self.context is None
        if not eager or x.shape[0] * x.shape[1] * self.dim < RECOMPUTED_FROM:  # graphs must not depend on sizes
            return function(x, *args)
        dropouts = (self.dropout, self.attention_dropout, self.activation_dropout)
        random = any(getattr(layer, "p", 1.0) > 0.0 for layer in dropouts)  # a host's own layer may have no p
        return checkpoint(function, x, *args, use_reentrant=False, preserve_rng_state=random)

    def _project(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """norm(x) W (B, n, Σ widths), before silu, and the gates of the tokens."""
        normed = self.norm(x)
        return self.in_proj(normed), self._gates(normed, padding_mask)

    def _branch(
        self,
        hidden: Tensor,
        gates: dict[str, Tensor],
        padding_mask: Tensor | None,
        state: State | None,
        return_state: bool,
        segment_ids: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        """The branch (B, n, d), from the results of ``_project``, which is added to the tokens; and the new state."""
        *gate, v, z = silu_parts(hidden, self.widths)
        heads = self._queries_and_keys(z, self._rotation(z, padding_mask, state, segment_ids))
        v = self._split_heads(v)
        if self.attention_dropout.p > 0.0:
            v = v * self.attention_dropout(torch.ones_like(v[..., :1]))
        if self.context is not None and not return_state:
            out = self._attend_part(heads, v, padding_mask, gates)
        else:
            op = self._quadratic if self.chunk_size is None else self._mixed_chunk
            options = {"initial_state": state, "return_state": return_state, "segment_ids": segment_ids}
            out = op(heads, v, padding_mask, **gates, **options)
        out, state = out if return_state else (out, None)
        out = out.transpose(1, 2).flatten(2)  # (B, H, n, e/H) -> (B, n, e)
        if self.gate:
            out = gate[0] * out
        return self.dropout(self.out_proj(self.activation_dropout(out))), state

    def _gates(self, normed: Tensor, padding_mask: Tensor | None) -> dict[str, Tensor]:
        """``log_decay`` of mixed chunk attention from the normed tokens (B, n, d), with the option ``forget``."""
        if self.forget_gate is None:
            return {}
        # Padding must not reach the gradients of the gates.
        return {"log_decay": self.forget_gate(zero_padded_tokens(normed, padding_mask))}

    def _attend_part(
        self, heads: tuple[Tensor, ...], v: Tensor, padding_mask: Tensor | None, gates: dict[str, Tensor]
    ) -> Tensor:
        """The attention (B, H, n, e/H) of this process's part of a sequence, after the parts before it.

        If all parts start at a chunk boundary, parts only share the sums of the linear term, and without gates these
        add up.
        """
        if not gates and self.context.starts_at_multiples(self.chunk_size):
            out = self._mixed_chunk(heads, v, padding_mask, initial_state=None, return_state=False)
            if not self.linear:
                return out
            return out + mixed_chunk.linear_term_of_parts_before(
                *heads[-2:], v, padding_mask, self.chunk_size, self.context.sums_before
            )

        def after(tensors: tuple[Tensor, ...], mask: Tensor | None, state: State | None) -> tuple[Tensor, State]:
            part, log_decay = tensors[: len(heads)], dict(zip(gates, tensors[len(heads) + 1 :]))
            return self._mixed_chunk(
                part, tensors[len(heads)], mask, **log_decay, initial_state=state, return_state=True
            )

        return self.context.carry(self, after, (*heads, v, *gates.values()), padding_mask)

    def _split_heads(self, v: Tensor) -> Tensor:
        return v.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, n, e) -> (B, H, n, e/H)

    def _rotation(
        self, z: Tensor, padding_mask: Tensor | None, state: State | None, segment_ids: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines for queries and keys (B, R, H, n, s) from z (B, n, s); None without ``rotary``."""
        if not self.rotary:
            return None
        # (n,) or (B, 1, n)
        positions = document_positions(z[:, None], padding_mask, self._count(state, z), segment_ids, state)
        return cos_and_sin(positions if positions.dim() == 1 else positions[:, None], z.shape[-1], self.gamma.dtype)

    def _queries_and_keys(self, z: Tensor, rotation: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """Scaled, shifted and rotated copies of z (B, n, s): (B, H, n, s) each."""
        # (B, 1, 1, n, s), (R, H, 1, s) -> (B, R, H, n, s)
        copies = torch.addcmul(self.beta[:, :, None], z[:, None, None], self.gamma[:, :, None])
        if rotation is not None:
            copies = rotate_by(copies, *rotation)
        return copies.to(z.dtype).unbind(1)  # under autocast z is in half precision, but the scales are not

    def _count(self, state: State | None, z: Tensor) -> Tensor | None:
        """Number of real tokens before z (B, n, s), per row: (B,); None at the start of a sequence."""
        if state is None:
            return None if self.context is None else self.context.before
        if self._keeps_tokens:
            return (~state_entry(state, "padding_mask", 2, z)).sum(1)
        return state_entry(state, "count", 1, z)

    def _quadratic(
        self,
        heads: tuple[Tensor, ...],
        v: Tensor,
        padding_mask: Tensor | None,
        segment_ids: Tensor | None = None,
        **state: Any,
    ) -> Any:
        if segment_ids is not None:
            return self._quadratic_by_document(heads, v, padding_mask, segment_ids, **state)
        bias = self._whole_bias(v, padding_mask, state["initial_state"])
        options = dict(causal=self.causal, divisor=self.divisor, kernel=self.kernel, first_softmax=self.first_softmax)
        return quadratic.gau_attention(*heads, v, bias=bias, key_padding_mask=padding_mask, **options, **state)

    def _quadratic_by_document(
        self, heads: tuple[Tensor, ...], v: Tensor, padding_mask: Tensor | None, segment_ids: Tensor, **state: Any
    ) -> Any:
        """Apply ``_quadratic`` to each document as a row, with the bias for its length."""

        def call(masks: dict[str, Tensor | None], before: State | None, **tokens: Tensor) -> Any:
            q, k, v = tokens.values()
            return self._quadratic((q, k), v, masks["key_padding_mask"], **{**state, "initial_state": before})

        tokens, masks = dict(zip(("q", "k", "v"), (*heads, v))), {"key_padding_mask": padding_mask}
        return attend_by_document(call, tokens, segment_ids, masks, self.causal, *state.values())

    def _whole_bias(self, v: Tensor, padding_mask: Tensor | None, state: State | None) -> Tensor | None:
        """The relative bias for the tokens of ``state`` and of v (B, H, n, e), as ``gau_attention`` expects it."""
        if self.bias is None:
            return None
        padding = padding_mask
        if padding is None:
            padding = torch.zeros(v.shape[0], v.shape[2], dtype=torch.bool, device=v.device)
        if state is not None:
            padding = torch.cat([state_entry(state, "padding_mask", 2, v), padding], dim=1)
        tokens = padding.shape[1]
        if not isinstance(self.bias, ToeplitzBias) or tokens <= self.max_positions:
            return self.bias(tokens)
        # Padding has no position, so the bias only has to cover the real tokens of the longest row.
        longest = max(1, int((~padding).sum(1).max()))
        return resize_toeplitz(self.bias(longest), tokens)

    def _mixed_chunk(self, heads: tuple[Tensor, ...], v: Tensor, padding_mask: Tensor | None, **further: Any) -> Any:
        bias = None if self.bias is None else self.bias(self._bias_reach())
        heads = heads if len(heads) == 4 else heads * 2
        tensors = {"bias": bias, "key_padding_mask": padding_mask}
        return mixed_chunk.mixed_chunk_attention(*heads, v, **tensors, **self._chunk_options(), **further)

    def _bias_reach(self) -> int:
        """The number of tokens that the relative bias covers: without chunks, ``max_positions``."""
        if self.chunk_size is None:
            return self.max_positions
        return mixed_chunk.MixedChunkOptions(**self._chunk_options()).bias_reach()

    def _chunk_options(self) -> dict[str, int | bool | str]:
        """The options of mixed chunk attention."""
        return {name: getattr(self, name) for name in mixed_chunk.MixedChunkOptions._fields}

    def extra_repr(self) -> str:
        """The options, for ``print(model)``."""
        names = ("heads", "causal", "chunk_size", "max_positions", "divisor", "kernel", "gate", "local", "linear")
        names += ("rotary", "first_softmax", "first_to_all", "overlap", "chunk_summaries")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
