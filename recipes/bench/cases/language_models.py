"""Language models: a training step of FLASH beside Transformer++, and a decoding step by position."""

from collections.abc import Callable
from functools import lru_cache

from torch import Tensor, nn
from torch.nn import functional as F

from ..compare import MODEL_TOLERANCES, compare
from ..packages import missing
from ..work import DECODING, TRAINING, Absent, Case, Comparison, Form, Settings

TRAINED = ("flash_lm", "transformer_pp_lm")
DECODED = ("flowformer_lm", "flash_lm", "transformer_lm")
#: Where a step is timed. All positions in the same rounds, since they are compared with one another.
NEAR, FAR, QUICK_FAR = 128, 16384, 1024
_TRAINING_LAYERS, _DECODING_LAYERS, _DECODING_WIDTH = 2, 6, 512
#: Tokens of the comparison with attention written out as a map: more than two chunks, and no whole number of them.
_MAP = 700


def training(width: int) -> Callable[[Settings, int], list[Form | Absent]]:
    """Forms that train models of ``width`` on one sequence of so many tokens."""

    def forms(settings: Settings, size: int) -> list[Form | Absent]:
        reason = missing("fairseq")
        if reason is not None:
            return [Absent(name, size, reason) for name in TRAINED]
        return [_training_form(name, width, settings, size) for name in TRAINED]

    return forms


def _training_form(architecture: str, width: int, settings: Settings, size: int) -> Form:
    # Hosts take seconds to import, and a benchmark of something else does without.
    from ..models import fairseq_models
    from ..models.training import attention_written_out, compare_training, training_step

    model = fairseq_models.build(architecture, width, _TRAINING_LAYERS, size, settings).train()
    tokens = fairseq_models.random_tokens(settings, size)

    def reference() -> Tensor:
        with attention_written_out():
            return _loss(model, tokens[:, :_MAP])

    def check() -> list[Comparison]:
        return compare_training(
            lambda: _loss(model, tokens[:, :_MAP]), model.parameters(), reference, model.parameters(), settings.dtype
        )

    step = training_step(lambda: _loss(model, tokens), model.parameters())
    return Form(architecture, size, size, {TRAINING: step}, check)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, _ = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def decoding(settings: Settings, size: int) -> list[Form | Absent]:
    """Forms that decode one token, near the start and at ``size``."""
    reason = missing("fairseq")
    places = [(name, position) for name in DECODED for position in (NEAR, size)]
    if reason is not None:
        return [Absent(name, position, reason) for name, position in places]
    return [_decoding_form(name, settings, position, size + 1) for name, position in places]


def _decoding_form(architecture: str, settings: Settings, position: int, longest: int) -> Form:
    from ..models.decoding import decoding_step, reach
    from ..models.fairseq_models import random_tokens

    model = _decoder(architecture, settings, longest)
    tokens = random_tokens(settings, position + 1)
    # fairseq's own full forward would make several tensors of position² per head.
    twin = _decoder("softmax_lm", settings, longest) if architecture == "transformer_lm" else None
    if twin is not None:
        twin.load_state_dict(model.state_dict())
    state, expected = reach(model, tokens, twin)
    step = decoding_step(model, tokens, state)

    def check() -> list[Comparison]:
        return [compare("logits", step()[0], expected, MODEL_TOLERANCES[settings.dtype])]

    return Form(architecture, position, 1, {DECODING: step}, check)


@lru_cache(maxsize=len(DECODED) + 1)
def _decoder(architecture: str, settings: Settings, longest: int) -> nn.Module:
    from ..models import fairseq_models

    return fairseq_models.build(architecture, _DECODING_WIDTH, _DECODING_LAYERS, longest, settings).eval()


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
        note=f"one sequence; {_TRAINING_LAYERS} layers with {width // 64} heads of 64, or {2 * _TRAINING_LAYERS} gated "
        "attention units; 1,000 words; forward, backward and AdamW",
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
        note=f"one sequence; width {_DECODING_WIDTH}, {_DECODING_LAYERS} layers or {2 * _DECODING_LAYERS} gated "
        "attention units; 1,000 words",
    ),
)
