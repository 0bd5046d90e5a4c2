"""A trained classifier of time series in Python: ``TimeSeriesClassifier.from_pretrained(...).predict(series)``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from common.ops.shared.checks import check_positive_int

from ..data.series_folder import check_series
from ..data.time_series import collate
from ._hub_model import HubInterface


class TimeSeriesHubInterface(HubInterface):
    """A model of the task ``time_series_classification``, with the statistics and the labels of its training data.

    ``series`` are a list of arrays (T, C) of any lengths, or one array (N, T, C), with raw values, which are
    standardised here. Attributes: ``cfg``, ``task``, ``model`` and ``labels``, the classes in the order of scores.
    """

    def __init__(self, cfg: Any, task: FairseqTask, model: BaseFairseqModel) -> None:
        super().__init__(cfg, task, model)
        self.labels = np.array(task.description.labels)

    def predict(self, series: Sequence[Any] | np.ndarray, *, cut: bool = False, batch_size: int = 64) -> np.ndarray:
        """The predicted labels (N,) of ``series``, strings or integers as in the training data.

        Args:
            cut: cut a series that is longer than the model's positions after its first steps, as in training.
            batch_size: number of series per batch.

        Raises:
            ValueError: a series is empty or too long, has a different number of channels, NaN, or a value that is
                infinite or overflows in the precision of the model.
        """
        return self.labels[self.scores(series, cut=cut, batch_size=batch_size).argmax(1).numpy()]

    def probabilities(
        self, series: Sequence[Any] | np.ndarray, *, cut: bool = False, batch_size: int = 64
    ) -> np.ndarray:
        """Softmax of the scores (N, classes), in the order of ``labels``; arguments as in ``predict``."""
        return self.scores(series, cut=cut, batch_size=batch_size).softmax(1).numpy()

    @torch.no_grad()
    def scores(self, series: Sequence[Any] | np.ndarray, *, cut: bool = False, batch_size: int = 64) -> Tensor:
        """The scores (N, classes) of ``series``, float32; arguments as in ``predict``."""
        check_positive_int("batch_size", batch_size)
        prepared = self.prepare(series, cut=cut)
        head, scores = self.task.cfg.classification_head_name, []
        for start in range(0, len(prepared), batch_size):
            batch = collate(prepared[start : start + batch_size])
            where = f"a series of {start} to {start + len(batch['source']) - 1}"
            source = self.as_input(where, batch["source"])
            mask = batch["padding_mask"].to(source.device)
            scores.append(self.model(source, mask, classification_head_name=head)[0].float().cpu())
            if not torch.isfinite(scores[-1]).all():
                raise ValueError(
                    f"{where} is up to {source.abs().max():g} once standardised, for which the model's scores are not "
                    "finite; allowed: values like those in training"
                )
        return torch.cat(scores) if scores else torch.zeros(0, len(self.labels))

    def prepare(self, series: Sequence[Any] | np.ndarray, *, cut: bool = False) -> list[Tensor]:
        """``series`` as the model reads them: checked, cut if ``cut``, and standardised; (T, C) each."""
        description, limit = self.task.description, self.task.max_length
        if isinstance(series, np.ndarray) and series.ndim != 3 and series.dtype != object:
            raise ValueError(f"series has shape {series.shape}; allowed: (series, steps, channels), or a list")
        prepared = []
        for i, values in enumerate(series):
            values = check_series(values, f"series {i}", description.channels)
            if len(values) > limit and not cut:
                raise ValueError(
                    f"series {i} has {len(values)} steps; allowed: at most {limit}, as --max-length or the training "
                    "data set, or cut=True, which reads the first steps alone"
                )
            prepared.append(torch.from_numpy(description.standardise(values[:limit], f"series {i}")))
        return prepared
