"""Linear attention with a forget gate compared with plain: a training and a decoding step of language models."""

from functools import partial

from ..harness.packages import missing
from ..harness.work import TRAINING, Absent, Candidate, Case, Comparison, Settings
from .language_models import decoding, next_token_loss

LINEAR = "linear_lm"
#: Models with one causal sum per head that decays: by an added forget gate, or by the mechanism's own paper.
FORGETTING = (
    "linear_lm --linear-forget head",
    "linear_lm --linear-forget channel",
    "cosformer_lm --cosformer-forget head",
    "favor_lm --favor-forget head",
    "rfa_lm --rfa-forget head",
    "rfa_gate_lm",
    "flowformer_lm --flow-forget head",
    "flowformer_lm --flow-forget channel",
    "mixed_chunk_lm --mixed-chunk-chunk-size 64 --mixed-chunk-forget head",
    "retention_lm",
    "gla_lm",
    "gated_delta_lm",
)
MODELS = (LINEAR, "linear_lm --linear-short-conv 4", "flowformer_lm", *FORGETTING)
WIDTH, LAYERS = 256, 2
#: Tokens of the comparison with the literal references: more than a chunk of mixed chunk attention.
_LITERAL = 70
POSITION, QUICK_POSITION = 2048, 128


def training(
    settings: Settings, size: int, width: int = WIDTH, layers: int = LAYERS, names: tuple[str, ...] = MODELS
) -> list[Candidate | Absent]:
    """A training step of each of the models ``names`` on one sequence of ``size`` tokens."""
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, size, reason) for name in names]
    return [_candidate(name, settings, size, width, layers) for name in names]


def _candidate(name: str, settings: Settings, size: int, width: int, layers: int) -> Candidate:
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models import fairseq_models
    from ..models.training import attention_by_reference, compare_training, training_step

    # Evaluation mode, so that random features draw no new directions; there is no dropout.
    model = fairseq_models.build(name, width, layers, size, settings).eval()
    tokens = fairseq_models.random_tokens(settings, size)
    loss = partial(next_token_loss, model, tokens[:, :_LITERAL])

    def check() -> list[Comparison]:
        weights = list(model.parameters())
        return compare_training(loss, weights, loss, weights, settings.dtype, attention_by_reference(model))

    step = training_step(partial(next_token_loss, model, tokens), model.parameters())
    return Candidate(name, size, size, {TRAINING: step}, check)


_SHAPE = f"one sequence; {LAYERS} layers of width {WIDTH} with {WIDTH // 64} heads of 64; 1,000 words"
CASES = (
    Case(
        "forgetting",
        "Training step of language models whose sums forget",
        "tokens",
        "tokens",
        (512, 2048, 8192, 16384),
        (512,),
        training,
        plotted=False,
        note=f"{_SHAPE}; forward, backward and AdamW",
    ),
    Case(
        "forgetting_decoding",
        "One decoding step of language models whose sums forget",
        "tokens",
        "position",
        (POSITION,),
        (QUICK_POSITION,),
        partial(decoding, names=MODELS, near=None, width=WIDTH, layers=LAYERS),
        memory=False,
        plotted=False,
        note=_SHAPE,
    ),
)
