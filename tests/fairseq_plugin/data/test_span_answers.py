"""Answers as texts: TriviaQA's official normalisation and scores, and what subwords say."""

import numpy as np
import pytest

from fairseq_plugin.data.span_answers import best_of_each, exact_match, f1_score, normalise_answer, spell


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The Beatles", "beatles"),
        ("  Sunset   Blvd. ", "sunset blvd"),
        ("The_Lord_of_the_Rings", "lord of rings"),  # underscores are spaces before articles go
        ("rock'n'roll", "rock n roll"),  # punctuation becomes space, it does not vanish
        ("‘Tom’s´ `Diner`", "tom s diner"),
        ("A.A. Milne", "milne"),  # as in the official script: each A is an article once its dot is a space
        ("Another theme", "another theme"),  # articles are whole words
        ("“Émile” – Zola", "“émile” – zola"),  # other quotes and dashes stay, as there
        ("42nd Street\n(film)", "42nd street film"),
        ("the", ""),
    ],
)
def test_the_official_normalisation(text, normal):
    """Texts of evaluation/triviaqa_evaluation.py's rules, one rule at a time."""
    assert normalise_answer(text) == normal


@pytest.mark.parametrize(
    "answer, gold, em, f1",
    [
        ("The Sunset Boulevard!", ["sunset blvd", "sunset boulevard"], 1.0, 1.0),
        ("Sunset", ["sunset blvd", "west sunset boulevard"], 0.0, 2 / 3),  # the best of the aliases
        ("new york new york", ["new york"], 0.0, 2 / 3),  # each word as often as it is there: 2 of 4, 2 of 2
        ("the", ["a"], 1.0, 0.0),  # nothing is left of both: equal, and no word in common
        ("Paris", ["london"], 0.0, 0.0),
        ("Paris", [], 0.0, 0.0),
    ],
)
def test_scores(answer, gold, em, f1):
    assert exact_match(answer, gold) == em
    assert f1_score(answer, gold) == pytest.approx(f1)


def test_subwords_are_spelled():
    """A character of several bytes is one run; a byte that is no character does not fail."""
    subwords = ["▁Zo", "ë", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "<0xFF>", "▁x"]
    texts = spell(subwords)
    assert texts == [" Zo", "ë", " ", "€", "", "", "5", "�", " x"]
    assert "".join(texts).strip() == "Zoë €5� x"
    assert spell([]) == []


def test_the_best_of_each():
    """Rows of several questions in any order; of equal scores the first."""
    questions = np.array([7, 2, 7, 2, 7, 0])
    scores = np.array([1.0, -3.0, 4.0, -3.0, 4.0, 0.0])
    assert best_of_each(questions, scores).tolist() == [5, 1, 2]
