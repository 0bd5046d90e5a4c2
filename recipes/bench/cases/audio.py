"""A training step of wav2vec 2.0 with another attention, compared with fairseq's own, by length of the recording."""

from functools import partial
from typing import Any

from torch import Tensor

from ..harness.packages import missing
from ..harness.work import TRAINING, Absent, Candidate, Case, Comparison, Settings

STOCK, SOFTMAX = "wav2vec2", "softmax_wav2vec2"
MODELS = ("flowformer_wav2vec2", "linear_wav2vec2")
WIDTH, LAYERS, RATE = 256, 2, 16_000
#: Samples of the comparison with the literal references, 24 frames.
_LITERAL = 8_000


def training(settings: Settings, size: int, width: int = WIDTH, layers: int = LAYERS) -> list[Candidate | Absent]:
    """A training step of each model on one recording of ``size`` seconds."""
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, size, reason) for name in (*MODELS, STOCK)]
    return [_candidate(name, settings, size, width, layers) for name in (*MODELS, STOCK)]


def _candidate(name: str, settings: Settings, size: int, width: int, layers: int) -> Candidate:
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models import fairseq_models
    from ..models.training import attention_by_reference, compare_training, training_step

    model = fairseq_models.build_audio(name, width, layers, settings)
    recording = fairseq_models.random_recording(settings, size * RATE)

    def check() -> list[Comparison]:
        literal = model
        if name == STOCK:  # our softmax attention has a literal reference
            literal = fairseq_models.build_audio(SOFTMAX, width, layers, settings)
            literal.load_state_dict(model.state_dict())
        losses = [partial(_loss, x, recording[:, :_LITERAL]) for x in (model, literal)]
        (loss, weights), (reference, reference_weights) = zip(losses, map(_learning, (model, literal)), strict=True)
        by_reference = attention_by_reference(literal)
        return compare_training(loss, weights, reference, reference_weights, settings.dtype, by_reference)

    step = training_step(partial(_loss, model, recording), _learning(model))
    return Candidate(name, size, size, {TRAINING: step}, check)


def _learning(model: Any) -> list[Tensor]:
    """The parameters that the features depend on."""
    return [*model.feature_extractor.parameters(), *model.post_extract_proj.parameters(), *model.encoder.parameters()]


def _loss(model: Any, recording: Tensor) -> Tensor:
    """The mean square of the features."""
    return model(recording, mask=False, features_only=True)["x"].square().mean()


CASES = (
    Case(
        "audio",
        "Training step of wav2vec 2.0",
        "seconds",
        "seconds",
        (5, 30, 60, 120, 240),
        (5,),
        training,
        plotted=False,
        note=f"one recording of 16 kHz; a feature extractor of 64 channels, {LAYERS} layers of width {WIDTH} with "
        f"{WIDTH // 64} heads; forward, backward and AdamW",
    ),
)
