"""The generator: targets follow the marks, splits are disjoint, equal seeds give equal bytes."""

import numpy as np
import pytest
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import make_dataset

from recipes.long_copy import prepare
from recipes.long_copy.passages import MARK, Layout, Symbols, draw
from recipes.long_copy.prepare import SPLITS

#: 4,000 characters with spaces, newlines, tabs and two-byte letters; each sequence of 16, a line, occurs once.
TEXT = "".join(f"{i:04d} é\t{i * i:08d}\n" for i in range(250))
SIZES = ["--source-tokens", "80", "--spans", "3", "--span-tokens", "7", "--train", "20", "--valid", "5", "--test", "6"]


def made(tmp_path, name="out", more=(), text=TEXT):
    """The data folder of a text."""
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    assert prepare.main(["--file", str(file), "--out", str(tmp_path / name), *SIZES, *more]) == 0
    return tmp_path / name / "data-bin"


def lines(folder, split, language):
    """The lines of one side of a split as symbols, as fairseq reads them."""
    dictionary = Dictionary.load(str(folder / f"dict.{language}.txt"))
    dataset = make_dataset(str(folder / f"{split}.source-target.{language}"), "mmap")
    return [[dictionary[number] for number in dataset[i].tolist()] for i in range(len(dataset))]


def characters(symbols):
    """The text that symbols represent."""
    spaces = {"▁": " "}
    plain = (symbol.removeprefix(MARK) for symbol in symbols)
    return "".join(chr(int(x[2:], 16)) if x.startswith("U+") else spaces.get(x, x) for x in plain)


def test_every_target_is_what_the_marks_say(tmp_path):
    """Checked symbol by symbol; a source without its marks is a passage of the text."""
    folder = made(tmp_path)
    for split, count in zip(SPLITS, (20, 5, 6)):
        sources, targets = lines(folder, split, "source"), lines(folder, split, "target")
        assert len(sources) == len(targets) == count
        for source, target in zip(sources, targets):
            assert source.pop() == target.pop() == "</s>"
            marked = [i for i, symbol in enumerate(source) if symbol.startswith(MARK)]
            assert (len(source), len(target), len(marked)) == (80, 21, 21)
            assert [source[i].removeprefix(MARK) for i in marked] == target
            begins = marked[::7]
            assert marked == [begin + i for begin in begins for i in range(7)]
            assert [begin // 26 for begin in begins] == [0, 1, 2]  # one passage in each third
            assert characters(source) in TEXT


def test_no_passage_is_in_two_splits(tmp_path):
    """Each split uses its own part of the text, in which each line-long passage occurs once."""
    folder = made(tmp_path)
    stretches = {}
    for split in SPLITS:
        texts = (characters(line[:-1]) for line in lines(folder, split, "source"))
        stretches[split] = {text[i : i + 16] for text in texts for i in range(len(text) - 15)}
    assert not stretches["train"] & (stretches["valid"] | stretches["test"])
    assert not stretches["valid"] & stretches["test"]


def test_same_bytes_for_the_same_seed(tmp_path):
    first, repeated, other_seed = (
        made(tmp_path, name, ["--seed", seed]) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    names = sorted(path.name for path in first.iterdir())
    assert "train.source-target.source.bin" in names and "dict.target.txt" in names
    assert all((first / name).read_bytes() == (repeated / name).read_bytes() for name in names)
    assert (first / "train.source-target.source.bin").read_bytes() != (
        other_seed / "train.source-target.source.bin"
    ).read_bytes()


def test_passages_are_anywhere_in_their_parts():
    """At the first and last position of a part, and side by side; the text is not modified."""
    symbols, layout = Symbols("abcdefgh"), Layout(14, 2, 3)
    text, positions = symbols.numbers("abcdefgh" * 3), set()
    original = text.copy()
    for seed in range(300):
        example = draw(text, layout, symbols, np.random.default_rng(seed))
        marked = example.source >= symbols.marked_from
        assert len(example.source) == 14 and (symbols.marked(example.target) == example.source[marked]).all()
        positions.add(tuple(np.flatnonzero(marked)[::3]))
    assert (
        positions == {(source, 7 + target) for source in range(5) for target in range(5)} and (text == original).all()
    )


def test_made_once(tmp_path, capsys):
    """A second call writes nothing; other sizes and another text in the same folder are refused."""
    folder = made(tmp_path)
    modified = (folder / "dict.source.txt").stat().st_mtime_ns
    assert made(tmp_path) == folder and (folder / "dict.source.txt").stat().st_mtime_ns == modified
    arguments = ["--file", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out"), *SIZES]
    assert prepare.main([*arguments, "--spans", "2"]) == 1
    assert "spans is 2; allowed in" in capsys.readouterr().err
    (tmp_path / "text.txt").write_text(TEXT.replace("0", "1"), encoding="utf-8")
    assert prepare.main(arguments) == 1
    assert "text_sha256 is " in capsys.readouterr().err


def test_interrupted(tmp_path, monkeypatch):
    """Incomplete data is not kept; the next call makes it."""

    def interrupted(*_):
        raise KeyboardInterrupt

    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    command = ["--file", str(file), "--out", str(tmp_path / "out"), *SIZES]
    with monkeypatch.context() as patched:
        patched.setattr(prepare, "draw", interrupted)
        assert prepare.main(command) == 130
    assert not (tmp_path / "out" / "data-bin").exists()
    assert prepare.main(command) == 0 and len(lines(tmp_path / "out" / "data-bin", "test", "source")) == 6


@pytest.mark.parametrize(
    ("content", "further", "said"),
    [
        (b"\xff\xfe\x00", [], "not text in UTF-8"),
        (b"", [], "--source-tokens is 80; allowed: at most"),
        (TEXT.encode()[:1000], [], "--source-tokens is 80; allowed: at most 47, "),
        (TEXT.encode(), ["--span-tokens", "60"], "--source-tokens is 80; allowed with --spans 3 and --span-tokens 60"),
    ],
)
def test_damaged_input(content, further, said, tmp_path, capsys):
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    assert prepare.main(["--file", str(file), "--out", str(tmp_path / "out"), *SIZES, *further]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
