"""Loading that is checked as a whole before it begins, and says what it took, left out and found no weights for."""

import inspect
import logging
from typing import Any, Dict, Iterable, Optional, Set, Tuple

from timm.models import adapt_input_conv, build_model_with_cfg
from torch import Tensor, nn

from common.checkpoints import Transfer, check_state_dict

logger = logging.getLogger(__name__)

#: Channels that ``adapt_input_conv`` can make others of.
_COLOURS = 3
#: What timm's factory takes by itself before a model's own arguments.
_FACTORY_ARGUMENTS = ("features_only", "feature_cls", "out_indices", "pruned")


class Adapted(Dict[str, Tensor]):
    """A state dict made for one model from a checkpoint that may be of another, and what was made of that.

    Args:
        tensors: names and tensors as the model has them.
        left_out: names of the checkpoint that have no place in the model.
        new: names among ``tensors`` whose weights are the model's own.
        in_part: the same where some of the weights are the checkpoint's -> which.
    """

    def __init__(
        self,
        tensors: Dict[str, Tensor],
        left_out: Iterable[str] = (),
        new: Iterable[str] = (),
        in_part: Optional[Dict[str, str]] = None,
    ) -> None:
        super().__init__(tensors)
        self.left_out, self.new, self.in_part = list(left_out), list(new), dict(in_part or {})


class CheckedLoading:
    """In front of a timm model: ``load_state_dict`` takes foreign state dicts, and one ValueError says what is wrong.

    Nothing is loaded then, and the model is as it was. What was loaded is logged.
    """

    #: Modules whose shapes follow the images' channels and the number of classes.
    stem_name = "patch_embed.proj"
    classifier_name = "head"

    def adapt_foreign(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """``state_dict`` as it is, or, where it has another layout that this model knows, ``Adapted`` to it."""
        return state_dict

    def load_state_dict(self, state_dict: Dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; ValueError unless all of ``state_dict`` fits, or what has a place if not ``strict``.

        Of one that was ``Adapted`` all must fit in either case, but for a classifier that timm took out.
        """
        if not isinstance(state_dict, Adapted):
            adapted = self.adapt_foreign(state_dict)
            state_dict = fit_stem_and_head(adapted, self) if isinstance(adapted, Adapted) else state_dict
        own = self.state_dict()
        head = {name: own[name] for name in _parameters(self.classifier_name) if name in own}
        without_head = isinstance(state_dict, Adapted) and not strict and not any(name in state_dict for name in head)
        try:
            complete = {**state_dict, **head} if without_head else state_dict
            check_state_dict(complete, self, shapes_only=not strict and not without_head)
        except ValueError as error:
            raise ValueError(
                f"{error}. (Other sizes of image and patch, channels and classes are fitted by pretrained=True with "
                "pretrained_cfg_overlay=dict(file=...), train.py's --pretrained --pretrained-path)"
            ) from error
        result = super().load_state_dict(state_dict, strict, assign)
        logger.info(f"{type(self).__name__}: {transfer(state_dict, own).summary()}")
        return result


def transfer(state_dict: Dict[str, Any], own: Dict[str, Tensor]) -> Transfer:
    """What became of ``state_dict``, ``Adapted`` or not, in a model whose state dict is ``own``."""
    found = state_dict if isinstance(state_dict, Adapted) else Adapted(state_dict)
    taken = [name for name in found if name in own and name not in found.new and name not in found.in_part]
    in_part = [f"{name} but for {which}" for name, which in found.in_part.items()]
    new = [name for name in own if name in found.new or name not in found]
    return Transfer(taken, found.left_out + [name for name in found if name not in own], in_part + new)


def fit_stem_and_head(adapted: Adapted, model: CheckedLoading) -> Adapted:
    """``adapted`` for other image channels, summed or repeated as timm does, and for other classes or none.

    A classifier for other classes is the model's own, new. timm does both by itself for ``pretrained=True``.
    """
    own = model.state_dict()
    fitted = Adapted(adapted, adapted.left_out, adapted.new, adapted.in_part)
    stem, _ = _parameters(model.stem_name)
    if stem in fitted and fitted[stem].dim() == 4 and fitted[stem].shape[1] == _COLOURS:
        fitted[stem] = adapt_input_conv(own[stem].shape[1], fitted[stem])
    head = [name for name in _parameters(model.classifier_name) if name in fitted]
    for name in head:
        if name not in own:
            del fitted[name]
            fitted.left_out.append(name)
        elif len(fitted[name]) != len(own[name]) and fitted[name].shape[1:] == own[name].shape[1:]:
            fitted[name] = own[name].clone()
            fitted.new.append(name)
    return fitted


def build(model: type, variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    """timm's ``build_model_with_cfg``; stored arguments that ``model`` does not know are left out, with a warning.

    They come from a folder (``local-dir:``) or hub that another version has written; what a caller gives is never left
    out. Arguments that are not stored have their defaults.
    """
    stored = kwargs.get("pretrained_model_args") or {}
    unknown = [name for name in stored if name not in _arguments(model) and kwargs.get(name) == stored[name]]
    for name in unknown:
        logger.warning(f"{variant}: the stored argument {name}={stored[name]!r} is not known here and left out")
        del kwargs[name]
    return build_model_with_cfg(model, variant, pretrained, **kwargs)


def _arguments(model: type) -> Set[str]:
    """Names of the arguments that ``model``, with its base classes, or timm's factory takes."""
    takers = [cls.__init__ for cls in model.__mro__ if "__init__" in vars(cls)] + [build_model_with_cfg]
    return {name for taker in takers for name in inspect.signature(taker).parameters} | set(_FACTORY_ARGUMENTS)


def _parameters(layer: str) -> Tuple[str, str]:
    return f"{layer}.weight", f"{layer}.bias"
