"""Needles in texts, and how far back models read that find them everywhere, nearby or not at all."""

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor, nn

from recipes.from_softmax import needles, reach
from recipes.from_softmax.forms import Windows, form

LENGTH = 64
TEXT = torch.from_numpy(np.random.default_rng(0).integers(10, 20, 1_000))
SYMBOLS = needles.Symbols(4, np.arange(5, 9))
CONTEXTS = reach.Contexts(
    LENGTH,
    [needles.questions(TEXT, LENGTH, x, 6, SYMBOLS) for x in needles.distances(LENGTH)],
    TEXT.unfold(0, 2 * LENGTH + 1, LENGTH)[:4],
    len(SYMBOLS.others),
)


class Finder(nn.Module):
    """Writes what followed the last marker that it sees, else the last token again; it sees ``window`` tokens."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, tokens: Tensor) -> tuple[Tensor]:
        scores = torch.zeros(*tokens.shape, 20)
        for row, sequence in enumerate(tokens.tolist()):
            for i in range(len(sequence)):
                asked = next((j for j in range(i, max(-1, i - needles.SIZE), -1) if sequence[j] == 4), None)
                seen = range(max(0, i + 1 - self.window), asked or 0)
                found = [j for j in seen if sequence[j] == 4]
                scores[row, i, sequence[found[-1] + i - asked + 1] if found else sequence[i]] = 1.0
        return (scores,)

    def get_normalized_probs(self, output: tuple[Tensor], log_probs: bool, sample: dict) -> Tensor:
        return output[0].log_softmax(-1)


def test_needles_are_the_rarest_symbols() -> None:
    """No symbol that fills up a dictionary is one."""
    dictionary = Dictionary()
    for symbol, count in (("a", 9), ("b", 1), ("c", 3), ("filler", 0), ("d", 2)):
        dictionary.add_symbol(symbol, count)
    symbols = needles.symbols_of(dictionary)
    assert dictionary[symbols.marker] == "b" and [dictionary[i] for i in symbols.others] == ["d", "c", "a"]
    with pytest.raises(ValueError, match="1 different symbols; allowed"):
        single = Dictionary()
        single.add_symbol("a")
        needles.symbols_of(single)


def test_sequences_have_copies_of_one_needle_in_the_text() -> None:
    """Without the needles, the sequences are the text."""
    sequences = list(needles.mixed(TEXT.numpy(), 40, 3, SYMBOLS, seed=1))
    room = 40 - 3 * needles.SIZE
    assert len(sequences) == 1_000 // room and {len(x) for x in sequences} == {40}
    for sequence in sequences:
        (places,) = np.nonzero(sequence == 4)
        copies = {tuple(sequence[place : place + needles.SIZE]) for place in places}
        assert len(places) == 3 and len(copies) == 1
    text = np.concatenate(sequences)
    assert np.array_equal(text[text >= 10], TEXT.numpy()[: len(sequences) * room])
    assert {*text[(text < 10) & (text != 4)].tolist()} == {5, 6, 7, 8}


def test_questions_ask_for_a_needle_at_a_distance() -> None:
    assert needles.distances(256) == [8, 16, 32, 64, 96, 128, 160, 192, 224, 255]
    for distance, rows in zip(needles.distances(LENGTH), CONTEXTS.questions):
        assert rows.shape == (6, LENGTH + 1)
        for row in rows:
            first, second = torch.nonzero(row == 4).flatten().tolist()
            assert second - first == distance and second + needles.SIZE == len(row)
            assert torch.equal(row[first : first + needles.SIZE], row[second:])
    answers = {tuple(rows[:, -needles.ANSWER :].flatten().tolist()) for rows in CONTEXTS.questions}
    assert len(answers) == 1


@pytest.mark.parametrize("window", [LENGTH, 30, 1])
def test_what_a_model_sees_is_found(window: int) -> None:
    """A window has room for the needle and the answer so far."""
    measured = reach.measure(Finder(window).eval(), None, CONTEXTS, "finder")
    for distance, share in zip(needles.distances(LENGTH), measured.found):
        if distance + needles.ANSWER <= window:
            assert share == 100.0
        if distance >= window:
            assert share < 50.0
    assert [(part.begin, part.end) for part in measured.bins][-2:] == [(32, 64), (64, 128)]


def test_a_formula_of_the_longest_length_is_not_measured_beyond_it() -> None:
    """The window of the others is read to its end."""
    cosformer, local = (form(name, 2, Windows(8)) for name in ("cosformer,local", "local"))
    assert reach.measure(Finder(8), cosformer, CONTEXTS, "finder").bins == []
    assert reach.overrides(cosformer, CONTEXTS) == {}
    assert reach.overrides(local, CONTEXTS) == reach.overrides(None, CONTEXTS) == {"max_target_positions": 128}
