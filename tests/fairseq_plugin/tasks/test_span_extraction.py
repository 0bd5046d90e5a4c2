"""Spans of long documents: masked architectures, what is refused, and trainings through fairseq's commands."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.models.roberta import RobertaModel

import fairseq_plugin  # noqa: F401  registers the task
from fairseq_plugin.tasks.span_extraction import HEAD
from tests.compare import assert_close
from tests.fairseq_plugin.helpers import masked_models
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.spans import TASK, WINDOWS, training_command, write_names
from tests.fairseq_plugin.helpers.tasks import set_up

#: Of each kind of layer one; the head is the same for all mechanisms.
MASKED = ("flowformer_mlm", "flash_mlm", "flash_quad_mlm", "transformer_plus_mlm", "combiner_mlm")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_names(tmp_path_factory.mktemp("spans") / "data-bin")


def setup(data: Path, *arguments: str, arch: str = "flash_mlm"):
    """The task and the configuration of a short training."""
    return set_up(data, *TASK, *WINDOWS, "--arch", arch, *masked_models.small(arch), *arguments)


def model_and_batch(data: Path, arch: str):
    task, config = setup(data, arch=arch)
    torch.manual_seed(1)
    model = task.build_model(config.model)
    dataset = task.load_dataset("valid")
    return task, config, model, dataset.collater([dataset[index] for index in range(7)])


@pytest.mark.parametrize("arch", [*MASKED, "roberta"])
def test_masked_architectures_have_the_head(arch, data):
    """Scores for each token, through which gradients reach the layers; the loss is finite."""
    task, config, model, batch = model_and_batch(data, arch)
    criterion = task.build_criterion(config.criterion)
    scores = task.span_scores(model.eval(), batch)
    assert scores.shape == (*batch["net_input"]["src_tokens"].shape, 2)
    loss, size, log = criterion(model, batch)
    loss.backward()
    assert size == 7 and torch.isfinite(loss) and 0 <= log["loss"]
    layer = [x for name, x in model.named_parameters() if ".layers.0." in name and x.grad is not None]
    assert layer and any(x.grad.abs().max() > 0 for x in layer)


def test_the_head_decays_as_asked(data):
    """--lineartime-decay-linear-only: the weights of its linear layers alone."""
    task, config = setup(data, "--lineartime-decay-linear-only")
    head = task.build_model(config.model).classification_heads["span_extraction_head"]
    decays = {name: x.optim_overrides["optimizer"]["weight_decay_scale"] for name, x in head.named_parameters()}
    assert decays == {name: float(name.endswith("weight")) for name in decays}


@pytest.mark.parametrize("arch", ["flash_mlm", "roberta"])
def test_padding_changes_no_score(arch, data):
    """A window alone, and beside longer ones."""
    task, _, model, batch = model_and_batch(data, arch)
    model = model.double().eval()
    scores = task.span_scores(model, batch)
    for row, length in enumerate(batch["net_input"]["src_lengths"].tolist()):
        alone = task.span_scores(
            model, {"net_input": {"src_tokens": batch["net_input"]["src_tokens"][row : row + 1, :length]}}
        )
        assert_close("scores", scores[row : row + 1, :length], alone, tolerance=1e-6)


def test_the_text_of_an_answer(data):
    """Scores that point at the gold span give its text; at most --max-answer-length tokens of it."""
    task, _, _, batch = model_and_batch(data, "flash_mlm")
    scores = torch.zeros(*batch["starts"].shape, 2)
    scores[..., 0][batch["starts"]] = scores[..., 1][batch["ends"]] = 5.0
    scores[:, 0] = -5.0
    texts, best = task.answer_spans(scores, batch)
    has_answer = ~batch["starts"][:, 0]
    assert has_answer.sum() >= 2
    for text, gold, held, score in zip(texts, batch["gold"], has_answer, best):
        assert (text == gold[0]) == bool(held) and (score == 20.0) == bool(held)


def test_a_split_in_the_log(data, caplog):
    """How many windows, and what is cut at their borders."""
    task, _ = setup(data, "--span-stride", "23")
    with caplog.at_level("INFO"):
        dataset = task.load_dataset("train")
    (line,) = [record.getMessage() for record in caplog.records if "gold spans" in record.getMessage()]
    lost = dataset.lost_spans()
    assert f"train: 96 questions, 96 documents for them, {len(dataset)} windows; {lost} of 96 gold spans" in line
    assert 0 < lost < 20
    assert setup(data)[0].load_dataset("train").lost_spans() == 0  # the default overlaps by half


# ---- What is refused; options are in test_every_task.py


def test_fewer_positions_than_a_window_are_refused(data, monkeypatch):
    """An architecture of a fixed size, as somebody may register one."""
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


def broken(data: Path, folder: Path, split: str = "valid", **arrays) -> Path:
    """A copy of the data whose arrays are others."""
    for path in data.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(data)).write_bytes(path.read_bytes())
    with np.load(data / f"{split}.npz") as stored:
        np.savez(folder / f"{split}.npz", **{**stored, **arrays})
    return folder


DAMAGED_ARRAYS = {
    r"valid.npz: pairs has 24 in row 0; allowed: 0 to 23": {"pairs": np.full((24, 2), 24)},
    "valid.npz: pairs has shape .0, 2.": {"pairs": np.zeros((0, 2), int), "counts": np.zeros(0, int)},
    "valid.npz: counts do not add up to the 24 spans of 24 pairs": {"counts": np.full(24, 2)},
    "valid.npz: spans has 400 in row 0; allowed: 0 to": {"spans": np.full((24, 2), 400)},
    "valid.npz: spans has -1 in row 0": {"spans": np.full((24, 2), -1)},
    "spans has one that ends before it begins": {"spans": np.tile([2, 1], (24, 1))},
    "spans has shape .24, 2. and type float64": {"spans": np.full((24, 2), 0.5)},
}
DAMAGED_FILES = {
    "valid.json cannot be read": ("valid.json", "[{]"),
    "valid.json: it is .*; allowed: an object": ("valid.json", "[]"),
    "answers.0. is 3; allowed: a text": ("valid.json", '{"questions": [{"name": "x", "answers": [3]}]}'),
    "valid.json has 1 questions and .*valid 24": ("valid.json", '{"questions": [{"name": "x", "answers": ["y"]}]}'),
    "question.valid.idx does not exist": ("question/valid.idx", None),
    "has no split valid; allowed: train": ("valid.npz", None),
}


@pytest.mark.parametrize("message", [*DAMAGED_ARRAYS, *DAMAGED_FILES])
def test_what_is_damaged_is_named(message, data, tmp_path):
    folder = broken(data, tmp_path, **DAMAGED_ARRAYS.get(message, {}))
    name, content = DAMAGED_FILES.get(message, ("unused", ""))
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        setup(folder)[0].load_dataset("valid")


# ---- Through fairseq's commands


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A masked model with learned positions pretrained for two updates, fine-tuned for ten epochs, and validated."""
    root = tmp_path_factory.mktemp("span_trainings")
    text = root / "text"
    text.mkdir()
    for file in (data / "dict.txt", *(data / "document").iterdir()):
        (text / file.name).symlink_to(file)
    learned = ["softmax_mlm", "--encoder-learned-pos"]
    pretraining = [str(text), "--user-dir", USER_DIR, *"--task masked_lm --criterion masked_lm --cpu".split()]
    pretraining += ["--arch", *learned, *masked_models.small("softmax_mlm"), "--optimizer", "adam", "--max-update", "2"]
    pretraining += ["--tokens-per-sample", "32", "--max-positions", "32", "--batch-size", "8"]
    pretraining += ["--save-dir", str(root / "pretrained"), "--no-epoch-checkpoints"]
    restored = ["--restore-file", str(root / "pretrained" / "checkpoint_last.pt")]
    restored += "--reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler".split()
    best = "--best-checkpoint-metric f1 --maximize-best-checkpoint-metric --max-epoch 10".split()
    fine_tuning = training_command(data, str(root / "tuned"), *learned, *restored, *best)
    still = training_command(data, str(root / "still"), *learned, *restored, "--lr", "0", "--max-update", "1")
    checked = [str(data), "--user-dir", USER_DIR, *TASK, "--path", str(root / "tuned" / "checkpoint_best.pt")]
    checked += ["--cpu", "--batch-size", "5", "--log-format", "json"]
    logs = run_in_turn(
        ("fairseq_cli.train", pretraining, ""),
        ("fairseq_cli.train", fine_tuning, ""),
        ("fairseq_cli.train", still, ""),
        ("fairseq_cli.validate", checked, ""),
    )
    return SimpleNamespace(root=root, training=logs[1], still=logs[2], validation=logs[3])


def test_it_learns_to_find_names(trained):
    """Of a span by chance, F1 is below 10; the best checkpoint is that of the highest F1, and validates so.

    That it goes on as if it had never stopped is in commands/test_resumption.py.
    """
    found = entries(trained.training, "valid")
    assert found[-1]["valid_f1"] > 80 and found[-1]["valid_em"] > 60
    assert found[-1]["valid_loss"] < 0.7 * found[0]["valid_loss"]
    best = max(entry["valid_f1"] for entry in found)
    assert found[-1]["valid_best_f1"] == best
    state = torch.load(trained.root / "tuned" / "checkpoint_best.pt")
    assert state["extra_state"]["best"] == best
    (again,) = entries(trained.validation, "valid")  # with batches of another size
    assert again["valid_f1"] == best


def test_pretrained_weights_are_taken(trained):
    """At a learning rate of 0 all weights are the pretrained ones, and the head is new."""
    pretrained, still = (
        torch.load(trained.root / name / "checkpoint_last.pt")["model"] for name in ("pretrained", "still")
    )
    new = {name for name in still if name not in pretrained}
    assert new and all(name.startswith(f"classification_heads.{HEAD}.") for name in new)
    assert all(torch.equal(still[name], tensor) for name, tensor in pretrained.items())


def test_more_positions_than_pretrained_are_refused(trained, data):
    """A table of learned positions does not grow."""
    state = torch.load(trained.root / "pretrained" / "checkpoint_last.pt")["model"]
    for positions in ("32", "40"):
        task, config = setup(data, "--encoder-learned-pos", "--max-positions", positions, arch="softmax_mlm")
        model = task.build_model(config.model)
        if positions == "32":
            model.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=r"does not fit .*embed_positions"):
                model.load_state_dict(state)
