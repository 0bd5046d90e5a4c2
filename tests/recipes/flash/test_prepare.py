"""From documents to subwords to a data-bin: sizes, ids, counts, and which steps are repeated."""

import json
import re

import pytest
import sentencepiece
from fairseq.data import Dictionary, data_utils
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.flash import prepare
from recipes.shared import subword_data, subword_text
from recipes.shared.documents import paragraphs
from recipes.shared.subword_text import SplitCounts, encode, train_sentencepiece, write_dictionary
from recipes.shared.working_folder import working_folder

WORDS = "the a one two linear time model attends tokens chunks gates width state sums over rows columns".split()
WORDS += [first + second + third for first in "bdgk" for second in ("ar", "el", "io") for third in ("mon", "tas", "s")]
LINES = [" ".join(WORDS[(i * k + k) % len(WORDS)] for k in range(1, 9)) for i in range(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sentencepiece model of the lines above with 300 pieces, and the folder with its dictionary."""
    folder = tmp_path_factory.mktemp("model")
    train_sentencepiece(LINES, folder / "m.model", 300, masked=False, threads=1)
    loaded = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    write_dictionary(loaded, folder / "dict.txt")
    return loaded, folder


@pytest.mark.parametrize("masked", [False, True])
def test_the_embedding_has_as_many_rows_as_asked(tmp_path, masked):
    train_sentencepiece(LINES, tmp_path / "m.model", 300, masked, threads=1)
    loaded = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    write_dictionary(loaded, tmp_path / "dict.txt")
    dictionary = Dictionary.load(str(tmp_path / "dict.txt"))
    if masked:  # as --task masked_lm does
        dictionary.add_symbol("<mask>")
    assert len(dictionary) == 300


def test_the_same_lines_give_the_same_model(model, tmp_path):
    train_sentencepiece(LINES, tmp_path / "m.model", 300, masked=False, threads=1)
    assert (tmp_path / "m.model").read_bytes() == (model[1] / "m.model").read_bytes()


def test_sampling_draws_from_everything(tmp_path, monkeypatch):
    monkeypatch.setattr(subword_text, "SAMPLE_LINES", 200)
    lines = ["aaa bbb"] * 2000 + ["ccc ddd"] * 2000
    train_sentencepiece(lines, tmp_path / "m.model", 268, masked=False, threads=1)
    loaded = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert not any(loaded.is_byte(i) for i in loaded.encode("abcd"))  # every character occurred in training


@given(st.lists(st.text(max_size=40), min_size=1, max_size=4))
@settings(max_examples=50, deadline=None)
def test_fairseq_reads_what_was_counted(model, tmp_path_factory, texts):
    loaded, folder = model
    documents = [paragraphs(text) for text in texts]
    path = tmp_path_factory.mktemp("any") / "x.txt"
    counts = encode(documents, loaded, path, threads=1)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    with open(path, encoding="utf-8", newline="\n") as file:
        lines = file.readlines()
    ids = [dictionary.encode_line(line, add_if_not_exist=False) for line in lines]
    assert len(lines) == counts.documents - counts.empty_documents
    assert sum(map(len, ids)) == counts.tokens
    assert not any((line == dictionary.unk()).any() for line in ids)
    for line, document in zip(ids, filter(None, documents), strict=True):
        pieces = dictionary.string(line).split()
        expected = [piece for part in document for piece in loaded.encode(part, out_type=str)]
        assert pieces == expected


def test_round_trip(model):
    text = "the linear model attends: na\u00efve \u6f22 1.5"
    assert model[0].decode(model[0].encode(text, out_type=str)) == text


def test_counts(model, tmp_path, monkeypatch):
    monkeypatch.setattr(subword_text, "BATCH_CHARACTERS", 20)  # several batches
    documents = [["the model", "a"], [], ["one two linear"]] * 5
    counts = encode(iter(documents), model[0], tmp_path / "x.txt", threads=2)
    lines = (tmp_path / "x.txt").read_text(encoding="utf-8").splitlines()
    assert counts == SplitCounts(15, 5, 30, 5 * (10 + 2 + 15), sum(len(line.split()) + 1 for line in lines))
    assert counts.tokens_per_word == counts.tokens / 30
    assert len(lines) == 10
    assert not list(tmp_path.glob("*.part"))


def test_documents_are_encoded_as_they_come(model, tmp_path, monkeypatch):
    monkeypatch.setattr(subword_text, "BATCH_CHARACTERS", 100)
    requests = []

    def documents():
        for number in range(50):
            requests.append(number)
            yield ["the model attends over rows"]

    real = model[0].encode
    batches = []

    class Watched:
        def encode(self, lines, **options):
            batches.append(len(lines))
            return real(lines, **options)

    encode(documents(), Watched(), tmp_path / "x.txt", threads=1)
    assert len(requests) == 50
    assert max(batches) <= 4


def test_a_stopped_encoding_leaves_no_file(model, tmp_path):
    def documents():
        yield ["the model"]
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        encode(documents(), model[0], tmp_path / "x.txt", threads=1)
    assert not (tmp_path / "x.txt").exists()


@pytest.mark.parametrize("lines", [[], ["", ""]])
def test_no_text_to_learn_from(tmp_path, lines):
    with pytest.raises(ValueError, match="training split .*allowed"):
        train_sentencepiece(lines, tmp_path / "m.model", 300, masked=False, threads=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocabulary, limit", [(32_000, "at most"), (100, "at least")])
def test_the_vocabulary_said_to_be_allowed_is(tmp_path, vocabulary, limit, masked):
    with pytest.raises(ValueError, match=rf"--vocabulary is {vocabulary}; allowed.* {limit} \d") as refused:
        train_sentencepiece(LINES, tmp_path / "m.model", vocabulary, masked, threads=1)
    assert not list(tmp_path.iterdir())
    allowed = int(str(refused.value).rsplit(" ", 1)[1])
    train_sentencepiece(LINES, tmp_path / "m.model", allowed, masked, threads=1)
    assert (tmp_path / "m.model").exists()


def test_subwords_are_learned_on_files_from_everywhere(tmp_path, monkeypatch):
    paths = [tmp_path / str(i) for i in range(10)]
    for path in paths:
        path.write_bytes(bytes(100))
    assert subword_data.evenly_chosen(paths) == paths
    monkeypatch.setattr(subword_data, "LEARN_BYTES", 350)
    assert subword_data.evenly_chosen(paths) == paths[::3]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, imported_already):
    """The arguments of a small run, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "any.txt").write_text("".join(line + "\n" for line in LINES))
    arguments = ["c4", "--file", str(folder / "any.txt"), "--out", str(folder / "out")]
    arguments += ["--vocabulary", "300", "--workers", "1"]
    assert prepare.main(arguments) == 0
    return arguments, folder / "out"


def test_command_makes_a_data_bin(prepared):
    _, out = prepared
    dictionary = Dictionary.load(str(out / "data-bin" / "dict.txt"))
    assert len(dictionary) == 299  # C4 is for masked models, which add <mask>
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "sentencepiece.model"))
    for split, first in (("train", LINES[0]), ("valid", LINES[360]), ("test", LINES[380])):
        data = data_utils.load_indexed_dataset(str(out / "data-bin" / split), dictionary)
        assert model.decode(dictionary.string(data[0]).split()) == first
        split_manifest = json.loads((out / "manifest.json").read_text())["splits"][split]
        assert sum(data.sizes) == split_manifest["tokens"]
        assert split_manifest["tokens_per_word"] == pytest.approx(
            split_manifest["tokens"] / split_manifest["words"], abs=1e-6
        )
    assert not list(out.rglob("*.part"))


def test_manifest_has_what_another_machine_compares(prepared):
    manifest = json.loads((prepared[1] / "manifest.json").read_text())
    assert manifest["genuine"] is False and manifest["splits"]["train"]["documents"] == 360
    assert [len(file["sha256"]) for files in manifest["files"].values() for file in files] == [64, 64, 64]
    assert len(manifest["sentencepiece_sha256"]) == 64


def test_what_is_done_is_not_done_again(prepared, capsys):
    arguments, out = prepared
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and path.suffix == ".txt"}
    assert prepare.main(arguments) == 0
    assert capsys.readouterr().out.count("up to date") == 6
    rewritten = [path.name for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert rewritten == ["dict.txt"]  # written in every run, from the model


def test_once_looks_at_the_key(tmp_path):
    calls = []

    def make():
        calls.append(1)
        (tmp_path / "x").write_text("x")
        return len(calls)

    with working_folder(tmp_path, prepare.COMMAND):
        assert [subword_data.once(tmp_path / "x", {"a": key}, make) for key in (1, 1, 2, 2)] == [1, 1, 2, 2]
        (tmp_path / "x").unlink()
        assert subword_data.once(tmp_path / "x", {"a": 2}, make) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--file", "blank.txt"], r"prepare: .*training split.*allowed"),
        (["--file", "any.txt"], r"prepare: --vocabulary is 32000; allowed.* at most"),
    ],
)
def test_command_fails_clearly(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "blank.txt").write_text("\n" * 100)
    (tmp_path / "any.txt").write_text("some words\n" * 100)
    assert prepare.main(["pg19", *arguments, "--out", "out"]) == 1
    assert re.match(message, capsys.readouterr().err)
