"""DAFT-full and DAFT-conv as modules: attention by key and by position, gated by the query.

*A Dot Product Attention Free Transformer*, equations 5-11.
"""

from typing import Final, Optional, Tuple, Union

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.checks import State, check_padding_mask, check_positive_int, check_query_key_value
from ..ops.chunks import compute_dtype, zero_padding
from ..ops.daft_conv import daft_conv, daft_conv_scriptable
from ..ops.daft_full import daft_full, daft_full_scriptable
from ..ops.daft_select import daft_select, daft_select_scriptable
from .base import InnerAttention, drop_sources

Window = Union[int, Tuple[int, int]]


class DaftFullAttention(InnerAttention):
    """``daft_full`` with a learned position bias w for at most T = ``max_tokens`` tokens (Eq. 5, 6), O(n² H d) time.

    w is pe0 pe1ᵀ with pe0, pe1 (T, ``bias_dim``), or a free matrix (T, T) with ``bias_dim`` None (Table 6); one for all
    channels, so heads are without meaning here: any split of the width gives the same. ``query`` False leaves
    sigmoid(q) out (Table 8), and q is None. Self-attention only. Shapes and masks as in ``InnerAttention``; the state
    is every key and value so far.

    Raises:
        ValueError: a count below 1; an input of more than ``max_tokens`` tokens.
    """

    causal: Final[bool]
    state_is_constant_size = False

    def __init__(
        self, causal: bool = False, *, max_tokens: int, bias_dim: Optional[int] = 128, query: bool = True
    ) -> None:
        super().__init__(causal)
        check_positive_int("max_tokens", max_tokens)
        if bias_dim is not None:
            check_positive_int("bias_dim", bias_dim)
        self.max_tokens, self.bias_dim, self.query = max_tokens, bias_dim, query
        shape = (max_tokens, max_tokens if bias_dim is None else bias_dim)
        self.pe0 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.pe1 = nn.Parameter(torch.empty(shape)) if bias_dim is not None else None
        self.w = nn.Parameter(torch.empty(shape)) if bias_dim is None else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors from N(0, 0.1), a free w from N(0, 0.02). The paper does not say."""
        # Smaller factors learn slowly, each waiting for the other: 3.21 bits per character with 0.02 against 3.08 after
        # 250 updates of 2,048 characters of tinyshakespeare, 4 layers of width 128 (2026-11-21, one seed).
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1 if self.bias_dim is not None else 0.02)

    def position_bias(self) -> Tensor:
        """w (T, T): row t is added to the keys that token t sees."""
        if self.w is not None:
            return self.w
        assert self.pe0 is not None and self.pe1 is not None  # for TorchScript
        return self.pe0 @ self.pe1.transpose(0, 1)

    def forward(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor] = None,
        query_padding_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k, v (B, H, n, d) -> (B, H, n, d); see ``InnerAttention``."""
        v = drop_sources(v, dropout_p)
        if torch.jit.is_scripting():
            if self.causal or key_padding_mask is not None or query_padding_mask is not None:
                raise ValueError("causal is True or a mask is given; allowed in TorchScript: neither")
            tokens = k.shape[2]
            w = self.position_bias()[:tokens, :tokens]
            out = daft_full_scriptable(None if q is None else _merge_heads(q), _merge_heads(k), _merge_heads(v), w)
            return _split_heads(out, v.shape[1])
        return self._attend(q, k, v, key_padding_mask, query_padding_mask)

    @torch.jit.unused
    def _attend(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        key_padding_mask: Optional[Tensor],
        query_padding_mask: Optional[Tensor],
    ) -> Tensor:
        _check_heads(q, k, v, self.query)
        check_padding_mask("query_padding_mask", query_padding_mask, v)
        # An output of 0 is not enough: what is not finite in a padded query would still be in its gradient.
        q = None if q is None else zero_padding(q, query_padding_mask)
        heads = v.shape[1]
        q, k, v = (None if x is None else _merge_heads(x) for x in (q, k, v))
        out = daft_full(q, k, v, self._bias(), causal=self.causal, key_padding_mask=key_padding_mask)
        return zero_padding(_split_heads(out, heads), query_padding_mask)

    @torch.jit.unused
    def extend(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        padding_mask: Optional[Tensor] = None,
        state: Optional[State] = None,
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, d) and the state, every token so far; see ``daft_full``."""
        self._check_causal()
        _check_heads(q, k, v, self.query)
        check_padding_mask("padding_mask", padding_mask, v)
        heads = v.shape[1]
        q, k, v = (None if x is None else _merge_heads(x) for x in (q, k, v))
        out, state = daft_full(
            q, k, v, self._bias(), causal=True, key_padding_mask=padding_mask, initial_state=state, return_state=True
        )
        return _split_heads(out, heads), state

    @torch.jit.unused
    def _bias(self) -> Union[Tensor, Tuple[Tensor, Tensor]]:
        return self.w if self.pe0 is None else (self.pe0, self.pe1)


class DaftConvAttention(InnerAttention):
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
        query = None if q is None else _merge_heads(q)
        k, v = _merge_heads(k), _merge_heads(v)
        if self.gumbel_temperature is not None and not self.training:
            index, bias = self._selected()
            window = (self.r.shape[1], self.r.shape[2])
            out = daft_select_scriptable(query, k, v, index, bias, window, height, width)
        else:
            out = daft_conv_scriptable(query, k, v, self._filters(), height, width, self.local_only)
        return _split_heads(out, heads)

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
        self._check(q, k, v)
        check_padding_mask("query_padding_mask", query_padding_mask, v)
        # An output of 0 is not enough: what is not finite in a padded query would still be in its gradient.
        q = None if q is None else zero_padding(q, query_padding_mask)
        q, k, v = (None if x is None else _merge_heads(x) for x in (q, k, v))
        options = {"causal": self.causal, "spatial_shape": spatial_shape, "key_padding_mask": key_padding_mask}
        if self.gumbel_temperature is not None and not self.training:
            window = self.window_shape if len(self.window_shape) > 1 else self.window_shape[0]
            out = daft_select(q, k, v, *self._selected(), window=window, **options)
        else:
            out = daft_conv(q, k, v, self._filters(), local_only=self.local_only, **options)
        return zero_padding(_split_heads(out, self.num_heads), query_padding_mask)

    @torch.jit.unused
    def extend(
        self,
        q: Optional[Tensor],
        k: Tensor,
        v: Tensor,
        padding_mask: Optional[Tensor] = None,
        state: Optional[State] = None,
    ) -> Tuple[Tensor, State]:
        """The next tokens' outputs (B, H, n, d) and the state, a window and two sums; O(window H d) per token."""
        self._check_causal()
        self._check(q, k, v)
        check_padding_mask("padding_mask", padding_mask, v)
        q, k, v = (None if x is None else _merge_heads(x) for x in (q, k, v))
        out, state = daft_conv(
            q, k, v, self._filters(), causal=True, local_only=self.local_only, key_padding_mask=padding_mask,
            initial_state=state, return_state=True,
        )  # fmt: skip
        return _split_heads(out, self.num_heads), state

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
        _check_query(q, self.query)
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


def _merge_heads(x: Tensor) -> Tensor:
    """(B, H, n, c) -> (B, n, H c)."""
    return x.transpose(1, 2).flatten(2)


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, n, H c) -> (B, H, n, c)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


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


def _check_query(q: Optional[Tensor], wanted: bool) -> None:
    if (q is not None) != wanted:
        given, allowed = ("None", "a tensor") if q is None else ("a tensor", "None")
        raise ValueError(f"q is {given}; allowed with query={wanted}: {allowed}")


def _check_heads(q: Optional[Tensor], k: Tensor, v: Tensor, query: bool) -> None:
    """Raise ValueError unless all are (B, H, n, d)."""
    _check_query(q, query)
    check_query_key_value(v if q is None else q, k, v, one_length=True)
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}; allowed: that of k, {tuple(k.shape)}")
