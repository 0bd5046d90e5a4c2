"""The record of what weights mean survives all handling of a state dict, and other options cause a warning."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from common.attention import RotaryAttention, build_attention, supporting
from common.modules.gated_attention_unit import GatedAttentionUnit
from common.modules.stored_options import StoresOptions, read_extra_state
from common.ops.bigbird import draw_numbers
from common.ops.favor import draw_directions
from common.ops.reformer import draw_rotations


class _Remembers(StoresOptions):
    """A module with one option, and a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.weight = nn.Parameter(torch.ones(2))

    def stored_options(self) -> dict[str, Any]:
        return self.options


def _layers(**options: Any) -> nn.Module:
    return nn.Sequential(_Remembers(**options), nn.Sequential(nn.Linear(2, 2), _Remembers(**options)))


def load_in_silence(model: nn.Module, stored: dict[str, Any], **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(stored, **options)


#: Handling of state dicts between saving and loading. Hosts average files in float64 or in the file's dtype, and keep
#: moving averages by products and sums of everything in floating point.
WAYS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "copied key by key": lambda state: dict(state.items()),
    "safetensors": lambda state: safetensors.torch.load(safetensors.torch.save(dict(state))),
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deep copy": copy.deepcopy,
    "float16": lambda state: {name: x.half() for name, x in state.items()},
    "bfloat16": lambda state: {name: x.bfloat16() for name, x in state.items()},
    "averaged": lambda state: {name: ((x.double() * 3) / 3).float() for name, x in state.items()},
    "moving average": lambda state: {
        name: x.clone().mul_(0.9999).add_(x, alpha=1 - 0.9999) for name, x in state.items()
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_record_survives_all_handling_of_a_file(way: str, tmp_path: Path) -> None:
    """The same options load in silence, also beside those of other versions; others are one warning."""
    options = {"form": "paper", "clamp": float("inf"), "bound": None, "flag": True, "pair": (3, 5)}
    torch.save({"model": _layers(**options).state_dict()}, tmp_path / "c.pt")
    stored = WAYS[way](torch.load(tmp_path / "c.pt", weights_only=True)["model"])
    names = ["0.weight", "0._extra_state", "1.0.weight", "1.0.bias", "1.1.weight", "1.1._extra_state"]
    assert sorted(stored) == sorted(names) and all(isinstance(x, Tensor) for x in stored.values())
    load_in_silence(_layers(**options), stored)
    load_in_silence(_layers(form="paper", newer="x"), stored)
    for other in ({"form": "released"}, {"clamp": 5.0}, {"pair": (3, 7)}):
        with pytest.warns(UserWarning, match=next(iter(other))) as caught:
            _layers(**{**options, **other}).load_state_dict(stored)
        assert len({str(warning.message) for warning in caught}) == 1


@pytest.mark.parametrize("strict", [True, False])
def test_a_file_that_remembers_nothing_says_so_once(strict: bool) -> None:
    """The file is from a stock model or version 0.1; its weights are loaded, and strict loading stays strict."""
    stored = {name: x + 1 for name, x in _layers().state_dict().items() if "_extra_state" not in name}
    model = _layers(form="b")
    with pytest.warns(UserWarning, match="do not say.*form='b'") as caught:
        model.load_state_dict(stored, strict=strict)
    assert len({str(warning.message) for warning in caught}) == 1
    assert torch.equal(model[1][1].weight, stored["1.1.weight"])
    del stored["0.weight"]
    if strict:
        with pytest.raises(RuntimeError, match="0.weight"):
            model.load_state_dict(stored)


def test_what_is_no_reason_to_warn() -> None:
    """Weights of other modules alone, such as a head's; options of speed; weights without values, on "meta"."""
    model = nn.ModuleDict({"block": nn.ModuleDict({"attention": _Remembers(form="b")}), "head": nn.Linear(2, 2)})
    load_in_silence(model, {"head.bias": torch.ones(2)}, strict=False)
    load_in_silence(model, {}, strict=False)
    flow = build_attention("flow", chunk_size=8)
    load_in_silence(flow, build_attention("flow").state_dict())
    load_in_silence(flow, {name: x.to("meta") for name, x in flow.state_dict().items()})


def test_version_0_2_kept_options_in_the_metadata() -> None:
    stored = _layers(form="a").state_dict()
    for name in ("0", "1.1"):
        del stored[f"{name}._extra_state"]
        stored._metadata[name]["options"] = {"form": "a"}
    with pytest.warns(UserWarning, match="form='a'.*form='b'"):
        _layers(form="b").load_state_dict(stored)
    load_in_silence(_layers(form="a"), stored)


def _record(count: str, option: str = "1") -> Tensor:
    text = f'{{"options": {{"form": {option}}}, "counts": {{"steps": "{count}"}}}}'
    return torch.tensor(list(text.encode()), dtype=torch.float32)


#: Tensors in place of a record; an average of files with different options is damaged, too.
DAMAGED = [
    *(torch.zeros(3), torch.tensor(1.0), torch.full((9,), 1e30), torch.full((9,), float("nan")), "a string"),
    *(_record("7" * 5000), _record("7" * 20), _record("\u0667"), _record("-1"), _record("0", "7" * 5000)),
]


def test_a_damaged_record_is_a_warning() -> None:
    for damaged in DAMAGED:
        model = _layers(form="a")
        with pytest.warns(UserWarning, match="cannot be read.*form='a'"):
            model.load_state_dict({**model.state_dict(), "0._extra_state": damaged})


def _unit(**options: Any) -> GatedAttentionUnit:
    return GatedAttentionUnit(8, query_dim=4, **{"chunk_size": 8, "bias": "none", **options})


def test_weights_of_another_function_are_a_warning() -> None:
    """Whether they have tensors or not; every mechanism remembers its name."""
    shape, divisors = {"num_heads": 2, "head_dim": 4, "max_tokens": 8}, {"chunk_size": None, "max_positions": 9}
    build = build_attention
    pairs = [
        (build("flow", True, clamp=2.0), build("flow", True), "clamp"),
        (build("flow", num_heads=12), build("flow", num_heads=16), "num_heads=12.*num_heads=16"),
        (build("flow"), build("flow", True), "causal=False.*causal=True"),
        (build("flow"), RotaryAttention(build("flow"), 4), "rotary"),
        (_unit(), _unit(kernel="laplace"), "GatedAttentionUnit.*kernel"),
        (_unit(), _unit(chunk_size=16), "GatedAttentionUnit.*chunk_size"),
        (_unit(**divisors, causal=True, divisor=3.0), _unit(**divisors, causal=True), "GatedAttentionUnit.*divisor"),
    ]
    for name in sorted({*supporting("bidirectional"), *supporting("source")} - {"softmax"}):
        pairs.append((build(name, **shape), build("softmax", **shape), f"attention='{name}'.*attention='softmax'"))
        pairs.append((build("softmax", **shape), build(name, **shape), f"attention='softmax'.*attention='{name}'"))
    for stored, other, said in pairs:
        stored, other = (nn.ModuleDict({"inner": x}) for x in (stored, other))
        with pytest.warns(UserWarning, match=said):
            other.load_state_dict(stored.state_dict(), strict=False)


def test_records_that_differ_in_a_count_can_be_averaged() -> None:
    """Files of several epochs differ so; all records have one shape, as torch's distributed checkpoints need."""
    first, second = (build_attention("favor", head_dim=4, features=6, redraw=2) for _ in range(2))
    first.passes, second.passes = 99, 1234567
    records = [x.state_dict()["_extra_state"] for x in (first, second)]
    average = read_extra_state((records[0] + records[1]) / 2)
    assert average is not None and average["options"] == read_extra_state(records[0])["options"]
    assert all(x.shape == build_attention("flow").state_dict()["_extra_state"].shape for x in records)


@pytest.mark.filterwarnings("ignore:.*do not say which attention")
@pytest.mark.parametrize("case", ["bigbird", "bigbird of version 0.2", "favor with redraw"])
def test_a_model_on_meta_gets_what_follows_from_the_file(case: str) -> None:
    """``assign=True`` fills a model without values; buffers that follow from the file's tensors are computed."""
    name, *former = case.split(" of ")
    options = {"head_dim": 4, "redraw": 2} if "redraw" in name else {}
    source = build_attention(name.split()[0], num_heads=2, **options)
    source.restore_counts(dict.fromkeys(source.counts, 5))
    state = {"numbers": source.numbers} if former else source.state_dict()
    with torch.device("meta"):
        model = build_attention(name.split()[0], num_heads=2, **options)
        model.load_state_dict(state, assign=True)
    for actual, expected in zip(model.buffers(), source.buffers(), strict=True):
        assert torch.equal(actual, expected)


def test_what_is_drawn_from_a_seed_ignores_the_default_device() -> None:
    """The generator is on the CPU, so that drawing on another default device would fail."""
    for draw in (
        lambda: draw_numbers(2, seed=3),
        lambda: draw_directions(6, 4, "gaussian", torch.Generator().manual_seed(3)),
        lambda: draw_rotations(2, 4, 3, torch.Generator().manual_seed(3)),
    ):
        expected = draw()
        with torch.device("meta"):
            assert torch.equal(draw(), expected)
