"""enwik8: checked bytes from every source, one token per byte, and bits per character."""

import hashlib
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary, indexed_dataset

from recipes.enwik8 import prepare
from recipes.shared.download import Source
from recipes.shared.sources import SOURCES
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.pixels import logits_bits
from tests.recipes.archive_files import zipped
from tests.recipes.server import Page, serve, sha256

#: Any bytes: line ends of all kinds, no valid UTF-8, no line end at the cuts or at the end.
TEXT = bytes(random.Random(0).choices([*range(256), *[10] * 40, 13, *[0xE2, 0x80, 0xA8] * 5], k=3989)) + b"\xff\xc0 end"
SPLITS = {"train": 3000, "valid": 500, "test": 495}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Accept the bytes above as enwik8; returns their archive."""
    monkeypatch.setattr(prepare, "ENWIK8", Source("enwik8", len(TEXT), md5=hashlib.md5(TEXT).hexdigest()))
    monkeypatch.setattr(prepare, "SPLIT_BYTES", SPLITS)
    return zipped({"enwik8": TEXT})


def decoded(data_bin: Path, split: str) -> bytes:
    """The bytes of a split, from its tokens and the dictionary; each sequence must be a line or the remainder."""
    dictionary = Dictionary.load(str(data_bin / "dict.txt"))
    dataset = indexed_dataset.make_dataset(str(data_bin / split), "mmap")
    lines = [
        bytes(10 if token == dictionary.eos() else int(dictionary[token]) for token in dataset[index].tolist())
        for index in range(len(dataset))
    ]
    assert all(line.endswith(b"\n") for line in lines[:-1]) and all(line.count(b"\n") <= 1 for line in lines)
    return b"".join(lines)


def assert_whole(data_bin: Path, content: bytes, splits: dict) -> None:
    """Assert that the data set equals ``content``, cut as in ``splits``, and no partial files are left."""
    start = 0
    for split, size in splits.items():
        assert decoded(data_bin, split) == content[start : start + size], split
        start += size
    assert sorted(path.name for path in data_bin.parent.iterdir() if ".part" in path.name) == []


def test_the_standard_split() -> None:
    """The first 90 million bytes, the next 5 and the last 5."""
    assert prepare.SPLIT_BYTES == {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}
    assert list(prepare.SPLIT_BYTES) == ["train", "valid", "test"]
    assert sum(prepare.SPLIT_BYTES.values()) == prepare.ENWIK8.size == 100_000_000


def test_every_byte_is_a_token() -> None:
    """256 different tokens, none of them a special symbol except the newline, which is ``</s>``."""
    dictionary = prepare.byte_dictionary()
    table = prepare.token_table(dictionary)
    assert len(dictionary) == 4 + 255 and len(set(table.tolist())) == 256
    assert table[10] == dictionary.eos() and all(dictionary[table[byte]] == str(byte) for byte in (0, 9, 11, 32, 255))


def test_download(small: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """The archive is downloaded, unpacked, checked and cut; a second run downloads nothing."""
    with serve({"/enwik8.zip": Page(small)}) as served:
        source = Source(f"{served.address}/enwik8.zip", len(small), sha256(small), SOURCES["enwik8"].members)
        monkeypatch.setitem(SOURCES, "enwik8", source)
        assert prepare.main(["--out", str(tmp_path)]) == 0
        assert prepare.main(["--out", str(tmp_path)]) == 0
    assert len(served.requests) == 1
    assert_whole(tmp_path / "data-bin", TEXT, SPLITS)
    assert re.search(r"valid +500 bytes +500 tokens", capsys.readouterr().out)


@pytest.mark.parametrize(
    "name, content", [("mine.zip", zipped({"some/enwik8": TEXT})), ("enwik8", TEXT), ("mine.txt", TEXT)]
)
def test_local_copy(small: bytes, tmp_path: Path, name: str, content: bytes) -> None:
    """The archive, or the file under any name, recognised by its size, gives the standard split."""
    (tmp_path / name).write_bytes(content)
    assert prepare.main(["--file", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 0
    assert_whole(tmp_path / "out" / "data-bin", TEXT, SPLITS)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("enwik8", TEXT[:-1], "has 3,994 bytes; allowed: 3,995, which enwik8 has"),
        ("enwik8", TEXT[:-1] + b"!", "has md5 .*; allowed: "),
        ("mine.txt", TEXT[:-1] + b"!", "has md5 .*; allowed: "),
        ("mine.zip", zipped({"enwik8": TEXT[:-5]}), "has 3,990 bytes; allowed: 3,995"),
        ("short.txt", b"19 bytes, too few..", "there are 19 bytes to use; allowed: at least 20"),
    ],
)
def test_files_that_are_refused(small: bytes, tmp_path: Path, capsys, name: str, content: bytes, message: str) -> None:
    """Truncated, damaged and unrelated files are refused."""
    (tmp_path / name).write_bytes(content)
    assert prepare.main(["--file", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out" / "data-bin").exists()


@pytest.mark.parametrize("limit", [None, 1999])
def test_any_file_is_cut_by_bytes(tmp_path: Path, limit) -> None:
    """90, 5 and 5 per cent of the bytes, regardless of lines; a second run replaces the first."""
    (tmp_path / "any.txt").write_bytes(TEXT)
    arguments = ["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out")]
    assert prepare.main([*arguments, "--limit", "100"]) == 0
    assert prepare.main([*arguments, *(["--limit", str(limit)] if limit else [])]) == 0
    size = limit or len(TEXT)
    assert_whole(
        tmp_path / "out" / "data-bin", TEXT, {"train": size - 2 * (size // 20), "valid": size // 20, "test": size // 20}
    )


def test_very_long_lines(tmp_path: Path) -> None:
    """They become several sequences, so that memory stays bounded, without additional tokens."""
    content = b"x" * 150_000 + b"\n" + b"y" * 50_000
    (tmp_path / "long").write_bytes(content)
    prepare.binarise(tmp_path / "long", {"train": 150_001, "test": 49_999}, tmp_path / "bin")
    dataset = indexed_dataset.make_dataset(str(tmp_path / "bin" / "train"), "mmap")
    assert dataset.sizes.tolist() == [65536, 65536, 18929]
    assert torch.cat([dataset[index] for index in range(3)]).tolist() == [*[4 + ord("x") - 1] * 150_000, 2]


def test_file_that_ends_too_soon(tmp_path: Path) -> None:
    """Fewer tokens than bytes raise an error, and no data set is written."""
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="train .*3 tokens; allowed: 4"):
        prepare.binarise(tmp_path / "short", {"train": 4}, tmp_path / "bin")
    assert not (tmp_path / "bin").exists()


def test_evaluation_prints_bits_per_character(tmp_path: Path) -> None:
    """fairseq-eval-lm scores each test byte once; its loss is the mean under the model's logits."""
    (tmp_path / "any.txt").write_bytes(TEXT)
    data = tmp_path / "out" / "data-bin"
    lengths = "--cpu --tokens-per-sample 64 --max-tokens 512 --sample-break-mode none --required-batch-size-multiple 1"
    train = [str(data), "--user-dir", USER_DIR, *"--task language_modeling --arch flowformer_lm".split(), *SMALL]
    train += [*lengths.split(), *"--optimizer adam --lr 3e-3 --max-update 8 --save-dir".split(), str(tmp_path / "run")]
    evaluate = [str(data), "--user-dir", USER_DIR, "--path", str(tmp_path / "run" / "checkpoint_last.pt")]
    evaluate += lengths.split()
    assert prepare.main(["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out")]) == 0
    _, output = run_in_turn(("fairseq_cli.train", train, ""), ("fairseq_cli.eval_lm", evaluate, ""))
    (model,), _, _ = load_model_ensemble_and_task([str(tmp_path / "run" / "checkpoint_last.pt")])
    held_out = np.frombuffer(TEXT, np.uint8)[-199:].astype(np.int64)
    target = torch.from_numpy(np.where(held_out == 10, 2, held_out + 4 - (held_out > 10)))
    source = torch.cat([torch.tensor([2]), target[:-1]])
    blocks = [slice(start, min(start + 64, 199)) for start in range(0, 199, 64)]
    bits = [logits_bits(model, source[None, block], target[None, block]) * len(target[block]) for block in blocks]
    assert "Evaluated 199 tokens" in output
    printed = float(re.search(r"Loss \(base 2\): ([\d.]+)", output).group(1))
    assert printed == pytest.approx(sum(bits) / 199, abs=1e-4)
