"""Times that other work disturbed: taken again, marked, and no ground for a verdict. All times here are invented."""

import json

import psutil
import pytest

from common.json_files import read
from recipes.bench import targets
from recipes.bench.cases import CASES, images
from recipes.bench.cases.language_models import TRAINED
from recipes.bench.cases.operations import AUTHORS, FLOW, SOFTMAX
from recipes.bench.harness import measure as measuring
from recipes.bench.harness import noise, picture, records, report
from recipes.bench.harness.floors import COPY, PRODUCT, RATES
from recipes.bench.harness.records import NOT_RUN, TIMED, Machine, Record, Results
from recipes.bench.harness.work import BACKWARD, FORWARD, TRAINING, Candidate, Case, Comparison, Settings
from recipes.bench.targets import FLOOR, NO, NOISY, NOT_MEASURED, YES, Target
from recipes.shared.tables import as_markdown, as_text

MACHINE = Machine("command", "2026-11-23", "abc1234", "a cpu", 2, 2, 24.0, 0.1, "3.11", "torch 2", "CPU", "float32")
#: Times of five rounds with a median of 1, whose quartiles are so far apart.
STEADY, FIFTH, HALF = (1.0,) * 5, (0.8, 0.9, 1.0, 1.1, 1.2), (0.6, 0.75, 1.0, 1.25, 1.4)


def timed(case, size, run, form, median, rounds=STEADY, units=100.0, load=0.05, attempts=1):
    seconds = tuple(median * one for one in rounds)
    return Record(case, size, run, form, TIMED, "", seconds, units, 1000, 1000, load, attempts)


# Measuring again


def attempts_of(monkeypatch, most, *outcomes):
    """``quietest`` of attempts that return ``outcomes``, with loads of 0.0, 0.1, ..."""
    monkeypatch.setattr(noise, "MOST_ATTEMPTS", most)
    loads = iter(i / 10 for i in range(len(outcomes)))
    monkeypatch.setattr(noise, "other_load", lambda: next(loads))
    waiting = iter(outcomes)
    return noise.quietest(lambda: [list(times) for times in next(waiting)])


def test_spread_is_a_part_of_the_median():
    assert noise.spread(STEADY) == 0.0 and noise.spread([3.0]) == 0.0
    assert noise.spread(FIFTH) == pytest.approx(0.2)
    assert noise.spread([10 * one for one in HALF]) == pytest.approx(0.5)


def test_a_quiet_measurement_is_made_once(monkeypatch):
    found = attempts_of(monkeypatch, 5, [STEADY, STEADY])
    assert found == ([list(STEADY)] * 2, 0.0, 1)
    assert attempts_of(monkeypatch, 5, []) == ([], 0.0, 1)


def test_a_disturbed_measurement_is_repeated_until_no_candidate_is_noisy(monkeypatch):
    found = attempts_of(monkeypatch, 5, [STEADY, HALF], [HALF, STEADY], [STEADY, STEADY])
    assert found == ([list(STEADY)] * 2, 0.2, 3)


def test_the_quietest_of_all_attempts_is_kept_with_its_load(monkeypatch):
    found = attempts_of(monkeypatch, 4, [STEADY, HALF], [FIFTH, FIFTH], [HALF, STEADY], [HALF, HALF])
    assert found == ([list(FIFTH)] * 2, 0.1, 4)


@pytest.mark.parametrize("everything, own, load", [(75.0, 50.0, 0.5), (50.0, 100.0, 0.0), (10.0, 60.0, 0.0)])
def test_the_load_is_what_other_programs_use_of_all_cores(monkeypatch, everything, own, load):
    rests = []

    class Process:
        """This process: its threads use ``own`` percent of one core."""

        def cpu_percent(self):
            return own

    def cpu_percent(interval):
        rests.append(interval)
        return everything

    monkeypatch.setattr(noise, "REST", 0.25)
    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    assert noise.other_load() == load and rests == [0.25]


def test_nothing_is_repeated_for_longer_than_the_limit(monkeypatch):
    monkeypatch.setattr(noise, "MOST_SECONDS", 0.0)
    assert attempts_of(monkeypatch, 5, [HALF], [STEADY]).attempts == 1


def test_records_tell_the_load_and_the_attempts(monkeypatch):
    monkeypatch.setattr(noise, "MOST_ATTEMPTS", 3)
    monkeypatch.setattr(noise, "other_load", lambda: 0.4)
    outcomes = iter([[HALF], [FIFTH], [STEADY]])
    monkeypatch.setattr(measuring, "interleave", lambda functions, synchronize: next(outcomes))
    candidate = Candidate("ours", 4, 8.0, {FORWARD: list}, lambda: [Comparison("output", 0.0, 1.0)])
    case = Case("invented", "", "tokens", "tokens", (4,), (4,), lambda *_: [candidate], memory=False)
    (record,) = measuring.measure(case, 4, Settings())
    assert (record.load, record.attempts, record.seconds, record.noisy) == (0.4, 3, STEADY, False)


# Marks


@pytest.fixture
def results():
    return Results(
        MACHINE,
        [
            timed("causal_flow", 256, FORWARD, FLOW, 0.002, HALF, load=0.62, attempts=5),
            timed("causal_flow", 256, FORWARD, SOFTMAX, 0.001, load=0.62, attempts=5),
            timed("causal_flow", 512, FORWARD, FLOW, 0.003),
            timed("causal_flow", 512, FORWARD, SOFTMAX, 0.004, load=None),
            Record("causal_flow", 512, "", AUTHORS, NOT_RUN, "not today"),
        ],
    )


def test_tables_mark_noisy_times_and_say_the_rules(results):
    for written in (as_text, as_markdown):
        text = written(report.tables(results, CASES, targets.verdicts(results)), report.run_of(results))
        rows = [line.replace("|", " ").split() for line in text.splitlines()]
        (noisy,) = [row for row in rows if row[:2] == ["256", FORWARD] and FLOW in row]
        assert "1.5 to 2.5 ~" in " ".join(noisy) and noisy[-3:] == ["62", "%", "5"]
        (quiet,) = [row for row in rows if row[:2] == ["512", FORWARD] and FLOW in row]
        assert "~" not in quiet and quiet[-3:] == ["5", "%", "-"]
        assert ["4", "2", "1", "62", "%"] in rows, "four times, two of them measured again, one noisy"
        assert f"up to {noise.MOST_ATTEMPTS} times" in text and f"{noise.ALLOWED_SPREAD:g} of the median" in text


def test_floors_of_noisy_times_are_marked(results):
    found = Results(MACHINE, [*rates(), *results.records])
    (table,) = [one for one in report.tables(found, CASES, []) if one.title.endswith("the floor")]
    assert [(row[0], row[5]) for row in table.rows] == [("256", "2 ~"), ("512", "3")]


def test_the_file_marks_noisy_times_and_keeps_load_and_attempts(results, tmp_path):
    path = tmp_path / "results.json"
    records.save(results, path)
    content = json.loads(path.read_text())
    assert [one["noisy"] for one in content["records"]] == [True, False, False, False, False]
    assert records.load(path) == results


def test_a_file_from_before_these_notes_is_read(results, tmp_path):
    path = tmp_path / "results.json"
    records.save(results, path)
    content = read(path, "results")
    for one in content["records"]:
        del one["load"], one["attempts"], one["noisy"]
    path.write_text(json.dumps(content))
    loaded = records.load(path).records
    assert {(one.load, one.attempts) for one in loaded} == {(None, 1)}
    assert [one.noisy for one in loaded] == [True, False, False, False, False]


def test_pictures_show_which_times_are_noisy(results, monkeypatch, tmp_path):
    titles, white = [], []

    def keep(figure, path, **options):
        for axes in figure.axes:
            titles.append(axes.get_title())
            white.extend(list(line.get_xdata()) for line in axes.lines if line.get_color() == "white")

    monkeypatch.setattr(picture, "save", keep)
    picture.draw(results, CASES, tmp_path)
    assert white == [[256]] and titles[0] == "forward, ms; hollow: noisy" and "noisy" not in titles[1]
    white.clear()
    picture.draw(results._replace(records=[*results.records[2:], *pair(256)]), CASES, tmp_path)
    assert white == []


# Verdicts


def pair(size, ours=STEADY, theirs=STEADY, ratio=2.0, run=FORWARD):
    """Flow-Attention and a peer that takes ``ratio`` times as long."""
    first = timed("causal_flow", size, run, FLOW, 0.01, ours)
    return [first, timed("causal_flow", size, run, SOFTMAX, 0.01 * ratio, theirs)]


def rates(rounds=STEADY):
    """A machine on which Flow-Attention's products decide: 1e9 operations and 1e12 bytes per second."""
    rows = ((PRODUCT, 1e9), (COPY, 1e12))
    return [timed(RATES, 2048, FORWARD, form, 1.0, rounds, units=units) for form, units in rows]


def verdict(figure, bound, *found, size=512, peer=SOFTMAX, peer_size=None):
    target = Target("causal_flow", FORWARD, size, FLOW, peer, figure, bound, peer_size)
    return targets.judge(Results(MACHINE, list(found)), target).reached


def test_noisy_times_are_not_judged_on_either_side():
    for ratio, answer in ((2.0, YES), (0.5, NO)):
        for figure in ("speed", "time"):
            assert verdict(figure, 1, *pair(512, ratio=ratio)) == answer
            assert verdict(figure, 1, *pair(512, ours=FIFTH, ratio=ratio)) == NOISY
            assert verdict(figure, 1, *pair(512, theirs=FIFTH, ratio=ratio)) == NOISY
    assert verdict("speed", 1, *pair(1024, FIFTH, FIFTH)) == NOT_MEASURED


def test_noise_elsewhere_does_not_matter():
    elsewhere = [*pair(256, HALF, HALF), *pair(1024, HALF, HALF), *pair(512, HALF, HALF, run=BACKWARD), *rates(HALF)]
    third = timed("causal_flow", 512, FORWARD, AUTHORS, 1.0, HALF)
    assert verdict("speed", 1, *pair(512), *elsewhere, third) == YES


def test_figures_of_several_sizes_need_all_of_them_quiet():
    small, large = pair(256), pair(512, ratio=3.0)
    assert verdict("gain", 1, *small, *large, peer_size=256) == YES
    assert verdict("gain", 1, *pair(256, theirs=HALF), *large, peer_size=256) == NOISY
    assert verdict("break-even", 256, *small, *large, size=256) == YES
    assert verdict("break-even", 256, *small, *pair(512, theirs=HALF), size=256) == NOISY
    assert verdict("break-even", 256, *pair(128, HALF, HALF), *small, *large, size=256) == YES
    assert verdict("floor", 0.01, *rates(), *small, size=256) == YES
    assert verdict("floor", 0.01, *rates(HALF), *small, size=256) == NOISY


def test_memory_is_judged_of_noisy_times_too():
    assert verdict("memory", 1, *pair(512, HALF, HALF)) == YES
    assert verdict("memory of inputs", 1, *pair(512, HALF, HALF)) == YES
    assert verdict("memory", 0.9, *pair(512, HALF, HALF)) == NO


def test_a_floor_as_the_bound():
    """At 64 tokens the products of 8 heads take 8 * 4 * 2 * 64³ operations, 0.0168 s at 1e9 per second."""
    ours, theirs = (timed("causal_flow", 64, FORWARD, form, s) for form, s in ((FLOW, 0.0336), (AUTHORS, 0.336)))
    speed = Target("causal_flow", FORWARD, 64, FLOW, AUTHORS, "speed", FLOOR)
    assert targets.judge(Results(MACHINE, [*rates(), ours, theirs]), speed)[2:] == (
        "the bound: 20 times",
        "10 times",
        "0.50 of the bound",
    )
    time = targets.judge(Results(MACHINE, [*rates(), ours, theirs]), speed._replace(figure="time"))
    assert time[2:] == ("the bound: 0.0499 times", "0.1 times", "0.50 of the bound")
    assert targets.judge(Results(MACHINE, [*rates(HALF), ours, theirs]), speed).reached == NOISY
    unknown = targets.judge(Results(MACHINE, [ours, theirs]), speed)
    assert unknown[2:] == ("the bound: not measured", "10 times", NOT_MEASURED)
    assert targets.judge(Results(MACHINE, rates()), speed)[2:] == ("the bound: not measured", "not measured", "-")


def test_another_candidate_as_the_bound():
    def judged(rounds):
        times = ((images.HIERARCHICAL, 2.0, STEADY), (images.AUTHORS, 2.4, STEADY), (images.NO_ATTENTION, 1.6, rounds))
        found = [timed("hier", 224, TRAINING, form, seconds, scatter) for form, seconds, scatter in times]
        (target,) = [one for one in targets.TARGETS if one.case == "hier"]
        return targets.judge(Results(MACHINE, found), target)

    assert judged(STEADY)[2:] == ("the bound: 1.5 times", "1.2 times", "0.80 of the bound")
    assert judged(FIFTH).reached == NOISY


def test_what_cannot_be_asked_for_is_bounded():
    bounded = {(one.case, one.candidate, one.bound) for one in targets.TARGETS if isinstance(one.bound, str)}
    models = {(f"flash_lm_{width}", TRAINED[0], FLOOR) for width in (256, 512)}
    hierarchical = ("hier", images.HIERARCHICAL, images.NO_ATTENTION)
    assert bounded == {("causal_flow", FLOW, FLOOR), hierarchical, *models}
