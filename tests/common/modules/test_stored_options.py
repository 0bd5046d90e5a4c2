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


def _reread(model: nn.Module, folder: Path) -> Any:
    torch.save({"model": model.state_dict()}, folder / "c.pt")
    return torch.load(folder / "c.pt", weights_only=True)["model"]


def _through_safetensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return safetensors.torch.load(safetensors.torch.save(dict(state)))


def _averaged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average files as the hosts' scripts do: sums in float64 or in the file's dtype, and float32 at the end."""
    return {name: ((x.double() + x.double() + x.double()) / 3).float() for name, x in state.items()}


def _moving_average(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Average during training as fairseq and timm do: products and sums of everything in floating point."""
    return {name: x.clone().mul_(0.9999).add_(x, alpha=1 - 0.9999) for name, x in state.items()}


#: Transformations of state dicts between saving and loading.
WAYS: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "as it is": lambda state: state,
    "copied key by key": lambda state: dict(state.items()),
    "safetensors": _through_safetensors,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deep copy": copy.deepcopy,
    "float16": lambda state: {name: x.half() for name, x in state.items()},
    "bfloat16": lambda state: {name: x.bfloat16() for name, x in state.items()},
    "averaged": _averaged,
    "moving average": _moving_average,
}


def test_keys_are_those_of_the_tensors_and_a_record() -> None:
    """One record per module with options, under torch's own key, and tensors as hosts expect."""
    state = _layers(form="a").state_dict()
    names = ["0.weight", "0._extra_state", "1.0.weight", "1.0.bias", "1.1.weight", "1.1._extra_state"]
    assert list(state) == names and all(isinstance(x, Tensor) for x in state.values())


@pytest.mark.parametrize("way", WAYS)
def test_the_same_options_load_in_silence(way: str, tmp_path: Path) -> None:
    """Also from a file, and with options of other versions that only one side has."""
    stored = WAYS[way](_reread(_layers(form="a", clamp=5.0, bound=None, flag=True, pair=(3, 5)), tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _layers(form="a", clamp=5, bound=None, flag=True, pair=(3, 5)).load_state_dict(stored)
        _layers(form="a", newer="x").load_state_dict(stored)


@pytest.mark.parametrize("way", WAYS)
def test_other_options_are_a_warning_on_every_way(way: str) -> None:
    """After any handling of the state dict; the options include a wide clamp, a pair and a name."""
    stored = WAYS[way](_layers(form="paper", clamp=float("inf"), pair=(3, 5)).state_dict())
    for other in ({"form": "released"}, {"clamp": 5.0}, {"pair": (3, 7)}):
        options = {"form": "paper", "clamp": float("inf"), "pair": (3, 5), **other}
        with pytest.warns(UserWarning, match=next(iter(other))) as caught:
            _layers(**options).load_state_dict(stored)
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


def test_weights_of_other_modules_alone_are_no_reason_to_warn() -> None:
    """For example a head's weights, or no weights."""
    model = nn.ModuleDict({"block": nn.ModuleDict({"attention": _Remembers(form="b")}), "head": nn.Linear(2, 2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict({"head.bias": torch.ones(2)}, strict=False)
        model.load_state_dict({}, strict=False)


def test_version_0_2_kept_options_in_the_metadata() -> None:
    """Loading still reads them there."""
    stored = _layers(form="a").state_dict()
    for name in ("0", "1.1"):
        del stored[f"{name}._extra_state"]
        stored._metadata[name]["options"] = {"form": "a"}
    with pytest.warns(UserWarning, match="form='a'.*form='b'"):
        _layers(form="b").load_state_dict(stored)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _layers(form="a").load_state_dict(stored)


def _record(count: str, option: str = "1") -> Tensor:
    text = f'{{"options": {{"form": {option}}}, "counts": {{"steps": "{count}"}}}}'
    return torch.tensor(list(text.encode()), dtype=torch.float32)


DAMAGED = {
    "of three numbers": torch.zeros(3),
    "of one": torch.tensor(1.0),
    "of large numbers": torch.full((9,), 1e30),
    "of NaN": torch.full((9,), float("nan")),
    "a string": "a string",
    "a count of 5,000 digits": _record("7" * 5000),
    "a count of 20 digits": _record("7" * 20),
    "a count in other digits": _record("\u0667"),
    "a negative count": _record("-1"),
    "an option of 5,000 digits": _record("0", "7" * 5000),
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_is_a_warning(damaged: Any) -> None:
    """An average of files with different options also counts as damaged."""
    model = _layers(form="a")
    stored = {**model.state_dict(), "0._extra_state": damaged}
    with pytest.warns(UserWarning, match="cannot be read.*form='a'"):
        model.load_state_dict(stored)


@pytest.mark.parametrize(
    ("built", "other"),
    [
        ({"kernel": "relu2"}, {"kernel": "laplace"}),
        ({"chunk_size": 8, "bias": "none"}, {"chunk_size": 16, "bias": "none"}),
        ({"chunk_size": None, "max_positions": 9, "divisor": 3.0}, {"chunk_size": None, "max_positions": 9}),
    ],
)
def test_gated_attention_unit(built: dict[str, Any], other: dict[str, Any]) -> None:
    """Options that change its result but none of its shapes."""
    first, second = (GatedAttentionUnit(8, query_dim=4, **{"chunk_size": 8, **x}) for x in (built, other))
    with pytest.warns(UserWarning, match="GatedAttentionUnit"):
        second.load_state_dict(first.state_dict(), strict=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flow", {"clamp": 2.0}),
        ("linear", {"phi": "relu"}),
        ("quadratic", {"divisor": 9.0}),
    ],
)
def test_attention(name: str, options: dict[str, Any]) -> None:
    """Every option of a mechanism, whether it has parameters or not."""
    defaults = {"divisor": 3.0} if name == "quadratic" else {}
    stored = build_attention(name, causal=True, **defaults).state_dict()
    with pytest.warns(UserWarning, match=next(iter(options))):
        build_attention(name, causal=True, **options).load_state_dict(stored)


def test_options_of_speed_are_not_remembered() -> None:
    """They change no output."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_attention("flow", chunk_size=8).load_state_dict(build_attention("flow").state_dict())


def test_every_mechanism_remembers_its_name() -> None:
    """Another mechanism in its place causes a warning, whether they share option names or not."""
    shape = {"num_heads": 2, "head_dim": 4, "max_tokens": 8}
    names = {*supporting("bidirectional"), *supporting("source")}
    for name in names:
        stored = build_attention(name, **shape).state_dict()
        other = "softmax" if name != "softmax" else "flow"
        with pytest.warns(UserWarning, match=f"attention='{name}'.*attention='{other}'"):
            build_attention(other, **shape).load_state_dict(stored, strict=False)


def test_heads_and_direction() -> None:
    """Both change the result, and no shape of a mechanism without parameters."""
    stored = build_attention("flow", num_heads=12, head_dim=4).state_dict()
    with pytest.warns(UserWarning, match="num_heads=12.*num_heads=16"):
        build_attention("flow", num_heads=16, head_dim=3).load_state_dict(stored)
    with pytest.warns(UserWarning, match="causal=False.*causal=True"):
        build_attention("flow", True, num_heads=12, head_dim=4).load_state_dict(stored)


def test_rotary_positions() -> None:
    """Around a mechanism they form a layer without parameters."""
    plain = nn.ModuleDict({"inner": build_attention("flow")})
    rotary = nn.ModuleDict({"inner": RotaryAttention(build_attention("flow"), 4)})
    with pytest.warns(UserWarning, match="rotary"):
        rotary.load_state_dict(plain.state_dict())


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
    name = name.split()[0]
    source = build_attention(name, num_heads=2, **options)
    source.restore_counts(dict.fromkeys(source.counts, 5))
    state = {"numbers": source.numbers} if former else source.state_dict()
    with torch.device("meta"):
        model = build_attention(name, num_heads=2, **options)
        model.load_state_dict(state, assign=True)
    for actual, expected in zip(model.buffers(), source.buffers(), strict=True):
        assert torch.equal(actual, expected)


def test_weights_without_values_load_in_silence() -> None:
    """A record on "meta" is ignored, as the weights there have no values."""
    model = build_attention("flow", num_heads=2)
    state = {name: x.to("meta") for name, x in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state)


@pytest.mark.parametrize("name", ["bigbird", "favor", "reformer"])
def test_what_is_drawn_from_a_seed_ignores_the_default_device(name: str) -> None:
    """The generator is on the CPU, so that drawing on another default device would fail."""
    sources = {
        "bigbird": lambda: draw_numbers(2, seed=3),
        "favor": lambda: draw_directions(6, 4, "gaussian", torch.Generator().manual_seed(3)),
        "reformer": lambda: draw_rotations(2, 4, 3, torch.Generator().manual_seed(3)),
    }
    expected = sources[name]()
    with torch.device("meta"):
        assert torch.equal(sources[name](), expected)
