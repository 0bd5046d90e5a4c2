"""The layers of a model: embeddings, attention, feed-forward blocks and gated attention units, and a stack of them.

Names of parameters are those of the same model in fairseq, so that its weights fit as they are. Legend: B rows, n
tokens, m tokens of a source, C width, H heads, d channels of a head. Masks are bool, and True is padding.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from ..attention import ATTENTIONS, InnerAttention, build_rotary_attention
from ..modules import GatedAttentionUnit, ScaledSin, ToeplitzBias, build_norm
from ..modules.sinusoids import sinusoids
from ..modules.stored_options import StoredOptions
from ..ops.shared.checks import allowed_names, check_table
from ..ops.shared.padding import both_masks
from ..ops.shared.state import State
from .cache import LineartimeCache
from .configuration import GATED_ATTENTION_UNIT, LayerAttention, LineartimeConfig, Side
from .tokens import Tokens


def relu_squared(x: Tensor) -> Tensor:
    """relu(x)², as fairseq computes it."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """GELU in float32, as fairseq computes it."""
    return F.gelu(x.float()).type_as(x)


def gelu_accurate(x: Tensor) -> Tensor:
    """GELU by its approximation with tanh, which fairseq calls accurate."""
    return F.gelu(x, approximate="tanh")


def linear(x: Tensor) -> Tensor:
    """x itself."""
    return x


#: fairseq's activation functions by name.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu_squared": relu_squared,
    "gelu": gelu,
    "gelu_accurate": gelu_accurate,
    "gelu_fast": gelu_accurate,
    "silu": F.silu,
    "tanh": torch.tanh,
    "linear": linear,
}


def part(build: Callable[..., nn.Module], *arguments: Any) -> nn.Module:
    """``build(*arguments)``, a part of a model that keeps how it was built, for ``_init_weights`` to build it anew.

    Every parameter and buffer of a model belongs to a part.
    """
    module = build(*arguments)
    module.build_anew = partial(build, *arguments)
    return module


class Source(NamedTuple):
    """The output of an encoder, which every layer of a decoder attends to."""

    features: Tensor  # (B, m, C)
    padding_mask: Tensor | None  # (B, m), True = padding


class SelfAttention(nn.Module):
    """Projections around the attention of one layer, and an optional gate on its output.

    x (B, n, C) -> (B, n, C). Attention dropout drops whole sources, or entries of the map if there is one.
    """

    def __init__(self, config: LineartimeConfig, side: Side, attention: LayerAttention, causal: bool) -> None:
        super().__init__()
        width, heads, bias = side.hidden_size, side.num_attention_heads, config.projection_bias
        dim = config.attention_dim or width
        self.heads, self.dropout_p = heads, config.attention_dropout
        self.inner = _build_inner(attention, causal, heads, dim // heads)
        channels = self.inner.projections(dim // heads)
        for name in ("q", "k", "v"):
            has = name in channels
            setattr(self, f"{name}_proj", projection(width, heads * channels[name], bias) if has else None)
        self.out_proj = projection(dim, width, bias, gain=1.0)
        self.gate_proj = nn.Linear(width, dim) if config.attention_gate else None

    def forward(self, x: Tensor, tokens: Tokens, state: State | None) -> tuple[Tensor, State | None]:
        """The output, and the state after the tokens if ``state`` before them is given, {} at the beginning."""
        q, k, v = (
            None if project is None else _split_heads(project(x), self.heads)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        inputs: dict[str, Any] = self.inner.inputs(x=x)
        if tokens.segment_ids is not None:
            inputs["segment_ids"] = tokens.segment_ids
        if self.training:
            inputs["dropout_p"] = self.dropout_p
        if state is None:
            out = self.inner(
                q, k, v, key_padding_mask=tokens.padding_mask, query_padding_mask=tokens.padding_mask, **inputs
            )
        else:
            out, state = self.inner.extend(q, k, v, tokens.padding_mask, state or None, **inputs)
        out = out.transpose(1, 2).flatten(2)  # (B, H, n, d) -> (B, n, H d)
        if self.gate_proj is not None:
            out = F.silu(self.gate_proj(x)) * out
        return self.out_proj(out), state


class CrossAttention(nn.Module):
    """A decoder's attention to an encoder's output: softmax, or a mechanism that sums over the source once.

    x (B, n, C) and a source (B, m, C') -> (B, n, C). The state is that of the source: its sums or, with softmax, its
    keys and values.
    """

    def __init__(self, config: LineartimeConfig, side: Side, source_dim: int, attention: LayerAttention) -> None:
        super().__init__()
        width, self.heads, self.dropout_p = side.hidden_size, side.num_attention_heads, config.attention_dropout
        self.q_proj = projection(width, width)
        self.k_proj, self.v_proj = projection(source_dim, width), projection(source_dim, width)
        self.out_proj = projection(width, width, gain=1.0)
        inner = _build_inner(attention, False, self.heads, width // self.heads)
        self.sums = "source" in inner.supports
        if not self.sums and attention.kind != "softmax":
            kinds = ["softmax", *(name for name, kind in ATTENTIONS.items() if "source" in kind.supports)]
            raise ValueError(f"cross_attention is {attention.kind!r}; {allowed_names(attention.kind, kinds)}")
        if "source_q" in inner.needs and source_dim != width:
            raise ValueError(
                f"encoder_hidden_size is {source_dim}; allowed with cross_attention {attention.kind!r}: hidden_size, "
                f"{width}"
            )
        if self.sums:
            self.inner = inner
        else:
            self.softmax = (inner,)  # not a child: fairseq's own attention has no record in a state dict

    def forward(self, x: Tensor, tokens: Tokens, source: Source, state: State | None) -> tuple[Tensor, State | None]:
        """The output, and the state of the source if ``state`` is given, {} if ``source`` was not read before."""
        q = _split_heads(self.q_proj(x), self.heads)
        if state is None:
            k, v, inputs = self._project(source.features)
            masks = both_masks(q, k, tokens.padding_mask, source.padding_mask)
            out = self._inner(q, k, v, *masks, dropout_p=self.dropout_p if self.training else 0.0, **inputs)
        elif self.sums:
            if not state:
                k, v, inputs = self._project(source.features)
                state = self.inner.source_state(k, v, key_padding_mask=source.padding_mask, **inputs)
            out = self.inner.attend_source(q, state, tokens.padding_mask, positions=tokens.places)
        else:
            if not state:
                k, v, _ = self._project(source.features)
                mask = source.padding_mask
                state = {"k": k, "v": v, **({} if mask is None else {"padding_mask": mask})}
            masks = both_masks(q, state["k"], tokens.padding_mask, state.get("padding_mask"))
            out = self._inner(q, state["k"], state["v"], *masks)
        return self.out_proj(out.transpose(1, 2).flatten(2)), state

    @property
    def _inner(self) -> InnerAttention:
        return self.inner if self.sums else self.softmax[0]

    def _project(self, source: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Keys and values of ``source`` (B, m, C'), and the further inputs of the mechanism."""
        k, v = (_split_heads(project(source), self.heads) for project in (self.k_proj, self.v_proj))
        needs = "source_q" in self._inner.needs
        return k, v, {"source_q": _split_heads(self.q_proj(source), self.heads)} if needs else {}


class GatedLinear(nn.Module):
    """GLU: act(x W) ⊙ (x V), the first layer of a gated feed-forward block; (..., C) -> (..., inner)."""

    def __init__(self, width: int, inner_dim: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * inner_dim)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., inner)."""
        gate, value = self.proj(x).chunk(2, dim=-1)
        return self.activation(gate) * value


class TransformerLayer(GradientCheckpointingLayer):
    """Self-attention, attention to a source if ``cross`` is given, and feed-forward, with norms and residuals."""

    def __init__(
        self,
        config: LineartimeConfig,
        side: Side,
        attention: LayerAttention,
        causal: bool,
        cross: LayerAttention | None = None,
        source_dim: int | None = None,
    ) -> None:
        super().__init__()
        width, inner_dim = side.hidden_size, side.intermediate_size
        self.normalize_before = side.normalize_before
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.activation_dropout = nn.Dropout(config.activation_dropout)
        self.activation = activation_called("hidden_act", config.hidden_act)
        self.self_attn = SelfAttention(config, side, attention, causal)
        self.self_attn_layer_norm = build_norm(config.norm, width)
        self.encoder_attn = None if cross is None else CrossAttention(config, side, source_dim, cross)
        self.encoder_attn_layer_norm = None if cross is None else nn.LayerNorm(width)
        self.fc1 = GatedLinear(width, inner_dim, self.activation) if config.gated_ffn else nn.Linear(width, inner_dim)
        self.fc2 = nn.Linear(inner_dim, width)
        self.final_layer_norm = build_norm(config.norm, width)

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        state: State | None = None,
        source: Source | None = None,
        source_state: State | None = None,
    ) -> tuple[Tensor, State | None, State | None]:
        """x (B, n, C) -> (B, n, C), and the states after the tokens, None unless states before them are given."""
        y, state = self.self_attn(self._before(self.self_attn_layer_norm, x), tokens, state)
        x = self._after(self.self_attn_layer_norm, x + self.dropout(y))
        if self.encoder_attn is not None:
            y = self._before(self.encoder_attn_layer_norm, x)
            y, source_state = self.encoder_attn(y, tokens, source, source_state)
            x = self._after(self.encoder_attn_layer_norm, x + self.dropout(y))
        y = self.fc1(self._before(self.final_layer_norm, x))
        y = y if isinstance(self.fc1, GatedLinear) else self.activation(y)
        y = self.fc2(self.activation_dropout(y))
        return self._after(self.final_layer_norm, x + self.dropout(y)), state, source_state

    def _before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The input of a block, normalised if norms come before blocks."""
        return norm(x) if self.normalize_before else x

    def _after(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The sum of a block's input and output, normalised if norms come after blocks."""
        return x if self.normalize_before else norm(x)


class GatedAttentionUnitLayer(GradientCheckpointingLayer):
    """A gated attention unit, which combines attention and feed-forward, with its norm and residual."""

    def __init__(self, config: LineartimeConfig, side: Side, attention: LayerAttention, causal: bool) -> None:
        super().__init__()
        self.unit = GatedAttentionUnit(
            side.hidden_size,
            expanded_dim=side.intermediate_size,
            heads=side.num_attention_heads,
            causal=causal,
            dropout=config.hidden_dropout,
            attention_dropout=config.attention_dropout,
            activation_dropout=config.activation_dropout,
            **attention.options,
        )
        quadratic = self.unit.chunk_size is None and isinstance(self.unit.bias, ToeplitzBias)
        #: The longest sequence that the bias of FLASH-Quad has parameters for.
        self.max_tokens = self.unit.max_positions if quadratic else None

    def forward(
        self,
        x: Tensor,
        tokens: Tokens,
        state: State | None = None,
        source: Source | None = None,
        source_state: State | None = None,
    ) -> tuple[Tensor, State | None, State | None]:
        """As ``TransformerLayer``, but without a source."""
        if state is None:
            return self.unit(x, tokens.padding_mask, tokens.segment_ids), None, None
        x, state = self.unit.extend(x, tokens.padding_mask, state or None, tokens.segment_ids)
        return x, state, None


class Positions(nn.Module):
    """Sinusoidal or scaled_sinusoidal position embeddings, which count real tokens; padding gives zeros."""

    def __init__(self, kind: str, width: int, padding_idx: int) -> None:
        super().__init__()
        self.width, self.padding_idx = width, padding_idx
        self.scaled_sin = ScaledSin(width) if kind == "scaled_sinusoidal" else None

    def forward(self, tokens: Tokens) -> Tensor:
        """(B, n, C), in float32 or the dtype of the scale."""
        if self.scaled_sin is None:
            return sinusoids(position_numbers(tokens, self.padding_idx), self.width, self.padding_idx)
        x, mask = self.scaled_sin(tokens.places), tokens.padding_mask
        return x if mask is None else x.masked_fill(mask[..., None], 0.0)


class LearnedPositions(nn.Embedding):
    """Learned embeddings of at most ``max_tokens`` positions; padding has a row of zeros, as in fairseq."""

    def __init__(self, max_tokens: int, width: int, padding_idx: int) -> None:
        check_table("max_position_embeddings", max_tokens, (max_tokens, width))
        super().__init__(max_tokens + padding_idx + 1, width, padding_idx)
        self.max_tokens = max_tokens
        init_embedding(self)

    def forward(self, tokens: Tokens) -> Tensor:
        """(B, n, C)."""
        return super().forward(position_numbers(tokens, self.padding_idx))


class Stack(nn.Module):
    """Embeddings, layers and the final norm of an encoder, or of a decoder if ``causal``.

    Raises:
        ValueError: when called with more tokens than a part of it has parameters for.
    """

    def __init__(
        self, config: LineartimeConfig, encoder: bool = False, causal: bool = False, crossed: bool = False
    ) -> None:
        super().__init__()
        side = config.side(encoder)
        width = side.hidden_size
        embedding_dim = config.embedding_dim if causal else None
        self.causal = causal
        self.embed_scale = math.sqrt(width) if config.scale_embedding else 1.0
        self.embed_tokens = part(token_embedding, config, encoder, causal)
        self.project_in_dim = None if embedding_dim is None else part(projection, embedding_dim, width, False, 1.0)
        self.embed_positions = None if side.positions == "none" else part(_positions, side, config.pad_token_id)
        self.layernorm_embedding = part(nn.LayerNorm, width) if config.layernorm_embedding else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(_layers(config, side, causal, crossed))
        self.layer_norm = part(build_norm, config.norm, width) if side.final_norm else None
        self.documents = StoredOptions(reset_at_eos=True) if config.reset_at_eos else None
        limits = [getattr(module, "max_tokens", None) for module in self.modules() if module is not self]
        #: The longest sequence, not counting padding; None for any length.
        self.max_tokens = min((limit for limit in limits if limit is not None), default=None)

    def forward(
        self,
        input_ids: Tensor,
        tokens: Tokens,
        cache: LineartimeCache | None = None,
        source: Source | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """input_ids (B, n) -> features (B, n, C), and a tuple of those of the embeddings and of each layer.

        With ``cache``, the tokens go on from it, and it is updated.
        """
        self.check_length(tokens)
        states: list[State | None] = [None] * len(self.layers)
        source_states: list[State | None] = [None] * len(self.layers)
        if cache is not None:
            states = list(cache.states) or [{} for _ in states]
            if source is not None:
                source_states = list(cache.source_states) or [{} for _ in states]
        x = self.embed(input_ids, tokens)
        features = [x]
        for i, layer in enumerate(self.layers):
            x, states[i], source_states[i] = layer(x, tokens, states[i], source, source_states[i])
            features.append(x)
        if self.layer_norm is not None:
            x = features[-1] = self.layer_norm(x)
        if cache is not None:
            cache.states, cache.source_states = states, source_states if source is not None else []
            cache.seen, cache.columns = tokens.seen, cache.columns + input_ids.shape[1]
        return x, tuple(features)

    def embed(self, input_ids: Tensor, tokens: Tokens) -> Tensor:
        """The sum of token and position embeddings (B, n, C)."""
        x = self.embed_scale * self.embed_tokens(input_ids)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(tokens).to(x.dtype)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout(x)
        if not self.causal and tokens.padding_mask is not None:
            x = x.masked_fill(tokens.padding_mask[..., None], 0.0)
        return x

    def check_length(self, tokens: Tokens) -> None:
        """Raise ValueError for a row of more real tokens than ``max_tokens``."""
        if self.max_tokens is None or torch.compiler.is_compiling():
            return
        places, mask = tokens.places, tokens.padding_mask
        longest = int((places if mask is None else places.masked_fill(mask, -1)).max()) + 1
        if longest > self.max_tokens:
            raise ValueError(
                f"the input has {longest} tokens; allowed: {self.max_tokens}, the longest sequence that the model was "
                "built for (max_position_embeddings)"
            )


def position_numbers(tokens: Tokens, padding_idx: int) -> Tensor:
    """fairseq's position numbers (B, n): they begin after ``padding_idx``, which padding has."""
    numbers = tokens.places + (padding_idx + 1)
    return numbers if tokens.padding_mask is None else numbers.masked_fill(tokens.padding_mask, padding_idx)


def activation_called(field: str, name: str) -> Callable[[Tensor], Tensor]:
    """The activation function that the ``field`` of a configuration names; ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"{field} is {name!r}; {allowed_names(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def token_embedding(config: LineartimeConfig, encoder: bool, causal: bool) -> nn.Embedding:
    """The token embeddings of the only stack of layers or of the decoder, or with ``encoder`` of the encoder."""
    side, width = config.side(encoder), config.embedding_dim if causal else None
    embedding = nn.Embedding(side.vocab_size, width or side.hidden_size, config.pad_token_id)
    init_embedding(embedding, 0.02 if config.family == "gau" else None)
    return embedding


def init_embedding(embedding: nn.Embedding, std: float | None = None) -> None:
    """Initialise as fairseq does, from N(0, 1/√C) or ``std``, with zeros for padding."""
    nn.init.normal_(embedding.weight, std=embedding.embedding_dim**-0.5 if std is None else std)
    with torch.no_grad():
        embedding.weight[embedding.padding_idx].zero_()


def _layers(config: LineartimeConfig, side: Side, causal: bool, crossed: bool) -> list[nn.Module]:
    """The layers of ``side``, with attention to an encoder if ``crossed``."""
    crosses = config.layers("cross_attention") if crossed else (None,) * len(side.attention)
    if len(crosses) != len(side.attention):
        raise ValueError(f"cross_attention has {len(crosses)} entries; allowed: one per layer, {len(side.attention)}")
    if config.family == "gau" and crossed:
        raise ValueError("family is gau; allowed for an encoder-decoder: transformer")
    source_dim = config.encoder_hidden_size if crossed else None
    return [
        part(GatedAttentionUnitLayer, config, side, attention, causal)
        if attention.kind == GATED_ATTENTION_UNIT
        else part(TransformerLayer, config, side, attention, causal, cross, source_dim)
        for attention, cross in zip(side.attention, crosses)
    ]


def _positions(side: Side, padding_idx: int) -> nn.Module:
    if side.positions == "learned":
        return LearnedPositions(side.max_position_embeddings, side.hidden_size, padding_idx)
    return Positions(side.positions, side.hidden_size, padding_idx)


def _build_inner(attention: LayerAttention, causal: bool, heads: int, head_dim: int) -> InnerAttention:
    """The mechanism of a layer, with rotary positions if it has them."""
    shape = {"num_heads": heads, "head_dim": head_dim, "max_tokens": attention.max_tokens}
    return build_rotary_attention(attention.kind, causal, attention.rotary, **shape, **attention.options)


def projection(inputs: int, outputs: int, bias: bool = True, gain: float = 2**-0.5) -> nn.Linear:
    """A projection, initialised as fairseq's of attention or, with ``gain`` 1, as its others."""
    linear = nn.Linear(inputs, outputs, bias)
    nn.init.xavier_uniform_(linear.weight, gain=gain)
    return linear


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """x (B, n, C) -> (B, H, n, C / H)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
