"""A fairseq checkpoint as a folder for transformers needs it: model, dictionaries, weights and options as plain data.

And back: the checkpoint that fairseq loads, from weights and options.
"""

import json
import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from fairseq.data import Dictionary
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, build_model
from fairseq.utils import safe_getattr
from omegaconf import OmegaConf
from torch import Tensor, nn

from common.huggingface.modeling import FAIRSEQ_HEAD, HEAD
from common.modules.stored_options import is_extra_state

from ..loading.checkpoint_config import FREE_TEXTS, check_configuration
from ..loading.checkpoints import UNWRAPPED, read_training
from ..loading.configuration_errors import configuration_errors
from ..loading.folders import find_folder
from ..loading.new_checkpoint import numbered_dictionary
from ..models._classifier import LinearTimeClassifier
from ..models._configuration import read_stored
from ..models._encoder_decoder import LinearTimeTransformer
from ..models._language_model import LinearTimeLanguageModel
from ..models._masked_model import LinearTimeMaskedModel

#: The kinds of models that have a counterpart in transformers, and the tasks of each, in the order of their search.
KINDS: dict[str, tuple[type, tuple[str, ...]]] = {
    "causal": (
        LinearTimeLanguageModel,
        (
            "language_modeling",
            "prompted_language_modeling",
            "streaming_language_modeling",
            "context_parallel_language_modeling",
        ),
    ),
    "classifier": (LinearTimeClassifier, ("sentence_prediction",)),
    "masked": (LinearTimeMaskedModel, ("masked_lm",)),
    "encoder_decoder": (LinearTimeTransformer, ("translation",)),
}
#: Options that may be any text, but are no path.
_NO_PATHS = {"lineartime_layers", "bpe_separator"}
#: The suffix of fairseq's buffers that hold the version of a state dict, which fairseq adds where it is missing.
_VERSION = ".version"
#: The name under which transformers' encoder-decoders have a tied weight.
_FIRST = "decoder.embed_tokens.weight"


class Source(NamedTuple):
    """A checkpoint of fairseq that is exported."""

    architecture: str
    kind: str  # a name in ``KINDS``
    model: nn.Module
    task: Any
    cfg: Any  # fairseq's configuration, with which the model was built
    stored: Any  # fairseq's configuration in the checkpoint
    weights: dict[str, Tensor]  # as stored, with current names
    trained: dict[str, Any]  # what the checkpoint says about its training

    @property
    def dictionary(self) -> Dictionary:
        """The dictionary of what the model reads."""
        return self.task.source_dictionary


def load_source(checkpoint: Path, data: Path | None = None) -> Source:
    """Load ``checkpoint``; ``data`` is the folder with its dictionaries, by default that of the checkpoint.

    Raises:
        ValueError: the file cannot be read, would run code, holds a model or a task without a counterpart in
        transformers, or lacks weights; or a dictionary is missing.
    """
    path = str(checkpoint)
    state, architecture = read_training(checkpoint)
    kind, model_class = _kind_of(architecture, path)
    task = _check_task(state, kind, path)
    folder = Path(find_folder("--data", str(checkpoint.parent if data is None else data)))
    _check_dictionaries(folder, kind, task, state)
    loaded = model_class.from_pretrained(str(checkpoint.parent), checkpoint.name, str(folder.absolute()), **UNWRAPPED)
    model = loaded.models[0] if hasattr(loaded, "models") else loaded.model
    model.eval()
    if kind == "causal" and len(loaded.task.target_dictionary) < len(loaded.task.source_dictionary):
        raise ValueError(f"the checkpoint {path!r} has --output-dictionary-size; allowed: one dictionary of all tokens")
    weights = model.fitted_state_dict(state["model"], deepcopy(loaded.cfg.model))
    with configuration_errors(path):
        stored = load_checkpoint_to_cpu(path)["cfg"]
    return Source(architecture, kind, model, loaded.task, loaded.cfg, stored, weights, _trained(state, stored))


def _kind_of(architecture: str, path: str) -> tuple[str, type]:
    model = ARCH_MODEL_REGISTRY.get(architecture)
    for kind, (base, _) in KINDS.items():
        if model is not None and issubclass(model, base):
            return kind, model
    raise ValueError(
        f"the checkpoint {path!r} is of --arch {architecture}, which has no counterpart in transformers; allowed: "
        "language models, masked models, classifiers and encoder-decoders of this plugin (python -m "
        "fairseq_plugin.convert makes one of a stock Transformer)"
    )


def _check_task(state: Mapping[str, Any], kind: str, path: str) -> Any:
    """The options of the task; ValueError if it has no counterpart in transformers."""
    options = state["args"] if state.get("args") is not None else state["cfg"].get("task")
    name = _option(options, "task" if state.get("args") is not None else "_name", "translation")
    allowed = KINDS[kind][1]
    if name not in allowed:
        raise ValueError(
            f"the checkpoint {path!r} is of --task {name}, which has no counterpart in transformers for this model; "
            f"allowed: {', '.join(allowed)}"
        )
    return options


def _option(options: Any, name: str, default: Any = None) -> Any:
    """A value in a namespace or in a dictionary; ``default`` if it is missing or None."""
    if isinstance(options, Mapping):
        value = options[name] if name in options else None
    else:
        value = safe_getattr(options, name)
    return default if value is None else value


def _check_dictionaries(folder: Path, kind: str, task: Any, state: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``folder`` has the dictionaries of the task."""
    names = ["dict.txt"]
    if kind == "classifier":
        names = ["input0/dict.txt", *([] if _option(task, "regression_target", False) else ["label/dict.txt"])]
    if kind == "encoder_decoder":
        languages = [_option(task, "source_lang"), _option(task, "target_lang")]
        if None in languages:
            languages = list(infer_language_pair(str(folder)))
        names = ["dict.LANGUAGE.txt"] if None in languages else [f"dict.{language}.txt" for language in languages]
    missing = [name for name in names if not (folder / name).is_file()]
    for name in names:
        if (folder / name).is_file():
            try:
                Dictionary.load(str(folder / name))
            except Exception as error:  # fairseq raises a bare one for a wrong encoding
                reason = str(error).splitlines()[0]
                raise ValueError(f"--data has {name}, which cannot be read: {reason}; allowed: a dictionary") from error
    if missing:
        raise ValueError(
            f"--data is {str(folder)!r}, which has no {missing[0]}; allowed: the folder of fairseq-preprocess for the "
            "training, or the checkpoint's own folder with its dictionaries"
        )


def _trained(state: Mapping[str, Any], cfg: Any) -> dict[str, Any]:
    """Numbers and names that the checkpoint says about its training, as far as it says them."""
    last = (state.get("optimizer_history") or [{}])[-1]
    extra = state.get("extra_state") or {}
    said = {
        "updates": last.get("num_updates"),
        "epoch": (extra.get("train_iterator") or {}).get("epoch"),
        "best": extra.get("best", (last.get("lr_scheduler_state") or {}).get("best")),
        "metric": _option(cfg.checkpoint, "best_checkpoint_metric"),
        "validation_loss": extra.get("val_loss"),
        "criterion": _option(cfg.criterion, "_name"),
        "criterion_name": last.get("criterion_name"),
        "optimizer_name": last.get("optimizer_name"),
    }
    return {name: value for name, value in said.items() if isinstance(value, (int, float, str))}


def exported_weights(source: Source) -> dict[str, Tensor]:
    """The weights of ``source`` without fairseq's version numbers, and each tied weight under one name alone.

    A classifier's head has the name that libraries around transformers look for.
    """
    groups = tied_names(source.model)
    kept = [_FIRST if _FIRST in names else names[0] for names in groups]
    left_out = {name for names in groups for name in names}.difference(kept)
    return {
        re.sub(FAIRSEQ_HEAD, HEAD, name): x
        for name, x in source.weights.items()
        if name not in left_out and not name.endswith(_VERSION)
    }


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of the state dict of ``model`` that share a tensor, in its order; only groups of at least two."""
    groups: dict[int, list[str]] = defaultdict(list)
    for name, x in model.state_dict(keep_vars=True).items():
        if isinstance(x, nn.Parameter):
            groups[id(x)].append(name)
    return [names for names in groups.values() if len(names) > 1]


def plain_options(source: Source) -> dict[str, Any]:
    """fairseq's options of model and task, and facts of the training, as values for JSON; without paths."""
    model, task = (_plain(group) for group in (source.stored.model, source.stored.task))
    return {
        "architecture": source.architecture,
        "model": _without_paths(read_stored(source.architecture, model)),
        "task": _without_paths(task),
        "trained": source.trained,
    }


def _plain(options: Any) -> dict[str, Any]:
    if OmegaConf.is_config(options):
        return OmegaConf.to_container(options, resolve=True, enum_to_str=True)
    return {name: getattr(value, "value", value) for name, value in vars(options).items()}


def _without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` in types of JSON, without those that may be paths of the machine of the training."""
    paths = FREE_TEXTS - _NO_PATHS
    kept = {name: value for name, value in options.items() if value is None or name not in paths}
    return json.loads(json.dumps({**kept, **({"data": "."} if "data" in options else {})}))


def rebuilt_checkpoint(options: Mapping[str, Any], weights: dict[str, Tensor], path: str) -> dict[str, Any]:
    """The checkpoint of fairseq with ``weights`` and the options of ``plain_options``; ``path`` is for messages.

    The model is built once, to check that the weights fit. Nothing in ``options`` is run.

    Raises:
        ValueError: the options are no data of a model of this plugin, or the weights do not fit them.
    """
    architecture = options.get("architecture")
    if architecture not in ARCH_MODEL_REGISTRY:
        raise ValueError(f"{path} is of the architecture {architecture!r}; allowed: one of this plugin")
    kind, _ = _kind_of(architecture, path)
    cfg = _configuration(architecture, options)
    state = {"args": None, "cfg": cfg, "model": weights, **_bookkeeping(options.get("trained", {}))}
    check_configuration(state, path)
    _check_task(state, kind, path)
    with configuration_errors(path):
        model = _built(cfg, weights, kind)
    for names in tied_names(model):
        stored = [name for name in names if name in weights]
        weights.update({name: weights[stored[0]] for name in names if stored and name not in weights})
    dtype = next((x.dtype for name, x in weights.items() if x.is_floating_point() and not is_extra_state(name)), None)
    weights.update({name: x.to(dtype) for name, x in model.state_dict().items() if name.endswith(_VERSION)})
    model.fitted_state_dict(weights, deepcopy(cfg["model"]))
    order = [name for name in model.state_dict() if name in weights]
    return {**state, "model": {name: weights[name] for name in order}}


def _configuration(architecture: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """fairseq's configuration of a checkpoint, a dictionary of groups; groups other than model and task are empty."""
    cfg = OmegaConf.to_container(OmegaConf.structured(FairseqConfig), resolve=False, enum_to_str=True)
    model = {**options["model"], "_name": architecture}
    if MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[architecture]) is None:  # fairseq has a namespace then
        model = Namespace(**{**model, "arch": architecture})
    return {**cfg, "model": model, "task": {**options["task"], "data": "."}}


def _bookkeeping(trained: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a checkpoint beside configuration and weights: a training that begins anew after those updates."""
    history = {
        "criterion_name": trained.get("criterion_name", "CrossEntropyCriterion"),
        "optimizer_name": trained.get("optimizer_name", "FairseqAdam"),
        "lr_scheduler_state": {},
        "num_updates": trained.get("updates", 0),
    }
    iterator = {"epoch": trained.get("epoch", 1), "iterations_in_epoch": 0, "shuffle": True, "version": 2}
    return {
        "criterion": {},
        "optimizer_history": [history],
        "task_state": {},
        "extra_state": {"metrics": [], "previous_training_time": 0.0, "train_iterator": iterator},
        "last_optimizer_state": None,
    }


def _built(cfg: Mapping[str, Any], weights: Mapping[str, Tensor], kind: str) -> nn.Module:
    """The model of ``cfg`` for dictionaries of the sizes of ``weights``, without any of their values."""
    sizes = {name: len(x) for name, x in weights.items() if name.endswith("embed_tokens.weight")}
    first = numbered_dictionary(next(iter(sizes.values()), 0))
    last = numbered_dictionary(sizes.get("decoder.embed_tokens.weight", len(first)))
    longest = cfg["task"].get("max_positions") or cfg["task"].get("tokens_per_sample")
    task = SimpleNamespace(source_dictionary=first, target_dictionary=last, max_positions=lambda: longest)
    config = deepcopy(cfg["model"])
    if isinstance(config, Namespace):
        config.load_checkpoint_heads = kind in ("masked", "classifier")
    else:
        config = OmegaConf.create(config, flags={"allow_objects": True})
    with torch.random.fork_rng(devices=[]):
        return build_model(config, task, from_checkpoint=True)
