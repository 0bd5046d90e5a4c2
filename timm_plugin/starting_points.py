"""Stock vision transformers, timm's ViT and DeiT, as a start for those of ours that have their shape.

Weights of softmax attention never make the same model: what is taken, left out and new is logged when it is loaded.
"""

import math
from typing import Any, Dict, List, Tuple

from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

from common.checkpoints import complete_state_dict

from .checkpoints import unwrapped
from .loading import Adapted

#: The second classifier of a distilled transformer, which none of ours has.
_DISTILLED_HEAD = "head_dist."
#: Tokens beside those of patches; their positions come first in ``pos_embed``, in this order.
_PREFIX_TOKENS = ("cls_token", "dist_token")
#: Parts of a stock vision transformer that DAFT-conv has no place for.
_PREFIX_AND_POSITIONS = ("pos_embed", "cls_token", "dist_token", "reg_token")


def is_stock(state_dict: Dict[str, Any]) -> bool:
    """Whether a state dict is of a vision transformer without DAFT."""
    return "blocks.0.attn.qkv.weight" in state_dict and not any(".attn.attention." in name for name in state_dict)


def is_distilled(state_dict: Dict[str, Any]) -> bool:
    """Whether a state dict is of a vision transformer with a token, and a second classifier, for distillation."""
    return "dist_token" in state_dict


def start_same_shape(state_dict: Dict[str, Any], model: nn.Module) -> Adapted:
    """A stock state dict for Flowformer's DeiT or DAFT-full: everything; DAFT-full's position biases are new.

    One of our own DeiT is such a state dict too.
    """
    return Adapted(*_fit_vision_transformer(unwrapped(state_dict), model))


def start_conv(state_dict: Dict[str, Any], model: nn.Module) -> Adapted:
    """A stock state dict for DAFT-conv, by the paper's procedure.

    All is taken but position embedding, class token, and the projections to keys and queries, which with the filters
    are new; of ``qkv`` the last C rows, those of the values, are taken.
    """
    state_dict = dict(unwrapped(state_dict))
    positions = [name for name in _PREFIX_AND_POSITIONS if state_dict.pop(name, None) is not None]
    tensors, left_out, new = _fit_vision_transformer(state_dict, model)
    own, in_part = model.state_dict(), {}
    for name, stock in tensors.items():
        joined = own.get(name)
        if ".attn.qkv." in name and joined is not None and _is_joined(stock, joined, model.embed_dim):
            joined = joined.clone()
            joined[-model.embed_dim :] = stock[-model.embed_dim :]
            tensors[name] = joined
            in_part[name] = "the values"
    return Adapted(tensors, positions + left_out, new, in_part)


def _is_joined(stock: Tensor, own: Tensor, dim: int) -> bool:
    """Whether ``stock`` is queries, keys and values of width ``dim`` in one, for inputs as wide as those of ``own``."""
    return len(stock) == 3 * dim and stock.shape[1:] == own.shape[1:]


def _fit_vision_transformer(
    state_dict: Dict[str, Any], model: nn.Module
) -> Tuple[Dict[str, Tensor], List[str], List[str]]:
    """The tensors of a vision transformer as ``model`` has them, and what was left out and is new.

    Patches and positions are resampled by timm; the last normalisation stands before or after the pool.
    """
    state_dict, own = dict(state_dict), model.state_dict()
    left_out = _cut_prefix_tokens(state_dict, own)
    for parameter in ("weight", "bias"):
        names = f"norm.{parameter}", f"fc_norm.{parameter}"
        for there, here in (names, names[::-1]):
            if there in state_dict and here not in state_dict and here in own and there not in own:
                state_dict[here] = state_dict.pop(there)
    tensors = checkpoint_filter_fn(state_dict, model, adapt_layer_scale=True)
    transfer = complete_state_dict(
        tensors, model, lambda name: name.startswith(_DISTILLED_HEAD), lambda name: ".attn.attention." in name
    )
    return tensors, left_out + transfer.left_out, transfer.new


def _cut_prefix_tokens(state_dict: Dict[str, Any], own: Dict[str, Tensor]) -> List[str]:
    """Take tokens that the model has not out of ``state_dict``, and their positions; their names."""
    present = [name for name in _PREFIX_TOKENS if name in state_dict]
    cut = [name for name in present if name not in own]
    for name in cut:
        del state_dict[name]
    positions = state_dict.get("pos_embed")
    # A square number of positions are those of patches alone (timm's no_embed_class).
    if cut and positions is not None and math.isqrt(positions.shape[1]) ** 2 != positions.shape[1]:
        kept = [i for i, name in enumerate(present) if name not in cut]
        state_dict["pos_embed"] = positions[:, kept + list(range(len(present), positions.shape[1]))]
    return cut
