"""Kernels of causal sums against their recurrence: results, gradients, layouts of memory, and memory that they get."""

import math

import pytest
import torch
from torch import Tensor

from common.ops.shared.chunked_sums import sums_in_chunks
from tests.common.ops.shared.cpu.recurrence import GATES, MAPS, Inputs, random_inputs, token_by_token
from tests.compare import assert_all_close, assert_close, gradients

pytest.importorskip("numba")

from common.ops.shared.cpu.sums import causal_sums  # noqa: E402

RESULTS = ("out", "weights", "sum_kv", "sum_k")
#: Largest relative errors: of everything in float64, of results and of gradients in float32.
DOUBLE, SINGLE, SINGLE_GRADIENT = 1e-10, 2e-6, 1e-5


def flat(results: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([x.flatten() for x in results])


def in_chunks(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, sum_kv: Tensor | None, sum_k: Tensor | None):
    """``causal_sums`` in PyTorch's functions."""
    before = None if sum_kv is None else {"sum_kv": sum_kv, "sum_k": sum_k}
    values, weights, after = sums_in_chunks(q, k, v, 64, before, log_decay)
    return values, weights, after["sum_kv"], after["sum_k"]


def agree(inputs: Inputs, expected_from=token_by_token, **options) -> None:
    """Results and gradients of kernels in float64 and in float32, against others in float64.

    ``inputs`` keep their strides in both dtypes.
    """
    expected = expected_from(*inputs, **options)
    expected_grads = gradients(flat(expected), inputs.given().values())
    for dtype, tolerance, for_gradient in (
        (torch.float64, DOUBLE, DOUBLE),
        (torch.float32, SINGLE, SINGLE_GRADIENT),
    ):
        converted = inputs.leaves(dtype)
        actual = causal_sums(*converted, **options)
        for name, x, y in zip(RESULTS, actual, expected):
            assert_close(f"{name} in {dtype}", x, y, tolerance)
        actual_grads = gradients(flat(actual), converted.given().values())
        assert_all_close(inputs.given(), actual_grads, expected_grads, for_gradient)


@pytest.mark.parametrize("begun", [False, True], ids=["start", "continued"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65])
def test_every_length_is_the_recurrence(n, gates, begun):
    """Up to four tokens, which are computed at once, and around the 64 of a tile."""
    agree(random_inputs(n, gates=gates, begun=begun))


@pytest.mark.parametrize("gates", GATES)
def test_several_tiles_are_the_recurrence(gates):
    agree(random_inputs(257, gates=gates, begun=True, batch=1), in_chunks)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize(
    "f, e", [(1, 1), (1, 64), (3, 7), (7, 3), (64, 1), (64, 65), (65, 64), (65, 256), (256, 65), (256, 3), (2, 256)]
)
def test_any_number_of_channels(f, e, gates):
    for n, begun in ((6, True), (1, True), (1, False)):
        agree(random_inputs(n, f, e, gates=gates, begun=begun, batch=1, heads=2))


@pytest.mark.parametrize("gates", GATES)
def test_thousands_of_tokens(gates):
    agree(random_inputs(4096, 8, 8, gates=gates, batch=1, heads=1, strength=1e-3), in_chunks)


@pytest.mark.parametrize("gates", ["head", "channel"])
@pytest.mark.parametrize("closed", [-30.0, -1e4], ids=str)
def test_open_and_closed_gates_among_each_other(closed, gates):
    """exp(-30) lets something through, which float32 must keep; exp(-1e4) is 0."""
    inputs = random_inputs(70, gates=gates, begun=True, batch=1)
    with torch.no_grad():
        inputs.log_decay.zero_()
        inputs.log_decay[:, :, 1::3] = closed
        inputs.log_decay[:, :, 40:44] = closed  # four in a row
    agree(inputs)
    with torch.no_grad():
        inputs.log_decay.fill_(closed)
    agree(inputs)


@pytest.mark.parametrize("gates", [None, "channel"])
@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("divisor", [(0.0, 1e-3), (1e-6, 0.0), (0.1, 8.0), None], ids=str)
def test_feature_maps_and_divisors(divisor, phi, gates):
    """A least divisor of 8 is more than the first weights and less than the last."""
    inputs = random_inputs(13, gates=gates, begun=True)
    if phi is not None:
        with torch.no_grad():
            inputs.q.mul_(4).sub_(2)
            inputs.k.mul_(4).sub_(2)
    agree(inputs, divisor=divisor, phi=phi)


def test_the_least_divisor_is_both_used_and_not():
    """Without this, the case above would not be what it says."""
    weights = token_by_token(*random_inputs(13, gates="channel", begun=True))[1]
    assert weights.min() + 0.1 < 8.0 < weights.max() + 0.1


def test_maps_far_from_zero_in_float32():
    """Inputs at which exponential functions overflow."""
    values = torch.tensor([-200.0, -88.5, -87.0, -20.0, -0.0, 20.0, 89.0, 200.0])
    inputs = Inputs(values[None, None, None], values[None, None, None], torch.ones(1, 1, 1, 1))
    for phi in ("sigmoid", "elu+1", "relu"):
        expected = MAPS[phi](values.double())
        assert_close(phi, causal_sums(*inputs, True, None, phi)[3][0, 0], expected, SINGLE)


@pytest.mark.parametrize("phi", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nan_reaches_the_outputs_that_it_should(dtype, phi):
    """A NaN is no number that a maximum drops."""
    inputs = random_inputs(6).each(lambda x: x.detach().to(dtype))
    for name, reached in (("q", [2]), ("k", [2, 3, 4, 5]), ("v", [2, 3, 4, 5])):
        changed = inputs._asdict()[name].clone()
        changed[:, :, 2, 3] = math.nan
        out = causal_sums(*inputs._replace(**{name: changed}), True, (1e-6, 0.0), phi)[0]
        assert out.isnan().any(-1).any(1).any(0).nonzero().flatten().tolist() == reached


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("divisor", [None, (1e-3, 0.5)], ids=["sums", "means"])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (2, 3), (0, 3)], ids=str)
def test_a_loss_may_use_some_of_the_results(used, gates, divisor):
    inputs = random_inputs(9, gates=gates, begun=True)

    def chosen(function, **options):
        results = function(*inputs, divisor=divisor, **options)
        return gradients(flat(tuple(results[i] for i in used)), inputs.given().values())

    assert_all_close(inputs.given(), chosen(causal_sums, weighs=True), chosen(token_by_token), DOUBLE)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("n", [1, 9])
def test_any_single_input_may_need_a_gradient(n, gates):
    inputs = random_inputs(n, gates=gates, begun=True)
    expected = dict(zip(inputs.given(), gradients(flat(token_by_token(*inputs)), inputs.given().values())))
    fixed = inputs.each(Tensor.detach)
    for name, x in inputs.given().items():
        results = causal_sums(*fixed._replace(**{name: x}))
        assert_close(f"gradient of {name}", gradients(flat(results), [x])[0], expected[name], DOUBLE)


@pytest.mark.parametrize("gates", GATES)
def test_sums_without_weights(gates):
    """``sum_k`` is not there, and results for weights have no numbers."""
    inputs = random_inputs(66, gates=gates, begun=True)._replace(sum_k=None)
    values, weights, sum_kv, sum_k = causal_sums(*inputs, weighs=False)
    assert weights.numel() == sum_k.numel() == 0
    expected = token_by_token(*inputs)
    assert_close("values", values, expected[0], DOUBLE)
    assert_close("sum_kv", sum_kv, expected[2], DOUBLE)
    pair = (gradients(flat(x), inputs.given().values()) for x in ((values, sum_kv), (expected[0], expected[2])))
    assert_all_close(inputs.given(), *pair, DOUBLE)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("border", [1, 2, 64, 70])
def test_two_pieces_are_one_sequence_with_gradients_through_the_sums(border, gates):
    inputs = random_inputs(71, gates=gates, begun=True)
    first = inputs._replace(**{x: y[:, :, :border] for x, y in inputs.given().items() if not x.startswith("sum")})
    rest = inputs._replace(**{x: y[:, :, border:] for x, y in inputs.given().items() if not x.startswith("sum")})
    out, weights, *sums = causal_sums(*first)
    later, later_weights, *sums = causal_sums(*rest._replace(sum_kv=sums[0], sum_k=sums[1]))
    results = (torch.cat([out, later], 2), torch.cat([weights, later_weights], 2), *sums)
    expected = token_by_token(*inputs)
    for name, x, y in zip(RESULTS, results, expected):
        assert_close(name, x, y, DOUBLE)
    pair = (gradients(flat(x), inputs.given().values()) for x in (results, expected))
    assert_all_close(inputs.given(), *pair, DOUBLE)


# --- layouts of memory -----------------------------------------------------------------------------------------------


def scattered(x: Tensor) -> Tensor:
    """x with another order of dimensions in memory: its channels do not follow each other."""
    return x.detach().transpose(1, -1).contiguous().transpose(1, -1)


def spread(x: Tensor) -> Tensor:
    """x in the midst of NaN on all sides."""
    memory = x.new_full([size + 4 for size in x.shape], math.nan)
    inside = memory[tuple(slice(2, size + 2) for size in x.shape)]
    return inside.copy_(x.detach())


@pytest.mark.parametrize("n", [1, 6, 66])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("layout", [scattered, spread, lambda x: x.detach().contiguous()])
def test_any_layout_of_inputs(layout, gates, n):
    inputs = random_inputs(n, gates=gates, begun=True)
    laid = inputs.each(lambda x: layout(x).requires_grad_())
    assert all(torch.equal(x, y) for x, y in zip(laid.given().values(), inputs.given().values()))
    actual, expected = causal_sums(*laid), token_by_token(*inputs)
    for name, x, y in zip(RESULTS, actual, expected):
        assert_close(name, x, y, DOUBLE)
    pair = gradients(flat(actual), laid.given().values()), gradients(flat(expected), inputs.given().values())
    assert_all_close(inputs.given(), *pair, DOUBLE)


@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("gates", GATES)
def test_inputs_with_stride_zero(gates, n, dimension):
    """One number in the place of many along a dimension."""
    inputs = random_inputs(n, gates=gates, begun=True)
    small = inputs.each(lambda x: x.detach().narrow(min(dimension, x.dim() - 1), 0, 1).requires_grad_())
    full = Inputs(*(x if x is None else y.expand(x.shape) for x, y in zip(inputs, small)))
    pair = (gradients(flat(f(*full)), small.given().values()) for f in (causal_sums, token_by_token))
    assert_all_close(small.given(), *pair, DOUBLE)


@pytest.mark.parametrize("shape", [(1, 2, 6), (1, 1, 6), (3, 1, 6), (1, 2, 6, 7)], ids=str)
def test_gates_for_all_rows_or_heads(shape):
    """Retention's gates are the same in each row of a batch."""
    inputs = random_inputs(6)._replace(log_decay=-torch.rand(shape, dtype=torch.float64).requires_grad_())
    pair = (gradients(flat(f(*inputs)), inputs.given().values()) for f in (causal_sums, token_by_token))
    assert_all_close(inputs.given(), *pair, DOUBLE)


@pytest.mark.parametrize("e", [1, 5])
def test_expanded_and_scattered_gradients(e):
    """``sum`` gives a gradient with stride 0, ``transpose`` one whose channels do not follow each other."""
    inputs = random_inputs(6, e=e, begun=True)
    for loss in (
        lambda results: sum(x.sum() for x in results),
        lambda results: sum((x.sum(-1) ** 2).sum() for x in results),
        lambda results: sum((x.transpose(1, -1).contiguous() ** 2).sum() for x in results),
    ):
        pair = (torch.autograd.grad(loss(f(*inputs)), inputs.given().values()) for f in (causal_sums, token_by_token))
        assert_all_close(inputs.given(), *pair, DOUBLE)


# --- memory that kernels get -----------------------------------------------------------------------------------------


class Poison:
    """Makes new memory be NaN, and each piece have NaN around it, which must still be there at the end."""

    MARGIN = 32

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pieces: list[tuple[Tensor, int]] = []
        empty, empty_like, new_empty = torch.empty, torch.empty_like, Tensor.new_empty

        def between(x: Tensor) -> Tensor:
            if not x.is_floating_point() or x.numel() == 0:
                return x
            size = x.untyped_storage().nbytes() // x.element_size()
            memory = empty(size + 2 * self.MARGIN, dtype=x.dtype).fill_(math.nan)
            self._pieces.append((memory, size))
            return memory.as_strided(x.shape, x.stride(), self.MARGIN)

        monkeypatch.setattr(torch, "empty", lambda *size, **options: between(empty(*size, **options)))
        monkeypatch.setattr(torch, "empty_like", lambda *x, **options: between(empty_like(*x, **options)))
        monkeypatch.setattr(Tensor, "new_empty", lambda *x, **options: between(new_empty(*x, **options)))

    def check(self, at_least: int) -> None:
        """No piece was written outside."""
        assert len(self._pieces) >= at_least
        for memory, size in self._pieces:
            assert memory[: self.MARGIN].isnan().all() and memory[self.MARGIN + size :].isnan().all()


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("n, f, e", [(1, 7, 5), (3, 64, 65), (65, 3, 1), (65, 1, 7), (130, 5, 4)])
@pytest.mark.parametrize("begun", [False, True], ids=["start", "continued"])
def test_what_was_in_new_memory_does_not_matter(begun, n, f, e, gates, monkeypatch):
    """The same bits if it is NaN; and nothing outside it is written."""
    inputs = random_inputs(n, f, e, gates, begun)
    for weighs in (True, False):
        used = inputs if weighs else inputs._replace(sum_k=None)
        options = {"weighs": weighs, "divisor": (1e-3, 0.5) if weighs else None}
        clean = [*(results := causal_sums(*used, **options)), *gradients(flat(results), used.given().values())]
        with monkeypatch.context() as patch:
            poison = Poison(patch)
            poisoned = [*(results := causal_sums(*used, **options)), *gradients(flat(results), used.given().values())]
            without_graph = causal_sums(*used.each(Tensor.detach), **options)
        poison.check(6)
        for x, y in zip([*clean, *clean[:4]], [*poisoned, *without_graph], strict=True):
            assert torch.equal(x, y)
