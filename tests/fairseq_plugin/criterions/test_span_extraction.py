"""The loss of start and end, compared with the formula window by window, and what is logged of whole questions."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import metrics
from torch import Tensor

from fairseq_plugin.criterions.span_extraction import SpanExtractionCriterion, span_loss
from tests.compare import assert_close


def literal_loss(scores: Tensor, document: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """-1/2 [log Σ_gold p(start) + log Σ_gold p(end)], p = exp(score) over the sum of document and first token."""
    losses = []
    for row in range(len(scores)):
        places = [0, *(place for place in range(1, scores.shape[1]) if document[row, place])]
        total = torch.zeros((), dtype=scores.dtype)
        for side, gold in ((0, starts), (1, ends)):
            weights = {place: torch.exp(scores[row, place, side]) for place in places}
            right = sum(weights[place] for place in places if gold[row, place])
            total = total - torch.log(right / sum(weights.values()))
        losses.append(total / 2)
    return torch.stack(losses)


def batch(rows: int = 6, tokens: int = 13, seed: int = 0):
    """Scores and marks: no gold span in the first row, one in the second, several in the others; odd lengths."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, tokens, 2, generator=generator, dtype=torch.float64) * 2
    document, starts, ends = (torch.zeros(rows, tokens, dtype=torch.bool) for _ in range(3))
    for row in range(rows):
        document[row, 4 : 7 + row] = True
        gold = [0] if row == 0 else list(range(4, 4 + min(row, 3)))
        starts[row, gold] = ends[row, [place + bool(row) for place in gold]] = True
    return scores.requires_grad_(), document, starts, ends


def test_the_loss_and_its_gradient_are_the_formulas():
    scores, *marks = batch()
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    ours, literal = span_loss(scores, *marks), literal_loss(scores, *marks)
    assert_close("loss", ours, literal)
    (gradient,) = torch.autograd.grad((ours * weights).sum(), scores)
    (expected,) = torch.autograd.grad((literal * weights).sum(), scores)
    assert_close("gradient", gradient, expected)
    outside = ~marks[0].clone()
    outside[:, 0] = False
    assert (gradient[outside] == 0).all() and (gradient[~outside].abs().sum(1) > 0).all()
    # Whatever the scores of padding and of the question are.
    wider = torch.nn.functional.pad(scores.detach(), (0, 0, 0, 4), value=50.0)
    wider[:, 1:4] = 60.0
    assert_close("padded", span_loss(wider, *(torch.nn.functional.pad(x, (0, 4)) for x in marks)), ours.detach())


def test_large_scores_are_finite():
    """Half precision, and scores at which exp overflows in float32."""
    scores, *marks = batch()
    for values in ((scores * 500).float(), scores.half()):
        values = values.detach().requires_grad_()
        losses = span_loss(values, *marks)
        losses.sum().backward()
        assert losses.dtype == torch.float32 and torch.isfinite(losses).all() and torch.isfinite(values.grad).all()


# ---- By a task of one's own


class Answers:
    """A task whose model has given scores, and whose answers are the numbers of windows."""

    cfg = SimpleNamespace(_name="answers")

    def span_scores(self, model, sample):
        return model(sample["scores"])

    def answer_spans(self, scores, sample):
        return sample["texts"], sample["best"]


def sample(questions, best, texts, gold):
    scores, document, starts, ends = batch(len(questions))
    marks = {"document": document, "starts": starts, "ends": ends}
    return {
        "scores": scores.detach(),
        **marks,
        "question": torch.tensor(questions),
        "best": torch.tensor(best),
        "texts": texts,
        "gold": [gold[question] for question in questions],
        "nsentences": len(questions),
        "ntokens": 99,
    }


def logged(logs, training=False):
    with metrics.aggregate(new_root=True) as meters:
        SpanExtractionCriterion.reduce_metrics(logs)
    return meters.get_smoothed_values()


def test_a_question_is_answered_by_the_best_of_its_windows():
    """Windows in several batches and of several workers; em and f1 are of three questions."""
    gold = {0: ["ada frost"], 1: ["oslo"], 2: ["seven"]}
    model = torch.nn.Identity().eval()
    criterion = SpanExtractionCriterion(Answers())
    batches = [
        sample([0, 1, 2], [3.0, -1.0, 0.5], ["Frost", "Rome", "seven"], gold),
        sample([0, 1, 1], [2.0, -4.0, -0.5], ["Ada Frost", "Oslo", "in Oslo"], gold),
    ]
    logs = [criterion(model, one)[2] for one in batches]
    found = logged(logs)
    assert found["em"] == pytest.approx(100 * 1 / 3, abs=0.01)  # seven
    assert found["f1"] == pytest.approx(100 * (2 / 3 + 2 / 3 + 1) / 3, abs=0.01)  # Frost, in Oslo, seven
    losses = torch.cat([span_loss(one["scores"], one["document"], one["starts"], one["ends"]) for one in batches])
    assert found["loss"] == pytest.approx(losses.mean().item() / math.log(2), abs=1e-3)
    assert not any(name.startswith("_") for name in found)


def test_training_logs_the_loss_alone():
    """Sums of it can be added on all workers; of answers that is not so."""
    criterion = SpanExtractionCriterion(Answers())
    one = sample([0, 1], [0.0, 0.0], ["", ""], {0: [""], 1: [""]})
    loss, size, log = criterion(torch.nn.Identity().train(), one)
    assert set(logged([log])) == {"loss"} and size == 2 and loss.item() == pytest.approx(log["loss"].item())
    parts, _, _ = criterion(torch.nn.Identity().train(), one, reduce=False)
    assert parts.shape == (2,) and parts.sum().item() == pytest.approx(loss.item())
    assert criterion.train().logging_outputs_can_be_summed()


def test_several_workers_validate_on_gpus_alone(monkeypatch):
    """fairseq gathers what cannot be summed in a buffer on a GPU."""
    criterion = SpanExtractionCriterion(Answers()).eval()
    for gpus in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpus=gpus: gpus)
        if gpus:
            assert not criterion.logging_outputs_can_be_summed()
        else:
            with pytest.raises(ValueError, match="several workers without a GPU; allowed.*--disable-validation"):
                criterion.logging_outputs_can_be_summed()


def test_another_task_is_refused():
    with pytest.raises(ValueError, match="--task is masked_lm; allowed with --criterion span_extraction"):
        SpanExtractionCriterion(SimpleNamespace(cfg=SimpleNamespace(_name="masked_lm")))
