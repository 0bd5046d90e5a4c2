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
from .layers.grid import fixed_grid, host_of_tokens, tell_grid

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
    found = attention_modules(model)
    new = {path: _replacement(model.get_submodule(path), layer) for path, reason in found.items() if not reason}
    reasons = Counter(
        f"{type(model.get_submodule(path)).__name__} {reason}" for path, reason in found.items() if reason
    )
    stays = "; ".join(f"{reason} ({count} of them)" for reason, count in reasons.items())
    if not new:
        raise ValueError(
            f"model is a {type(model).__name__} whose attention cannot be replaced: {stays or 'no module is one'}; "
            "allowed: softmax attention of all tokens between projections qkv and proj, with nothing else in it"
        )
    old = {path: model.get_submodule(path) for path in new}
    _put(model, new)
    try:
        tell_grid(model)
    except ValueError:
        _put(model, old)
        raise
    own = Counter(
        parameter for module in new.values() for parameter, _ in module.named_parameters() if _is_new(module, parameter)
    )
    fresh = ", ".join(f"{parameter} ({count})" for parameter, count in own.items())
    notes = [f"these stay: {stays}"] * bool(stays) + [f"these parameters are new: {fresh}"] * bool(fresh)
    if notes:
        logger.warning(f"{type(model).__name__}: {len(new)} attentions are {name!r} now; {'; '.join(notes)}")
    return model


def _put(model: nn.Module, modules: dict[str, nn.Module]) -> None:
    for path, module in modules.items():
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def attention_modules(model: nn.Module, known: dict[Any, str] | None = None) -> dict[str, str]:
    """The paths of the attention in ``model``, each with the reason why it cannot be replaced, "" where it can.

    Attention inside of attention counts once: what can be replaced, or else the innermost.

    Args:
        known: reasons by kind of attention, which is filled and saves the trial of a kind that another model has, too.
    """
    candidates = {path: module for path, module in model.named_modules() if path and _is_attention(module)}
    known = {} if known is None else known
    found: dict[str, str] = {}
    for path, module in candidates.items():
        kind = _kind(module)
        if kind not in known:
            known[kind] = _why_not(module)
        found[path] = known[kind]
    replaced = [path for path, reason in found.items() if not reason]
    return {
        path: reason
        for path, reason in found.items()
        if not reason
        or not (
            any(inner.startswith(f"{path}.") for inner in candidates)
            or any(path.startswith(f"{outer}.") for outer in replaced)
        )
    }


def _tokens_of(model: nn.Module) -> dict[str, Any]:
    """The number of tokens of ``model``, where it is fixed."""
    grid = fixed_grid(model)
    return {} if grid is None else {"max_tokens": grid[0] * grid[1] + host_of_tokens(model).num_prefix_tokens}


def _is_attention(module: nn.Module) -> bool:
    """By the name of its class or, as some classes say nothing, by the names of its children."""
    name = type(module).__name__.lower()
    children = dict(module.named_children())
    return "attention" in name or "attn" in name or "qkv" in children or "attn_drop" in children


def _kind(module: nn.Module) -> tuple[type, str, str]:
    """What decides whether ``module`` can be replaced: its class, its children and its numbers."""
    numbers = {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str, tuple))}
    numbers.pop("training", None)
    parameters = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    return type(module), str(module), repr((sorted(numbers.items()), parameters))


def _is_new(layer: SelfAttention, parameter: str) -> bool:
    return parameter.startswith("attention.") or (parameter.startswith("qkv.") and len(set(layer.widths)) > 1)


def _replacement(module: nn.Module, layer: type[SelfAttention]) -> SelfAttention:
    """A ``layer`` with the children of ``module``; of ``qkv`` it has the rows of the values where widths differ.

    Raises:
        ValueError: the mechanism does not take normalised queries and keys.
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
    tokens = torch.randn(2, 6, children["qkv"].in_features, dtype=torch.float64)
    for x in (tokens, tokens.unflatten(1, (2, 3))):
        try:
            with torch.no_grad():
                same = torch.allclose(stock(x), plain(x))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue
        return "" if same else "computes something else than softmax attention of all tokens"
    return "takes neither tokens (batch, N, C) nor a map of them (batch, rows, columns, C)"


def _with_random_weights(module: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, of modules on the meta device too; no parameter is 0 there."""
    on_meta = any(x.is_meta for x in module.parameters())
    copy = deepcopy(module).to_empty(device="cpu") if on_meta else deepcopy(module).cpu()
    copy.double()
    copy.eval()  # which gives no module back in some of timm's families
    for parameter in copy.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.2)
    return copy
