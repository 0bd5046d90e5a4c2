"""Files of a cache whose digest is right and whose content is not: one line says so."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.files.tensor_files import read_safetensors, save_safetensors
from common.huggingface import LineartimeCache, LineartimeForCausalLM

from .tiny_folders import language_model

Tensors = dict[str, Tensor]


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """A change of the beginning of names."""
    return lambda x: {new + name[len(old) :] if name.startswith(old) else name: tensor for name, tensor in x.items()}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """A change of one tensor."""
    return lambda x: {**x, name: change(x[name])}


def without(name: str) -> Callable[[Tensors], Tensors]:
    """A change that leaves out what begins with ``name``."""
    return lambda x: {key: tensor for key, tensor in x.items() if not key.startswith(name)}


WRONG = {
    "part": renamed("self.0.", "selves.0."),
    "no layer": renamed("self.0.", "self."),
    "layer": renamed("self.0.", "self.x."),
    "negative": renamed("self.0.", "self.-1."),
    "digits": renamed("self.0.", f"self.{'9' * 5000}."),
    "first": without("self.0."),
    "hole": renamed("self.1.", "self.2."),
    "empty": without("self."),
    "no count": without("seen.count"),
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


@pytest.fixture(scope="module")
def model() -> LineartimeForCausalLM:
    """A language model with a state of sums and one of keys and values."""
    return language_model([{"kind": "linear"}, {"kind": "softmax"}])


@pytest.fixture
def path(model: LineartimeForCausalLM, tmp_path: Path) -> Path:
    """The cache of two rows in a file."""
    with torch.no_grad():
        cache = LineartimeCache()
        model(torch.tensor([[2, 4, 5], [2, 6, 7]]), cache=cache)
    cache.save(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize("name", [*WRONG, *WRONG_FOR_THE_MODEL])
def test_a_file_with_another_content_is_refused(name: str, path: Path, model: LineartimeForCausalLM) -> None:
    """When it is loaded, or where only the model knows it when it is used."""
    tensors, metadata = read_safetensors(path)
    change = {**WRONG, **WRONG_FOR_THE_MODEL}[name]
    changed = change(dict(tensors))
    assert {key: x.shape for key, x in changed.items()} != {key: x.shape for key, x in tensors.items()} or any(
        x.dtype != tensors[key].dtype for key, x in changed.items()
    )
    save_safetensors(changed, path, metadata)
    with pytest.raises(ValueError, match="allowed") as caught:
        cache = LineartimeCache.load(path)
        assert name in WRONG_FOR_THE_MODEL
        model(torch.tensor([[8], [9]]), cache=cache)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("columns", ["", "-1", "1.5", "\u0663", "9" * 5000])
def test_a_file_without_a_number_of_tokens_holds_no_cache(columns: str, path: Path) -> None:
    tensors, metadata = read_safetensors(path)
    save_safetensors(tensors, path, dict.fromkeys(metadata, columns))
    with pytest.raises(ValueError, match="holds no cache; allowed: a file of LineartimeCache.save"):
        LineartimeCache.load(path)
