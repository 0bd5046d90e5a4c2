"""The Long Range Arena: its data in small, a quick comparison, and a picture of its model."""

import io
import json
import tarfile

import numpy as np
import pytest
from fairseq import options as fairseq_options
from fairseq.data import indexed_dataset
from PIL import Image

from fairseq_plugin.data.pixels import FIRST_TOKEN, pixel_dictionary
from recipes import runs
from recipes.lra import compare, data, pictures


def symbols(folder, split, kind="input0"):
    """The examples that fairseq reads, as numbers of symbols."""
    read = indexed_dataset.make_dataset(str(folder / "data-bin" / kind / split), "mmap")
    return [(read[i] - FIRST_TOKEN).tolist() for i in range(len(read))]


def value(expression):
    """The value of an expression, with a stack."""
    stack = [[]]
    for symbol in expression:
        if symbol in data.OPERATORS:
            stack.append([symbol])
        elif symbol == "]":
            operator, *values = stack.pop()
            ordered = sorted(values)
            middle = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2
            found = {"[MIN": ordered[0], "[MAX": ordered[-1], "[MED": middle, "[SM": sum(values) % 10}
            stack[-1].append(found[operator])
        else:
            stack[-1].append(int(symbol))
    ((result,),) = stack
    return result


def test_listops_is_always_the_same_and_has_the_values_of_its_expressions(tmp_path):
    for folder in ("first", "second"):
        splits = data.listops({"train": 60, "valid": 6, "test": 6}, 10, 40)
        data.write(tmp_path / folder, splits, data.dictionary(data.SYMBOLS), range(10))
    first, second = (symbols(tmp_path / folder, "train") for folder in ("first", "second"))
    assert first == second and len({tuple(numbers) for numbers in first}) == 60
    for numbers, (label,) in zip(first, symbols(tmp_path / "first", "train", "label")):
        assert value([data.SYMBOLS[i] for i in numbers]) == label and 10 < len(numbers) < 40
    with pytest.raises(SystemExit, match="data-bin exists"):
        data.write(tmp_path / "first", splits, data.dictionary(data.SYMBOLS), range(10))


def test_text_holds_out_the_last_reviews_of_each_class(tmp_path):
    with tarfile.open(tmp_path / "imdb.tar.gz", "w:gz") as archive:
        for part, label, number in [(p, x, n) for p in ("train", "test") for x in ("neg", "pos") for n in range(10)]:
            content = f"{part} {label} {number}".encode()
            info = tarfile.TarInfo(f"aclImdb/{part}/{label}/{number}_7.txt")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    data.write(tmp_path, data.text(tmp_path / "imdb.tar.gz", longest=9), pixel_dictionary(), range(2))
    assert bytes(symbols(tmp_path, "valid")[1]) == b"train pos" and len(symbols(tmp_path, "train")) == 18
    assert symbols(tmp_path, "test", "label") == [[0]] * 10 + [[1]] * 10


def test_the_release_is_read_as_it_is(tmp_path):
    for split in ("train", "eval", "test"):
        lines = "".join(f"{label}\t1\t2\tabc\tde\n" for label in ("0.0", "1"))
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(lines)
    for split in ("train", "val", "test"):
        (tmp_path / f"basic_{split}.tsv").write_text("Source\tTarget\n( ( [MAX 2 ) 9 ) ]\t9\n")
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs").mkdir()
    for i in range(10):
        Image.fromarray(np.full((32, 32), i, np.uint8)).save(folder / "imgs" / f"{i}.png")
    (folder / "metadata" / "0.npy").write_text("".join(f"imgs {i}.png {i} {i % 2} x\n" for i in range(10)))
    for task in ("retrieval", "listops", "pathfinder"):
        data.main([task, "--release", str(tmp_path), "--out", str(tmp_path / task)])
    assert symbols(tmp_path / "retrieval", "valid", "input1") == [[100, 101]] * 2
    assert symbols(tmp_path / "listops", "test") == [[data.SYMBOLS.index(x) for x in "[MAX 2 9 ]".split()]]
    paths = tmp_path / "pathfinder"
    assert [row[0] for row in symbols(paths, "test")] == [9] and len(symbols(paths, "train")) == 8


def test_a_quick_comparison_and_a_picture_of_its_model(imported_already, tmp_path, capsys):
    words = ["--quick", "--models", "flow", "softmax", "--seeds", "1", "--out", str(tmp_path / "new")]
    compare.main(words)
    first = json.loads((tmp_path / "new" / "results.json").read_text())
    assert [row["model"] for row in first] == ["flow", "softmax"] and first[0]["parameters"] == 44_234
    logged = runs.points(tmp_path / "new/runs/flow.1/train.log")
    assert sorted(logged[logged.split == "valid"].num_updates) == [*range(1, 9)]  # 7 ends an epoch
    assert "38.70" in (tmp_path / "new" / "results.md").read_text()
    log = (tmp_path / "new/runs/flow.1/train.log").read_bytes()
    compare.main(words)  # everything is complete
    assert (tmp_path / "new/runs/flow.1/train.log").read_bytes() == log
    checkpoint = tmp_path / "new/runs/flow.1/checkpoints/checkpoint_best.pt"
    words = ["--checkpoint", str(checkpoint), "--data", str(tmp_path / "new" / "data"), "--output"]
    pictures.main([*words, str(tmp_path / "p.png")])
    assert Image.open(tmp_path / "p.png").width > 500 and Image.open(tmp_path / "new" / "results.png").width > 1000
    with pytest.raises(SystemExit):
        pictures.main([*words, str(tmp_path / "p.png")])
    assert "p.png exists" in capsys.readouterr().err


def test_fairseq_takes_the_command_of_every_row(monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(runs, "train_all", lambda plan, *_: planned.extend(plan) or exit())
    words = f"--task retrieval --data data --seeds 1 --layers 2 --out {tmp_path}".split()
    with pytest.raises(SystemExit):
        compare.main([*words, "--models", *compare.ROWS])
    assert [one.model for one in planned] == list(compare.ROWS)
    for one in planned:
        words = list(map(str, one.command[2:]))
        parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), words)
        assert parsed.arch.endswith("_lra_retrieval") and parsed.encoder_layers == (4 if one.model == "flash" else 2)
