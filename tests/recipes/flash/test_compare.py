"""The comparison: equal models, one command for all, and tables that say what was and what was not measured."""

import json

import pytest
from PIL import Image

from recipes.flash import compare, measurements, widths
from recipes.flash.measurements import Comparison, Measurement, Plan
from recipes.flash.models import MODELS, SHAPE
from recipes.flash.subword_text import SplitCounts
from recipes.shared import comparison, fairseq_log, fairseq_training
from recipes.shared.commands import CommandFailed, Finished
from recipes.shared.tables import Run

RUN = Run("python -m recipes.flash.compare", "2 CPU cores", "Python 3.11", "2026-11-20", 20.0)
PLAN = Plan(["flash_lm", "performer_lm", "transformer_pp_lm"], [512, 4096], 100, 4096, 2000)
COUNTS = {"train": SplitCounts(9, 0, 900, 5000, 1800), "valid": SplitCounts(2, 0, 100, 500, 210)}


def measurement(architecture, length, speed):
    """A measurement with these numbers."""
    return Measurement(architecture, length, 655_201, 123.456, speed, 2**30, 60.0, "fairseq-train ...")


@pytest.fixture
def found():
    """A comparison that is not complete."""
    measured = [
        measurement("flash_lm", 512, 4096.0),
        measurement("flash_lm", 4096, 4000.0),
        measurement("performer_lm", 512, 2000.0),
        measurement("transformer_pp_lm", 512, 8192.0),
        measurement("transformer_pp_lm", 4096, 2048.0),
    ]
    return Comparison(PLAN, COUNTS, measured, {("performer_lm", 4096): "out of memory"})


def test_tables(found):
    perplexity, seconds, memory = measurements.tables(found)
    assert perplexity.header == ("model", "architecture", "parameters", "512", "4,096")
    assert perplexity.rows[0] == ("FLASH", "flash_lm", "655,201", "123.46", "123.46")
    assert [row[2:] for row in seconds.rows] == [("1.000", "1.024"), ("2.048", "-"), ("0.500", "2.000")]
    assert [row[2:] for row in memory.rows] == [("1,024", "1,024"), ("1,024", "-"), ("1,024", "1,024")]
    assert "210 subwords of a vocabulary of 2,000; to the power of 2.1000" in perplexity.notes[0]
    assert "100 updates of 4,096 tokens each; one run, one seed" in perplexity.notes[1]
    assert seconds.notes[1:] == [
        "FLASH against Transformer++: at least as fast from 4,096 tokens on",
        "Performer against Transformer++: slower at the longest length",
    ]
    assert memory.notes[1:] == ["not measured: performer_lm at 4,096: out of memory"]


def test_parameters_that_depend_on_the_length_are_both_shown(found):
    found.measured[1] = found.measured[1]._replace(parameters=655_300)
    assert measurements.tables(found)[0].rows[0][2] == "655,201 to 655,300"


def test_nothing_measured_yet(tmp_path):
    nothing = Comparison(PLAN, COUNTS, [], {})
    plain = comparison.write(tmp_path / "out", measurements.report(nothing), RUN)
    assert plain.count("not measured: ") == 6
    assert not (tmp_path / "out" / "speed.png").exists()


def test_written_files(found, tmp_path):
    plain = comparison.write(tmp_path / "out", measurements.report(found), RUN)
    assert (tmp_path / "out" / "results.txt").read_text() == plain + "\n"
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["run"]["date"] == "2026-11-20"
    assert content["measured"][0]["command"] == "fairseq-train ..."
    assert content["not_measured"] == [{"architecture": "performer_lm", "length": 4096, "reason": "out of memory"}]
    rows = (tmp_path / "out" / "results.md").read_text().splitlines()
    assert "| FLASH | flash_lm | 655,201 | 123.46 | 123.46 |" in rows
    assert all(row.endswith(" |") for row in rows if row.startswith("|"))
    with Image.open(tmp_path / "out" / "speed.png") as image:
        assert image.width > 600


def test_commands_differ_in_the_model_and_the_length_alone(tmp_path):
    commands = [
        compare.train_command(tmp_path, tmp_path, PLAN, architecture, length, 8)
        for architecture in ("transformer_pp_lm", "performer_lm")
        for length in (512, 4096)
    ]
    for command in commands:
        for option in ("--arch", "--tokens-per-sample"):
            command[command.index(option) + 1] = "X"
    assert all(command == commands[0] for command in commands)


def test_units_are_half_a_layer():
    def value(architecture, option):
        arguments = SHAPE.arguments(architecture, 8)
        return arguments[arguments.index(option) + 1]

    assert int(value("flash_lm", "--decoder-layers")) == 2 * int(value("performer_lm", "--decoder-layers"))
    assert "--decoder-attention-heads" not in SHAPE.arguments("flash_quad_lm", 8)


def test_equal_parameters(tmp_path):
    (tmp_path / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(1996)))
    found = widths.equal_widths(tmp_path, ["flash_lm", "performer_lm", "transformer_pp_lm"], 512)
    counts = {
        name: widths.count_parameters(tmp_path, SHAPE.arguments(name, width), 512) for name, width in found.items()
    }
    assert max(counts.values()) < 1.02 * min(counts.values())


def test_parameters_that_cannot_be_equal(tmp_path, monkeypatch, capsys):
    (tmp_path / "dict.txt").write_text("a 1\n")
    monkeypatch.setattr(widths, "TOLERANCE", 0.0)
    assert widths.main([str(tmp_path), "--archs", "flash_lm"]) == 1
    assert "widths: flash_lm has" in capsys.readouterr().err


TRAIN = '| train_inner | {"epoch": 1, "loss": "7.0", "wps": "%d", "num_updates": "%d", "wall": "5"}\n'
VALID = '| valid | {"epoch": 1, "valid_loss": "7.5", "valid_ppl": "%s", "valid_num_updates": "%d"}\n'
PARAMETERS = "num. shared model params: 655,201 (num. trained: 655,201)\n"


def canned(monkeypatch, tmp_path, answer):
    """Let every training print ``answer(command)``, and the text be prepared already."""

    def run(command, log, on_line=None, **options):
        log.parent.mkdir(exist_ok=True)
        text = answer(command)
        log.write_text("$ command\n" + text, encoding="utf-8")
        for line in text.splitlines(keepends=True) if on_line else ():
            on_line(line)
        return Finished(60.0, 2**30)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(fairseq_training, "run", run)
    monkeypatch.setattr(compare, "cut_trial", lambda *_: {})
    monkeypatch.setattr(compare, "to_data_bin", lambda *_: {"train": COUNTS["train"], "valid": COUNTS["valid"]})
    (tmp_path / "any.txt").write_text("x")
    return [
        "--file",
        str(tmp_path / "any.txt"),
        "--out",
        str(tmp_path / "out"),
        "--archs",
        "flash_lm,transformer_pp_lm",
    ]


def answers(command):
    """What the two commands print."""
    if "recipes.flash.widths" in command:
        return 'a warning\n{"flash_lm": 232, "transformer_pp_lm": 344}\n'
    return PARAMETERS + "".join(TRAIN % (4096, i) for i in (5, 10, 15)) + VALID % (181.02, 15)


def test_from_logs_to_a_table(monkeypatch, tmp_path, capsys):
    arguments = canned(monkeypatch, tmp_path, answers)
    assert compare.main([*arguments, "--lengths", "128,64", "--updates", "15"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(one["architecture"], one["length"]) for one in found["measured"]] == [
        ("flash_lm", 64),
        ("transformer_pp_lm", 64),
        ("flash_lm", 128),
        ("transformer_pp_lm", 128),
    ]
    assert found["measured"][0]["perplexity"] == 181.02
    assert "inner widths for equal parameters: flash_lm 232, transformer_pp_lm 344" in capsys.readouterr().out


def test_one_failure_is_noted_and_the_rest_measured(monkeypatch, tmp_path, capsys):
    def answer(command):
        if "flash_lm" in command and "recipes.flash.widths" not in command:
            raise CommandFailed("fairseq-train\nended with exit status 1:\nRuntimeError: no memory\n")
        return answers(command)

    arguments = canned(monkeypatch, tmp_path, answer)
    assert compare.main([*arguments, "--lengths", "64", "--updates", "15"]) == 1
    assert "not measured: flash_lm at 64: RuntimeError: no memory" in capsys.readouterr().out


def test_interrupted_shows_what_there_is(monkeypatch, tmp_path, capsys):
    def answer(command):
        if "transformer_pp_lm" in command and "recipes.flash.widths" not in command:
            raise KeyboardInterrupt
        return answers(command)

    arguments = canned(monkeypatch, tmp_path, answer)
    assert compare.main([*arguments, "--lengths", "64", "--updates", "15"]) == 1
    assert "not measured: transformer_pp_lm at 64\n" in capsys.readouterr().out


def test_a_training_without_its_validation_is_none(monkeypatch, tmp_path):
    arguments = canned(monkeypatch, tmp_path, lambda c: answers(c) if "recipes.flash.widths" in c else PARAMETERS)
    assert compare.main([*arguments, "--lengths", "64", "--updates", "15"]) == 1
    reason = json.loads((tmp_path / "out" / "results.json").read_text())["not_measured"][0]["reason"]
    assert "validation" in reason and reason.endswith("update 15")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "64,8192"], "8192; allowed: at most the 4096 "),
        (["--lengths", "0"], "0; allowed: at least 1"),
        (["--archs", "flash_lm,gpt"], f"gpt; allowed: {', '.join(MODELS)}"),
    ],
)
def test_refused_options(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        compare.main(["--file", "x", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--file", "none"], "compare: --file is none"),
        (["--updates", "2"], "compare: --updates is 2; allowed: at least 3"),
        (["--lengths", "512"], "compare: --file has 210 tokens"),
    ],
)
def test_clear_failures(monkeypatch, tmp_path, capsys, arguments, message):
    assert compare.main([*canned(monkeypatch, tmp_path, answers), *arguments]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_end_to_end(tmp_path):
    words = [a + b + c for a in "bdgk" for b in ("ar", "el", "io") for c in ("mon", "tas", "s")]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(1, 9)) for i in range(600)]
    (tmp_path / "any.txt").write_text("".join(line + "\n" for line in lines))
    arguments = ["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out"), "--vocabulary", "280"]
    assert compare.main([*arguments, "--archs", "flash_lm", "--lengths", "64", "--updates", "4"]) == 0
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    (one,) = found["measured"]
    assert 1 < one["perplexity"] < 1e6  # nothing is learned in four updates
    assert found["not_measured"] == []
    points = fairseq_log.parse_training((tmp_path / "out" / "logs" / "flash_lm.64.log").read_text().splitlines())
    assert [point.split for point in points] == ["train_inner"] * 4 + ["valid"]
