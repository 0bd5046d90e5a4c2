"""``from_pretrained`` of models that are no language models, and the base of the interfaces that it gives."""

from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor, nn


class HubInterface(nn.Module):
    """A trained model in Python, in evaluation. Attributes: ``cfg``, ``task`` and ``model``."""

    def __init__(self, cfg: Any, task: FairseqTask, model: BaseFairseqModel) -> None:
        super().__init__()
        self.cfg, self.task, self.model = cfg, task, model
        self.model.eval()

    def as_input(self, where: str, values: Tensor) -> Tensor:
        """``values``, finite in float32, on the device and in the precision of the model.

        Raises:
            ValueError: one is finite no more there, as half precision ends at 65504; the message says ``where``.
        """
        weight = next(self.model.parameters())
        cast = values.to(weight.device, weight.dtype)
        if not torch.isfinite(cast).all():
            raise ValueError(
                f"{where} is up to {values.abs().max():g} once standardised; allowed: what is finite in the model's "
                f"{weight.dtype}, up to {torch.finfo(weight.dtype).max:g}"
            )
        return cast


class HubModel:
    """In front of a fairseq model: its ``from_pretrained`` gives a ``hub_interface`` of options, task and model."""

    hub_interface: type[HubInterface]

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """fairseq's, of one checkpoint."""
        from fairseq import hub_utils  # here, as fairseq's own models import it

        loaded = hub_utils.from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)
        return cls.hub_interface(loaded["args"], loaded["task"], loaded["models"][0])
