"""Text and Retrieval: reviews and pairs of papers as bytes, their splits, and damaged files."""

import pytest
from fairseq.data import Dictionary, data_utils

from fairseq_plugin.data.pixels import FIRST_TOKEN
from recipes.lra import retrieval, text
from tests.recipes.archive_files import tarred


def read(data_bin, kind, split):
    """All sequences of a split as lists of symbol numbers."""
    dictionary = Dictionary.load(str(data_bin / kind / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(data_bin / kind / split), dictionary)
    return [(dataset[i] - FIRST_TOKEN).tolist() for i in range(len(dataset))]


def reviews(**replaced):
    """An archive in IMDb's format, ten reviews per class and part, whose text names both."""
    files = {"aclImdb/README": b"no review", "aclImdb/train/unsup/0_0.txt": b"without a label"}
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            for number in range(10):
                files[f"aclImdb/{part}/{label}/{number}_7.txt"] = f"{part} {label} {number}é".encode()
    return {**files, **replaced}


def test_reviews(tmp_path):
    path = tmp_path / "imdb.tar.gz"
    path.write_bytes(tarred(dict(reversed(reviews().items()))))
    text.write(path, tmp_path / "out", 12)
    splits = {split: read(tmp_path / "out" / "data-bin", "input0", split) for split in ("train", "valid", "test")}
    assert [len(splits[split]) for split in splits] == [18, 2, 20]
    assert bytes(splits["train"][0]) == b"train neg 0\xc3"  # cut inside a character, since tokens are bytes
    assert [bytes(sequence)[:11] for sequence in splits["valid"]] == [b"train neg 9", b"train pos 9"]
    assert read(tmp_path / "out" / "data-bin", "label", "valid") == [[0], [1]]
    assert all(bytes(sequence).startswith(b"test") for sequence in splits["test"])


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (reviews(**{"aclImdb/test/pos/3_7.txt": b" \n"}), r"test/pos/3_7.txt is an empty document"),
        ({name: x for name, x in reviews().items() if "test/neg" not in name}, "too few reviews test/neg"),
    ],
)
def test_damaged_reviews(tmp_path, files, said):
    (tmp_path / "imdb.tar.gz").write_bytes(tarred(files))
    with pytest.raises(ValueError, match=said):
        text.write(tmp_path / "imdb.tar.gz", tmp_path / "out", 12)
    assert not (tmp_path / "out" / "data-bin").exists()


def test_cut_off_archive(tmp_path):
    path = tmp_path / "imdb.tar.gz"
    path.write_bytes(tarred(reviews()))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="imdb.tar.gz cannot be read.*allowed"):
        text.read_archive(path)


PAIRS = "1.0\t10\t20\ta title\tanother one\n0\t11\t21\tthird\tfourth é\n"


def write_pairs(folder, **replaced):
    folder.mkdir(parents=True)
    for split, name in retrieval.RELEASED.items():
        (folder / name).write_text(replaced.get(split, PAIRS))


def test_pairs(tmp_path):
    write_pairs(tmp_path / "lra_release" / "tsv_data")
    out = tmp_path / "out"
    assert retrieval.main(["--file", str(tmp_path / "lra_release"), "--out", str(out), "--max-length", "8"]) == 0
    assert [bytes(sequence) for sequence in read(out / "data-bin", "input0", "valid")] == [b"a title", b"third"]
    assert [bytes(sequence) for sequence in read(out / "data-bin", "input1", "valid")] == [b"another ", b"fourth \xc3"]
    assert read(out / "data-bin", "label", "test") == [[1], [0]]


def test_pairs_of_the_archive(tmp_path):
    """Only the needed files are extracted; the second call reads the folder."""
    files = {f"lra_release/tsv_data/{name}": PAIRS.encode() for name in retrieval.RELEASED.values()}
    (tmp_path / "lra_release.gz").write_bytes(tarred({**files, "lra_release/pathfinder32/0.png": b"x"}))
    out = tmp_path / "out"
    assert retrieval.main(["--file", str(tmp_path / "lra_release.gz"), "--out", str(out)]) == 0
    assert len(read(out / "data-bin", "input1", "train")) == 2
    assert not list((out / "release").rglob("*.png"))
    (tmp_path / "lra_release.gz").unlink()
    assert retrieval.main(["--file", str(tmp_path / "lra_release.gz"), "--out", str(out)]) == 0


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (PAIRS + "2\t1\t2\ta\tb\n", "line 3 has the label '2'"),
        (PAIRS + "1\t1\t2\ta\t\n", "line 3 is an empty document"),
        (PAIRS + "1\t1\t2\ta\n", "line 3 has 4 columns"),
        (PAIRS[:-1], "line 2 is cut off"),
    ],
)
def test_damaged_pairs(tmp_path, capsys, table, said):
    write_pairs(tmp_path / "lra", train=table)
    assert retrieval.main(["--file", str(tmp_path / "lra"), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert said in message and "new_aan_pairs.train.tsv" in message and "allowed" in message
    assert not (tmp_path / "out" / "data-bin").exists()


def test_damaged_release(tmp_path, capsys):
    (tmp_path / "lra_release.gz").write_bytes(tarred({"lra_release/other": b"x" * 100_000}))
    assert retrieval.main(["--file", str(tmp_path / "lra_release.gz"), "--out", str(tmp_path / "out")]) == 1
    assert "has no tables of pairs" in capsys.readouterr().err
    (tmp_path / "lra_release.gz").write_bytes((tmp_path / "lra_release.gz").read_bytes()[:60])
    assert retrieval.main(["--file", str(tmp_path / "lra_release.gz"), "--out", str(tmp_path / "out")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out" / "release").exists()
