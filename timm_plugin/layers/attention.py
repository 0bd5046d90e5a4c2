"""Self-attention layers for timm's vision transformers: timm's projections around the mechanisms of ``common``.

Legend: B batch, N tokens, C channels, H heads, d channels of a head, Y x X the rows and columns of an image's tokens.
"""

import copyreg
import functools
import warnings
from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from common.attention import ATTENTIONS, AttentionOptions, InnerAttention, build_attention, supporting
from common.ops.shared.checks import check_choice, check_positive_int, shortened

# FX must not trace into the mechanisms: they check shapes.
register_notrace_module(InnerAttention)


class Placeholder(nn.Module):
    """Mixin in place of a part of timm's Attention that ours never calls: registering a hook is a UserWarning."""


def _with_warning(register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
    @functools.wraps(register)
    def register_with_warning(self: Placeholder, *args: Any, **kwargs: Any) -> RemovableHandle:
        warnings.warn(
            "this hook is never called: attn_drop has the dropout rate alone, since no weights of pairs of tokens are "
            "formed, and q_norm and k_norm have no work without queries or keys. Hook the attention layer, or its "
            "child named attention; common.attention.record_attention shows what tokens are weighed by",
            stacklevel=2,
        )
        return register(self, *args, **kwargs)

    return register_with_warning


for _name in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
    setattr(Placeholder, f"register_{_name}", _with_warning(getattr(nn.Module, f"register_{_name}")))


class PlaceholderDropout(Placeholder, nn.Dropout):
    """The dropout rate of a mechanism, under the name of the dropout layer of timm's Attention."""


class PlaceholderIdentity(Placeholder, nn.Identity):
    """A placeholder for the normalisation of queries or keys that a mechanism does not have."""


class SelfAttention(nn.Module):
    """Multi-head self-attention (B, N, C) -> (B, N, C), with the arguments and parameter names of timm's Attention.

    ``qkv``, ``proj``, ``q_norm``, ``k_norm``, ``norm`` and ``gate`` are timm's, so stock checkpoints load if the
    mechanism has no parameters of its own, ``attention.*``. ``attention_layer`` makes the subclasses, one for each
    mechanism with its options. O(N C²) for the projections plus the mechanism's cost.

    A mechanism that stores something for each position (DAFT-full, Linformer, Synthesizer, Sinkhorn, cosFormer) accepts
    only the number of tokens that it was built for, without padding. One that depends on their order (local, sparse,
    bigbird, longformer, nystrom, combiner, mixed_chunk) reads any number of tokens as the sequence of an image's rows.

    Args:
        dim: C.
        num_heads: H.
        attn_head_dim: d; C / H by default.
        dim_out: channels of the output, C by default.
        qkv_bias: whether the projection to q, k and v has a bias.
        qk_norm: normalise every head of q and k with ``norm_layer``.
        scale_norm: normalise the attention's output, before ``proj``, with ``norm_layer``.
        proj_bias: whether ``proj`` has a bias.
        gated: multiply the attention's output by the sigmoid of a projection of the tokens.
        attn_drop: dropout rate of the mechanism; the linear ones drop whole sources.
        proj_drop: dropout rate of the output.

    Raises:
        ValueError: a ``dim`` that is not a multiple of ``num_heads``, without ``attn_head_dim``; a norm without
            ``norm_layer``; ``qk_norm`` for a mechanism whose queries or keys are not heads of d channels.
    """

    #: Name in ``common.attention.ATTENTIONS``, its options, and the number of tokens and their grid if set.
    mechanism: ClassVar[str]
    options: ClassVar[AttentionOptions]
    max_tokens: ClassVar[int | None] = None
    grid_size: tuple[int, int] | None = None

    __jit_unused_properties__ = ("attn_dim", "scale", "fused_attn")
    has_query: Final[bool]
    has_key: Final[bool]
    needs_grid: Final[bool]
    has_positions: Final[bool]

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: type[nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_int("num_heads", num_heads)
        if attn_head_dim is None and dim % num_heads != 0:
            raise ValueError(f"num_heads is {num_heads} and dim {dim}; allowed: a num_heads that divides dim")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer is None; allowed with qk_norm or scale_norm: a normalisation layer")
        dd = {"device": device, "dtype": dtype}
        self.num_heads = num_heads
        self.grid_size = type(self).grid_size  # TorchScript sees only attributes of the object
        self.head_dim = attn_head_dim or dim // num_heads
        attention = self._build_mechanism()
        channels = attention.projections(self.head_dim)
        if qk_norm and not channels.get("q") == channels.get("k") == self.head_dim:
            raise ValueError(f"qk_norm is True; allowed with attention {self.mechanism!r} and its options: False")
        self.widths = [num_heads * channels.get(name, 0) for name in ("q", "k", "v")]
        self.has_query, self.has_key = "q" in channels, "k" in channels
        self.needs_grid = "spatial_shape" in attention.needs
        self.has_positions = "max_tokens" in attention.needs
        self.qkv = nn.Linear(dim, sum(self.widths), bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else _no_norm(self.has_query)
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else _no_norm(self.has_key)
        self.attn_drop = PlaceholderDropout(attn_drop)
        self.norm = norm_layer(self.widths[2], **dd) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, self.widths[2], bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(self.widths[2], dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)
        self.attention = attention.to(self.proj.weight.device, self.proj.weight.dtype)

    @property
    def attn_dim(self) -> int:
        """Channels of all heads, as in timm's Attention."""
        return self.num_heads * self.head_dim

    @property
    def scale(self) -> float:
        """The factor of queries in timm's Attention, d ** -0.5; the mechanism has its own factor, or none."""
        return self.head_dim**-0.5

    @property
    def fused_attn(self) -> bool:
        """True, as in timm's Attention where it forms no attention weights; setting it to False is a UserWarning."""
        return True

    @fused_attn.setter
    def fused_attn(self, value: bool) -> None:
        if not value:
            warnings.warn(
                f"fused_attn stays True: attention {self.mechanism!r} forms no weights of pairs of tokens; "
                "common.attention.record_attention(model, maps=True) shows what they would be",
                stacklevel=3,
            )

    def _build_mechanism(self) -> InnerAttention:
        if self.needs_tokens():
            raise ValueError(
                f"attn_layer is {self.mechanism!r}, which must know the number of tokens, and timm does not tell it; "
                f"allowed: timm_plugin.create_model(..., attn_layer={self.mechanism!r}), which finds it, "
                f"timm_plugin.replace_attention, or attn_layer=attention_layer({self.mechanism!r}, max_tokens=...)"
            )
        return build_attention(
            self.mechanism,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            max_tokens=self.max_tokens,
            spatial_dims=2,
            **self.options.as_dict(),
        )

    @classmethod
    def needs_tokens(cls) -> bool:
        """Whether the mechanism needs the number of tokens, and the class does not have it."""
        return cls.max_tokens is None and "max_tokens" in ATTENTIONS[cls.mechanism].needs

    @classmethod
    def with_tokens(cls, max_tokens: int | None, grid_size: tuple[int, int] | None) -> type["SelfAttention"]:
        """This class, or if it ``needs_tokens``, the class with the same options for ``max_tokens`` tokens."""
        if not cls.needs_tokens():
            return cls
        return attention_layer(cls.mechanism, max_tokens=max_tokens, grid_size=grid_size, **cls.options.as_dict())

    def __reduce__(self) -> tuple:
        """Rebuild the class: pickle cannot find the classes that ``attention_layer`` makes by name."""
        layer = type(self)  # the object's own dictionary has what ``tell_grid`` set
        return _new, (layer.mechanism, layer.options, layer.max_tokens, layer.grid_size), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``; pickles of version 0.2 lack ``has_positions``."""
        super().__setstate__({"has_positions": "max_tokens" in state["_modules"]["attention"].needs, **state})

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """x, tokens (B, N, C) or a map of them (B, Y, X, C) -> the same shape with ``dim_out`` channels.

        ``attn_mask`` may mark padding, as that of NaFlexViT does: bool, True for a pair that attends, or
        a float, 0 for such a pair and a large negative number for others; (B, 1, N, N), or (B, 1, 1, N) of the keys.

        Raises:
            ValueError: any other ``attn_mask``; ``is_causal``; tokens on an unknown grid if the mechanism needs one,
                or another number of tokens than it has positions for.
        """
        return self.project(x, self.heads(x, attn_mask, is_causal))

    def heads(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Output of the heads, (B, H, N, channels), before the output projection; arguments as in ``forward``."""
        padding = key_padding(x, attn_mask, is_causal)
        if self.has_positions:
            check_positions(x, self.attention.max_tokens, self.grid_size, padding)
        query, key, value = self.query_key_value(x)
        dropout_p = self.attn_drop.p if self.training else 0.0
        if torch.jit.is_scripting():  # scripted mechanisms need keys, and flow needs queries
            assert key is not None
            if self.has_query:
                assert query is not None
            if self.needs_grid:
                grid = grid_of(x, self.grid_size)
                out = self.attention(query, key, value, padding, padding, dropout_p, grid)
            else:
                out = self.attention(query, key, value, padding, padding, dropout_p)
        else:
            out = self._attend(x, query, key, value, padding, dropout_p)
        return out

    def query_key_value(self, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Queries, keys and values of x, each (B, H, N, channels), or None if the mechanism does not use them."""
        q, k, v = self.qkv(x.flatten(1, -2)).split(self.widths, dim=-1)  # each (B, N, H channels)
        value = v.unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, channels)
        # Under autocast a normalisation returns float32 for any input.
        if self.has_query:
            query = self.q_norm(q.unflatten(2, (self.num_heads, -1)).transpose(1, 2)).type_as(value)
        else:
            query = None
        if self.has_key:
            key = self.k_norm(k.unflatten(2, (self.num_heads, -1)).transpose(1, 2)).type_as(value)
        else:
            key = None
        return query, key, value

    def project(self, x: Tensor, heads: Tensor) -> Tensor:
        """The layer's output for x from the output of ``heads``: norm, gate and output projection."""
        out = self.norm(heads.transpose(1, 2).flatten(2))  # (B, H, N, channels) -> (B, N, H channels)
        if self.gate is not None:
            out = out * self.gate(x.flatten(1, -2)).sigmoid()
        out = self.proj_drop(self.proj(out))
        return out.view(x.shape[:-1] + out.shape[-1:])

    @torch.jit.unused
    def _attend(
        self,
        x: Tensor,
        query: Tensor | None,
        key: Tensor | None,
        value: Tensor,
        padding: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Call the mechanism with the inputs that it needs; TorchScript, which lacks ``**``, does not use this."""
        grid = grid_of(x, self.grid_size) if self.needs_grid else None
        inputs = self.attention.inputs(x=x.flatten(1, -2), spatial_shape=grid)
        return self.attention(query, key, value, padding, padding, dropout_p, **inputs)


def _no_norm(called: bool) -> nn.Module:
    return nn.Identity() if called else PlaceholderIdentity()


def attention_layer(
    name: str, *, max_tokens: int | None = None, grid_size: tuple[int, int] | None = None, **options: Any
) -> type[SelfAttention]:
    """The class of layers with the mechanism ``name``, for ``attn_layer=`` of timm's vision transformers.

    ``create_model("vit_small_patch16_224", attn_layer=attention_layer("flow", form="paper"))``

    For timm's ``save_for_hf`` give it to ``timm_plugin.create_model``, or call ``timm_plugin.store_attention(model)``.

    Args:
        name: one of ``common.attention.ATTENTIONS``.
        max_tokens: the number of tokens, class token and registers included, for mechanisms that store something for
            each position: DAFT-full, Linformer, Synthesizer, Sinkhorn and cosFormer.
        grid_size: (Y, X) of the tokens; DAFT-conv and SOFT need it, from here or from ``create_model`` or
            ``replace_attention``.
        options: of the mechanism.

    Raises:
        ValueError: an unknown mechanism, or one that sees only earlier tokens or only another sequence; an unknown
            option or an invalid value.
    """
    check_choice("attention", name, usable_mechanisms())
    if max_tokens is not None:
        check_positive_int("max_tokens", max_tokens)
    options_of_name = ATTENTIONS[name].Options.read(name, options)
    return _layer_class(name, options_of_name, max_tokens, read_grid_size(grid_size))


def read_grid_size(grid_size: Any) -> tuple[int, int] | None:
    """A user's ``grid_size`` as a pair of rows and columns; ValueError if it is not one."""
    if grid_size is None:
        return None
    sizes = tuple(grid_size) if isinstance(grid_size, (tuple, list)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ValueError(f"grid_size is {shortened(grid_size)}; allowed: two integers of at least 1, (rows, columns)")
    return sizes


def is_layer_class(attn_layer: Any) -> bool:
    """Whether ``attn_layer`` is one of our classes, as ``attention_layer`` returns."""
    return isinstance(attn_layer, type) and issubclass(attn_layer, SelfAttention)


def usable_mechanisms() -> tuple[str, ...]:
    """Names of the bidirectional mechanisms, which images need."""
    return supporting("bidirectional", images=True)


def take_options(mechanism: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of ``mechanism`` from ``arguments``, and return them."""
    names = ATTENTIONS[mechanism].Options.described().keys()
    return {name: arguments.pop(name) for name in names & arguments.keys()}


@functools.cache
def _layer_class(
    name: str, options: AttentionOptions, max_tokens: int | None, grid_size: tuple[int, int] | None
) -> type[SelfAttention]:
    members = {
        "mechanism": name,
        "options": options,
        "max_tokens": max_tokens,
        "grid_size": grid_size,
        "__doc__": f"``SelfAttention`` with the mechanism {name!r} and {options}.",
        "__module__": __name__,
    }
    return _LayerClass(f"{name.title().replace('_', '')}SelfAttention", (SelfAttention,), members)


class _LayerClass(type):
    """The metaclass of these unnamed classes, so that they can be pickled: a pickle makes the class again.

    timm stores a model's arguments in the model, including ``attn_layer``.
    """


def _pickled(layer: _LayerClass) -> str | tuple:
    if "options" not in vars(layer):  # a user's own subclass, with a name
        return layer.__qualname__
    return _layer_class, (layer.mechanism, layer.options, layer.max_tokens, layer.grid_size)


copyreg.pickle(_LayerClass, _pickled)


def _new(*arguments: Any) -> SelfAttention:
    layer = _layer_class(*arguments)
    return layer.__new__(layer)


@torch.fx.wrap
@register_notrace_function
def key_padding(x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """``attn_mask`` as (B, N), True = padding; a function because FX must not trace it."""
    if is_causal:
        raise ValueError("is_causal is True; allowed: False, this attention sees all tokens of an image")
    return None if attn_mask is None else _padding_of_mask(x, attn_mask)


@torch.jit.unused
def _padding_of_mask(x: Tensor, attn_mask: Tensor) -> Tensor:
    attends = attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0
    fits = attends.dim() == 4 and attends.shape[1] == 1 and attends.shape[2] in (1, x.shape[1])
    if x.dim() != 3 or not fits or attends.shape[3] != x.shape[1]:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}; allowed: one that says which tokens are padding, "
            f"(batch, 1, {x.shape[1]} or 1, {x.shape[1]})"
        )
    keys = attends.any(2, keepdim=True)
    is_padding = (attends == (keys & attends.any(3, keepdim=True))).all()
    if attn_mask.dtype != torch.bool:
        is_padding = is_padding & (attends | (attn_mask <= -1e4)).all()
    message = (
        f"attn_mask, {attn_mask.dtype}, is not one of padding alone; allowed, the same for all queries: bool, True for "
        "keys that they attend to, or numbers that are added to scores, 0 for these keys and at most -10,000 for others"
    )
    if torch.compiler.is_compiling():
        torch._assert_async(is_padding, message)
    elif not is_padding:
        raise ValueError(message)
    return ~keys[:, 0, 0].expand(len(x), -1)


@torch.fx.wrap
@register_notrace_function
def grid_of(x: Tensor, grid_size: tuple[int, int] | None) -> tuple[int, int]:
    """Y and X of a map (B, Y, X, C), or of tokens (B, N, C) that lie on ``grid_size``.

    A function because FX must not trace its conditions.
    """
    if x.dim() == 4:
        return x.shape[1], x.shape[2]
    if grid_size is None:
        raise ValueError(
            f"x has {x.shape[1]} tokens on an unknown grid, which timm does not tell its layers; allowed for this "
            "attention: timm_plugin.create_model or replace_attention, which find the grid, or "
            "attention_layer(NAME, grid_size=(rows, columns)); daft_conv_s takes images of any size"
        )
    height, width = grid_size
    if height * width != x.shape[1]:
        raise ValueError(
            f"x has {x.shape[1]} tokens; allowed for this attention: those of a grid of {height} x {width}, with "
            "class_token=False, global_pool='avg', patch_drop_rate=0 and without registers; timm_plugin.tell_grid "
            "after set_input_size"
        )
    return height, width


@torch.fx.wrap
@register_notrace_function
def check_positions(x: Tensor, max_tokens: int, grid_size: tuple[int, int] | None, padding: Tensor | None) -> None:
    """ValueError unless x is ``max_tokens`` tokens (B, N, C), or a map (B, Y, X, C) of ``grid_size``, without padding.

    A function because FX must not trace its conditions.
    """
    if padding is not None:
        raise ValueError("attn_mask is given; allowed for attention that holds something for each position: None")
    if x.flatten(1, -2).shape[1] != max_tokens:
        raise ValueError(
            f"x has {x.flatten(1, -2).shape[1]} tokens; allowed for this attention, which holds something for each "
            f"position: max_tokens={max_tokens}, with dynamic_img_size=False and patch_drop_rate=0; "
            "timm_plugin.tell_grid after set_input_size"
        )
    if x.dim() == 4 and grid_size is not None:
        if x.shape[1] != grid_size[0] or x.shape[2] != grid_size[1]:
            raise ValueError(
                f"x is a map of {x.shape[1]} x {x.shape[2]} tokens; allowed for this attention, which holds something "
                f"for each position: {grid_size[0]} x {grid_size[1]}"
            )
