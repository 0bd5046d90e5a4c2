"""The base of all classifiers of sequences, for fairseq's task and criterion ``sentence_prediction``."""

from dataclasses import dataclass, field
from typing import Any

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.masked_lm import MaskedLMTask
from torch import Tensor

from ._encoder import LinearTimeRobertaEncoder
from ._masked_model import LinearTimeMaskedModel
from ._options import option

POOLINGS = ("first", "mean")


@dataclass
class ClassifierOptions(FairseqDataclass):
    """Options of all classifiers."""

    pooling: ChoiceEnum(POOLINGS) = field(
        default="first",
        metadata={"help": "what a sequence is classified by: the features of its first token, or the mean over all"},
    )


class FeatureEncoder(LinearTimeRobertaEncoder):
    """RoBERTa's encoder without its language-model head."""

    def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight: Tensor | None) -> None:
        """fairseq's hook: no head."""


class LinearTimeClassifier(LinearTimeMaskedModel):
    """An encoder, a pooling of its features, and RoBERTa's classification heads; subclasses build the layers.

    The task registers a head, ``register_classification_head``, and the criterion names it. Padding on any side has no
    influence.
    """

    encoder_class = FeatureEncoder
    task_names = "sentence_prediction"
    other_tasks = {"language_modeling": LanguageModelingTask, "masked_lm": MaskedLMTask}

    @classmethod
    def add_args(cls, parser) -> None:
        """RoBERTa's options, ours, and those of classifiers."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, ClassifierOptions(), delete_default=True)

    def forward(
        self,
        src_tokens: Tensor,
        features_only: bool = True,
        return_all_hiddens: bool = False,
        classification_head_name: str | None = None,
        **unused: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """src_tokens (B, T) -> scores of the head's classes (B, classes), or features (B, T, C) without a head."""
        features, extra = super().forward(src_tokens, True, return_all_hiddens)
        if classification_head_name is None:
            return features, extra
        pooled = self.pool(features, src_tokens)[:, None]  # RoBERTa's heads take the first of several tokens
        return self.classification_heads[classification_head_name](pooled), extra

    def pool(self, features: Tensor, src_tokens: Tensor) -> Tensor:
        """One vector (B, C) of the features (B, T, C) of src_tokens (B, T); 0 for a row of padding alone."""
        real = src_tokens.ne(self.encoder.dictionary.pad())  # (B, T)
        if option(self.args, ClassifierOptions, "pooling") == "mean":
            weights = real / real.sum(1, keepdim=True).clamp(min=1)
        else:
            weights = (real & (real.cumsum(1) == 1)).float()
        # Summed in float32: half precision would lose most of a mean over thousands of tokens.
        pooled = (weights[..., None] * features.float()).masked_fill(~real[..., None], 0.0).sum(1)
        return pooled.to(features.dtype)
