"""A model with the weights that its training starts from has the name MODEL.START."""

from collections.abc import Iterable, Mapping

from ..shared.experiment import Record

STOCK, RANDOM = "stock", "random"


def with_both_starts(models: Iterable[str]) -> tuple[str, ...]:
    """The names of ``models`` with both starts."""
    return tuple(f"{model}.{start}" for model in models for start in (STOCK, RANDOM))


def record(name: str, measured: Mapping[str, float]) -> Record:
    """A record: losses on held-out data ``before`` the first update and ``after`` the last, and of images ``top1``."""
    return {"model": name, "start": name.split(".")[1], **measured}
