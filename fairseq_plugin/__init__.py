"""Linear-time Transformers for fairseq: ``fairseq-train --user-dir fairseq_plugin --arch flowformer_lm``.

Importing the package registers its architectures, criteria, an optimizer and tasks, and lets ``torch.load`` read the
configuration objects of fairseq's checkpoints. Training, evaluation, generation, checkpoints and distribution are
fairseq's own.
"""

from ._host import allow_checkpoint_classes, check_host

check_host()
allow_checkpoint_classes()

from .criterions.action_mse import ActionMSECriterion
from .criterions.attention_transfer import AttentionTransferCriterion
from .criterions.ctc_distillation import CtcDistillationCriterion
from .criterions.distillation import DistillationCriterion
from .criterions.span_extraction import SpanExtractionCriterion
from .criterions.sparse_cross_entropy import SparseCrossEntropyCriterion
from .data import character_text as _character_text  # noqa: F401  registers --bpe lineartime_characters
from .generation.prompt_sequence_generator import read_prompt
from .generation.prompt_state import PromptState
from .models import attention as _derived  # noqa: F401  registers NAME_lm, NAME_mlm and NAME_classifier
from .models import audio as _audio  # noqa: F401  registers NAME_wav2vec2, _hubert and _data2vec_audio
from .models import decision as _decision  # noqa: F401  registers NAME_decision
from .models import encoder_decoder as _encoder_decoder  # noqa: F401  registers NAME and NAME_SIZE
from .models import hybrid as _hybrid  # noqa: F401  registers hybrid_lm, hybrid_mlm, hybrid_classifier and hybrid
from .models import language_model_sizes as _sizes  # noqa: F401  registers NAME_lm_wiki103, _enwik8 and _cifar10
from .models import long_range_arena as _long_range_arena  # noqa: F401  registers NAME_lra_TASK
from .models import speech_to_text as _speech_to_text  # noqa: F401  registers s2t_NAME and s2t_conformer_NAME
from .models import time_series as _time_series  # noqa: F401  registers NAME_time_series
from .models._decision import DecisionTransformer
from .models._encoder_decoder import LinearTimeTransformer
from .models._language_model import LinearTimeLanguageModel
from .models._time_series import TimeSeriesClassifier
from .models.daft import DaftConvLanguageModel, DaftFullLanguageModel
from .models.flash import (
    CombinerLanguageModel,
    FlashLanguageModel,
    FlashQuadLanguageModel,
    MixedChunkTransformerLanguageModel,
    PerformerLanguageModel,
    TransformerPlusLanguageModel,
    TransformerPlusPlusLanguageModel,
)
from .models.flash_masked import (
    CombinerMaskedModel,
    FlashMaskedModel,
    FlashQuadMaskedModel,
    MixedChunkTransformerMaskedModel,
    PerformerMaskedModel,
    TransformerPlusMaskedModel,
    TransformerPlusPlusMaskedModel,
)
from .models.flowformer import FlowformerLanguageModel, LinearLanguageModel, SoftmaxLanguageModel
from .optim.radam import FairseqRAdam
from .tasks.context_parallel_language_modeling import ContextParallelLanguageModelingTask
from .tasks.offline_rl import OfflineRLTask
from .tasks.pixel_modeling import PixelModelingTask
from .tasks.prompted_language_modeling import PromptedLanguageModelingTask
from .tasks.sequence_pair_prediction import SequencePairPredictionTask
from .tasks.span_extraction import SpanExtractionTask
from .tasks.streaming_language_modeling import StreamingLanguageModelingTask
from .tasks.time_series_classification import TimeSeriesClassificationTask

__all__ = [
    "ActionMSECriterion",
    "AttentionTransferCriterion",
    "CombinerLanguageModel",
    "CombinerMaskedModel",
    "ContextParallelLanguageModelingTask",
    "CtcDistillationCriterion",
    "DaftConvLanguageModel",
    "DaftFullLanguageModel",
    "DecisionTransformer",
    "DistillationCriterion",
    "FairseqRAdam",
    "FlashLanguageModel",
    "FlashMaskedModel",
    "FlashQuadLanguageModel",
    "FlashQuadMaskedModel",
    "FlowformerLanguageModel",
    "LinearLanguageModel",
    "LinearTimeLanguageModel",
    "LinearTimeTransformer",
    "MixedChunkTransformerLanguageModel",
    "MixedChunkTransformerMaskedModel",
    "OfflineRLTask",
    "PerformerLanguageModel",
    "PerformerMaskedModel",
    "PixelModelingTask",
    "PromptState",
    "PromptedLanguageModelingTask",
    "SequencePairPredictionTask",
    "SoftmaxLanguageModel",
    "SpanExtractionCriterion",
    "SpanExtractionTask",
    "SparseCrossEntropyCriterion",
    "StreamingLanguageModelingTask",
    "TimeSeriesClassificationTask",
    "TimeSeriesClassifier",
    "TransformerPlusLanguageModel",
    "TransformerPlusMaskedModel",
    "TransformerPlusPlusLanguageModel",
    "TransformerPlusPlusMaskedModel",
    "read_prompt",
]
