"""The parts of default configurations that models here share: values, and the files of trained weights."""

from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

#: The trained weights that are part of this package: a folder for each model and tag.
PACKAGED = Path(__file__).resolve().parents[1] / "weights"


def packaged_file(name: str) -> str:
    """The file of the weights ``name``, MODEL.TAG, in this package; timm's ``pretrained=True`` reads it."""
    return str(PACKAGED / name / "model.safetensors")


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
