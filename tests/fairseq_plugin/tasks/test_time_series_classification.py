"""The task: training, evaluation and prediction of series, through fairseq's commands and from Python."""

import logging
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fairseq_plugin import TimeSeriesClassifier
from fairseq_plugin.data.series_folder import write_folder
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.series import CHANNELS, LABELS, LIMIT, TASK, training_command, waves, write_waves
from tests.fairseq_plugin.helpers.tasks import set_up


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("series")
    write_waves(folder)
    return folder


@pytest.fixture(scope="module")
def outputs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The output of every command, all in one process."""
    runs = tmp_path_factory.mktemp("runs")
    evaluation = [str(data), "--user-dir", USER_DIR, *TASK, "--valid-subset", "test", "--cpu", "--log-format", "json"]
    path = ["--path", str(runs / "whole" / "checkpoint_last.pt"), "--batch-size", "8"]
    flash = "--max-length 31 --pooling mean --flash-chunk-size 8".split()
    commands = {
        "whole": ("train", training_command(data, runs / "whole", "flowformer_time_series")),
        "flash": ("train", training_command(data, runs / "flash", "flash_time_series", *flash)),
        "validate": ("validate", [*evaluation, *path, "--required-batch-size-multiple", "1"]),
    }
    found = run_in_turn(*((f"fairseq_cli.{name}", command, "") for name, command in commands.values()))
    return {**dict(zip(commands, found)), "runs": runs}


def build_task(data: Path, *arguments: str, arch: str = "linear_time_series"):
    """The task and the configuration that a command line makes."""
    return set_up(data, *TASK, "--arch", arch, *arguments)


def test_it_learns(outputs: dict) -> None:
    """Guessing is right in 33 %. That it goes on as if it had never been stopped is in commands/test_resumption.py."""
    validated, trained = (entries(outputs[name], "test")[-1]["test_accuracy"] for name in ("validate", "whole"))
    assert validated == trained > 75.0


def test_every_epoch_has_batches_of_its_own(data: Path) -> None:
    """A permutation of all series, another one in the next epoch, the same for the same seed."""
    task, _ = build_task(data)
    task.load_dataset("train")

    def ids(epoch: int) -> list[int]:
        loader = task.get_batch_iterator(task.dataset("train"), max_sentences=8, seed=1, epoch=epoch)
        return [i for batch in loader.next_epoch_itr(shuffle=False) for i in batch["id"].tolist()]

    assert sorted(ids(1)) == list(range(48)) and ids(1) != ids(2) and ids(1) == ids(1)


def test_longer_series_are_cut_or_kept(data: Path, outputs: dict, caplog: pytest.LogCaptureFixture) -> None:
    """By default after the steps of the longest training series, which the log says; --max-length keeps them."""
    task, _ = build_task(data)
    with caplog.at_level(logging.INFO):
        task.load_dataset("test")
    cut = sum(len(one) > LIMIT for one in waves(24, 2, LIMIT + 4)[0])
    assert task.dataset("test").sizes.max() == task.max_positions() == LIMIT
    assert f"{cut} of them cut after {LIMIT} steps" in caplog.text and f"{cut} of them cut" in outputs["whole"]
    task, _ = build_task(data, "--max-length", str(LIMIT + 4))
    task.load_dataset("test")
    assert task.dataset("test").sizes.max() == LIMIT + 4 and "of them cut" not in outputs["flash"]


@pytest.mark.parametrize("run", ["whole", "flash"])
def test_prediction_from_python(outputs: dict, run: str) -> None:
    """From the checkpoint alone, without the data: labels as given, of ragged lists, arrays and nothing at all."""
    hub = TimeSeriesClassifier.from_pretrained(str(outputs["runs"] / run), "checkpoint_last.pt")
    series, labels = waves(24, 2, LIMIT + 4)
    predicted = hub.predict(series, cut=True, batch_size=7)
    right = 100.0 * np.mean(predicted == np.array(labels))
    assert right == pytest.approx(entries(outputs[run], "test")[-1]["test_accuracy"], abs=0.06)
    assert set(predicted.tolist()) <= set(LABELS) and set(hub.labels.tolist()) == set(LABELS)
    chances = hub.probabilities(series, cut=True)
    assert chances.shape == (24, 3) and np.allclose(chances.sum(1), 1.0, atol=1e-5)
    assert (hub.labels[chances.argmax(1)] == predicted).all()
    array = np.stack([one[:6] for one in series]).astype(np.float32)
    assert (hub.predict(array) == hub.predict(list(array))).all() and hub.predict([]).shape == (0,)


def test_prediction_says_what_it_cannot_read(outputs: dict) -> None:
    hub = TimeSeriesClassifier.from_pretrained(str(outputs["runs"] / "whole"), "checkpoint_last.pt")
    good = np.full((5, CHANNELS), 50.0)
    for bad, named in (
        (np.full((5, CHANNELS), np.nan), r"series 1 is nan at \(0, 0\)"),
        (np.full((5, CHANNELS), np.inf), "series 1 is inf"),
        (np.full((5, CHANNELS), 1e39), r"series 1.* is 1e\+39 .*float32"),
        (np.full((5, CHANNELS), 1e38), "scores are not finite"),
        (np.zeros((5, CHANNELS + 1)), rf"series 1 has shape \(5, 4\); allowed: .*{CHANNELS}"),
        (np.zeros((0, CHANNELS)), "series 1 has shape"),
        (np.full((LIMIT + 1, CHANNELS), 50.0), f"series 1 has {LIMIT + 1} steps; allowed: at most {LIMIT}"),
    ):
        with pytest.raises(ValueError, match=named):
            hub.predict([good, bad])
    with pytest.raises(ValueError, match=rf"series has shape \(5, {CHANNELS}\); allowed"):
        hub.predict(good)
    assert len(hub.predict([np.full((5, CHANNELS), 1e6)])) == 1
    with pytest.raises(ValueError, match="float16"):
        hub.half().predict([np.full((5, CHANNELS), 1e6)])
    hub.float()
    with pytest.raises(ValueError, match="batch_size is 0"):
        hub.predict([good], batch_size=0)


def test_other_data_is_mapped_or_refused(outputs: dict, tmp_path: Path) -> None:
    """A checkpoint is evaluated with its own statistics and classes, whatever folder is read."""
    hub = TimeSeriesClassifier.from_pretrained(str(outputs["runs"] / "whole"), "checkpoint_last.pt")
    series, labels = waves(6, 3)
    two = [i for i, label in enumerate(labels) if label != "Fast"]
    write_folder(tmp_path / "fewer", {"train": ([series[i] for i in two], [labels[i] for i in two])})
    hub.task.cfg.data = str(tmp_path / "fewer")
    hub.task.load_dataset("train")
    dataset = hub.task.dataset("train")
    assert [hub.labels[i] for i in dataset.classes.tolist()] == [labels[i] for i in two]
    assert torch.allclose(dataset[0]["source"], hub.prepare([series[two[0]]])[0])
    write_folder(tmp_path / "more", {"train": (series, ["loud", *labels[1:]])})
    write_folder(tmp_path / "wide", {"train": ([np.zeros((4, 5))], ["slow"])})
    for folder, named in (("more", "label 'loud'"), ("wide", f"5 channels; allowed: {CHANNELS}")):
        hub.task.cfg.data = str(tmp_path / folder)
        with pytest.raises(ValueError, match=named):
            hub.task.load_dataset("train")


def test_the_name_of_the_head_is_the_criterions(data: Path) -> None:
    """Other options that meet are in test_every_task.py."""
    task, config = build_task(data, "--classification-head-name", "other")
    criterion = task.build_criterion(config.criterion)
    assert criterion.classification_head_name == task.cfg.classification_head_name == "other"


def test_labels_of_another_order_are_a_warning(data: Path, outputs: dict, tmp_path: Path) -> None:
    """A training that begins with the weights of another, on a folder whose labels are others, is told of it."""
    series, labels = waves(48, 1)
    write_folder(tmp_path, {"train": (series, [label.upper() for label in labels])})
    state, sizes = torch.load(outputs["runs"] / "whole" / "checkpoint_last.pt"), training_command(data, tmp_path, "x")
    sizes = sizes[sizes.index("--encoder-layers") : sizes.index("--valid-subset")]

    def model(folder: Path):
        task, config = build_task(folder, *sizes, arch="flowformer_time_series")
        return task.build_model(config.model)

    same, other = model(data), model(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(state["model"])
    there, here = (re.escape(repr(sorted(found))) for found in (LABELS, {label.upper() for label in labels}))
    with pytest.warns(UserWarning, match=f"labels={there}.*labels={here}"):
        other.load_state_dict(state["model"])
