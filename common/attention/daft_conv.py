"""DAFT-conv as a module: attention by key and by distance inside a window, gated by the query."""

from typing import Final, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.checks import State, check_positive_int, check_query_key_value
from ..ops.chunks import compute_dtype, zero_padding
from ..ops.daft_conv import daft_conv, daft_conv_scriptable
from ..ops.daft_select import daft_select, daft_select_scriptable
from .base import drop_sources
from .daft import DaftAttention, merge_heads, split_heads

Window = Union[int, Tuple[int, int]]


class DaftConvAttention(DaftAttention):
    """``daft_conv`` with a learned filter r per head, one key per token and head (Eq. 7-9); O(n window H d).

    H = ``num_heads``; q and v (B, H, n, d), k (B, H, n, 1). ``window`` is a number of tokens, or a pair (height, width)
    for tokens that are the raster of an image, whose size ``spatial_shape`` then gives; odd unless causal. Outside of
    the window every token is seen with bias 0, with ``local_only`` none is (Figure 2). Filters are γ (r - mean) / std
    + β per head, γ and β 0 at first (with ``local_only`` β cancels), or r itself, 0 at first, without
    ``reparameterize`` (Table 7). ``query`` False leaves sigmoid(q) out (Table 8), and q is None. Self-attention only.
    Masks as in ``InnerAttention``, state as in ``daft_conv``.

    With a ``gumbel_temperature`` (0.5 in the paper) each head selects one neighbour (Eq. 11): in training the filter is
    multiplied by a Gumbel-softmax sample of itself, in evaluation the largest entry alone stands, which is indexed.

    Raises:
        ValueError: a count below 1, an even window that is not causal, a temperature that is not above 0, or a
            selection with ``local_only``.
    """

    causal: Final[bool]
    local_only: Final[bool]
    reparameterize: Final[bool]
    key_channels = 1

    def __init__(
        self,
        causal: bool = False,
        *,
        num_heads: int,
        window: Window = 64,
        query: bool = True,
        local_only: bool = False,
        reparameterize: bool = True,
        gumbel_temperature: Optional[float] = None,
    ) -> None:
        super().__init__(causal)
        check_positive_int("num_heads", num_heads)
        self.window_shape = _window_shape(window, causal)
        number = isinstance(gumbel_temperature, (int, float))
        if gumbel_temperature is not None and not (number and gumbel_temperature > 0.0):
            raise ValueError(f"gumbel_temperature is {gumbel_temperature!r}; allowed: a number above 0, or None")
        if gumbel_temperature is not None and local_only:
            raise ValueError("local_only is True; allowed with a gumbel_temperature: False")
        self.num_heads, self.window, self.query = num_heads, window, query
        self.local_only, self.reparameterize = local_only, reparameterize
        self.gumbel_temperature = gumbel_temperature
        self.r = nn.Parameter(torch.empty(num_heads, *self.window_shape))
        self.gamma = nn.Parameter(torch.empty(num_heads, 1)) if reparameterize else None
        self.beta = nn.Parameter(torch.empty(num_heads, 1)) if reparameterize else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Filters that are 0, so that at first attention is by key alone."""
        if self.reparameterize:
            nn.init.normal_(self.r)
            nn.init.zeros_(self.gamma)
            nn.init.zeros_(self.beta)
        else:
            nn.init.zeros_(self.r)

    def position_bias(self) -> Tensor:
        """The filter of each head, (h, window) or (h, height, width), before any selection."""
        r = self.r.to(compute_dtype(self.r))
        if self.reparameterize:
            assert self.gamma is not None and self.beta is not None  # for TorchScript
            flat = r.flatten(1)
            # The epsilon is for windows of one entry, whose deviation is 0.
            r = (self.gamma * F.layer_norm(flat, [flat.shape[1]], eps=1e-6) + self.beta).view_as(r)
        return r

    def entropy(self) -> Tensor:
        """Σ over heads of the entropy of softmax(r) over the window, in nats: what Eq. 10 keeps small."""
        log_p = self.position_bias().flatten(1).log_softmax(1)
        return -(log_p.exp() * log_p).sum()

    def forward(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        spatial_shape: Optional[Tuple[int, int]] = None,
    ) -> Tensor:
        """q, v (B, H, n, d), k (B, H, n, 1) -> (B, H, n, d); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if key_padding_mask is not None or query_padding_mask is not None or spatial_shape is None:
                raise ValueError("a mask is given, or no spatial_shape; allowed in TorchScript: images, without masks")
            return self._attend_scriptable(q, k, v, spatial_shape)
        return self._attend(q, k, v, key_padding_mask, query_padding_mask, spatial_shape)

    def _attend_scriptable(self, q: Optional[Tensor], k: Tensor, v: Tensor, spatial_shape: Tuple[int, int]) -> Tensor:
        height, width = spatial_shape
        heads = v.shape[1]
        query = None if q is None else merge_heads(q)
        k, v = merge_heads(k), merge_heads(v)
        if self.gumbel_temperature is not None and not self.training:
            index, bias = self._selected()
            window = (self.r.shape[1], self.r.shape[2])
            out = daft_select_scriptable(query, k, v, index, bias, window, height, width)
        else:
            out = daft_conv_scriptable(query, k, v, self._filters(), height, width, self.local_only)
        return split_heads(out, heads)

    @torch.jit.unused
    def _attend(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor],
        query_padding_mask: Optional[Tensor],
        spatial_shape: Optional[Tuple[int, int]],
    ) -> Tensor:
        q, k, v = self._merged(q, k, v, "query_padding_mask", query_padding_mask)
        options = {"causal": self.causal, "spatial_shape": spatial_shape, "key_padding_mask": key_padding_mask}
        if self.gumbel_temperature is not None and not self.training:
            window = self.window_shape if len(self.window_shape) > 1 else self.window_shape[0]
            out = daft_select(q, k, v, *self._selected(), window=window, **options)
        else:
            out = daft_conv(q, k, v, self._filters(), local_only=self.local_only, **options)
        return zero_padding(split_heads(out, self.num_heads), query_padding_mask)

    @torch.jit.unused
    def _op(self, q: Optional[Tensor], k: Tensor, v: Tensor, **options) -> Tuple[Tensor, State]:
        return daft_conv(q, k, v, self._filters(), causal=True, local_only=self.local_only, **options)

    def _filters(self) -> Tensor:
        """The filters as they are applied: with a selection softly multiplied in training, one-hot otherwise."""
        r = self.position_bias()
        temperature = self.gumbel_temperature
        if temperature is None:
            return r
        if self.training:
            return r * F.gumbel_softmax(r.flatten(1), tau=temperature).view_as(r)
        index, bias = self._selected()
        return torch.zeros_like(r).flatten(1).scatter(1, index[:, None], bias[:, None]).view_as(r)

    def _selected(self) -> Tuple[Tensor, Tensor]:
        """Of each head the place of its largest entry in the flattened window, (h,), and the entry, (h,)."""
        bias, index = self.position_bias().flatten(1).max(1)
        return index, bias

    @torch.jit.unused
    def _check(self, q: Optional[Tensor], k: Tensor, v: Tensor) -> None:
        check_query_key_value(v if q is None else q, v, v, one_length=True, names=("q", "v", "v"))
        if v.shape[1] != self.num_heads:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: {self.num_heads} heads")
        if not isinstance(k, Tensor) or tuple(k.shape) != (*v.shape[:3], 1):
            given = tuple(k.shape) if isinstance(k, Tensor) else type(k).__name__
            raise ValueError(
                f"k has shape {given} and v {tuple(v.shape)}; allowed: (B, H, tokens, 1), one key per head"
            )


def position_entropy(model: nn.Module) -> Tensor:
    """Σ ``entropy()`` over every DAFT-conv attention of ``model``: the sum of Eq. 10, whose factor there is 0.001.

    Raises:
        ValueError: ``model`` holds no DAFT-conv attention.
    """
    entropies = [module.entropy() for module in model.modules() if isinstance(module, DaftConvAttention)]
    if not entropies:
        raise ValueError(f"model is a {type(model).__name__} without DAFT-conv; allowed: a model that holds one")
    return torch.stack(entropies).sum()


def _window_shape(window: Window, causal: bool) -> Tuple[int, ...]:
    """``window`` as the last dimensions of the filters; ValueError for what they cannot be."""
    sizes = tuple(window) if isinstance(window, (tuple, list)) else (window,)
    if not sizes or len(sizes) > 2 or (causal and len(sizes) == 2):
        raise ValueError(f"window is {window!r}; allowed: an integer, or when not causal two, (height, width)")
    for size in sizes:
        check_positive_int("window", size)
        if not causal and size % 2 == 0:
            raise ValueError(f"window is {window!r}; allowed when not causal: odd sizes")
    return sizes
