"""Images are mirrored and shifted in training and generated whole; spans of documents are scored, read and refused.

Trainings are in test_trainings.py, options in test_every_task.py, windows of documents in ../data/test_data.py.
"""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.models import FairseqIncrementalDecoder, FairseqLanguageModel

from fairseq_plugin.data.pixels import ImageShape, pixel_dictionary, to_images
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.pixels import COUNTS, SHAPE, toy_images, write_pixels
from tests.fairseq_plugin.helpers.spans import write_names
from tests.fairseq_plugin.helpers.tasks import typed

pytestmark = pytest.mark.usefixtures("plain_pytorch")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_pixels(folder / "pixels")
    write_names(folder / "spans")
    return folder


class Seen:
    """A criterion that keeps the batch it is given, and the little of a model and optimizer a step touches."""

    def __call__(self, model, sample):
        self.sample = sample
        return torch.zeros(()), 1, {}

    def train(self, *_):
        return self

    eval = set_num_updates = backward = train


def images_of(task, split: str, indices=None, epoch: int = 1) -> np.ndarray:
    """Images (N, H, W, C) that the criterion sees in a step; the source is made of the same, after ``</s>``.

    The batch, which fairseq keeps for ranks that run out of data, and numpy's random state stay as they are.
    """
    task.load_dataset(split)
    dataset, seen = task.dataset(split), Seen()
    sample = dataset.collater([dataset[i] for i in (range(len(dataset)) if indices is None else indices)])
    before = sample["target"].clone(), np.random.get_state()[1].copy()
    task.begin_epoch(epoch, None)
    task.train_step(sample, seen, seen, seen, 0) if split == "train" else task.valid_step(sample, seen, seen)
    assert torch.equal(sample["target"], before[0]) and np.array_equal(np.random.get_state()[1], before[1])
    source, target = seen.sample["net_input"]["src_tokens"], seen.sample["target"]
    assert torch.equal(source[:, 1:], target[:, :-1]) and (source[:, 0] == 2).all()
    return (target.numpy().reshape(-1, *SHAPE) - 4).astype(int)


@pytest.mark.parametrize(("largest", "flips"), [(10, True), (1, False), (0, True)])
def test_images_are_mirrored_and_shifted(largest: int, flips: bool, data: Path) -> None:
    """About every second one is mirrored; one integer of -N to N is added to a whole image and clipped; all occur.

    Seed, epoch and image decide, in any batch; validation sees images as they are.
    """
    assert [pixel_dictionary()[4 + value] for value in range(256)] == [str(value) for value in range(256)]
    more = ["--pixel-max-shift", str(largest), *([] if flips else ["--pixel-no-flip"]), "--seed", "5"]
    task, _ = typed("pixels", data, *more)
    for split in ("valid", "test"):
        assert np.array_equal(images_of(task, split), toy_images(split, COUNTS[split]))
    originals, shifts, mirrored = toy_images("train", COUNTS["train"]).astype(int), set(), []
    epochs = [images_of(task, "train", epoch=epoch) for epoch in range(1, 11 if largest else 3)]
    for image, original in zip(np.concatenate(epochs), np.concatenate([originals] * len(epochs))):
        ways = [
            (side, shift)
            for side, one in enumerate((original, original[:, ::-1]))
            for shift in range(-largest - 2, largest + 3)
            if np.array_equal(image, (one + shift).clip(0, 255))
        ]
        ((side, shift),) = ways
        shifts.add(shift)
        mirrored.append(side)
    assert shifts == set(range(-largest, largest + 1))
    assert 0.3 < np.mean(mirrored) < 0.7 if flips else not any(mirrored)
    again, other = (typed("pixels", data, *more, "--seed", seed)[0] for seed in ("5", "6"))
    np.random.seed(99)
    assert np.array_equal(images_of(again, "train", [7, 30, 2], epoch=2), epochs[1][[7, 30, 2]])
    for changed in (epochs[0], images_of(other, "train", epoch=2)) if largest == 10 else ():
        assert sum(np.array_equal(*pair) for pair in zip(changed, epochs[1])) < 15


def test_the_default_augmentation_is_the_papers(data: Path) -> None:
    tasks = [typed("pixels", data, *words)[0] for words in ((), ("--pixel-max-shift", "10"))]
    assert np.array_equal(*(images_of(task, "train") for task in tasks))


def test_images_that_do_not_fit(data: Path, tmp_path: Path) -> None:
    """Sequences or folders of other shapes, symbols in another order, tokens of no image, models that end before.

    fairseq-eval-lm would leave out every image of such a model and report a loss of 0.
    """
    other = write_pixels(tmp_path / "pixels")
    ImageShape(5, 5, 3).save(other)
    with pytest.raises(ValueError, match="split valid .* 60 .*; allowed: 75"):
        typed("pixels", tmp_path, "--tokens-per-sample", "75")[0].load_dataset("valid")
    both = Path(f"{data / 'pixels'}:{tmp_path}")
    with pytest.raises(ValueError, match="allowed: images of one shape"):
        typed("pixels", both)
    SHAPE.save(other)
    assert typed("pixels", both)[0].image_shape == SHAPE
    (other / "dict.txt").write_text("\n".join(reversed((other / "dict.txt").read_text().splitlines())) + "\n")
    with pytest.raises(ValueError, match="dict.txt .*; allowed: 0 to 255"):
        typed("pixels", tmp_path)
    for tokens in (torch.full((2, 59), 4), torch.full((1, 60), 3), torch.full((1, 60), 260)):
        with pytest.raises(ValueError, match=r"tokens (have shape|are).*; allowed: "):
            to_images(tokens, SHAPE)
    task, _ = typed("pixels", data)
    task.load_dataset("test")
    with pytest.raises(ValueError, match="the model has 59 positions; allowed: at least 60"):
        task.eval_lm_dataloader(task.dataset("test"), max_positions=59)
    batches = task.eval_lm_dataloader(task.dataset("test"), max_positions=60, num_workers=0)
    assert sum(batch["ntokens"] for batch in batches) == 420


class Stubborn(FairseqIncrementalDecoder):
    """A decoder with a score for what an image never holds, for which values above 1 are impossible."""

    def __init__(self, special: float) -> None:
        super().__init__(pixel_dictionary())
        self.logits = torch.full((1, 1, 260), -1000.0)
        self.logits[..., :4], self.logits[..., 4], self.logits[..., 5] = special, 0.0, 1.0

    def forward(self, tokens, encoder_out=None, incremental_state=None):
        assert tokens.size(1) <= SHAPE.length and incremental_state is not None
        return self.logits.repeat(len(tokens), 1, 1), None

    def max_positions(self) -> int:
        return SHAPE.length


@pytest.mark.parametrize(("special", "given", "temperature"), [(50.0, 0, 1.0), (50.0, 59, 1.0), (-1e4, 0, 0.5)])
def test_generated_images_are_whole_and_hold_nothing_else(
    special: float, given: int, temperature: float, data: Path
) -> None:
    """60 values and then ``</s>``, whatever the model prefers and however improbable what is given is.

    Their scores are the model's probabilities where nothing else is probable.
    """
    torch.manual_seed(1)
    (task, _), model = typed("pixels", data), FairseqLanguageModel(Stubborn(special))
    options = Namespace(sampling=True, beam=4, temperature=temperature, max_len_b=7)
    prefix = torch.full((2, given), 4 + 200) if given else None
    start = {"net_input": {"src_tokens": torch.full((2, 1), 2)}}
    with torch.no_grad():
        found = task.inference_step(task.build_generator([model], options), [model], start, prefix_tokens=prefix)
    tokens = torch.stack([sample["tokens"] for image in found for sample in image])
    assert tokens.shape == (8, 61) and (tokens[:, -1] == 2).all()
    assert (tokens[:, :given] == 204).all() and set(tokens[:, given:-1].unique().tolist()) <= {4, 5}
    assert given or len(tokens.unique(dim=0)) == 8
    if special < 0:
        scores = torch.stack([sample["positional_scores"] for image in found for sample in image])[:, :-1]
        assert_close("scores", scores, torch.tensor([0.0, 2.0]).log_softmax(0)[tokens[:, :-1] - 4])


# ---- Spans


def windows(data: Path, *arguments: str, split: str = "valid"):
    """The task, its arguments, and the windows of a split."""
    task, args = typed("spans", data, *arguments)
    return task, args, task.load_dataset(split)


@pytest.mark.parametrize("arch", ["flowformer_mlm", "flash_mlm", "combiner_mlm", "roberta"])
def test_masked_architectures_have_the_head(arch: str, data: Path) -> None:
    """Scores of a window are those beside longer ones; through them gradients reach the layers."""
    task, args, dataset = windows(
        data, "--arch", arch, *([] if arch == "flash_mlm" else ["--encoder-attention-heads", "2"])
    )
    torch.manual_seed(1)
    model = task.build_model(args).double().eval()
    batch = dataset.collater([dataset[index] for index in range(7)])
    tokens, lengths = batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"].tolist()
    scores = task.span_scores(model, batch)
    for row in (lengths.index(min(lengths)), 6):
        alone = task.span_scores(model, {"net_input": {"src_tokens": tokens[row : row + 1, : lengths[row]]}})
        assert_close("scores", scores[row : row + 1, : lengths[row]], alone, tolerance=1e-6)
    loss, size, _ = task.build_criterion(args)(model.train(), batch)
    loss.backward()
    layer = [x for name, x in model.named_parameters() if ".layers.0." in name and x.grad is not None]
    assert size == 7 and torch.isfinite(loss) and any(x.grad.abs().max() > 0 for x in layer)


def test_weights_of_the_head_decay_alone(data: Path) -> None:
    task, args, _ = windows(data, "--lineartime-decay-linear-only")
    head = task.build_model(args).classification_heads["span_extraction_head"]
    decays = {name: x.optim_overrides["optimizer"]["weight_decay_scale"] for name, x in head.named_parameters()}
    assert decays == {name: float(name.endswith("weight")) for name in decays}


def test_the_text_of_an_answer(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scores that point at the gold span give its text; the log says which spans are cut at borders of windows."""
    with caplog.at_level("INFO"):
        task, _, dataset = windows(data, "--span-stride", "23", split="train")
    lost = dataset.lost_spans()
    assert 0 < lost < 20 and f"{len(dataset)} windows; {lost} of 96 gold spans" in caplog.text
    assert windows(data, split="train")[2].lost_spans() == 0  # the default overlaps by half
    batch = dataset.collater([dataset[index] for index in range(7)])
    scores = torch.zeros(*batch["starts"].shape, 2)
    scores[..., 0][batch["starts"]] = scores[..., 1][batch["ends"]] = 5.0
    scores[:, 0] = -5.0
    texts, best = task.answer_spans(scores, batch)
    has_answer = ~batch["starts"][:, 0]
    assert has_answer.sum() >= 2
    for text, gold, held, score in zip(texts, batch["gold"], has_answer, best):
        assert (text == gold[0]) == bool(held) and (score == 20.0) == bool(held)


@pytest.mark.parametrize(
    ("array", "values", "said"),
    [
        ("pairs", np.full((24, 2), 24), "pairs has 24 in row 0; allowed: 0 to 23"),
        ("counts", np.full(24, 2), "counts do not add up to the 24 spans of 24 pairs"),
        ("spans", np.full((24, 2), 400), "spans has 400 in row 0; allowed: 0 to"),
        ("spans", np.tile([2, 1], (24, 1)), "spans has one that ends before it begins"),
    ],
)
def test_numbers_that_fit_no_text_are_refused(array: str, values: np.ndarray, said: str, data: Path, tmp_path) -> None:
    (tmp_path / "spans").mkdir()
    for path in (data / "spans").iterdir():
        (tmp_path / "spans" / path.name).symlink_to(path)
    (tmp_path / "spans" / "valid.npz").unlink()
    with np.load(data / "spans" / "valid.npz") as stored:
        np.savez(tmp_path / "spans" / "valid.npz", **{**stored, array: values})
    with pytest.raises(ValueError, match=f"valid.npz: {said}"):
        windows(tmp_path)
