"""The benchmark's own parts: comparing, timing in turns, counting memory, judging, writing; on invented work."""

import itertools
import json
import math

import pytest
import torch
from PIL import Image

from recipes.bench import __main__ as bench
from recipes.bench import compare, machine, measure, memory, packages, picture, records, report, targets, timing
from recipes.bench.cases import CASES, daft, flow, images
from recipes.bench.floors import floors
from recipes.bench.records import FAILED, NOT_RUN, TIMED, UNEQUAL, Machine, Record, Results
from recipes.bench.work import BACKWARD, DECODING, FORWARD, TRAINING, Absent, Case, Form, Settings, attention_runs
from recipes.tables import as_text

HERE = Machine(
    "python -m recipes.bench", "2026-11-21", "abc1234", "a processor", 2, 2, 24.0, 0.1, "3.11.7", "torch 2.15.0", "CPU",
    "float32",
)  # fmt: skip


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """As few as there are: nothing is learned from these times."""
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 2)
    monkeypatch.setattr(timing, "LEAST_SECONDS", 0.001)


def leaves(*shapes):
    return [torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]


def scaled_product(q, k):
    return (q * k).sum(-1, keepdim=True) * q


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is off by one part in fifty."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.02 * gradient


# comparing


def test_equal_forms_are_equal():
    inputs = leaves((1, 3, 5, 4), (1, 3, 5, 4))
    found = compare.compare_attention(scaled_product, scaled_product, inputs, ("q", "k"))
    assert [one.tensor for one in found] == ["output", "gradient of q", "gradient of k"]
    assert compare.first_unequal(found) is None


@pytest.mark.parametrize(
    "wrong, named",
    [
        (lambda q, k: scaled_product(q, k) * (1 + 1e-6), "output"),
        (lambda q, k: scaled_product(WrongGradient.apply(q), k), "gradient of q"),
        (lambda q, k: scaled_product(q, WrongGradient.apply(k)), "gradient of k"),
        (lambda q, k: scaled_product(q, k) / (q[:, :, :1, :1] * 0), "output"),
        (lambda q, k: scaled_product(q, k)[:, :, :1].expand_as(q), "output"),
    ],
)
def test_unequal_forms_are_told_by_the_tensor(wrong, named):
    inputs = leaves((1, 3, 5, 4), (1, 3, 5, 4))
    found = compare.compare_attention(wrong, scaled_product, inputs, ("q", "k"))
    assert compare.first_unequal(found).tensor == named


def test_a_reference_of_some_heads_is_compared_with_those():
    def only_last_head_wrong(q, k):
        return scaled_product(q, k) * torch.tensor([1.0, 1.0, 1.1], dtype=q.dtype).view(3, 1, 1)

    def only_first_head_wrong(q, k):
        return scaled_product(q, k) * torch.tensor([1.1, 1.0, 1.0], dtype=q.dtype).view(3, 1, 1)

    inputs = leaves((1, 3, 5, 4), (1, 3, 5, 4))
    shapes = []

    def reference(q, k):
        shapes.append((tuple(q.shape), q.dtype))
        return scaled_product(q, k)

    found = compare.compare_attention(only_last_head_wrong, reference, inputs, ("q", "k"), heads=1)
    assert compare.first_unequal(found).tensor == "output"
    assert shapes == [((1, 1, 5, 4), torch.float64)]
    found = compare.compare_attention(only_first_head_wrong, reference, inputs, ("q", "k"), heads=2)
    assert compare.first_unequal(found) is None


def test_what_is_not_finite_or_of_another_shape_is_infinitely_far_off():
    ones = torch.ones(3)
    assert compare.compare("x", ones / 0, ones, 1.0).error == math.inf
    assert compare.compare("x", ones, ones * math.nan, 1.0).error == math.inf
    assert compare.compare("x", ones[:2], ones, 1.0).error == math.inf
    assert compare.compare("x", ones * 1.5, ones, 1.0).error == pytest.approx(0.5)


def test_nothing_compared_is_not_equal():
    with pytest.raises(ValueError, match="nothing was compared"):
        compare.first_unequal([])


# measuring


def case_of(*forms, name="causal_flow", memory=True):
    """A case whose forms are given."""
    return Case(name, "invented", "tokens", "tokens", (4,), (4,), lambda settings, size: list(forms), memory=memory)


def form_of(name, attention, calls, reference=scaled_product):
    inputs = leaves((1, 3, 4, 4), (1, 3, 4, 4))

    def counted(*arguments):
        calls.append(name)
        return attention(*arguments)

    return Form(
        name, 4, 4, attention_runs(counted, inputs),
        lambda: compare.compare_attention(attention, reference, inputs, ("q", "k")),
    )  # fmt: skip


def test_an_unequal_form_is_reported_and_never_timed():
    calls = []
    right = form_of("right", scaled_product, calls)
    wrong = form_of("wrong", lambda q, k: scaled_product(WrongGradient.apply(q), k), calls)
    calls.clear()
    found = measure.measure(case_of(right, wrong), 4, Settings())
    assert "wrong" not in calls and "right" in calls
    assert [(one.form, one.run, one.status) for one in found] == [
        ("wrong", "", UNEQUAL),
        ("right", FORWARD, TIMED),
        ("right", BACKWARD, TIMED),
    ]
    assert found[0].reason == "gradient of q differs from the reference by 0.02; allowed: 1e-09"
    results = Results(HERE, found)
    assert results.faults() == found[:1]
    assert results.find("causal_flow", 4, FORWARD, "wrong") is None


def test_absent_forms_and_errors_are_said():
    def breaks(settings, size):
        raise RuntimeError("out of memory:\nyou tried to allocate 1 GiB")

    absent = measure.measure(case_of(Absent("peer", 4, "not installed: pip install it")), 4, Settings())
    assert [(one.form, one.status, one.reason) for one in absent] == [
        ("peer", NOT_RUN, "not installed: pip install it")
    ]
    assert not Results(HERE, absent).faults()
    failed = measure.measure(case_of()._replace(build=breaks), 4, Settings())
    assert [(one.status, one.reason) for one in failed] == [(FAILED, "RuntimeError: you tried to allocate 1 GiB")]
    assert Results(HERE, failed).faults() == failed


def test_what_was_timed_before_an_error_is_kept():
    def fails():
        raise RuntimeError("no memory left")

    form = form_of("right", scaled_product, [])
    form.runs[BACKWARD] = fails
    found = measure.measure(case_of(form), 4, Settings())
    assert [(one.run, one.status) for one in found] == [(FORWARD, TIMED), ("", FAILED)]
    assert found[1].reason == "RuntimeError: no memory left"


def test_a_run_has_units_memory_and_inputs():
    form = form_of("right", scaled_product, [])._replace(units=8.0, input_bytes=100)
    forward, backward = measure.measure(case_of(form), 4, Settings())
    assert forward.units == 8.0 and forward.input_bytes == 100 and len(forward.seconds) >= timing.LEAST_ROUNDS
    assert forward.per_second == pytest.approx(8.0 / forward.median)
    assert backward.extra_bytes > 0
    assert all(one.extra_bytes is None for one in measure.measure(case_of(form, memory=False), 4, Settings()))


# timing


class Clock:
    """Time that passes in functions alone, and what was called when."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def function(self, name, *seconds):
        """One that takes ``seconds`` in turn, the last from then on."""
        durations = itertools.chain(seconds, itertools.repeat(seconds[-1]))

        def call():
            self.calls.append(name)
            self.now += next(durations)

        return call


def test_functions_take_turns_and_warm_up_is_not_counted(monkeypatch):
    clock = Clock(monkeypatch)
    found = timing.interleave([clock.function("a", 50, 1), clock.function("b", 0.4, 70, 3)], lambda: None)
    assert found == [[1.0] * timing.LEAST_ROUNDS, [3.0] * timing.LEAST_ROUNDS]
    assert "".join(clock.calls) == "abb" + ("abba" * 3)[: 2 * timing.LEAST_ROUNDS]


def test_short_functions_are_repeated_and_get_more_rounds(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS", 2.0)
    clock = Clock(monkeypatch)
    (found,) = timing.interleave([clock.function("a", timing.LEAST_SECONDS / 8)], lambda: None)
    assert len(found) == timing.MOST_ROUNDS
    assert found == pytest.approx([timing.LEAST_SECONDS / 8] * timing.MOST_ROUNDS)
    assert len(clock.calls) == 2 + 8 * timing.MOST_ROUNDS


def test_the_device_is_waited_for_inside_of_the_time(monkeypatch):
    clock = Clock(monkeypatch)
    waiting = []

    def synchronize():
        waiting.append(clock.now)
        clock.now += 5 if len(waiting) % 2 == 0 else 0  # what was asked for, at the end of a call

    (found,) = timing.interleave([clock.function("a", 1.0)], synchronize)
    assert found == [6.0] * timing.LEAST_ROUNDS


def test_garbage_is_collected_again_afterwards():
    def fails():
        raise RuntimeError("no")

    calls = iter([None, None])
    with pytest.raises(RuntimeError, match="no"):
        timing.interleave([lambda: next(calls, 1) and fails()], lambda: None)
    assert timing.gc.isenabled()


def test_quartiles_and_ratio():
    assert timing.quartiles([5.0]) == (5.0, 5.0, 5.0)
    assert timing.quartiles([4.0, 1.0, 2.0, 3.0, 100.0]) == (2.0, 3.0, 4.0)
    # A machine that is ten times slower in the last two rounds changes no ratio.
    assert timing.ratio([1.0, 1.0, 1.0, 10.0, 10.0], [2.0, 2.0, 3.0, 20.0, 20.0]) == 2.0
    with pytest.raises(ValueError, match="2 and 1 rounds"):
        timing.ratio([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="0 and 0 rounds"):
        timing.ratio([], [])


# memory


def test_memory_of_known_allocations():
    def run():
        first = torch.ones(1000, 1000)
        second = first + 1
        del first
        third = second[0] + 1
        return [third]

    assert memory.peak_beyond(run, "cpu") == pytest.approx(2 * 4_000_000, abs=10_000)


def test_returned_tensors_do_not_count_and_views_count_once():
    def run():
        out = torch.ones(1000, 1000)
        return [out, out.t(), out[0]]

    assert memory.peak_beyond(run, "cpu") == 0
    assert memory.storage_bytes(run()) == 4_000_000


def test_what_was_there_before_does_not_count():
    before = [torch.ones(1000, 1000)]

    def run():
        before.clear()
        return [torch.ones(500, 1000) + 1]

    assert memory.peak_beyond(run, "cpu") == pytest.approx(2_000_000, abs=1000)


def test_frees_of_what_this_pass_did_not_make_do_not_count():
    assert memory.peak_of([(1, 8), (2, -100), (3, 8), (1, -8), (2, 100), (2, -100), (1, 4)]) == 108
    assert memory.peak_of([(2, -100)]) == memory.peak_of([]) == 0


def test_gradients_do_not_count_but_what_is_saved_for_them_does():
    x = torch.ones(1000, 1000, requires_grad=True)

    def run():
        out = x.exp().sum()
        return [out, *torch.autograd.grad(out, x)]

    assert 4_000_000 <= memory.peak_beyond(run, "cpu") <= 8_100_000


# results


def timed(case, size, run, form, *seconds, units=100.0, extra=None, inputs=0):
    return Record(case, size, run, form, TIMED, "", seconds, units, extra, inputs)


def some_results():
    return Results(
        HERE,
        [
            timed("causal_flow", 512, BACKWARD, flow.OURS, 0.010, 0.012, 0.011, extra=3_000_000, inputs=3_145_728),
            timed("causal_flow", 512, BACKWARD, flow.SOFTMAX, 0.020, 0.024, 0.022, extra=1_000_000, inputs=3_145_728),
            timed("causal_flow", 1024, BACKWARD, flow.OURS, 0.020, 0.022, 0.021, extra=6_000_000, inputs=6_291_456),
            timed("causal_flow", 1024, BACKWARD, flow.SOFTMAX, 0.080, 0.088, 0.084, extra=2_000_000, inputs=6_291_456),
            Record("causal_flow", 1024, "", flow.AUTHORS, NOT_RUN, "it needs 3.0 GiB; allowed here: 1.0"),
            timed("decoding", 128, DECODING, "flash_lm", 0.002, units=1.0),
            Record("deit", 0, "", "all forms", NOT_RUN, "no CUDA device"),
        ],
    )


def test_results_survive_json(tmp_path):
    results = some_results()
    records.save(results, tmp_path / "results.json")
    assert records.load(tmp_path / "results.json") == results
    assert json.loads((tmp_path / "results.json").read_text())["machine"]["commit"] == "abc1234"


@pytest.mark.parametrize("text", ["no json", "{}", '{"machine": {}, "records": []}', "[]"])
def test_a_file_of_something_else_is_refused(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="results.json is not a file of results"):
        records.load(tmp_path / "results.json")


def test_tables():
    results = some_results()
    plain = as_text(report.tables(results), report.run_of(results))
    lines = [line.split("   ") for line in plain.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert ["512", BACKWARD, flow.OURS, "11", "10.5 to 11.5", "9,091", "-", "2.9", "0.95"] in cells
    assert ["512", BACKWARD, flow.SOFTMAX, "22", "21 to 23", "4,545", "2", "1.0", "0.32"] in cells
    assert ["causal_flow", "1,024", flow.AUTHORS, "not run", "it needs 3.0 GiB; allowed here: 1.0"] in cells
    assert ["deit", "-", "all forms", "not run", "no CUDA device"] in cells
    assert plain.index("What to reach") > plain.index("Not timed")
    (row,) = [line for line in cells if line and line[0].endswith("break-even")]
    assert row[-2:] == ["512 tokens", "yes"]
    assert "a processor, 2 cores, 2 threads, 24 GiB" in plain and "commit abc1234" in plain


def test_pictures_are_made_of_cases_with_several_sizes(tmp_path):
    (path,) = picture.draw(some_results(), tmp_path)
    assert path == tmp_path / "causal_flow.png"
    with Image.open(path) as image:
        assert image.width > 500 and image.height > 200
        assert len(image.convert("RGB").getcolors(image.width * image.height)) > 20


# targets


def judge(work, *found):
    """The verdict on the only target whose work starts so."""
    (target,) = [target for target in targets.TARGETS if target.work.startswith(work)]
    return target.judge(Results(HERE, list(found)))


def pair(case, size, run, ours, theirs, ratio):
    return timed(case, size, run, ours, 1.0, 2.0, 1.5), timed(case, size, run, theirs, ratio, 2 * ratio, 1.5 * ratio)


@pytest.mark.parametrize(
    "work, case, size, run, ours, theirs, least",
    [
        ("causal Flow-Attention, n = 2,048, forward", "causal_flow", 2048, FORWARD, flow.OURS, flow.AUTHORS, 100),
        ("causal Flow-Attention, n = 16,384, forward + ", "causal_flow", 16384, BACKWARD, flow.OURS, flow.SOFTMAX, 20),
        ("Flow-Attention not causal", "full_flow", 4096, BACKWARD, flow.OURS, flow.AUTHORS, 3),
        ("flowformer_hier_s", "hier", 224, TRAINING, images.HIERARCHICAL, images.AUTHORS, 1.5),
        ("daft_conv causal", "daft_conv", 4096, FORWARD, daft.OURS, daft.DIRECT, 3),
        ("training step of flash_lm, n = 8,192, width 256", "flash_lm_256", 8192, TRAINING, "flash_lm",
         "transformer_pp_lm", 1 / 0.24),
    ],
)  # fmt: skip
def test_a_ratio_is_reached_or_not(work, case, size, run, ours, theirs, least):
    assert judge(work).reached is None
    assert judge(work, *pair(case, size + 1, run, ours, theirs, 2 * least)).reached is None
    assert judge(work, *pair(case, size, run, ours, theirs, 1.001 * least)).reached is True
    assert judge(work, *pair(case, size, run, ours, theirs, 0.99 * least)).reached is False


def test_every_target_is_of_a_case_and_a_device_it_has():
    for target in targets.TARGETS:
        assert target.device in CASES[target.case].devices
        assert target.judge(Results(HERE, [])) == targets.NOT_MEASURED


def even(sizes, faster):
    return [
        one
        for size in sizes
        for one in pair("causal_flow", size, BACKWARD, flow.OURS, flow.SOFTMAX, 2.0 if size in faster else 0.5)
    ]


@pytest.mark.parametrize(
    "faster, achieved, reached",
    [
        ((256, 512, 1024), "256 tokens", True),
        ((512, 1024), "512 tokens", True),
        ((256, 1024), "1,024 tokens", False),
        ((256, 512), "none measured", False),
    ],
)
def test_break_even_is_where_it_stays_faster(faster, achieved, reached):
    found = judge("causal Flow-Attention, forward + backward, break-even", *even((256, 512, 1024), faster))
    assert found == targets.Verdict(achieved, reached)


def test_break_even_of_short_lengths_alone_is_not_judged():
    assert judge("causal Flow-Attention, forward + backward, break-even", *even((128, 512), (128, 512))).reached is None


@pytest.mark.parametrize("shorter, longer, reached", [(1.5, 1.5, True), (3.1, 2.9, False), (1.0, 2.0, False)])
def test_memory_is_small_and_linear(shorter, longer, reached):
    found = [
        timed("causal_flow", size, BACKWARD, flow.OURS, 1.0, extra=int(times * size * 100), inputs=size * 100)
        for size, times in ((512, shorter), (1024, longer))
    ]
    verdict = judge("causal Flow-Attention, forward + backward, peak memory", *found)
    assert verdict.reached is reached
    most = max((shorter, 512), (longer, 1024))
    assert verdict.achieved.startswith(f"{most[0]:.2f}x at {most[1]:,} tokens, ")


@pytest.mark.parametrize("extra, reached", [(500, True), (501, False)])
def test_half_the_memory(extra, reached):
    found = [
        timed("full_flow", 4096, BACKWARD, form, 1.0, extra=size)
        for form, size in ((flow.OURS, extra), (flow.AUTHORS, 1000))
    ]
    assert judge("the same, peak memory", *found).reached is reached


@pytest.mark.parametrize("far, reached", [(1.1, True), (1.11, False)])
def test_decoding_is_constant(far, reached):
    found = [timed("decoding", place, DECODING, "flash_lm", seconds) for place, seconds in ((128, 1.0), (16384, far))]
    results = Results(HERE, found)
    assert targets.constant_decoding("flash_lm")(results).reached is reached
    assert targets.constant_decoding("flowformer_lm")(results).reached is None


@pytest.mark.parametrize("small, large, reached", [(1.5, 2.0, True), (2.0, 1.5, False), (0.9, 2.0, False)])
def test_deit_is_faster_and_gains(small, large, reached):
    found = [
        one
        for side, ratio in ((512, small), (1024, large))
        for one in pair("deit", side, TRAINING, images.FLOW, images.SOFTMAX, ratio)
    ]
    assert judge("flowformer_deit_s", *found).reached is reached


def test_floors():
    found = [
        timed("rates", 2048, FORWARD, "matrix product", 1.0, units=1e9),
        timed("rates", 2048, FORWARD, "copy", 1.0, units=1e6),
        timed("causal_flow", 64, FORWARD, flow.OURS, 2.0),
        timed("causal_flow", 64, BACKWARD, flow.OURS, 4.0),
    ]
    forward, backward = floors(Results(HERE, found), "causal_flow")
    assert forward.arithmetic == pytest.approx(8 * 4 * 2 * 64**3 / 1e9)  # 8 heads, one chunk
    assert forward.memory == pytest.approx(4 * 8 * 64 * 64 * 4 / 1e6)
    assert forward.fraction == pytest.approx(forward.memory / 2.0)
    assert backward.arithmetic == pytest.approx(3 * forward.arithmetic)
    assert backward.memory == pytest.approx(11 / 4 * forward.memory)
    half = Results(HERE._replace(dtype="bfloat16"), found)
    assert floors(half, "causal_flow")[0].memory == pytest.approx(forward.memory / 2)
    assert floors(Results(HERE, found[1:]), "causal_flow") == []
    full = [one._replace(case="full_flow") if one.case == "causal_flow" else one for one in found]
    assert floors(Results(HERE, full), "full_flow")[0].arithmetic == pytest.approx(forward.arithmetic / 2)
    other = [one._replace(case="decoding") if one.case == "causal_flow" else one for one in found]
    assert floors(Results(HERE, other), "decoding") == []


@pytest.mark.parametrize("seconds, reached", [(0.5, True), (0.7, False)])
def test_half_the_floor_on_a_gpu(seconds, reached):
    arithmetic = 8192 * 8 * 4 * 2 * 64 * 64  # seconds at one operation per second: 2**31
    found = [
        timed("rates", 2048, FORWARD, "matrix product", 1.0, units=4 * arithmetic),
        timed("rates", 2048, FORWARD, "copy", 1.0, units=1e30),
        timed("causal_flow_cuda", 8192, FORWARD, flow.OURS, seconds),
    ]
    assert targets.half_the_floor(FORWARD)(Results(HERE, found)).reached is reached


# the machine and the command line


def test_the_machine_is_described(monkeypatch):
    here = machine.describe("python -m recipes.bench", Settings(dtype=torch.bfloat16))
    assert here.threads == torch.get_num_threads() and here.cores >= 1 and here.memory_gib > 0.5
    assert (
        here.dtype == "bfloat16"
        and here.device == "CPU"
        and f"torch {torch.__version__.split('+')[0]}" in here.versions
    )
    assert here.processor and "unknown" not in here.processor

    def no_git(*arguments):
        raise FileNotFoundError("git")

    monkeypatch.setattr(machine, "_git", no_git)
    assert machine.describe("x", Settings()).commit == "not a git checkout"


def test_unknown_names_are_refused_with_those_there_are(capsys):
    assert bench.main(["--only", "causal_flow", "casual_flow"]) == 1
    error = capsys.readouterr().err
    assert "bench: --only is given casual_flow; allowed: rates, causal_flow, full_flow" in error


def test_cases_are_listed(capsys):
    assert bench.main(["--list", "--only", "deit", "daft_conv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["deit", "daft_conv"]  # the registry's order
    assert "side of the images: 224, 512, 1,024" in lines[0]


@pytest.mark.parametrize("arguments", [["--threads", "0"], ["--dtype", "int8"], ["--device", "tpu"]])
def test_other_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert "error: argument" in capsys.readouterr().err


def test_cuda_is_refused_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--device", "cuda"]) == 1
    assert "--device is cuda, of which torch finds none" in capsys.readouterr().err


def test_cases_of_another_device_are_said_not_to_have_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["--only", "causal_flow_cuda", "flash_lm_cuda", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("no CUDA device") == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert bench.run([CASES["flash_lm_cuda"]], Settings(), len)[0].reason == "needs --device cuda"


def test_a_small_benchmark_from_end_to_end(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(CASES, "daft_conv", CASES["daft_conv"]._replace(quick_sizes=(40, 90)))
    threads = torch.get_num_threads()
    try:
        arguments = ["--quick", "--only", "daft_conv", "--threads", "1", "--out", str(tmp_path / "out")]
        assert bench.main(arguments) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    results = records.load(tmp_path / "out" / "results.json")
    assert results.machine.command == f"python -m recipes.bench {' '.join(arguments)}" and results.machine.threads == 1
    sizes = [(one.size, one.run, one.form) for one in results.records]
    assert sizes == [
        (size, run, form) for size in (40, 90) for run in (FORWARD, BACKWARD) for form in (daft.OURS, daft.DIRECT)
    ]
    assert (tmp_path / "out" / "results.txt").read_text().strip() in out
    assert (tmp_path / "out" / "daft_conv.png").stat().st_size > 5000
    markdown = (tmp_path / "out" / "results.md").read_text()
    assert markdown.index("### What to reach") < markdown.index("### DAFT-conv, causal")  # first in a file
    assert (
        "| daft_conv causal, window 64, n = 4,096, forward | direct convolution | 3x | not measured | - |" in markdown
    )


def test_a_form_that_differs_ends_with_status_1_and_without_a_time(monkeypatch, tmp_path, capsys):
    right = daft.direct_convolution.daft_conv
    monkeypatch.setattr(daft.direct_convolution, "daft_conv", lambda q, k, v, r: right(q, k, v, r.roll(1, 1)))
    monkeypatch.setitem(CASES, "daft_conv", CASES["daft_conv"]._replace(quick_sizes=(80,)))
    assert bench.main(["--quick", "--only", "daft_conv", "--out", str(tmp_path)]) == 1
    assert "bench: daft_conv, direct convolution: output differs from the reference" in capsys.readouterr().err
    results = records.load(tmp_path / "results.json")
    assert {one.form for one in results.timed()} == {daft.OURS}
    assert [one.status for one in results.records if one.form == daft.DIRECT] == [UNEQUAL]
    assert "unequal" in (tmp_path / "results.md").read_text()


def test_ctrl_c_keeps_what_there_is(monkeypatch, tmp_path, capsys):
    def measured(case, size, settings):
        if case.name == "daft_conv":
            raise KeyboardInterrupt
        return [timed(case.name, size, FORWARD, "matrix product", 1.0)]

    monkeypatch.setattr(bench, "measure", measured)
    assert bench.main(["--only", "rates", "daft_conv", "--out", str(tmp_path)]) == 1
    assert "interrupted" in capsys.readouterr().err
    assert len(records.load(tmp_path / "results.json").timed()) == 1


def test_what_is_stopped_leaves_its_numbers(monkeypatch, tmp_path):
    def measured(case, size, settings):
        if case.name == "daft_conv":
            raise SystemExit  # as a machine that goes down, no Ctrl-C
        return [timed(case.name, size, FORWARD, "matrix product", 1.0)]

    monkeypatch.setattr(bench, "measure", measured)
    with pytest.raises(SystemExit):
        bench.main(["--only", "rates", "daft_conv", "--out", str(tmp_path)])
    assert len(records.load(tmp_path / "results.json").timed()) == 1


def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    assert packages.missing("flash_pytorch") == "not installed: pip install '.[bench]'"
    assert packages.missing("fla") == "not installed: pip install flash-linear-attention"
    monkeypatch.undo()
    assert packages.missing("timm") is None
