"""The encoders of fairseq's ``s2t_transformer`` and ``s2t_conformer`` with another attention in their layers."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any

from fairseq.models.speech_to_text.s2t_conformer import S2TConformerEncoder
from fairseq.models.speech_to_text.s2t_transformer import S2TTransformerEncoder
from fairseq.models.transformer import TransformerConfig
from torch import Tensor, nn

from .audio_encoder import Replace, check_absolute_positions, lengths_to_mask
from .not_exportable import NoTorchScript, check_not_exported
from .padded_convolutions import ConformerPadding, ConvolutionPadding
from .positions import check_count, find_max_tokens

BuildLayer = Callable[[TransformerConfig], nn.Module]


class _ReadsSpeech(NoTorchScript):
    """Mixin before an encoder of fairseq: checks the length of recordings, and masks padding if asked to."""

    padding: ConvolutionPadding | None = None
    #: Frames of the longest recording, if a part of the model has parameters or a constant for each.
    max_frames: int | None = None

    def complete(self, args: Any, mask_padding: bool) -> None:
        """Set what ``forward`` reads, once all layers are built."""
        if mask_padding:
            self.padding = ConvolutionPadding(self.subsample)
        if find_max_tokens(self) is not None:
            self.max_frames = args.max_source_positions

    def forward(self, src_tokens: Tensor, src_lengths: Tensor, return_all_hiddens: bool = False) -> dict[str, list]:
        """As fairseq's: src_tokens (B, T, features), src_lengths (B,) -> encoder_out (T', B, C), its mask and more."""
        check_not_exported(self)
        check_count(src_lengths, self.max_frames, "--max-source-positions")
        if not src_lengths.all():  # attention to a recording without frames would be NaN
            raise ValueError("src_lengths has 0 frames for a recording; allowed: at least 1")
        mask = lengths_to_mask(src_lengths, src_tokens.shape[1])
        with nullcontext() if self.padding is None else self.padding.of(mask):
            return super().forward(src_tokens, src_lengths, return_all_hiddens)


class SpeechEncoder(_ReadsSpeech, S2TTransformerEncoder):
    """fairseq's ``S2TTransformerEncoder`` with the layers that ``build_layer(cfg)`` returns.

    With ``mask_padding``, padding is 0 in front of the subsampling convolutions, and changes no real frame.

    Raises:
        ValueError: when called with more frames than a part of the model has parameters for.
    """

    def __init__(self, args: Any, build_layer: BuildLayer, mask_padding: bool = False) -> None:
        without_layers = copy(args)
        without_layers.encoder_layers = 0
        super().__init__(without_layers)
        cfg = TransformerConfig.from_namespace(args)
        self.transformer_layers = nn.ModuleList(build_layer(cfg) for _ in range(args.encoder_layers))
        self.complete(args, mask_padding)


class SpeechConformerEncoder(_ReadsSpeech, S2TConformerEncoder):
    """fairseq's ``S2TConformerEncoder`` with the attentions that ``replace`` builds; see ``SpeechEncoder``.

    With ``mask_padding``, padding is also 0 in front of the depthwise convolution of each layer.

    Raises:
        ValueError: positions are relative; or when called with more frames than a part of the model has parameters for.
    """

    def __init__(self, args: Any, replace: Replace, mask_padding: bool = False) -> None:
        check_absolute_positions(args)
        super().__init__(args)
        for layer in self.conformer_layers:
            layer.self_attn = replace(layer.self_attn)
            if mask_padding:
                ConformerPadding(layer)
        self.complete(args, mask_padding)
