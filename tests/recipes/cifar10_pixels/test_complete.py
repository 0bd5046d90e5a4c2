"""Completion: the upper half is kept, the lower is sampled step by step; a picture shows both."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.cifar10_pixels import complete
from recipes.cifar10_pixels.picture import Completions, draw
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.pixels import COUNTS, SHAPE, toy_images, write_pixels

ROW = SHAPE.width * SHAPE.channels


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of binarised toy images."""
    return write_pixels(tmp_path_factory.mktemp("pixels"))


@pytest.fixture(scope="module")
def checkpoints(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Short trainings with the pixel task and with fairseq's language modelling task."""
    folder = tmp_path_factory.mktemp("runs")
    command = [
        str(data),
        "--user-dir",
        USER_DIR,
        "--arch",
        "flowformer_lm",
        *SMALL,
        *("--activation-fn", "gelu", "--decoder-learned-pos"),  # as the rows of the paper's Table 4
        "--tokens-per-sample",
        "60",
        "--batch-size",
        "8",
        "--optimizer",
        "adam",
        "--lr",
        "3e-3",
        "--max-update",
        "10",
        "--cpu",
    ]
    tasks = ("pixel_modeling", "language_modeling")
    run_in_turn(
        *(("fairseq_cli.train", [*command, "--task", task, "--save-dir", str(folder / task)], "") for task in tasks)
    )
    return {task: folder / task / "checkpoint_last.pt" for task in tasks}


@pytest.fixture(scope="module")
def loaded(checkpoints: dict, data: Path):
    """The trained model and its task."""
    return complete.load(checkpoints["pixel_modeling"], data)


def test_upper_half_stays_and_lower_half_is_drawn(loaded) -> None:
    """For each image and each sample; samples differ from each other and depend on the seed only."""
    model, task = loaded
    targets = complete.read_targets(task, "test", 4)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(complete.complete(model, task, targets, samples=3))
    originals = toy_images("test", COUNTS["test"])[:4]
    completed = results[0]
    assert (
        completed.samples.shape == (4, 3, *SHAPE) and completed.samples.dtype == np.uint8 and completed.known_rows == 2
    )
    assert np.array_equal(completed.originals, originals)
    for sample in range(3):
        assert np.array_equal(completed.samples[:, sample, :2], originals[:, :2])
    lower = completed.samples[:, :, 2:].reshape(12, -1)
    assert len(np.unique(lower, axis=0)) == 12
    assert np.array_equal(results[1].samples, completed.samples) and not np.array_equal(
        results[2].samples, completed.samples
    )


def test_decoding_is_incremental(loaded) -> None:
    """The layers get one new token per step, for all images and samples at once."""
    model, task = loaded
    shapes = []
    hook = model.decoder.layers[0].register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    complete.complete(model, task, complete.read_targets(task, "test", 2), samples=3)
    hook.remove()
    assert shapes == [(1, 6, 32)] * SHAPE.length  # T x B x C


def test_samples_are_the_models(loaded) -> None:
    """At temperature near 0, each subpixel is the most likely one of the full forward."""
    model, task = loaded
    targets = complete.read_targets(task, "test", 3)
    samples = complete.complete(model, task, targets, samples=1, temperature=1e-4).samples
    tokens = torch.from_numpy(samples.reshape(3, -1).astype(np.int64)) + 4
    with torch.no_grad():
        logits = model(torch.cat([torch.full((3, 1), 2), tokens[:, :-1]], dim=1))[0]
    likeliest = logits[..., 4:].argmax(-1) + 4
    assert torch.equal(likeliest[:, 2 * ROW :], tokens[:, 2 * ROW :])


def test_command(checkpoints: dict, data: Path, tmp_path: Path, capsys) -> None:
    """The command writes one picture, the same for the same seed."""
    for name in ("a", "b"):
        arguments = ["--checkpoint", str(checkpoints["pixel_modeling"]), "--data", str(data), "--images", "2"]
        assert complete.main([*arguments, "--samples", "2", "--output", str(tmp_path / "new" / f"{name}.png")]) == 0
    assert "Ready: " in capsys.readouterr().out
    first, second = (np.asarray(Image.open(tmp_path / "new" / f"{name}.png")) for name in ("a", "b"))
    assert np.array_equal(first, second)


@pytest.mark.parametrize("channels", [1, 3])
def test_picture(tmp_path: Path, channels: int) -> None:
    """Columns are the original, the given half above grey, and the samples; rows are images."""
    originals = np.full((2, 8, 8, channels), 250, np.uint8)
    originals[1] = 10
    samples = np.repeat(originals[:, None], 2, axis=1)
    samples[:, 0, 4:], samples[:, 1, 4:] = 60, 190
    draw(Completions(originals, samples, 4), tmp_path / "picture.png")
    picture = np.asarray(Image.open(tmp_path / "picture.png").convert("L")).astype(int)
    height, width = picture.shape
    body = picture[int(0.14 * height) :]
    for row, value in enumerate((250, 10)):
        for column, below in enumerate((value, 128, 60, 190)):
            x = int((column + 0.5) * width / 4)
            upper, lower = (body[int((row + part) * len(body) / 2), x] for part in (0.3, 0.75))
            assert abs(upper - value) <= 2 and abs(lower - below) <= 2, (row, column)
    assert (picture[: int(0.1 * height)] < 128).any()  # the titles


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--checkpoint", "none.pt"], "--checkpoint is none.pt, which is no file"),
        (["--images", "8"], "--images is 8; allowed: at most 7, as test has"),
        (["--split", "dev"], "--split is dev: .*; allowed: a split of --data"),
        (["--data", "none"], "none lacks image_shape.json"),
        (["--task", "language_modeling"], "is of LanguageModelingTask; allowed: one of --task pixel_modeling"),
    ],
)
def test_bad_arguments(checkpoints: dict, data: Path, capsys, arguments, message: str) -> None:
    """Each gives an error of one line."""
    task = "language_modeling" if arguments[0] == "--task" else "pixel_modeling"
    task_arguments = [] if arguments[0] == "--task" else arguments
    assert complete.main(["--checkpoint", str(checkpoints[task]), "--data", str(data), *task_arguments]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("flag, value", [("--temperature", "0"), ("--temperature", "nan"), ("--samples", "0")])
def test_values_out_of_range(flag: str, value: str, capsys) -> None:
    """The parser's error names the allowed values."""
    with pytest.raises(SystemExit):
        complete.main(["--checkpoint", "x", "--data", "x", flag, value])
    assert "allowed: " in capsys.readouterr().err
