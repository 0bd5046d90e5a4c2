"""The pixel task: a sample is an image, training mirrors and shifts it, and generation gives whole images.

Its commands are in test_trainings.py, its options in test_every_task.py.
"""

import math
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel

from fairseq_plugin.data.pixels import ImageShape, pixel_dictionary, to_images, to_tokens
from fairseq_plugin.generation.pixel_sequence_generator import build_pixel_generator
from tests.fairseq_plugin.helpers.pixels import COUNTS, SHAPE, batch, images_of, pixel_task, toy_images, write_pixels

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


def test_an_image_is_its_values_in_raster_order(data: Path) -> None:
    """Channels innermost, ``</s>`` in front of the source; validation on any split sees images as they are."""
    assert [pixel_dictionary()[4 + value] for value in range(256)] == [str(value) for value in range(256)]
    image = torch.arange(SHAPE.length).view(1, *SHAPE)
    raster = [4 + int(image[0, y, x, c]) for y in range(4) for x in range(5) for c in range(3)]
    assert to_tokens(image)[0].tolist() == raster and torch.equal(to_images(to_tokens(image), SHAPE), image)
    task, seen = pixel_task(data), Seen()
    for split, count in COUNTS.items():
        task.begin_epoch(2, None)
        task.valid_step(batch(task, split, list(range(count))), seen, seen)
        source, target = seen.sample["net_input"]["src_tokens"], seen.sample["target"]
        assert np.array_equal(images_of(target), toy_images(split, count))
        assert torch.equal(source[:, 1:], target[:, :-1]) and (source[:, 0] == 2).all()


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
    return images_of(target).astype(int)


@pytest.mark.parametrize("largest", [0, 1, 10])
@pytest.mark.parametrize("flips", [True, False], ids=["flips", "no flips"])
def test_images_are_mirrored_and_shifted(flips: bool, largest: int, data: Path) -> None:
    """About every second one is mirrored; one integer of -N to N is added to a whole image and clipped; all occur."""
    originals = toy_images("train", COUNTS["train"]).astype(int)
    task = pixel_task(data, "--pixel-max-shift", str(largest), *([] if flips else ["--pixel-no-flip"]))
    shifts, mirrored = set(), 0
    for epoch in range(1, 11 if largest else 3):
        for image, original in zip(train_targets(task, epoch=epoch), originals):
            ways = [
                (side, shift)
                for side, one in enumerate((original, original[:, ::-1]))
                for shift in range(-largest - 2, largest + 3)
                if np.array_equal(image, (one + shift).clip(0, 255))
            ]
            ((side, shift),) = ways
            shifts.add(shift)
            mirrored += side
    assert shifts == set(range(-largest, largest + 1))
    share = mirrored / (COUNTS["train"] * (10 if largest else 2))
    assert 0.3 < share < 0.7 if flips else share == 0


def test_augmentation_is_decided_by_seed_epoch_and_image(data: Path) -> None:
    """The same in any batch, any order; by default it is the paper's, flips and shifts by 10."""
    task = pixel_task(data, "--seed", "5")
    whole = train_targets(task, epoch=3)
    assert np.array_equal(whole, train_targets(pixel_task(data, "--seed", "5", "--pixel-max-shift", "10"), epoch=3))
    np.random.seed(99)
    assert np.array_equal(train_targets(pixel_task(data, "--seed", "5"), [7, 30, 2], epoch=3), whole[[7, 30, 2]])
    for other in (train_targets(task, epoch=4), train_targets(pixel_task(data, "--seed", "6"), epoch=3)):
        assert sum(np.array_equal(*pair) for pair in zip(other, whole)) < 15


# ---- What is refused


@pytest.mark.parametrize("tokens", [torch.full((2, 59), 4), torch.full((1, 60), 3), torch.full((1, 60), 260)])
def test_what_is_no_image(tokens: torch.Tensor) -> None:
    """A wrong length, a special symbol, a symbol too many."""
    with pytest.raises(ValueError, match=r"tokens (have shape|are).*; allowed: "):
        to_images(tokens, SHAPE)


def test_folders_that_do_not_fit(data: Path, tmp_path: Path) -> None:
    """Sequences or folders of other shapes, and symbols in another order, which would be other values."""
    other = write_pixels(tmp_path)
    assert pixel_task(f"{data}:{data}").image_shape == SHAPE
    ImageShape(5, 5, 3).save(other)
    with pytest.raises(ValueError, match="split valid .* 60 .*; allowed: 75"):
        pixel_task(other, "--tokens-per-sample", "75").load_dataset("valid")
    with pytest.raises(ValueError, match="allowed: images of one shape"):
        pixel_task(f"{data}:{other}")
    SHAPE.save(other)
    (other / "dict.txt").write_text("\n".join(reversed((data / "dict.txt").read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="dict.txt .*; allowed: 0 to 255"):
        pixel_task(other)


def test_models_with_too_few_positions(data: Path) -> None:
    """fairseq-eval-lm would leave out every image and report a loss of 0."""
    task = pixel_task(data)
    task.load_dataset("test")
    with pytest.raises(ValueError, match="the model has 59 positions; allowed: at least 60"):
        task.eval_lm_dataloader(task.dataset("test"), max_positions=59)
    assert sum(b["ntokens"] for b in task.eval_lm_dataloader(task.dataset("test"), max_positions=60)) == 420


# ---- Generation


class Stubborn(FairseqIncrementalDecoder):
    """A decoder that prefers what an image never holds, thinks values above 1 impossible, and has 60 positions."""

    def __init__(self) -> None:
        super().__init__(pixel_dictionary())
        self.logits = torch.full((1, 1, 260), -1000.0)
        self.logits[..., :4], self.logits[..., 4:6] = 50.0, 0.0

    def forward(self, tokens, encoder_out=None, incremental_state=None):
        assert tokens.size(1) <= SHAPE.length and incremental_state is not None
        return self.logits.repeat(len(tokens), 1, 1), None

    def max_positions(self) -> int:
        return SHAPE.length


@pytest.mark.parametrize("given", [0, 30, 59])
def test_generated_images_are_whole_and_hold_nothing_else(data: Path, given: int) -> None:
    """60 values and then ``</s>``, whatever the model prefers and however improbable what is given is."""
    torch.manual_seed(1)
    task, model = pixel_task(data), FairseqLanguageModel(Stubborn())
    generator = task.build_generator([model], Namespace(sampling=True, beam=4, temperature=1.0, max_len_b=7))
    prefix = torch.full((2, given), 4 + 200) if given else None
    start = {"net_input": {"src_tokens": torch.full((2, 1), 2)}}
    with torch.no_grad():
        found = task.inference_step(generator, [model], start, prefix_tokens=prefix)
    tokens = torch.stack([sample["tokens"] for image in found for sample in image])
    assert tokens.shape == (8, 61) and (tokens[:, -1] == 2).all()
    assert (tokens[:, :given] == 204).all() and set(tokens[:, given:-1].unique().tolist()) <= {4, 5}
    assert given > 30 or len(tokens.unique(dim=0)) == 8


def test_generators_keep_the_models_probabilities() -> None:
    """Temperature and log-probabilities are fairseq's own where no special symbol is probable."""
    model = FairseqLanguageModel(Stubborn())
    model.decoder.logits = torch.linspace(-3, 3, 260).view(1, 1, -1)
    model.decoder.logits[..., :4] = -1e4
    generator = build_pixel_generator([model], pixel_dictionary(), SHAPE.length)
    scores, _ = generator.model.forward_decoder(torch.full((1, 1), 2), None, [{}], 0.5)
    assert torch.allclose(scores[0, 4:], (model.decoder.logits[0, 0] / 0.5).log_softmax(-1)[4:], atol=1e-6)
    assert (scores[0, :4] == -math.inf).all()
