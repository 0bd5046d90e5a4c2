"""``from_pretrained`` for models other than language models, and the base of the interfaces that it returns."""

from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor, nn


class HubInterface(nn.Module):
    """A trained model in Python, in evaluation mode. Attributes: ``cfg``, ``task`` and ``model``."""

    def __init__(self, cfg: Any, task: FairseqTask, model: BaseFairseqModel) -> None:
        super().__init__()
        self.cfg, self.task, self.model = cfg, task, model
        self.model.eval()

    def as_input(self, where: str, values: Tensor) -> Tensor:
        """Finite float32 ``values`` moved to the device and precision of the model.

        Raises:
            ValueError: a value overflows there, as half precision ends at 65504; the message names ``where``.
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
    """Mixin before a fairseq model: ``from_pretrained`` returns a ``hub_interface`` of options, task and model."""

    hub_interface: type[HubInterface]

    @classmethod
    def from_pretrained(
        cls, model_name_or_path: str, checkpoint_file: str = "model.pt", data_name_or_path: str = ".", **kwargs: Any
    ) -> Any:
        """As fairseq's, for one checkpoint."""
        from fairseq import hub_utils  # here, as fairseq's own models import it

        loaded = hub_utils.from_pretrained(model_name_or_path, checkpoint_file, data_name_or_path, **kwargs)
        return cls.hub_interface(loaded["args"], loaded["task"], loaded["models"][0])
