"""Load a model with DAFT from a checkpoint of fairseq or timm, without its training data."""

import argparse
import pickle
import re
import zipfile
from pathlib import Path
from textwrap import shorten
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from common.files.tensor_files import check_parts

#: A model's name and tag, without a source such as hf-hub:.
_NAME = re.compile(r"[\w.-]+")


class Loaded(NamedTuple):
    """A model loaded from a checkpoint, in evaluation mode."""

    model: nn.Module
    reads: str  # the input: "images", or "pixels" or "text" for a language model
    data: dict[str, Any] | None = None  # timm's preprocessing of images, as in training if the file has it


def load_model(checkpoint: Path, name: str | None = None, model_kwargs: dict[str, Any] | None = None) -> Loaded:
    """Load the model of a checkpoint, with the averaged weights (EMA) if the file has them.

    ``checkpoint`` is a file of fairseq-train or of timm's train.py, a state dict or safetensors file of timm's model
    ``name``, or a folder that timm saved for its hub. ``model_kwargs`` are arguments of the model; they override those
    in a file of train.py. Only tensors and plain data are unpickled.

    Raises:
        ValueError: the file does not exist, cannot be read, does not name its model, or does not match it.
    """
    if checkpoint.is_dir():
        return _timm_model(f"local-dir:{checkpoint}", model_kwargs or {}, {}, pretrained=True)
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which does not exist; allowed: a checkpoint or its folder")
    state = {} if checkpoint.suffix == ".safetensors" else _read(checkpoint)
    if "cfg" in state:
        if name is not None or model_kwargs:
            raise ValueError(f"--model or --model-kwargs was passed; allowed with fairseq's {checkpoint}: neither")
        return _fairseq_model(checkpoint)
    saved = vars(state["args"]) if isinstance(state.get("args"), argparse.Namespace) else {}
    if name is None and saved:
        name = _plain_name(saved, checkpoint)
    if name is None:
        raise ValueError(f"{checkpoint} does not say what model it is of; allowed: one whose name --model gives")
    kwargs = {**_train_arguments(saved), **(model_kwargs or {})}
    return _timm_model(name, kwargs, saved, checkpoint_path=str(checkpoint))


def load_image_model(checkpoint: Path) -> Loaded:
    """Like ``load_model``, but only for checkpoints of timm that name their model.

    Raises:
        ValueError: as ``load_model``, and for a checkpoint of fairseq.
    """
    if checkpoint.is_file() and checkpoint.suffix != ".safetensors" and "cfg" in _read(checkpoint):
        raise ValueError(f"{checkpoint} is of fairseq-train; allowed: checkpoints of image models, of timm's train.py")
    return load_model(checkpoint)


def _plain_name(saved: dict[str, Any], checkpoint: Path) -> str | None:
    """The model named in a file of train.py; refuses names and arguments that make timm load other weights.

    timm downloads a model whose name begins with hf-hub:, and opens the files named by ``pretrained_...`` arguments.
    """
    name, arguments = saved.get("model"), saved.get("model_kwargs") or {}
    weight_arguments = [
        argument for argument in arguments if str(argument).startswith(("pretrained", "checkpoint_path", "cache_dir"))
    ]
    if weight_arguments or not isinstance(arguments, dict) or (name is not None and not _NAME.fullmatch(str(name))):
        raise ValueError(
            f"{checkpoint} names the model {name!r} with {arguments}; allowed from a file: a name of timm's without a "
            "place, and no weights from elsewhere. Give yours: --model"
        )
    return name


def _read(checkpoint: Path) -> dict[str, Any]:
    """The content of a file of fairseq or timm; {"cfg": None} if reading it needs fairseq's classes."""
    try:
        if zipfile.is_zipfile(checkpoint):
            check_parts(checkpoint)
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        classes = _unknown_classes(checkpoint)
        if any(name.startswith("omegaconf.") for name in classes):
            return {"cfg": None}
        problem = f"holds {', '.join(classes)}" if classes else "is no file of torch.save's, or is damaged"
        raise ValueError(f"{checkpoint} {problem}; allowed: a checkpoint of tensors and plain data") from error
    if not isinstance(state, dict):
        raise ValueError(f"{checkpoint} holds a {type(state).__name__}; allowed: a checkpoint or a state dict")
    return state


def _unknown_classes(checkpoint: Path) -> list[str]:
    """Names of the classes in a file other than tensors and plain data; empty if torch did not write the file."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(checkpoint)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return []


def _train_arguments(saved: dict[str, Any]) -> dict[str, Any]:
    """The arguments that timm's train.py passed to create_model, from its ``saved`` options."""
    channels = saved.get("in_chans") or (saved.get("input_size") or [None])[0]
    arguments = {"num_classes": saved.get("num_classes"), "in_chans": channels, "global_pool": saved.get("gp")}
    arguments = {key: value for key, value in arguments.items() if value is not None}
    return {**arguments, **(saved.get("model_kwargs") or {})}


def _timm_model(name: str, kwargs: dict[str, Any], saved: dict[str, Any], **source: Any) -> Loaded:
    from timm.data import resolve_data_config
    from timm.models import create_model

    import timm_plugin

    # Our create_model passes the number of tokens and their grid to layers that need them.
    create = timm_plugin.create_model if timm_plugin.create.asks_for_ours(kwargs.get("attn_layer")) else create_model
    try:
        model = create(name, **source, **kwargs).eval()
    except (RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
        subject = (
            f"{source['checkpoint_path']} cannot be {name}" if "checkpoint_path" in source else f"no model of {name}"
        )
        raise ValueError(f"{subject} with {kwargs or 'no arguments'}: {_first_lines(error)}") from error
    patches = getattr(model, "patch_embed", None)
    if patches is not None and not (saved.get("img_size") or saved.get("input_size")):
        saved = {**saved, "input_size": (model.in_chans, *patches.img_size)}
    return Loaded(model, "images", resolve_data_config(saved, model=model))


def _fairseq_model(checkpoint: Path) -> Loaded:
    from fairseq import checkpoint_utils
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

    from common.checkpoints import read_checkpoint
    from fairseq_plugin import DaftConvLanguageModel, DaftFullLanguageModel
    from fairseq_plugin.loading.checkpoint_config import check_configuration

    check_configuration(read_checkpoint(checkpoint), str(checkpoint))
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    config, weights = state["cfg"].model, state["model"]
    name = getattr(config, "_name", None) or getattr(config, "arch", None)
    kind = {**MODEL_REGISTRY, **ARCH_MODEL_REGISTRY}.get(name)
    if not (isinstance(kind, type) and issubclass(kind, (DaftConvLanguageModel, DaftFullLanguageModel))):
        raise ValueError(
            f"{checkpoint} is of {name}, without DAFT; allowed: daft_conv_lm, daft_full_lm and their sizes"
        )
    symbols = _dictionary(weights)
    model = kind.build_model(config, SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols))
    try:
        model.load_state_dict(weights, strict=True, model_cfg=config)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit {name}: {_first_lines(error)}") from error
    task = getattr(state["cfg"].task, "_name", None)
    return Loaded(model.eval(), "pixels" if task == "pixel_modeling" else "text")


def _dictionary(weights: dict[str, torch.Tensor]) -> Any:
    """A dictionary with one symbol per embedding; the symbols' names are placeholders."""
    from fairseq.data import Dictionary

    embedding = weights.get("decoder.embed_tokens.weight")
    if embedding is None:
        raise ValueError("the checkpoint has adaptive or character embeddings; allowed: one embedding of all symbols")
    symbols = Dictionary()
    for i in range(len(embedding) - len(symbols)):
        symbols.add_symbol(f"symbol {i}")
    return symbols


def _first_lines(error: Exception) -> str:
    """The first two lines of a message, shortened, since torch may list every parameter of a model."""
    return shorten(" ".join(str(error).splitlines()[:2]), 300, placeholder=" ...") or type(error).__name__
