"""Hints on weights that do not fit: differing attentions, and options that affect weights."""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from fairseq.utils import safe_getattr
from torch import Tensor, nn

from common.attention import ATTENTIONS, InnerAttention
from common.modules.stored_options import is_extra_state, read_extra_state

from .known_options import flag_of, model_options

#: The option of models with different attentions.
_LAYERS = "lineartime_layers"
#: Options of this plugin that change no weight's name or shape.
_WITHOUT_WEIGHTS = ("lineartime_trained_parameters", "lineartime_reset_at_eos", "checkpoint_", "offload_")


def attention_hints(state_dict: dict[str, Any], own: dict[str, Tensor], model_cfg: Any) -> Iterator[str]:
    """A hint for each module where the attentions of a checkpoint differ from those of ``own``, a model's state dict.

    There are no hints for files without records of attentions, such as those of stock models.
    """
    stored, current = _attentions(state_dict), _attentions(own)
    for path in sorted(stored.keys() | current.keys()) if stored else ():
        if stored.get(path) != current.get(path):
            saved, expected = (layer_pattern(x.get(path, ["not of lineartime"])) for x in (stored, current))
            pattern = safe_getattr(model_cfg, _LAYERS)
            option = f"--lineartime-layers, which is {pattern!r} here," if pattern else "--arch and its options"
            yield f"attention of {path} is {saved} in the checkpoint and {expected} here: {option} must be the same"


def option_hints(model: nn.Module, model_cfg: Any) -> Iterator[str]:
    """A hint with the values of the options of ``model``, other than fairseq's, that may affect its weights."""
    base = next(kind for kind in type(model).__mro__ if kind.__module__.startswith("fairseq.models"))
    present = {module.name for module in model.modules() if isinstance(module, InnerAttention)}
    values = []
    for name in sorted(model_options(type(model)) - model_options(base)):
        if model_cfg is not None and not name.startswith(_WITHOUT_WEIGHTS) and _mechanism(name) in (None, *present):
            value = safe_getattr(model_cfg, name)
            value = getattr(value, "value", value)
            shown = "not given" if value is None or value is False else "given" if value is True else value
            values.append(f"{flag_of(name)} {shown}")
    if values:
        yield f"here are {', '.join(values)}; the checkpoint has others of these, or other sizes"


def _attentions(state_dict: dict[str, Any]) -> dict[str, list[str]]:
    """The names of attentions in layer order, by module path with ``*`` in place of the layer number."""
    attentions: dict[str, dict[str, str]] = {}
    for name in filter(is_extra_state, state_dict):
        record = read_extra_state(state_dict[name])
        attention = (record or {"options": {}})["options"].get("attention")
        if attention is not None:
            module = re.sub(r"(\.inner)*\.[^.]+$", "", name)  # of nested ones the innermost comes last
            attentions.setdefault(re.sub(r"\.\d+\.", ".*.", module), {})[module] = attention
    return {path: list(by_layer.values()) for path, by_layer in attentions.items()}


def layer_pattern(names: Iterable[str]) -> str:
    """Names in the format of ``--lineartime-layers``: ``flow*3,softmax``."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs)


def _mechanism(option: str) -> str | None:
    """The mechanism to which ``option`` belongs, by its prefix; None for an option of the model."""
    return max((name for name in ATTENTIONS if option.startswith(f"{name}_")), key=len, default=None)
