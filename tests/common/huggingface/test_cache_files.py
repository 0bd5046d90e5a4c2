"""Files of a cache whose digest is right and whose content is not: one line says so."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from common.files.tensor_files import read_safetensors, save_safetensors
from common.huggingface import LineartimeCache

from .models import language_model

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def renamed(old: str, new: str) -> Change:
    """A change of the beginning of names."""
    return lambda x: {new + name[len(old) :] if name.startswith(old) else name: tensor for name, tensor in x.items()}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A change of one tensor."""
    return lambda x: {**x, name: change(x[name])}


def without(name: str) -> Change:
    """A change that leaves out what begins with ``name``."""
    return lambda x: {key: tensor for key, tensor in x.items() if not key.startswith(name)}


WRONG = {
    "part": renamed("self.0.", "selves.0."),
    "layer": renamed("self.0.", "self.x."),
    "negative": renamed("self.0.", "self.-1."),
    "digits": renamed("self.0.", f"self.{'9' * 5000}."),
    "first": without("self.0."),
    "empty": without("self."),
    "no tokens": without("seen.fingerprint"),
    "another number": renamed("seen.first", "seen.last"),
    "float": replaced("seen.count", Tensor.float),
    "square": replaced("seen.read", lambda x: x[:, None]),
    "rows": replaced("seen.read", lambda x: x[:1]),
    "rows of a state": replaced("self.0.sum_kv", lambda x: x[:1]),
    "scalar": replaced("self.0.sum_kv", lambda x: x[0, 0, 0, 0]),
}
#: Changes that only the model of the cache can know.
WRONG_FOR_THE_MODEL = {
    "entry": renamed("self.0.sum_kv", "self.0.sum"),
    "shape": replaced("self.0.sum_kv", lambda x: x[..., 1:]),
    "half": replaced("self.0.sum_kv", Tensor.half),
    "integers": replaced("self.0.sum_kv", Tensor.long),
    "keys": replaced("self.1.k", lambda x: x[..., 1:]),
    "no keys": without("self.1.k"),
    "one layer": without("self.1."),
    "source": renamed("self.1.", "source.0."),
}


def test_a_file_with_another_content_is_refused(tmp_path) -> None:
    """When it is loaded, or where only the model knows it when it is used."""
    model, cache, path = (
        language_model([{"kind": "linear"}, {"kind": "softmax"}]),
        LineartimeCache(),
        tmp_path / "cache",
    )
    with torch.no_grad():
        model(torch.tensor([[2, 4, 5], [2, 6, 7]]), cache=cache)
    cache.save(path)
    tensors, metadata = read_safetensors(path)
    for name, change in {**WRONG, **WRONG_FOR_THE_MODEL}.items():
        save_safetensors(change(dict(tensors)), path, metadata)
        with pytest.raises(ValueError, match="allowed") as caught:
            cache = LineartimeCache.load(path)
            assert name in WRONG_FOR_THE_MODEL, name
            model(torch.tensor([[8], [9]]), cache=cache)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    for columns in ("", "-1", "1.5", "\u0663", "9" * 5000):
        save_safetensors(tensors, path, dict.fromkeys(metadata, columns))
        with pytest.raises(ValueError, match="holds no cache; allowed: a file of LineartimeCache.save"):
            LineartimeCache.load(path)
