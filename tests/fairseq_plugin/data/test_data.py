"""Data of the tasks: folders come back and refuse what is none, windows are those of a loop, answers TriviaQA's own."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.files.json_files import read
from fairseq_plugin.data import episode_folder, series_folder
from fairseq_plugin.data.episode_folder import Episode, EpisodeDescription
from fairseq_plugin.data.episodes import EpisodeDataset, remaining_returns
from fairseq_plugin.data.series_folder import Description, fill_missing
from fairseq_plugin.data.span_answers import best_of_each, exact_match, f1_score, normalise_answer, spell
from fairseq_plugin.data.span_windows import Layout, SpanWindowDataset
from fairseq_plugin.data.stored_arrays import described_by
from tests.fairseq_plugin.helpers.episodes import ACTION, LONGEST, STATE, episodes
from tests.fairseq_plugin.helpers.series import waves
from tests.fairseq_plugin.helpers.spans import span_dictionary, split_of

MODULES = {"series": series_folder, "episodes": episode_folder}
WRITE = {"series": series_folder.write_folder, "episodes": partial(episode_folder.write_folder, name="toy")}
BOS, PAD, EOS = 0, 1, 2


def series(split: str = "train", index: int = 0, values=None, label=None, **others):
    """Splits of series, one of which has other values or another label; ``others`` replace a split."""
    splits = {"train": waves(9, 1), "test": waves(6, 2), **others}
    if values is not None:
        splits[split][0][index] = np.array(values)
    if label is not None:
        splits[split][1][index] = label
    return splits


def played(index: int = 0, **arrays):
    """Splits of episodes, one of which has other arrays."""
    train = episodes(5)
    train[index] = train[index]._replace(**arrays)
    return {"train": train, "valid": episodes(3, seed=2)}


MADE = {"series": series, "episodes": played}

# ---- Series and episodes


def test_series_come_back(tmp_path: Path) -> None:
    """At full precision, with statistics of the training series alone; labels may be integers, a channel constant."""
    splits = series()
    described = series_folder.write_folder(tmp_path, splits)
    assert series_folder.read_description(tmp_path) == described
    for name, (values, labels) in splits.items():
        found = series_folder.read_split(tmp_path, name)
        assert found.labels == labels and all(map(np.array_equal, found.series, values))
    steps, one = np.concatenate(splits["train"][0]), splits["test"][0][0]
    assert described.labels == ["Fast", "none", "slow"] and described.longest == max(map(len, splits["train"][0]))
    standardised = (one - steps.mean(0)) / steps.std(0, ddof=1)
    assert np.allclose(described.standardise(one), standardised, rtol=1e-5)
    values = [np.column_stack([np.full(5, 7.0), np.arange(5.0) * i]) for i in (1, 2)]
    described = series_folder.write_folder(tmp_path / "numbers", {"train": (values, np.array([4, -1]))})
    assert described.labels == [-1, 4] and series_folder.read_split(tmp_path / "numbers", "train").labels == [4, -1]
    assert (described.standardise(values[0])[:, 0] == 0.0).all()


def test_episodes_come_back(tmp_path: Path) -> None:
    """In float32, with statistics of the training episodes alone; actions are scaled from their range and back."""
    splits = played()
    described = WRITE["episodes"](tmp_path, splits)
    assert episode_folder.read_description(tmp_path) == described
    for name, written in splits.items():
        for one, other in zip(written, episode_folder.read_split(tmp_path, name), strict=True):
            assert all(np.array_equal(x.astype(np.float32), y) for x, y in zip(one, other))
    states, totals = np.concatenate([x.states for x in splits["train"]]), [x.total for x in splits["train"]]
    standardised = described.standardise(states)
    assert np.allclose(standardised.mean(0), 0.0, atol=1e-4) and np.allclose(standardised.std(0), 1.0, atol=1e-4)
    assert (described.state_size, described.action_size, described.longest) == (STATE, ACTION, LONGEST)
    assert (described.lowest, described.average, described.highest) == (min(totals), np.mean(totals), max(totals))
    described = WRITE["episodes"](tmp_path / "range", played(), action_range=([-2.0, -1.0], [2.0, 3.0]))
    assert np.allclose(described.scale(np.array([[2.0, -1.0], [0.0, 1.0]])), [[1.0, -1.0], [0.0, 0.0]])
    assert np.allclose(described.unscale(np.array([[1.0, -1.0], [0.5, 0.0]])), [[2.0, -1.0], [1.0, 1.0]])
    for bad in (([1.0], [-1.0]), ([-np.inf], [np.inf])):
        with pytest.raises(ValueError, match="range of actions is .*; allowed"):
            WRITE["episodes"](tmp_path / "new", played(), action_range=bad)


@pytest.mark.parametrize("context", [5, None], ids=["windows", "whole episodes"])
def test_every_beginning_of_a_window_is_equally_likely(context: int | None) -> None:
    """A window ends with its episode at the latest, and holds the steps of the data."""
    made, count, scale = episodes(3), 600, 10.0
    still = {"mean": [0.0] * STATE, "std": [1.0] * STATE, "low": [-1.0] * ACTION, "high": [1.0] * ACTION}
    described = EpisodeDescription("toy", "", **still, longest=LONGEST, lowest=0.0, average=5.0, highest=10.0)
    windows = EpisodeDataset(made, described, context=context, return_scale=scale, count=count, seed=1)
    firsts = [(n, t) for n, one in enumerate(made) for t in range(len(one.rewards) if context else 1)]
    counts = dict.fromkeys(firsts, 0)
    for i in range(len(windows)):
        window = windows[i]
        first = int(window["timesteps"][0])
        (n,) = (n for n, one in enumerate(made) if np.isclose(one.states[:, 0], window["states"][0, 0]).any())
        steps = slice(first, min(first + (context or 99), len(made[n].rewards)))
        assert window["timesteps"].tolist() == list(range(steps.start, steps.stop))
        assert np.allclose(window["states"], made[n].states[steps])
        assert np.allclose(window["actions"], made[n].actions[steps])
        left = [made[n].rewards[t:].sum() / scale for t in range(steps.start, steps.stop)]
        assert np.allclose(window["returns"][:, 0], left)
        assert windows.num_tokens(i) >= 3 * len(window["timesteps"])
        counts[n, first] += 1
    expected = count / len(firsts)
    assert sum((count - expected) ** 2 for count in counts.values()) / expected < 2 * len(firsts)  # chi-squared


def test_returns_that_remain_are_exact() -> None:
    """Also the sum of a million rewards in float32."""
    assert remaining_returns(np.array([1.0, 2.0, 4.0], dtype=np.float32)).tolist() == [7.0, 6.0, 4.0]
    assert remaining_returns(np.full(10**6, 0.1, dtype=np.float32))[0] == pytest.approx(1e5, rel=1e-6)


def test_missing_values_are_interpolated() -> None:
    """Linearly for each channel; at the ends the nearest value."""
    nan = np.nan
    filled = fill_missing(np.array([[nan, 1.0], [2.0, nan], [nan, nan], [nan, 7.0], [8.0, nan]]))
    assert np.allclose(filled, [[2.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0], [8.0, 7.0]])
    with pytest.raises(ValueError, match="channel 1 .*allowed"):
        fill_missing(np.array([[1.0, nan], [2.0, nan]]))


#: Splits that are refused, and what the error names.
REFUSED = [
    ("series", lambda: series("train", 2, [[1.0, np.nan, 2.0]]), r"series 2 of train is nan at \(0, 1\)"),
    ("series", lambda: series("test", 1, [[1.0, 2.0, -np.inf]]), r"series 1 of test is -inf at \(0, 2\)"),
    ("series", lambda: series("test", 3, np.zeros((4, 2))), r"series 3 of test .*3"),
    ("series", lambda: series("train", 0, np.zeros((0, 3))), "series 0 of train"),
    ("series", lambda: series("train", 0, np.zeros(5)), "series 0 of train"),
    ("series", lambda: series("train", 4, [["a", "b", "c"]]), "series 4 of train"),
    ("series", lambda: series("test", 5, label="loud"), "series 5 of test .*'loud'; allowed: 'Fast', 'none', 'slow'"),
    ("series", lambda: series("train", 5, label=5), "series 5 of train is 5"),
    ("series", lambda: series(test=([], [])), "test has 0 series"),
    ("series", lambda: series(test=(waves(3, 1)[0], ["slow"])), "test has 3 series and 1 labels"),
    ("series", lambda: {"test": waves(3, 1)}, "splits are test; allowed: 'train'"),
    ("episodes", lambda: played(1, actions=np.zeros(4, dtype=np.int64)), "episode 1 of train has discrete actions"),
    ("episodes", lambda: played(0, states=np.zeros((3, STATE))), "episode 0 of train: actions"),
    ("episodes", lambda: played(2, states=np.zeros((4, 7))), "episode 2 of train: states .*3"),
    ("episodes", lambda: played(0, rewards=np.zeros((LONGEST, 1))), "episode 0 of train: rewards"),
    ("episodes", lambda: played(0, rewards=np.full(LONGEST, np.nan)), r"episode 0 of train: rewards is nan at \(0,\)"),
    ("episodes", lambda: played(0, actions=np.full((LONGEST, 2), 1.5)), "action at step 0 is 1.5; allowed: -1.0"),
    ("episodes", lambda: played(0, states=[["a"] * STATE] * LONGEST), "episode 0 of train: states"),
    ("episodes", lambda: played(0, states=np.full((LONGEST, STATE), 1e39)), r"states is inf at \(0, 0\)"),
    ("episodes", lambda: {"train": [Episode(*(np.zeros((0, 2)),) * 2, np.zeros(0))]}, "episode 0 of train: states"),
    ("episodes", lambda: {"train": episodes(2), "valid": []}, "valid has 0 episodes"),
    ("episodes", lambda: {"valid": episodes(2)}, "splits are valid; allowed: 'train'"),
]


@pytest.mark.parametrize(("kind", "make", "named"), REFUSED)
def test_what_is_refused_leaves_no_folder(kind: str, make, named: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=named) as caught:
        WRITE[kind](tmp_path / "new", make())
    assert "allowed: " in str(caught.value) and not (tmp_path / "new").exists()


#: Numbers that no writer gives and that the types of tests/test_damaged_files.py do not cover.
WRONG_FIELDS = {
    "series": [("labels", ["a", 1]), ("labels", ["a", "a"]), ("mean", [float("nan")] * 3), ("std", [0.0] * 3)]
    + [("std", [1.0]), ("longest", -1)],
    "episodes": [("std", [-1.0] * STATE), ("std", [1.0]), ("high", [-2.0] * ACTION), ("low", [0.0]), ("longest", 0)]
    + [("highest", float("inf"))],
}


class Attack:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize("kind", WRONG_FIELDS)
def test_what_no_writer_gives_is_refused(kind: str, tmp_path: Path) -> None:
    """Descriptions, lengths that only add up, and objects, which run nothing."""
    WRITE[kind](tmp_path, MADE[kind]())
    with np.load(tmp_path / "train.npz") as stored:
        arrays = dict(stored)
    lengths = np.append(arrays["lengths"][:-2], [-1, arrays["lengths"][-2:].sum() + 1])
    objects = np.array([Attack(tmp_path / "attacked")] * len(lengths), dtype=object)
    for wrong, said in ((lengths, "train.npz: lengths has -1; allowed: 1 to"), (objects, "train.npz")):
        np.savez(tmp_path / "train.npz", **{**arrays, "lengths": wrong})
        with pytest.raises(ValueError, match=said):
            MODULES[kind].read_split(tmp_path, "train")
    assert not (tmp_path / "attacked").exists()
    (path,) = tmp_path.glob("*.json")
    content = read(path, "it")
    for field, value in WRONG_FIELDS[kind]:
        path.write_text(json.dumps({**content, field: value}))
        with pytest.raises(ValueError, match=rf"{path.name} cannot be read: .*({field}|high).*allowed"):
            MODULES[kind].read_description(tmp_path)


def test_what_is_too_large_for_the_model_is_refused() -> None:
    """What is infinite in float32 after standardisation; an integer of a checkpoint beyond a float."""
    described = Description(["a"], [0.0, 0.0], [1.0, 1e39], 3)
    assert np.isfinite(described.standardise(np.array([[1.0, 1e39]]))).all()
    with pytest.raises(ValueError, match=r"series 4.* is 1e\+39 at \(1, 0\).*allowed.*float32"):
        described.standardise(np.array([[1.0, 1.0], [1e39, 1.0]]), "series 4")
    content = {"labels": ["a"], "mean": [10**400], "std": [1.0], "longest": 3}
    with pytest.raises(ValueError, match="c.pt cannot be read: .*mean, std, longest"):
        described_by(Description, content, "c.pt")


# ---- Spans


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
    return questions, documents, spans, Layout(positions, 5, draw(st.integers(1, positions - 8)))


def literal_windows(question: int, document: int, layout: Layout) -> list[tuple[list[int], range]]:
    """The tokens of each window of a pair and the places of the document that it holds; 5 of a question are read."""
    asked, text = ([i % 20 + 4 for i in range(length)] for length in (question, document))
    room, begin, windows = layout.max_positions - 3 - min(question, 5), 0, []
    while True:
        piece = range(begin, min(begin + room, document))
        windows.append(([BOS, *asked[:5], EOS, *(text[i] for i in piece), EOS], piece))
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
        for window in literal_windows(question, document, layout)
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


#: Each rule of evaluation/triviaqa_evaluation.py, one at a time.
NORMAL = {
    "The Beatles": "beatles",
    "  Sunset   Blvd. ": "sunset blvd",
    "The_Lord_of_the_Rings": "lord of rings",  # underscores become spaces before articles are removed
    "rock'n'roll": "rock n roll",  # punctuation becomes a space, it is not removed
    "‘Tom’s´ `Diner`": "tom s diner",
    "A.A. Milne": "milne",  # as in the official script: "A." becomes the article "a"
    "Another theme": "another theme",  # only whole words are articles
    "“Émile” – Zola": "“émile” – zola",  # other quotes and dashes are kept, as in the official script
    "42nd Street\n(film)": "42nd street film",
}
#: An answer, gold answers, exact match and F1.
SCORED = [
    ("The Sunset Boulevard!", ["sunset blvd", "sunset boulevard"], 1.0, 1.0),
    ("Sunset", ["sunset blvd", "west sunset boulevard"], 0.0, 2 / 3),  # the best of the aliases
    ("new york new york", ["new york"], 0.0, 2 / 3),  # words are counted with multiplicity: 2 of 4, 2 of 2
    ("the", ["a"], 1.0, 0.0),  # both are empty after normalisation: equal, with no common word
    ("Paris", [], 0.0, 0.0),
]


def test_answers_are_scored_as_by_the_official_script() -> None:
    """Of several windows the best answers, in any order, and of equal ones the first; bytes of subwords are joined."""
    assert {text: normalise_answer(text) for text in NORMAL} == NORMAL
    for answer, gold, em, f1 in SCORED:
        assert (exact_match(answer, gold), f1_score(answer, gold)) == (em, pytest.approx(f1)), answer
    questions, scores = np.array([7, 2, 7, 2, 7, 0]), np.array([1.0, -3.0, 4.0, -3.0, 4.0, 0.0])
    assert best_of_each(questions, scores).tolist() == [5, 1, 2]
    subwords = ["▁Zo", "ë", "▁", "<0xE2>", "<0x82>", "<0xAC>", "5", "<0xFF>", "▁x"]
    assert spell(subwords) == [" Zo", "ë", " ", "€", "", "", "5", "\N{REPLACEMENT CHARACTER}", " x"]
