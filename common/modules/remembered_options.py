"""Options that weights depend on although no tensor shows them: kept with a state dict, compared when it is loaded."""

import warnings
from typing import Any

from torch import nn


class RemembersOptions(nn.Module):
    """Base class of modules whose weights belong to certain options, such as the formula of an attention.

    ``state_dict()`` keeps the options in its metadata, beside torch's own version number; no key is added, and
    ``torch.save`` writes them. ``load_state_dict`` warns where weights are loaded under other options. A state dict
    without metadata is not checked: one of an earlier version, of a safetensors file, or copied key by key.
    """

    def remembered_options(self) -> dict[str, str | int | float | bool | None]:
        """Names and values of the options; a subclass says which."""
        return {}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["options"] = self.remembered_options()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        stored, own = local_metadata.get("options", {}), self.remembered_options()
        other = [name for name in own if name in stored and stored[name] != own[name]]
        if other:
            # Without the module's name: Python then shows the warning once for all layers of a model.
            there, here = (", ".join(f"{name}={options[name]!r}" for name in other) for options in (stored, own))
            warnings.warn(
                f"{type(self).__name__}: the weights that are loaded are those of {there}; here they are used with "
                f"{here}, which is another function of them",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
