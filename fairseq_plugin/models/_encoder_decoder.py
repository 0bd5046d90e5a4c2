"""The base of all encoder-decoder models, with all options and features of fairseq's ``transformer``."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerModel
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf
from torch import nn

from common.attention import ATTENTIONS, options_of

from ..loading.checkpoint_config import check_texts
from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import flag_of, option_field
from ..modules.cross_attention import CrossDesign
from ..modules.not_exportable import NoTorchScript
from ..modules.transformer_layer import LinearTimeDecoderLayer, LinearTimeEncoderLayer
from ._decoder import LinearTimeDecoder
from ._encoder import LinearTimeEncoder
from ._layers import DesignsLayers
from ._options import (
    attention_config,
    attention_options,
    check_positions,
    errors_with_options,
    option,
    plain_options,
)
from ._trained_parameters import TrainedOptions, train_only_chosen
from ._weight_decay import DecayOptions, MarksDecay

#: The mechanisms for cross-attention, in addition to fairseq's own softmax attention.
SOURCE_ATTENTIONS = tuple(name for name, attention in ATTENTIONS.items() if "source" in attention.supports)


@dataclass
class CrossAttentionOptions(FairseqDataclass):
    """The option that chooses a decoder's attention to the encoder."""

    lineartime_cross_attention: ChoiceEnum(("softmax", *SOURCE_ATTENTIONS)) = option_field(
        "softmax",
        "attention of the decoder to the encoder: softmax, exact, which keeps the keys and values of the "
        "source, or one that sums over the source once, in linear time; flow_source is ours, in no paper",
    )


def _cross_prefix(name: str) -> str:
    """The prefix of the options of the cross-attention called ``name``."""
    return f"cross_{name}"


def _cross_config(name: str) -> type:
    """A dataclass of the options of the cross-attention ``name``, without those that only change its speed."""
    options = [x for x, described in options_of(name, causal=False).described().items() if not described.speed_only]
    return attention_config(name, options, _cross_prefix(name))


#: The options of each cross-attention: the option x of NAME is ``--cross-NAME-x``.
CROSS_OPTIONS = {name: _cross_config(name) for name in SOURCE_ATTENTIONS}


class SourceEncoder(LinearTimeEncoder):
    """``LinearTimeEncoder`` for the source of an encoder-decoder."""

    length_options = "--max-source-positions"


#: Dataclasses of the options that all encoder-decoders add to fairseq's.
FURTHER_OPTIONS = (DecayOptions, TrainedOptions, CrossAttentionOptions, *CROSS_OPTIONS.values())


class BuildsLayers(DesignsLayers):
    """Mixin before an encoder-decoder of fairseq that builds its layers; subclasses name the attention.

    Self-attention is bidirectional in the encoder and causal in the decoder. If a mechanism has no causal form, the
    decoder has softmax attention, since targets are short where sources are long.
    """

    two_sides = True

    @classmethod
    def check_task(cls, args, task) -> None:
        """Raise ValueError for a task without sources; subclasses define it."""

    @classmethod
    def build_model(cls, args, task) -> nn.Module:
        """Build the model as fairseq does, with our encoder and decoder.

        Raises:
            ValueError: an option has a value that a layer does not allow or has no effect, or the task has no sources.
        """
        cls.check_task(args, task)
        args = plain_options(args) if OmegaConf.is_config(args) else args
        check_texts(cls, args)
        _check_cross_options(args)
        check_positions(args)
        model = super().build_model(args, task)
        model.mark_decay(args)
        train_only_chosen(model, args)
        return model

    @classmethod
    def layer_builder(cls, args, causal: bool) -> Callable[..., nn.Module]:
        """A function that builds a layer of the encoder, or of the decoder if ``causal``; called once per layer."""
        if not causal:
            designs = cls.designs(args, "encoder", False, args.max_source_positions)
            return cls.in_turn("encoder", designs, LinearTimeEncoderLayer)
        reads_source = safe_getattr(args, "cross_self_attention", False)
        longest = args.max_target_positions + reads_source * args.max_source_positions
        designs = (replace(x, reads_source=reads_source) for x in cls.designs(args, "decoder", True, longest))
        return cls.in_turn("decoder", designs, partial(LinearTimeDecoderLayer, cross=_cross_design(args)))


class LinearTimeTransformer(BuildsLayers, NoTorchScript, MarksDecay, CheckedLoading, TransformerModel):
    """fairseq's ``transformer`` with our layers."""

    stock_model = TransformerModel
    #: If a group of a configuration, such as ``encoder``, is given, it sets all of its options, as in ``transformer``.
    reads_groups = True

    @classmethod
    def add_args(cls, parser) -> None:
        """The options of ``transformer`` and ours."""
        TransformerModel.add_args(parser)
        for options in (*FURTHER_OPTIONS, cls.options_class):
            gen_parser_from_dataclass(parser, options(), delete_default=True)

    @classmethod
    def check_task(cls, args, task) -> None:
        """See ``BuildsLayers``."""
        if isinstance(task, LanguageModelingTask):
            raise ValueError(
                f"--task is language_modeling; allowed with --arch {safe_getattr(args, 'arch')}: translation and "
                f"others with a source and a target ({cls.option_prefix}_lm is the language model)"
            )

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens) -> nn.Module:
        """fairseq's hook: the encoder."""
        with errors_with_options(cls, cls.option_prefix, "encoder"):
            encoder = SourceEncoder(args, src_dict, embed_tokens, cls.layer_builder(args, causal=False))
        if needs_longest_source(args):
            encoder.max_tokens = min(x for x in (encoder.max_tokens, args.max_source_positions) if x is not None)
        return encoder

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens) -> nn.Module:
        """fairseq's hook: the decoder."""
        no_cross_attention = args.no_cross_attention
        with errors_with_options(cls, cls.option_prefix, "decoder"):
            layer = cls.layer_builder(args, causal=True)
            return LinearTimeDecoder(args, tgt_dict, embed_tokens, layer, no_encoder_attn=no_cross_attention)


def _cross_attention(args) -> str:
    """The name of the cross-attention."""
    return option(args, CrossAttentionOptions, "lineartime_cross_attention")


def needs_longest_source(args) -> bool:
    """Whether the cross-attention has parameters or a constant that depend on the longest source."""
    name = _cross_attention(args)
    return name in SOURCE_ATTENTIONS and "max_tokens" in ATTENTIONS[name].needs


def _cross_design(args) -> CrossDesign | None:
    """The design of the decoder's attention to the encoder, None for fairseq's own."""
    name = _cross_attention(args)
    if name == "softmax":
        return None
    options = attention_options(args, name, CROSS_OPTIONS[name], _cross_prefix(name))
    return CrossDesign(name, options, max(args.max_source_positions, args.max_target_positions))


def _check_cross_options(args) -> None:
    """Raise ValueError for options of cross-attention that contradict each other or have no effect."""
    chosen, flag = _cross_attention(args), flag_of("lineartime_cross_attention")
    if safe_getattr(args, "no_cross_attention", False) and chosen != "softmax":
        raise ValueError(f"--no-cross-attention is given; allowed with {flag} {chosen}: not given")
    for name, config in CROSS_OPTIONS.items():
        for field in config.__dataclass_fields__:
            value = option(args, config, field)
            if name != chosen and field.startswith(_cross_prefix(name)) and value != getattr(config, field):
                raise ValueError(f"{flag_of(field)} is {value} and {flag} {chosen}; allowed with {flag} {name} alone")
