"""Training steps of image models: our and the authors' hierarchical model, DeiT with Flow-Attention and softmax."""

from typing import Any

from torch import Tensor

from ..harness.packages import missing
from ..harness.work import TRAINING, Absent, Candidate, Case, Comparison, Settings

HIERARCHICAL, RELEASED_HEADS, AUTHORS = "flowformer_hier_s", "flowformer_hier_s_12h", "the authors' model"
NO_ATTENTION = "flowformer_hier_s without attention"
FLOW, SOFTMAX = "flowformer_deit_s", "deit_small_patch16_224"
BATCH = 4
#: Side of the images -> images in a batch; 1 for any other side.
_DEIT_BATCH = {224: 4, 512: 1, 1024: 1}
#: Side of the images of the comparison with softmax attention written out as a map.
_MAP_SIDE = 224


def hierarchical(settings: Settings, size: int, batch: int = BATCH, **arguments: Any) -> list[Candidate | Absent]:
    """The paper's model, that model with the number of heads of the authors' code, the authors' model, and a bound.

    The bound is the paper's model with the values as the output of attention: as if attention cost nothing.
    ``arguments`` go to all models.
    """
    reason = missing("timm")
    if reason is not None:
        return [Absent(name, size, reason) for name in (HIERARCHICAL, RELEASED_HEADS, AUTHORS, NO_ATTENTION)]
    models = [_hierarchical(name, settings, size, batch, arguments) for name in (HIERARCHICAL, RELEASED_HEADS)]
    bound = _without_attention(settings, size, batch, arguments)
    return [*models, _authors(settings, size, batch, arguments), bound]


def _hierarchical(name: str, settings: Settings, size: int, batch: int, arguments: dict[str, Any]) -> Candidate:
    # Imported here because timm takes seconds to import, which other cases do not need.
    from ..models import timm_models
    from ..models.training import compare_training, training_step

    model = timm_models.build(name, size, settings, **arguments)
    images, classes = timm_models.random_images(settings, batch, size)

    def check() -> list[Comparison]:
        # The authors' formulas with the parameters and the number of heads of our model.
        state = timm_models.authors_parameters(model)
        return compare_training(
            lambda: timm_models.loss_of(model, images[:1], classes[:1]),
            model.parameters(),
            lambda: timm_models.authors_loss(state, model, images[:1], classes[:1]),
            model.parameters(),
            settings.dtype,
        )

    step = training_step(lambda: timm_models.loss_of(model, images, classes), model.parameters())
    return Candidate(name, size, batch, {TRAINING: step}, check)


def _authors(settings: Settings, size: int, batch: int, arguments: dict[str, Any]) -> Candidate:
    from ..models import timm_models
    from ..models.training import compare_training, training_step

    model = timm_models.build(RELEASED_HEADS, size, settings, **arguments)
    shared = timm_models.authors_parameters(model)
    images, classes = timm_models.random_images(settings, batch, size)
    state = {name: x.detach().clone().requires_grad_() for name, x in shared.items()}

    def loss(count: int) -> Tensor:
        return timm_models.authors_loss(state, model, images[:count], classes[:count])

    def check() -> list[Comparison]:
        return compare_training(
            lambda: loss(1),
            state.values(),
            lambda: timm_models.loss_of(model, images[:1], classes[:1]),
            shared.values(),
            settings.dtype,
        )

    return Candidate(AUTHORS, size, batch, {TRAINING: training_step(lambda: loss(batch), state.values())}, check)


def _without_attention(settings: Settings, size: int, batch: int, arguments: dict[str, Any]) -> Candidate:
    from ..models import timm_models
    from ..models.training import compare_training, training_step

    model = timm_models.build(HIERARCHICAL, size, settings, **arguments)
    images, classes = timm_models.random_images(settings, batch, size)

    def loss(count: int) -> Tensor:
        with timm_models.no_attention(model):
            return timm_models.loss_of(model, images[:count], classes[:count])

    def check() -> list[Comparison]:
        weights, to_itself = list(model.parameters()), timm_models.attention_to_itself(model)
        return compare_training(
            lambda: loss(1),
            weights,
            lambda: timm_models.loss_of(model, images[:1], classes[:1]),
            weights,
            settings.dtype,
            to_itself,
        )

    step = training_step(lambda: loss(batch), model.parameters())
    return Candidate(NO_ATTENTION, size, batch, {TRAINING: step}, check)


def deit(settings: Settings, size: int, **arguments: Any) -> list[Candidate | Absent]:
    """DeiT-S with Flow-Attention, and with timm's fused softmax attention; ``arguments`` go to both models."""
    reason = missing("timm")
    if reason is not None:
        return [Absent(name, size, reason) for name in (FLOW, SOFTMAX)]
    return [_deit(name, settings, size, arguments) for name in (FLOW, SOFTMAX)]


def _deit(name: str, settings: Settings, size: int, arguments: dict[str, Any]) -> Candidate:
    from ..models import timm_models
    from ..models.training import attention_written_out, compare_training, training_step

    model = timm_models.build(name, size, settings, **arguments)
    batch = _DEIT_BATCH.get(size, 1)
    images, classes = timm_models.random_images(settings, batch, size)

    def check() -> list[Comparison]:
        if name == FLOW:
            checked, side, literal = model, size, timm_models.authors_attention(model)
        else:  # the attention maps of the largest images would take gigabytes
            side = min(size, _MAP_SIDE)
            checked, literal = timm_models.build(name, side, settings, **arguments), attention_written_out()
        sample = timm_models.random_images(settings, 1, side)

        def loss() -> Tensor:
            return timm_models.loss_of(checked, *sample)

        weights = list(checked.parameters())
        return compare_training(loss, weights, loss, weights, settings.dtype, literal)

    step = training_step(lambda: timm_models.loss_of(model, images, classes), model.parameters())
    return Candidate(name, size, batch, {TRAINING: step}, check)


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
        note=f"batches of {BATCH}; forward, backward and AdamW; no stochastic depth",
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
