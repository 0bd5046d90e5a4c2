"""Answers as text: TriviaQA's official normalisation and scores, and the text of subwords."""

import numpy as np
import pytest

from fairseq_plugin.data.span_answers import best_of_each, exact_match, f1_score, normalise_answer, spell


@pytest.mark.parametrize(
    "text, normal",
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
        ("the", ""),
    ],
)
def test_the_official_normalisation(text, normal):
    """Each rule of evaluation/triviaqa_evaluation.py, one at a time."""
    assert normalise_answer(text) == normal


@pytest.mark.parametrize(
    "answer, gold, em, f1",
    [
        ("The Sunset Boulevard!", ["sunset blvd", "sunset boulevard"], 1.0, 1.0),
        ("Sunset", ["sunset blvd", "west sunset boulevard"], 0.0, 2 / 3),  # the best of the aliases
        ("new york new york", ["new york"], 0.0, 2 / 3),  # words are counted with multiplicity: 2 of 4, 2 of 2
        ("the", ["a"], 1.0, 0.0),  # both are empty after normalisation: equal, with no common word
        ("Paris", ["london"], 0.0, 0.0),
        ("Paris", [], 0.0, 0.0),
    ],
)
def test_scores(answer, gold, em, f1):
    assert exact_match(answer, gold) == em
    assert f1_score(answer, gold) == pytest.approx(f1)


def test_subwords_are_spelled():
    """Byte pieces are joined into characters; invalid UTF-8 does not raise an error."""
    subwords = ["▁Zo", "ë", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "<0xFF>", "▁x"]
    texts = spell(subwords)
    assert texts == [" Zo", "ë", " ", "€", "", "", "5", "�", " x"]
    assert "".join(texts).strip() == "Zoë €5� x"
    assert spell([]) == []


def test_the_best_of_each():
    """Rows of several questions may be in any order; among equal scores the first one wins."""
    questions = np.array([7, 2, 7, 2, 7, 0])
    scores = np.array([1.0, -3.0, 4.0, -3.0, 4.0, 0.0])
    assert best_of_each(questions, scores).tolist() == [5, 1, 2]
