"""All rows of a table in small: the tables of image models, larger images, and language models, once each."""

import json
from pathlib import Path

import pytest

from recipes.images import read_images
from recipes.papers import images, language, larger_images
from recipes.papers.images import scaled_window
from tests.recipes.small_images import write_few

SMALL = "--quick --side 8 --patch 4 --stage-patch 2 --width 8 --layers 2 --heads 2".split()


@pytest.mark.parametrize(
    ("table", "models", "first"),
    [
        ("flowformer 5", 14, "FLOWFORMER"),
        ("daft 2", 8, "DAFT-conv, Heads 384, Epochs 300"),
        ("daft 8", 4, "with q, 15"),
    ],
)
def test_image_models(table: str, models: int, first: str, tmp_path: Path, capsys) -> None:
    """Every row is trained, the best published one first; a second call trains none; other sizes need a folder."""
    folder, out = write_few(tmp_path / "images"), tmp_path / "out"
    command = [*table.split(), "--data-dir", str(folder), "--out", str(out), *SMALL]
    images.main(command)
    results = json.loads((out / "results.json").read_text())
    assert len(results) == models and results[0]["model"] == first and float(results[0]["published"]) > 80
    assert all(0 <= result["top1"] <= 100 for result in results)
    assert "p = " in capsys.readouterr().out
    images.main(command)
    assert json.loads((out / "results.json").read_text()) == results
    with pytest.raises(SystemExit, match="Choose another --out"):
        images.main([*command, "--width", "16"])
    with pytest.raises(SystemExit, match="--data-dir is .*; allowed: a folder with train and validation"):
        images.main([*table.split(), "--data-dir", str(tmp_path), "--out", str(tmp_path / "another")])
    with pytest.raises(SystemExit):
        images.main(["daft", "4", "--out", str(out)])
    assert "TABLE is 4; allowed: " in capsys.readouterr().err
    if table != "daft 2":
        with pytest.raises(SystemExit):
            images.main([*command, "--speed"])
        assert "--speed is given" in capsys.readouterr().err


def test_rows_that_are_chosen_have_their_best_rate(tmp_path: Path, capsys) -> None:
    """The best one of a part of the training images; rows that the paper has not are trained if they are named."""
    folder, out = write_few(tmp_path / "images"), tmp_path / "out"
    command = ["flowformer", "5", "--data-dir", str(folder), "--out", str(out), *SMALL[1:], "--rates", "1e-9", "0.02"]
    command += ["--epochs", "30", "--seeds", "1"]
    models = ["flowformer", "FLOWFORMER W/O BOTH"]
    images.main([*command, "--models", *models])
    results = json.loads((out / "results.json").read_text())
    assert [result["model"] for result in results] == ["FLOWFORMER", "FLOWFORMER W/O BOTH"]
    trials = [json.loads(path.read_text()) for path in (out / "runs").glob("*rate*.json")]
    assert len(trials) == 4
    for result in results:
        of_rate = {trial["rate"]: trial["top1"] for trial in trials if trial["of"] == result["model"]}
        assert of_rate[result["rate"]] == max(of_rate.values()) > min(of_rate.values())
    with pytest.raises(SystemExit):
        images.main([*command, "--models", "nosuch"])
    assert "--models has no nosuch; allowed: FULL ATTN.;" in capsys.readouterr().err


def test_rates_are_chosen_on_training_images_that_were_not_learned(monkeypatch, tmp_path: Path) -> None:
    folder, seen = write_few(tmp_path / "images"), []
    monkeypatch.setattr(images, "fit", lambda model, learned, *_: seen.append(learned.pixels))
    monkeypatch.setattr(images, "top1", lambda model, tested: seen.append(tested.pixels) or 50.0)
    command = ["flowformer", "5", "--data-dir", str(folder), "--out", str(tmp_path / "out"), *SMALL]
    images.main([*command, "--models", "flowformer", "--rates", "0.1"])
    learned, tested = (pixels.flatten(1).tolist() for pixels in seen[:2])
    assert len(tested) == round(len(learned + tested) / 5)
    assert sorted(learned + tested) == sorted(read_images(folder, 8)["train"].pixels.flatten(1).tolist())


@pytest.mark.usefixtures("imported_already")
@pytest.mark.parametrize(
    ("program", "table", "first", "published"),
    [
        (images, "daft 2 --models DeiT-S DAFT-full", "DeiT-S", ["1010", "1011", "2.6"]),
        (larger_images, "--larger 12 --sides 8 --windows 1", "Deit base", ["89.6", "98.5", "8.9"]),
        (language, "daft 5 --models Transformer DAFT-conv-64", "Transformer", ["1.42", "1.77", "11.1"]),
        (language, "daft 4 --models sparse transformer DAFT-full", "Transformer", ["1.35", "1.68", "10.2"]),
    ],
)
def test_speeds_are_beside_the_published_ones(program, table, first, published, tmp_path: Path, capsys) -> None:
    """Nothing is trained; rows have the paper's order, so that ratios are over its softmax model."""
    text, out = tmp_path / "any.txt", tmp_path / "out"
    text.write_text("".join(f"line {i} of a text, and some more words\n" for i in range(400)))
    small = "--quick --width 8 --heads 2 --layers 1 --batch-tokens 64 --tokens-per-sample 32 --file".split()
    data = ["--data-dir", str(write_few(tmp_path / "images")), *SMALL] if program is not language else [*small, text]
    program.main([*table.split(), *map(str, data), "--speed", "--out", str(out)])
    shown = capsys.readouterr().out
    rows = json.loads((out / "speed" / "results.json").read_text())
    assert rows[0]["model"] == first and len(rows) == 2 and not [*out.rglob("runs")]
    assert all(value > 0 for row in rows for value in list(row.values())[1:])
    assert all(f" {number} " in shown for number in published)
    ratio = rows[1]["MiB"] / rows[0]["MiB"]
    assert f" {ratio:.2f} " in shown


def test_windows_are_the_same_part_of_the_grid() -> None:
    assert [scaled_window(window, 4 / 14) for window in (7, 11, 15)] == [3, 3, 5]
    assert [scaled_window(window, 7 / 14) for window in (7, 11, 15)] == [3, 5, 7]


def test_larger_images(tmp_path: Path) -> None:
    """Each model is evaluated at every size; the fine-tuned one starts from the softmax model's weights."""
    folder, out = write_few(tmp_path / "images"), tmp_path / "out"
    sizes = "--larger 12 --sides 8 16 --windows 1 3".split()
    larger_images.main(["--data-dir", str(folder), "--out", str(out), *SMALL, *sizes])
    results = {result["model"]: result for result in json.loads((out / "results.json").read_text())}
    assert len(results) == 10 and (out / "results.png").stat().st_size > 10_000
    assert {side for side in results["DeiT"] if side.isdigit()} == {"8", "12", "16"}
    assert {name for name, result in results.items() if result["trained at"] == 12} == {
        *("DeiT, larger", "DAFT-conv ft", "DAFT-conv rand")
    }
    assert results["DAFT-conv ft"]["parameters"] == results["DAFT-conv rand"]["parameters"]


@pytest.mark.usefixtures("imported_already")
@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            "daft 5 --models Transformer DAFT-conv-64",
            ["last update, train bits", "published Test bpc", "1.137", "0.854"],
        ),
        ("flash 1 --masked --models original no", ["perplexity", "4.23", "4.58"]),
        ("daft 4 --pixels 4 --models daft-full", ["test bits per pixel", "2.89"]),
    ],
)
def test_language_models(table: str, words: list[str], tmp_path: Path, capsys) -> None:
    """Published numbers are beside each row, which is evaluated eight times, also where an epoch ends."""
    text = tmp_path / "any.txt"
    text.write_text("".join(f"line {i} of a text, and some more words\n" for i in range(400)))
    images_of = ["--data-dir", str(write_few(tmp_path / "images"))] if "--pixels" in table else ["--file", str(text)]
    sizes = "--quick --limit 40 --width 8 --heads 2 --layers 1 --batch-tokens 256 --tokens-per-sample 32".split()
    language.main([*table.split(), *images_of, "--out", str(tmp_path / "out"), *sizes])
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert all([update for update, _ in result["curve"]] == [*range(1, 9)] for result in results)
    commands = [path.read_text() for path in (tmp_path / "out" / "runs").glob("*/command.txt")]
    assert all(("--activation-fn gelu" in command) == ("daft" in table) for command in commands)


@pytest.mark.parametrize(
    "wrong",
    [
        "flash 3 --file x",
        "flash 1",
        "daft 5 --masked --file x",
        "flash 1 --file x --models nosuch",
        "flash 1 --file x --speed",
    ],
)
def test_what_a_table_has_not_is_refused(wrong: str, capsys) -> None:
    with pytest.raises(SystemExit):
        language.main(wrong.split())
    assert "allowed: " in capsys.readouterr().err
