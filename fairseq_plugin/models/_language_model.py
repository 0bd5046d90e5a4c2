"""The base of all causal language models, with all options and features of ``transformer_lm``."""

from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import (
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
    base_lm_architecture,
)
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from fairseq.utils import eval_str_list, safe_getattr
from torch import nn

from common.ops.shared.checks import check_positive_int

from ..loading.checkpoint_config import check_texts
from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import flag_of, option_field
from ..modules.not_exportable import NoTorchScript
from ..modules.transformer_layer import LinearTimeDecoderLayer
from ._decoder import BuildLayer, LinearTimeDecoder
from ._layers import DesignsLayers
from ._options import DocumentOptions, check_positions, complete_checkpointing, errors_with_options
from ._registration import register_checked
from ._trained_parameters import TrainedOptions, choose_trained_parameters, train_only_chosen
from ._weight_decay import DecayOptions, MarksDecay, choose_optimizer


@dataclass
class LinearTimeLanguageModelConfig(DocumentOptions, TrainedOptions, DecayOptions, TransformerLanguageModelConfig):
    """Options of ``transformer_lm``, which these models replace, and options that all of them add.

    Layers are pre-norm, like those of every named architecture of ``transformer_lm``. For a comparison,
    ``--arch transformer_lm`` itself needs ``--decoder-normalize-before``.
    """

    lineartime_post_norm: bool = option_field(
        False,
        "LayerNorm after each block, as in the Flowformer paper's equation 9; "
        "--decoder-normalize-before is the default otherwise",
    )


#: Task options that a language model's configuration refers to.
_TASK_OPTIONS = ("tokens_per_sample", "max_target_positions", "add_bos_token")
#: Pairs of options that must be equal if the weights of adaptive inputs and softmax are tied.
_TIED = (
    ("adaptive_input_factor", "adaptive_softmax_factor"),
    ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
    ("decoder_input_dim", "decoder_output_dim"),
)


class LinearTimeLanguageModel(DesignsLayers, NoTorchScript, MarksDecay, CheckedLoading, TransformerLanguageModel):
    """fairseq's Transformer language model around ``LinearTimeDecoder``; subclasses name the attention."""

    @classmethod
    def layer_builder(cls, args) -> BuildLayer:
        """A function that builds a layer of the decoder; called once per layer, in order."""
        designs = cls.designs(args, "decoder", True, args.max_target_positions)
        return cls.in_turn("decoder", designs, LinearTimeDecoderLayer)

    @classmethod
    def decoder_options(cls, args) -> dict[str, Any]:
        """Additional arguments of ``LinearTimeDecoder``."""
        return {}

    @classmethod
    def build_model(cls, args, task):
        """Build the model as fairseq's own does, with our decoder.

        Raises:
            ValueError: a value that the attention does not allow, or a number of heads that does not divide the width.
        """
        check_texts(cls, args)
        _complete_options(args)
        with errors_with_options(cls, cls.option_prefix, "decoder"):
            decoder = LinearTimeDecoder(
                args,
                task.target_dictionary,
                cls.build_token_embedding(args, task.source_dictionary),
                cls.layer_builder(args),
                no_encoder_attn=True,
                **cls.decoder_options(args),
            )
        model = cls(decoder)
        model.mark_decay(args)
        train_only_chosen(model, args)
        return model

    @classmethod
    def build_token_embedding(cls, args, dictionary: Dictionary) -> nn.Module:
        """Token embeddings of the kind that fairseq's options select: from characters, adaptive, or plain."""
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                literal_eval(args.character_filters),
                args.character_embedding_dim,
                args.decoder_embed_dim,
                args.char_embedder_highway_layers,
            )
        if args.adaptive_input:
            return AdaptiveInput(
                len(dictionary),
                dictionary.pad(),
                args.decoder_input_dim,
                args.adaptive_input_factor,
                args.decoder_embed_dim,
                eval_str_list(args.adaptive_input_cutoff, type=int),
                args.quant_noise_pq,
                args.quant_noise_pq_block_size,
            )
        return cls.build_embedding(args, dictionary, args.decoder_input_dim)


def _complete_options(args) -> None:
    """Fill in options that follow from others, as fairseq does, and check the options that fairseq asserts.

    The position limit is ``--max-target-positions``, by default the longest sample: ``--tokens-per-sample`` tokens, and
    one more with ``--add-bos-token``. Only learned positions and attentions with a parameter per position refuse longer
    inputs; sinusoids and rotary positions have no limit.
    """
    args.decoder_normalize_before = not safe_getattr(args, "lineartime_post_norm", False)
    complete_checkpointing(args)
    if args.decoder_layers_to_keep:
        args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
    if args.max_target_positions is None:
        check_positive_int("--tokens-per-sample", args.tokens_per_sample)
        args.max_target_positions = args.tokens_per_sample + int(args.add_bos_token)
    check_positive_int("--max-target-positions", args.max_target_positions)
    check_positions(args)
    if args.tie_adaptive_weights:
        if not args.adaptive_input:
            raise ValueError("--tie-adaptive-weights is given; allowed: with --adaptive-input")
        for first, second in _TIED:
            if getattr(args, first) != getattr(args, second):
                values = " and ".join(f"{flag_of(name)} is {getattr(args, name)}" for name in (first, second))
                raise ValueError(f"{values}; allowed with --tie-adaptive-weights: equal values")


def register_language_model(name: str, dataclass: type) -> Callable[[type], type]:
    """fairseq's ``register_model`` for a language model; ``check_command_line`` checks its parsed command line."""
    return register_checked(name, dataclass, check_command_line)


def complete_size(args, size: dict[str, Any]) -> None:
    """Check the command line of a named size; fill in open options from ``size``, then with fairseq's defaults."""
    check_command_line(args)
    for name, value in size.items():
        setattr(args, name, safe_getattr(args, name, value))
    base_lm_architecture(args)
    args.decoder_normalize_before = not safe_getattr(args, "lineartime_post_norm", False)


def check_command_line(args) -> None:
    """Check options of a parsed command line on which fairseq would fail without a helpful message, and apply ours.

    Options that the user did not give are not in ``args``, except those of the task.

    Raises:
        ValueError: the task is not language modeling, two options contradict each other, or the optimizer lacks the
            requested weight decay.
    """
    if not all(hasattr(args, name) for name in _TASK_OPTIONS):
        raise ValueError(f"--task is {args.task}; allowed with --arch {args.arch}: language_modeling")
    if safe_getattr(args, "lineartime_post_norm", False) and safe_getattr(args, "decoder_normalize_before", False):
        raise ValueError("--decoder-normalize-before is given; allowed with --lineartime-post-norm: not given")
    choose_trained_parameters(args)
    choose_optimizer(args)
