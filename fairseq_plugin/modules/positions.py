"""Position embeddings that count real tokens, also while decoding.

fairseq's own number the tokens of a left-padded prefix from its first real token in a full forward pass, but from its
first padding in incremental decoding. Here both start at the first real token. Parameters and tables are fairseq's.
"""

import sys
from typing import Any

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from common.modules.sinusoids import ScaledSin, sinusoids
from common.ops.shared.padding import real_positions

from .multihead_attention import IncrementalState


def positions_from(tokens: Tensor, padding_idx: int, start: Tensor) -> Tensor:
    """fairseq's position numbers (B, T) of ``tokens`` (B, T) after ``start`` real ones; padding_idx at padding. O(T).

    ``start`` is (B,), or (B, T) if positions restart within a row.
    """
    real = tokens.ne(padding_idx)
    return padding_idx + (_by_token(start) + real.cumsum(1)) * real


def _by_token(start: Tensor) -> Tensor:
    """``start`` in a shape that broadcasts to tokens (B, T)."""
    return start if start.dim() == 2 else start[:, None]


def last_position(tokens: Tensor, padding_idx: int) -> Tensor:
    """fairseq's position number of the last of ``tokens`` (B, T): padding_idx plus the number of real tokens, (B,).

    It is padding_idx if the last token is padding. O(T).
    """
    real = tokens.ne(padding_idx)
    return padding_idx + real.sum(1) * real[:, -1]


class SinusoidalPositions(SinusoidalPositionalEmbedding):
    """Sinusoidal positions of real tokens; tokens (B, T) -> (B, T, C), or (B, 1, C) for the last while decoding."""

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """fairseq's hook: remove the table and the marker of its dtype, which earlier versions stored."""
        for key in ("weights", "_float_tensor"):
            state_dict.pop(f"{name}.{key}", None)

    def forward(
        self,
        input: Tensor,
        incremental_state: IncrementalState | None = None,
        timestep: Tensor | None = None,
        positions: Tensor | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        if start is not None:
            numbers = positions_from(input, self.padding_idx, start)
            return sinusoids(numbers, self.embedding_dim, self.padding_idx).to(self.weights)
        self._grow(self.padding_idx + 1 + input.shape[1])  # fairseq would rebuild it at every token
        if incremental_state is not None:
            return self.weights[last_position(input, self.padding_idx)].unsqueeze(1)  # (B, C) -> (B, 1, C)
        # fairseq's own reads the same rows, but in a way that transforms of torch.func do not support.
        return F.embedding(positions_from(input, self.padding_idx, input.new_zeros(len(input))), self.weights)

    def reset_parameters(self) -> None:
        """Compute the table anew, which no state dict has, for a model that was built on "meta"."""
        self.weights = self.get_embedding(len(self.weights), self.embedding_dim, self.padding_idx).to(self.weights)

    def _grow(self, rows: int) -> None:
        """Grow the table to at least ``rows`` rows, at least doubling it, so that decoding seldom rebuilds it."""
        if rows > len(self.weights):
            rows = max(rows, 2 * len(self.weights))
            self.weights = self.get_embedding(rows, self.embedding_dim, self.padding_idx).to(self.weights)


class ComputedSinusoids(nn.Module):
    """The positions of ``host`` after ``start`` (B,) real tokens, computed instead of looked up, so without a limit.

    tokens (B, T) -> (B, T, C), 0 at padding; for exported decoding steps. O(T C).
    """

    def __init__(self, host: SinusoidalPositions) -> None:
        super().__init__()
        self.padding_idx, self.embedding_dim = host.padding_idx, host.embedding_dim

    def forward(self, tokens: Tensor, incremental_state: None = None, start: Tensor | None = None) -> Tensor:
        """See the class; ``incremental_state`` is None."""
        return sinusoids(positions_from(tokens, self.padding_idx, start), self.embedding_dim, self.padding_idx)


class LearnedPositions(LearnedPositionalEmbedding):
    """Learned positions of real tokens; tokens (B, T) -> (B, T, C), or (B, 1, C) for the last while decoding.

    The model refuses inputs with more than ``max_tokens`` real tokens.
    """

    __jit_unused_properties__ = ("max_tokens",)

    @property
    def max_tokens(self) -> int:
        """The number of positions."""
        return self.max_positions

    def forward(
        self,
        input: Tensor,
        incremental_state: IncrementalState | None = None,
        positions: Tensor | None = None,
        start: Tensor | None = None,
    ) -> Tensor:
        if start is not None:
            return F.embedding(positions_from(input, self.padding_idx, start), self.weight, self.padding_idx)
        if incremental_state is None:
            return super().forward(input, None, positions)
        return F.embedding(last_position(input, self.padding_idx), self.weight, self.padding_idx).unsqueeze(1)


class ScaledSinPositions(nn.Module):
    """``ScaledSin`` of real tokens, for fairseq: tokens (B, T) -> (B, T, C), or (B, 1, C) while decoding.

    Padding is embedded as zeros. Any number of tokens is allowed.
    """

    #: fairseq uses the smaller of this and the model's own limit.
    max_positions = sys.maxsize

    def __init__(self, embedding_dim: int, padding_idx: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.scaled_sin = ScaledSin(embedding_dim)

    def forward(
        self, input: Tensor, incremental_state: IncrementalState | None = None, start: Tensor | None = None
    ) -> Tensor:
        padding = input.eq(self.padding_idx)
        positions = real_positions(padding)  # (B, T)
        if start is not None:
            positions = _by_token(start) + positions
        if incremental_state is not None:
            padding, positions = padding[:, -1:], positions[:, -1:]
        return self.scaled_sin(positions).masked_fill(padding[..., None], 0.0)


def find_max_tokens(model: nn.Module) -> int | None:
    """The longest input for which every part of ``model`` has a parameter or a table; None for any length.

    Learned positions and attentions with a parameter per position or distance have such a limit, the attribute
    ``max_tokens`` of the module. Sinusoids and rotary positions have no limit.
    """
    limits = [getattr(module, "max_tokens", None) for module in model.modules()]
    return min((limit for limit in limits if limit is not None), default=None)


def check_length(tokens: Tensor, padding_idx: int, max_tokens: int | None, options: str) -> None:
    """Raise ValueError if a row of ``tokens`` (B, T) has more than ``max_tokens`` real tokens.

    ``options`` are the command-line options that set the limit.
    """
    if max_tokens is not None and tokens.size(1) > max_tokens:
        check_count(tokens.ne(padding_idx).sum(1), max_tokens, options)


def check_count(count: Tensor, max_tokens: int | None, options: str) -> None:
    """Raise ValueError if one of ``count`` (B,), the real tokens per row, is above ``max_tokens``."""
    if max_tokens is not None and (longest := int(count.max())) > max_tokens:
        raise ValueError(f"the input has {longest} tokens; allowed: {max_tokens}, which {options} set in training")


def count_real_tokens(host: nn.Module) -> nn.Module:
    """Our equivalent of fairseq's position embedding ``host``, with the same parameters and tables."""
    if isinstance(host, LearnedPositionalEmbedding):
        positions = LearnedPositions(host.num_embeddings, host.embedding_dim, host.padding_idx)
        positions.weight = host.weight
        return positions
    positions = SinusoidalPositions(host.embedding_dim, host.padding_idx, init_size=host.padding_idx + 1)
    positions.weights = host.weights
    return positions


def scaled_sin_positions(host: nn.Module) -> nn.Module:
    """Replace fairseq's sinusoids by scaled ones; learned positions remain learned."""
    if isinstance(host, LearnedPositionalEmbedding):
        return count_real_tokens(host)
    return ScaledSinPositions(host.embedding_dim, host.padding_idx)
