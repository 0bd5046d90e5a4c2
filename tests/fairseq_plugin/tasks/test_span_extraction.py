"""Spans of long documents: the head on masked models, texts of answers, and what is refused of models and files.

Windows are in ../data/test_spans.py, trainings in test_trainings.py, damaged files in tests/test_damaged_files.py.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.models.roberta import RobertaModel

from tests.compare import assert_close
from tests.fairseq_plugin.helpers import masked_models
from tests.fairseq_plugin.helpers.spans import TASK, WINDOWS, write_names
from tests.fairseq_plugin.helpers.tasks import set_up

#: Of each kind of layer one; the head is the same for all mechanisms.
MASKED = ("flowformer_mlm", "flash_mlm", "flash_quad_mlm", "transformer_plus_mlm", "combiner_mlm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_names(tmp_path_factory.mktemp("spans") / "data-bin")


def setup(data: Path, *arguments: str, arch: str = "flash_mlm"):
    """The task and the configuration of a short training."""
    return set_up(data, *TASK, *WINDOWS, "--arch", arch, *masked_models.small(arch), *arguments)


@pytest.mark.parametrize("arch", [*MASKED, "roberta"])
def test_masked_architectures_have_the_head(arch: str, data: Path) -> None:
    """Scores of a window are those beside longer ones; through them gradients reach the layers."""
    task, config = setup(data, arch=arch)
    torch.manual_seed(1)
    model, dataset = task.build_model(config.model).double().eval(), task.load_dataset("valid")
    batch = dataset.collater([dataset[index] for index in range(7)])
    tokens, lengths = batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"].tolist()
    scores = task.span_scores(model, batch)
    for row in (lengths.index(min(lengths)), 6):
        alone = task.span_scores(model, {"net_input": {"src_tokens": tokens[row : row + 1, : lengths[row]]}})
        assert_close("scores", scores[row : row + 1, : lengths[row]], alone, tolerance=1e-6)
    loss, size, _ = task.build_criterion(config.criterion)(model.train(), batch)
    loss.backward()
    layer = [x for name, x in model.named_parameters() if ".layers.0." in name and x.grad is not None]
    assert size == 7 and torch.isfinite(loss) and any(x.grad.abs().max() > 0 for x in layer)


def test_the_head_decays_as_asked(data: Path) -> None:
    """--lineartime-decay-linear-only: the weights of its linear layers alone."""
    task, config = setup(data, "--lineartime-decay-linear-only")
    head = task.build_model(config.model).classification_heads["span_extraction_head"]
    decays = {name: x.optim_overrides["optimizer"]["weight_decay_scale"] for name, x in head.named_parameters()}
    assert decays == {name: float(name.endswith("weight")) for name in decays}


def test_the_text_of_an_answer(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scores that point at the gold span give its text; the log says which spans are cut at borders of windows."""
    task, _ = setup(data, "--span-stride", "23")
    with caplog.at_level("INFO"):
        dataset = task.load_dataset("train")
    lost = dataset.lost_spans()
    assert 0 < lost < 20 and f"{len(dataset)} windows; {lost} of 96 gold spans" in caplog.text
    assert setup(data)[0].load_dataset("train").lost_spans() == 0  # the default overlaps by half
    batch = dataset.collater([dataset[index] for index in range(7)])
    scores = torch.zeros(*batch["starts"].shape, 2)
    scores[..., 0][batch["starts"]] = scores[..., 1][batch["ends"]] = 5.0
    scores[:, 0] = -5.0
    texts, best = task.answer_spans(scores, batch)
    has_answer = ~batch["starts"][:, 0]
    assert has_answer.sum() >= 2
    for text, gold, held, score in zip(texts, batch["gold"], has_answer, best):
        assert (text == gold[0]) == bool(held) and (score == 20.0) == bool(held)


def test_fewer_positions_than_a_window_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An architecture of a fixed size, as somebody may register one; a pretrained table of learned positions."""
    learned = {}
    for positions in ("32", "40"):
        task, config = setup(data, "--encoder-learned-pos", "--max-positions", positions, arch="softmax_mlm")
        learned[positions] = task.build_model(config.model)
    with pytest.raises(ValueError, match=r"does not fit .*embed_positions"):
        learned["40"].load_state_dict(learned["32"].state_dict())
    build = RobertaModel.build_model.__func__

    def short(cls, args, task):
        args.max_positions = 20
        model = build(cls, args, task)
        model.max_tokens = 20
        return model

    monkeypatch.setattr(RobertaModel, "build_model", classmethod(short))
    task, config = setup(data, arch="roberta")
    with pytest.raises(ValueError, match="--max-positions is 32; allowed: at most 20, the positions of this roberta"):
        task.build_model(config.model)


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
    for path in data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "valid.npz").unlink()
    with np.load(data / "valid.npz") as stored:
        np.savez(tmp_path / "valid.npz", **{**stored, array: values})
    with pytest.raises(ValueError, match=f"valid.npz: {said}"):
        setup(tmp_path)[0].load_dataset("valid")
