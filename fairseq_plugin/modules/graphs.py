"""Messages of models of which torch can make no graph."""

import torch
from torch import nn

_ALLOWED = (
    "allowed: torch.jit.trace and model.compile(), and for the decoding step of a language model python -m "
    "fairseq_plugin.export_step"
)


class NoTorchScript:
    """In front of a module that ``torch.jit.script`` cannot compile; ``torch.jit.trace`` takes it."""

    def __prepare_scriptable__(self) -> None:
        """torch's hook of ``torch.jit.script``, for a module and all in it: ValueError."""
        raise ValueError(f"{type(self).__name__} is given to torch.jit.script; {_ALLOWED}")


def check_not_exported(module: nn.Module) -> None:
    """Raise ValueError under torch.export: fairseq's code asks whether there is padding, as no graph can.

    With torch 2.6, which cannot tell it from torch.compile, torch itself refuses.
    """
    if hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting():
        raise ValueError(f"{type(module).__name__} is given to torch.export; {_ALLOWED}")
