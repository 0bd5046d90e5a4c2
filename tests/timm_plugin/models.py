"""Small models of every kind the plugin gives timm, and images for them."""

import timm
import torch
from torch import Tensor, nn

import timm_plugin  # noqa: F401  (registers the models)

#: Everything registered.
REGISTERED = (
    "flowformer_deit_s",
    "flowformer_deit_ti",
    "flowformer_hier_digits",
    "flowformer_hier_s",
    "flowformer_hier_s_12h",
    "flowformer_hier_test",
    "flowformer_hier_ti",
)

#: Case name -> (model name, arguments that make it small).
CASES = {
    "hier": ("flowformer_hier_test", {}),
    "hier_dynamic": ("flowformer_hier_test", dict(dynamic_img_size=True)),
    "hier_12h": (
        "flowformer_hier_s_12h",
        dict(img_size=64, embed_dims=(24, 36, 48, 60), depths=(1, 1, 2, 1)),
    ),
    "digits": ("flowformer_hier_digits", {}),
    "deit": ("flowformer_deit_ti", dict(img_size=64, depth=3)),
    "stock_vit": ("deit_tiny_patch16_224", dict(attn_layer="flow", img_size=64, depth=3)),
}
HIERARCHICAL = ("hier", "hier_dynamic", "hier_12h", "digits")


def build(case: str, **kwargs) -> nn.Module:
    """The model of ``case`` with fixed weights, in evaluation mode; ``kwargs`` are create_model's."""
    name, small = CASES[case]
    torch.manual_seed(0)
    return timm.create_model(name, **{**small, **kwargs}).eval()


def images(model: nn.Module, batch: int = 2, size: tuple = ()) -> Tensor:
    """(batch, channels, H, W) of noise in the size the model was built for, or ``size``."""
    height, width = size or model.patch_embed.img_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, model.in_chans, height, width, generator=generator)
