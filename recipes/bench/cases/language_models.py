"""Language models: a training step of FLASH and of Transformer++, and one decoding step at two positions."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import ATTENTIONS

from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.packages import missing
from ..harness.work import DECODING, TRAINING, Absent, Amount, Candidate, Case, Comparison, Settings
from .attentions import is_causal

TRAINED = ("flash_lm", "transformer_pp_lm")
STOCK = "transformer_lm"
DECODED = ("flowformer_lm", "linear_lm", "cosformer_lm", "flash_lm", "daft_conv_lm", STOCK)
#: Models of gated attention units, timed in addition to the models of every attention.
UNITS = ("flash_lm", "flash_quad_lm")
#: Hypotheses of a beam.
BEAM = 5
#: Shape of the generation: hypotheses of all beams, tokens of a sample, width and layers of its small models.
ROWS, SAMPLE, GENERATION_WIDTH, GENERATION_LAYERS = 40, 64, 32, 2
#: Positions at which a decoding step is timed, in the same rounds because they are compared with each other.
NEAR, FAR, QUICK_FAR = 128, 16384, 1024
TRAINING_LAYERS, DECODING_LAYERS, DECODING_WIDTH = 2, 6, 512
#: flash_lm's chunk size and its channels of queries and keys; the vocabulary of all models.
CHUNK, QUERY, VOCABULARY = 256, 128, 1000
#: Tokens of the comparison with attention written out as a map: more than two chunks, not a multiple of the size.
_MAP = 700


def training(width: int, layers: int = TRAINING_LAYERS) -> Callable[[Settings, int], list[Candidate | Absent]]:
    """A function that builds a training step of each model of ``width``, on one sequence of a given length."""

    def candidates(settings: Settings, size: int) -> list[Candidate | Absent]:
        reason = missing("fairseq")
        if reason is not None:
            return [Absent(name, size, reason) for name in TRAINED]
        return [_training_candidate(name, width, layers, settings, size) for name in TRAINED]

    return candidates


def _training_candidate(architecture: str, width: int, layers: int, settings: Settings, size: int) -> Candidate:
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models import fairseq_models
    from ..models.training import attention_written_out, compare_training, training_step

    model = fairseq_models.build(architecture, width, layers, size, settings).train()
    tokens = fairseq_models.random_tokens(settings, size)

    def loss() -> Tensor:
        return next_token_loss(model, tokens[:, :_MAP])

    def check() -> list[Comparison]:
        weights = list(model.parameters())
        return compare_training(loss, weights, loss, weights, settings.dtype, attention_written_out())

    step = training_step(lambda: next_token_loss(model, tokens), model.parameters())
    return Candidate(architecture, size, size, {TRAINING: step}, check)


def training_work(width: int, layers: int, name: str, size: int, run: str) -> Amount:
    """The least work of a training step of one sequence: all products, and AdamW's passes over the weights.

    Multiply-adds per token, where d is the width, n the number of tokens, C the chunk size, s the channels of queries
    and e = 2d those of values. A gated attention unit: projections d (2e + s) and e d, the linear part 2 s e, and the
    map of a chunk with its product with values C (s + e), times 0.625 as blocks of 64 rows end at the diagonal. A
    Transformer++ layer: projections 12 d², causal softmax n d. The backward pass adds twice as many and computes the
    maps again (softmax: half a product, n d / 2; a chunk: 0.625 C s). Weights, gradients and both moments move twice.
    Any ``name`` but flash_lm counts as Transformer++; ``run`` is always the training step.
    """
    d, e, s, words = width, 2 * width, QUERY, VOCABULARY
    if name == "flash_lm":
        weights = 2 * layers * (d * (2 * e + s) + e * d)
        unit = 2 * s * e + 0.625 * CHUNK * (s + e)
        products = 3 * (weights + 2 * layers * unit) + 2 * layers * 0.625 * CHUNK * s
    else:
        weights = layers * 12 * d**2
        products = 3 * weights + layers * 3.5 * size * d
    return Amount(2 * size * (products + 3 * d * words), 8 * (weights + d * words))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of the next token at each of ``tokens`` (B, n); the first token follows the last."""
    logits, _ = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def decoding(
    settings: Settings,
    size: int,
    width: int = DECODING_WIDTH,
    layers: int = DECODING_LAYERS,
    names: tuple[str, ...] = DECODED,
    near: int | None = NEAR,
) -> list[Candidate | Absent]:
    """The models ``names`` decode one token at position ``size`` and, unless it is None, at ``near``."""
    return _decoding(names, settings, (size,) if near is None else (near, size), 1, width, layers)


def beam_decoding(
    settings: Settings, size: int, width: int = DECODING_WIDTH, layers: int = DECODING_LAYERS
) -> list[Candidate | Absent]:
    """Every model decodes one token of each hypothesis of a beam at position ``size``."""
    return _decoding(DECODED, settings, (size,), BEAM, width, layers)


def _decoding(
    names: tuple[str, ...], settings: Settings, positions: tuple[int, ...], rows: int, width: int, layers: int
) -> list[Candidate | Absent]:
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, position, reason) for name in names for position in positions]
    return [
        candidate
        for name in names
        for candidate in _decoding_candidates(name, settings, positions, rows, width, layers)
    ]


def _decoding_candidates(
    architecture: str, settings: Settings, positions: tuple[int, ...], rows: int, width: int, layers: int
) -> list[Candidate]:
    from ..models import fairseq_models

    far = max(positions)
    model = fairseq_models.build(architecture, width, layers, far + 1, settings).eval()
    # The full forward of fairseq's own attention would allocate several tensors of position² per head.
    twin = None
    if architecture == STOCK:
        twin = fairseq_models.build("softmax_lm", width, layers, far + 1, settings).eval()
        twin.load_state_dict(model.state_dict())
    return [_decoding_candidate(architecture, settings, position, rows, model, twin) for position in positions]


def _decoding_candidate(
    name: str, settings: Settings, position: int, rows: int, model: nn.Module, twin: nn.Module | None
) -> Candidate:
    from ..models.decoding import decoding_step, reach
    from ..models.fairseq_models import random_tokens

    tokens = random_tokens(settings, position + 1, rows)
    state, expected = reach(model, tokens, twin)
    step = decoding_step(model, tokens, state)

    def check() -> list[Comparison]:
        return [compare("logits", step()[0], expected, MODEL_TOLERANCES[settings.dtype])]

    return Candidate(name, position, rows, {DECODING: step}, check)


def beam_generation(settings: Settings, size: int) -> list[Candidate | Absent]:
    """Every model that can decode generates ``size`` tokens of ``ROWS`` hypotheses."""
    names = (STOCK, *(f"{name}_lm" for name in ATTENTIONS if is_causal(name)), *UNITS)
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, size, reason) for name in names]
    return [_generation_candidate(name, settings, size) for name in names]


def _generation_candidate(name: str, settings: Settings, size: int) -> Candidate:
    from ..models import decoding, fairseq_models

    layers = GENERATION_LAYERS // 2 if name in UNITS else GENERATION_LAYERS  # ``build`` counts two units as one layer
    model = fairseq_models.build(name, GENERATION_WIDTH, layers, size, settings).eval()
    tokens = fairseq_models.random_tokens(settings, size, ROWS)
    generate, sequences = decoding.beam_generation(model, tokens, BEAM)

    def check() -> list[Comparison]:
        with torch.no_grad():
            expected = model(sequences)[0][:, -1]
        return [compare("logits", generate()[0], expected, MODEL_TOLERANCES[settings.dtype])]

    return Candidate(name, size, size * ROWS, {DECODING: generate}, check)


def _training_case(name: str, width: int, sizes: tuple[int, ...], devices: tuple[str, ...]) -> Case:
    return Case(
        name,
        f"Training step of flash_lm and transformer_pp_lm, width {width}",
        "tokens",
        "tokens",
        sizes,
        sizes[:1],
        training(width),
        devices,
        least_work=partial(training_work, width, TRAINING_LAYERS),
        note=f"one sequence; {TRAINING_LAYERS} layers with {width // 64} heads of 64, or {2 * TRAINING_LAYERS} gated "
        "attention units; 1,000 words; forward, backward and AdamW",
    )


_DECODED_SHAPE = (
    f"width {DECODING_WIDTH}, {DECODING_LAYERS} layers or {2 * DECODING_LAYERS} gated attention units; 1,000 words"
)
CASES = (
    _training_case("flash_lm_256", 256, (512, 2048, 8192), ("cpu",)),
    _training_case("flash_lm_512", 512, (512, 2048, 8192), ("cpu",)),
    _training_case("flash_lm_cuda", 768, (2048, 8192, 32768, 131072), ("cuda",)),
    Case(
        "decoding",
        "One decoding step",
        "tokens",
        "position",
        (FAR,),
        (QUICK_FAR,),
        decoding,
        memory=False,
        plotted=False,
        note=f"one sequence; {_DECODED_SHAPE}",
    ),
    Case(
        "beam_decoding",
        f"One decoding step of a beam of {BEAM}",
        "tokens",
        "position",
        (NEAR,),
        (NEAR,),
        beam_decoding,
        memory=False,
        plotted=False,
        note=f"{BEAM} hypotheses, each of which goes on from another; {_DECODED_SHAPE}",
    ),
    Case(
        "beam_generation",
        f"Tokens of {ROWS} hypotheses, from the first one on",
        "tokens",
        "tokens",
        (SAMPLE,),
        (SAMPLE // 4,),
        beam_generation,
        memory=False,
        plotted=False,
        note=f"a beam of {BEAM}, reordered before each token; width {GENERATION_WIDTH}, one head, {GENERATION_LAYERS} "
        f"layers or gated attention units; 1,000 words",
    ),
)
