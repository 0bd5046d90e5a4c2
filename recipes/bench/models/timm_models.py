"""Image models as timm builds them, and the authors' model with the parameters of our model."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import timm
import torch
from timm.layers import LayerScale
from torch import Tensor, nn
from torch.nn import functional as F

import timm_plugin  # noqa: F401  registers the models
from common.attention import FlowAttention
from timm_plugin.layers.attention import SelfAttention
from timm_plugin.models._weights import released_name
from timm_plugin.models.flowformer import Flowformer

from ..harness.work import Settings
from ..peers import released_attention
from ..peers.released_image_model import released_forward, released_shapes

CLASSES = 1000


def build(name: str, side: int, settings: Settings, **arguments: Any) -> nn.Module:
    """timm's model ``name`` for square images in training mode, without stochastic depth, from a fixed seed.

    ``arguments`` go to the model.

    Raises:
        ValueError: the model has softmax attention that is not fused.
    """
    torch.manual_seed(1)
    model = timm.create_model(name, img_size=side, drop_path_rate=0.0, **arguments).train()
    for module in model.modules():
        if not getattr(module, "fused_attn", True):
            raise ValueError(f"{name} has attention that is not fused; allowed: timm's default, TIMM_FUSED_ATTN=1")
    return settings.to(_with_visible_branches(model))


def _with_visible_branches(model: nn.Module) -> nn.Module:
    """Give linear layers and layer scales larger values: a scale of 1e-5 would hide an error in its branch."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if isinstance(module, LayerScale):
            nn.init.uniform_(module.gamma, 0.5, 1.5)
    return model


def random_images(settings: Settings, batch: int, side: int) -> tuple[Tensor, Tensor]:
    """Images (B, 3, side, side) and their classes (B,)."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(batch, 3, side, side, generator=generator)
    return settings.to(images), torch.randint(CLASSES, (batch,), generator=generator).to(settings.device)


def loss_of(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    """Cross-entropy, as in training."""
    return F.cross_entropy(model(images).float(), classes)


def authors_parameters(model: Flowformer) -> dict[str, Tensor]:
    """The parameters of ``model`` by the authors' names; their layer scale, which our model lacks, is all ones."""
    parameters = dict(model.named_parameters())
    depths = [len(stage.blocks) for stage in model.stages]
    widths = [info["num_chs"] for info in model.feature_info]
    side = model.patch_embed.img_size[0]
    shapes = released_shapes(model.num_classes, side, widths, depths, model.patch_embed.patch_size[0])
    example = next(model.parameters())
    renamed = {}
    for name, shape in shapes.items():
        parameter = parameters.get(released_name(name))
        if parameter is None and not name.endswith(".gamma"):
            raise ValueError(f"the model has no {released_name(name)}; allowed: one of the authors' shape")
        renamed[name] = torch.ones(shape).to(example) if parameter is None else parameter
    return renamed


def authors_loss(state: dict[str, Tensor], model: Flowformer, images: Tensor, classes: Tensor) -> Tensor:
    """The loss of the authors' model with the parameters ``state`` and the depths and heads of ``model``."""
    depths = [len(stage.blocks) for stage in model.stages]
    heads = model.stages[0].blocks[0].attn.num_heads
    return F.cross_entropy(released_forward(images, state, depths, heads).float(), classes)


class _Authors(FlowAttention):
    """The authors' formula in place of our Flow-Attention."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """q, k, v (B, H, N, d) -> (B, H, N, d), without masks or dropout."""
        if dropout_p or key_padding_mask is not None or query_padding_mask is not None:
            raise ValueError(f"dropout_p is {dropout_p}, or a mask is given; allowed: 0 and no mask")
        return released_attention.full(q, k, v)


class _Values(FlowAttention):
    """The values in place of attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *other: Any, **options: Any) -> Tensor:
        """q, k, v (B, H, N, d) -> v."""
        return v


class _OwnToken(FlowAttention):
    """Fused softmax attention in which each token attends to itself alone."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *other: Any, **options: Any) -> Tensor:
        """q, k, v (B, H, N, d) -> (B, H, N, d)."""
        mask = torch.eye(q.shape[2], dtype=torch.bool, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def authors_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Compute every Flow-Attention of ``model`` by the authors' formula."""
    return _replaced_attention(model, _Authors)


def no_attention(model: nn.Module) -> AbstractContextManager[None]:
    """Use the values as the output of every Flow-Attention of ``model``."""
    return _replaced_attention(model, _Values)


def attention_to_itself(model: nn.Module) -> AbstractContextManager[None]:
    """Let each token of ``model`` attend to itself alone, which gives the values as well."""
    return _replaced_attention(model, _OwnToken)


@contextmanager
def _replaced_attention(model: nn.Module, mechanism: type[FlowAttention]) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
    mechanisms = [layer.attention for layer in layers]
    try:
        for layer in layers:
            layer.attention = mechanism()
        yield
    finally:
        for layer, mechanism in zip(layers, mechanisms):
            layer.attention = mechanism
