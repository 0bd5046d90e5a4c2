"""Training steps of image models: the hierarchical one beside the authors', and DeiT with Flow-Attention by size."""

from torch import Tensor

from ..packages import missing
from ..work import TRAINING, Absent, Case, Comparison, Form, Settings

HIERARCHICAL, RELEASED_HEADS, AUTHORS = "flowformer_hier_s", "flowformer_hier_s_12h", "the authors' model"
FLOW, SOFTMAX = "flowformer_deit_s", "deit_small_patch16_224"
_BATCH = 4
#: Images in a batch by their side; one for any other.
_DEIT_BATCH = {224: 4, 512: 1, 1024: 1}
#: Side of the images of the comparison with softmax attention written out as a map.
_MAP_SIDE = 224


def hierarchical(settings: Settings, size: int) -> list[Form | Absent]:
    """The paper's model, the same with the authors' number of heads, and theirs."""
    reason = missing("timm")
    if reason is not None:
        return [Absent(name, size, reason) for name in (HIERARCHICAL, RELEASED_HEADS, AUTHORS)]
    forms = [_hierarchical(name, settings, size) for name in (HIERARCHICAL, RELEASED_HEADS)]
    return [*forms, _authors(settings, size)]


def _hierarchical(name: str, settings: Settings, size: int) -> Form:
    # Hosts take seconds to import, and a benchmark of something else does without.
    from ..models import timm_models
    from ..models.training import compare_training, training_step

    model = timm_models.build(name, size, settings)
    images, classes = timm_models.random_images(settings, _BATCH, size)

    def check() -> list[Comparison]:
        # The authors' formulas on the very parameters of the model, with its number of heads.
        state = timm_models.authors_parameters(model)
        return compare_training(
            lambda: timm_models.loss_of(model, images[:1], classes[:1]), model.parameters(),
            lambda: timm_models.authors_loss(state, model, images[:1], classes[:1]), model.parameters(), settings.dtype,
        )  # fmt: skip

    step = training_step(lambda: timm_models.loss_of(model, images, classes), model.parameters())
    return Form(name, size, _BATCH, {TRAINING: step}, check)


def _authors(settings: Settings, size: int) -> Form:
    from ..models import timm_models
    from ..models.training import compare_training, training_step

    model = timm_models.build(RELEASED_HEADS, size, settings)
    shared = timm_models.authors_parameters(model)
    images, classes = timm_models.random_images(settings, _BATCH, size)
    state = {name: x.detach().clone().requires_grad_() for name, x in shared.items()}

    def loss(count: int) -> Tensor:
        return timm_models.authors_loss(state, model, images[:count], classes[:count])

    def check() -> list[Comparison]:
        return compare_training(
            lambda: loss(1), state.values(),
            lambda: timm_models.loss_of(model, images[:1], classes[:1]), shared.values(), settings.dtype,
        )  # fmt: skip

    return Form(AUTHORS, size, _BATCH, {TRAINING: training_step(lambda: loss(_BATCH), state.values())}, check)


def deit(settings: Settings, size: int) -> list[Form | Absent]:
    """DeiT-S with Flow-Attention, and with timm's fused softmax attention."""
    reason = missing("timm")
    if reason is not None:
        return [Absent(name, size, reason) for name in (FLOW, SOFTMAX)]
    return [_deit(name, settings, size) for name in (FLOW, SOFTMAX)]


def _deit(name: str, settings: Settings, size: int) -> Form:
    from ..models import timm_models
    from ..models.training import attention_written_out, compare_training, training_step

    model = timm_models.build(name, size, settings)
    batch = _DEIT_BATCH.get(size, 1)
    images, classes = timm_models.random_images(settings, batch, size)

    def check() -> list[Comparison]:
        if name == FLOW:
            checked, side, literal = model, size, timm_models.authors_attention(model)
        else:  # a map of the longest images would be gigabytes
            side = min(size, _MAP_SIDE)
            checked, literal = timm_models.build(name, side, settings), attention_written_out()
        sample = timm_models.random_images(settings, 1, side)

        def reference() -> Tensor:
            with literal:
                return timm_models.loss_of(checked, *sample)

        return compare_training(
            lambda: timm_models.loss_of(checked, *sample), checked.parameters(), reference, checked.parameters(),
            settings.dtype,
        )  # fmt: skip

    step = training_step(lambda: timm_models.loss_of(model, images, classes), model.parameters())
    return Form(name, size, batch, {TRAINING: step}, check)


CASES = (
    Case(
        "hier",
        "Training step of the hierarchical image model",
        "images",
        "side of the images",
        (224,),
        (64,),
        hierarchical,
        plotted=False,
        note=f"batches of {_BATCH}; forward, backward and AdamW; no stochastic depth",
    ),
    Case(
        "deit",
        "Training step of DeiT-S",
        "images",
        "side of the images",
        tuple(_DEIT_BATCH),
        (64,),
        deit,
        note="batches of "
        + ", ".join(f"{n} at {side}²" for side, n in _DEIT_BATCH.items())
        + "; forward, backward and AdamW; no stochastic depth",
    ),
)
