"""Comparing, timing and measuring memory of synthetic work: wrong results are never timed, times are right."""

import gc
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from recipes.bench.harness import compare, memory, noise, timing
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
    """The identity with a gradient that is wrong by 2 %."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad_out):
        return 1.02 * grad_out


def wrong_gradient_of_q(q, k):
    return scaled_product(WrongGradient.apply(q), k)


@pytest.mark.parametrize(
    "function, unequal",
    [
        (scaled_product, None),
        (lambda q, k: scaled_product(q, k) * (1 + 1e-6), "output"),
        (wrong_gradient_of_q, "gradient of q"),
        (lambda q, k: scaled_product(q, WrongGradient.apply(k)), "gradient of k"),
        (lambda q, k: scaled_product(q, k) / (q[:, :, :1, :1] * 0), "output"),
    ],
)
def test_the_tensor_that_differs_is_named(function, unequal):
    comparisons = compare.compare_attention(function, scaled_product, inputs(), ("q", "k"))
    assert [comparison.tensor for comparison in comparisons] == ["output", "gradient of q", "gradient of k"]
    first = compare.first_unequal(comparisons)
    assert (first and first.tensor) == unequal


def test_a_reference_of_the_last_heads_sees_these_alone_in_float64():
    factors = torch.tensor([1.1, 1.0, 1.0], dtype=torch.float64).view(3, 1, 1)  # the first head is wrong
    calls = []

    def reference(q, k):
        calls.append((q.shape[1], q.dtype))
        return scaled_product(q, k)

    for heads, equal in ((2, True), (None, False)):
        comparisons = compare.compare_attention(
            lambda q, k: scaled_product(q, k) * factors, reference, inputs(), ("q", "k"), heads
        )
        assert (compare.first_unequal(comparisons) is None) == equal
    assert calls == [(2, torch.float64), (3, torch.float64)]


def test_tensors_that_are_not_finite_or_of_another_shape_are_infinitely_far_off():
    ones = torch.ones(3)
    for actual, expected in ((ones / 0, ones), (ones, ones * math.nan), (ones[:2], ones)):
        assert compare.compare("x", actual, expected, 1.0).error == math.inf
    with pytest.raises(ValueError, match="nothing"):
        compare.first_unequal([])


def case_of(*candidates, memory=False):
    return Case("invented", "", "tokens", "tokens", (4,), (4,), lambda settings, size: list(candidates), memory=memory)


def candidate_of(name, function, calls):
    def counted(*arguments):
        calls.append(name)
        return function(*arguments)

    def check():
        return compare.compare_attention(function, scaled_product, inputs(), ("q", "k"))

    return Candidate(name, 4, 8.0, attention_runs(counted, inputs()), check, input_bytes=100)


def test_what_is_unequal_absent_or_fails_is_recorded_with_the_reason_and_never_timed():
    def fails():
        raise RuntimeError("out of memory:\nyou tried to allocate 1 GiB")

    calls = []
    candidates = [candidate_of("right", scaled_product, calls), candidate_of("wrong", wrong_gradient_of_q, calls)]
    candidates[0].runs[BACKWARD] = fails
    calls.clear()
    records = measure(case_of(Absent("peer", 4, "not installed"), *candidates, memory=True), 4, Settings())
    assert set(calls) == {"right"}
    assert [(record.form, record.run, record.status) for record in records] == [
        ("peer", "", NOT_RUN),
        ("wrong", "", UNEQUAL),
        ("right", FORWARD, TIMED),  # times measured before an error are kept
        ("all", "", FAILED),
    ]
    for record, reason in zip(records, ("not installed", "gradient of q", "", "you tried to allocate 1 GiB")):
        assert reason in record.reason
    timed = records[2]
    assert timed.units == 8.0 and timed.input_bytes == 100 and len(timed.seconds) >= timing.LEAST_ROUNDS
    assert timed.per_second == pytest.approx(8.0 / timed.median) and timed.extra_bytes is not None


class Clock:
    """A clock that advances only in timed functions, and records the order of their calls."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def function(self, name, *seconds):
        """A function whose calls take ``seconds`` in turn, then always the last value."""
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


def test_short_functions_are_repeated_until_the_device_has_finished(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 2.0)
    clock, waiting = Clock(monkeypatch), []

    def synchronize():
        waiting.append(clock.now)
        clock.now += 4 * timing.LEAST_SECONDS if len(waiting) % 2 == 0 else 0  # the work queued by the calls

    (times,) = timing.interleave([clock.function("a", timing.LEAST_SECONDS / 8)], lambda: None)
    assert times == pytest.approx([timing.LEAST_SECONDS / 8] * timing.MOST_ROUNDS)
    assert len(clock.calls) == 2 + 8 * timing.MOST_ROUNDS
    (times,) = timing.interleave([clock.function("a", 1.0)], synchronize)
    assert times == pytest.approx([1.0 + 4 * timing.LEAST_SECONDS] * len(times))


def test_garbage_collection_goes_on_after_an_error():
    def fails_in_the_first_round():
        if not gc.isenabled():
            raise RuntimeError

    with pytest.raises(RuntimeError):
        timing.interleave([fails_in_the_first_round], lambda: None)
    assert gc.isenabled()


def test_quartiles_and_ratio():
    assert timing.quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert timing.quartiles([4.0, 1.0, 2.0, 3.0, 100.0]) == (2.0, 3.0, 4.0)
    # A machine that is ten times slower in the last two rounds does not change any ratio.
    assert timing.ratio([1.0, 1.0, 1.0, 10.0, 10.0], [2.0, 2.0, 3.0, 20.0, 20.0]) == 2.0
    with pytest.raises(ValueError, match="rounds"):
        timing.ratio([1.0, 1.0], [1.0])


STEADY, FIFTH, HALF = (1.0,) * 5, (0.8, 0.9, 1.0, 1.1, 1.2), (0.6, 0.75, 1.0, 1.25, 1.4)


@pytest.mark.parametrize(
    "outcomes, kept",
    [
        ([[STEADY, STEADY], [HALF, HALF]], ([STEADY, STEADY], 0.0, 1)),
        ([[STEADY, HALF], [HALF, STEADY], [STEADY, STEADY]], ([STEADY, STEADY], 0.2, 3)),
        ([[STEADY, HALF], [FIFTH, FIFTH], [HALF, STEADY], [HALF, HALF]], ([FIFTH, FIFTH], 0.1, 4)),
        ([[]], ([], 0.0, 1)),
    ],
)
def test_a_disturbed_measurement_is_repeated_and_the_quietest_is_kept(outcomes, kept, monkeypatch):
    """Times of five rounds with quartiles 0, 1/5 and 1/2 of their median apart."""
    monkeypatch.setattr(noise, "MOST_ATTEMPTS", 4)
    loads, waiting = itertools.count(), iter(outcomes)
    monkeypatch.setattr(noise, "other_load", lambda: next(loads) / 10)
    assert noise.quietest(lambda: next(waiting)) == kept
    monkeypatch.setattr(noise, "MOST_SECONDS", 0.0)
    assert noise.quietest(lambda: [HALF]).attempts == 1, "nothing is repeated after the limit"


@pytest.mark.parametrize("total, own, load", [(75.0, 50.0, 0.5), (50.0, 100.0, 0.0), (10.0, 60.0, 0.0)])
def test_the_load_is_what_other_programs_use_of_all_cores(total, own, load, monkeypatch):
    """All programs use ``total`` percent of two cores, and this process ``own`` percent of one core."""
    process = SimpleNamespace(cpu_percent=lambda: own)
    machine = SimpleNamespace(Process=lambda: process, cpu_percent=lambda interval: total, cpu_count=lambda: 2)
    monkeypatch.setattr(noise, "psutil", machine)
    assert noise.other_load() == load


def test_spread_is_a_part_of_the_median():
    assert [round(noise.spread(times), 9) for times in (STEADY, FIFTH, HALF)] == [0.0, 0.2, 0.5]


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
    """Freeing memory allocated before the measurement does not count."""
    assert memory.peak_of([(1, 8), (2, -100), (3, 8), (1, -8), (2, 100), (2, -100), (1, 4)]) == 108
    assert memory.peak_of([(2, -100)]) == memory.peak_of([]) == 0
