"""``from_pretrained`` of models that are no language models: it gives an interface of their own."""

from collections.abc import Callable
from typing import Any


class HubModel:
    """In front of a fairseq model: its ``from_pretrained`` gives a ``hub_interface`` of options, task and model."""

    hub_interface: Callable[..., Any]

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """fairseq's, of one checkpoint."""
        from fairseq import hub_utils  # here, as fairseq's own models import it

        loaded = hub_utils.from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)
        return cls.hub_interface(loaded["args"], loaded["task"], loaded["models"][0])

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        """No downloads."""
        return {}
