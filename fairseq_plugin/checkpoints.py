"""Checkpoints of fairseq: checked as a whole before anything is loaded, and stock ones under a name of ours."""

import logging
import os
from typing import Any, Dict, List, Optional

from fairseq.checkpoint_utils import prune_state_dict
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.utils import safe_getattr

from common.checkpoints import check_state_dict, read_checkpoint

logger = logging.getLogger(__name__)


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
        state_dict = dict(state_dict)
        self.upgrade_state_dict(state_dict)
        state_dict = prune_state_dict(state_dict, model_cfg)  # once: it takes the option back
        check_state_dict(state_dict, self, shapes_only=not strict)
        logger.info(f"{type(self).__name__} takes {len(state_dict)} tensors; none is left out")
        return super().load_state_dict(state_dict, strict, model_cfg, args)

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """As fairseq's, from a file of this architecture or, where its weights fit, of fairseq's ``transformer_lm``.

        Raises:
            ValueError: a file that cannot be read, that would run code, or that holds another architecture.
        """
        for name in checkpoint_file.split(os.pathsep):
            path = os.path.join(model_name_or_path, name)
            if os.path.isdir(model_name_or_path):  # anything else is fairseq's to unpack
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
    if state.get("cfg"):
        model = state["cfg"]["model"]
        name = safe_getattr(model, "arch") if not hasattr(model, "get") else model.get("_name") or model.get("arch")
    else:
        name = safe_getattr(state.get("args"), "arch")
    if not name or "model" not in state:
        raise ValueError(f"the checkpoint {path!r} holds {sorted(state)}; allowed: what fairseq-train writes")
    return name


def registered_names(model: type) -> List[str]:
    """The names under which ``model`` and classes built on it are registered as models."""
    return [name for name, registered in MODEL_REGISTRY.items() if issubclass(registered, model)]


def stock_overrides(state: Dict[str, Any], model: type, options: Dict[str, Any]) -> Dict[str, Any]:
    """Overrides by which fairseq builds ``model`` from a checkpoint of its ``transformer_lm``, and ``options``."""
    name = registered_names(model)[0]
    if not state.get("cfg"):
        post_norm = not safe_getattr(state["args"], "decoder_normalize_before", False)
        return {"arch": name, "lineartime_post_norm": post_norm, **options}
    post_norm = not state["cfg"]["model"].get("decoder_normalize_before", False)
    # Where fairseq is given overrides for the model alone, it does not look for more of them among the others.
    fields = MODEL_DATACLASS_REGISTRY[name].__dataclass_fields__
    ours = {key: value for key, value in options.items() if key in fields}
    return {**options, "model": {"_name": name, "lineartime_post_norm": post_norm, **ours}}
