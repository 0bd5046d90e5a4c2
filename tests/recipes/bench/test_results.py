"""results.json, tables, pictures, floors and verdicts on targets, from synthetic records."""

import json
import re

import pytest

from recipes.bench import summary, targets
from recipes.bench.cases import CASES, images, language_models
from recipes.bench.cases.operations import AUTHORS, FLOW, SOFTMAX
from recipes.bench.harness import page, picture, records, report
from recipes.bench.harness.floors import COPY, PRODUCT, RATES, floors
from recipes.bench.harness.records import NOT_RUN, TIMED, Machine, Record, Results
from recipes.bench.harness.work import BACKWARD, DECODING, FORWARD, TRAINING
from recipes.bench.targets import FLOOR, NO, NOISY, NOT_MEASURED, YES, Target
from recipes.shared.commands import ROOT
from recipes.shared.tables import as_text
from recipes.shared.working_folder import working_folder

MACHINE = Machine(
    "python -m recipes.bench", "2026-11-21", "abc1234", "a cpu", 2, 2, 24.0, 0.1, "3.11", "torch 2", "CPU", "float32"
)
#: Times of five rounds with a median of 1: all equal, and with quartiles 1/2 apart.
STEADY, HALF = (1.0,) * 5, (0.6, 0.75, 1.0, 1.25, 1.4)


def timed(case, size, run, form, median, rounds=STEADY, units=100.0, extra=None, inputs=0, **more):
    seconds = tuple(median * seconds_of_round for seconds_of_round in rounds)
    return Record(case, size, run, form, TIMED, "", seconds, units, extra, inputs, **more)


def pair(size, ratio=2.0, ours=STEADY, theirs=STEADY, run=BACKWARD):
    """Flow-Attention and a peer that takes ``ratio`` times as long."""
    first = timed("causal_flow", size, run, FLOW, 1.0, ours, extra=300 * size, inputs=100 * size)
    return [first, timed("causal_flow", size, run, SOFTMAX, ratio, theirs, extra=100 * size, inputs=100 * size)]


def rates(rounds=STEADY):
    """A machine on which Flow-Attention is compute-bound: 1e9 operations and 1e12 bytes per second."""
    return [timed(RATES, 2048, FORWARD, form, 1.0, rounds, n) for form, n in ((PRODUCT, 1e9), (COPY, 1e12))]


@pytest.fixture
def results():
    timings = [*pair(256, 1.5, ours=HALF), *pair(512), *pair(1024, 4.0)]
    timings[0] = timings[0]._replace(load=0.62, attempts=5)
    return Results(MACHINE, [*timings, Record("causal_flow", 1024, "", AUTHORS, NOT_RUN, "it needs 3.0 GiB")])


def test_the_format_of_results_json_stays(results, tmp_path):
    """Results without load and attempts, as stored by an earlier version, can still be read."""
    records.save(results, tmp_path / "results.json")
    assert records.load(tmp_path / "results.json") == results
    content = json.loads((tmp_path / "results.json").read_text())
    assert [record["noisy"] for record in content["records"]] == [True, *[False] * 6]
    path = ROOT / "recipes" / "bench" / "results" / "results.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert set(stored) == {"machine", "complete", "records"} and set(stored["machine"]) == set(Machine._fields)
    assert len(records.load(path).records) == len(stored["records"])


def test_tables(results):
    text = as_text(report.tables(results, CASES, targets.verdicts(results)), report.run_of(results))
    cells = [[cell for cell in re.split(r" {2,}", line) if cell] for line in text.splitlines()]
    assert ["256", BACKWARD, FLOW, "1,000", "750 to 1,250 ~", "100", "-", "0.1", "0.0", "3.00", "62 %", "5"] in cells
    assert ["512", BACKWARD, SOFTMAX, "2,000", "2,000 to 2,000", "50", "2", "0.0", "0.0", "1.00", "-", "-"] in cells
    assert ["causal_flow", "1,024", AUTHORS, NOT_RUN, "it needs 3.0 GiB"] in cells
    assert ["6", "1", "1", "62 %"] in cells, "six times, one of them measured again and noisy"
    assert "a cpu, 2 cores, 2 threads, 24 GiB" in text and "abc1234" in text


def rows_of(text, title):
    """The cells of the rows below a heading that begins with ``title``."""
    (block,) = [block for block in text.split("### ") if block.startswith(title)]
    lines = block.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


def test_the_page_has_a_column_for_each_size(results):
    """Every number of a measurement is in its cell; what was not measured is left out."""
    both_runs = [*results.records, *pair(512, run=FORWARD), Record("causal_flow", 2048, "", AUTHORS, NOT_RUN, "slow")]
    both_runs += [both_runs[-1]._replace(size=4096), *pair(2048), *pair(4096), *pair(8192), *pair(16384)]
    text = page.text(results._replace(records=[*rates(), *both_runs]), CASES, [])
    header, _, *rows = rows_of(text, CASES["causal_flow"].title)
    assert header == ["run", "candidate", "256", "512", "1,024", "2,048", "4,096", "8,192", "16,384"]
    cells = {(row[0], row[1]): dict(zip(header, row)) for row in rows}
    noisy = "**1,000**<br>750 to 1,250 ~<br>100/s<br>0.1 MiB = 3.00 x 0.0<br>load 62 %<br>5 attempts"
    assert cells[BACKWARD, FLOW]["256"] == noisy
    quiet = "**2,000**<br>2,000 to 2,000<br>50/s<br>2 times<br>0.0 MiB = 1.00 x 0.0"
    assert cells[BACKWARD, SOFTMAX]["512"] == quiet
    assert cells[BACKWARD, f"floor of {FLOW}"]["1,024"] == "805 arithmetic<br>0.0231 memory<br>0.81 of the time"
    assert cells[FORWARD, SOFTMAX]["256"] == "-"
    assert ["causal_flow", "2,048; 4,096", AUTHORS, NOT_RUN, "slow"] in rows_of(text, "Not timed")
    assert "18 times, 1 measured again, 1 noisy (~), 62 % highest load before" in text


def test_the_page_has_a_column_for_each_number_of_a_single_size():
    times = [timed("beam_decoding", 128, DECODING, form, seconds) for form, seconds in (("a", 1.0), ("b", 3.0))]
    header, _, *rows = rows_of(page.text(Results(MACHINE, times), CASES, []), CASES["beam_decoding"].title)
    assert header == ["candidate", "ms", "quartiles", "tokens/s", "times the first"]
    assert rows == [["a", "1,000", "1,000 to 1,000", "100", "-"], ["b", "3,000", "3,000 to 3,000", "33.3", "3"]]


def test_candidates_with_the_same_target_share_a_row_of_the_page():
    verdicts = [("case", name, "forward", "peer", "at most 1", "0.9 times", answer) for name, answer in ("ab", "cd")]
    (row,) = rows_of(page.text(Results(MACHINE, []), CASES, verdicts), report.REACH)[2:]
    assert row == ["case", "forward", "peer", "at most 1", "a: 0.9 times, b<br>c: 0.9 times, d"]


def test_cases_of_a_family_share_a_table():
    """A row for the first candidate of each case, with the ratio of the other one."""
    names = ("attention_linear", "attention_flow")
    pairs = [[timed(name, 256, FORWARD, name, 1.0), timed(name, 256, FORWARD, "softmax", 4.0)] for name in names]
    made = report.tables(Results(MACHINE, [record for pair in pairs for record in pair]), CASES, [])
    (table,) = [table for table in made if table.title == CASES[names[0]].family]
    ratio = next(i for i, header in enumerate(table.header) if header.endswith(" softmax"))
    assert [(row[2], row[ratio]) for row in table.rows] == [(name, "4") for name in names]
    assert not [table for table in made if table.title in (CASES[name].title for name in names)]


def test_floors_of_noisy_times_are_marked(results):
    with_rates = results._replace(records=[*rates(), *results.records])
    (table,) = [table for table in report.tables(with_rates, CASES, []) if table.title.endswith("the floor")]
    assert [row[5].endswith(" ~") for row in table.rows if row[2] == FLOW] == [True, False, False]


def test_pictures(results, monkeypatch, tmp_path):
    """Pictures of cases with several sizes; noisy times have hollow markers. The summary needs both its cases."""
    titles, white = [], []

    def look(figure, path, **options):
        titles.extend(axes.get_title() for axes in figure.axes)
        white.extend(
            list(line.get_xdata()) for axes in figure.axes for line in axes.lines if line.get_color() == "white"
        )
        path.write_text("")

    monkeypatch.setattr(picture, "save", look)
    assert picture.draw(results, CASES, tmp_path) == [tmp_path / "causal_flow.png"] and white == [[256]]
    assert ["noisy" in title for title in titles] == [True, False], "times, and memory"
    with working_folder(tmp_path / "out", "recipes.bench"):
        path = tmp_path / "out" / summary.NAME
        assert not summary.draw(results, path)
        model = summary.PANELS[1]
        timings = [timed(model.case, n, model.run, x, 1.0) for n in (256, 512) for x in (model.ours, model.peer)]
        assert summary.draw(results._replace(records=results.records + timings), path) and path.stat().st_size > 0


@pytest.mark.parametrize(
    "peer, length",
    [
        ({256: 0.5, 1024: 2.0}, 512),  # half as fast, then twice: the middle of a logarithmic axis
        ({256: 2.0, 1024: 2.0}, 256),  # faster at all lengths
        ({256: 2.0, 1024: 0.9}, None),  # slower at the longest
        ({256: 2.0, 512: 0.5, 2048: 2.0}, 1024),  # faster, slower and faster again: the last crossing counts
    ],
)
def test_the_length_from_which_on_ours_is_faster(peer, length):
    panel_results = Results(MACHINE, [timing for size, ratio in peer.items() for timing in pair(size, ratio)])
    assert summary.crossing(panel_results, summary.PANELS[0]) == length


def verdict(figure, bound, found, size=512, peer=SOFTMAX, peer_size=None, run=BACKWARD):
    target = Target("causal_flow", run, size, FLOW, peer, figure, bound, peer_size)
    return targets.judge(Results(MACHINE, list(found)), target).reached


def test_every_target_has_a_case_a_size_and_candidates_of_it():
    for target in targets.TARGETS:
        case = CASES[target.case]
        extra = (language_models.NEAR,) if target.case == "decoding" else ()
        assert target.size in (*extra, *case.sizes) and targets.device_of(target) in case.devices
        assert targets.judge(Results(MACHINE, []), target).reached == NOT_MEASURED
    assert {targets.device_of(target) for target in targets.TARGETS} == {"cpu", "cuda"}


SMALL, LARGE = pair(512, 1.5), pair(1024, 3.0)
NOISY_SMALL = pair(512, 1.5, theirs=HALF)
#: A metric, its bound, the records, the verdict, and other arguments of the target.
FIGURES = [
    ("speed", 1.5, SMALL, YES, {}),
    ("speed", 1.6, SMALL, NO, {}),
    ("speed", 1, LARGE, NOT_MEASURED, {}),
    ("speed", 1, NOISY_SMALL, NOISY, {}),
    ("speed", 1, pair(512, 0.5, ours=HALF), NOISY, {}),
    ("speed", 1, [*SMALL, *pair(1024, theirs=HALF), *rates(HALF)], YES, {}),  # noise elsewhere
    ("time", 0.67, SMALL, YES, {}),
    ("time", 0.66, SMALL, NO, {}),
    ("time", 1, LARGE, YES, {"size": 1024, "peer": FLOW, "peer_size": 1024}),
    ("time onwards", 0.67, SMALL + LARGE, YES, {}),
    ("time onwards", 0.5, SMALL + LARGE, NO, {}),
    ("gain", 2, SMALL + LARGE, YES, {"size": 1024, "peer_size": 512}),
    ("gain", 2.1, SMALL + LARGE, NO, {"size": 1024, "peer_size": 512}),
    ("gain", 2, NOISY_SMALL + LARGE, NOISY, {"size": 1024, "peer_size": 512}),
    ("break-even", 512, SMALL + LARGE, YES, {}),
    ("break-even", 512, pair(512, 0.5) + LARGE, NO, {}),
    ("break-even", 512, SMALL + pair(1024, 0.5), NO, {}),
    ("break-even", 512, SMALL + pair(1024, ours=HALF), NOISY, {}),
    ("break-even", 512, pair(256, ours=HALF) + SMALL + LARGE, YES, {}),  # noise at a shorter length
    ("break-even", 512, SMALL, NOT_MEASURED, {}),  # twice the length is missing
    ("memory", 3, pair(512, ours=HALF), YES, {}),  # for any times
    ("memory", 2.9, SMALL, NO, {}),
    ("memory of inputs", 3, SMALL, YES, {}),
    ("floor", 0.01, [*rates(), *SMALL], YES, {}),
    ("floor", 0.9, [*rates(), *SMALL], NO, {}),
    ("floor", 0.01, [*rates(HALF), *SMALL], NOISY, {}),
]


@pytest.mark.parametrize("figure, bound, found, answer, more", FIGURES)
def test_figures(figure, bound, found, answer, more):
    assert verdict(figure, bound, found, **more) == answer


def test_floors():
    """At 64 tokens the products of 8 heads take 8 * 4 * 2 * 64³ operations, 0.0168 s at 1e9 per second."""
    flow_record, authors_record = (
        timed("causal_flow", 64, FORWARD, form, s) for form, s in ((FLOW, 0.0336), (AUTHORS, 0.336))
    )
    (forward,) = floors(Results(MACHINE, [*rates(), flow_record]), CASES["causal_flow"])
    assert forward.arithmetic == pytest.approx(8 * 4 * 2 * 64**3 / 1e9)
    assert forward.memory == pytest.approx(4 * 8 * 64 * 64 * 4 / 1e12)
    assert floors(Results(MACHINE, [flow_record]), CASES["causal_flow"]) == []
    speed = Target("causal_flow", FORWARD, 64, FLOW, AUTHORS, "speed", FLOOR)
    bounded = targets.judge(Results(MACHINE, [*rates(), flow_record, authors_record]), speed)
    assert bounded[-3:] == ("the bound: 20 times", "10 times", "0.50 of the bound")
    bounded = targets.judge(Results(MACHINE, [*rates(), flow_record, authors_record]), speed._replace(figure="time"))
    assert bounded[-3:] == ("the bound: 0.0499 times", "0.1 times", "0.50 of the bound")
    assert targets.judge(Results(MACHINE, [flow_record, authors_record]), speed).reached == NOT_MEASURED
    step = timed("flash_lm_512", 64, TRAINING, "flash_lm", 2.0)
    (least,) = floors(Results(MACHINE, [*rates(), step]), CASES["flash_lm_512"])
    assert least.fraction == max(least.arithmetic, least.memory) / 2.0


def test_another_candidate_as_the_bound():
    times = ((images.HIERARCHICAL, 2.0), (images.AUTHORS, 2.4), (images.NO_ATTENTION, 1.6))
    (entry,) = [entry for entry in targets.TARGETS if entry.case == "hier"]
    verdict_results = Results(MACHINE, [timed("hier", 224, TRAINING, form, seconds) for form, seconds in times])
    assert targets.judge(verdict_results, entry)[-3:] == ("the bound: 1.5 times", "1.2 times", "0.80 of the bound")
