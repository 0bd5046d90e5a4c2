"""The base of all masked models, which see the whole sequence: fairseq's RoBERTa with our layers.

Everything around the layers is RoBERTa's: embeddings, language-model head, classification heads, initialisation
N(0, 0.02).
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.roberta import RobertaHubInterface, RobertaModel
from fairseq.models.roberta.model import base_architecture
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf, open_dict
from torch import nn

from ..loading.checkpoint_config import check_texts
from ..loading.checkpoints import CheckedLoading
from ..loading.known_options import flag_of, option_field
from ..modules.not_exportable import NoTorchScript
from ..modules.transformer_layer import LinearTimeEncoderLayer
from ._encoder import BuildLayer, LinearTimeRobertaEncoder
from ._layers import DesignsLayers
from ._options import (
    DocumentOptions,
    check_positions,
    checkpointing_field,
    complete_checkpointing,
    errors_with_options,
    offloading_field,
    option,
)
from ._trained_parameters import TrainedOptions, choose_trained_parameters, train_only_chosen
from ._weight_decay import DecayOptions, MarksDecay, choose_optimizer

#: The default of ``--activation-fn``, which RoBERTa's language-model head also uses.
_HEAD_ACTIVATION = "gelu"
# Options of fairseq's adaptive pruning, with the values that turn it off.
_ADAPTIVE_PRUNING = {
    "mha_reg_scale_factor": 0.0,
    "ffn_reg_scale_factor": 0.0,
    "mha_heads_to_keep": -1,
    "ffn_blocks_to_remove": -1,
}


@dataclass
class MaskedOptions(TrainedOptions, DecayOptions):
    """Command-line options that fairseq's other encoders have and its RoBERTa lacks."""

    encoder_learned_pos: bool = option_field(False, "use learned positional embeddings in the encoder")
    lineartime_post_norm: bool = option_field(False, "LayerNorm after each block, as in fairseq's roberta")
    lineartime_norm_eps: float = option_field(1e-5, "what each LayerNorm adds to the variance; BERT's is 1e-12")
    checkpoint_activations: bool = checkpointing_field()
    offload_activations: bool = offloading_field()


class LinearTimeMaskedModel(DesignsLayers, NoTorchScript, MarksDecay, CheckedLoading, RobertaModel):
    """fairseq's RoBERTa with layers that subclasses build; for the tasks of ``task_names``."""

    #: Dataclasses of options in addition to those of all masked models.
    option_classes: tuple[type, ...] = ()
    #: Options that RoBERTa reads but that its command line does not have.
    undeclared_options = ("tokens_per_sample", "encoder_xformers_att_config", "export", "relu_dropout")
    #: Whether a row may hold several documents.
    reads_documents = True
    #: The class of the encoder around the layers.
    encoder_class: type[LinearTimeRobertaEncoder] = LinearTimeRobertaEncoder
    #: The supported tasks, and the classes of tasks that are refused with a hint.
    task_names = "masked_lm, sentence_prediction, span_extraction"
    other_tasks: dict[str, type[FairseqTask]] = {"language_modeling": LanguageModelingTask}

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str,
        checkpoint_file: str = "model.pt",
        data_name_or_path: str = ".",
        bpe: str | None = None,
        **options,
    ) -> RobertaHubInterface:
        """As fairseq's, except that ``bpe`` is by default the one of the training, if any; fairseq downloads GPT-2's.

        ``encode`` and ``fill_mask`` accept sentences and need a BPE; ``extract_features`` accepts tokens.
        """
        return super().from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, bpe=bpe, **options)

    @classmethod
    def add_args(cls, parser) -> None:
        """RoBERTa's options and ours."""
        RobertaModel.add_args(parser)
        for options in (MaskedOptions, *((DocumentOptions,) if cls.reads_documents else ()), *cls.option_classes):
            gen_parser_from_dataclass(parser, options(), delete_default=True)

    @classmethod
    def complete_options(cls, args) -> None:
        """Fill in options that the command line left open: pre-norm, sinusoids, otherwise RoBERTa's defaults."""
        args.encoder_normalize_before = not safe_getattr(args, "lineartime_post_norm", False)
        args.layernorm_embedding = safe_getattr(args, "layernorm_embedding", False)
        args.encoder_learned_pos = safe_getattr(args, "encoder_learned_pos", False)
        base_architecture(args)
        choose_trained_parameters(args)
        choose_optimizer(args)

    @classmethod
    def build_model(cls, args, task):
        """Build the model as ``RobertaModel`` does, with our encoder.

        Raises:
            ValueError: an option has a value that the layers do not allow, or the task is not supported.
        """
        for name, task_class in cls.other_tasks.items():
            if isinstance(task, task_class):
                raise ValueError(
                    f"--task is {name}; allowed with --arch {safe_getattr(args, 'arch')}: {cls.task_names}"
                )
        if safe_getattr(args, "lineartime_reset_at_eos", False):
            _check_documents(cls, task)
        check_texts(cls, args)
        with open_dict(args) if OmegaConf.is_config(args) else contextlib.nullcontext():
            cls.complete_options(args)
            if safe_getattr(args, "max_positions") is None:
                args.max_positions = safe_getattr(args, "tokens_per_sample") or task.max_positions()
            check_positions(args)
            complete_checkpointing(args)
            with errors_with_options(cls, cls.option_prefix, "encoder"):
                layers = {"build_layer": cls.layer_builder(args), **cls.encoder_options(args)}
                encoder = cls.encoder_class(args, task.source_dictionary, **layers)
        _check_activation(args, encoder.sentence_encoder.layers)
        _check_pruning(args, encoder.sentence_encoder.layers)
        _check_post_norm(args, encoder.sentence_encoder.layers)
        _set_norm_eps(args, encoder)
        model = cls(args, encoder)
        model.mark_decay(args)
        train_only_chosen(model, args)
        return model

    def register_classification_head(self, *head: Any, **options: Any) -> None:
        """fairseq's hook; weight decay applies to the weights of the head as to all others."""
        super().register_classification_head(*head, **options)
        self.mark_decay(self.args)

    @classmethod
    def layer_builder(cls, args) -> BuildLayer:
        """A function that builds a layer of the encoder; called once per layer, in order."""
        designs = cls.designs(args, "encoder", False, args.max_positions)
        return cls.in_turn("encoder", designs, LinearTimeEncoderLayer)

    @classmethod
    def encoder_options(cls, args) -> dict[str, Any]:
        """Additional arguments of ``LinearTimeEncoder``."""
        return {}


def _check_documents(model: type[LinearTimeMaskedModel], task: FairseqTask) -> None:
    """Raise ValueError unless ``model`` and ``task`` allow rows of several independent documents."""
    if not model.reads_documents or (isinstance(task, FairseqTask) and not isinstance(task, MaskedLMTask)):
        raise ValueError(
            "--lineartime-reset-at-eos is given; allowed: for --task masked_lm, since what other tasks put on both "
            "sides of an eos belongs together"
        )


def _check_activation(args, layers: nn.ModuleList) -> None:
    """Raise ValueError for an activation function that no layer uses."""
    if args.activation_fn != _HEAD_ACTIVATION and not any(hasattr(layer, "fc1") for layer in layers.children()):
        raise ValueError(
            f"--activation-fn is {args.activation_fn}; allowed: {_HEAD_ACTIVATION}, that of the language-model head, "
            "since gated attention units always have silu"
        )


def _check_post_norm(args, layers: nn.ModuleList) -> None:
    """Raise ValueError for post-norm if a layer only supports pre-norm."""
    if not args.encoder_normalize_before and not all(hasattr(x, "normalize_before") for x in layers.children()):
        raise ValueError("--lineartime-post-norm is given; allowed for gated attention units: not given")


def _set_norm_eps(args, encoder: nn.Module) -> None:
    """Let the LayerNorms of ``encoder`` add ``--lineartime-norm-eps``; by default they stay as they are built.

    Raises:
        ValueError: the number is not above 0 and below 1.
    """
    eps = option(args, MaskedOptions, "lineartime_norm_eps")
    if not 0.0 < eps < 1.0:
        raise ValueError(f"--lineartime-norm-eps is {eps}; allowed: above 0 and below 1")
    for module in encoder.modules() if eps != MaskedOptions.lineartime_norm_eps else ():
        if isinstance(module, nn.LayerNorm):
            module.eps = eps


def _check_pruning(args, layers: nn.ModuleList) -> None:
    """Raise ValueError for options of RoBERTa's adaptive pruning if layers lack the matrices that it prunes."""
    # children(), since with layer drop iterating over the list itself skips layers at random.
    if not all(isinstance(getattr(layer, "fc1", None), nn.Linear) for layer in layers.children()):
        _refuse_pruning(args, tuple(_ADAPTIVE_PRUNING), "gated attention units and with GLU")
    elif any(not layer.self_attn.has_prunable_heads for layer in layers.children()):
        names = ("mha_reg_scale_factor", "mha_heads_to_keep")
        _refuse_pruning(args, names, "an attention with a gate or with parameters of its own")


def _refuse_pruning(args, names: tuple[str, ...], layers: str) -> None:
    for name in names:
        value, off = safe_getattr(args, name, _ADAPTIVE_PRUNING[name]), _ADAPTIVE_PRUNING[name]
        if value != off:
            raise ValueError(f"{flag_of(name)} is {value}; allowed for {layers}: {off}, no pruning")
