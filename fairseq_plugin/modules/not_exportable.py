"""Errors for models that torch cannot convert to a graph."""

from torch import nn

from common.ops.shared.tracing import is_exported

_ALLOWED = (
    "allowed: torch.jit.trace and model.compile(), and for the decoding step of a language model python -m "
    "fairseq_plugin.export_step"
)


class NoTorchScript:
    """Mixin for modules that ``torch.jit.script`` cannot compile; ``torch.jit.trace`` can."""

    def __prepare_scriptable__(self) -> None:
        """torch's hook, called by ``torch.jit.script`` for a module and all its submodules; raises ValueError."""
        raise ValueError(f"{type(self).__name__} is given to torch.jit.script; {_ALLOWED}")


def check_not_exported(module: nn.Module) -> None:
    """Raise ValueError under torch.export: fairseq's code branches on whether there is padding, which no graph can.

    With torch 2.6, where ``is_exported`` is never true, torch itself raises an error.
    """
    if is_exported():
        raise ValueError(f"{type(module).__name__} is given to torch.export; {_ALLOWED}")
