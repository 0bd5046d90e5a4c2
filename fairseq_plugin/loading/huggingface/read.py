"""Reading a folder of any of the models that are known here."""

from collections.abc import Sequence
from pathlib import Path

from .bert import read_bert, read_roberta
from .folder import check_entries, read_object
from .foreign_model import ForeignModel
from .gpt2 import read_gpt2

_READERS = {"bert": read_bert, "roberta": read_roberta, "gpt2": read_gpt2}
#: The values of ``model_type`` in config.json that can be read.
MODEL_TYPES = tuple(_READERS)


def read_foreign_model(folder: Path, model_types: Sequence[str] = MODEL_TYPES) -> ForeignModel:
    """Read the model in ``folder``; O(size of its files).

    ``model_types`` are the allowed values of ``model_type`` in its config.json.

    Raises:
        ValueError: the folder lacks a file, a file is damaged or would run code, or the model is of another type or
        has what fairseq's model has no counterpart for.
    """
    path = folder / "config.json"
    config = read_object(path)
    check_entries(path, {"model_type": config.get("model_type", "")}, {"model_type": tuple(model_types)})
    return _READERS[config["model_type"]](folder, config)
