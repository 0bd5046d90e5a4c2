"""Training steps of image models: our and the authors' hierarchical model, DeiT with Flow-Attention and softmax."""

from functools import partial
from typing import Any

import timm
import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional as F

import timm_plugin  # noqa: F401  registers the models
from timm_plugin.models._weights import released_name
from timm_plugin.models.flowformer import Flowformer

from .measure import TRAINING, Candidate, Case, Place
from .models import attention_by_reference, attention_written_out, training_errors, training_step
from .peers.released_image_model import released_forward, released_shapes

CLASSES = 1000
PAPER, RELEASED, AUTHORS = "flowformer_hier_s", "flowformer_hier_s_12h", "the authors' model"
FLOW, SOFTMAX = "flowformer_deit_s", "deit_small_patch16_224"


def built(name: str, side: int, place: Place, **arguments: Any) -> nn.Module:
    """timm's model for square images in training mode, without stochastic depth, from a fixed seed."""
    torch.manual_seed(1)
    model = timm.create_model(name, img_size=side, drop_path_rate=0.0, **arguments).train()
    for module in model.modules():
        if not getattr(module, "fused_attn", True):
            raise ValueError(f"{name} has attention that is not fused; allowed: timm's default, TIMM_FUSED_ATTN=1")
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, LayerScale):  # a scale of 1e-5 would hide an error in its branch
            nn.init.uniform_(module.gamma, 0.5, 1.5)
    return place(model)


def loss_of(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy, as in training."""
    return F.cross_entropy(model(images).float(), classes)


def random_images(batch: int, side: int, place: Place) -> tuple[Tensor, Tensor]:
    """Images (B, 3, side, side) and their classes (B,)."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return place(images), place(torch.randint(CLASSES, (batch,), generator=generator))


def authors_parameters(model: Flowformer) -> dict[str, Tensor]:
    """The parameters of ``model`` by the authors' names; a layer scale that it lacks is all ones."""
    ours = dict(model.named_parameters())
    widths, depths = [x["num_chs"] for x in model.feature_info], [len(stage.blocks) for stage in model.stages]
    patch_embed = model.patch_embed
    shapes = released_shapes(model.num_classes, patch_embed.img_size[0], widths, depths, patch_embed.patch_size[0])
    ones = next(model.parameters()).new_ones
    return {name: ours.get(released_name(name), ones(shape)) for name, shape in shapes.items()}


def authors_loss(state: dict[str, Tensor], model: Flowformer, images: Tensor, classes: Tensor) -> Tensor:
    """The loss of the authors' model with the parameters ``state`` and the depths and heads of ``model``."""
    depths, heads = [len(stage.blocks) for stage in model.stages], model.stages[0].blocks[0].attn.num_heads
    return F.cross_entropy(released_forward(images, state, depths, heads).float(), classes)


def hierarchical(side: int, place: Place, batch: int = 4, **arguments: Any) -> list[Candidate]:
    """The paper's model, that model with the number of heads of the authors' code, and the authors' model.

    Ours are compared with the authors' formulas, and the authors' model with ours.
    """
    images, classes = random_images(batch, side, place)
    sample, made = (images[:1], classes[:1]), []
    for name in (PAPER, RELEASED):
        model = built(name, side, place, **arguments)
        shared, weights = authors_parameters(model), list(model.parameters())
        ours, theirs = partial(loss_of, model), partial(authors_loss, shared, model)
        check = partial(training_errors, partial(ours, *sample), weights, partial(theirs, *sample), weights)
        step = training_step(partial(ours, images, classes), weights)
        made.append(Candidate(name, batch, {TRAINING: step}, check, is_model=True))
    state = {name: x.detach().clone().requires_grad_() for name, x in shared.items()}
    theirs = partial(authors_loss, state, model)
    pair = (partial(theirs, *sample), list(state.values()), partial(ours, *sample), list(shared.values()))
    step = training_step(partial(theirs, images, classes), state.values())
    return [*made, Candidate(AUTHORS, batch, {TRAINING: step}, partial(training_errors, *pair), is_model=True)]


def deit(side: int, place: Place, **arguments: Any) -> list[Candidate]:
    """DeiT-S with Flow-Attention, and with timm's fused softmax attention; larger images one at a time."""
    images, classes = random_images(4 if side == 224 else 1, side, place)
    made = []
    for name in (FLOW, SOFTMAX):
        model = built(name, side, place, **arguments)

        def check(name: str = name) -> dict[str, float]:
            at = min(side, 224)  # the maps of the largest images would take gigabytes
            model = built(name, at, place, **arguments)
            literal = attention_by_reference(model) if name == FLOW else attention_written_out()
            loss, weights = partial(loss_of, model, *random_images(1, at, place)), list(model.parameters())
            return training_errors(loss, weights, loss, weights, literal)

        step = training_step(partial(loss_of, model, images, classes), model.parameters())
        made.append(Candidate(name, len(images), {TRAINING: step}, check, is_model=True))
    return made


_AXES = {"axis": "side of the images", "unit": "images", "quick": 64}
CASES = {
    "hier": Case("Training step of the hierarchical image model, batches of 4", (224,), hierarchical, AUTHORS, **_AXES),
    "gpu_hier": Case(
        "Training step of the hierarchical image model on a GPU, batches of 64",
        (224, 512),
        partial(hierarchical, batch=64),
        AUTHORS,
        **_AXES,
        devices=("cuda",),
    ),
    "deit": Case(
        "Training step of DeiT-S, batches of 4 at 224² and of 1 above", (224, 512, 1024), deit, SOFTMAX, **_AXES
    ),
}
