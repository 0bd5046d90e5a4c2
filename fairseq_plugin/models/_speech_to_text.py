"""The bases of ``s2t_NAME`` and ``s2t_conformer_NAME``: fairseq's models from speech to text with our layers."""

import os
from copy import copy
from typing import Any

from fairseq.checkpoint_utils import load_pretrained_component_from_model
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.speech_to_text.s2t_conformer import S2TConformerModel
from fairseq.models.speech_to_text.s2t_transformer import S2TTransformerModel
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from ..loading.checkpoints import CheckedLoading
from ..modules.audio_encoder import Replace, replaced
from ..modules.not_exportable import NoTorchScript
from ..modules.speech_encoders import SpeechConformerEncoder, SpeechEncoder
from ._decoder import LinearTimeDecoder
from ._encoder_decoder import FURTHER_OPTIONS, BuildsLayers, needs_longest_source
from ._options import PaddingOptions, errors_with_options, option
from ._weight_decay import MarksDecay


class SpeechDecoder(LinearTimeDecoder):
    """``LinearTimeDecoder`` that also returns the encoder's output, which a CTC loss reads."""

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: Any = None,
        *options: Any,
        **further: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As ``LinearTimeDecoder``'s, with the entry ``encoder_out`` unless the decoder goes on step by step."""
        x, extra = super().extract_features(prev_output_tokens, encoder_out, incremental_state, *options, **further)
        return x, extra if incremental_state is not None else {**extra, "encoder_out": encoder_out}


class LinearTimeSpeechToText(BuildsLayers, NoTorchScript, MarksDecay, CheckedLoading, S2TTransformerModel):
    """fairseq's ``s2t_transformer`` with our layers in encoder and decoder, and our choice of cross-attention."""

    stock_model = S2TTransformerModel
    #: fairseq's model whose options this one has.
    base: type = S2TTransformerModel

    @classmethod
    def add_args(cls, parser) -> None:
        """The options of fairseq's model and ours."""
        cls.base.add_args(parser)
        for options in (*FURTHER_OPTIONS, PaddingOptions, cls.options_class):
            gen_parser_from_dataclass(parser, options(), delete_default=True)

    @classmethod
    def check_task(cls, args, task) -> None:
        """See ``BuildsLayers``."""
        if safe_getattr(args, "input_feat_per_channel") is None:  # the task sets it
            raise ValueError(f"--task is {safe_getattr(args, 'task')}; allowed with {cls.__name__}: speech_to_text")

    @classmethod
    def build_encoder(cls, args) -> nn.Module:
        """fairseq's hook: the encoder, with the weights of ``--load-pretrained-encoder-from``."""
        with errors_with_options(cls, cls.option_prefix, "encoder"):
            encoder = cls.new_encoder(args, option(args, PaddingOptions, "lineartime_mask_padding"))
        if needs_longest_source(args):
            encoder.max_frames = args.max_source_positions
        path = safe_getattr(args, "load_pretrained_encoder_from")
        if path is None:
            return encoder
        if not os.path.exists(path):
            raise ValueError(f"--load-pretrained-encoder-from is {path!r}; allowed: a checkpoint that exists")
        try:
            return load_pretrained_component_from_model(component=encoder, checkpoint=path)
        except Exception as error:  # whatever torch and fairseq raise for a file of another kind
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"--load-pretrained-encoder-from is {path!r}, whose encoder cannot be loaded: {reason}; allowed: a "
                "checkpoint with the same encoder, or one that python -m fairseq_plugin.convert made for it"
            ) from error

    @classmethod
    def new_encoder(cls, args, mask_padding: bool) -> nn.Module:
        """The encoder, with random weights."""
        return SpeechEncoder(args, cls.layer_builder(_subsampled(args), causal=False), mask_padding)

    @classmethod
    def build_decoder(cls, args, task, embed_tokens) -> nn.Module:
        """fairseq's hook: the decoder."""
        with errors_with_options(cls, cls.option_prefix, "decoder"):
            layer = cls.layer_builder(_subsampled(args), causal=True)
            return SpeechDecoder(args, task.target_dictionary, embed_tokens, layer)


class LinearTimeSpeechConformer(LinearTimeSpeechToText, S2TConformerModel):
    """fairseq's ``s2t_conformer`` with our attention in its encoder and our decoder; absolute positions only."""

    stock_model = base = S2TConformerModel

    @classmethod
    def new_encoder(cls, args, mask_padding: bool) -> nn.Module:
        """The encoder, with random weights."""
        return SpeechConformerEncoder(args, cls.attention_builder(_subsampled(args)), mask_padding)

    @classmethod
    def attention_builder(cls, args) -> Replace:
        """A function that builds the attention of the next layer of the encoder at each call."""
        return cls.in_turn("encoder", cls.designs(args, "encoder", False, args.max_source_positions), replaced)


def _subsampled(args: Any) -> Any:
    """``args`` with the longest source as the layers see it, after the convolutions that halve its length."""
    convolutions = args.conv_kernel_sizes.count(",") + 1 if args.conv_version == "s2t_transformer" else 2
    shorter = copy(args)
    shorter.max_source_positions = -(-args.max_source_positions // 2**convolutions)
    return shorter
