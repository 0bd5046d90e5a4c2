"""The part of a default configuration that all models here share."""

from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD


def untrained_cfg(**differences: Any) -> dict[str, Any]:
    """timm's default configuration for a model without weights: 1000 classes, 224 x 224, and ``differences``."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "fixed_input_size": True,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "license": "mit",
        "paper_ids": "arXiv:2202.06258",
        "paper_name": "Flowformer: Linearizing Transformers with Conservation Flows",
        **differences,
    }
