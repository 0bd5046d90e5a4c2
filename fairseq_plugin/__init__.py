"""Linear-time Transformers for fairseq: ``fairseq-train --user-dir fairseq_plugin --arch flowformer_lm``.

Importing the package registers its architectures, a criterion and a task, and, with torch and fairseq, the classes of
checkpoints and of linear layers (``host``); training, evaluation, generation, checkpoints and distribution are
fairseq's own.
"""

from .host import allow_checkpoint_classes, allow_quantization, import_host

import_host()
allow_checkpoint_classes()
allow_quantization()

from .criterions import SparseCrossEntropyCriterion  # noqa: E402
from .daft import DaftConvLanguageModel, DaftFullLanguageModel  # noqa: E402
from .flash import (  # noqa: E402
    CombinerLanguageModel,
    FlashLanguageModel,
    FlashQuadLanguageModel,
    MixedChunkTransformerLanguageModel,
    PerformerLanguageModel,
    TransformerPlusLanguageModel,
    TransformerPlusPlusLanguageModel,
)
from .language_model import (  # noqa: E402
    FlowformerLanguageModel,
    LinearLanguageModel,
    LinearTimeLanguageModel,
    SoftmaxLanguageModel,
)
from .masked_lm import (  # noqa: E402
    CombinerMaskedModel,
    FlashMaskedModel,
    FlashQuadMaskedModel,
    MixedChunkTransformerMaskedModel,
    PerformerMaskedModel,
    TransformerPlusMaskedModel,
    TransformerPlusPlusMaskedModel,
)
from .pixels import PixelModelingTask  # noqa: E402

__all__ = [
    "CombinerLanguageModel",
    "CombinerMaskedModel",
    "DaftConvLanguageModel",
    "DaftFullLanguageModel",
    "FlashLanguageModel",
    "FlashMaskedModel",
    "FlashQuadLanguageModel",
    "FlashQuadMaskedModel",
    "FlowformerLanguageModel",
    "LinearLanguageModel",
    "LinearTimeLanguageModel",
    "MixedChunkTransformerLanguageModel",
    "MixedChunkTransformerMaskedModel",
    "PerformerLanguageModel",
    "PerformerMaskedModel",
    "PixelModelingTask",
    "SoftmaxLanguageModel",
    "SparseCrossEntropyCriterion",
    "TransformerPlusLanguageModel",
    "TransformerPlusMaskedModel",
    "TransformerPlusPlusLanguageModel",
    "TransformerPlusPlusMaskedModel",
]
