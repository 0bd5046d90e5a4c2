"""The encoder of wav2vec 2.0 and HuBERT with another attention in its layers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from fairseq.distributed import fully_sharded_data_parallel
from fairseq.models.wav2vec.wav2vec2 import TransformerEncoder
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.attention import ATTENTIONS, InnerAttention
from common.ops.shared.checks import ArgumentError

from .causal_positions import CausalPositions
from .multihead_attention import IncrementalState, InnerMultiheadAttention, LayerDesign, read_padding
from .not_exportable import NoTorchScript, check_not_exported
from .padded_convolutions import ConformerPadding, ConvolutionPadding
from .positions import check_count, find_max_tokens

#: The option that sets the longest recording.
FRAMES_OPTION = "--lineartime-max-frames"
#: Builds our attention in place of the one that fairseq has built for a layer; called once per layer, in order.
Replace = Callable[[MultiheadAttention], InnerMultiheadAttention]
#: The values of options with which frames do not depend on those that follow, if attention is causal.
_CAUSAL = {
    "extractor_mode": "layer_norm",
    "layer_type": "transformer",
    "pos_conv_depth": 1,
    "conv_pos_batch_norm": False,
    "crop_seq_to_multiple": 1,
}


def replaced(stock: nn.Module, design: LayerDesign, causal: bool = False) -> InnerMultiheadAttention:
    """The attention of ``design`` with the width, the heads and the dropout of fairseq's ``stock``.

    Raises:
        ValueError: ``stock`` is one of the conformer's own attentions, which have relative positions or other weights,
            or the attention of ``design`` has no ``causal`` form.
    """
    if causal and "causal" not in ATTENTIONS[design.attention].supports:
        raise ArgumentError(
            f"`lineartime_causal` is True; allowed with {design.attention} attention, which sees all frames: not given"
        )
    if not isinstance(stock, MultiheadAttention):
        raise ArgumentError(
            f"`attn_type` builds {type(stock).__name__}; allowed with {design.attention} attention: not given, so that "
            "positions are absolute"
        )
    return InnerMultiheadAttention(
        stock.embed_dim, stock.num_heads, design, causal=causal, dropout=stock.dropout_module.p
    )


class AudioEncoder(NoTorchScript, TransformerEncoder):
    """wav2vec 2.0's ``TransformerEncoder`` with the attentions that ``replace`` builds.

    Everything else is fairseq's: positions by a convolution over time, layers (Transformer, conformer, or with
    adapters), layer drop, and the names and shapes of all parameters. Parameters inside of an attention keep their own
    initial values. With ``mask_padding``, padding is 0 in front of the convolutions of positions and of a conformer.
    With ``long_input``, results of single layers are not kept without gradients. With ``causal``, for causal
    attentions, a frame's position comes from the frames before it.

    Raises:
        ValueError: layers are sharded, a conformer has relative positions, another part of a causal encoder sees the
            future, or a recording has more frames than a part of the model has parameters for.
    """

    def __init__(
        self, cfg: Any, replace: Replace, *, mask_padding: bool = False, long_input: bool = False, causal: bool = False
    ) -> None:
        if causal:
            check_causal(cfg)
        if safe_getattr(cfg, "layer_type") == "conformer":
            check_absolute_positions(cfg)
        # Plain attributes, read by build_encoder_layer inside __init__.
        self.replace, self.mask_padding = replace, mask_padding
        super().__init__(cfg)
        del self.replace  # it cannot be pickled
        self.max_tokens = find_max_tokens(self)
        if self.max_tokens is not None:  # the layers have a few more, for padding to a multiple
            self.max_tokens = min(self.max_tokens, safe_getattr(cfg, "lineartime_max_frames") or self.max_tokens)
        # Padding is zeros in front of positions; deeper ones, which are not causal, add a bias to it.
        self.padding = ConvolutionPadding(self.pos_conv) if mask_padding and not causal else None
        self.long_input, self.causal = long_input, causal
        if causal:
            self.pos_conv = CausalPositions(self.pos_conv)

    def build_encoder_layer(self, args: Any, **options: Any) -> nn.Module:
        """fairseq's hook: one layer, wrapped for activation checkpointing after its attention is replaced."""
        unwrapped = copy(args)
        unwrapped.checkpoint_activations = False
        layer = super().build_encoder_layer(unwrapped, **options)
        if isinstance(layer, fully_sharded_data_parallel.FullyShardedDataParallel):
            raise ArgumentError("`ddp_backend` is fully_sharded; allowed: pytorch_ddp, legacy_ddp, no_c10d, slowmo")
        layer.self_attn = self.replace(layer.self_attn)
        if self.mask_padding and hasattr(layer, "conv_module"):
            ConformerPadding(layer)
        return checkpoint_wrapper(layer) if args.checkpoint_activations else layer

    def apply(self, function: Callable[[nn.Module], Any]) -> nn.Module:
        """torch's; while fairseq initialises the layers, modules inside of an attention are left out."""
        if not hasattr(self, "replace"):
            return super().apply(function)
        inner = {id(x) for module in self.modules() if isinstance(module, InnerAttention) for x in module.modules()}
        return super().apply(lambda module: module if id(module) in inner else function(module))

    def extract_features(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        tgt_layer: int | None = None,
        min_layer: int | None = None,
        **further: Any,
    ) -> tuple[Tensor, list]:
        """As fairseq's: x (B, T, C), padding_mask (B, T), True = padding -> (B, T, C) and the results of the layers.

        The results are those of layers from ``min_layer``; by default all, or none of ``long_input``.
        """
        check_not_exported(self)
        padding_mask = read_padding(padding_mask)
        if self.max_tokens is not None:
            frames = x.new_full((len(x),), x.shape[1]) if padding_mask is None else (~padding_mask).sum(1)
            check_count(frames, self.max_tokens, FRAMES_OPTION)
        if min_layer is None:
            min_layer = len(self.layers) if self.long_input and not torch.is_grad_enabled() else 0
        masks = self.padding is not None and padding_mask is not None
        with self.padding.of(padding_mask) if masks else nullcontext():
            return super().extract_features(x, padding_mask, tgt_layer, min_layer, **further)

    @contextmanager
    def continuing(self, state: IncrementalState) -> Iterator[None]:
        """Inside, frames continue the recordings of ``state``, which is {} at their beginning and is updated.

        For causal encoders; ``state`` is that of the attentions and of positions.
        """

        def with_state(attention: nn.Module, arguments: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return arguments, {**options, "incremental_state": state}

        hooks = [layer.self_attn.register_forward_pre_hook(with_state, with_kwargs=True) for layer in self.layers]
        self.pos_conv.state = state
        try:
            yield
        finally:
            self.pos_conv.state = None
            for hook in hooks:
                hook.remove()


def lengths_to_mask(lengths: Tensor, longest: int) -> Tensor:
    """The padding mask (B, ``longest``), True = padding, of ``lengths`` (B,)."""
    return torch.arange(longest, device=lengths.device) >= lengths[:, None]


def check_causal(cfg: Any) -> None:
    """Raise ValueError if a part of the model beside its attention would see frames that follow."""
    for name, allowed in _CAUSAL.items():
        value = safe_getattr(cfg, name, allowed)
        value = getattr(value, "value", value)
        if value != allowed:
            raise ArgumentError(
                f"`{name}` is {value}; allowed with `lineartime_causal`: {allowed}, since it would see frames that "
                "follow"
            )


def check_absolute_positions(cfg: Any) -> None:
    """Raise ValueError for a conformer with relative positions, which have no meaning for a sum over all frames."""
    kind = safe_getattr(cfg, "pos_enc_type", "abs")
    if kind != "abs":
        raise ArgumentError(f"`pos_enc_type` is {kind}; allowed: abs, absolute positions")
