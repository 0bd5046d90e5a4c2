"""The comparison of starts: what its trainings share, what models begin with, and once from a text to the tables."""

import json

import pytest
import torch

from recipes.pretrained import compare, images, text
from recipes.shared import commands, digits, fairseq_training

NAMES = [f"{model}.{start}" for model in ("flowformer_lm", "linear_lm") for start in ("stock", "random")]


@pytest.mark.parametrize("name", images.NAMES[::2])
def test_image_models_begin_with_what_is_said(name, tmp_path):
    name, source = name.split(".")[0], images.SOURCE.split(".")[0]
    stock = images.build(source)
    with torch.no_grad():
        stock.head.weight.normal_()
    torch.save(stock.state_dict(), tmp_path / "stock.pth")
    started, fresh = images.build(name, tmp_path / "stock.pth"), images.build(name)
    for parameter in ("head.weight", "blocks.3.mlp.fc1.weight", "patch_embed.proj.weight"):
        assert torch.equal(started.state_dict()[parameter], stock.state_dict()[parameter])
    again = images.build(name)
    for parameter, tensor in fresh.state_dict().items():
        assert torch.equal(again.state_dict()[parameter], tensor)
    assert not torch.equal(fresh.head.weight, stock.head.weight)


def test_library_is_the_default(tmp_path):
    path = compare.library_text(tmp_path / "x" / "library.txt")
    assert path.stat().st_size > 1_000_000
    assert "import" in path.read_text(encoding="utf-8")
    written = path.stat().st_mtime_ns
    assert compare.library_text(path).stat().st_mtime_ns == written


def test_the_budget_belongs_to_the_settings(tmp_path):
    """With the digest of the text; ``--quick`` has another budget."""
    (tmp_path / "any.txt").write_text("x\n")
    arguments = ["--file", str(tmp_path / "any.txt")]
    usual, quick = (compare.EXPERIMENT.parse([*arguments, *more]) for more in ([], ["--quick"]))
    assert (usual.source_updates, usual.updates, usual.source_epochs, usual.epochs) == (300, 200, 16, 9)
    assert quick.settings().items() >= {"updates": 5, "epochs": 1}.items()
    before = usual.settings()
    (tmp_path / "any.txt").write_text("y\n")
    assert {name for name, value in usual.settings().items() if before[name] != value} == {"text_sha256"}


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_from_a_text_to_the_tables(tmp_path, imported_already, monkeypatch, capsys):
    """Of a tiny size. Trainings differ in start, model and updates alone; the second time nothing runs."""
    words = [a + b + c for a in "bdgk" for b in ("ar", "el", "io") for c in ("mon", "tas", "s")]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(1, 9)) for i in range(600)]
    (tmp_path / "any.txt").write_text("".join(line + "\n" for line in lines))
    monkeypatch.setattr(text, "TOKENS_PER_UPDATE", 512)
    monkeypatch.setitem(images.SHAPE, "depth", 1)
    every = digits.load_digits(return_X_y=True)
    monkeypatch.setattr(digits, "load_digits", lambda **_: tuple(x[:500] for x in every))
    out = tmp_path / "out"
    arguments = ["--file", str(tmp_path / "any.txt"), "--out", str(out), "--quick", "--vocabulary", "280"]
    assert compare.main(arguments) == 0
    content = json.loads((out / "results.json").read_text())
    records = {record["model"]: record for record in content["results"]}
    assert list(records) == [text.SOURCE, *NAMES, images.SOURCE, *images.NAMES]
    assert content["stock"] == {name: records[name]["after"] for name in (text.SOURCE, images.SOURCE)}
    for stock, random in zip(NAMES[::2], NAMES[1::2]):
        # It was started from what the stock model learned.
        assert records[stock]["before"] < records[random]["before"] - 0.1
        assert records[stock]["after"] != records[stock]["before"] and records[random]["start"] == "random"
    for name in images.NAMES:
        assert records[name]["after"] != records[name]["before"] and 0.0 < records[name]["top1"] <= 100.0
    checkpoint = str(out / "runs" / text.SOURCE / "checkpoints" / "checkpoint_last.pt")
    shape = " ".join(map(str, text.SHAPE))
    for name in NAMES:
        for log, updates, rate in (("train.log", "5", "0.003"), ("before.log", "1", "0.0")):
            command = (out / "runs" / name / log).read_text().splitlines()[0].split()
            assert (value(command, "--max-update"), value(command, "--lr")) == (updates, rate)
            assert shape in " ".join(command) and "--no-save" in command
            assert (checkpoint in command) == name.endswith(".stock")
    untrained = images.build("daft_conv_s_h16")
    _, hold = images.loaders(out / compare.DIGITS, untrained)
    assert records["daft_conv_s_h16.random"]["before"] == pytest.approx(images.validate(untrained, hold)["loss"])
    shown = capsys.readouterr().out
    monkeypatch.setattr(commands, "subprocess", None)
    monkeypatch.setattr(images, "train", None)
    assert compare.main(arguments) == 0
    assert json.loads((out / "results.json").read_text())["results"] == content["results"]
    assert "| stock weights" in (out / "results.md").read_text() and "after 2 updates" in shown
    assert compare.main([*arguments[:-1], "300"]) == 1
    assert "vocabulary is 300; allowed in" in capsys.readouterr().err


def test_without_its_stock_model_a_half_is_not_trained(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise commands.CommandFailed("fairseq-train ended with exit status 1:\nRuntimeError: no memory\n")

    monkeypatch.setattr(fairseq_training, "run", fail)
    compared = text.compare_text(tmp_path / "runs", tmp_path / "data-bin", 9, 7)
    assert compared.failed == {text.SOURCE: "RuntimeError: no memory"} and compared.status == 1
    assert not compared.outcomes
