"""Options that weights depend on stay with a state dict, without a key, and other ones are warned of."""

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.attention import build_attention
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.remembered_options import RemembersOptions


class _Remembers(RemembersOptions):
    """A module with one option, and a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.ones(2))

    def remembered_options(self) -> dict[str, Any]:
        return self.options


def _layers(**options: Any) -> nn.Module:
    return nn.Sequential(_Remembers(**options), nn.Sequential(nn.Linear(2, 2), _Remembers(**options)))


def _reread(model: nn.Module, folder: Path) -> Any:
    torch.save({"model": model.state_dict()}, folder / "c.pt")
    return torch.load(folder / "c.pt", weights_only=True)["model"]


def test_keys_are_those_of_the_tensors() -> None:
    """Nothing is added to them."""
    assert list(_layers(form="a").state_dict()) == ["0.weight", "1.0.weight", "1.0.bias", "1.1.weight"]


def test_the_same_options_load_in_silence(tmp_path: Path) -> None:
    """From a file, too; and options of other versions, which one side lacks."""
    stored = _reread(_layers(form="a", clamp=5.0, bound=None, flag=True), tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _layers(form="a", clamp=5, bound=None, flag=True).load_state_dict(stored)
        _layers(form="a", newer="x").load_state_dict(stored)
        _layers(form="a").load_state_dict(OrderedDict(stored))


def test_other_options_are_a_warning(tmp_path: Path) -> None:
    """It names them; the weights are loaded. The text is one for all layers, so that a user sees it once."""
    stored = _reread(_layers(form="a", clamp=5.0), tmp_path)
    model = _layers(form="b", clamp=5.0)
    stored["0.weight"] += 1
    with pytest.warns(UserWarning, match="form='a'.*form='b'") as caught:
        model.load_state_dict(stored)
    assert len({str(warning.message) for warning in caught}) == 1 and "clamp" not in str(caught[0].message)
    assert torch.equal(model[0].weight, stored["0.weight"])


@pytest.mark.parametrize(
    ("built", "other"),
    [
        ({"kernel": "relu2"}, {"kernel": "laplace"}),
        ({"chunk_size": 8, "bias": "none"}, {"chunk_size": 16, "bias": "none"}),
        ({"rotary": True}, {"rotary": False}),
        ({"linear": False}, {"local": False, "bias": "none", "linear": True}),
        ({"chunk_size": None, "max_positions": 9, "divisor": 3.0}, {"chunk_size": None, "max_positions": 9}),
        ({"first_softmax": True}, {"first_softmax": False}),
    ],
)
def test_gated_attention_unit(built: dict[str, Any], other: dict[str, Any]) -> None:
    """What changes its result and none of its shapes."""
    first, second = (GatedAttentionUnit(8, query_dim=4, **{"chunk_size": 8, **x}) for x in (built, other))
    with pytest.warns(UserWarning, match="GatedAttentionUnit"):
        second.load_state_dict(first.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow", {"form": "paper"}),
        ("flow", {"clamp": 2.0}),
        ("flow", {"phi": "relu"}),
        ("flow", {"competition": "none"}),
        ("linear", {"phi": "relu"}),
        ("quadratic", {"kernel": "laplace", "divisor": 3.0}),
        ("quadratic", {"divisor": 9.0}),
    ],
)
def test_attention(name: str, options: dict[str, Any]) -> None:
    """Of every option of a mechanism, whether it has parameters or not."""
    defaults = {"divisor": 3.0} if name == "quadratic" else {}
    stored = build_attention(name, causal=True, **defaults).state_dict()
    with pytest.warns(UserWarning, match=next(iter(options))):
        build_attention(name, causal=True, **options).load_state_dict(stored)


def test_options_of_speed_are_not_remembered() -> None:
    """They change no output."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_attention("flow", chunk_size=8).load_state_dict(build_attention("flow").state_dict())
