"""Checkpoints of fairseq: checked completely before anything is loaded; stock ones can be loaded as our models."""

import logging
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.attention import ATTENTIONS, how_to_import
from common.checkpoints import LoadReport, check_state_dict, is_read, leave_out_foreign_extra_states, read_checkpoint
from common.modules.stored_options import is_extra_state, own_modules

from .checkpoint_config import EMBEDDING_FILES, check_configuration, check_files
from .configuration_errors import configuration_errors
from .folders import find_folder
from .known_options import check_names, checkpoint_options, model_options
from .mismatch_hints import attention_hints, option_hints
from .safetensors_folder import packaged_models, readable_by_fairseq

logger = logging.getLogger(__name__)

#: Entries that fairseq reads in addition to configuration and weights, in current and in the oldest formats.
_BOOKKEEPING = ({"optimizer_history", "extra_state"}, {"best_loss", "optimizer", "epoch"})
#: Options that let all parameters learn, even if some did not in the training of the checkpoint.
_LEARNING = {"lineartime_trained_parameters": "all"}
#: Options with which layers are not wrapped to save memory in training, as a model needs that does not learn.
UNWRAPPED = {"checkpoint_activations": False, "offload_activations": False}
#: A hint where to read how weights of softmax attention are transferred to another attention.
HOW_TO_TRANSFER = "fairseq_plugin/CONVERTING.md has how to train it to do what softmax attention did, in four commands"
#: The suffix of fairseq's buffers that hold the version of a state dict.
_VERSION = ".version"


class CheckedLoading:
    """Mixin before a fairseq model: ``load_state_dict`` and ``from_pretrained`` report all faults in one ValueError.

    In that case no tensor is loaded.
    """

    #: fairseq's model whose weights have the same names and shapes as this model's; None if there is none.
    stock_model: type | None = None

    @classmethod
    def hub_models(cls) -> dict[str, str]:
        """Names and folders of the trained models of this class that are part of the package; nothing is downloaded."""
        packaged = packaged_models().items()
        kinds = {name: ARCH_MODEL_REGISTRY.get(name.partition(".")[0], object) for name, _ in packaged}
        return {name: folder for name, folder in packaged if issubclass(kinds[name], cls)}

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, model_cfg: Any | None = None, args: Any = None
    ) -> Any:
        """As fairseq's; ValueError unless all of ``state_dict`` fits, or, if not ``strict``, all entries that are used.

        Logs a warning for entries that are left out or new. ``state_dict`` itself is not changed.
        """
        if model_cfg is None and args is not None:
            model_cfg = convert_namespace_to_omegaconf(args).model
        fitted = self.fitted_state_dict(state_dict, model_cfg, strict)
        transfer = load_report(state_dict, fitted, self)
        if transfer.left_out or transfer.new:
            logger.warning(f"{type(self).__name__}: {transfer.summary()}")
        elif strict:  # not for averaged weights (--store-ema), which fairseq loads without strict at every update
            logger.info(f"{type(self).__name__}: {transfer.summary()}")
        return super().load_state_dict(fitted, strict)

    def fitted_state_dict(
        self, state_dict: dict[str, Any], model_cfg: Any | None = None, strict: bool = True
    ) -> dict[str, Any]:
        """``state_dict`` with current names and without layers that ``model_cfg`` does not keep; nothing is loaded.

        Raises:
            ValueError: it does not fit.
        """
        fitted = OrderedDict(state_dict)
        vars(fitted).update(getattr(state_dict, "__dict__", {}))  # torch keeps its metadata there
        self.upgrade_state_dict(fitted)
        fitted = prune_state_dict(fitted, model_cfg)
        leave_out_foreign_extra_states(fitted, self)
        try:
            check_state_dict(fitted, self, shapes_only=not strict)
        except ValueError as error:
            raise ValueError(f"{error}{hint(fitted, self, model_cfg)}") from None
        return fitted

    def upgrade_state_dict(self, state_dict: dict[str, Any]) -> None:
        """fairseq's hook. Adds versions: without them fairseq assumes a model of 2018 and drops the final norm."""
        for name, tensor in self.state_dict().items():
            if name.endswith(_VERSION):
                state_dict.setdefault(name, tensor.clone())
        super().upgrade_state_dict(state_dict)

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """As fairseq's, from a file of this architecture or, if its weights fit, of fairseq's ``transformer_lm``.

        ``model_name_or_path`` is also a name in ``hub_models()``, or a folder of ``python -m
        fairseq_plugin.to_safetensors``.

        Raises:
            ValueError: a folder or file cannot be read; a file would run code, has a configuration that is not only
                data (see ``checkpoint_config``), or holds another architecture or other weights; an option does not
                exist.
        """
        packaged = cls.hub_models()
        folder = find_folder("model_name_or_path", packaged.get(model_name_or_path, model_name_or_path), packaged)
        data = os.path.join(folder, data_name_or_path) if data_name_or_path.startswith(".") else data_name_or_path
        data = os.path.abspath(find_folder("data_name_or_path", data))
        with readable_by_fairseq(folder, checkpoint_file) as (folder, checkpoint_file):
            return cls._from_checkpoints(folder, checkpoint_file, data, kwargs)

    @classmethod
    def _from_checkpoints(cls, folder: str, checkpoint_file: str, data: str, kwargs: dict[str, Any]) -> Any:
        """Load checkpoints in ``folder`` that fairseq can read; returns what ``from_pretrained`` returns."""
        for name in checkpoint_file.split(os.pathsep):
            path = os.path.join(folder, name)
            state = read_checkpoint(path)
            check_configuration(state, path)
            with configuration_errors(path):
                kwargs = cls._overrides(state, path, kwargs)
                check_files(state, path, kwargs)
        kwargs = {**dict.fromkeys(EMBEDDING_FILES), **_LEARNING, **kwargs}
        with configuration_errors(os.path.join(folder, checkpoint_file)):
            return super().from_pretrained(folder, checkpoint_file, data, **kwargs)

    @classmethod
    def _overrides(cls, state: dict[str, Any], path: str, options: dict[str, Any]) -> dict[str, Any]:
        """``options`` with those that make fairseq build this model from the checkpoint ``state``."""
        stored = stored_architecture(state, path)
        model = ARCH_MODEL_REGISTRY.get(stored)
        is_ours = model is not None and issubclass(model, cls)
        target = model if is_ours else cls
        check_names("from_pretrained", options, checkpoint_options(target, state), model_options(target))
        if is_ours:
            return options
        if model is TransformerLanguageModel and cls.stock_model is model:
            logger.info(
                f"{path} holds {stored!r}; its weights are read as those of {registered_names(cls)[0]!r}. With another "
                f"attention it is another model; {HOW_TO_TRANSFER}"
            )
            return stock_overrides(state, cls, options)
        names = ", ".join(map(repr, registered_names(cls)))
        stock = ""
        if cls.stock_model is TransformerLanguageModel:
            stock = ", 'transformer_lm'"
        elif cls.stock_model is not None:
            stock = f"; python -m fairseq_plugin.convert makes one of {stock_name(cls)!r}"
        raise ValueError(f"the checkpoint {path!r} holds {stored!r}; allowed for {cls.__name__}: {names}{stock}")


def read_training(path: str | Path) -> tuple[dict[str, Any], str]:
    """Read the checkpoint ``path`` of a training; returns it and the name of its architecture.

    Raises:
        ValueError: it cannot be read, is no checkpoint of fairseq, or would run code.
    """
    state = read_checkpoint(path)
    architecture = stored_architecture(state, str(path))
    check_configuration(state, str(path))
    return state, architecture


def stored_architecture(state: dict[str, Any], path: str) -> str:
    """The architecture name in a checkpoint of fairseq, from either of its configuration systems.

    Raises:
        ValueError: it is not a checkpoint of fairseq, or is of a user's own mechanism that is not imported.
    """
    name = None
    if state.get("args") is not None:  # checked first, as in fairseq
        name = safe_getattr(state["args"], "arch")
    elif hasattr(state.get("cfg"), "get"):
        model = state["cfg"].get("model")
        name = model.get("_name") or model.get("arch") if hasattr(model, "get") else safe_getattr(model, "arch")
    bookkeeping = any(names <= state.keys() for names in _BOOKKEEPING)
    if not name or not isinstance(state.get("model"), dict) or not bookkeeping:
        entries = ", ".join(map(str, list(state)[:8])) + (", ..." if len(state) > 8 else "")
        raise ValueError(
            f"the checkpoint {path!r} holds {entries}; allowed: what fairseq-train writes (cfg or args of a model, "
            "model, optimizer_history, extra_state)"
        )
    own = own_modules(state["model"])
    if missing := sorted(own.keys() - ATTENTIONS.keys()):
        attention, module = missing[0], own[missing[0]]
        raise ValueError(f"the checkpoint {path!r} has the attention {attention!r}; {how_to_import(module)}")
    return name


def registered_names(model: type) -> list[str]:
    """The names under which ``model`` and its subclasses are registered as models."""
    return [name for name, registered in MODEL_REGISTRY.items() if issubclass(registered, model)]


def stock_name(model: type) -> str:
    """The name of fairseq's model whose weights fit ``model``."""
    return next(name for name, registered in MODEL_REGISTRY.items() if registered is model.stock_model)


def stock_overrides(state: dict[str, Any], model: type, options: dict[str, Any]) -> dict[str, Any]:
    """Overrides with which fairseq builds ``model`` from a checkpoint of its stock model, and ``options``."""
    name = registered_names(model)[0]
    if model.stock_model is RobertaModel:
        learned, norm = (_stored_option(state, x, True) for x in ("encoder_learned_pos", "layernorm_embedding"))
        post_norm = not _stored_option(state, "encoder_normalize_before", False)
        roberta_options = {
            "encoder_learned_pos": learned,
            "layernorm_embedding": norm,
            "lineartime_post_norm": post_norm,
        }
        return {"arch": name, **roberta_options, **options}
    added = {}
    if model.stock_model is TransformerLanguageModel:
        added["lineartime_post_norm"] = not _stored_option(state, "decoder_normalize_before", False)
    if name not in MODEL_DATACLASS_REGISTRY or state.get("args") is not None:
        return {"arch": name, **added, **options}
    # If fairseq gets overrides in a "model" group, it does not look for others outside of it.
    fields = MODEL_DATACLASS_REGISTRY[name].__dataclass_fields__
    overrides = {key: value for key, value in options.items() if key in fields}
    nested = options.get("model", {})
    return {**options, "model": {"_name": name, **added, **overrides, **nested}}


def _stored_option(state: dict[str, Any], name: str, default: Any) -> Any:
    """A model option in a checkpoint of fairseq, from either of its configuration systems."""
    stored = state["args"] if state.get("args") is not None else state["cfg"]["model"]
    return stored.get(name, default) if isinstance(stored, Mapping) else safe_getattr(stored, name, default)


def load_report(state_dict: dict[str, Any], fitted: dict[str, Any], model: nn.Module) -> LoadReport:
    """Which tensors ``model`` gets from ``state_dict`` by loading ``fitted``, which are left out and which are new.

    ``fitted`` is ``state_dict`` after upgrading and pruning. fairseq's version numbers and records of options are not
    weights and are not listed.
    """
    # Compared by memory: upgrading renames tensors, splits some, and adds weights of the model itself.
    model_state, stored_memory = model.state_dict(), {_memory(x) for x in state_dict.values()}
    loaded = [
        name
        for name in fitted
        if name in model_state and not is_extra_state(name) and _memory(fitted[name]) in stored_memory
    ]
    used = {_memory(fitted[name]) for name in loaded}
    left_out = [name for name, x in state_dict.items() if _memory(x) not in used]
    new = [name for name in model_state if name not in loaded and not name.endswith(_VERSION)]
    # Records of options, and tensors that only files of earlier versions have, count as neither.
    left_out, new = ([x for x in names if not is_extra_state(x) and not is_read(x, model)] for names in (left_out, new))
    return LoadReport(loaded, left_out, new)


def _memory(tensor: Any) -> Any:
    """An identifier of the memory of ``tensor``: of its storage, or of the object if it is not a tensor."""
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else id(tensor)


def hint(state_dict: dict[str, Any], model: nn.Module, model_cfg: Any | None = None) -> str:
    """Command-line options that would explain why ``state_dict`` does not fit ``model``; "" if none does.

    ``model_cfg`` is the configuration of ``model``, for the values of its options.
    """
    model_state = model.state_dict()
    certain = [*_dictionary_hints(state_dict, model_state), *attention_hints(state_dict, model_state, model_cfg)]
    hints = [*_norm_hints(state_dict, model_state), *certain, *_relative_bias_hints(state_dict, model_state)]
    hints += _new_parameter_hints(state_dict, model_state)
    hints += [] if certain else option_hints(model, model_cfg)
    return "".join(f" ({hint})" for hint in hints)


def _norm_hints(state_dict: dict[str, Any], own: dict[str, Tensor]) -> Iterator[str]:
    for side in ("decoder", "encoder.sentence_encoder"):
        norm = f"{side}.layer_norm.weight"
        if norm in own and norm not in state_dict:
            yield f"a post-norm model has no {side}.layer_norm: --lineartime-post-norm (lineartime_post_norm=True)"
        if norm in state_dict and norm not in own and f"{side}.version" in own:
            yield f"{side}.layer_norm is of a pre-norm model: leave --lineartime-post-norm away"


def _dictionary_hints(state_dict: dict[str, Any], own: dict[str, Tensor]) -> Iterator[str]:
    sides = ("decoder", "encoder", "encoder.sentence_encoder")
    for name in (f"{side}.embed_tokens.weight" for side in sides):
        symbols = [len(x) for x in (state_dict.get(name), own.get(name)) if isinstance(x, Tensor) and x.dim()]
        if len(symbols) == 2 and symbols[0] != symbols[1]:
            yield f"it was trained with a dictionary of {symbols[0]} symbols, and the data has {symbols[1]}"


def _new_parameter_hints(state_dict: dict[str, Any], own: dict[str, Tensor]) -> Iterator[str]:
    missing = [name for name in own if name not in state_dict and not is_extra_state(name)]
    if missing and all(".inner." in name for name in missing) and not any(map(is_extra_state, state_dict)):
        yield "python -m fairseq_plugin.convert adds what an attention has beside softmax attention to stock weights"


def _relative_bias_hints(state_dict: dict[str, Any], own: dict[str, Tensor]) -> Iterator[str]:
    """Hints on FLASH's relative bias: one weight per distance (toeplitz) or two vectors (rotary)."""
    for name, tensor in state_dict.items():
        module, _, weight = name.rpartition(".")
        if not module.endswith(".bias") or not isinstance(tensor, Tensor):
            continue
        if weight == "a" and name not in own:
            yield "its relative bias is rotary: --flash-relative-bias rotary"
            return
        tokens = (tensor.shape[-1] + 1) // 2
        if weight == "weight" and name not in own:
            yield f"its relative bias is toeplitz, for at most {tokens} tokens: --flash-relative-bias toeplitz"
            return
        if weight == "weight" and own[name].shape[-1] > tensor.shape[-1]:
            yield f"its relative bias is for at most {tokens} tokens, --flash-relative-bias rotary alone is for more"
            return
