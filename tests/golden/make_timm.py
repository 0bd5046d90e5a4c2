"""``python -m tests.golden.make_timm``: tiny checkpoints of the image models, with an input and its logits.

It writes missing files and keeps existing ones. Never remove one to fix a failing test: these files stand for those
that users have. Only a change that intentionally breaks earlier checkpoints requires new ones.
"""

import json
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import timm_plugin
from tests.timm_plugin.helpers import images, randomise
from timm_plugin.models.hierarchical_baselines import TABLE_5

FOLDER = Path(__file__).parent / "timm"
_HIERARCHICAL: dict[str, Any] = dict(
    img_size=16, embed_dims=(8, 12), depths=(1, 1), num_heads=2, num_classes=3, out_indices=(0, 1)
)
_COLUMNAR: dict[str, Any] = dict(img_size=16, patch_size=4, embed_dim=16, depth=1, num_classes=3)
#: File -> model and the arguments that make it tiny. Images and filters are not square where this is possible, so that
#: rows and columns cannot be confused.
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "flowformer_hier_s": ("flowformer_hier_s", {**_HIERARCHICAL, "img_size": (16, 24)}),
    "flowformer_hier_s_12h": ("flowformer_hier_s_12h", _HIERARCHICAL),
    "flowformer_deit_s": ("flowformer_deit_s", {**_COLUMNAR, "num_heads": 2, "img_size": (16, 24)}),
    "flowformer_deit_s_distilled": ("flowformer_deit_s_distilled", {**_COLUMNAR, "num_heads": 2}),
    "soft_hier_s": ("soft_hier_s", {**_HIERARCHICAL, "img_size": (16, 24)}),
    "flash_vit_s": ("flash_vit_s", {**_COLUMNAR, "query_dim": 4, "img_size": (16, 24)}),
    "flash_quad_vit_s": ("flash_quad_vit_s", {**_COLUMNAR, "query_dim": 4, "img_size": (16, 24)}),
    "daft_full_s": ("daft_full_s", {**_COLUMNAR, "num_heads": 2, "bias_dim": 4, "img_size": (16, 24)}),
    "daft_full_s.free": ("daft_full_s", {**_COLUMNAR, "num_heads": 2, "bias_dim": 0, "query": False}),
    "daft_conv_s": ("daft_conv_s", {**_COLUMNAR, "num_heads": 16, "window": (3, 5), "img_size": (16, 24)}),
    "daft_conv_s_h16": ("daft_conv_s_h16", {**_COLUMNAR, "num_heads": 4, "window": 3, "reparameterize": False}),
    "daft_conv_s.gumbel": ("daft_conv_s", {**_COLUMNAR, "num_heads": 4, "window": 3, "gumbel_temperature": 0.5}),
}
#: Registered models without a file: they share the class of another, and differ in arguments that are overridden here.
SIZES_OF = {
    "daft_conv_b_384": "daft_conv_s_h16",
    "daft_conv_test": "daft_conv_s_h16",
    "flowformer_deit_ti": "flowformer_deit_s",
    "flowformer_hier_digits": "flowformer_hier_s",
    "flowformer_hier_test": "flowformer_hier_s",
    "flowformer_hier_ti": "flowformer_hier_s",
    **{f"{mechanism}_hier_s": "flowformer_hier_s" for mechanism in TABLE_5 if mechanism != "soft"},
}


def registered() -> list[str]:
    """Every image model that the plugin registers."""
    plugin = timm_plugin
    modules = (plugin.daft, plugin.flash, plugin.flowformer, plugin.flowformer_deit, plugin.hierarchical_baselines)
    return [
        name
        for name in timm.list_models()
        if timm.models.model_entrypoint(name).__module__ in {m.__name__ for m in modules}
    ]


def weights(file: str) -> Path:
    """The checkpoint."""
    return FOLDER / f"{file}.safetensors"


def expected(file: str) -> Path:
    """The stored input and its logits."""
    return FOLDER / f"{file}.expected.safetensors"


def make(file: str) -> None:
    """Write the checkpoint ``file`` with its arguments, and an input with its logits."""
    name, arguments = GOLDEN[file]
    model: nn.Module = randomise(timm.create_model(name, **arguments))
    x = images(model)
    with torch.no_grad():
        logits = model(x)
    FOLDER.mkdir(exist_ok=True)
    save_file(model.state_dict(), weights(file), {"model": name, "arguments": json.dumps(arguments)})
    save_file({"images": x, "logits": logits}, expected(file))


def stored(file: str) -> tuple[str, dict[str, Any], Tensor, Tensor]:
    """Load model, arguments, images and logits of the checkpoint ``file``."""
    with safe_open(weights(file), "pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(expected(file))
    return metadata["model"], json.loads(metadata["arguments"]), tensors["images"], tensors["logits"]


if __name__ == "__main__":
    for golden in GOLDEN:
        if not weights(golden).exists():
            make(golden)
            print(weights(golden))
