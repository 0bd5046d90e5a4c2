"""Decoding states by the names of modules: fairseq's own names are of one process, drawn when a model is built."""

from torch import Tensor, nn

from .multihead_attention import IncrementalState


def named_state(model: nn.Module, incremental_state: IncrementalState) -> dict[str, Tensor]:
    """The tensors of ``incremental_state``, by the names of the modules of ``model`` that keep them."""
    paths = {_identity(module): path for path, module in model.named_modules() if _identity(module)}
    named = {}
    for full_key, entries in incremental_state.items():
        identity, _, key = full_key.partition(".")
        named |= {f"{paths[identity]}.{key}.{name}": x for name, x in entries.items() if x is not None}
    return named


def state_of(model: nn.Module, named: dict[str, Tensor], rows: Tensor) -> IncrementalState:
    """What ``named_state`` gave, for ``model`` in this process, of the ``rows`` (B,) of its tensors.

    Raises:
        AttributeError: ``model`` lacks one of the modules.
    """
    state: IncrementalState = {}
    for name, tensor in named.items():
        path, key, entry = name.rsplit(".", 2)
        full_key = f"{_identity(model.get_submodule(path))}.{key}"
        state.setdefault(full_key, {})[entry] = tensor.to(rows.device).index_select(0, rows)
    return state


def is_of(model: nn.Module, name: str) -> bool:
    """Whether ``model`` has the module that keeps the tensor ``name`` of a named state."""
    path = (name.rsplit(".", 2) if name.count(".") > 1 else [""])[0]
    return any(path == own and _identity(module) for own, module in model.named_modules())


def _identity(module: nn.Module) -> str | None:
    """How fairseq's decoding state names a module that keeps one, in this process; None for all others."""
    return getattr(module, "_incremental_state_id", None)


def rows_of(incremental_state: IncrementalState, count: int) -> IncrementalState:
    """The first ``count`` rows of ``incremental_state``."""
    return {
        key: {name: None if x is None else x[:count] for name, x in entries.items()}
        for key, entries in incremental_state.items()
    }
