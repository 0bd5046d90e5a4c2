"""Small models of every kind that the plugin adds to timm, with weights, images and files for them."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import timm_plugin
from common.attention import DaftConvAttention

_FOUR_STAGES = dict(img_size=64, embed_dims=(16, 24, 32, 48), depths=(1, 1, 2, 1), num_heads=4)
_THREE_UNITS = dict(img_size=64, embed_dim=48, depth=3, query_dim=16)

#: Kind of model -> (model name, arguments that make it small).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hier": ("flowformer_hier_test", {}),
    "hier_soft": ("soft_hier_s", _FOUR_STAGES),  # its blocks see maps
    "hier_cosformer": ("cosformer_hier_s", _FOUR_STAGES),  # its layers hold the number of tokens
    "deit": ("flowformer_deit_ti", dict(img_size=64, depth=3)),
    "deit_distilled": ("flowformer_deit_s_distilled", dict(img_size=64, embed_dim=48, num_heads=3, depth=3)),
    "stock_vit": ("deit_tiny_patch16_224", dict(attn_layer="flow", img_size=64, depth=3)),
    "daft_full": ("daft_full_s", dict(img_size=64, embed_dim=48, depth=3, bias_dim=16)),
    "daft_conv": ("daft_conv_test", {}),
    "daft_gumbel": ("daft_conv_test", dict(gumbel_temperature=0.5)),  # draws samples when it trains
    "daft_conv_vit": (
        "deit_tiny_patch16_224",
        dict(attn_layer="daft_conv", class_token=False, global_pool="avg", img_size=64, depth=3),
    ),
    "flash": ("flash_vit_s", _THREE_UNITS),
    "flash_quad": ("flash_quad_vit_s", _THREE_UNITS),
}
HIERARCHICAL = ("hier", "hier_soft", "hier_cosformer")
#: Cases whose blocks are gated attention units.
UNITS = ("flash", "flash_quad")

VIT = "vit_tiny_patch16_224"
SMALL = dict(img_size=32, depth=2, embed_dim=32, num_heads=2, num_classes=3)
#: What attention that sees the grid needs.
PATCHES_ONLY = dict(class_token=False, global_pool="avg")
#: The shape of small stock transformers, and of our models that start from them.
STOCK = dict(img_size=64, embed_dim=48, depth=2)


def build(case: str, **kwargs: Any) -> nn.Module:
    """Build the model of ``case`` with fixed weights, in evaluation mode; ``kwargs`` are passed to create_model."""
    name, small = CASES[case]
    torch.default_generator.manual_seed(0)
    arguments = {**small, **kwargs}
    create = timm_plugin.create_model if "attn_layer" in arguments else timm.create_model
    model = create(name, **arguments).eval()
    draw_filters(model)
    return model


def vit(**kwargs: Any) -> nn.Module:
    """A small stock vision transformer of timm, with fixed weights."""
    torch.default_generator.manual_seed(0)
    return timm.create_model(VIT, **{**SMALL, **kwargs})


def draw_filters(model: nn.Module) -> None:
    """Draw filters of DAFT-conv at random, since they start at 0, where windows change nothing.

    While γ is 0, r receives no gradient either.
    """
    for module in model.modules():
        if isinstance(module, DaftConvAttention):
            for parameter in module.parameters():
                nn.init.normal_(parameter)


def randomise(model: nn.Module, seed: int = 5) -> nn.Module:
    """Draw every parameter of ``model`` again, so that none is zero, one, or another model's initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.eval()


def images(model: nn.Module, batch: int = 2, size: tuple = ()) -> Tensor:
    """Random images (batch, channels, H, W) of the size that the model was built for, or of ``size``."""
    height, width = size or model.patch_embed.img_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, getattr(model, "in_chans", 3), height, width, generator=generator)


def stock_state(name: str = "deit_tiny_patch16_224", **kwargs: Any) -> dict[str, Tensor]:
    """The state dict of a small stock vision transformer."""
    return randomise(timm.create_model(name, **{**STOCK, "num_heads": 4, **kwargs})).state_dict()


def assert_same(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that both hold the same tensors, bit for bit; a failure names the first difference."""
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of the logger ``timm_plugin`` only, since timm's loggers also write."""
    records = [record for record in caplog.records if record.name == "timm_plugin"]
    return [record.message for record in records if record.levelno >= logging.WARNING]


def one_line(said: str, call: Callable[[], object]) -> None:
    """Check that ``call`` is refused with one line of a readable length that matches ``said``."""
    with pytest.raises(ValueError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1500


class Hostile:
    """An object for pickle to execute: it leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.system, (f"touch {self.trace}",)
