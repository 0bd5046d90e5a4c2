"""Decoding states by module names; fairseq's own keys are random and only valid in one process."""

from collections.abc import Mapping

from torch import Tensor, nn

from .multihead_attention import IncrementalState


def named_state(model: nn.Module, incremental_state: IncrementalState) -> dict[str, Tensor]:
    """The tensors of ``incremental_state``, by the names of the modules of ``model`` that own them."""
    paths = {_identity(module): path for path, module in model.named_modules() if _identity(module)}
    named = {}
    for full_key, entries in incremental_state.items():
        identity, _, key = full_key.partition(".")
        named |= {f"{paths[identity]}.{key}.{name}": x for name, x in entries.items() if x is not None}
    return named


def state_of(model: nn.Module, named: dict[str, Tensor], rows: Tensor) -> IncrementalState:
    """The incremental state of ``model`` in this process, from rows ``rows`` (B,) of the tensors of a ``named_state``.

    Raises:
        AttributeError: ``model`` lacks a module.
    """
    state: IncrementalState = {}
    for name, tensor in named.items():
        path, key, entry = name.rsplit(".", 2)
        full_key = f"{_identity(model.get_submodule(path))}.{key}"
        state.setdefault(full_key, {})[entry] = tensor.to(rows.device).index_select(0, rows)
    return state


def check_named_state(model: nn.Module, named: Mapping[str, Tensor], rows: int | None = None) -> None:
    """Raise ValueError unless ``named`` is a state of ``model`` after some tokens, with ``rows`` rows if given.

    Each attention must have a state, and nothing else may have one; all have the same number of rows and finite values.
    O(size of the state).
    """
    paths = {path for path, module in model.named_modules() if _identity(module)}
    module_paths = {name: name.rsplit(".", 2)[0] if name.count(".") > 1 else "" for name in named}
    foreign = [name for name, path in module_paths.items() if path not in paths]
    # A decoder has a state itself if it counts tokens: ours does, fairseq's does not.
    missing = sorted(paths - set(module_paths.values()) - {"decoder"})
    if foreign or missing:
        raise ValueError(f"the model keeps no {foreign[0]}" if foreign else f"it has no state of {missing[0]}")
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise ValueError(f"{name} has no rows")
        rows = len(tensor) if rows is None else rows
        if len(tensor) != rows:
            raise ValueError(f"{name} has {len(tensor)} rows, not {rows}")
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has a value that is not finite")


def _identity(module: nn.Module) -> str | None:
    """The key of a module in fairseq's decoding states in this process; None for modules without state."""
    return getattr(module, "_incremental_state_id", None)


def rows_of(incremental_state: IncrementalState, count: int) -> IncrementalState:
    """The first ``count`` rows of ``incremental_state``."""
    return {
        key: {name: None if x is None else x[:count] for name, x in entries.items()}
        for key, entries in incremental_state.items()
    }
