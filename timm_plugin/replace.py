"""Replace the attention of a built model, for all of timm's model families in which that is possible.

Legend: N tokens, C channels.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any, NoReturn

import torch
from torch import nn

from common.attention import InnerAttention

from .layers.attention import Placeholder, SelfAttention, attention_layer, read_grid_size
from .layers.grid import check_tokens, tell_grid
from .layers.position_bias import Grid
from .layers_by_path import AttentionLike, flowformers_in, layers_by_path, modules_of, read_specs
from .to_folder import store_where_possible

logger = logging.getLogger("timm_plugin")

#: The children of timm's Attention that the replacement keeps and calls.
_KEPT = ("q_norm", "k_norm", "norm", "gate", "proj", "proj_drop")
#: Where torch keeps the hooks of a module; no public function moves them. The replacement gets the same objects, so
#: users' handles still remove them.
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
    model: nn.Module,
    name: AttentionLike | Mapping[str, AttentionLike],
    *,
    max_tokens: int | None = None,
    grid_size: Grid | None = None,
    **options: Any,
) -> nn.Module:
    """Replace the softmax self-attention of ``model``, in place, by the mechanism ``name``, and return the model.

    Weights and names of parameters are kept, so checkpoints of the model still load; the mechanism's own parameters are
    new. A module is replaced if our softmax attention computes the same from the same parameters, which is tested on
    random tokens, or if it is already our layer and projects tokens to queries, keys and values of one width. A module
    in several places is replaced by one module. Its hooks move to the new module. A warning lists the attention that
    is not replaced, the parameters that are new or gone, and the hooks that are no longer called.

    New parameters are frozen if the replaced module's are. They are drawn from a separate generator, which torch's
    seeds: the same seed gives the same parameters, and random numbers after the call do not change. Make the optimiser
    after the call; one that was made before has the old parameters.

    Args:
        model: a timm model, or any other model with timm's attention layers.
        name: a mechanism as in ``attention_layer``, for all attention that can be replaced; or a class that it returns;
            or a pattern of names, such as "flow*3,softmax", that repeats over the attentions in the order of the
            model's modules, and over the stages of ``Flowformer``; or a mapping from places to mechanisms,
            {"blocks.0-8": "flow", "blocks.11": ("lolcats", {"window": 16})}, which replaces only these. A place is the
            path of a module; a range of numbers in it means several modules, and all attention in it is replaced. A
            mechanism in a mapping is a name, a pair of a name and its options, or a class.
        max_tokens, grid_size: as in ``attention_layer``, for a model in which they cannot be found. In ``Flowformer``,
            where each stage has its own grid, they are found, and an option may have one value for each stage.
        options: of the mechanism; in a pattern, of every mechanism that has it.

    Raises:
        ValueError: a model of TorchScript, torch.fx or torch.export; no attention of ``model``, or of a place, can be
            replaced (with the reason for each kind); a place that does not exist or has no attention, or two places
            with the same attention; a pattern of more layers than there are; a mechanism that does not fit the model's
            tokens or projections; an unknown option or an invalid value. The model is then unchanged.
    """
    pairs, stays = swap_attention(model, name, max_tokens, grid_size, **options)
    notes = [f"these stay: {stays}"] * bool(stays) + _notes_on_changes(pairs)
    for module, replacement in pairs:
        _move_hooks(module, replacement)
    if any(note.startswith("these parameters are new") for note in notes):
        notes.append("an optimiser that was made before does not have them")
        notes.append("python -m timm_plugin.transfer teaches them what the attention gave that was there")
    if notes:
        logger.warning(f"{type(model).__name__}: {_what_is_new(pairs)}; {'; '.join(notes)}")
    store_where_possible(model)
    return model


def swap_attention(
    model: nn.Module,
    name: AttentionLike | Mapping[str, AttentionLike],
    max_tokens: int | None = None,
    grid_size: Grid | None = None,
    **options: Any,
) -> tuple[list[tuple[nn.Module, SelfAttention]], str]:
    """``replace_attention`` without its warning: (old, new) pairs of modules, and a text on attention not replaced.

    Hooks are not moved.

    Raises:
        ValueError: as ``replace_attention``.
    """
    _check_model(model)
    grid_size = read_grid_size(grid_size)
    check_tokens(model, max_tokens, grid_size)
    specs = read_specs(name, options)
    reasons = attention_modules(model)
    layers: dict[str, type[SelfAttention]] = {}
    places = modules_of(model, list(specs), list(reasons))
    for place, inside in places.items():
        paths = [path for path in inside if not reasons[path]]
        if not paths:
            _refuse(model, place, {path: reasons[path] for path in inside})
        layers |= layers_by_path(model, specs[place], paths, max_tokens, grid_size)
    stays = _what_stays(model, {path: reasons[path] for paths in places.values() for path in paths})
    return _swap(model, layers, max_tokens, grid_size), stays


def _check_model(model: Any) -> None:
    """Raise ValueError unless layers of ``model`` can be swapped."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; allowed: a built model, such as timm.create_model gives")
    if isinstance(model, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        kind = (
            "TorchScript" if isinstance(model, torch.jit.ScriptModule) else "a graph that torch.fx or torch.export made"
        )
        raise ValueError(
            f"model is a {type(model).__name__}, {kind}, whose layers are fixed; allowed: the model it was made of, "
            "and then torch.jit.script, torch.jit.trace, torch.fx or torch.export again"
        )


def _swap(
    model: nn.Module, layers: Mapping[str, type[SelfAttention]], max_tokens: int | None, grid_size: Grid | None
) -> list[tuple[nn.Module, SelfAttention]]:
    """Replace the attention of ``model`` at the paths of ``layers``; returns (old, new) pairs of modules.

    Raises:
        ValueError: they do not fit the model, which is then unchanged.
    """
    paths = {model.get_submodule(path): path for path in layers}
    with _own_generator():
        replacements = {module: _replacement(module, layers[path]) for module, path in paths.items()}
    put_modules(model, replacements)
    try:
        _set_stage_grids(model, max_tokens, grid_size)
        tell_grid(model)
    except ValueError:
        put_modules(model, {new: old for old, new in replacements.items()})
        _set_stage_grids(model, max_tokens, grid_size)
        raise
    return list(replacements.items())


def _refuse(model: nn.Module, place: str, reasons: dict[str, str]) -> NoReturn:
    where = f" in {place}" if place else ""
    raise ValueError(
        f"model is a {type(model).__name__} whose attention{where} cannot be replaced: "
        f"{_what_stays(model, reasons) or _nothing_in(model)}; "
        "allowed: softmax attention of all tokens between projections qkv and proj, with nothing else in it"
    )


def _what_is_new(pairs: list[tuple[nn.Module, SelfAttention]]) -> str:
    counts = Counter(new.mechanism for _, new in pairs)
    if len(counts) == 1:
        return f"{len(pairs)} attentions are {pairs[0][1].mechanism!r} now"
    kinds = ", ".join(f"{name!r} ({count})" for name, count in counts.items())
    return f"{len(pairs)} attentions are others now: {kinds}"


def _set_stage_grids(model: nn.Module, max_tokens: int | None, grid_size: Grid | None) -> None:
    for host in flowformers_in(model, max_tokens, grid_size).values():
        host.set_grid_of_neighbours()


def _what_stays(model: nn.Module, reasons: dict[str, str]) -> str:
    """The attention of ``model`` that cannot be replaced: each reason with its count; "" if there is none."""
    counts = Counter(
        f"{type(model.get_submodule(path)).__name__} {reason}" for path, reason in reasons.items() if reason
    )
    return "; ".join(f"{reason} ({count} of them)" for reason, count in counts.items())


def _notes_on_changes(pairs: list[tuple[nn.Module, nn.Module]]) -> list[str]:
    """Notes on new and missing parts if the second module of each pair replaces the first; counted by part."""
    changes: dict[str, Counter[str]] = {}
    for old, new in pairs:
        for change, part in _changes(old, new):
            changes.setdefault(change, Counter())[part] += 1
    return [
        f"{change}: {', '.join(f'{part} ({count})' for part, count in parts.items())}"
        for change, parts in changes.items()
    ]


def put_modules(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace each key of ``replacements`` by its value, wherever it is in ``model``."""
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module in replacements:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, replacements[module])


def attention_modules(model: nn.Module, reasons_by_kind: dict[Any, str] | None = None) -> dict[str, str]:
    """The paths of the attention in ``model``, each with the reason why it cannot be replaced, "" if it can.

    Of nested attention only one module counts: the replaceable one, or else the innermost.

    Args:
        reasons_by_kind: a cache that is filled here, so that a kind of attention is tried once for several models.
    """
    candidates = {path: module for path, module in model.named_modules() if path and _is_attention(module)}
    candidates = {path: module for path, module in candidates.items() if not isinstance(module, InnerAttention)}
    reasons_by_kind = {} if reasons_by_kind is None else reasons_by_kind
    reasons: dict[str, str] = {}
    for path, module in candidates.items():
        kind = _kind(module)
        if kind not in reasons_by_kind:
            reasons_by_kind[kind] = _why_not(module)
        reasons[path] = reasons_by_kind[kind]
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


def _nothing_in(model: nn.Module) -> str:
    if _is_attention(model):
        return "it is an attention itself, and is replaced where it stands: give a model that holds it"
    return "no module is one"


def _is_attention(module: nn.Module) -> bool:
    """Whether ``module`` is attention, by the name of its class or by the names of its children."""
    name = type(module).__name__.lower()
    children = dict(module.named_children())
    return "attention" in name or "attn" in name or "qkv" in children or "attn_drop" in children


def _kind(module: nn.Module) -> tuple[type, str, str]:
    """Properties that decide whether ``module`` can be replaced: its class, its children and its numbers."""
    numbers = {name: x for name, x in vars(module).items() if isinstance(x, (bool, int, float, str, tuple))}
    numbers.pop("training", None)
    parameters = [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]
    return type(module), str(module), repr((sorted(numbers.items()), parameters, _has_own_forward(module)))


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a library has set another ``forward`` on the object."""
    return "forward" in vars(module)


@contextmanager
def _own_generator() -> Iterator[None]:
    """Inside, torch's CPU generator is a new one, seeded by the old one; afterwards the old one is restored."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(int(torch.randint(2**62, ())))  # torch.manual_seed seeds GPUs as well
        yield


def _replacement(module: nn.Module, layer: type[SelfAttention]) -> SelfAttention:
    """A ``layer`` with the children of ``module``; if widths differ, only the values' rows of ``qkv``.

    Raises:
        ValueError: the mechanism does not support normalised queries and keys; it projects to other widths, and
            ``qkv`` is not a plain layer.
    """
    qkv, proj = module.qkv, module.proj
    new = layer(
        qkv.in_features,
        module.num_heads,
        attn_head_dim=qkv.out_features // (3 * module.num_heads),
        dim_out=proj.out_features,
        qkv_bias=qkv.bias is not None,
        qk_norm=not isinstance(getattr(module, "q_norm", nn.Identity()), nn.Identity),
        attn_drop=getattr(getattr(module, "attn_drop", None), "p", 0.0),
        norm_layer=nn.LayerNorm,
        device="meta" if qkv.weight.is_meta else "cpu",  # initial weights come only from the CPU's generator
        dtype=qkv.weight.dtype,
    ).to(qkv.weight.device)
    if all(not parameter.requires_grad for parameter in module.parameters()):
        new.requires_grad_(False)
    for child in _KEPT:
        if isinstance(getattr(module, child, None), nn.Module) and not isinstance(getattr(new, child), Placeholder):
            setattr(new, child, getattr(module, child))
    if len(set(new.widths)) == 1:
        new.qkv = qkv
    else:
        _copy_values(new, qkv)
    new.training = module.training
    for part in (new.attention, *(part for part in new.children() if isinstance(part, Placeholder))):
        part.train(module.training)
    return new


def _copy_values(new: SelfAttention, qkv: nn.Linear) -> None:
    """Give ``new.qkv`` the rows of ``qkv`` that are the projection to values."""
    old = dict(qkv.named_parameters())
    if type(qkv) is not nn.Linear or not set(old) <= {"weight", "bias"}:
        raise ValueError(
            f"qkv is a {type(qkv).__name__} of parameters {', '.join(old)}; allowed with attention {new.mechanism!r}, "
            "which projects to other widths: a torch.nn.Linear without parametrisation, pruning or adapters"
        )
    new.qkv.train(qkv.training)
    with torch.no_grad():
        for name, parameter in new.qkv.named_parameters():
            parameter[-new.widths[2] :] = old[name][-new.widths[2] :]
            parameter.requires_grad_(old[name].requires_grad)


def _changes(module: nn.Module, new: SelfAttention) -> Iterator[tuple[str, str]]:
    """Changes to report when ``new`` replaces ``module``: (what happened, the name of the part)."""
    before = {id(parameter) for parameter in module.parameters()}
    after = {id(parameter) for parameter in new.parameters()}
    for name, parameter in new.named_parameters():
        if id(parameter) not in before:
            yield "these parameters are new" + ("" if parameter.requires_grad else ", and frozen"), name
    for name, parameter in module.named_parameters():
        if id(parameter) not in after and not name.startswith("qkv."):  # its rows of the values are kept
            yield "these parameters are gone", name
    parts = dict(new.named_modules())
    for name, part in module.named_modules():
        is_hooked = any(getattr(part, hooks) for hooks in _HOOKS)
        if name and is_hooked and parts.get(name) is not part:
            yield "hooks of these parts are not called any more", name


def _move_hooks(module: nn.Module, new: nn.Module) -> None:
    """Make the hooks of ``module`` those of ``new``."""
    for name in _HOOKS:
        setattr(new, name, getattr(module, name))
    new._is_full_backward_hook = module._is_full_backward_hook
    for key, hook in new._load_state_dict_pre_hooks.items():
        if hook.with_module:  # torch bound it to the old module
            new._load_state_dict_pre_hooks[key] = type(hook)(hook.hook, new)


def _why_not(module: nn.Module) -> str:
    """Why ``module`` cannot be replaced, or ""."""
    children = dict(module.named_children())
    if not (isinstance(children.get("qkv"), nn.Linear) and isinstance(children.get("proj"), nn.Linear)):
        return "has no projections qkv and proj"
    inputs = [name for name in list(signature(module.forward).parameters)[1:] if name not in ("attn_mask", "is_causal")]
    if inputs:
        return f"is called with {', '.join(inputs)} as well"
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
    """How our softmax attention differs from ``module``, or "" if it does not."""
    stock = _with_random_weights(module)
    plain = _replacement(stock, attention_layer("softmax"))
    extra = sorted(set(stock.state_dict()) - set(plain.state_dict()))
    if extra:
        return f"has {', '.join(extra)} of its own"
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
    """A copy in float64 on the CPU, also of modules on the meta device, with random parameters.

    Its projections are plain layers, even if the module's are parametrised; the replacement keeps those unchanged. It
    has no hooks, because users' hooks must not see random tokens.
    """
    copied: dict[int, Any] = {id(getattr(part, name)): OrderedDict() for part in module.modules() for name in _HOOKS}
    for layer in (module.qkv, module.proj):
        copied[id(layer)] = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    on_meta = any(x.is_meta for x in module.parameters())
    copy = deepcopy(module, copied)
    copy = copy.to_empty(device="cpu") if on_meta else copy.cpu()
    copy.double()
    copy.eval()  # returns no module in some of timm's families
    for parameter in copy.requires_grad_(False).parameters():
        nn.init.normal_(parameter, std=0.2)
    return copy
