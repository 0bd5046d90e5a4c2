"""FLASH's gated attention unit as a block of timm's vision transformers.

Hua, Dai, Liu, Le, *Transformer Quality in Linear Time*, ICML 2022. Legend: B batch, N tokens, C channels, Y x X the
rows and columns of an image's tokens.
"""

from collections import OrderedDict
from typing import Any

import torch
from timm.layers import DropPath, LayerNorm, LayerScale, register_notrace_module
from torch import Tensor, nn

from common.modules.gated_attention_unit import GatedAttentionUnit

from .attention import key_padding
from .position_bias import Grid, GridBias


@register_notrace_module  # it checks shapes
class GatedAttentionBlock(GatedAttentionUnit):
    """x + (U ⊙ attention(Q, K, V)) W_o on (B, N, C): attention and MLP in one, on the sequence of an image's rows.

    Queries and keys are rotated by their position in that sequence. Scores have a learned bias for each distance in
    rows and columns: the paper's bias for texts below 512 tokens, in two dimensions.

    Args:
        dim: C.
        num_heads: heads of the unit, one in the paper.
        mlp_ratio: expansion of U and V, 2 in the paper.
        query_dim: width of queries and keys.
        grid_size: (Y, X).
        chunk_rows: rows of the grid in a chunk, for mixed chunk attention (FLASH), O(N X chunk_rows C); None for
            quadratic attention (FLASH-Quad), O(N² C).
        kernel: kernel of the scores, as in ``GatedAttentionUnit``.
        init_values, proj_drop, attn_drop, drop_path, norm_layer: as in timm's ``Block``; ``attn_drop`` drops whole
            sources.
        timms: other arguments of timm's ``Block``, which have no meaning here; the model refuses them.

    Raises:
        ValueError: a value that is not allowed.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 1,
        mlp_ratio: float = 2.0,
        *,
        grid_size: Grid,
        query_dim: int = 64,
        chunk_rows: int | None = None,
        kernel: str = "relu2",
        init_values: float | None = None,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: type[nn.Module] = LayerNorm,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **timms: Any,
    ) -> None:
        super().__init__(
            dim,
            expanded_dim=int(dim * mlp_ratio),
            query_dim=query_dim,
            heads=num_heads,
            chunk_size=None if chunk_rows is None else chunk_rows * grid_size[1],
            max_positions=None if chunk_rows is not None else grid_size[0] * grid_size[1],
            kernel=kernel,
            bias="none",
            attention_dropout=attn_drop,
        )
        self.chunk_rows = chunk_rows
        self.bias = GridBias(self._grid_of_scores(grid_size), num_heads)
        self.norm = norm_layer(dim)
        branch = OrderedDict(drop=nn.Dropout(proj_drop))
        if init_values:
            branch["ls"] = LayerScale(dim, init_values=init_values)
        branch["drop_path"] = DropPath(drop_path)
        self.dropout = nn.Sequential(branch)
        self.to(device=device, dtype=dtype)

    def set_grid_size(self, grid_size: Grid) -> None:
        """Change the grid (Y, X) of the images: chunks have the same number of rows, and the bias is resampled."""
        if self.chunk_rows is not None:
            self.chunk_size = self.chunk_rows * grid_size[1]
        self.bias.set_grid_size(self._grid_of_scores(grid_size))

    def _grid_of_scores(self, grid_size: Grid) -> Grid:
        """Rows and columns of the tokens that see each other in pairs."""
        return grid_size if self.chunk_rows is None else (self.chunk_rows, grid_size[1])

    def stored_options(self) -> dict[str, str | int | float | bool | None]:
        """The unit's options, with the rows of a chunk instead of its tokens, which depend on the image size."""
        options = super().stored_options()
        del options["chunk_size"]
        return {**options, "chunk_rows": self.chunk_rows}

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) -> (B, N, C); ``attn_mask`` marks padding, as in ``SelfAttention``.

        Raises:
            ValueError: any other ``attn_mask``; ``is_causal``.
        """
        return super().forward(x, key_padding(x, attn_mask, is_causal))

    def __prepare_scriptable__(self) -> "GatedAttentionBlock":
        """torch's hook of ``torch.jit.script``, which does not support this block: ValueError."""
        raise ValueError(
            "the model has gated attention units; allowed for torch.jit.script: models of flow, daft_full and "
            "daft_conv. torch.compile and torch.export take every model"
        )
