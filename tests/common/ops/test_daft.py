"""DAFT against equation 5 with every weight written out: windows, images, ranges of keys and biases, states, graphs."""

import math
from collections.abc import Sequence
from functools import partial

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from common.ops import daft_conv, daft_full, daft_select
from common.ops.daft.conv_reference import daft_conv_reference
from common.ops.daft.full_reference import daft_full_reference
from tests.common.inputs import SIDES, padding
from tests.compare import assert_all_close, assert_close, gradients
from tests.torch_versions import needs_newer_than_2_6

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
#: Whether it is causal, and how that is computed: convolved at once or, if a token sees more than the window and the
#: window times the channels of a head exceeds 256, in blocks.
MODES = ("full", "convolved", "blocked")
ways = pytest.mark.parametrize(
    "mode, local_only", [(mode, False) for mode in MODES] + [("full", True), ("convolved", True)]
)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal random numbers, as a leaf."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def daft_inputs(tokens: int, heads: int = 4, *, batch: int = 2, channels: int = 4, dtype=torch.float64) -> list[Tensor]:
    """q (B, T, d), k (B, T, h), v (B, T, d), leaves."""
    sizes = (channels, heads, channels)
    return [normal(batch, tokens, size, seed=seed, dtype=dtype) for seed, size in enumerate(sizes)]


def conv_inputs(mode: str, tokens: int, heads: int, window: int, **options) -> list[Tensor]:
    """Inputs with the number of channels that selects the computation."""
    return daft_inputs(tokens, heads, channels=heads * (256 // window + 1) if mode == "blocked" else 4, **options)


def assert_agrees(actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], tolerance: float = 1e-8) -> None:
    """Compare outputs and the gradients of ``leaves``."""
    assert_close("out", actual, expected)
    assert_all_close(range(len(leaves)), gradients(actual, leaves), gradients(expected, leaves), tolerance)


def one_hot_filter(index: Tensor, bias: Tensor, window: Sequence[int]) -> Tensor:
    """The filter (h, *window) with ``bias`` at ``index`` of the flattened window and 0 elsewhere."""
    flat = torch.zeros(len(index), math.prod(window), dtype=bias.dtype)
    return flat.scatter(1, index[:, None], bias[:, None]).unflatten(1, tuple(window))


def filter_bias(r: Tensor, tokens: int, causal: bool, shape: tuple[int, int] | None = None, outside: float = 0.0):
    """w (h, T, T) of the filter r (h, window) or (h, kh, kw): row t is added to the keys that token t sees."""
    r = r if r.dim() == 3 else r.unsqueeze(1)
    indices = torch.arange(tokens)
    axes = (torch.zeros_like(indices), indices) if shape is None else (indices // shape[1], indices % shape[1])
    centres = (0 if shape is None else r.shape[1] // 2, r.shape[2] - 1 if causal else r.shape[2] // 2)
    offsets = [x - x[:, None] + centre for x, centre in zip(axes, centres)]  # (T, T) each
    inside = torch.stack([(i >= 0) & (i < size) for i, size in zip(offsets, r.shape[1:])]).all(0)
    down, across = (i.clamp(0, size - 1) for i, size in zip(offsets, r.shape[1:]))
    return r[:, down, across].masked_fill(~inside, outside)


def written_out(q: Tensor | None, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    """DAFT by equation 5: k (B, T, h), q and v (B, T, d), w (h or 1, T, T) -> (B, T, d)."""
    seen = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool)
    values = v.unflatten(2, (k.shape[2], -1)).transpose(1, 2)  # (B, h, T, c)
    weights = torch.exp(k.transpose(1, 2).unsqueeze(2) + w) * (seen.tril() if causal else seen)
    out = (weights @ values / weights.sum(-1, keepdim=True)).transpose(1, 2).flatten(2)
    return out if q is None else torch.sigmoid(q) * out


def assert_every_token_is_right(out: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> None:
    """Each token's output matches float64, to 1e-3 and the rounding of the dtype."""
    expected = written_out(None, k.double(), v.double(), w.double(), causal)
    error = (out.double() - expected).norm(dim=(0, 2)) / expected.norm(dim=(0, 2))
    assert error.max() <= {torch.float32: 1e-3, torch.float16: 3e-3, torch.bfloat16: 2e-2}[v.dtype]


def in_pieces(op, inputs, w, mask, cuts):
    """Outputs of all the pieces between ``cuts``, and the last state."""
    state, outputs = None, []
    for start, stop in zip(cuts, cuts[1:]):
        part = [None if x is None else x[:, start:stop] for x in inputs]
        hidden = None if mask is None else mask[:, start:stop]
        out, state = op(*part, w, causal=True, key_padding_mask=hidden, initial_state=state, return_state=True)
        outputs.append(out)
    return torch.cat(outputs, dim=1), state


# --- the formula -----------------------------------------------------------------------------------------------------


@hypothesis.given(
    tokens=st.integers(1, 30),
    window=st.integers(1, 45),
    heads=st.sampled_from([1, 2, 4]),
    mode=st.sampled_from(MODES),
    side=st.sampled_from(SIDES),
    local_only=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
@hypothesis.settings(max_examples=40)
def test_any_length_heads_and_window(tokens, window, heads, mode, side, local_only, gated, seed):
    """Of DAFT-conv; a selection, which is that with one entry for each head; and DAFT-full with w of any length."""
    causal, mask = mode != "full", padding(side, 2, tokens)
    window += 0 if causal else 1 - window % 2
    options, generator = {"causal": causal, "key_padding_mask": mask}, torch.Generator().manual_seed(seed)
    (q, *kv), r = conv_inputs(mode, tokens, heads, window), normal(heads, window, seed=3)
    local = {**options, "local_only": local_only}
    inputs = [q if gated else None, *kv]
    leaves = [q, *kv] if gated else kv
    assert_agrees(daft_conv(*inputs, r, **local), daft_conv_reference(*inputs, r, **local), [*leaves, r])
    index, bias = torch.randint(window, (heads,), generator=generator), normal(heads)
    out = daft_select(*inputs, index, bias, window=window, **options)
    expected = daft_conv_reference(*inputs, one_hot_filter(index, bias, (window,)), **options)
    assert_agrees(out, expected, [*leaves, bias])
    (q, *kv), longest = daft_inputs(tokens), tokens + seed % 3
    inputs, leaves = [q if gated else None, *kv], [q, *kv] if gated else kv
    matrix, factors = normal(longest, longest, seed=3), (normal(longest, 3), normal(longest, 3, seed=4))
    for w, biases in ((matrix, [matrix]), (factors, list(factors))):
        assert_agrees(daft_full(*inputs, w, **options), daft_full_reference(*inputs, w, **options), leaves + biases)


@pytest.mark.parametrize("window", [(3, 3), (5, 1), (1, 5), (11, 11)], ids=str)
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_images(side, window):
    """Images that are not square, with filters smaller and larger than they are; padding keeps its position."""
    entries, bias = math.prod(window), normal(2, seed=3)
    for shape in ((6, 2), (1, 12), (3, 4)):
        inputs, r = daft_inputs(12, 2), normal(2, *window, seed=3)
        options = {"spatial_shape": shape, "key_padding_mask": padding(side, 2, 12)}
        for local in ({**options, "local_only": local_only} for local_only in (False, True)):
            assert_agrees(daft_conv(*inputs, r, **local), daft_conv_reference(*inputs, r, **local), [*inputs, r])
    for first in range(0, entries, max(1, entries // 4)):
        index = torch.tensor([first, entries - 1 - first])
        expected = daft_conv_reference(*inputs, one_hot_filter(index, bias, window), **options)
        assert_agrees(daft_select(*inputs, index, bias, window=window, **options), expected, [*inputs, bias])


# --- ranges of keys and biases ---------------------------------------------------------------------------------------


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("largest", "spread"), [(100.0, 1.0), (1.0, 50.0), (100.0, 50.0)])
def test_conv_of_large_keys_and_biases(largest, spread, dtype, mode, local_only):
    """Each row is right even if large keys follow its small ones, or the largest keys have small biases."""
    tokens, window, causal = 90, 35, mode != "full"
    uniform = torch.rand(tokens, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    positions = torch.arange(tokens)
    chosen = (positions < 45, positions >= 45, positions % 7 == 3, positions == 40)
    rows = [*(torch.where(x, 1.0, -1.0) for x in chosen), (positions == 40).float()]
    v = conv_inputs(mode, tokens, 4, window, batch=1, dtype=dtype)[2].detach()
    low = torch.full((window,), -1.0)
    filters = [low, low.index_fill(0, positions[2:window:5], 1.0), low.index_fill(0, positions[17:window], 1.0)]
    for keys in (uniform[None], *(x[None, :, None].expand(1, tokens, 4) for x in rows)):
        for bias in (uniform[:window].T, *(x.expand(4, -1) for x in filters)):
            k, r = (keys * largest).to(dtype), (bias * spread).to(dtype)
            w = filter_bias(r.double(), tokens, causal, outside=-math.inf if local_only else 0.0)
            out = daft_conv(None, k, v, r, local_only=local_only, causal=causal)
            assert_every_token_is_right(out, k, v, w, causal)


@pytest.mark.parametrize("spread", [1.0, 50.0])
def test_conv_of_an_image_with_one_pixel_far_above_all_others(spread):
    """Under filters that cancel most of it."""
    keys = torch.full((1, 42, 4), -100.0).index_fill(1, torch.tensor([17]), 100.0)
    v, r = normal(1, 42, 4, dtype=torch.float32).detach(), torch.full((4, 3, 5), -spread)
    r[:, 0, 1] = spread
    for local_only in (False, True):
        w = filter_bias(r.double(), 42, False, (6, 7), outside=-math.inf if local_only else 0.0)
        out = daft_conv(None, keys, v, r, spatial_shape=(6, 7), local_only=local_only)
        assert_every_token_is_right(out, keys, v, w, False)


@causality
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [50.0, -50.0])
def test_select_of_large_keys_and_biases(bias, dtype, causal):
    """The neighbour may be by far the largest key with a bias that cancels it, or the smallest and be raised."""
    positions = torch.arange(60)
    chosen = (positions < 30, positions >= 30, positions % 7 == 3, positions == 20)
    # The last row is less above the others than a bias of -50 subtracts.
    rows = [*(torch.where(x, 1.0, -1.0) for x in chosen), (positions == 20) * 0.4]
    index, biases = torch.tensor([0, 3, 6, 8]), torch.full((4,), bias).to(dtype)
    w = filter_bias(one_hot_filter(index, biases.double(), (9,)), 60, causal)
    v = normal(1, 60, 4, dtype=dtype).detach()
    for x in rows:
        k = (x[None, :, None].expand(1, 60, 4) * 100).to(dtype)
        out = daft_select(None, k, v, index, biases, window=9, causal=causal)
        assert_every_token_is_right(out, k, v, w, causal)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["none", "holes", "all"])
def test_constants_cancel(side, mode):
    """Added to all keys, padding included, which must not serve as the reference; to a row of w; to a whole filter."""
    (q, k, v), r, index = conv_inputs(mode, 37, 2, 9), normal(2, 9, seed=3), torch.tensor([1, 4])
    options, w, bias = {"causal": mode != "full", "key_padding_mask": padding(side, 2, 37)}, normal(37, 37), normal(2)
    keys = normal(2, 37, v.shape[2])
    for constant in (-1000.0, 1000.0):
        for local_only in (False, True) if mode != "blocked" else (False,):
            conv = partial(daft_conv, local_only=local_only, **options)
            assert_close("conv", conv(q, k + constant, v, r), conv(q, k, v, r))
        select = partial(daft_select, window=9, **options)
        assert_close("select", select(q, k + constant, v, index, bias), select(q, k, v, index, bias))
        rows = constant * torch.linspace(-1, 1, 37, dtype=torch.float64)[:, None]
        expected = daft_full(q, keys, v, w, **options)
        assert_close("full", daft_full(q, keys + constant, v, w + rows, **options), expected)
    blotted = torch.full((2, 9), -1000.0, dtype=torch.float64)  # leaves the tokens outside, if there are any
    out, expected = (f(q, k, v, blotted, **options) for f in (daft_conv, daft_conv_reference))
    if side == "none":
        assert_close("without the window", out[:, 9:], expected[:, 9:])
    few = [x.detach()[:, :4].float() for x in (q, k, v)]  # no token is outside of the window
    for number in (-200.0, 200.0):
        flat = partial(daft_conv, *few, causal=mode != "full")
        assert_close("a filter of one number", flat(torch.full((2, 9), number)), flat(torch.zeros(2, 9)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("below", [100.0, 110.0])
def test_gradients_where_all_outside_of_a_window_weighs_nearly_nothing(below, mode):
    """One key is so far above the others that their exponentials reach the limits of float32, with large values."""
    (q, k, v), r = conv_inputs(mode, 30, 2, 9), normal(2, 9, seed=3)
    k = torch.where((torch.arange(30) == 12).unsqueeze(1), k, k - below)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, 1000.0 * v, r)]
        results.append(gradients(daft_conv(*leaves, causal=mode != "full"), leaves))
    assert all(torch.isfinite(gradient).all() for gradient in results[0])
    assert_close("gradient of v", results[0][2], results[1][2].float())


RANGES = ("large key first", "both wide", "huge biases", "largest floats", "huge constant")


def wide_inputs(kind: str, tokens: int = 40) -> list[Tensor]:
    """q, k, v (1, T, d) and w (T, T) in float32; keys of at most 100 unless stated otherwise."""
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, tokens, 3, generator=draw) for _ in range(3))
    w = torch.randn(tokens, tokens, generator=draw)
    w = {"huge biases": 1e6 * w, "largest floats": 3.4e38 * w.sign()}.get(kind, 60.0 * w)
    k = (100.0 * k).clamp(-100.0, 100.0)
    if kind == "large key first":
        k = torch.full_like(k, -100.0).index_fill(1, torch.tensor([0]), 100.0)
    if kind == "huge constant":  # that float32 cannot add to a key without rounding the key
        k, w = k / 100.0, torch.full_like(w, 1e8)
    return [x.requires_grad_() for x in (q, k, v, w)]


@pytest.mark.parametrize("kind", RANGES)
@causality
def test_full_of_any_range_of_keys_and_biases(causal, kind):
    """Outputs and all gradients are finite and match float64, with padding and while decoding."""
    inputs = wide_inputs(kind)
    q, k, v, w = (x.detach().double() for x in inputs)
    w = 1e6 * w.sign() if kind == "largest floats" else w  # float64 cannot add the given ones to a key either
    for side in ("none", "left"):
        exact, mask = [x.requires_grad_() for x in (q, k, v, w)], padding(side, 1, 40)
        out = daft_full(*inputs, causal=causal, key_padding_mask=mask)
        expected = daft_full_reference(*exact, causal=causal, key_padding_mask=mask)
        assert_close("out", out.double(), expected, 2e-5)
        for name, actual, wanted in zip("qkvw", gradients(out, inputs), gradients(expected, exact)):
            assert torch.isfinite(actual).all(), name
            assert_close(f"gradient of {name}", actual.double(), wanted, 2e-4)
        for cuts in (range(41), [0, 7, 8, 28, 40]) if causal else ():
            decoded, _ = in_pieces(daft_full, inputs[:3], inputs[3], mask, list(cuts))
            assert_close("decoded", decoded.double(), expected, 2e-5)


def test_full_of_a_range_that_nothing_holds():
    """float64 has a limit too, and a compiled graph cannot change to it."""
    q, k, v, w = (x.detach() for x in wide_inputs("huge biases"))
    for causal in (False, True):
        with pytest.raises(ValueError, match="keys.* 1400 .*position biases.*at most 600"):
            daft_full(q, k.sign() * 700.0, v, w, causal=causal)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: daft_full(*x, causal=True), backend="aot_eager", fullgraph=True)
    usual = wide_inputs("huge constant")
    assert_close("out", compiled(*usual), daft_full(*usual, causal=True), 1e-5)
    with pytest.raises(RuntimeError, match="keys of a channel or the position biases"):
        compiled(*wide_inputs("both wide"))


# --- states ----------------------------------------------------------------------------------------------------------

OPS = {"full": daft_full, "conv": daft_conv, "local": partial(daft_conv, local_only=True)}
names = pytest.mark.parametrize("name", OPS)


@names
@hypothesis.given(
    pieces=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    side=st.sampled_from(SIDES),
    window=st.integers(1, 30),
    gated=st.booleans(),
)
@hypothesis.settings(max_examples=30)
def test_any_pieces_give_the_whole_and_one_state(name, pieces, side, window, gated):
    tokens = sum(pieces)
    op, w = OPS[name], normal(tokens, tokens, seed=3) if name == "full" else normal(4, window, seed=3)
    (q, k, v), mask = daft_inputs(tokens), padding(side, 2, tokens)
    inputs, cuts = [q if gated else None, k, v], [0, *torch.tensor(pieces).cumsum(0).tolist()]
    out, state = in_pieces(op, inputs, w, mask, cuts)
    assert_close("out", out, op(*inputs, w, causal=True, key_padding_mask=mask))
    _, whole = in_pieces(op, inputs, w, mask, [0, tokens])
    assert state.keys() == whole.keys()
    for entry, x in whole.items():
        # A mean over no tokens has no weight, and may be any number.
        factor = (whole["log_weight"] > -1e30).unsqueeze(-1) if entry == "mean" else torch.ones(())
        assert_close(entry, (state[entry] * factor).double(), (x * factor).double())


@names
@pytest.mark.parametrize("cuts", [range(61), [0, 1, 25, 26, 50, 60]], ids=["steps", "pieces"])
def test_decoding_with_large_keys_and_biases(cuts, name):
    """In float32, keys of ±100 with biases of ±50; small keys before and after large ones."""
    signs = torch.where(torch.arange(60) // 7 % 2 == 0, 1.0, -1.0)
    v = normal(1, 60, 4, dtype=torch.float32).detach()
    w = torch.rand(60, 60, generator=torch.Generator().manual_seed(0)) * 100 - 50
    w = w if name == "full" else w[:4, :23]
    exact = w[None] if name == "full" else filter_bias(w, 60, True, outside=-math.inf if name == "local" else 0.0)
    for sign in (signs, -signs):
        k = (sign * 100)[None, :, None].expand(1, 60, 4)
        out, _ = in_pieces(OPS[name], [None, k, v], w, None, list(cuts))
        assert_every_token_is_right(out, k, v, exact, True)


def test_a_window_alone_remembers_nothing_before_it():
    """Tokens that have left it change no later output."""
    inputs, r = [x.detach() for x in daft_inputs(20)], normal(4, 6).detach()
    changed = [torch.cat([x[:, :14] + 3.0, x[:, 14:]], dim=1) for x in inputs]  # the window holds tokens 14 to 19
    for cuts in (list(range(21)), [0, 13, 20]):
        states = [in_pieces(OPS["local"], x, r, None, cuts)[1] for x in (inputs, changed)]
        assert all(torch.equal(states[0][entry], x) for entry, x in states[1].items())


def test_a_step_of_daft_full_forms_one_row_of_its_bias():
    """Matrix products grow with the tokens seen, not with their square."""
    w, products = (normal(200, 6, seed=3), normal(200, 6, seed=4)), []
    for seen in (50, 100):
        _, state = daft_full(*daft_inputs(seen), w, causal=True, return_state=True)
        with FlopCounterMode(display=False) as counter:
            daft_full(*daft_inputs(1), w, causal=True, initial_state=state, return_state=True)
        products.append(counter.get_total_flops())
    assert 0 < products[1] < 2.1 * products[0]


# --- graphs ----------------------------------------------------------------------------------------------------------

FILTER, INDEX, BIAS = normal(2, 3, 5, seed=3).detach(), torch.tensor([1, 4]), normal(2, seed=4).detach()
IMAGES = {
    "conv": lambda k, v, shape: daft_conv(v, k, v, FILTER.to(v), spatial_shape=shape),
    "local": lambda k, v, shape: daft_conv(v, k, v, FILTER.to(v), spatial_shape=shape, local_only=True),
    "select": lambda k, v, shape: daft_select(v, k, v, INDEX, BIAS.to(v), window=(3, 5), spatial_shape=shape),
}


class Image(torch.nn.Module):
    """Images k (B, h, H, W) and v (B, d, H, W), whose size must stay dynamic in the traced graph."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, k, v):
        return IMAGES[self.name](*(x.flatten(2).transpose(1, 2) for x in (k, v)), v.shape[2:])


@needs_newer_than_2_6
@pytest.mark.parametrize("name", IMAGES)
def test_export_with_images_of_any_size(name):
    """Smaller than the window, and larger."""
    module, dims = Image(name), {2: torch.export.Dim("H", min=2, max=64), 3: torch.export.Dim("W", min=2)}
    inputs = normal(2, 2, 6, 7).detach(), normal(2, 4, 6, 7).detach()
    program = torch.export.export(module, inputs, dynamic_shapes=[dims] * 2)
    for shape in ((6, 7), (2, 3), (9, 2), (12, 12)):
        other = normal(2, 2, *shape).detach(), normal(2, 4, *shape, seed=1).detach()
        assert_close("out", program.module()(*other), module(*other))


def test_compiled_graphs_are_few_and_right():
    """Causal DAFT-full: one for lengths of 49 to 64, one for 9 to 16; and DAFT-conv in blocks."""
    torch._dynamo.reset()
    counter, w, graphs = CompileCounterWithBackend("eager"), normal(64, 64, seed=3), []
    full = partial(daft_full, causal=True)
    compiled = torch.compile(full, fullgraph=True, backend=counter, dynamic=True)
    for length in (50, 57, 49, 9, 15):
        inputs = daft_inputs(length)
        assert_agrees(compiled(*inputs, w), full(*inputs, w), [*inputs, w])
        graphs.append(counter.frame_count)
    assert graphs == [1, 1, 1, 2, 2]
    inputs, conv = [*daft_inputs(50, 2, channels=64), normal(2, 10, seed=3)], partial(daft_conv, causal=True)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager", dynamic=False)
    assert_agrees(compiled(*inputs), conv(*inputs), inputs)
