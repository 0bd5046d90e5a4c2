"""The pixel task: what a sample is, what training does to it, what is refused, and every command on it."""

import math
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel

from fairseq_plugin.data.pixels import SHAPE_FILE, ImageShape, pixel_dictionary, to_images, to_tokens
from fairseq_plugin.generation.pixel_sequence_generator import build_pixel_generator
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.logs import entries, losses
from tests.fairseq_plugin.helpers.pixels import (
    COUNTS,
    SHAPE,
    batch,
    images_of,
    logits_bits,
    pixel_task,
    toy_images,
    write_pixels,
)

EVERY = list(range(COUNTS["train"]))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of binarised toy images."""
    return write_pixels(tmp_path_factory.mktemp("pixels"))


class Seen:
    """A criterion that keeps the batch it is given, and the little of a model and optimizer a step touches."""

    def __call__(self, model, sample):
        self.sample = sample
        return torch.zeros(()), 1, {}

    def train(self, *_):
        return self

    eval = set_num_updates = backward = train


# What a sample is


def test_dictionary_and_tokens() -> None:
    """Token 4 + b is value b, in raster order with channels innermost."""
    dictionary = pixel_dictionary()
    assert len(dictionary) == 260
    assert [dictionary[4 + value] for value in range(256)] == [str(value) for value in range(256)]
    image = torch.arange(SHAPE.length).view(1, *SHAPE)
    assert to_tokens(image)[0].tolist() == [
        4 + int(image[0, y, x, c]) for y in range(4) for x in range(5) for c in range(3)
    ]
    assert torch.equal(to_images(to_tokens(image), SHAPE), image)


@pytest.mark.parametrize("tokens", [torch.full((2, 59), 4), torch.full((1, 60), 3), torch.full((1, 60), 260)])
def test_what_is_no_image(tokens: torch.Tensor) -> None:
    """A wrong length, a special symbol, a symbol too many."""
    with pytest.raises(ValueError, match=r"tokens (have shape|are).*; allowed: "):
        to_images(tokens, SHAPE)


@pytest.mark.parametrize("split", COUNTS)
def test_source_and_target(data: Path, split: str) -> None:
    """Each image is one sample: all of it is the target, the source is ``</s>`` and all but the last.

    Validation on any split, the training split too, sees the images as they are.
    """
    task, seen = pixel_task(data), Seen()
    sample = batch(task, split, list(range(COUNTS[split])))
    source, target = sample["net_input"]["src_tokens"], sample["target"]
    assert np.array_equal(images_of(target), toy_images(split, COUNTS[split]))
    assert torch.equal(source[:, 1:], target[:, :-1]) and (source[:, 0] == 2).all()
    assert sample["ntokens"] == COUNTS[split] * SHAPE.length == target.numel()
    task.begin_epoch(2, None)
    task.valid_step(sample, seen, seen)
    assert np.array_equal(images_of(seen.sample["target"]), toy_images(split, COUNTS[split]))


# What training does


def train_targets(task, indices=EVERY, epoch: int = 1) -> np.ndarray:
    """Images that the criterion sees in a training step; the source must be made of the same.

    The batch, which fairseq keeps for ranks that run out of data, and numpy's random state stay as they are.
    """
    seen, sample = Seen(), batch(task, "train", indices)
    before = sample["target"].clone(), np.random.get_state()[1].copy()
    task.begin_epoch(epoch, None)
    task.train_step(sample, seen, seen, seen, 0)
    assert torch.equal(sample["target"], before[0]) and np.array_equal(np.random.get_state()[1], before[1])
    source, target = seen.sample["net_input"]["src_tokens"], seen.sample["target"]
    assert torch.equal(source[:, 1:], target[:, :-1]) and (source[:, 0] == 2).all()
    return images_of(target)


def test_flips(data: Path) -> None:
    """Without shifts, an image is itself or its mirror image, about as often."""
    originals = toy_images("train", COUNTS["train"])
    found = train_targets(pixel_task(data, "--pixel-max-shift", "0"))
    flipped = [np.array_equal(image, original[:, ::-1]) for image, original in zip(found, originals)]
    assert all(
        np.array_equal(image, original[:, ::-1] if flip else original)
        for image, original, flip in zip(found, originals, flipped)
    )
    assert 10 < sum(flipped) < 33


@pytest.mark.parametrize("largest", [1, 10])
def test_shifts(data: Path, largest: int) -> None:
    """Without flips, one integer is added to a whole image and clipped; all of -N..N occur and no other."""
    originals = toy_images("train", COUNTS["train"]).astype(int)
    task = pixel_task(data, "--pixel-no-flip", "--pixel-max-shift", str(largest))
    drawn = set()
    for epoch in range(1, 11):
        for image, original in zip(train_targets(task, epoch=epoch), originals):
            shifts = range(-largest - 2, largest + 3)
            fits = [s for s in shifts if np.array_equal(image, (original + s).clip(0, 255))]
            assert len(fits) == 1
            drawn.update(fits)
    assert drawn == set(range(-largest, largest + 1))


def test_augmentation_is_decided_by_seed_epoch_and_index(data: Path) -> None:
    """The same in any batch and any order; another in another epoch and with another seed.

    By default it is the paper's, flips and shifts by 10; without both nothing is done.
    """
    default = train_targets(pixel_task(data))
    assert np.array_equal(default, train_targets(pixel_task(data, "--pixel-max-shift", "10")))
    originals = toy_images("train", COUNTS["train"])
    flips = train_targets(pixel_task(data, "--pixel-max-shift", "0")).astype(int)
    for image, flipped in zip(default, flips):
        assert any(np.array_equal(image, (flipped + shift).clip(0, 255)) for shift in range(-10, 11))
    assert sum(np.array_equal(*pair) for pair in zip(default, flips)) < 10
    off = train_targets(pixel_task(data, "--pixel-no-flip", "--pixel-max-shift", "0"))
    assert np.array_equal(off, originals) and not np.array_equal(off, default)
    task = pixel_task(data, "--seed", "5")
    whole = train_targets(task, epoch=3)
    np.random.seed(99)
    assert np.array_equal(train_targets(pixel_task(data, "--seed", "5"), [7, 30, 2], epoch=3), whole[[7, 30, 2]])
    for other in (train_targets(task, epoch=4), train_targets(pixel_task(data, "--seed", "6"), epoch=3)):
        assert sum(np.array_equal(*pair) for pair in zip(other, whole)) < 15


def test_every_epoch_has_batches_of_its_own(data: Path) -> None:
    task = pixel_task(data)
    task.load_dataset("train")
    first, second = (
        task.get_batch_iterator(task.dataset("train"), max_sentences=2, seed=1, epoch=epoch) for epoch in (1, 2)
    )
    assert first is not second


# What is refused


@pytest.mark.parametrize(
    "content, message",
    [
        ("4 5 3", "cannot be read"),
        ("[4, 5, 3]", r"holds \[4, 5, 3\]; allowed: an object with height, width, channels"),
        ('{"height": 4, "width": 5, "channels": 3, "alpha": 1}', "and nothing else"),
        ('{"height": 4, "width": true, "channels": 3}', "integers of at least 1"),
    ],
)
def test_shapes_that_are_refused(tmp_path: Path, content: str, message: str) -> None:
    """A broken or impossible shape; a missing one and options are in test_every_task.py."""
    (write_pixels(tmp_path) / SHAPE_FILE).write_text(content)
    with pytest.raises(ValueError, match=message):
        pixel_task(tmp_path)


def test_shape_of_other_images(tmp_path: Path) -> None:
    """A shape that is not that of the sequences beside it."""
    ImageShape(5, 5, 3).save(write_pixels(tmp_path))
    task = pixel_task(tmp_path, "--tokens-per-sample", "75")
    with pytest.raises(ValueError, match="split valid .* 60 .*; allowed: 75"):
        task.load_dataset("valid")


def test_other_dictionary(tmp_path: Path) -> None:
    """Symbols in another order would be other values."""
    symbols = (write_pixels(tmp_path) / "dict.txt").read_text().splitlines()
    (tmp_path / "dict.txt").write_text("\n".join(reversed(symbols)) + "\n")
    with pytest.raises(ValueError, match="dict.txt .*; allowed: 0 to 255"):
        pixel_task(tmp_path)


def test_folders_of_different_images(data: Path, tmp_path: Path) -> None:
    """fairseq takes several folders; the images in all must have one shape."""
    assert pixel_task(f"{data}:{data}").image_shape == SHAPE
    ImageShape(5, 4, 3).save(write_pixels(tmp_path))
    with pytest.raises(ValueError, match="allowed: images of one shape"):
        pixel_task(f"{data}:{tmp_path}")


def test_model_with_too_few_positions(data: Path) -> None:
    """fairseq-eval-lm would leave out every image and report a loss of 0."""
    task = pixel_task(data)
    task.load_dataset("test")
    with pytest.raises(ValueError, match="the model has 59 positions; allowed: at least 60"):
        task.eval_lm_dataloader(task.dataset("test"), max_positions=59)
    assert sum(b["ntokens"] for b in task.eval_lm_dataloader(task.dataset("test"), max_positions=60)) == 420


# Generation


class Stubborn(FairseqIncrementalDecoder):
    """A decoder that prefers what an image never holds, thinks values above 1 impossible, and has 60 positions."""

    def __init__(self) -> None:
        super().__init__(pixel_dictionary())
        self.lengths = []

    def forward(self, tokens, encoder_out=None, incremental_state=None):
        assert tokens.size(1) <= SHAPE.length and incremental_state is not None
        self.lengths.append(tokens.size(1))
        logits = torch.full((len(tokens), 1, 260), -1000.0)
        logits[..., :4], logits[..., 4:6] = 50.0, 0.0
        return logits, None

    def max_positions(self) -> int:
        return SHAPE.length


@pytest.mark.parametrize("given", [0, 30, 59])
def test_generated_images_are_whole_and_hold_nothing_else(data: Path, given: int) -> None:
    """60 values and then ``</s>``, whatever the model prefers and however improbable what is given is."""
    torch.manual_seed(1)
    task, model = pixel_task(data), FairseqLanguageModel(Stubborn())
    generator = task.build_generator([model], Namespace(sampling=True, beam=4, temperature=1.0, max_len_b=7))
    prefix = torch.full((2, given), 4 + 200) if given else None
    start = torch.full((2, 1), 2)
    with torch.no_grad():
        found = task.inference_step(generator, [model], {"net_input": {"src_tokens": start}}, prefix_tokens=prefix)
    tokens = torch.stack([sample["tokens"] for image in found for sample in image])
    assert tokens.shape == (8, 61) and (tokens[:, -1] == 2).all()
    assert (tokens[:, :given] == 204).all() and set(tokens[:, given:-1].unique().tolist()) <= {4, 5}
    assert model.decoder.lengths == list(range(1, 61))
    if given <= 30:
        assert len(tokens.unique(dim=0)) == 8


def test_generator_keeps_the_models_probabilities() -> None:
    """Temperature and log-probabilities are fairseq's own where no special symbol is probable."""
    logits = torch.linspace(-3, 3, 260).view(1, 1, -1)
    logits[..., :4] = -1e4
    model = FairseqLanguageModel(Stubborn())
    model.decoder.forward = lambda *_, **__: (logits.clone(), None)
    generator = build_pixel_generator([model], pixel_dictionary(), SHAPE.length)
    scores, _ = generator.model.forward_decoder(torch.full((1, 1), 2), None, [{}], 0.5)
    assert torch.allclose(scores[0, 4:], (logits[0, 0] / 0.5).log_softmax(-1)[4:], atol=1e-6)
    assert (scores[0, :4] == -math.inf).all()


# Commands


@pytest.fixture(scope="module")
def outputs(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The output of every command on a training of 12 updates in 2 epochs."""
    folder = tmp_path_factory.mktemp("pixel_runs")
    train = [str(data), "--user-dir", USER_DIR, "--task", "pixel_modeling", "--arch", "flowformer_lm", *SMALL]
    train += "--batch-size 8 --optimizer adam --lr 3e-3 --max-update 12 --required-batch-size-multiple 1".split()
    train += f"--tokens-per-sample {SHAPE.length} --log-format json --log-interval 1 --cpu --seed 1".split()
    train += ["--save-dir", str(folder / "whole")]
    path = ["--path", str(folder / "whole" / "checkpoint_last.pt"), "--cpu"]
    base = [str(data), "--user-dir", USER_DIR, *path, "--batch-size", "4"]
    task = ["--task", "pixel_modeling", "--tokens-per-sample", str(SHAPE.length)]
    sampling = ["--sampling", "--beam", "2", "--nbest", "2", "--prefix-size", "30"]
    validate = "--valid-subset test --required-batch-size-multiple 1 --log-format json".split()
    commands = {
        "whole": ("fairseq_cli.train", train, ""),
        "eval": ("fairseq_cli.eval_lm", [*base, *task], ""),
        "eval as text": ("fairseq_cli.eval_lm", [*base, *task[2:]], ""),
        "validate": ("fairseq_cli.validate", [*base, *task[:2], *validate], ""),
        "generate": ("fairseq_cli.generate", [*base, *task, *sampling, "--required-batch-size-multiple", "1"], ""),
    }
    return {**dict(zip(commands, run_in_turn(*commands.values()))), "folder": folder}


def test_evaluation_prints_bits_per_dimension(outputs: dict, data: Path) -> None:
    """fairseq-eval-lm, under either task, and fairseq-validate print the mean over all subpixels of the test images.

    That the training goes on as if it had never been stopped is in commands/test_resumption.py.
    """
    trained = losses(outputs["whole"])
    assert len(trained) == 12 and trained[-1] < trained[0] - 0.5
    checkpoint = str(outputs["folder"] / "whole" / "checkpoint_last.pt")
    (model,), _, _ = load_model_ensemble_and_task([checkpoint], {"data": str(data)})
    target = torch.from_numpy(toy_images("test", COUNTS["test"]).reshape(COUNTS["test"], -1).astype(np.int64)) + 4
    source = torch.cat([torch.full((COUNTS["test"], 1), 2), target[:, :-1]], dim=1)
    expected = logits_bits(model, source, target)
    for name in ("eval", "eval as text"):
        assert "Evaluated 420 tokens" in outputs[name]
        assert float(re.search(r"Loss \(base 2\): ([\d.]+)", outputs[name]).group(1)) == pytest.approx(
            expected, abs=1e-4
        )
    (validated,) = entries(outputs["validate"], "test")
    assert validated["test_loss"] == pytest.approx(expected, abs=1e-3)


def test_generate_continues_images(outputs: dict) -> None:
    """fairseq-generate keeps what is given and adds values until the image is whole."""
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", outputs["generate"], re.MULTILINE))
    samples = re.findall(r"^H-(\d+)\t\S+\t(.*)$", outputs["generate"], re.MULTILINE)
    assert len(samples) == 2 * COUNTS["test"] == 2 * len(targets)
    for index, sample in samples:
        values = sample.split()
        assert len(values) == SHAPE.length and all(0 <= int(value) <= 255 for value in values)
        assert values[:30] == targets[index].split()[:30]
