"""results.json, tables, pictures, floors and the verdicts on targets, from invented records."""

import json
import re

import pytest
from PIL import Image

from recipes.bench import targets
from recipes.bench.cases import CASES, language_models
from recipes.bench.cases.operations import AUTHORS, FLOW, SOFTMAX
from recipes.bench.harness import picture, records, report
from recipes.bench.harness.floors import floors
from recipes.bench.harness.records import NOT_RUN, TIMED, Machine, Record, Results
from recipes.bench.harness.work import BACKWARD, DECODING, FORWARD, TRAINING
from recipes.bench.targets import NO, NOT_MEASURED, YES, Target
from recipes.shared.commands import ROOT
from recipes.shared.tables import as_text

MACHINE = Machine(
    "python -m recipes.bench", "2026-11-21", "abc1234", "a cpu", 2, 2, 24.0, 0.1, "3.11", "torch 2", "CPU", "float32"
)


def timed(case, size, run, form, *seconds, units=100.0, extra=None, inputs=0):
    return Record(case, size, run, form, TIMED, "", seconds, units, extra, inputs)


@pytest.fixture
def results():
    return Results(
        MACHINE,
        [
            timed("causal_flow", 256, BACKWARD, FLOW, 0.006, extra=1_500_000, inputs=1_572_864),
            timed("causal_flow", 256, BACKWARD, SOFTMAX, 0.009, extra=500_000, inputs=1_572_864),
            timed("causal_flow", 512, BACKWARD, FLOW, 0.010, 0.012, 0.011, extra=3_000_000, inputs=3_145_728),
            timed("causal_flow", 512, BACKWARD, SOFTMAX, 0.020, 0.024, 0.022, extra=1_000_000, inputs=3_145_728),
            timed("causal_flow", 1024, BACKWARD, FLOW, 0.020, 0.022, 0.021, extra=6_000_000, inputs=6_291_456),
            timed("causal_flow", 1024, BACKWARD, SOFTMAX, 0.080, 0.088, 0.084, extra=2_000_000, inputs=6_291_456),
            Record("causal_flow", 1024, "", AUTHORS, NOT_RUN, "it needs 3.0 GiB; allowed here: 1.0"),
            timed("decoding", 128, DECODING, "flash_lm", 0.002, units=1.0),
        ],
    )


def test_results_survive_json(results, tmp_path):
    records.save(results, tmp_path / "results.json")
    assert records.load(tmp_path / "results.json") == results


def test_the_format_of_results_json_stays():
    path = ROOT / "recipes" / "bench" / "results" / "results.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) == {"machine", "complete", "records"} and set(content["machine"]) == set(Machine._fields)
    newer = {"load", "attempts", "noisy"}  # a file of an earlier version has none of them, and still loads
    for record in content["records"]:
        assert set(record) | newer == {*Record._fields, "noisy"} and not 0 < len(newer & set(record)) < 3
    assert len(records.load(path).records) == len(content["records"])


@pytest.mark.parametrize("text", ["no json", "{}", '{"machine": {}, "records": []}', "[]"])
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ValueError, match="results.json"):
        records.load(tmp_path / "results.json")


def test_tables(results):
    plain = as_text(report.tables(results, CASES, targets.verdicts(results)), report.run_of(results))
    cells = [re.split(r" {2,}", line.strip()) for line in plain.splitlines()]
    assert ["512", BACKWARD, FLOW, "11", "10.5 to 11.5", "9,091", "-", "2.9", "3.0", "0.95"] in cells
    assert ["512", BACKWARD, SOFTMAX, "22", "21 to 23", "4,545", "2", "1.0", "3.0", "0.32"] in cells
    assert ["causal_flow", "1,024", AUTHORS, NOT_RUN, "it needs 3.0 GiB; allowed here: 1.0"] in cells
    assert ["yes"] == [row[-1] for row in cells if row[-2:-1] == ["1.5 times"]]
    assert "a cpu, 2 cores, 2 threads, 24 GiB" in plain and "abc1234" in plain


def test_pictures_are_drawn_of_cases_with_several_sizes(results, tmp_path):
    (path,) = picture.draw(results, CASES, tmp_path)
    assert path == tmp_path / "causal_flow.png"
    with Image.open(path) as image:
        assert image.width > 500 and image.height > 200
        assert len(image.convert("RGB").getcolors(image.width * image.height)) > 20


# Targets


def pair(size, ratio, run=BACKWARD):
    """Flow-Attention and a peer that takes ``ratio`` times as long."""
    return [
        timed("causal_flow", size, run, FLOW, 1.0, 1.2, 1.1),
        timed("causal_flow", size, run, SOFTMAX, ratio, 1.2 * ratio, 1.1 * ratio),
    ]


def judged(figure, bound, *found, size=512, peer=SOFTMAX, peer_size=None, case="causal_flow", run=BACKWARD):
    target = Target(case, run, size, FLOW, peer, figure, bound, peer_size)
    return targets.judge(Results(MACHINE, list(found)), target)


def test_every_target_has_a_case_a_size_and_candidates_of_it():
    known = {"cpu": set(), "cuda": set()}
    for target in targets.TARGETS:
        case = CASES[target.case]
        known[targets.device_of(target)].add(target.case)
        near = (language_models.NEAR,) if target.case == "decoding" else ()
        assert target.size in (*near, *case.sizes) and targets.device_of(target) in case.devices
        assert targets.judge(Results(MACHINE, []), target).reached == NOT_MEASURED
    assert known["cpu"] and known["cuda"]


def test_speed_and_time():
    for ratio, reached in ((3.01, YES), (2.99, NO)):
        assert judged("speed", 3, *pair(512, ratio)).reached == reached
        assert judged("time", 1 / 3, *pair(512, ratio)).reached == reached
    assert judged("speed", 3, *pair(1024, 9.0)).reached == NOT_MEASURED
    near, far = (timed("causal_flow", size, BACKWARD, FLOW, seconds) for size, seconds in ((128, 1.0), (512, 1.2)))
    assert judged("time", 1.1, near, far, peer=FLOW, peer_size=128).reached == NO
    assert judged("time", 1.3, near, far, peer=FLOW, peer_size=128).achieved == "1.2 times"


def test_time_onwards_is_the_longest_from_a_size_on():
    found = [*pair(256, 0.1), *pair(512, 0.5), *pair(1024, 0.4)]
    assert judged("time onwards", 2.6, *found).achieved == "2.5 times"
    assert [judged("time onwards", bound, *found).reached for bound in (2.6, 2.4)] == [YES, NO]
    assert judged("time onwards", 2.6, *found, size=1024).reached == YES
    assert judged("time onwards", 9, *found[:2]).reached == NOT_MEASURED


@pytest.mark.parametrize("small, large, reached", [(1.5, 2.0, YES), (2.0, 1.5, NO)])
def test_gain(small, large, reached):
    assert judged("gain", 1, *pair(512, small), *pair(1024, large), size=1024, peer_size=512).reached == reached


@pytest.mark.parametrize(
    "faster, achieved, reached",
    [
        ((256, 512, 1024), "from 256 on", YES),
        ((512, 1024), "from 512 on", YES),
        ((256, 1024), "from 1,024 on", NO),
        ((256, 512), "from inf on", NO),
    ],
)
def test_break_even_is_where_it_stays_faster(faster, achieved, reached):
    found = [one for size in (256, 512, 1024) for one in pair(size, 2.0 if size in faster else 0.5)]
    verdict = judged("break-even", 512, *found)
    assert (verdict.achieved, verdict.reached) == (achieved, reached)
    assert judged("break-even", 512, *found[:-2]).reached == NOT_MEASURED, "the length twice as long is missing"


def test_memory():
    small = timed("causal_flow", 512, BACKWARD, FLOW, 1.0, extra=310, inputs=100)
    large = timed("causal_flow", 1024, BACKWARD, FLOW, 1.0, extra=600, inputs=200)
    peer = timed("causal_flow", 1024, BACKWARD, SOFTMAX, 1.0, extra=1000, inputs=200)
    assert judged("memory", 0.6, large, peer, size=1024).reached == YES
    assert judged("memory", 0.59, large, peer, size=1024).reached == NO
    assert judged("memory", 2.1, small, large, size=1024, peer=FLOW, peer_size=512).achieved == "1.94 times"
    assert judged("memory of inputs", 3, small, large, size=1024).achieved == "3.1 times"
    assert judged("memory of inputs", 3, small, size=1024).reached == NOT_MEASURED


def test_floors():
    rates = [
        timed("rates", 2048, FORWARD, "matrix product", 1.0, units=1e9),
        timed("rates", 2048, FORWARD, "copy", 1.0, units=1e6),
    ]

    def of(case, machine=MACHINE, rates=rates):
        times = [timed(case, 64, FORWARD, FLOW, 2.0), timed(case, 64, BACKWARD, FLOW, 4.0)]
        peer = timed(case, 64, FORWARD, SOFTMAX, 2.0)
        return floors(Results(machine, [*rates, *times, peer]), CASES[case])

    forward, backward = of("causal_flow")
    assert forward.arithmetic == pytest.approx(8 * 4 * 2 * 64**3 / 1e9)  # 8 heads, one chunk
    assert forward.memory == pytest.approx(4 * 8 * 64 * 64 * 4 / 1e6)
    assert forward.fraction == pytest.approx(forward.memory / 2.0)
    assert backward.arithmetic == pytest.approx(3 * forward.arithmetic)
    assert backward.memory == pytest.approx(11 / 4 * forward.memory)
    assert of("causal_flow", MACHINE._replace(dtype="bfloat16"))[0].memory == pytest.approx(forward.memory / 2)
    assert of("full_flow")[0].arithmetic == pytest.approx(forward.arithmetic / 2)
    assert of("causal_flow", rates=rates[:1]) == of("decoding") == []
    step = timed("flash_lm_512", 64, TRAINING, "flash_lm", 2.0)
    (least,) = floors(Results(MACHINE, [*rates, step]), CASES["flash_lm_512"])
    assert least.form == "flash_lm" and least.fraction == max(least.arithmetic, least.memory) / 2.0
    verdict = judged("floor", 0.5, *rates, timed("causal_flow", 64, FORWARD, FLOW, 1.0), size=64, run=FORWARD)
    assert verdict.reached == (YES if forward.memory >= 0.5 else NO)
