"""Small models of every kind that the plugin adds to timm, and images for them."""

import timm
import torch
from torch import Tensor, nn

import timm_plugin
from common.attention import DaftConvAttention

#: Every registered model.
REGISTERED = tuple(
    "cosformer_hier_s daft_conv_b_384 daft_conv_s daft_conv_s_h16 daft_conv_test daft_full_s favor_hier_s "
    "flash_quad_vit_s flash_vit_s flowformer_deit_s flowformer_deit_s_distilled flowformer_deit_ti "
    "flowformer_hier_digits flowformer_hier_s flowformer_hier_s_12h flowformer_hier_test flowformer_hier_ti "
    "linear_hier_s longformer_hier_s mixer_deit_s nystrom_hier_s reformer_hier_s soft_hier_s softmax_hier_s "
    "yoso_hier_s".split()
)

_FOUR_STAGES = dict(img_size=64, embed_dims=(16, 24, 32, 48), depths=(1, 1, 2, 1), num_heads=4)
_THREE_UNITS = dict(img_size=64, embed_dim=48, depth=3, query_dim=16)

#: Case name -> (model name, arguments that make it small).
CASES = {
    "hier": ("flowformer_hier_test", {}),
    "hier_dynamic": ("flowformer_hier_test", dict(dynamic_img_size=True)),
    "hier_12h": (
        "flowformer_hier_s_12h",
        dict(img_size=64, embed_dims=(24, 36, 48, 60), depths=(1, 1, 2, 1)),
    ),
    "digits": ("flowformer_hier_digits", {}),
    "hier_soft": ("soft_hier_s", _FOUR_STAGES),
    "hier_cosformer": ("cosformer_hier_s", _FOUR_STAGES),
    "deit": ("flowformer_deit_ti", dict(img_size=64, depth=3)),
    "deit_distilled": ("flowformer_deit_s_distilled", dict(img_size=64, embed_dim=48, num_heads=3, depth=3)),
    "stock_vit": ("deit_tiny_patch16_224", dict(attn_layer="flow", img_size=64, depth=3)),
    "daft_full": ("daft_full_s", dict(img_size=64, embed_dim=48, depth=3, bias_dim=16)),
    "daft_full_free": ("daft_full_s", dict(img_size=64, embed_dim=48, depth=3, bias_dim=0, query=False)),
    "daft_conv": ("daft_conv_test", {}),
    "daft_gumbel": ("daft_conv_test", dict(gumbel_temperature=0.5)),
    "daft_local": ("daft_conv_test", dict(local_only=True, query=False, reparameterize=False)),
    "daft_conv_vit": (
        "deit_tiny_patch16_224",
        dict(attn_layer="daft_conv", class_token=False, global_pool="avg", img_size=64, depth=3),
    ),
    "flash": ("flash_vit_s", _THREE_UNITS),
    "flash_quad": ("flash_quad_vit_s", _THREE_UNITS),
}
HIERARCHICAL = ("hier", "hier_dynamic", "hier_12h", "digits", "hier_soft", "hier_cosformer")
COLUMNAR = tuple(case for case in CASES if case not in HIERARCHICAL)
#: Cases whose blocks are gated attention units.
UNITS = ("flash", "flash_quad")
#: Cases that torch.jit.script does not support; a ValueError says which are supported.
NOT_SCRIPTABLE = ("hier_soft", "hier_cosformer", *UNITS)
#: Cases that accept images of any size with the same weights.
ANY_SIZE = ("daft_conv", "daft_gumbel", "daft_local")


def build(case: str, **kwargs) -> nn.Module:
    """Build the model of ``case`` with fixed weights, in evaluation mode; ``kwargs`` are passed to create_model."""
    name, small = CASES[case]
    torch.default_generator.manual_seed(0)
    arguments = {**small, **kwargs}
    create = timm_plugin.create_model if "attn_layer" in arguments else timm.create_model
    model = create(name, **arguments).eval()
    draw_filters(model)
    return model


def draw_filters(model: nn.Module) -> None:
    """Draw filters of DAFT-conv at random, since they start at 0, where windows change nothing.

    While γ is 0, r receives no gradient either.
    """
    for module in model.modules():
        if isinstance(module, DaftConvAttention):
            for parameter in module.parameters():
                nn.init.normal_(parameter)


def images(model: nn.Module, batch: int = 2, size: tuple = ()) -> Tensor:
    """Random images (batch, channels, H, W) of the size that the model was built for, or of ``size``."""
    height, width = size or model.patch_embed.img_size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, model.in_chans, height, width, generator=generator)


def filters_by_hand(attention: nn.Module) -> Tensor:
    """γ (r - mean) / std + β per head, or r itself: (h, kh, kw)."""
    if attention.gamma is None:
        return attention.r
    flat = attention.r.flatten(1)
    variance = flat.var(1, keepdim=True, unbiased=False) + 1e-6  # needed for a window of one entry
    standardised = (flat - flat.mean(1, keepdim=True)) / variance.sqrt()
    return (attention.gamma * standardised + attention.beta).view_as(attention.r)
