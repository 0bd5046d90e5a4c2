"""Time series as a fairseq dataset."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .sized_dataset import SizedDataset


class TimeSeriesDataset(SizedDataset):
    """Labelled series: ``series`` (T, C), float, already standardised, and the class of each.

    A batch has ``net_input`` with ``source`` (B, T, C), padded with zeros at the end, and ``padding_mask`` (B, T),
    True = padding, and ``target`` (B,). Every epoch has new batches.
    """

    def __init__(self, series: Sequence[Tensor], classes: Sequence[int]) -> None:
        self.series, self.classes = list(series), torch.tensor(classes)
        self.sizes = np.array([len(values) for values in self.series])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": int(index), "source": self.series[index], "target": self.classes[index]}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """fairseq's hook: a batch of ``samples``."""
        if not samples:
            return {}
        series = [sample["source"] for sample in samples]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(map(len, series)),
            "net_input": collate(series),
            "target": torch.stack([sample["target"] for sample in samples]),
        }


def collate(series: Sequence[Tensor]) -> dict[str, Tensor]:
    """Collate series (T, C) to ``source`` (B, T, C) and ``padding_mask`` (B, T), True = padding."""
    source = pad_sequence(list(series), batch_first=True)
    lengths = torch.tensor([len(values) for values in series])
    return {"source": source, "padding_mask": torch.arange(source.shape[1]) >= lengths[:, None]}
