"""Methods other than networks: distances and features by hand, accuracy, and their command."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_plugin.data.series_folder import Split, write_folder
from recipes.shared.experiment import Data
from recipes.shared.trainings import read_points, train_all
from recipes.time_series import classify, compare, dtw, rocket
from tests.fairseq_plugin.helpers.series import CHANNELS, waves, write_waves

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waves")
    write_waves(folder)
    return folder


def literal_dtw(one: np.ndarray, other: np.ndarray) -> float:
    """The minimal sum over all paths, by the paper's recursion."""
    table = np.full((len(one) + 1, len(other) + 1), np.inf)
    table[0, 0] = 0.0
    for i in range(1, len(one) + 1):
        for j in range(1, len(other) + 1):
            least = min(table[i - 1, j], table[i, j - 1], table[i - 1, j - 1])
            table[i, j] = np.square(one[i - 1] - other[j - 1]).sum() + least
    return table[-1, -1]


def test_warped_distances_are_those_of_the_recursion(monkeypatch: pytest.MonkeyPatch) -> None:
    """For series of any lengths, also one step; independent of padding values and of the block size."""
    rng = np.random.default_rng(0)
    train_series = [rng.normal(size=(steps, 3)) for steps in (1, 7, 4, 9)]
    padded = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(x) for x in train_series], True, padding_value=-5.0)
    lengths = torch.tensor([len(x) for x in train_series])
    series = [rng.normal(size=(steps, 3)) for steps in (1, 5, 12)]
    for query in series:
        distances = dtw.warped_distances(torch.from_numpy(query), padded, lengths)
        assert distances.tolist() == pytest.approx([literal_dtw(query, train) for train in train_series], rel=1e-9)
    nearest = [int(np.argmin([literal_dtw(query, train) for train in train_series])) for query in series]
    assert dtw.nearest(train_series, series) == nearest
    monkeypatch.setattr(dtw, "AT_ONCE", 1)
    assert dtw.nearest(train_series, series) == nearest


def test_kernels_are_drawn_as_the_paper_says() -> None:
    """Lengths, channels, dilations that fit, weights of mean 0, half of them with padding; a seed gives the same."""
    kernels = rocket.draw_kernels(5, 40, 400, np.random.default_rng(3))
    assert {kernel.weight.shape[2] for kernel in kernels} == {7, 9, 11}
    assert {len(kernel.channels) for kernel in kernels} == {1, 2, 3, 4, 5}
    for kernel in kernels:
        reach = (kernel.weight.shape[2] - 1) * kernel.dilation
        assert reach < 40 and kernel.padding in (0, reach // 2)
        assert kernel.weight.mean(-1).abs().max() < 1e-6 and len(set(kernel.channels.tolist())) == len(kernel.channels)
    assert 0.4 < np.mean([kernel.padding > 0 for kernel in kernels]) < 0.6
    repeated = rocket.draw_kernels(5, 40, 400, np.random.default_rng(3))
    assert all(torch.equal(expected.weight, actual.weight) for expected, actual in zip(kernels, repeated))
    with pytest.raises(ValueError, match="6 steps; allowed for rocket: at least 7"):
        rocket.draw_kernels(5, 6, 1, np.random.default_rng(3))


def test_features_by_hand() -> None:
    """The fraction of outputs above 0 and the maximum, for padded or cut series."""
    series = [np.random.default_rng(i).normal(3.0, 2.0, size=(steps, 2)) for i, steps in enumerate((9, 14, 30))]
    batch = rocket.together(series, 14)
    assert batch.shape == (3, 2, 14) and batch[0, :, 9:].abs().max() == 0.0
    assert batch[2].T.numpy() == pytest.approx(series[2][:14], rel=1e-5)
    for kernel in rocket.draw_kernels(2, 14, 20, np.random.default_rng(1)):
        values = rocket.features(batch, [kernel])
        length, reach = kernel.weight.shape[2], (kernel.weight.shape[2] - 1) * kernel.dilation
        for i in range(3):
            x = np.pad(batch[i].numpy()[kernel.channels.numpy()], ((0, 0), (kernel.padding, kernel.padding)))
            taps = [x[:, j * kernel.dilation :][:, : x.shape[1] - reach] for j in range(length)]
            out = sum((kernel.weight[0, :, j].numpy() @ tap) for j, tap in enumerate(taps)) + kernel.bias.item()
            assert values[i] == pytest.approx([np.mean(out > 0), out.max()], abs=1e-5)


@pytest.mark.parametrize("name", classify.CLASSIFIERS)
def test_each_learns_the_waves(name: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frequencies of series of unequal lengths; some test series are cut; chance is 33 %."""
    monkeypatch.setattr(rocket, "KERNELS", 200)
    accuracy = classify.accuracy(name, data, 1)
    assert accuracy >= (60.0 if name == "hist_gradient_boosting" else 80.0)
    assert classify.accuracy(name, data, 1) == accuracy


def test_labels_are_those_of_the_data() -> None:
    """Labels may be integers."""
    series, labels = waves(12, 1)
    train = Split([steps.astype(np.float32) for steps in series], [len(label) for label in labels])
    assert set(classify.CLASSIFIERS["dtw"](train, train.series, 1)) == set(train.labels)
    assert classify.CLASSIFIERS["dtw"](train, train.series, 1) == train.labels


def test_a_comparison_fits_them_once_and_resumes(data: Path, tmp_path: Path, imported_already: None) -> None:
    """In separate processes, two seeds only for random methods; existing results are not repeated."""
    options = compare.Series(models=["dtw", "rocket"], seeds=2)
    planned = compare.EXPERIMENT.planned(options, Data(data, {}))
    assert [(run.model, run.seed) for run in planned] == [("dtw", 1), ("rocket", 1), ("rocket", 2)]
    (first,) = (run.training for run in planned if run.model == "dtw")
    ended = train_all([first], tmp_path)
    assert not ended.failed and "--model dtw" in ended.trained["dtw.1"].command
    (point,) = read_points(tmp_path / "dtw.1")
    assert point.split == "test" and point.values["accuracy"] == pytest.approx(classify.accuracy("dtw", data, 1), 0.1)
    stored = (tmp_path / "dtw.1" / "result.json").stat().st_mtime_ns
    train_all([first], tmp_path)
    assert (tmp_path / "dtw.1" / "result.json").stat().st_mtime_ns == stored


def test_what_is_missing_is_named(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Errors name a folder without data, series too short for any kernel, and missing scikit-learn."""
    assert classify.main([str(tmp_path), "--model", "dtw"]) == 1
    assert "lacks series.json; allowed" in capsys.readouterr().err
    short = [np.zeros((4, CHANNELS)), np.ones((4, CHANNELS))], ["a", "b"]
    write_folder(tmp_path / "short", {"train": short, "test": short})
    assert classify.main([str(tmp_path / "short"), "--model", "rocket"]) == 1
    assert "4 steps; allowed for rocket" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert classify.main([str(data), "--model", "hist_gradient_boosting"]) == 1
    assert r"pip install '.[time_series]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        classify.main([str(data), "--model", "xgboost"])
    assert "hist_gradient_boosting" in capsys.readouterr().err
