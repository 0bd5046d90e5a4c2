"""Kernels for CPUs and plain PyTorch against literal references: lengths, sizes, padding, states, gates, precision."""

import math

import pytest
import torch

from tests.common.inputs import padding
from tests.common.ops.cpu.kernels import (
    ROWS,
    VARIABLE,
    attend,
    draw,
    everything,
    in_parts,
    literally,
    numbers,
    of_tokens,
)
from tests.compare import assert_all_close, assert_close, gradients

pytest.importorskip("numba")

FORMS = ("1", "0")
#: Tokens, channels of keys and of values, and padding: up to four tokens, which kernels compute at once, and around the
#: 64 tokens of a tile; numbers of channels around those of a processor's vectors.
SIZES = [
    (1, 5, 3, "none"),
    (2, 1, 1, "none"),
    (3, 3, 7, "none"),
    (4, 7, 1, "none"),
    (5, 1, 3, "left"),
    (6, 16, 17, "none"),
    (7, 65, 2, "all"),
    (9, 2, 64, "holes"),
    (17, 4, 5, "both"),
    (64, 3, 2, "right"),
    (66, 2, 3, "none"),
]
names = pytest.mark.parametrize("name", ROWS)
causal_names = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.causal])
gated_names = pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "log_decay" in row.shapes])


def assert_literal(name, tensors, mask, monkeypatch, tolerance=None) -> None:
    """Outputs and gradients are those of the reference in float64, at once and in parts, with kernels and without."""
    exact = {x: y.detach().double().requires_grad_() for x, y in tensors.items()}
    masks = {"key_padding_mask": mask, "query_padding_mask": mask}
    expected, n = literally(name, exact, **masks), tensors["q"].shape[2]
    wanted = gradients(expected, exact.values())
    for form in FORMS:
        monkeypatch.setenv(VARIABLE, form)
        outputs = [attend(name, tensors, **masks)]
        if ROWS[name].causal and n > 2:
            outputs.append(in_parts(name, tensors, (1, n - 2, 1), mask)[0])
        for out in outputs:
            assert_close("out", out, expected, tolerance)
            assert_all_close(tensors, gradients(out, tensors.values()), wanted, tolerance)


#: Without lengths for which a reference takes a time with the third power of the tokens.
CASES = [(name, *size) for name, row in ROWS.items() for size in SIZES if size[0] <= row.longest]


@pytest.mark.parametrize("name, n, d, e, side", CASES)
def test_the_formula_at_every_length_and_size(name, n, d, e, side, monkeypatch):
    assert_literal(name, draw(name, n, d, e), padding(side, 2, n), monkeypatch)


@names
@pytest.mark.parametrize("n, d, e", [(13, 40, 33), (3, 5, 3)])
def test_the_formula_in_float32(n, d, e, name, monkeypatch):
    assert_literal(name, draw(name, n, d, e, dtype=torch.float32), None, monkeypatch, 1e-5)


@pytest.mark.parametrize("n, m", [(1, 3), (5, 2), (33, 66)])
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.causal])
def test_queries_of_one_sequence_and_keys_of_another(name, n, m, monkeypatch):
    queries, keys = draw(name, n, 7, 5), draw(name, m, 7, 5, seed=1)
    tensors = {"q": queries["q"], "k": keys["k"], "v": keys["v"]}
    masks = {"query_padding_mask": padding("right", 2, n), "key_padding_mask": padding("left", 2, m)}
    expected = literally(name, tensors, **masks)
    wanted = gradients(expected, tensors.values())
    for form in FORMS:
        monkeypatch.setenv(VARIABLE, form)
        out = attend(name, tensors, **masks)
        assert_close("out", out, expected)
        assert_all_close(tensors, gradients(out, tensors.values()), wanted)


@causal_names
def test_several_tiles_and_the_state_after_them(name, monkeypatch):
    """For 257 tokens, plain PyTorch takes the place of the reference."""
    tensors, found = draw(name, 257, 3, 2, batch=1), []
    for form, lengths in (("0", (257,)), ("1", (257,)), ("1", (100, 1, 156))):
        monkeypatch.setenv(VARIABLE, form)
        out, state = in_parts(name, tensors, lengths)
        sums = [x.double() for x in numbers(name, state).values()]
        loss = sum((x * torch.linspace(1, 2, x.numel()).view(x.shape)).sum() for x in (out, *sums))
        found.append([out, *sums, *torch.autograd.grad(loss, list(tensors.values()))])
    for other in found[1:]:
        assert_all_close(range(len(other)), other, found[0])


@gated_names
@pytest.mark.parametrize("form", FORMS, ids=["kernels", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_closed_gate_leaves_no_trace_of_what_came_before(dtype, form, name, monkeypatch):
    """Later tokens keep their precision, and no gradient, nor the rounding of one, passes the gate."""
    monkeypatch.setenv(VARIABLE, form)
    tensors = draw(name, 30, dtype=dtype)
    with torch.no_grad():
        tensors["log_decay"][:, :, 12] = -1e4
    out = attend(name, tensors)[:, :, 12:]
    assert_close("after the gate", out, attend(name, of_tokens(tensors, slice(12, None))))
    for other, gradient in zip(tensors, gradients(out, tensors.values())):
        assert torch.isfinite(gradient).all() and gradient.norm() > 0
        if other in ("q", "k", "v", "beta"):
            assert (gradient[:, :, :12] == 0).all(), f"gradient of {other}"
        if other == "log_decay":
            assert (gradient[:, :, :13] == 0).all(), "gradient of the gate"


@gated_names
@pytest.mark.parametrize("strength", [1e-3, 25.0])
def test_gates_that_are_nearly_open_or_closed_keep_small_gradients_in_float32(strength, name, monkeypatch):
    """exp(-25) lets something through: what a gate loses of it is no difference of larger sums."""
    tensors = draw(name, 60, 4, 3, batch=1, dtype=torch.float32)
    with torch.no_grad():
        tensors["log_decay"].mul_(strength / 2).sub_(0.0 if strength < 1 else strength / 2)
    exact = {x: y.detach().double().requires_grad_() for x, y in tensors.items()}
    expected = gradients(attend(name, exact), [exact["log_decay"]])[0]
    for form in FORMS:
        monkeypatch.setenv(VARIABLE, form)
        (found,) = gradients(attend(name, tensors), [tensors["log_decay"]])
        assert_close("gradient of the gates", found, expected, 1e-4)


@pytest.mark.parametrize("name", ["sums with a gate for each feature", "delta rule with gates", "flow"])
def test_thousands_of_tokens_in_float32(name, monkeypatch):
    """Kernels and plain PyTorch are as close to float64 as single precision allows."""
    tensors = draw(name, 4096, 8, 8, batch=1, heads=1, dtype=torch.float32)
    if "log_decay" in tensors:
        tensors["log_decay"] = (tensors["log_decay"].detach() * 1e-3).requires_grad_()
    exact = {x: y.detach().double().requires_grad_() for x, y in tensors.items()}
    expected = everything(name, exact)
    for form in FORMS:
        monkeypatch.setenv(VARIABLE, form)
        assert_all_close(range(len(expected)), everything(name, tensors), expected, 1e-4)


@pytest.mark.parametrize("form", FORMS, ids=["kernels", "plain"])
@pytest.mark.parametrize("phi", ["sigmoid", "elu+1", "relu"])
def test_maps_far_from_zero_in_float32(phi, form, monkeypatch):
    """Inputs at which exponential functions overflow, read as the sums of features."""
    monkeypatch.setenv(VARIABLE, form)
    x = torch.tensor([-200.0, -88.5, -87.0, -20.0, -0.0, 20.0, 89.0, 200.0])[None, None, None]
    _, state = ROWS["flow"].op(x, x, x, causal=True, phi=phi, return_state=True)
    y = x.double()
    expected = {"sigmoid": y.sigmoid(), "elu+1": torch.where(y > 0, y + 1, y.exp()), "relu": y.clamp(min=0) + 1e-6}
    assert_close("features", state["sum_k"], expected[phi][:, :, 0], 2e-6)


@causal_names
def test_nan_reaches_the_outputs_that_it_should(name, monkeypatch):
    """A NaN is no number that a maximum drops. In plain PyTorch, a weight of 0 times NaN is NaN."""
    monkeypatch.setenv(VARIABLE, "1")
    for which, reached in (("q", {2}), ("v", {2, 3, 4, 5})):
        tensors = {x: y.detach().clone() for x, y in draw(name, 6).items()}
        tensors[which][:, :, 2, 2] = math.nan
        seen = set(attend(name, tensors).isnan().any(-1).any(1).any(0).nonzero().flatten().tolist())
        assert reached <= seen and not seen & {0, 1}


@names
@pytest.mark.parametrize("form", FORMS, ids=["kernels", "plain"])
def test_large_logits(form, name, monkeypatch):
    """Without a clamp, a softmax over the flows of features of 30 and more is almost a maximum."""
    monkeypatch.setenv(VARIABLE, form)
    tensors = draw(name, 12)
    tensors = {x: (30 * y.detach() if x in "qk" and "plain" not in name else y) for x, y in tensors.items()}
    assert_close("out", attend(name, tensors), literally(name, tensors))
