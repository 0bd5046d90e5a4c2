"""CIFAR-10 and other images as subpixels, and their completion: the upper half is kept, the lower one sampled."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import indexed_dataset
from PIL import Image

from fairseq_plugin.data.pixels import ImageShape, to_images
from recipes.cifar10_pixels import complete, data
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.pixels import COUNTS, SHAPE, toy_images, write_pixels

ROW = SHAPE.width * SHAPE.channels


@pytest.fixture(scope="module")
def pixels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of binarised toy images."""
    return write_pixels(tmp_path_factory.mktemp("pixels"))


@pytest.fixture(scope="module")
def checkpoints(pixels: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Short trainings with the pixel task and with fairseq's language modelling task."""
    folder = tmp_path_factory.mktemp("runs")
    command = [
        str(pixels),
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


def images_of(data_bin: Path, split: str) -> np.ndarray:
    """The images (N, H, W, C) of a split as fairseq's loader reads them."""
    dataset = indexed_dataset.make_dataset(str(data_bin / split), "mmap")
    tokens = torch.stack([dataset[index] for index in range(len(dataset))])
    return to_images(tokens, ImageShape.load(data_bin)).numpy()


def test_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Subpixels are in the order of torchvision's (N, H, W, C); the last training images are held out."""
    images = {part: np.random.default_rng(part).integers(0, 256, (n, 32, 32, 3)) for part, n in ((1, 1003), (0, 4))}
    asked = []

    def cifar10(root: Path, train: bool, download: bool) -> Namespace:
        asked.append((root, download))
        return Namespace(data=images[train].astype(np.uint8))

    monkeypatch.setattr(data, "CIFAR10", cifar10)
    data.main(["--out", str(tmp_path / "out"), "--root", str(tmp_path)])
    expected = {"train": images[1][:3], "valid": images[1][3:], "test": images[0]}
    assert all(np.array_equal(images_of(tmp_path / "out" / "data-bin", name), x) for name, x in expected.items())
    assert asked == [(tmp_path, True)] * 2


@pytest.mark.parametrize("grey", [False, True])
def test_a_folder_of_images(grey: bool, tmp_path: Path, capsys) -> None:
    """Every image is in one split, resized and cut in the middle; it is written once."""
    for i in range(40):
        image = np.zeros((20, 44, 3), np.uint8)
        image[:, :22, 0], image[:, 22:, 2] = 250, 6 * i
        path = tmp_path / "images" / f"class{i % 3}" / f"{i}.{['png', 'bmp', 'PNG'][i % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    command = ["--images", str(tmp_path / "images"), "--size", "10", "--out", str(tmp_path / "out")]
    data.main([*command, *["--grey"] * grey])
    splits = [images_of(tmp_path / "out" / "data-bin", split) for split in ("train", "valid", "test")]
    assert [x.shape for x in splits] == [(n, 10, 10, 1 if grey else 3) for n in (36, 2, 2)]
    if not grey:
        assert sorted(np.concatenate(splits)[:, 5, 9, 2].tolist()) == [6 * i for i in range(40)]
    with pytest.raises(SystemExit):
        data.main(command)
    assert "which has a data-bin" in capsys.readouterr().err


def test_upper_half_stays_and_lower_half_is_drawn(checkpoints: dict, pixels: Path) -> None:
    """Samples differ, depend on the seed only, and near temperature 0 are the likeliest of the full forward."""
    model, task = complete.load(checkpoints["pixel_modeling"], pixels)
    task.load_dataset("test")
    targets = torch.stack([task.dataset("test")[i]["target"] for i in range(4)])
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(complete.complete(model, task, targets, samples=3).numpy())
    assert results[0].shape == (4, 3, *SHAPE)
    assert np.array_equal(results[0][:, :, :2], np.repeat(toy_images("test", COUNTS["test"])[:4, None, :2], 3, 1))
    assert len(np.unique(results[0][:, :, 2:].reshape(12, -1), axis=0)) == 12
    assert np.array_equal(results[1], results[0]) and not np.array_equal(results[2], results[0])
    tokens = complete.complete(model, task, targets, samples=1, temperature=1e-4).reshape(4, -1) + 4
    with torch.no_grad():
        logits = model(torch.cat([torch.full((4, 1), 2), tokens[:, :-1]], dim=1))[0]
    assert torch.equal((logits[..., 4:].argmax(-1) + 4)[:, 2 * ROW :], tokens[:, 2 * ROW :])


def test_the_command_draws_originals_halves_and_samples(
    checkpoints: dict, pixels: Path, tmp_path: Path, capsys
) -> None:
    command = ["--checkpoint", str(checkpoints["pixel_modeling"]), "--data", str(pixels), "--images", "2"]
    for name in ("a", "b"):
        complete.main([*command, "--samples", "2", "--output", str(tmp_path / "new" / f"{name}.png")])
    first, second = (np.asarray(Image.open(tmp_path / "new" / f"{name}.png")) for name in ("a", "b"))
    assert np.array_equal(first, second) and len(np.unique(first.reshape(-1, first.shape[-1]), axis=0)) > 50
    for wrong, named in (([], "which exists"), (["--images", "8", "--output", str(tmp_path / "c.png")], "at most 7")):
        with pytest.raises(SystemExit):
            complete.main([*command, "--output", str(tmp_path / "new" / "a.png"), *wrong])
        assert named in capsys.readouterr().err
    with pytest.raises(SystemExit, match="LanguageModelingTask; allowed: one of --task pixel_modeling"):
        complete.load(checkpoints["language_modeling"], pixels)
