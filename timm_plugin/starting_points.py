"""Weights of other models as a start for ours, and loading that is checked as a whole before it begins.

Stock vision transformers (timm's ViT and DeiT) start DAFT, the authors' released Flowformer is one of ours by other
names. What is taken, left out and new is logged; weights of softmax attention never make the same model.
"""

import logging
from typing import Any, Dict

from timm.models import adapt_input_conv
from timm.models.vision_transformer import checkpoint_filter_fn as stock_filter_fn
from torch import Tensor, nn

from common.checkpoints import Transfer, check_state_dict, complete_state_dict

from .checkpoints import unwrapped

logger = logging.getLogger(__name__)

#: Parts of a stock vision transformer that DAFT-conv has no place for.
_PREFIX_AND_POSITIONS = ("pos_embed", "cls_token", "dist_token", "reg_token")
#: The second classifier of a distilled one, which none of ours has.
_DISTILLED = ("head_dist.", "dist_token")


class CheckedLoading:
    """In front of a timm model: ``load_state_dict`` takes foreign state dicts, and one ValueError says what is wrong.

    Nothing is loaded then, and the model is as it was.
    """

    def adapt_foreign(self, state_dict: Dict[str, Any]) -> Dict[str, Any]:
        """``state_dict`` as it is, or one of another layout that this model knows in its own."""
        return state_dict

    def load_state_dict(self, state_dict: Dict[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's; ValueError unless all of ``state_dict`` fits, or what has a place if not ``strict``."""
        adapted = self.adapt_foreign(state_dict)
        if adapted is not state_dict:
            adapted = fit_stem_and_head(adapted, self)
        check_state_dict(adapted, self, shapes_only=not strict)
        return super().load_state_dict(adapted, strict, assign)


def fit_stem_and_head(state_dict: Dict[str, Tensor], model: nn.Module) -> Dict[str, Tensor]:
    """A foreign state dict for other image channels, summed or repeated as timm does, and a new head for other classes.

    timm does both by itself for ``pretrained=True``, this is for a ``checkpoint_path``.
    """
    state_dict, own = dict(state_dict), model.state_dict()
    cfg = model.pretrained_cfg
    stem, head = f"{cfg['first_conv']}.weight", cfg["classifier"]
    channels = own[stem].shape[1]
    if stem in state_dict and state_dict[stem].shape[1] != channels:
        state_dict[stem] = adapt_input_conv(channels, state_dict[stem])
    for name in (f"{head}.weight", f"{head}.bias"):
        if name in state_dict and name in own and state_dict[name].shape != own[name].shape:
            classes = len(state_dict[name]), len(own[name])
            logger.info(f"{name} is new: the checkpoint has {classes[0]} classes, the model {classes[1]}")
            state_dict[name] = own[name].clone()
    return state_dict


def is_stock(state_dict: Dict[str, Any]) -> bool:
    """Whether a state dict is of a vision transformer without DAFT."""
    return "blocks.0.attn.qkv.weight" in state_dict and not any(".attn.attention." in name for name in state_dict)


def start_full(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Tensor]:
    """A stock state dict for DAFT-full: everything but its position biases, which are new."""
    state_dict = dict(stock_filter_fn(dict(unwrapped(state_dict)), model))
    transfer = complete_state_dict(
        state_dict, model, lambda name: name.startswith(_DISTILLED), lambda name: ".attn.attention." in name
    )
    logger.info(f"DAFT-full from a stock vision transformer: {transfer.summary()}")
    return state_dict


def start_conv(state_dict: Dict[str, Any], model: nn.Module) -> Dict[str, Tensor]:
    """A stock state dict for DAFT-conv, by the paper's procedure.

    All is taken but position embedding, class token, and the projections to keys and queries, which with the filters
    are new; of ``qkv`` the last C rows, those of the values, are taken.
    """
    state_dict = dict(unwrapped(state_dict))
    left_out = [name for name in state_dict if name.startswith((*_PREFIX_AND_POSITIONS, *_DISTILLED))]
    for name in left_out:
        del state_dict[name]
    own = model.state_dict()
    for name in ("weight", "bias"):  # one normalisation stands before the pool here, after it in some others
        if f"norm.{name}" in own and f"norm.{name}" not in state_dict and f"fc_norm.{name}" in state_dict:
            state_dict[f"norm.{name}"] = state_dict.pop(f"fc_norm.{name}")
    state_dict = dict(stock_filter_fn(state_dict, model))
    in_part = []
    for name in [name for name in state_dict if ".attn.qkv." in name and name in own]:
        dim, stock, joined = model.embed_dim, state_dict[name], own[name].clone()
        if len(stock) == 3 * dim and stock.shape[1:] == joined.shape[1:]:
            joined[-dim:] = stock[-dim:]
            state_dict[name] = joined
            in_part.append(name)
    transfer = complete_state_dict(state_dict, model, lambda _: False, lambda name: ".attn.attention." in name)
    taken = [name for name in transfer.taken if name not in in_part]
    transfer = Transfer(taken, left_out, [f"{name} but for the values" for name in in_part] + transfer.new)
    logger.info(f"DAFT-conv from a stock vision transformer: {transfer.summary()}")
    return state_dict
