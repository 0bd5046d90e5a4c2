"""Checkpoints of fairseq: checked as a whole before anything is loaded, and stock ones under a name of ours."""

import contextlib
import logging
import os
import tarfile
from typing import Any, Dict, Iterator, List, Optional

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.file_utils import load_archive_file
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.checkpoints import Transfer, check_state_dict, read_checkpoint

logger = logging.getLogger(__name__)

#: What fairseq reads of a checkpoint besides configuration and weights, in files of today and of its beginnings.
_BOOKKEEPING = ({"optimizer_history", "extra_state"}, {"best_loss", "optimizer", "epoch"})


class CheckedLoading:
    """In front of a fairseq model: its ``load_state_dict`` and ``from_pretrained`` say in one ValueError what is wrong.

    Nothing is loaded then, and the model is as it was.
    """

    #: Whether weights of fairseq's own ``transformer_lm`` have the names and shapes of this model's.
    takes_stock_weights = False

    def load_state_dict(
        self, state_dict: Dict[str, Any], strict: bool = True, model_cfg: Optional[Any] = None, args: Any = None
    ) -> Any:
        """As fairseq's; ValueError unless all of ``state_dict`` fits, or what has a place if not ``strict``."""
        if model_cfg is None and args is not None:
            model_cfg = convert_namespace_to_omegaconf(args).model
        fitted = self.fitted_state_dict(state_dict, model_cfg, strict)
        logger.info(f"{type(self).__name__}: {what_came_of(state_dict, fitted, self).summary()}")
        return super().load_state_dict(fitted, strict, model_cfg)

    def fitted_state_dict(
        self, state_dict: Dict[str, Any], model_cfg: Optional[Any] = None, strict: bool = True
    ) -> Dict[str, Any]:
        """``state_dict`` in today's names and without layers that ``model_cfg`` does not keep; nothing is loaded.

        Raises:
            ValueError: it does not fit; the model is as it was.
        """
        fitted = dict(state_dict)
        with _modules_kept(self):
            self._upgrade(fitted)
            fitted = prune_state_dict(fitted, model_cfg)  # once: it takes the option back
            try:
                check_state_dict(fitted, self, shapes_only=not strict)
            except ValueError as error:
                raise ValueError(f"{error}{_hint(fitted, self)}") from None
        return fitted

    def _upgrade(self, state_dict: Dict[str, Any]) -> None:
        try:
            self.upgrade_state_dict(state_dict)
        except Exception as error:  # fairseq's modules raise what they like for what they do not know
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"the checkpoint does not fit {type(self).__name__}: {reason}; allowed: the tensors of this "
                "architecture. Nothing was loaded"
            ) from error

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """As fairseq's, from a file of this architecture or, where its weights fit, of fairseq's ``transformer_lm``.

        Raises:
            ValueError: a folder or file that cannot be read, a file that would run code, or that holds another
                architecture or other weights.
        """
        if model_name_or_path not in cls.hub_models():
            model_name_or_path = _folder(model_name_or_path)
            for name in checkpoint_file.split(os.pathsep):
                path = os.path.join(model_name_or_path, name)
                kwargs = cls._overrides(read_checkpoint(path), path, kwargs)
        return super().from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)

    @classmethod
    def _overrides(cls, state: Dict[str, Any], path: str, options: Dict[str, Any]) -> Dict[str, Any]:
        """``options`` that make fairseq build this model from what ``state`` holds."""
        stored = stored_architecture(state, path)
        model = ARCH_MODEL_REGISTRY.get(stored)
        if model is not None and issubclass(model, cls):
            return options
        if model is TransformerLanguageModel and cls.takes_stock_weights:
            logger.info(f"{path} holds {stored!r}; its weights are read as those of {registered_names(cls)[0]!r}")
            return stock_overrides(state, cls, options)
        stock = ", 'transformer_lm'" if cls.takes_stock_weights else ""
        names = ", ".join(map(repr, registered_names(cls)))
        raise ValueError(f"the checkpoint {path!r} holds {stored!r}; allowed for {cls.__name__}: {names}{stock}")


def stored_architecture(state: Dict[str, Any], path: str) -> str:
    """The name of the model in a checkpoint of fairseq, of either of its configuration systems.

    Raises:
        ValueError: it is none of fairseq's.
    """
    name = None
    if state.get("args") is not None:  # fairseq's own order
        name = safe_getattr(state["args"], "arch")
    elif hasattr(state.get("cfg"), "get"):
        model = state["cfg"].get("model")
        name = model.get("_name") or model.get("arch") if hasattr(model, "get") else safe_getattr(model, "arch")
    bookkeeping = any(names <= state.keys() for names in _BOOKKEEPING)
    if not name or not isinstance(state.get("model"), dict) or not bookkeeping:
        found = ", ".join(map(str, list(state)[:8])) + (", ..." if len(state) > 8 else "")
        raise ValueError(
            f"the checkpoint {path!r} holds {found}; allowed: what fairseq-train writes (cfg or args of a model, "
            "model, optimizer_history, extra_state)"
        )
    return name


def registered_names(model: type) -> List[str]:
    """The names under which ``model`` and classes built on it are registered as models."""
    return [name for name, registered in MODEL_REGISTRY.items() if issubclass(registered, model)]


def stock_overrides(state: Dict[str, Any], model: type, options: Dict[str, Any]) -> Dict[str, Any]:
    """Overrides by which fairseq builds ``model`` from a checkpoint of its ``transformer_lm``, and ``options``."""
    name = registered_names(model)[0]
    if state.get("args") is not None:
        post_norm = not safe_getattr(state["args"], "decoder_normalize_before", False)
        return {"arch": name, "lineartime_post_norm": post_norm, **options}
    post_norm = not state["cfg"]["model"].get("decoder_normalize_before", False)
    # Where fairseq is given overrides for the model alone, it does not look for more of them among the others.
    fields = MODEL_DATACLASS_REGISTRY[name].__dataclass_fields__
    ours = {key: value for key, value in options.items() if key in fields}
    given = options.get("model", {})
    return {**options, "model": {"_name": name, "lineartime_post_norm": post_norm, **ours, **given}}


def what_came_of(state_dict: Dict[str, Tensor], fitted: Dict[str, Tensor], model: nn.Module) -> Transfer:
    """What ``model`` takes of ``state_dict`` when ``fitted``, the same upgraded and pruned, is loaded."""
    own = model.state_dict()
    taken = [name for name in fitted if name in own]
    places = {fitted[name].data_ptr() for name in taken}  # upgrading renames tensors, and cuts some in pieces
    left_out = [name for name, x in state_dict.items() if not isinstance(x, Tensor) or x.data_ptr() not in places]
    return Transfer(taken, left_out, [name for name in own if name not in fitted])


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its modules back if the block fails: fairseq's upgrading drops norms and adds heads on the way."""
    kept = [(module, dict(module._modules)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, children in kept:
            module._modules.clear()
            module._modules.update(children)
        raise


def _hint(state_dict: Dict[str, Any], model: nn.Module) -> str:
    """What may be meant by a ``state_dict`` that does not fit."""
    own = model.state_dict()
    hints = []
    norm = "decoder.layer_norm.weight"
    if norm in own and norm not in state_dict:
        hints.append("a post-norm model has no decoder.layer_norm: --lineartime-post-norm (lineartime_post_norm=True)")
    if norm in state_dict and norm not in own and "decoder.version" in own:
        hints.append("decoder.layer_norm is of a pre-norm model: leave --lineartime-post-norm away")
    for name in ("decoder.embed_tokens.weight", "encoder.sentence_encoder.embed_tokens.weight"):
        symbols = [len(x) for x in (state_dict.get(name), own.get(name)) if isinstance(x, Tensor) and x.dim()]
        if len(symbols) == 2 and symbols[0] != symbols[1]:
            hints.append(f"it was trained with a dictionary of {symbols[0]} symbols, and the data has {symbols[1]}")
    return "".join(f" ({hint})" for hint in hints)


def _folder(model_name_or_path: str) -> str:
    """The folder at a path or URL, unpacked by fairseq where it is an archive; ValueError if there is none."""
    if os.path.isdir(model_name_or_path):
        return model_name_or_path
    try:
        folder = load_archive_file(model_name_or_path)
    except tarfile.TarError:
        folder = None
    if folder is None:
        raise ValueError(f"model_name_or_path is {model_name_or_path!r}; allowed: a folder, or the URL of an archive")
    return folder
