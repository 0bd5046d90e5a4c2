"""The demo's text: split by file without leakage, and lossless conversion to tokens and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.shared import corpus
from recipes.shared.corpus import Document
from recipes.shared.subword_text import write_dictionary

ALLOWED = st.text(
    st.characters(
        codec="utf-8",
        exclude_characters=[*corpus.MARKS.values(), corpus.SPACE_PIECE],
        exclude_categories=["Z", "Cs", "Cc"],
    )
    | st.sampled_from(" \n\t\f")
)


@pytest.fixture(scope="module")
def library():
    """The first documents of the standard library of the running interpreter."""
    documents = []
    for document in corpus.read_library():
        documents.append(document)
        if sum(document.size for document in documents) > 300_000:
            return documents
    raise AssertionError("the standard library is smaller than that")


@pytest.fixture(scope="module")
def model(library, tmp_path_factory):
    """A small sentencepiece model of the first half of the library's documents."""
    return corpus.train_sentencepiece(library[::2], tmp_path_factory.mktemp("model") / "spm.model", 600)


def test_library_has_no_text_twice_and_leaves_out_tests(library):
    assert len({document.text for document in library}) == len(library)
    assert len({document.name for document in library}) == len(library)
    for document in library:
        assert not corpus.SKIPPED_FOLDERS.intersection(document.name.split("/"))
        assert document.text.endswith("\n")


def test_read_library_skips_what_it_cannot_write_as_a_line(tmp_path):
    (tmp_path / "good.py").write_text("x = 1\n\tpass\n")
    (tmp_path / "copy.py").write_text("x = 1\n\tpass\n")
    (tmp_path / "blank.py").write_text("\n\n")
    (tmp_path / "mark.py").write_text("x = '⏎'\n", encoding="utf-8")
    (tmp_path / "space.py").write_text("x = '\u2003'\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "large.py").write_text("#" * (corpus.MAX_FILE_BYTES + 1))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("x = 2\n")
    documents = list(corpus.read_library(tmp_path))
    assert [document.text for document in documents] == ["x = 1\n\tpass\n"]
    assert documents[0].size == 12


def test_split_by_file_shares_no_document(library):
    splits = corpus.split_by_file(iter(library), {"test": 30_000, "valid": 20_000, "train": 10**9})
    names = [document.name for split in splits.values() for document in split]
    assert sorted(names) == sorted(document.name for document in library)
    assert len(set(names)) == len(names)
    for name, least in (("test", 30_000), ("valid", 20_000)):
        size = sum(document.size for document in splits[name])
        assert least <= size < least + corpus.MAX_FILE_BYTES


def test_split_by_file_stops_when_every_split_is_full():
    documents = [Document(str(i), "x" * 10) for i in range(10)]
    splits = corpus.split_by_file(iter(documents), {"test": 10, "valid": 11, "train": 20})
    assert {name: len(split) for name, split in splits.items()} == {"test": 1, "valid": 2, "train": 2}


def test_split_by_file_needs_a_document_for_every_split():
    with pytest.raises(ValueError, match="no document left for the splits valid, train"):
        corpus.split_by_file(iter([Document("a", "x")]), {"test": 1, "valid": 1, "train": 1})


@given(ALLOWED)
def test_line_round_trip(text):
    line = corpus.to_line(text)
    assert corpus.from_line(line) == text
    assert len(line.split("\n")) == 1


@pytest.mark.parametrize("text", ["a⏎b", "a▁b", "a\rb", "a\u00a0b", "a\u2028b"])
def test_to_line_refuses_what_would_not_come_back(text):
    with pytest.raises(ValueError, match="text holds .*; allowed: no marks"):
        corpus.to_line(text)


def test_sentencepiece_round_trip(library, model):
    for document in library:  # half of it unseen
        line = corpus.to_line(document.text)
        assert corpus.decode(model.encode(line, out_type=str), model) == document.text


def test_written_split_has_no_unknown_piece_and_the_tokens_it_says(library, model, tmp_path):
    write_dictionary(model, tmp_path / "dict.txt")
    pieces = {
        line.rsplit(" ", 1)[0] for line in (tmp_path / "dict.txt").read_text(encoding="utf-8").split("\n") if line
    }
    tokens = corpus.write_split(library[:6], model, tmp_path / "split.txt")
    lines = (tmp_path / "split.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(lines) == 6
    assert all(piece in pieces for line in lines for piece in line.split())
    assert tokens == sum(len(line.split()) + 1 for line in lines)  # as fairseq counts: one eos per line
