"""The picture of the first screen: where lines cross, and what it needs."""

import pytest

from recipes.bench import summary
from recipes.bench.harness.records import TIMED, Record, Results
from recipes.bench.harness.work import BACKWARD, TRAINING
from recipes.shared.working_folder import working_folder

ATTENTION, MODEL = summary.PANELS


def results_of(machine, ours, peer, panel=ATTENTION):
    """Results whose candidates take ``ours`` and ``peer`` seconds, as {length: seconds}."""

    def record(name, size, seconds):
        return Record(panel.case, size, panel.run, name, TIMED, "", (seconds,) * 5, float(size))

    records = [record(panel.ours, *one) for one in ours.items()] + [record(panel.peer, *one) for one in peer.items()]
    return Results(machine, records)


@pytest.mark.parametrize(
    "peer, length",
    [
        ({256: 0.5, 1024: 2.0}, 512),  # half as fast, then twice: the middle of a logarithmic axis
        ({256: 2.0, 1024: 2.0}, 256),  # faster at all lengths
        ({256: 2.0, 1024: 0.9}, None),  # slower at the longest
        ({256: 2.0, 512: 0.5, 2048: 2.0}, 1024),  # faster, slower and faster again: the last time counts
    ],
)
def test_the_length_from_which_on_ours_is_faster(machine, peer, length):
    ours = dict.fromkeys(peer, 1.0)
    assert summary.crossing(results_of(machine, ours, peer), ATTENTION) == length


def test_the_picture_needs_two_lengths_of_each_candidate(machine, tmp_path):
    times = {256: 1.0, 512: 2.0}
    attention = results_of(machine, times, times)
    with working_folder(tmp_path / "out", "recipes.bench"):
        path = tmp_path / "out" / summary.NAME
        assert not summary.draw(attention, path) and not path.exists()
        both = attention._replace(records=attention.records + results_of(machine, times, times, MODEL).records)
        assert summary.draw(both, path) and path.stat().st_size > 0


def test_panels_are_of_both_passes():
    assert [panel.run for panel in summary.PANELS] == [BACKWARD, TRAINING]
