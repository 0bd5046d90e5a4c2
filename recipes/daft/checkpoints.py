"""Models with DAFT from any checkpoint of ours, whichever host wrote it, without the data they were trained on."""

import argparse
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn


class Loaded(NamedTuple):
    """A model of a checkpoint, in evaluation mode."""

    model: nn.Module
    reads: str  # "images", or as a language model "pixels" or "text"
    data: dict[str, Any] | None = None  # how timm makes input of an image for it, as in its training if that is known


def load_model(checkpoint: Path, name: str | None = None, model_kwargs: dict[str, Any] | None = None) -> Loaded:
    """The model of a checkpoint; of the weights' averages (EMA) where the file has them.

    A file of fairseq-train; a file of timm's train.py; state dicts, safetensors among them, of timm's model ``name``
    with ``model_kwargs``, which also replace what train.py's file says; a folder as timm's ``local-dir:`` names it.
    Nothing but tensors and plain data is read.

    Raises:
        ValueError: there is no such file, it cannot be read, does not say its model, or does not fit it.
    """
    if checkpoint.is_dir():
        return _timm_model(f"local-dir:{checkpoint}", model_kwargs or {}, {}, pretrained=True)
    if not checkpoint.is_file():
        raise ValueError(f"--checkpoint is {checkpoint}, which does not exist; allowed: a checkpoint or its folder")
    state = {} if checkpoint.suffix == ".safetensors" else _read(checkpoint)
    if "cfg" in state:
        if name is not None or model_kwargs:
            raise ValueError(f"--model or --model-kwargs is given; allowed with fairseq's {checkpoint}: neither")
        return _fairseq_model(checkpoint)
    saved = vars(state["args"]) if isinstance(state.get("args"), argparse.Namespace) else {}
    name = name or saved.get("model")
    if name is None:
        raise ValueError(f"{checkpoint} does not say what model it is of; allowed: one whose name --model gives")
    kwargs = {**_train_arguments(saved), **(model_kwargs or {})}
    return _timm_model(name, kwargs, saved, checkpoint_path=str(checkpoint))


def _read(checkpoint: Path) -> dict[str, Any]:
    """What a file of either host holds; {"cfg": None} alone if it needs fairseq's classes to be read."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        classes = _unknown_classes(checkpoint)
        if any(name.startswith("omegaconf.") for name in classes):
            return {"cfg": None}
        holds = f"holds {', '.join(classes)}" if classes else "is no file of torch.save's"
        raise ValueError(f"{checkpoint} {holds}; allowed: a checkpoint of tensors and plain data") from error
    if not isinstance(state, dict):
        raise ValueError(f"{checkpoint} holds a {type(state).__name__}; allowed: a checkpoint or a state dict")
    return state


def _unknown_classes(checkpoint: Path) -> list[str]:
    """Names of what a file holds beside tensors and plain data; none if it is no file of torch's."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(checkpoint)
    except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError):
        return []


def _train_arguments(saved: dict[str, Any]) -> dict[str, Any]:
    """What timm's train.py gives create_model, of its options as it ``saved`` them."""
    channels = saved.get("in_chans") or (saved.get("input_size") or [None])[0]
    given = {"num_classes": saved.get("num_classes"), "in_chans": channels, "global_pool": saved.get("gp")}
    given = {key: value for key, value in given.items() if value is not None}
    return {**given, **(saved.get("model_kwargs") or {})}


def _timm_model(name: str, kwargs: dict[str, Any], saved: dict[str, Any], **source: Any) -> Loaded:
    from timm.data import resolve_data_config
    from timm.models import create_model

    import timm_plugin  # noqa: F401  (registers the models)

    try:
        model = create_model(name, **source, **kwargs).eval()
    except (RuntimeError, ValueError, TypeError, KeyError, OSError) as error:
        where = (
            f"{source['checkpoint_path']} cannot be {name}" if "checkpoint_path" in source else f"no model of {name}"
        )
        raise ValueError(f"{where} with {kwargs or 'no arguments'}: {_first_line(error)}") from error
    patches = getattr(model, "patch_embed", None)
    if patches is not None and not (saved.get("img_size") or saved.get("input_size")):
        saved = {**saved, "input_size": (model.in_chans, *patches.img_size)}
    return Loaded(model, "images", resolve_data_config(saved, model=model))


def _fairseq_model(checkpoint: Path) -> Loaded:
    from fairseq import checkpoint_utils
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

    from fairseq_plugin import DaftConvLanguageModel, DaftFullLanguageModel

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
        raise ValueError(f"{checkpoint} does not fit {name}: {_first_line(error)}") from error
    task = getattr(state["cfg"].task, "_name", None)
    return Loaded(model.eval(), "pixels" if task == "pixel_modeling" else "text")


def _dictionary(weights: dict[str, torch.Tensor]) -> Any:
    """A dictionary of as many symbols as have embeddings: which they were is of no matter here."""
    from fairseq.data import Dictionary

    embedding = weights.get("decoder.embed_tokens.weight")
    if embedding is None:
        raise ValueError("the checkpoint has adaptive or character embeddings; allowed: one embedding of all symbols")
    symbols = Dictionary()
    for i in range(len(embedding) - len(symbols)):
        symbols.add_symbol(f"symbol {i}")
    return symbols


def _first_line(error: Exception) -> str:
    """The first two lines of a message, as one: torch's first says what failed and the second where."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2]) or type(error).__name__
