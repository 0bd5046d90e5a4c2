"""The base of all classifiers of sequences, for fairseq's task and criterion ``sentence_prediction``."""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.roberta import RobertaHubInterface
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from torch import Tensor

from common.modules.stored_options import StoredOptions, is_extra_state
from common.ops.shared.checks import check_positive_int

from ..loading.known_options import option_field
from ..modules.arena_head import ArenaHead, init_as_arena
from ._encoder import LinearTimeRobertaEncoder
from ._masked_model import LinearTimeMaskedModel
from ._options import option

POOLINGS = ("first", "mean")
STYLES = ("roberta", "arena")


@dataclass
class ClassifierOptions(FairseqDataclass):
    """Options of all classifiers."""

    pooling: ChoiceEnum(POOLINGS) = option_field(
        "first", "what a sequence is classified by: the features of its first token, or the mean over all"
    )
    classifier_style: ChoiceEnum(STYLES) = option_field(
        "roberta",
        "head and first weights: roberta, dropout, a layer with tanh and one of scores, from N(0, 0.02); "
        "arena, those of the Long Range Arena: layers with relu and one of scores, Xavier's weights, and token "
        "embeddings from N(0, 1)",
    )
    classifier_dim: Optional[int] = option_field(
        None, "width inside of the head; default: the encoder's, in style arena its ffn's"
    )


class FeatureEncoder(LinearTimeRobertaEncoder):
    """RoBERTa's encoder without its language-model head."""

    def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight: Tensor | None) -> None:
        """fairseq's hook: no head."""


class ClassifierHubInterface(RobertaHubInterface):
    """RoBERTa's interface, with predictions from the features that the classifier pools."""

    def predict(self, head: str, tokens: Tensor, return_logits: bool = False) -> Tensor:
        """Tokens (T) or (B, T) -> log-probabilities (B, classes), or scores; RoBERTa's uses the first token only."""
        tokens = torch.atleast_2d(tokens).to(self.device)
        features = self.extract_features(tokens)
        scores = self.model.classification_heads[head](self.model.pool(features, tokens)[:, None])
        return scores if return_logits else scores.log_softmax(-1)


class LinearTimeClassifier(LinearTimeMaskedModel):
    """An encoder, a pooling of its features, and classification heads; subclasses build the layers.

    The task registers a head (``register_classification_head``), and the criterion selects it by name. Padding on any
    side has no influence. If a task has two sequences, one encoder reads both, and the head gets both pooled vectors.
    """

    encoder_class = FeatureEncoder
    reads_documents = False
    task_names = "sentence_prediction"
    other_tasks = {"language_modeling": LanguageModelingTask, "masked_lm": MaskedLMTask}
    #: The number of sequences per example, and the labels; both come from the task.
    sequences = 1
    labels: list[str] | None = None

    def __init__(self, args, encoder) -> None:
        super().__init__(args, encoder)
        if option(args, ClassifierOptions, "classifier_style") == "arena":
            init_as_arena(self)

    @classmethod
    def from_pretrained(cls, *places: Any, **options: Any) -> ClassifierHubInterface:
        """As for masked models."""
        loaded = super().from_pretrained(*places, **options)
        return ClassifierHubInterface(loaded.cfg, loaded.task, loaded.model)

    @classmethod
    def add_args(cls, parser) -> None:
        """RoBERTa's options, ours, and those of classifiers."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, ClassifierOptions(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """As for masked models; the task defines how many sequences an example has, and the labels."""
        model = super().build_model(args, task)
        model.sequences = getattr(task, "sequences", 1)
        dictionary = getattr(task, "label_dictionary", None)
        if dictionary is not None:
            model.labels = dictionary.symbols[dictionary.nspecial :]
        return model

    def register_classification_head(
        self, name: str, num_classes: int | None = None, inner_dim: int | None = None, **unused: Any
    ) -> None:
        """fairseq's hook: add the head ``name`` in the chosen style.

        Raises:
            ValueError: the width of the head is not an integer of at least 1, or RoBERTa's head gets two sequences.
        """
        inner_dim = inner_dim or option(self.args, ClassifierOptions, "classifier_dim")
        if inner_dim is not None:
            check_positive_int("--classifier-dim", inner_dim)
        if option(self.args, ClassifierOptions, "classifier_style") == "arena":
            dims = self.args.encoder_embed_dim, inner_dim or self.args.encoder_ffn_embed_dim, num_classes
            self.classification_heads[name] = ArenaHead(*dims, self.sequences)
        elif self.sequences > 1:
            raise ValueError(
                f"--classifier-style is roberta; allowed with a task of {self.sequences} sequences: arena, whose head "
                "takes them side by side"
            )
        else:
            super().register_classification_head(name, num_classes, inner_dim)
        meaning = {x: option(self.args, ClassifierOptions, x) for x in ("pooling", "classifier_style")}
        labels = {} if self.labels is None else {"labels": self.labels[:num_classes]}
        self.classification_heads[name].remembered = StoredOptions(**meaning, **labels)
        self.mark_decay(self.args)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """fairseq's hook. RoBERTa's adds missing entries of heads; records it added to a stored head are removed."""
        stored = dict(state_dict)
        super().upgrade_state_dict_named(state_dict, name)
        for head in self.classification_heads:
            prefix = f"{name}.classification_heads.{head}.".lstrip(".")
            weight = f"{prefix}out_proj.weight"
            if weight in stored and state_dict[weight] is stored[weight]:
                for record in [x for x in state_dict if x.startswith(prefix) and is_extra_state(x) and x not in stored]:
                    del state_dict[record]

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = True,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        src_tokens2: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> class scores of the head (B, classes), or features (B, T, C) without a head.

        ``src_tokens2`` (B, T2) is the second sequence of each example, for a head for two sequences.
        """
        features, extra = super().forward(src_tokens, True, return_all_hiddens)
        if classification_head_name is None:
            return features, extra
        pooled = self.pool(features, src_tokens)
        if src_tokens2 is not None:
            second_features, _ = super().forward(src_tokens2, True, return_all_hiddens)
            pooled = torch.cat([pooled, self.pool(second_features, src_tokens2)], 1)  # (B, 2 C)
        # RoBERTa's heads use the first of several tokens.
        return self.classification_heads[classification_head_name](pooled[:, None]), extra

    def pool(self, features: Tensor, src_tokens: Tensor) -> Tensor:
        """Pool the features (B, T, C) of src_tokens (B, T) to one vector per row (B, C); 0 for a row of padding."""
        real = src_tokens.ne(self.encoder.dictionary.pad())  # (B, T)
        if option(self.args, ClassifierOptions, "pooling") == "mean":
            weights = real / real.sum(1, keepdim=True).clamp(min=1)
        else:
            weights = (real & (real.cumsum(1) == 1)).float()
        # Summed in float32: half precision would lose most of a mean over thousands of tokens.
        pooled = (weights[..., None] * features.float()).masked_fill(~real[..., None], 0.0).sum(1)
        return pooled.to(features.dtype)
