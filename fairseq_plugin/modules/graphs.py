"""Errors of models that torch cannot turn into a graph."""

from torch import nn

from common.ops.shared.tracing import is_exported

_ALLOWED = (
    "allowed: torch.jit.trace and model.compile(), and for the decoding step of a language model python -m "
    "fairseq_plugin.export_step"
)


class NoTorchScript:
    """Mixin of a module that ``torch.jit.script`` cannot compile; ``torch.jit.trace`` takes it."""

    def __prepare_scriptable__(self) -> None:
        """torch's hook, called by ``torch.jit.script`` for a module and all modules in it: ValueError."""
        raise ValueError(f"{type(self).__name__} is given to torch.jit.script; {_ALLOWED}")


def check_not_exported(module: nn.Module) -> None:
    """Raise ValueError under torch.export: fairseq's code asks whether there is padding, as no graph can.

    With torch 2.6, where ``is_exported`` is never true, torch itself refuses.
    """
    if is_exported():
        raise ValueError(f"{type(module).__name__} is given to torch.export; {_ALLOWED}")
