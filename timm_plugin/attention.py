"""Self-attention layers for timm's vision transformers: timm's projections around the mechanisms of ``common``.

Legend: B batch, N tokens, C channels, H heads, d = C / H.
"""

import math
from typing import Any, Dict, Optional, Type, Union

import torch
from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from common.attention import InnerAttention, build_attention

# FX must not trace into the mechanisms: they check shapes.
register_notrace_module(InnerAttention)


class SelfAttention(nn.Module):
    """Multi-head self-attention (B, N, C) -> (B, N, C), with the arguments and parameter names of timm's Attention.

    ``qkv``, ``proj``, ``q_norm``, ``k_norm`` and ``norm`` are timm's, so stock checkpoints load. Subclasses name the
    mechanism between the projections; its options are its defaults until ``configure``. O(N C²) for the
    projections plus the mechanism's cost.

    Args:
        dim: C.
        num_heads: H, a divisor of C.
        qkv_bias: whether the projection to q, k and v has a bias.
        qk_norm: normalise every head of q and k with ``norm_layer``.
        scale_norm: normalise the attention's output, before ``proj``, with ``norm_layer``.
        proj_bias: whether ``proj`` has a bias.
        attn_drop: dropout rate of the mechanism; the linear ones drop whole sources.
        proj_drop: dropout rate of the output.

    Raises:
        ValueError: ``dim`` is not a multiple of ``num_heads``, or a norm is asked for without ``norm_layer``.
    """

    #: Name of the mechanism in ``common.attention.ATTENTIONS``.
    mechanism: str

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Optional[Type[nn.Module]] = None,
        device: Union[torch.device, str, None] = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads != 0:
            raise ValueError(f"num_heads is {num_heads} and dim {dim}; allowed: a num_heads that divides dim")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer is None; allowed with qk_norm or scale_norm: a normalisation layer")
        dd = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(dim, **dd) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.configure()

    def configure(self, **options: Any) -> None:
        """Give the mechanism other than its default options.

        Raises:
            ValueError: an option the mechanism does not have, or a value it does not allow.
        """
        self.attention = build_attention(self.mechanism, **options)

    def forward(self, x: Tensor, attn_mask: Optional[Tensor] = None, is_causal: bool = False) -> Tensor:
        """x (B, N, C) -> (B, N, C).

        Raises:
            ValueError: any ``attn_mask``, or ``is_causal``: a mechanism without an attention map cannot apply them.
        """
        x = refuse_masks(x, attn_mask, is_causal)
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim)
        # Not timm's permutation of all: the gradient of unbind then lies in memory as that of qkv, without a copy.
        q, k, v = qkv.unbind(2)  # each (B, N, H, d)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        # Under autocast a normalisation gives float32 whatever comes in.
        q, k = self.q_norm(q).type_as(v), self.k_norm(k).type_as(v)
        x = self.attention(q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0)
        x = x.transpose(1, 2).reshape(B, N, C)  # (B, H, N, d) -> (B, N, C)
        return self.proj_drop(self.proj(self.norm(x)))


class FlowSelfAttention(SelfAttention):
    """``SelfAttention`` with Flow-Attention (Flowformer, ICML 2022, Algorithm 1), O(N C d)."""

    mechanism = "flow"


class LinearSelfAttention(SelfAttention):
    """``SelfAttention`` with linear attention (Katharopoulos et al., ICML 2020), O(N C d)."""

    mechanism = "linear"


class SoftmaxSelfAttention(SelfAttention):
    """``SelfAttention`` with softmax attention, O(N² C): the same numbers as timm's Attention."""

    mechanism = "softmax"


@torch.fx.wrap
@register_notrace_function
def refuse_masks(x: Tensor, attn_mask: Optional[Tensor], is_causal: bool) -> Tensor:
    """``x`` as it is, or ValueError. A function by itself because FX carries timm's mask arguments as unknowns."""
    if attn_mask is not None:
        raise ValueError("attn_mask is given; allowed: None, this attention forms no map that could be masked")
    if is_causal:
        raise ValueError("is_causal is True; allowed: False, this attention sees all tokens of an image")
    return x


def given_options(clamp: Union[float, str, None] = None, **options: Optional[str]) -> Dict[str, Any]:
    """The options of a mechanism that a user has given, None meaning the mechanism's default.

    ``clamp`` may be the string "inf", which is all a command line can say for no clamp.

    Raises:
        ValueError: ``clamp`` is no number.
    """
    given: Dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if clamp is not None:
        try:
            given["clamp"] = float(clamp)
        except ValueError:
            given["clamp"] = math.nan
        if math.isnan(given["clamp"]):
            raise ValueError(f"clamp is {clamp!r}; allowed: a number above 0, or inf for no clamp")
    return given
