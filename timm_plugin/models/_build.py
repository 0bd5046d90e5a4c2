"""Build models with timm's factory, and load weights strictly with an error that names the ways to adapt them."""

import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

from timm.models import build_model_with_cfg
from torch import nn

from common.ops.shared.checks import allowed_names, shortened

from ..layers.layer_spec import option_names

#: It has no handlers: warnings reach the console through Python's handler of last resort.
logger = logging.getLogger("timm_plugin")

#: Arguments that timm's factory accepts in addition to those in its signature.
_FACTORY_ARGUMENTS = ("features_only", "feature_cls", "out_indices", "pruned")

#: The most blocks of a model or of a stage: far more than any has.
_MOST_BLOCKS = 1_000

_HOW_TO_ADAPT = (
    "Nothing is adapted here. Weights of another model, or of other sizes, are adapted by "
    "create_model(..., pretrained=True, pretrained_cfg_overlay=dict(file=...)), in train.py by --pretrained "
    "--pretrained-path FILE, or once and for all by python -m timm_plugin.convert"
)


class StrictLoading:
    """Mixin for an ``nn.Module``: if ``load_state_dict`` fails, the error also says how weights can be adapted."""

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; a RuntimeError also names the ways to adapt weights."""
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{_HOW_TO_ADAPT}") from error


def build(
    model: type[nn.Module],
    filter_fn: Callable,
    variant: str,
    pretrained: bool,
    feature_cfg: dict[str, Any] | None = None,
    **kwargs: Any,
) -> nn.Module:
    """timm's ``build_model_with_cfg``; with ``pretrained=True``, ``filter_fn`` checks and completes the weights.

    A folder (``local-dir:``) or hub stores the arguments of its model. A stored argument that ``model`` does not have
    is ignored with a warning. A changed option that gives the stored weights another meaning is a warning, too.
    ``feature_cfg`` is by default timm's for a vision transformer: features of the last three blocks.
    """
    if feature_cfg is None:
        feature_cfg = dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter")
    stored = kwargs.get("pretrained_model_args") or {}
    options = _options(model, stored) | _options(model, kwargs)
    names = arguments_of(model) | options
    for name in [name for name in stored if name not in names and kwargs.get(name) == stored[name]]:
        logger.warning(f"{variant}: the stored argument {name}={stored[name]!r} is not known here and left out")
        del kwargs[name]
    check_names(variant, kwargs, names)
    check_depth(kwargs)
    if stored and pretrained:
        for name in sorted(options & stored.keys()):  # for others, the record among the weights checks this
            if kwargs.get(name) != stored[name]:
                logger.warning(
                    f"{variant}: {name} is {kwargs.get(name)!r}, but the stored weights belong to {stored[name]!r}: "
                    "the model computes something else than the stored one"
                )
    return build_model_with_cfg(
        model,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        pretrained_strict=False,  # filter_fn has compared all names and shapes before
        feature_cfg=feature_cfg,
        **kwargs,
    )


def check_names(model: str, arguments: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError for the first of ``arguments`` that is not ``allowed`` for ``model``, with the nearest one."""
    allowed = sorted(set(allowed) - {"self", "args", "kwargs", "options"})
    for name in arguments:
        if name not in allowed:
            raise ValueError(f"{model} has no argument {name!r}; {allowed_names(name, allowed)}")


def check_depth(arguments: dict[str, Any]) -> None:
    """Raise ValueError for a ``depth``, or ``depths``, of so many blocks that building them would fill all memory.

    A folder may state any number.
    """
    for name in ("depth", "depths"):
        depth = arguments.get(name)
        for blocks in depth if isinstance(depth, (list, tuple)) else [depth]:
            if isinstance(blocks, (int, float)) and blocks > _MOST_BLOCKS:
                raise ValueError(f"{name} is {shortened(depth)}; allowed: at most {_MOST_BLOCKS:,}")


def _options(model: type, arguments: dict[str, Any]) -> set[str]:
    """Arguments that change the meaning of the weights of ``model`` but no shape: its attention and the options."""
    if hasattr(model, "meaning"):  # it has gated attention units instead of attention layers
        return set(model.meaning)
    if hasattr(model, "mechanism"):  # its attention is fixed
        return option_names(model.mechanism, also=model.mechanism)
    attention = inspect.signature(model).parameters["attn_layer"]
    return {"attn_layer"} | option_names(arguments.get("attn_layer", attention.default))


def arguments_of(model: type) -> set[str]:
    """Names of the arguments of ``model``, its base classes and timm's factory."""
    functions = [cls.__init__ for cls in model.__mro__ if "__init__" in vars(cls)] + [build_model_with_cfg]
    return {name for function in functions for name in inspect.signature(function).parameters} | set(_FACTORY_ARGUMENTS)


def refuse_arguments(arguments: dict[str, Any], allowed: dict[str, Any], model: str) -> None:
    """Raise ValueError for ``arguments`` of timm's ``VisionTransformer`` that are not as ``allowed`` for ``model``."""
    for name in ("attn_layer", "block_fn", "embed_layer"):
        if name in arguments:
            raise ValueError(f"{name} is {arguments[name]!r}; allowed for {model}: not given, it has its own")
    for name, value in allowed.items():
        if name in arguments and arguments[name] != value:
            raise ValueError(f"{name} is {arguments[name]!r}; allowed for {model}: {value!r}")


def check_global_pool(global_pool: str, class_token: bool) -> None:
    """Raise ValueError for pooling by the class token if there is none."""
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool is 'token'; allowed without a class token: '', 'avg' and timm's others")
