"""Time series: data sets, methods that are no networks, a quick comparison, and pictures of its models."""

import json

import numpy as np
import pytest
from fairseq import options as fairseq_options
from PIL import Image

from fairseq_plugin.data.series_folder import Split, read_split
from recipes import runs
from recipes.time_series import classify, compare, data, pictures

HEADER = "@problemName Mine\n@timestamps false\n@univariate false\n@classLabel true slow fast\n@data\n"
#: Steps that lack a value, and series of different lengths.
SERIES = "1,2,3,4,5,6,7,8,9:4,3,2,1,4,3,2,1,4:slow\n1,2,?,4,5,6,7:4,4,4,4,4,4,4:fast\n"


@pytest.fixture
def own(tmp_path):
    """The files of an own data set."""
    for split in ("TRAIN", "TEST"):
        (tmp_path / f"Mine_{split}.ts").write_text(HEADER + 4 * SERIES)
    return tmp_path / "Mine_TRAIN.ts"


def test_own_files_are_read_and_missing_values_interpolated(own, tmp_path):
    words = ["Mine", "--file", str(own), "--out"]
    data.main([*words, str(tmp_path / "bin")])
    split = read_split(tmp_path / "bin", "test")
    assert split.labels == ["slow", "fast"] * 4 and split.series[1][:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(SystemExit, match="other files"):
        data.main([*words, str(tmp_path)])


@pytest.mark.parametrize("method", classify.METHODS)
def test_methods_tell_rising_from_falling_series(method):
    """Costs the compilation of Rocket by numba."""
    generator, series, labels = np.random.default_rng(0), [], []
    for i in range(80):
        steps = np.linspace(-1, 1, 9 + i % 3)[:, None] * (1 if i % 2 else -1)
        series.append(np.tile(steps, 2) + 0.05 * generator.standard_normal((len(steps), 2)))
        labels.append("rising" if i % 2 else "falling")
    train, test = Split(series[:70], labels[:70]), Split([x[:9] for x in series[70:]], labels[70:])
    assert classify.METHODS[method](train, test, 1) == labels[70:]


def test_warping_is_the_least_sum_over_all_paths():
    a, b = np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [2.0]])
    assert classify.warped(a, b) == 1.0


def test_a_quick_comparison_and_pictures_of_its_models(imported_already, own, tmp_path):
    words = f"--quick --dataset Mine --file {own} --seeds 1 --out {tmp_path / 'new'}".split()
    compare.main([*words, "--models", "flowformer", "softmax"])
    compare.main([*words, "--models", "flowformer", "softmax", "dtw"])
    rows = json.loads((tmp_path / "new" / "results.json").read_text())
    assert [row["model"] for row in rows] == ["flowformer", "softmax", "dtw"] and rows[2]["last"] == 100.0
    assert list(rows[0]["accuracies"]) == ["2.0"]
    assert Image.open(tmp_path / "new" / "accuracy.png").width > 1000
    files = [str(tmp_path / f"new/runs/{name}.1/checkpoints/checkpoint_last.pt") for name in ("flowformer", "softmax")]
    for name, checkpoints, series in (("one", files[:1], ["1"]), ("side by side", files, ["0", "1"])):
        words = ["--data", str(tmp_path / "new" / "data"), "--output", str(tmp_path / f"{name}.png")]
        pictures.main([*words, "--checkpoint", *checkpoints, "--series", *series])
        assert Image.open(tmp_path / f"{name}.png").width > 400
    with pytest.raises(SystemExit, match="was begun with"):
        compare.main(["--out", str(tmp_path / "new"), "--quick"])


def test_fairseq_takes_the_command_of_every_model(own, tmp_path, monkeypatch):
    """Chunks and windows are made for the longest series."""
    planned = []
    monkeypatch.setattr(runs, "train_all", lambda plan, *_: planned.extend(plan) or exit())
    with pytest.raises(SystemExit):
        compare.main(f"--dataset Mine --file {own} --out {tmp_path / 'new'}".split())
    assert len(planned) >= 60 and {one.seed for one in planned} == {1, 2, 3}
    for one in planned:
        words = list(map(str, one.command[2:]))
        parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
        assert (parsed.arch, parsed.seed) == (f"{one.model}_time_series", one.seed)
        assert one.model != "flash" or parsed.flash_chunk_size == 16
