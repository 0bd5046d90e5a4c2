"""The labels that the scores of a classification head stand for, remembered with its weights."""

from collections.abc import Sequence
from typing import Any

from common.modules.remembered_options import RemembersOptions


class LabelledHead(RemembersOptions):
    """Base class of heads: a state dict says which labels the scores are of, and in which order.

    Loading warns where a file has others, as in fine-tuning on other data. ``labels`` are None where nobody knows them.
    """

    belongs_to = "labels"
    labels: list[Any] | None = None

    def name_labels(self, labels: Sequence[Any]) -> None:
        """Say which label each score stands for."""
        self.labels = list(labels)

    def remembered_options(self) -> dict[str, Any]:
        """The labels, if they are known."""
        return {} if self.labels is None else {"labels": self.labels}
