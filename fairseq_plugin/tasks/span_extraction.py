"""Answers to questions as spans of long documents: ``--task span_extraction --criterion span_extraction``.

For every model based on fairseq's RoBERTa: the masked models of this plugin and ``roberta`` itself. A document that is
longer than a model's input is read in overlapping windows.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fairseq.criterions import CRITERION_REGISTRY, FairseqCriterion
from fairseq.data import Dictionary, FairseqDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.tasks import FairseqTask, register_task
from fairseq.utils import safe_getattr
from omegaconf import MISSING, OmegaConf, open_dict
from torch import Tensor, nn

from common.ops.shared.checks import check_positive_int

from ..criterions.span_extraction import SpanExtractionCriterion
from ..data.span_answers import spell
from ..data.span_folder import find_dictionary, read_span_split
from ..data.span_windows import SPECIAL_TOKENS, Layout, SpanWindowDataset
from ..loading.known_options import flag_of, option_field
from ..models._classifier import LinearTimeClassifier
from ..models._weight_decay import MarksDecay
from ..modules.positions import find_max_tokens
from ..modules.span_head import SpanHead, best_spans

logger = logging.getLogger(__name__)

#: The name of the head among a model's classification heads, which checkpoints store.
HEAD = "span_extraction_head"


@dataclass
class SpanExtractionConfig(FairseqDataclass):
    """Options of ``span_extraction``."""

    data: str = option_field(MISSING, "folder that recipes.triviaqa.data has written")
    max_positions: int = option_field(512, "tokens of a window: <s>, question, </s>, piece of a document and </s>")
    max_question_length: int = option_field(64, "tokens of a question that are read; longer ones are cut at their end")
    span_stride: Optional[int] = option_field(  # noqa: UP045  fairseq reads Optional[...]
        None,
        "tokens of a document from the beginning of a window to that of the next. Default: half of "
        "what a window has room for beside the longest question",
    )
    max_answer_length: int = option_field(30, "tokens of an answer, at most")


@register_task("span_extraction", dataclass=SpanExtractionConfig)
class SpanExtractionTask(FairseqTask):
    """Questions about documents whose answers are spans of the documents; see ``SpanWindowDataset`` for batches.

    Raises:
        ValueError: a number is not a positive integer, windows have no room for a document, or a stride skips tokens.
    """

    def __init__(self, cfg: SpanExtractionConfig, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        for name in ("max_positions", "max_question_length", "max_answer_length"):
            check_positive_int(flag_of(name), getattr(cfg, name))
        least = SPECIAL_TOKENS + cfg.max_question_length + 1
        if cfg.max_positions < least:
            raise ValueError(
                f"--max-positions is {cfg.max_positions}; allowed: at least {least}, for <s>, a question of "
                f"{cfg.max_question_length} tokens (--max-question-length), a token of a document and </s> after each"
            )
        room = cfg.max_positions - least + 1
        if cfg.span_stride is not None:
            check_positive_int("--span-stride", cfg.span_stride)
            if cfg.span_stride > room:
                raise ValueError(
                    f"--span-stride is {cfg.span_stride}; allowed: at most {room}, the tokens of a document in a "
                    f"window of {cfg.max_positions} beside the longest question, since others would be in no window"
                )
        self.dictionary = dictionary
        self.layout = Layout(cfg.max_positions, cfg.max_question_length, cfg.span_stride or max(1, room // 2))

    @classmethod
    def setup_task(cls, cfg: SpanExtractionConfig, **kwargs) -> "SpanExtractionTask":
        """Build the task with the dictionary of its data and ``<mask>``, which fairseq's tasks add too.

        Raises:
            ValueError: the folder has no dictionary; see also the class.
        """
        dictionary = cls.load_dictionary(str(find_dictionary(Path(cfg.data))))
        dictionary.add_symbol("<mask>")
        return cls(cfg, dictionary)

    def load_dataset(self, split: str, combine: bool = False, **unused) -> FairseqDataset:
        """Load ``split``; logs the number of windows, and of gold spans that no window contains completely.

        Raises:
            ValueError: the split is missing or damaged.
        """
        data = read_span_split(Path(self.cfg.data), split)
        dataset = SpanWindowDataset(data, self.layout, self.dictionary)
        logger.info(
            f"{split}: {len(data.questions)} questions, {len(data.pairs)} documents for them, {len(dataset)} windows; "
            f"{dataset.lost_spans()} of {len(data.spans)} gold spans lie in no window as a whole"
        )
        self.datasets[split] = dataset
        return dataset

    def build_model(self, cfg, from_checkpoint: bool = False) -> nn.Module:
        """fairseq's hook: the model, for windows of ``--max-positions`` tokens, with a head for spans.

        Raises:
            ValueError: the architecture is not a RoBERTa with features for each token, or reads fewer tokens.
        """
        name = safe_getattr(cfg, "_name") or safe_getattr(cfg, "arch")
        if not _gives_token_features(ARCH_MODEL_REGISTRY.get(name, object)):
            raise ValueError(
                f"--arch is {name}; allowed with --task span_extraction: roberta, and masked models, NAME_mlm"
            )
        with open_dict(cfg) if OmegaConf.is_config(cfg) else contextlib.nullcontext():
            cfg.max_positions = self.cfg.max_positions
        model = super().build_model(cfg, from_checkpoint)
        limit = find_max_tokens(model)
        if limit is not None and limit < self.cfg.max_positions:
            raise ValueError(
                f"--max-positions is {self.cfg.max_positions}; allowed: at most {limit}, the positions of this {name}"
            )
        model.classification_heads[HEAD] = _build_head(model.args)
        if isinstance(model, MarksDecay):
            model.mark_decay(model.args)
        return model

    def build_criterion(self, cfg, from_checkpoint: bool = False) -> FairseqCriterion:
        """fairseq's hook: the criterion.

        Raises:
            ValueError: it is not ``span_extraction``.
        """
        name = safe_getattr(cfg, "_name") or safe_getattr(cfg, "criterion")
        if not issubclass(CRITERION_REGISTRY.get(name, object), SpanExtractionCriterion):
            raise ValueError(f"--criterion is {name}; allowed with --task span_extraction: span_extraction")
        return super().build_criterion(cfg, from_checkpoint)

    def span_scores(self, model: nn.Module, sample: dict[str, Any]) -> Tensor:
        """The start and end scores (B, T, 2) of each token of the windows of a batch."""
        return model(**sample["net_input"], features_only=True, classification_head_name=HEAD)[0]

    def answer_spans(self, scores: Tensor, sample: dict[str, Any]) -> tuple[list[str], Tensor]:
        """The text of the best span of each window of a batch, and its score minus that of no answer (B,)."""
        best = best_spans(scores, sample["document"], self.cfg.max_answer_length)
        tokens = sample["net_input"]["src_tokens"].cpu()
        spans = zip(tokens, best.first.tolist(), best.last.tolist())
        return [self.text(row[first : last + 1]) for row, first, last in spans], best.score

    def text(self, tokens: Tensor) -> str:
        """The text of the subwords ``tokens`` (T,)."""
        return "".join(spell([self.dictionary[int(token)] for token in tokens])).strip()

    def max_positions(self) -> int:
        """fairseq's hook: the longest window, in tokens."""
        return self.cfg.max_positions

    @property
    def source_dictionary(self) -> Dictionary:
        """The dictionary of subwords."""
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        """The dictionary of subwords; a target is a pair of token positions."""
        return self.dictionary


def _build_head(args) -> SpanHead:
    """A head with the width and the options of RoBERTa's own heads."""
    return SpanHead(
        input_dim=args.encoder_embed_dim,
        inner_dim=args.encoder_embed_dim,
        num_classes=2,
        activation_fn=args.pooler_activation_fn,
        pooler_dropout=args.pooler_dropout,
        q_noise=args.quant_noise_pq,
        qn_block_size=args.quant_noise_pq_block_size,
        do_spectral_norm=args.spectral_norm_classification_head,
    )


def _gives_token_features(model: type) -> bool:
    """Whether ``model`` is a RoBERTa whose heads get the features of all tokens."""
    return issubclass(model, RobertaModel) and not issubclass(model, LinearTimeClassifier)
