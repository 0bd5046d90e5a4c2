"""The head at every token, and the best of all spans, compared with loops."""

import pytest
import torch

from fairseq_plugin.modules.span_head import SpanHead, best_spans
from tests.compare import assert_close


def head() -> SpanHead:
    torch.manual_seed(1)
    return SpanHead(input_dim=6, inner_dim=5, num_classes=2, activation_fn="tanh", pooler_dropout=0.0).double()


def test_the_head_is_robertas_at_every_token():
    built, features = head(), torch.randn(3, 7, 6, dtype=torch.float64)
    expected = built.out_proj(torch.tanh(built.dense(features)))
    assert_close("scores", built(features), expected)
    assert {name for name, _ in built.named_parameters()} == {
        "dense.weight",
        "dense.bias",
        "out_proj.weight",
        "out_proj.bias",
    }


@pytest.mark.parametrize("longest", [1, 2, 5, 40])
def test_the_best_span(longest):
    """All spans of at most ``longest`` tokens within the document, of rows with padding and with one token alone."""
    generator = torch.Generator().manual_seed(longest)
    scores = torch.randn(20, 17, 2, generator=generator)
    document = torch.zeros(20, 17, dtype=torch.bool)
    for row in range(20):
        document[row, 3 + row % 3 : 4 + row % 14 + 3] = True
    found = best_spans(scores, document, longest)
    for row in range(20):
        places = document[row].nonzero()[:, 0].tolist()
        spans = [(i, j) for i in places for j in places if i <= j < i + longest]
        start, end = scores[row].double().T
        best = max(spans, key=lambda span: float(start[span[0]] + end[span[1]]))
        assert (int(found.first[row]), int(found.last[row])) == best
        expected = start[best[0]] + end[best[1]] - start[0] - end[0]
        assert float(found.score[row]) == pytest.approx(float(expected), abs=1e-5)


def test_a_constant_of_a_window_changes_nothing():
    """Softmax leaves it open, and windows of a question are compared by this score."""
    scores, document = torch.randn(2, 9, 2), torch.ones(2, 9, dtype=torch.bool)
    document[:, 0] = False
    one, other = (best_spans(scores + shift, document, 3) for shift in (0.0, 100.0))
    assert torch.allclose(one.score, other.score, atol=1e-4) and torch.equal(one.first, other.first)
