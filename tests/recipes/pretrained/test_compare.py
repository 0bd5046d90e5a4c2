"""The comparison of starts: what its commands share, what its models begin with, and its tables."""

import json
from pathlib import Path

import pytest
import torch

from recipes.pretrained import compare, images, results, text
from recipes.pretrained.results import RANDOM, STOCK, Half, Outcome
from recipes.shared import fairseq_training
from recipes.shared.commands import CommandFailed, Finished
from recipes.shared.tables import Run

RUN = Run("python -m recipes.pretrained.compare", "2 CPU cores", "Python 3.11", "2026-11-21", 9.0)
TEXT = Half("Text", "bits", "transformer_lm after 9 updates", 6.5, 7, [Outcome("flowformer_lm", STOCK, 8.25, 6.75)])
IMAGES = Half("Images", "nats", "deit", 0.125, 7, [Outcome("daft_conv_s_h16", RANDOM, 2.3, 0.5, 91.25)])


def test_tables_and_files(tmp_path):
    plain = results.write(tmp_path, [TEXT, IMAGES], RUN)
    rows = (tmp_path / "results.md").read_text().splitlines()
    assert "| flowformer_lm | stock weights | 8.250 | 6.750 |" in rows
    assert "| daft_conv_s_h16 | random weights | 2.300 | 0.500 | 91.2 |" in rows
    assert "| model | started from | before | after 7 updates | top-1, % |" in rows
    assert (tmp_path / "results.txt").read_text() == plain + "\n"
    for said in ("transformer_lm after 9 updates, has 6.500", "not the same model", "2 CPU cores", "2026-11-21"):
        assert said in plain
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["halves"][0]["outcomes"] == [
        dict(model="flowformer_lm", start=STOCK, before=8.25, after=6.75, top1=None)
    ]
    assert content["run"]["command"] == RUN.command


def test_text_commands_differ_in_start_model_and_updates_alone(tmp_path, monkeypatch):
    commands = []

    def loss(command, log, updates):
        commands.append(command)
        return float(len(commands))

    monkeypatch.setattr(text, "validation_loss", loss)
    monkeypatch.setattr(text, "cut_trial", lambda *_: {})
    monkeypatch.setattr(text, "to_data_bin", lambda *_: {})
    half = text.compare_text(tmp_path, tmp_path / "any.txt", 9, 7, 300)
    assert [(one.model, one.start, one.before, one.after) for one in half.outcomes] == [
        ("flowformer_lm", STOCK, 2.0, 3.0),
        ("flowformer_lm", RANDOM, 4.0, 5.0),
        ("linear_lm", STOCK, 6.0, 7.0),
        ("linear_lm", RANDOM, 8.0, 9.0),
    ]
    assert half.source_loss == 1.0

    def value(command, option):
        return command[command.index(option) + 1]

    source, ours = commands[0], commands[1:]
    written = Path(value(source, "--save-dir"))  # the folder gets its name when it is whole
    checkpoint = str(tmp_path / written.name / "checkpoint_last.pt")
    assert written.is_relative_to(tmp_path)
    assert [value(c, "--finetune-from-model") for c in ours if "--finetune-from-model" in c] == [checkpoint] * 4
    assert ["--finetune-from-model" in c for c in ours] == [True, True, False, False] * 2
    assert [(value(c, "--max-update"), value(c, "--lr")) for c in ours] == [("1", "0.0"), ("7", "0.003")] * 4
    shape = [str(item) for item in text.SHAPE]
    assert all(" ".join(shape) in " ".join(command) for command in commands)
    assert "--no-save" not in source and all("--no-save" in command for command in ours)


def test_a_training_without_its_validation_is_refused(tmp_path, monkeypatch):
    def run(command, log, on_line=None, **options):
        log.write_text('| valid | {"epoch": 1, "valid_loss": "7.5", "valid_ppl": "181", "valid_num_updates": "5"}\n')
        return Finished(1.0, 1)

    monkeypatch.setattr(fairseq_training, "run", run)
    assert text.validation_loss([], tmp_path / "x.log", 5) == 7.5
    with pytest.raises(ValueError, match="x.log .*update 6"):
        text.validation_loss([], tmp_path / "x.log", 6)


@pytest.mark.parametrize("name", list(images.ARGUMENTS)[1:])
def test_image_models_begin_with_what_is_said(name, tmp_path):
    stock = images.build(images.SOURCE)
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


def test_images_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setitem(images.SHAPE, "depth", 1)
    half = images.compare_images(tmp_path, 3, 1)
    assert [(one.model, one.start) for one in half.outcomes] == [
        (name, start) for name in list(images.ARGUMENTS)[1:] for start in (STOCK, RANDOM)
    ]
    assert half.updates == 22 and half.source_loss < 2.29  # ln 10 = 2.303 is chance
    for stock, fresh in zip(half.outcomes[::2], half.outcomes[1::2]):
        assert stock.before != fresh.before and fresh.before == pytest.approx(2.3, abs=0.1)
        assert all(one.after != one.before and 0.0 < one.top1 <= 100.0 for one in (stock, fresh))
    untrained = images.build(fresh.model)
    _, hold = images.loaders(tmp_path / images.DIGITS, untrained)
    assert fresh.before == pytest.approx(images.validate(untrained, hold)["loss"])


def test_text_end_to_end(tmp_path, imported_already, monkeypatch):
    words = [a + b + c for a in "bdgk" for b in ("ar", "el", "io") for c in ("mon", "tas", "s")]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(1, 9)) for i in range(600)]
    (tmp_path / "any.txt").write_text("".join(line + "\n" for line in lines))
    monkeypatch.setattr(text, "MODELS", ("flowformer_lm",))
    monkeypatch.setattr(text, "TOKENS_PER_UPDATE", 512)
    half = text.compare_text(tmp_path / "out", tmp_path / "any.txt", 12, 3, 280)
    stock, fresh = half.outcomes
    assert half.source_loss < fresh.before - 0.3
    assert stock.before < fresh.before - 0.1  # it was started from what the stock model learned
    assert fresh.after < fresh.before


def test_library_is_the_default(tmp_path):
    path = compare.library_text(tmp_path / "x" / "library.txt")
    assert path.stat().st_size > 1_000_000
    assert "import" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments, message", [(["--file", "none"], "compare: --file is none")])
def test_clear_failures(arguments, message, tmp_path, capsys):
    assert compare.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_a_command_that_fails_is_said(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise CommandFailed("fairseq-train ended with exit status 1")

    monkeypatch.setattr(compare, "compare_text", fail)
    (tmp_path / "any.txt").write_text("x\n")
    assert compare.main(["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out")]) == 1
    assert "compare: fairseq-train ended with exit status 1" in capsys.readouterr().err


def test_everything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "compare_text", lambda *_: TEXT)
    monkeypatch.setattr(compare, "compare_images", lambda *_: IMAGES)
    (tmp_path / "any.txt").write_text("x\n")
    assert compare.main(["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out")]) == 0
    assert "daft_conv_s_h16" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.json").exists()
