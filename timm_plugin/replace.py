"""Another attention in a model that is built already, of any of timm's families whose attention can be replaced.

Legend: N tokens, C channels.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import nn

from common.attention import InnerAttention
from common.ops.shared.checks import check_choice

from .layers.attention import SelfAttention, attention_layer, read_grid_size, usable_mechanisms
from .layers.grid import check_given, fixed_grid, host_of_tokens, tell_grid
from .layers.position_bias import Grid
from .models.flowformer import Flowformer

logger = logging.getLogger("timm_plugin")

#: The children of timm's Attention, which the replacement keeps.
_KEPT = ("q_norm", "k_norm", "attn_drop", "norm", "gate", "proj", "proj_drop")
#: Where torch keeps the hooks of a module; there is no public way to move them. The replacement gets the same objects,
#: so that the handles which users hold still remove them.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def replace_attention(
    model: nn.Module, name: str, *, max_tokens: int | None = None, grid_size: Grid | None = None, **options: Any
) -> nn.Module:
    """Replace every softmax self-attention of ``model``, in place, by the mechanism ``name``, and return the model.

    Weights and the names of parameters stay, so that checkpoints of the model still load; what the mechanism has of its
    own is new. A module is replaced if ours, with softmax attention, computes the same from the same parameters, which
    is tried on random tokens, or if it is ours already and projects tokens to queries, keys and values of one width.
    One that stands in several places is replaced by one. Hooks of a replaced module are those of the new one. What
    stays, is new, is gone or is no longer called is a warning.

    New parameters are frozen where the replaced module's are. They are drawn from a generator of their own, seeded by
    torch's: the same seed gives the same parameters, and what is drawn after the call does not change.

    Args:
        model: a model of timm, or any other that holds timm's attention layers.
        name, options: as in ``attention_layer``.
        max_tokens, grid_size: as there, for a model in which they are not found. Of ``Flowformer``, whose stages have
            grids of their own, they are found, and options may be one for each stage.

    Raises:
        ValueError: no attention of ``model`` can be replaced, with the reason for each kind; or this mechanism does not
            fit the model's tokens or projections, or lacks an option or does not allow its value. The model is
            unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; allowed: a built model, such as timm.create_model gives")
    grid_size = read_grid_size(grid_size)
    check_given(model, max_tokens, grid_size)
    layers = _layers_for(model, name, max_tokens, grid_size, options)
    reasons = attention_modules(model)
    stays = _what_stays(model, reasons)
    old = {path: model.get_submodule(path) for path, reason in reasons.items() if not reason}
    if not old:
        raise ValueError(
            f"model is a {type(model).__name__} whose attention cannot be replaced: {stays or _nothing_in(model)}; "
            "allowed: softmax attention of all tokens between projections qkv and proj, with nothing else in it"
        )
    with _own_generator():
        new = {id(module): _replacement(module, layers(path)) for path, module in old.items()}
    places = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if id(module) in new]
    _put(model, [(path, new[id(module)]) for path, module in places])
    try:
        _tell_stages(model, max_tokens, grid_size)
        tell_grid(model)
    except ValueError:
        _put(model, places)
        _tell_stages(model, max_tokens, grid_size)
        raise
    pairs = [(module, new[id(module)]) for module in old.values()]
    notes = [f"these stay: {stays}"] * bool(stays) + _notes_on_changes(pairs)
    for module, replacement in pairs:
        _move_hooks(module, replacement)
    if notes:
        logger.warning(f"{type(model).__name__}: {len(old)} attentions are {name!r} now; {'; '.join(notes)}")
    return model


def _layers_for(
    model: nn.Module, name: str, max_tokens: int | None, grid_size: Grid | None, options: dict[str, Any]
) -> Callable[[str], type[SelfAttention]]:
    """Path of an attention of ``model`` -> the layer for its place: that of its stage, or one for all others."""
    check_choice("attention", name, usable_mechanisms())
    by_stage = {
        f"{path}.stages.{i}.".removeprefix("."): layer
        for path, host in _staged(model, max_tokens, grid_size).items()
        for i, layer in enumerate(host.stage_layers(name, **options))
    }
    if not by_stage:
        layer = _layer_for(model, name, max_tokens, grid_size, options)
        return lambda path: layer

    def of_stage(path: str) -> type[SelfAttention]:
        found = next((layer for stage, layer in by_stage.items() if path.startswith(stage)), None)
        return found or _layer_for(model, name, max_tokens, grid_size, options)

    return of_stage


def _staged(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> dict[str, Flowformer]:
    """The models in ``model`` that tell each of their stages its grid, by path; none where a user says one."""
    if max_tokens is not None or grid_size is not None:
        return {}
    return {path: module for path, module in model.named_modules() if isinstance(module, Flowformer)}


def _tell_stages(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> None:
    for host in _staged(model, max_tokens, grid_size).values():
        host.tell_stages()


def _layer_for(
    model: nn.Module, name: str, max_tokens: int | None, grid_size: tuple[int, int] | None, options: dict[str, Any]
) -> type[SelfAttention]:
    """Attention ``name`` for the tokens of ``model``; ValueError where it must know how many, and nothing says it."""
    tokens = {"max_tokens": max_tokens, **_tokens_of(model)}
    layer = attention_layer(name, grid_size=grid_size, **tokens, **options)
    if layer.needs_tokens():
        or_max_tokens = ", or max_tokens" if host_of_tokens(model) is None else ""  # tell_grid wants one size of images
        raise ValueError(
            f"max_tokens is not given, and {type(model).__name__} has no fixed number of tokens; allowed with "
            f"{name!r}: a vision transformer for one image size (dynamic_img_size=False){or_max_tokens}"
        )
    return layer


def _what_stays(model: nn.Module, reasons: dict[str, str]) -> str:
    """The attention of ``model`` that cannot be replaced: each reason, and how often; "" where there is none."""
    counts = Counter(
        f"{type(model.get_submodule(path)).__name__} {reason}" for path, reason in reasons.items() if reason
    )
    return "; ".join(f"{reason} ({count} of them)" for reason, count in counts.items())


def _notes_on_changes(pairs: list[tuple[nn.Module, nn.Module]]) -> list[str]:
    """What is new or gone in the second module of each pair, which takes the first one's place; counted by part."""
    changes: dict[str, Counter[str]] = {}
    for old, new in pairs:
        for what, part in _changes(old, new):
            changes.setdefault(what, Counter())[part] += 1
    return [
        f"{what}: {', '.join(f'{part} ({count})' for part, count in parts.items())}" for what, parts in changes.items()
    ]


def _put(model: nn.Module, modules: list[tuple[str, nn.Module]]) -> None:
    for path, module in modules:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, module)


def attention_modules(model: nn.Module, known: dict[Any, str] | None = None) -> dict[str, str]:
    """The paths of the attention in ``model``, each with the reason why it cannot be replaced, "" where it can.

    Attention inside of attention counts once: what can be replaced, or else the innermost.

    Args:
        known: reasons by kind of attention, which is filled and saves the trial of a kind that another model has, too.
    """
    candidates = {path: module for path, module in model.named_modules() if path and _is_attention(module)}
    candidates = {path: module for path, module in candidates.items() if not isinstance(module, InnerAttention)}
    known = {} if known is None else known
    reasons: dict[str, str] = {}
    for path, module in candidates.items():
        kind = _kind(module)
        if kind not in known:
            known[kind] = _why_not(module)
        reasons[path] = known[kind]
    replaced = [path for path, reason in reasons.items() if not reason]
    return {
        path: reason
        for path, reason in reasons.items()
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


def _nothing_in(model: nn.Module) -> str:
    if _is_attention(model):
        return "it is an attention itself, and is replaced where it stands: give a model that holds it"
    return "no module is one"


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
    return type(module), str(module), repr((sorted(numbers.items()), parameters, _has_own_forward(module)))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the object computes something else than its class, as some libraries let it."""
    return "forward" in vars(module)


@contextmanager
def _own_generator() -> Iterator[None]:
    """Inside, torch draws on the CPU from another generator, which its own seeds; after it, its own is as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int(torch.randint(2**62, ())))  # torch.manual_seed seeds GPUs as well
        yield


def _replacement(module: nn.Module, layer: type[SelfAttention]) -> SelfAttention:
    """A ``layer`` with the children of ``module``; of ``qkv`` it has the rows of the values where widths differ.

    Raises:
        ValueError: the mechanism does not take normalised queries and keys; it projects to other widths, and ``qkv``
            is no plain layer.
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
        device="meta" if qkv.weight.is_meta else "cpu",  # first weights are drawn from the CPU's generator alone
        dtype=qkv.weight.dtype,
    ).to(qkv.weight.device)
    if all(not parameter.requires_grad for parameter in module.parameters()):
        new.requires_grad_(False)
    for child in _KEPT:
        if isinstance(getattr(module, child, None), nn.Module):
            setattr(new, child, getattr(module, child))
    if len(set(new.widths)) == 1:
        new.qkv = qkv
    else:
        _copy_values(new, qkv)
    new.training = module.training
    new.attention.train(module.training)
    return new


def _copy_values(new: SelfAttention, qkv: nn.Linear) -> None:
    """Give ``new.qkv`` the rows of ``qkv`` that are the projection to values."""
    own = dict(qkv.named_parameters())
    if type(qkv) is not nn.Linear or not set(own) <= {"weight", "bias"}:
        raise ValueError(
            f"qkv is a {type(qkv).__name__} of parameters {', '.join(own)}; allowed with attention {new.mechanism!r}, "
            "which projects to other widths: a torch.nn.Linear without parametrisation, pruning or adapters"
        )
    with torch.no_grad():
        for name, parameter in new.qkv.named_parameters():
            parameter[-new.widths[2] :] = own[name][-new.widths[2] :]
            parameter.requires_grad_(own[name].requires_grad)


def _changes(module: nn.Module, new: SelfAttention) -> Iterator[tuple[str, str]]:
    """What a user must know of ``new`` in the place of ``module``: (what happened, the name of the part)."""
    before = {id(parameter) for parameter in module.parameters()}
    after = {id(parameter) for parameter in new.parameters()}
    for name, parameter in new.named_parameters():
        if id(parameter) not in before:
            yield "these parameters are new" + ("" if parameter.requires_grad else ", and frozen"), name
    for name, parameter in module.named_parameters():
        if id(parameter) not in after and not name.startswith("qkv."):  # of which the values were taken over
            yield "these parameters are gone", name
    parts = dict(new.named_modules())
    unused = {"attn_drop", *(name for name, used in (("q_norm", new.has_query), ("k_norm", new.has_key)) if not used)}
    for name, part in module.named_modules():
        is_hooked = any(getattr(part, hooks) for hooks in _HOOKS)
        if name and is_hooked and (name in unused or parts.get(name) is not part):
            yield "hooks of these parts are not called any more", name


def _move_hooks(module: nn.Module, new: nn.Module) -> None:
    """Make the hooks of ``module`` those of ``new``."""
    for name in _HOOKS:
        setattr(new, name, getattr(module, name))
    new._is_full_backward_hook = module._is_full_backward_hook
    for key, hook in new._load_state_dict_pre_hooks.items():
        if hook.with_module:  # torch has bound it to the module it was registered with
            new._load_state_dict_pre_hooks[key] = type(hook)(hook.hook, new)


def _why_not(module: nn.Module) -> str:
    """Why ``module`` cannot be replaced, or ""."""
    children = dict(module.named_children())
    if not (isinstance(children.get("qkv"), nn.Linear) and isinstance(children.get("proj"), nn.Linear)):
        return "has no projections qkv and proj"
    others = [name for name in list(signature(module.forward).parameters)[1:] if name not in ("attn_mask", "is_causal")]
    if others:
        return f"is called with {', '.join(others)} as well"
    heads = getattr(module, "num_heads", None)
    if isinstance(module, SelfAttention):
        return "" if len(set(module.widths)) == 1 else f"has the projections of {module.mechanism!r}, without keys"
    if not isinstance(heads, int) or children["qkv"].out_features % (3 * heads):
        return "has queries, keys and values of different widths"
    if _has_own_forward(module):
        return "has a forward that was set on the object"
    with _own_generator():
        return _what_differs(module)


def _what_differs(module: nn.Module) -> str:
    """In what ours with softmax attention is not ``module``, or ""."""
    stock = _with_random_weights(module)
    plain = _replacement(stock, attention_layer("softmax"))
    own = sorted(set(stock.state_dict()) - set(plain.state_dict()))
    if own:
        return f"has {', '.join(own)} of its own"
    tokens = torch.randn(2, 6, stock.qkv.in_features, dtype=torch.float64)
    for x in (tokens, tokens.unflatten(1, (2, 3))):
        try:
            with torch.no_grad():
                same = torch.allclose(stock(x), plain(x))
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue
        return "" if same else "computes something else than softmax attention of all tokens"
    return "takes neither tokens (batch, N, C) nor a map of them (batch, rows, columns, C)"


def _with_random_weights(module: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, of modules on the meta device too; no parameter is 0 there.

    Its projections are plain layers, whatever computes the weights of the module's, which the replacement keeps as they
    are. It has no hooks: those of users must not see random tokens.
    """
    copied: dict[int, Any] = {id(getattr(part, name)): OrderedDict() for part in module.modules() for name in _HOOKS}
    for layer in (module.qkv, module.proj):
        copied[id(layer)] = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    on_meta = any(x.is_meta for x in module.parameters())
    copy = deepcopy(module, copied)
    copy = copy.to_empty(device="cpu") if on_meta else copy.cpu()
    copy.double()
    copy.eval()  # which gives no module back in some of timm's families
    for parameter in copy.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.2)
    return copy
