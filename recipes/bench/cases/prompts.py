"""Generation after a long prompt: read in one pass, or token by token as fairseq's own generator does."""

from functools import partial

from ..harness.compare import MODEL_TOLERANCES, compare
from ..harness.packages import missing
from ..harness.work import Absent, Candidate, Case, Comparison, Settings

ARCHITECTURES = ("flowformer_lm", "flash_lm")
#: Candidate -> its architecture, and whether it reads the prompt in one pass.
FORMS = {
    f"{name}, {way}": (name, one_pass)
    for name in ARCHITECTURES
    for way, one_pass in (("one pass", True), ("token by token", False))
}
#: Name of the run.
GENERATION = "generation"
LENGTH, QUICK_LENGTH = 8192, 256
WORDS, WIDTH, LAYERS = 16, 128, 2
#: Tokens of the prompt whose scores are compared with the forward pass: more than two chunks of flash_lm.
_CHECK = 600


def generations(settings: Settings, size: int) -> list[Candidate | Absent]:
    """Every form after a prompt of ``size`` tokens."""
    reason = missing("fairseq")
    if reason is not None:
        return [Absent(name, size, reason) for name in FORMS]
    return [_candidate(name, settings, size) for name in FORMS]


def _candidate(name: str, settings: Settings, size: int) -> Candidate:
    # Imported here because fairseq takes seconds to import, which other cases do not need.
    from ..models import fairseq_models
    from ..models.prompts import generation, scores

    architecture, one_pass = FORMS[name]
    model = fairseq_models.build(architecture, WIDTH, LAYERS, max(size, _CHECK) + WORDS + 2, settings).eval()
    generate = partial(generation, model, words=WORDS, one_pass=one_pass)

    def check() -> list[Comparison]:
        tokens, generated_scores = generate(fairseq_models.random_tokens(settings, min(size, _CHECK)))()
        return [compare("scores", generated_scores, scores(model, tokens), MODEL_TOLERANCES[settings.dtype])]

    run = generate(fairseq_models.random_tokens(settings, size))
    return Candidate(name, size, size + WORDS, {GENERATION: run}, check)


CASES = (
    Case(
        "prompts",
        "Generation after a prompt",
        "tokens",
        "tokens of the prompt",
        (LENGTH,),
        (QUICK_LENGTH,),
        generations,
        devices=("cpu",),
        memory=False,
        plotted=False,
        note=f"{WORDS} words, greedily, for one sentence; width {WIDTH}, {LAYERS} layers or {2 * LAYERS} gated "
        "attention units; 1,000 words",
    ),
)
