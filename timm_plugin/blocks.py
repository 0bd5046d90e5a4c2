"""timm's pre-norm transformer block with the two settings that its ``attn_layer`` seam cannot carry."""

from typing import Any, Dict, Optional

import torch
from timm.layers import LayerScale, register_notrace_module
from timm.layers.typing import LayerType
from timm.models.vision_transformer import Block

from common.linear import Linear, use_faster_linear

from .attention import SelfAttention

register_notrace_module(Linear)  # FX must not trace into it: which way it takes depends on the input.


class LinearTimeBlock(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)), on (B, N, C); every argument of timm's ``Block`` and two more.

    Its linear layers are those of ``common.linear``.

    Args:
        attention_options: options of the mechanism, see ``common.attention``.
        mlp_init_values: start of a layer scale on the MLP branch alone, as in the authors' released vision model;
            ``init_values``, timm's, scales both branches.

    Raises:
        ValueError: options for an attention that is not one of ours, or both kinds of layer scale.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        attn_layer: LayerType = "flow",
        attention_options: Optional[Dict[str, Any]] = None,
        init_values: Optional[float] = None,
        mlp_init_values: Optional[float] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        **block_args: Any,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(dim, num_heads, attn_layer=attn_layer, init_values=init_values, **block_args, **dd)
        if attention_options:
            if not isinstance(self.attn, SelfAttention):
                raise ValueError(
                    f"attn_layer is {attn_layer!r}, which takes no {', '.join(attention_options)}; "
                    "allowed with these: an attention of timm_plugin"
                )
            self.attn.configure(**attention_options)
        if mlp_init_values is not None:
            if init_values is not None:
                raise ValueError(
                    f"init_values is {init_values} and mlp_init_values {mlp_init_values}; allowed: one of them"
                )
            self.ls2 = LayerScale(dim, init_values=mlp_init_values, **dd)
        use_faster_linear(self)
