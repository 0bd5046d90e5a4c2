"""Comparing, timing and counting memory, on invented work: what is wrong is never timed, and times are right."""

import itertools
import math

import pytest
import torch

from recipes.bench.harness import compare, memory, timing
from recipes.bench.harness.measure import measure
from recipes.bench.harness.records import FAILED, NOT_RUN, TIMED, UNEQUAL
from recipes.bench.harness.work import BACKWARD, FORWARD, Absent, Candidate, Case, Settings, attention_runs


def inputs():
    """q and k of three heads, in float64."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, 5, 4)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(2)]


def scaled_product(q, k):
    return (q * k).sum(-1, keepdim=True) * q


class WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is off by one part in fifty."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return 1.02 * grad_out


def wrong_gradient_of_q(q, k):
    return scaled_product(WrongGradient.apply(q), k)


# Comparing


@pytest.mark.parametrize(
    "function, unequal",
    [
        (scaled_product, None),
        (lambda q, k: scaled_product(q, k) * (1 + 1e-6), "output"),
        (wrong_gradient_of_q, "gradient of q"),
        (lambda q, k: scaled_product(q, WrongGradient.apply(k)), "gradient of k"),
        (lambda q, k: scaled_product(q, k) / (q[:, :, :1, :1] * 0), "output"),
        (lambda q, k: scaled_product(q, k)[:, :, :1].expand_as(q), "output"),
    ],
)
def test_the_tensor_that_differs_is_named(function, unequal):
    comparisons = compare.compare_attention(function, scaled_product, inputs(), ("q", "k"))
    assert [one.tensor for one in comparisons] == ["output", "gradient of q", "gradient of k"]
    first = compare.first_unequal(comparisons)
    assert (first and first.tensor) == unequal


@pytest.mark.parametrize("wrong_head, equal", [(2, False), (0, True)])
def test_a_reference_of_the_last_heads_sees_these_alone_in_float64(wrong_head, equal):
    factors = torch.ones(3, 1, 1, dtype=torch.float64)
    factors[wrong_head] = 1.1
    seen = []

    def reference(q, k):
        seen.append((q.shape[1], q.dtype))
        return scaled_product(q, k)

    comparisons = compare.compare_attention(
        lambda q, k: scaled_product(q, k) * factors, reference, inputs(), ("q", "k"), heads=2
    )
    assert (compare.first_unequal(comparisons) is None) == equal
    assert seen == [(2, torch.float64)]


def test_tensors_that_are_not_finite_or_of_another_shape_are_infinitely_far_off():
    ones = torch.ones(3)
    for actual, expected in ((ones / 0, ones), (ones, ones * math.nan), (ones[:2], ones)):
        assert compare.compare("x", actual, expected, 1.0).error == math.inf
    assert compare.compare("x", ones * 1.5, ones, 1.0).error == pytest.approx(0.5)
    with pytest.raises(ValueError, match="nothing"):
        compare.first_unequal([])


# Measuring


def case_of(*candidates, memory=False):
    return Case("invented", "", "tokens", "tokens", (4,), (4,), lambda settings, size: list(candidates), memory=memory)


def candidate_of(name, function, calls=None):
    def counted(*arguments):
        if calls is not None:
            calls.append(name)
        return function(*arguments)

    def check():
        return compare.compare_attention(function, scaled_product, inputs(), ("q", "k"))

    return Candidate(name, 4, 8.0, attention_runs(counted, inputs()), check, input_bytes=100)


def test_an_unequal_candidate_is_reported_and_never_timed():
    calls = []
    candidates = [candidate_of("right", scaled_product, calls), candidate_of("wrong", wrong_gradient_of_q, calls)]
    calls.clear()
    records = measure(case_of(*candidates), 4, Settings())
    assert set(calls) == {"right"}
    assert [(one.form, one.run, one.status) for one in records] == [
        ("wrong", "", UNEQUAL),
        ("right", FORWARD, TIMED),
        ("right", BACKWARD, TIMED),
    ]
    assert "gradient of q" in records[0].reason and "0.02" in records[0].reason


def test_absent_candidates_and_errors_are_recorded_with_the_reason():
    def breaks(settings, size):
        raise RuntimeError("out of memory:\nyou tried to allocate 1 GiB")

    (absent,) = measure(case_of(Absent("peer", 4, "not installed")), 4, Settings())
    assert (absent.form, absent.status, absent.reason) == ("peer", NOT_RUN, "not installed")
    (failed,) = measure(case_of()._replace(build=breaks), 4, Settings())
    assert failed.status == FAILED and "you tried to allocate 1 GiB" in failed.reason


def test_times_from_before_an_error_are_kept():
    def fails():
        raise RuntimeError("no memory left")

    candidate = candidate_of("right", scaled_product)
    candidate.runs[BACKWARD] = fails
    records = measure(case_of(candidate), 4, Settings())
    assert [(one.run, one.status) for one in records] == [(FORWARD, TIMED), ("", FAILED)]


def test_a_record_has_rounds_units_memory_and_inputs():
    candidate = candidate_of("right", scaled_product)
    forward, backward = measure(case_of(candidate, memory=True), 4, Settings())
    assert forward.units == 8.0 and forward.input_bytes == 100 and len(forward.seconds) >= timing.LEAST_ROUNDS
    assert forward.per_second == pytest.approx(8.0 / forward.median)
    assert backward.extra_bytes > 0
    assert all(one.extra_bytes is None for one in measure(case_of(candidate), 4, Settings()))


# Timing


class Clock:
    """A clock that advances in the timed functions alone, and the order of their calls."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def function(self, name, *seconds):
        """One that takes ``seconds`` in turn, and the last of them from then on."""
        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def call():
            self.calls.append(name)
            self.now += next(durations)

        return call


def test_functions_take_turns_and_warm_up_is_not_counted(monkeypatch):
    clock = Clock(monkeypatch)
    times = timing.interleave([clock.function("a", 50, 1), clock.function("b", 0.4, 70, 3)], lambda: None)
    assert times == [[1.0] * timing.LEAST_ROUNDS, [3.0] * timing.LEAST_ROUNDS]
    assert "".join(clock.calls) == "abb" + ("abba" * 3)[: 2 * timing.LEAST_ROUNDS]


def test_short_functions_are_repeated_and_get_more_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 2.0)
    clock = Clock(monkeypatch)
    (times,) = timing.interleave([clock.function("a", timing.LEAST_SECONDS / 8)], lambda: None)
    assert times == pytest.approx([timing.LEAST_SECONDS / 8] * timing.MOST_ROUNDS)
    assert len(clock.calls) == 2 + 8 * timing.MOST_ROUNDS


def test_a_time_ends_when_the_device_has_finished(monkeypatch):
    clock = Clock(monkeypatch)
    waiting = []

    def synchronize():
        waiting.append(clock.now)
        clock.now += 5 if len(waiting) % 2 == 0 else 0  # the work that a call has queued

    (times,) = timing.interleave([clock.function("a", 1.0)], synchronize)
    assert times == [6.0] * timing.LEAST_ROUNDS


def test_garbage_collection_is_on_again_after_an_error():
    calls = iter([None, None])

    def fails_at_the_third_call():
        next(calls)

    with pytest.raises(StopIteration):
        timing.interleave([fails_at_the_third_call], lambda: None)
    assert timing.gc.isenabled()


def test_quartiles_and_ratio():
    assert timing.quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert timing.quartiles([4.0, 1.0, 2.0, 3.0, 100.0]) == (2.0, 3.0, 4.0)
    # A machine that is ten times slower in the last two rounds changes no ratio.
    assert timing.ratio([1.0, 1.0, 1.0, 10.0, 10.0], [2.0, 2.0, 3.0, 20.0, 20.0]) == 2.0
    for ours, peer in (([1.0, 1.0], [1.0]), ([], [])):
        with pytest.raises(ValueError, match="rounds"):
            timing.ratio(ours, peer)


# Memory


def two_at_once():
    first = torch.ones(1000, 1000)
    second = first + 1
    del first
    return [second[0] + 1]


def one_returned_with_views():
    out = torch.ones(1000, 1000)
    return [out, out.t(), out[0]]


def saved_for_backward():
    x = torch.ones(1000, 1000, requires_grad=True)
    out = x.exp().sum()
    return [x, out, *torch.autograd.grad(out, x)]


@pytest.mark.parametrize(
    "run, least, most",
    [(two_at_once, 7_990_000, 8_010_000), (one_returned_with_views, 0, 0), (saved_for_backward, 4_000_000, 8_100_000)],
)
def test_memory_of_known_allocations(run, least, most):
    assert least <= memory.peak_beyond(run, "cpu") <= most


def test_memory_from_before_does_not_count():
    before = [torch.ones(1000, 1000)]

    def run():
        before.clear()
        return [torch.ones(500, 1000) + 1]

    assert memory.peak_beyond(run, "cpu") == pytest.approx(2_000_000, abs=1000)
    # An address that was not allocated here is not freed here.
    assert memory.peak_of([(1, 8), (2, -100), (3, 8), (1, -8), (2, 100), (2, -100), (1, 4)]) == 108
    assert memory.peak_of([(2, -100)]) == memory.peak_of([]) == 0
