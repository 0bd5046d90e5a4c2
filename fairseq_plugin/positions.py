"""Position embeddings that count real tokens while decoding too.

fairseq's own number the tokens of a left-padded prefix from its first real one in a full forward, but from its first
padding in incremental decoding; here both are the first. Parameters and tables are fairseq's.
"""

from typing import Any, Dict, Optional

from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops.alignment import real_positions
from common.positions import ScaledSin

from .attention import IncrementalState


def last_position(tokens: Tensor, padding_idx: int) -> Tensor:
    """fairseq's number of the last of ``tokens`` (B, T): padding_idx plus the real tokens so far, (B,).

    padding_idx itself where the last token is padding. O(T).
    """
    real = tokens.ne(padding_idx)
    return padding_idx + real.sum(1) * real[:, -1]


class SinusoidalPositions(SinusoidalPositionalEmbedding):
    """Sinusoidal positions of real tokens; tokens (B, T) -> (B, T, C), or (B, 1, C) for the last while decoding."""

    def upgrade_state_dict_named(self, state_dict: Dict[str, Any], name: str) -> None:
        """fairseq's hook: leave out what its earlier versions stored, the table itself and a marker of its dtype."""
        for key in ("weights", "_float_tensor"):
            state_dict.pop(f"{name}.{key}", None)

    def forward(
        self,
        input: Tensor,
        incremental_state: Optional[IncrementalState] = None,
        timestep: Optional[Tensor] = None,
        positions: Optional[Tensor] = None,
    ) -> Tensor:
        embedded = super().forward(input, incremental_state, timestep, positions)  # also lets the table grow
        if incremental_state is None:
            return embedded
        return self.weights[last_position(input, self.padding_idx)].unsqueeze(1)  # (B, C) -> (B, 1, C)


class LearnedPositions(LearnedPositionalEmbedding):
    """Learned positions of real tokens; tokens (B, T) -> (B, T, C), or (B, 1, C) for the last while decoding.

    Raises:
        ValueError: more real tokens than there are positions.
    """

    def forward(
        self,
        input: Tensor,
        incremental_state: Optional[IncrementalState] = None,
        positions: Optional[Tensor] = None,
    ) -> Tensor:
        check_limit(input, self.padding_idx, self.max_positions)
        if incremental_state is None:
            return super().forward(input, None, positions)
        return F.embedding(last_position(input, self.padding_idx), self.weight, self.padding_idx).unsqueeze(1)


class ScaledSinPositions(nn.Module):
    """``ScaledSin`` of real tokens behind fairseq's call: tokens (B, T) -> (B, T, C), or (B, 1, C) while decoding.

    Padding is embedded as zeros. Raises ValueError for more real tokens than ``max_positions``.
    """

    def __init__(self, embedding_dim: int, padding_idx: int, max_positions: int) -> None:
        super().__init__()
        self.padding_idx = padding_idx
        self.max_positions = max_positions
        self.scaled_sin = ScaledSin(embedding_dim)

    def forward(self, input: Tensor, incremental_state: Optional[IncrementalState] = None) -> Tensor:
        check_limit(input, self.padding_idx, self.max_positions)
        padding = input.eq(self.padding_idx)
        positions = real_positions(padding)  # (B, T)
        if incremental_state is not None:
            padding, positions = padding[:, -1:], positions[:, -1:]
        return self.scaled_sin(positions).masked_fill(padding[..., None], 0.0)


def check_limit(tokens: Tensor, padding_idx: int, max_positions: int) -> None:
    """Raise ValueError if a row of ``tokens`` (B, T) has more than ``max_positions`` real ones."""
    if tokens.size(1) > max_positions:
        longest = int(tokens.ne(padding_idx).sum(1).max())
        if longest > max_positions:
            raise ValueError(f"the input has {longest} tokens; allowed by the position limit: {max_positions}")


def count_real_tokens(host: nn.Module) -> nn.Module:
    """The position embedding ``host`` of fairseq as one of ours, with the same parameters and tables."""
    if isinstance(host, LearnedPositionalEmbedding):
        ours = LearnedPositions(host.num_embeddings, host.embedding_dim, host.padding_idx)
        ours.weight = host.weight
        return ours
    ours = SinusoidalPositions(host.embedding_dim, host.padding_idx, init_size=host.padding_idx + 1)
    ours.weights = host.weights
    return ours


def scaled_sin_positions(host: nn.Module, max_positions: int) -> nn.Module:
    """Scaled sinusoids in place of fairseq's plain ones; learned positions stay learned."""
    if isinstance(host, LearnedPositionalEmbedding):
        return count_real_tokens(host)
    return ScaledSinPositions(host.embedding_dim, host.padding_idx, max_positions)
