"""Another attention in a model that is built already, of any of timm's families whose attention can be replaced.

Legend: N tokens, C channels.
"""

import logging
from collections import Counter
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import nn

from .layers.attention import SelfAttention, attention_layer

logger = logging.getLogger("timm_plugin")

#: The children of timm's Attention, which the replacement keeps.
_KEPT = ("q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")


def replace_attention(model: nn.Module, name: str, **options: Any) -> nn.Module:
    """Replace every softmax self-attention of ``model``, in place, by the mechanism ``name``, and return the model.

    Weights and the names of parameters stay, so that checkpoints of the model still load; what the mechanism has of its
    own is new. A module is replaced if ours, with softmax attention, computes the same from the same parameters, which
    is tried on random tokens. What stays or is new is a warning.

    Args:
        model: a model of timm, or any other that holds timm's attention layers.
        name, options: as in ``attention_layer``; the number and the grid of the tokens are found in the model.

    Raises:
        ValueError: no attention of ``model`` can be replaced, with the reason for each kind; or this mechanism does not
            fit the model's tokens, or lacks an option or does not allow its value. The model is unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; allowed: a built model, such as timm.create_model gives")
    layer = attention_layer(name, **_tokens_of(model), **options)
    candidates = {path: module for path, module in model.named_modules() if _is_attention(module)}
    reasons, kinds, new = Counter(), {}, {}
    for path, module in candidates.items():
        kind = (type(module), str(module))
        if kind not in kinds:
            kinds[kind] = _why_not(module)
        if not kinds[kind]:
            new[path] = _replacement(module, layer)
        elif not any(x.startswith(f"{path}.") for x in candidates) and not any(path.startswith(f"{x}.") for x in new):
            reasons[f"{type(module).__name__} {kinds[kind]}"] += 1
    stays = "; ".join(f"{reason} ({count} of them)" for reason, count in reasons.items())
    if not new:
        raise ValueError(
            f"model is a {type(model).__name__} whose attention cannot be replaced: {stays or 'no module is one'}; "
            "allowed: softmax attention of all tokens between projections qkv and proj, with nothing else in it"
        )
    for path, module in new.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
    own = Counter(
        parameter for module in new.values() for parameter, _ in module.named_parameters() if _is_new(module, parameter)
    )
    fresh = ", ".join(f"{parameter} ({count})" for parameter, count in own.items())
    notes = [f"these stay: {stays}"] * bool(stays) + [f"these parameters are new: {fresh}"] * bool(fresh)
    if notes:
        logger.warning(f"{type(model).__name__}: {len(new)} attentions are {name!r} now; {'; '.join(notes)}")
    return model


def _tokens_of(model: nn.Module) -> dict[str, Any]:
    """The number of tokens of ``model`` and, without class token and registers, their grid, where they are fixed."""
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    prefix = getattr(model, "num_prefix_tokens", None)
    if grid is None or prefix is None or getattr(model, "dynamic_img_size", False):
        return {}
    return {"max_tokens": grid[0] * grid[1] + prefix, "grid_size": None if prefix else tuple(grid)}


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _is_new(layer: SelfAttention, parameter: str) -> bool:
    return parameter.startswith("attention.") or (parameter.startswith("qkv.") and len(set(layer.widths)) > 1)


def _replacement(module: nn.Module, layer: type[SelfAttention]) -> SelfAttention:
    """A ``layer`` with the children of ``module``; of ``qkv`` it has the rows of the values where widths differ.

    Raises:
        ValueError: the mechanism does not take normalised queries and keys, or tokens that lie on no known grid.
    """
    qkv, proj = module.qkv, module.proj
    new = layer(
        qkv.in_features,
        module.num_heads,
        attn_head_dim=qkv.out_features // (3 * module.num_heads),
        dim_out=proj.out_features,
        qkv_bias=qkv.bias is not None,
        qk_norm=not isinstance(getattr(module, "q_norm", nn.Identity()), nn.Identity),
        norm_layer=nn.LayerNorm,
        device=qkv.weight.device,
        dtype=qkv.weight.dtype,
    )
    if new.needs_grid and new.grid_size is None:
        raise ValueError(
            f"the model's tokens are not those of one grid; allowed with {layer.mechanism!r}: one image size "
            "(dynamic_img_size=False), class_token=False, global_pool='avg' and no registers"
        )
    for child in _KEPT:
        if isinstance(getattr(module, child, None), nn.Module):
            setattr(new, child, getattr(module, child))
    if len(set(new.widths)) == 1:
        new.qkv = qkv
    else:
        with torch.no_grad():
            for own, old in zip(new.qkv.parameters(), qkv.parameters()):
                own[-new.widths[2] :] = old[-new.widths[2] :]
    return new.train(module.training)


def _why_not(module: nn.Module) -> str:
    """Why ``module`` cannot be replaced, or ""."""
    children = dict(module.named_children())
    if not (isinstance(children.get("qkv"), nn.Linear) and isinstance(children.get("proj"), nn.Linear)):
        return "has no projections qkv and proj"
    others = [name for name in list(signature(module.forward).parameters)[1:] if name not in ("attn_mask", "is_causal")]
    if others:
        return f"is called with {', '.join(others)} as well"
    heads = getattr(module, "num_heads", None)
    if not isinstance(heads, int) or children["qkv"].out_features % (3 * heads):
        return "has queries, keys and values of different widths"
    stock = _with_random_weights(module)
    plain = _replacement(stock, attention_layer("softmax"))
    own = sorted(set(stock.state_dict()) - set(plain.state_dict()))
    if own:
        return f"has {', '.join(own)} of its own"
    x = torch.randn(2, 6, children["qkv"].in_features, dtype=torch.float64)
    try:
        with torch.no_grad():
            same = torch.allclose(stock(x), plain(x))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        return (
            f"does not take tokens (batch, N, C): {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
    return "" if same else "computes something else than softmax attention of all tokens"


def _with_random_weights(module: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, of modules on the meta device too; no parameter is 0 there."""
    on_meta = any(x.is_meta for x in module.parameters())
    copy = deepcopy(module).to_empty(device="cpu") if on_meta else deepcopy(module).cpu()
    copy.double()
    copy.eval()  # which gives no module back in some of timm's families
    for parameter in copy.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.2)
    return copy
