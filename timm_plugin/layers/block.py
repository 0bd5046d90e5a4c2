"""timm's pre-norm transformer block with a layer scale only on its MLP."""

from typing import Any

import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import Block


class MlpScaleBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (B, N, C); with all arguments of timm's ``Block`` and one more.

    Args:
        mlp_init_values: initial value of a layer scale only on the MLP branch, as in the authors' released vision
            model; timm's ``init_values`` scales both branches.

    Raises:
        ValueError: both kinds of layer scale.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        init_values: float | None = None,
        mlp_init_values: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **block_args: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, init_values=init_values, **block_args, **dd)
        if mlp_init_values is not None:
            if init_values is not None:
                raise ValueError(
                    f"init_values is {init_values} and mlp_init_values {mlp_init_values}; allowed: one of them"
                )
            self.ls2 = LayerScale(dim, init_values=mlp_init_values, **dd)
