"""Load a trained model of either host for pictures, without its training data; no code of a file is run."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import timm
import torch
from timm.data import resolve_data_config
from torch import nn

import timm_plugin
from common.checkpoints import read_checkpoint

if find_spec("fairseq"):
    import fairseq_plugin  # noqa: F401  (registers the models, and lets torch read fairseq's configurations)


class Loaded(NamedTuple):
    """A model in evaluation mode."""

    model: nn.Module
    reads: str  # "images", or "pixels" or "text" for a language model
    data: dict[str, Any] | None = None  # timm's preprocessing of images


def load(checkpoint: Path, name: str | None = None, model_kwargs: dict[str, Any] | None = None) -> Loaded:
    """The model of a file of fairseq-train or of timm's train.py, or of a folder that timm saved for its hub.

    A state dict of timm needs the ``name`` of its model, and perhaps ``model_kwargs``. Averaged weights come first.
    """
    if checkpoint.is_dir():
        return _of_timm(f"local-dir:{checkpoint}", model_kwargs or {}, {}, pretrained=True)
    with torch.serialization.safe_globals([argparse.Namespace]):
        state = read_checkpoint(checkpoint)
    if "cfg" in state:
        return _of_fairseq(checkpoint)
    saved = vars(state["args"]) if isinstance(state.get("args"), argparse.Namespace) else {}
    kwargs = dict(saved.get("model_kwargs") or {})
    if name is None:
        name = str(saved.get("model"))
        if not timm.is_model(name) or any(key.startswith(("pretrained", "checkpoint", "cache")) for key in kwargs):
            raise ValueError(f"{checkpoint} is of {name} with {kwargs}; allowed: a model of timm, or give --model")
    channels = saved.get("in_chans") or (saved.get("input_size") or [None])[0]
    own = {"num_classes": saved.get("num_classes"), "in_chans": channels, "global_pool": saved.get("gp")}
    kwargs = {**{key: value for key, value in own.items() if value is not None}, **kwargs, **(model_kwargs or {})}
    return _of_timm(name, kwargs, saved, checkpoint_path=str(checkpoint))


def _of_timm(name: str, kwargs: dict[str, Any], saved: dict[str, Any], **source: Any) -> Loaded:
    create = timm_plugin.create_model if "attn_layer" in kwargs else timm.create_model
    model = create(name, **source, **kwargs).eval()
    if not (saved.get("img_size") or saved.get("input_size")) and hasattr(model, "patch_embed"):
        saved = {**saved, "input_size": (model.in_chans, *model.patch_embed.img_size)}
    return Loaded(model, "images", resolve_data_config(saved, model=model))


def _of_fairseq(checkpoint: Path) -> Loaded:
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY

    from fairseq_plugin.loading.checkpoints import read_training

    _, architecture = read_training(checkpoint)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    symbols, config = Dictionary(), state["cfg"].model
    for i in range(len(state["model"]["decoder.embed_tokens.weight"]) - len(symbols)):
        symbols.add_symbol(f"symbol {i}")
    model = ARCH_MODEL_REGISTRY[architecture].build_model(
        config, SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
    )
    model.load_state_dict(state["model"], strict=True, model_cfg=config)
    return Loaded(model.eval(), "pixels" if state["cfg"].task._name == "pixel_modeling" else "text")
