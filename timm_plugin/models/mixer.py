"""MLP Mixer in DeiT-S's shape, a row of DAFT's Table 2: timm's own model at a size for which timm has no name."""

from functools import partial
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs
from timm.models.mlp_mixer import MlpMixer

from ._build import arguments_of, check_names
from ._default_cfg import untrained_cfg
from ._registry import register_once

__all__: list[str] = []  # register_model appends every entry point

_cfg = partial(untrained_cfg, first_conv="stem.proj", paper_ids="arXiv:2105.01601", paper_name="MLP-Mixer")

default_cfgs = generate_default_cfgs({"mixer_deit_s.untrained": _cfg()})


@register_once
def mixer_deit_s(pretrained: bool = False, **kwargs: Any) -> MlpMixer:
    """12 blocks of 384 channels, 4 T = 784 hidden ones over T = 196 tokens, 18.6 M parameters as DAFT's Table 2."""
    tokens = 196
    model_args = dict(patch_size=16, num_blocks=12, embed_dim=384, mlp_ratio=(4 * tokens / 384, 4.0))
    check_names("mixer_deit_s", kwargs, arguments_of(MlpMixer))
    feature_cfg = dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter")
    return build_model_with_cfg(
        MlpMixer, "mixer_deit_s", pretrained, feature_cfg=feature_cfg, **dict(model_args, **kwargs)
    )
