"""Distillation: the loss literally, what is logged, and bad input."""

import math
from pathlib import Path

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.tasks.audio_pretraining import AudioPretrainingConfig, AudioPretrainingTask
from torch import Tensor

from fairseq_plugin.criterions.distillation import DistillationCriterion
from fairseq_plugin.distill.teacher import Teacher
from tests.compare import assert_all_close, assert_close
from tests.fairseq_plugin.helpers.text import PAD
from tests.fairseq_plugin.helpers.transfer import Pair, make_pair, make_sample, make_task

STUDENTS = {"lm": "hedgehog_lm", "mlm": "t2r_mlm", "translation": "flowformer"}
T, W = 1.5, 0.3


@pytest.fixture(scope="module", params=STUDENTS)
def case(request, tmp_path_factory) -> tuple[str, Pair, dict]:
    kind = request.param
    folder = tmp_path_factory.mktemp("pair")
    pair = make_pair(
        folder, kind, STUDENTS[kind], lineartime_trained_parameters="all", dropout=0.0, attention_dropout=0.0
    )
    pair.student.double()
    return kind, pair, make_sample(kind, right=4)


def _literal(pair: Pair, sample: dict) -> tuple[Tensor, Tensor, int]:
    """Both terms, target by target: sums of cross-entropy and of divergence, and how many there are."""
    teacher = Teacher(pair.path, pair.task, "").model_like(pair.student)
    student, wanted = (model(**sample["net_input"])[0] for model in (pair.student, teacher))
    losses, divergences = [], []
    for b, i in sample["target"].ne(PAD).nonzero().tolist():
        losses.append(-torch.log(student[b, i].softmax(0)[sample["target"][b, i]]))
        p, q = ((x[b, i] / T).softmax(0) for x in (wanted.detach(), student))
        divergences.append((p * (p / q).log()).sum())
    return sum(losses), sum(divergences), len(losses)


def test_models_of_audio_are_refused() -> None:
    """They have no logits of words."""
    with pytest.raises(ValueError, match="distillation; allowed for models of audio: attention_transfer"):
        DistillationCriterion(AudioPretrainingTask(AudioPretrainingConfig()), "teacher.pt", T, W, False, "")


def test_loss_and_gradients_are_the_literal_ones(case) -> None:
    """Padding and tokens that are not masked do not count; the sample size is fairseq's."""
    kind, pair, sample = case
    parameters = dict(pair.student.named_parameters())
    losses, divergences, count = _literal(pair, sample)
    expected = (1 - W) * losses + W * T**2 * divergences
    criterion = pair.distillation(T, W)
    total, size, logged = criterion(pair.student, sample)
    assert size == count == logged["teacher_kl_tokens"]
    assert_close("loss", total, expected)
    assert_close("logged", logged["loss"], losses.detach())
    assert_close("logged", logged["teacher_kl_sum"], divergences.detach())
    options = {"allow_unused": True, "materialize_grads": True}
    gradients = (torch.autograd.grad(x, parameters.values(), **options) for x in (total, expected))
    assert_all_close(parameters, *gradients, tolerance=1e-7)
    parts, _, _ = criterion(pair.student, sample, reduce=False)
    assert parts.shape == (count,)
    assert_close("sum", parts.sum().detach(), total.detach())
    with metrics.aggregate(new_root=True) as printed:
        criterion.reduce_metrics([logged])
    values = printed.get_smoothed_values()
    assert values["teacher_kl"] == pytest.approx(divergences.item() / count / math.log(2), abs=1e-3)
    assert values["loss"] == pytest.approx(losses.item() / count / math.log(2), abs=1e-3) and "ppl" in values


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_the_sample_size_is_fairseqs(case, sentence_avg: bool) -> None:
    """What gradients are divided by, with ``--sentence-avg`` too, which masked models do not have."""
    kind, pair, sample = case
    own = MaskedLmLoss(MaskedLmConfig(), pair.task)
    own = own if kind == "mlm" else CrossEntropyCriterion(pair.task, sentence_avg)
    criterion = DistillationCriterion(pair.task, pair.path, T, W, sentence_avg, "pytorch_ddp")
    (_, size, logged), (_, expected, theirs) = (one(pair.student, sample) for one in (criterion, own))
    assert size == expected
    assert_close("loss", logged.pop("loss"), theirs.pop("loss"))
    assert logged.items() >= theirs.items()


def test_evaluation_is_fairseqs(case) -> None:
    """What is logged is what fairseq's own criterion logs, and no teacher is needed."""
    kind, pair, sample = case
    own = MaskedLmLoss(MaskedLmConfig(), pair.task) if kind == "mlm" else CrossEntropyCriterion(pair.task, False)
    criterion = DistillationCriterion(pair.task, "gone.pt", T, W, False, "pytorch_ddp")
    values = []
    pair.student.eval()
    for one in (own, criterion):
        with metrics.aggregate(new_root=True) as logged, torch.no_grad():
            one.reduce_metrics([one(pair.student, sample)[2]])
        values.append(dict(logged.get_smoothed_values()))
    pair.student.train()
    assert values[0] == values[1] and values[0].keys() >= {"loss", "ppl"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"teacher": None}, "--teacher is not given; allowed"),
        ({"distillation_temperature": 0.0}, "--distillation-temperature is 0.0; allowed: above 0"),
        ({"distillation_weight": 1.1}, "--distillation-weight is 1.1; allowed: 0 to 1"),
        ({"ddp_backend": "fully_sharded"}, "--ddp-backend is fully_sharded; allowed"),
    ],
)
def test_options_that_are_refused(change: dict, said: str) -> None:
    given = {"task": make_task("lm"), "teacher": "x.pt", "distillation_temperature": T, "distillation_weight": W}
    with pytest.raises(ValueError, match=said):
        DistillationCriterion(**{**given, "sentence_avg": False, "ddp_backend": "pytorch_ddp", **change})


def test_no_teacher_and_adaptive_softmax(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--teacher is 'gone.pt', which is no file"):
        DistillationCriterion(make_task("lm"), "gone.pt", T, W, False, "pytorch_ddp").train()
    adaptive = ("--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "20,40")
    pair = make_pair(tmp_path, "lm", "hedgehog_lm", adaptive, lineartime_trained_parameters="all")
    with pytest.raises(
        ValueError, match="--adaptive-softmax-cutoff is given, .*; allowed with --criterion distillation"
    ):
        pair.trainer(pair.distillation(), tmp_path / "checkpoints").train_step([make_sample("lm")])
    assert not list((tmp_path / "checkpoints").iterdir())
