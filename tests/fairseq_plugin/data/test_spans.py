"""Windows over documents are those of a loop, and answers are scored as TriviaQA's own script scores them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairseq_plugin.data.span_answers import best_of_each, exact_match, f1_score, normalise_answer, spell
from fairseq_plugin.data.span_windows import Layout, SpanWindowDataset
from tests.fairseq_plugin.helpers.spans import span_dictionary, split_of

BOS, PAD, EOS = 0, 1, 2
MOST = 5  # tokens of a question that are read


@st.composite
def splits(draw) -> tuple:
    """Lengths of questions and of their documents, gold spans, and a layout that leaves out no token."""
    documents = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    questions = [draw(st.integers(1, 9)) for _ in documents]
    spans = []
    for length in documents:
        ends = st.tuples(st.integers(0, length - 1), st.integers(0, length - 1)).map(sorted).map(tuple)
        spans.append(draw(st.lists(ends, max_size=3)))
    positions = draw(st.integers(9, 20))
    return questions, documents, spans, Layout(positions, MOST, draw(st.integers(1, positions - 3 - MOST)))


def _literal(question: int, document: int, layout: Layout) -> list[tuple[list[int], range]]:
    """The tokens of each window of a pair and the places of the document that it holds."""
    asked, text = ([i % 20 + 4 for i in range(length)] for length in (question, document))
    room, begin, windows = layout.max_positions - 3 - min(question, MOST), 0, []
    while True:
        piece = range(begin, min(begin + room, document))
        windows.append(([BOS, *asked[:MOST], EOS, *(text[i] for i in piece), EOS], piece))
        if piece.stop == document:
            return windows
        begin += layout.stride


@given(splits())
def test_windows_and_their_gold_spans(drawn: tuple) -> None:
    """Every window in turn; a span is gold where all of it is; a window without any has ``<s>``."""
    questions, documents, spans, layout = drawn
    data = SpanWindowDataset(split_of(questions, documents, spans), layout, span_dictionary())
    wanted = [
        (pair, *window)
        for pair, (question, document) in enumerate(zip(questions, documents))
        for window in _literal(question, document, layout)
    ]
    batch = data.collater([data[i] for i in range(len(data))])
    tokens, held = batch["net_input"]["src_tokens"], set()
    assert len(data) == len(wanted) == len(tokens)
    for row, (pair, expected, piece) in enumerate(wanted):
        length, first = len(expected), len(expected) - 1 - len(piece)
        assert tokens[row].tolist() == expected + [PAD] * (tokens.shape[1] - length)
        assert data.size(row) == length == batch["net_input"]["src_lengths"][row]
        gold = [span for span in spans[pair] if piece.start <= span[0] and span[1] < piece.stop]
        held |= {(pair, *span) for span in gold}
        for marks, side in ((batch["starts"], 0), (batch["ends"], 1)):
            places = {span[side] - piece.start + first for span in gold} or {0}
            assert set(marks[row].nonzero()[:, 0].tolist()) == places
        assert batch["document"][row].nonzero()[:, 0].tolist() == list(range(first, length - 1))
        assert batch["question"][row] == pair and batch["gold"][row] == [f"answer {pair}"]
    assert data.lost_spans() == sum((pair, *span) not in held for pair, x in enumerate(spans) for span in x)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("  Sunset   Blvd. ", "sunset blvd"),
        ("The_Lord_of_the_Rings", "lord of rings"),  # underscores become spaces before articles are removed
        ("rock'n'roll", "rock n roll"),  # punctuation becomes a space, it is not removed
        ("‘Tom’s´ `Diner`", "tom s diner"),
        ("A.A. Milne", "milne"),  # as in the official script: "A." becomes the article "a"
        ("Another theme", "another theme"),  # only whole words are articles
        ("“Émile” – Zola", "“émile” – zola"),  # other quotes and dashes are kept, as in the official script
        ("42nd Street\n(film)", "42nd street film"),
    ],
)
def test_the_official_normalisation(text: str, normal: str) -> None:
    """Each rule of evaluation/triviaqa_evaluation.py, one at a time."""
    assert normalise_answer(text) == normal


@pytest.mark.parametrize(
    ("answer", "gold", "em", "f1"),
    [
        ("The Sunset Boulevard!", ["sunset blvd", "sunset boulevard"], 1.0, 1.0),
        ("Sunset", ["sunset blvd", "west sunset boulevard"], 0.0, 2 / 3),  # the best of the aliases
        ("new york new york", ["new york"], 0.0, 2 / 3),  # words are counted with multiplicity: 2 of 4, 2 of 2
        ("the", ["a"], 1.0, 0.0),  # both are empty after normalisation: equal, with no common word
        ("Paris", [], 0.0, 0.0),
    ],
)
def test_scores(answer: str, gold: list[str], em: float, f1: float) -> None:
    assert exact_match(answer, gold) == em
    assert f1_score(answer, gold) == pytest.approx(f1)


def test_subwords_are_spelled() -> None:
    """Bytes are joined into characters; what is no UTF-8 is replaced."""
    assert spell(["▁Zo", "ë", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "<0xFF>", "▁x"]) == [
        *(" Zo", "ë", " ", "€", "", "", "5", "\N{REPLACEMENT CHARACTER}", " x")
    ]


def test_the_best_window_of_each_question() -> None:
    """In any order; of equal scores the first."""
    questions, scores = np.array([7, 2, 7, 2, 7, 0]), np.array([1.0, -3.0, 4.0, -3.0, 4.0, 0.0])
    assert best_of_each(questions, scores).tolist() == [5, 1, 2]
