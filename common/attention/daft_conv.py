"""DAFT-conv as a module: attention by key and by distance inside a window, gated by the query."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops.daft.conv import daft_conv, daft_conv_in_torchscript
from ..ops.daft.conv_reference import daft_conv_reference, filters_reference
from ..ops.daft.select import daft_select, daft_select_in_torchscript
from ..ops.shared.checks import ArgumentError, check_query_key_value, shape_of, shortened
from ..ops.shared.precision import compute_dtype
from ._daft import DaftAttention
from ._options import About, AttentionOptions, flag, number, option
from ._registry import register_attention

Window = int | tuple[int, int]

#: Side of the window in the paper's image models, and size of the window in its Enwik8 model (one more if the window
#: must have a middle token).
_IMAGE_WINDOW = 11
_TEXT_WINDOW = 64


def _read_window(name: str, value: Any) -> Window | None:
    """``value`` as a window: None, an integer, or a pair of integers, each at least 1; ValueError otherwise."""
    sizes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    counts = all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes)
    if value is not None and not (counts and 1 <= len(sizes) <= 2):
        raise ArgumentError(
            f"`{name}` is {shortened(value)}; allowed: an integer of at least 1, two of them (height, width) for "
            "images, or None"
        )
    return value if value is None or isinstance(value, int) else sizes


@dataclass(frozen=True)
class DaftConvOptions(AttentionOptions):
    """Options of DAFT-conv; see ``common.ops.daft_conv``."""

    window: Window | None = option(
        None,
        "tokens in the window, itself included (the paper: 64 on Enwik8, 256 on pixels, 11 x 11 on images); by default "
        "64, 65 where it is not causal, and 11 x 11 for images",
        int,
        _read_window,
        setup_only=True,
    )
    query: bool = flag(True, "queries gate what attention gives (Table 8 is without)", setup_only=True)
    local_only: bool = flag(False, "nothing outside of the window is seen (ablation, Figure 2)")
    reparameterize: bool = flag(True, "filters are standardised and scaled (Table 7 is without)", setup_only=True)
    gumbel_temperature: float | None = number(
        None,
        "each head selects one token of its window, softly in training by Gumbel-softmax at this temperature "
        "(Equation 11; the paper: 0.5)",
        optional=True,
        setup_only=True,
    )


@register_attention("daft_conv")
class DaftConvAttention(DaftAttention):
    """Attention by key and by distance in a window, over sequences and images.

    ``daft_conv`` with a learned filter r per head, and one key per token and head. H = ``num_heads``; q and v (B, H, n,
    d), k (B, H, n, 1). ``window`` is a number of tokens, or a pair (height, width) if the tokens are the raster of an
    image, whose size is ``spatial_shape``; it is odd unless causal. Tokens outside the window are seen with bias 0, or
    not at all with ``local_only`` (Figure 2). Filters are γ (r - mean) / std + β per head, with γ and β initially 0
    (with ``local_only`` β cancels); without ``reparameterize`` the filter is r, initially 0 (Table 7). ``query`` False
    drops sigmoid(q) (Table 8), and q is None. Self-attention only. Masks as in ``InnerAttention``, state as in
    ``daft_conv``.

    With a ``gumbel_temperature`` (0.5 in the paper) each head selects one neighbour (Eq. 11): in training the filter is
    multiplied by a Gumbel-softmax sample of itself; in evaluation only its largest entry is used.

    Raises:
        ValueError: a count below 1, an even window that is not causal, a temperature that is not above 0, or a
            selection with ``local_only``.
    """

    about = About(
        "DAFT-conv",
        "Zhai et al., DAFT, OpenReview 2021, equations 7 to 9",
        "n w d",
        "(d + 1) min(n, w) + d",
        sizes={"w": "window"},
        map="exp(w + k) over its sum, before the gate of the query",
        url="https://openreview.net/forum?id=JVR4JswsEM",
    )
    Options = DaftConvOptions
    supports = frozenset({"causal", "bidirectional", "torchscript"})
    needs = frozenset({"num_heads"})
    shown_by_weights = frozenset({"window", "reparameterize"})  # by the filters' shape, and by gamma and beta
    op = staticmethod(daft_conv)
    reference_op = staticmethod(daft_conv_reference)
    local_only: Final[bool]
    standardise: Final[bool]

    def setup(self) -> None:
        options, heads = self.options, self.shape.num_heads
        if options.gumbel_temperature is not None and options.local_only:
            raise ArgumentError("`local_only=True` is given; allowed: without `gumbel_temperature`")
        self.window_shape = _window_shape(options.window, self.causal, self.shape.spatial_dims)
        if len(self.window_shape) == 2:
            self.needs = self.needs | {"spatial_shape"}
        self.local_only, self.gumbel_temperature = options.local_only, options.gumbel_temperature
        self.standardise = options.reparameterize  # another name, since timm calls `reparameterize` as a method
        self.r = nn.Parameter(torch.empty(heads, *self.window_shape))
        self.gamma = nn.Parameter(torch.empty(heads, 1)) if self.standardise else None
        self.beta = nn.Parameter(torch.empty(heads, 1)) if self.standardise else None
        self.reset_parameters()

    def state_tokens(self) -> int:
        """The window."""
        return self.window_shape[0]

    def projections(self, head_dim: int) -> dict[str, int]:
        """Channels per head: one for the keys."""
        return {**super().projections(head_dim), "k": 1}

    def reset_parameters(self) -> None:
        """Initialise filters to 0, so that attention at first depends on keys only."""
        if self.standardise:
            nn.init.normal_(self.r)
            nn.init.zeros_(self.gamma)
            nn.init.zeros_(self.beta)
        else:
            nn.init.zeros_(self.r)

    def position_bias(self) -> Tensor:
        """The filter of each head, (h, window) or (h, height, width), before any selection."""
        r = self.r.to(compute_dtype(self.r))
        if self.standardise:
            assert self.gamma is not None and self.beta is not None  # for TorchScript
            flat = r.flatten(1)
            # The epsilon is needed for windows of one entry, whose deviation is 0.
            r = (self.gamma * F.layer_norm(flat, [flat.shape[1]], eps=1e-6) + self.beta).view_as(r)
        return r

    def entropy(self) -> Tensor:
        """Σ over heads of the entropy of softmax(r) over the window, in nats; Eq. 10 penalises it."""
        log_p = self.position_bias().flatten(1).log_softmax(1)
        return -(log_p.exp() * log_p).sum()

    def op_kwargs(self) -> dict[str, Any]:
        """The filters of this call."""
        return {"r": self.filters()}

    def reference_kwargs(self) -> dict[str, Any]:
        """The filters of this call, computed literally; in training, with the same random draws as ``op_kwargs``."""
        options = self.options.gumbel_temperature, self.training
        return {"r": filters_reference(self.r, self.gamma, self.beta, *options)}

    def apply_merged(self, q: Tensor | None, k: Tensor, v: Tensor, **arguments: Any) -> Any:
        """Apply ``daft_conv``, or ``daft_select`` if not causal and each head has selected a neighbour."""
        if self.gumbel_temperature is None or self.training or self.causal:
            return super().apply_merged(q, k, v, **arguments)
        window = self.window_shape if len(self.window_shape) > 1 else self.window_shape[0]
        return daft_select(q, k, v, *self._selected(), window=window, **arguments)

    def _in_torchscript(self, q: Tensor | None, k: Tensor, v: Tensor, spatial_shape: tuple[int, int] | None) -> Tensor:
        if spatial_shape is None:
            raise ValueError("spatial_shape is None; allowed in TorchScript: (height, width) of an image's tokens")
        height, width = spatial_shape
        if self.gumbel_temperature is not None and not self.training:
            index, bias = self._selected()
            window = (self.r.shape[1], self.r.shape[2])
            return daft_select_in_torchscript(q, k, v, index, bias, window, height, width)
        return daft_conv_in_torchscript(q, k, v, self.filters(), height, width, self.local_only)

    def filters(self) -> Tensor:
        """The filters (h, window) or (h, height, width) of one call: ``position_bias()``, unless one entry is selected.

        With a selection they are the bias times a new Gumbel-softmax sample in training, and times a one-hot otherwise.
        """
        r = self.position_bias()
        temperature = self.gumbel_temperature
        if temperature is None:
            return r
        if self.training:
            return r * F.gumbel_softmax(r.flatten(1), tau=temperature).view_as(r)
        index, bias = self._selected()
        return torch.zeros_like(r).flatten(1).scatter(1, index[:, None], bias[:, None]).view_as(r)

    def _selected(self) -> tuple[Tensor, Tensor]:
        """The index of each head's largest entry in the flattened window, (h,), and its value, (h,)."""
        bias, index = self.position_bias().flatten(1).max(1)
        return index, bias

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        check_query_key_value(v if q is None else q, v, v, one_length=True, names=("q", "v", "v"))
        if v.shape[1] != self.shape.num_heads:
            raise ValueError(f"v has shape {tuple(v.shape)}; allowed: {self.shape.num_heads} heads")
        if not isinstance(k, Tensor) or tuple(k.shape) != (*v.shape[:3], 1):
            raise ValueError(
                f"k has shape {shape_of(k)} and v {tuple(v.shape)}; allowed: (B, H, tokens, 1), one key per head"
            )


def position_entropy(model: nn.Module) -> Tensor:
    """Σ ``entropy()`` over every DAFT-conv attention of ``model``: the penalty of Eq. 10, where its factor is 0.001.

    Raises:
        ValueError: ``model`` holds no DAFT-conv attention.
    """
    entropies = [module.entropy() for module in model.modules() if isinstance(module, DaftConvAttention)]
    if not entropies:
        raise ValueError(f"model is a {type(model).__name__} without DAFT-conv; allowed: a model that holds one")
    return torch.stack(entropies).sum()


def _window_shape(window: Window | None, causal: bool, spatial_dims: int) -> tuple[int, ...]:
    """``window`` as the last dimensions of the filters; ValueError if it is not allowed."""
    if window is None:
        window = _IMAGE_WINDOW if spatial_dims == 2 else _TEXT_WINDOW + (not causal)
    sizes = (window,) * spatial_dims if isinstance(window, int) else window
    if causal and len(sizes) == 2:
        raise ArgumentError(f"`window` is {window!r}; allowed when causal: one integer")
    if not causal and any(size % 2 == 0 for size in sizes):
        raise ArgumentError(f"`window` is {window!r}; allowed when not causal: odd sizes")
    return sizes
