"""The comparison: equal models, one command for all, and tables that say what was and what was not measured."""

import dataclasses
import json
from pathlib import Path

import pytest
from PIL import Image

from recipes.flash import compare, measurements, widths
from recipes.flash.compare import FlashModels
from recipes.flash.measurements import Comparison
from recipes.flash.models import ALL_MODELS, FIGURES, MASKED_MODELS, SHAPE, Shape
from recipes.shared import comparison, fairseq_log, fairseq_training
from recipes.shared.commands import Finished
from recipes.shared.comparison import Report, Results
from recipes.shared.experiment import Data, Record
from recipes.shared.json_files import write_json
from recipes.shared.subword_text import SplitCounts
from recipes.shared.tables import Run, Table

RUN = Run("python -m recipes.flash.compare", "2 CPU cores", "Python 3.11", "2026-11-20", 20.0)
COUNTS = {"train": SplitCounts(9, 0, 900, 5000, 1800), "valid": SplitCounts(2, 0, 100, 500, 210)}
FACTS = {"text": {"valid": {"tokens": 210, "tokens_per_word": 2.1}}, "widths": {}}


def options_of(archs: str | None, *more: str) -> FlashModels:
    """Some models, or those of another option; 100 updates."""
    return compare.EXPERIMENT.parse(["--file", "x", *(["--archs", archs] if archs else []), "--updates", "100", *more])


def planned_words(options: FlashModels, width: int = 8) -> list[list[str]]:
    """The arguments of each training, with one inner width for all."""
    data = Data(Path("data-bin"), {"widths": dict.fromkeys(ALL_MODELS, width)})
    return [[str(word) for word in one.training.arguments] for one in compare.planned(options, data)]


THREE = options_of("flash_lm,performer_lm,transformer_pp_lm", "--lengths", "512,4096")


def record(model, length, speed, perplexity=123.456, seed=1, parameters=655_201) -> Record:
    """A record with these numbers, whose perplexity was three times as high after half of 100 updates."""
    curve = [[50, 3 * perplexity], [100, perplexity]]
    known = {"model": model, "seed": seed, "parameters": parameters, "seconds": 60.0, "peak_bytes": 2**30}
    known |= {"command": "fairseq-train ...", "length": length, "perplexity": perplexity}
    return known | {"tokens_per_second": speed, "curve": curve}


def report(options: FlashModels, records: list[Record], failed: dict[str, str] | None = None) -> Report:
    """What is shown of records."""
    compared = Results(records, failed or {})
    facts = FACTS | measurements.not_measured(options, Data(Path("data-bin"), FACTS), compared)
    return compare.EXPERIMENT.report(options, facts, compared)


def tables(options: FlashModels, records: list[Record]) -> list[Table]:
    """The tables of records."""
    return report(options, records).tables


SPEEDS = {"flash_lm": 8192.0, "transformer_pp_lm": 2048.0}
RECORDS = [
    record("flash_lm", 512, 4096.0),
    record("flash_lm", 4096, 4000.0),
    record("performer_lm", 512, 2000.0),
    record("transformer_pp_lm", 512, 8192.0),
    record("transformer_pp_lm", 4096, 2048.0),
]


def test_tables():
    shown = report(THREE, RECORDS, {"performer_lm.4096.1": "out of memory"}).tables
    perplexity, seconds, memory, ratios, speedup = shown
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
    assert ratios.rows[:2] == [("FLASH", "1.00 / 2.00", "1.00 / 0.51"), ("Performer", "1.00 / 4.10", "-")]
    # Transformer++ needs 100 steps of 0.5 s at 512 tokens, and FLASH as many of 1 s for the same perplexity.
    assert speedup.rows == [("FLASH", "0.50", "1.95"), ("Performer", "0.24", "-")]


def test_seconds_may_be_of_models_in_turns(tmp_path):
    """Trainings one after the other are slowed down by other work, but not alike."""
    timed = [{"model": name, "length": 512, "tokens_per_second": speed} for name, speed in SPEEDS.items()]
    plan = {"width": SHAPE.width, "layers": SHAPE.layers, "heads": SHAPE.heads, "vocabulary": 2000}
    write_json(tmp_path / "steps.json", {"plan": plan, "results": timed})
    chosen = options_of(",".join(SPEEDS), "--lengths", "512", "--steps", str(tmp_path / "steps.json"))
    facts = FACTS | {"not_measured": [], "steps": compare.read_steps(chosen)}
    shown = compare.EXPERIMENT.report(chosen, facts, Results([record(name, 512, 1.0) for name in SPEEDS], {})).tables
    assert [row[2:] for row in shown[1].rows] == [("0.500",), ("2.000",)] and "in turns" in shown[1].notes[0]
    assert shown[3].rows == [("FLASH", "1.00 / 0.25"), ("Transformer++", "1.00 / 1.00")]
    with pytest.raises(ValueError, match="flash_lm at 1024"):
        compare.read_steps(dataclasses.replace(chosen, lengths=[512, 1024]))
    with pytest.raises(ValueError, match="--width is 64; allowed: 128"):
        compare.read_steps(dataclasses.replace(chosen, width=64))


def test_several_seeds():
    options = options_of("flash_quad_lm,flash_lm", "--lengths", "512", "--seeds", "2")
    values = [("flash_quad_lm", 100.0, 1), ("flash_quad_lm", 110.0, 2), ("flash_lm", 101.0, 1)]
    records = [record(name, 512, 4096.0, perplexity, seed) for name, perplexity, seed in values]
    perplexity, _, memory, added = tables(options, records)
    assert [row[3] for row in perplexity.rows] == ["105.00 ± 7.07", "101.00"]
    assert "mean and standard deviation of 2 seeds" in perplexity.notes[1]
    assert memory.notes[1:] == ["not measured: flash_lm at 512 with seed 2"]
    assert added.rows == [("FLASH-Quad → FLASH", "1.00")]  # of the seed that both have
    assert Comparison(options, records).curve("flash_quad_lm", 512) == [(50.0, 315.0), (100.0, 105.0)]


def test_the_speed_of_several_seeds_is_their_median():
    records = [record("flash_lm", 512, speed, seed=i) for i, speed in enumerate((1024.0, 4096.0, 2048.0), 1)]
    made = Comparison(THREE, records)
    assert made.seconds_per_step("flash_lm", 512) == 2.0 and made.curve("flash_lm", 512)[-1][0] == 200.0


def test_table_5_has_both_changes():
    names = ["flash_quad_mlm", "flash_mlm", "transformer_pp_mlm", "mc_transformer_pp_mlm"]
    records = [record(name, 512, 4096.0, 100.0 + i) for i, name in enumerate(names)]
    perplexity, *_, added, _ = tables(options_of(",".join(names), "--lengths", "512"), records)
    assert added.rows == [("FLASH-Quad → FLASH", "1.00"), ("Transformer++ → MC-TFM++", "1.00")]
    assert "of the 15 % that are masked" in perplexity.notes[0]


def test_speed_up_is_read_off_the_curve():
    curve = [(10.0, 300.0), (20.0, 200.0), (30.0, 100.0)]
    assert measurements.seconds_until(curve, 150.0) == 25.0
    assert measurements.seconds_until(curve, 400.0) == 10.0
    assert measurements.seconds_until(curve, 99.0) is None


def test_parameters_that_depend_on_the_length_are_both_shown():
    records = [record("flash_lm", 512, 4096.0), record("flash_lm", 4096, 4096.0, parameters=655_300)]
    assert tables(THREE, records)[0].rows[0][2] == "655,201 to 655,300"


@pytest.mark.parametrize("figure", [*FIGURES, None])
def test_every_figure_is_drawn(tmp_path, figure):
    options = options_of(None, *(["--figure", str(figure)] if figure else []))
    records = [record(name, n, 4096.0, 90.0 + n) for name in options.models for n in options.lengths[:-1] or [512]]
    comparison.write(tmp_path, report(options, records), RUN)
    with Image.open(tmp_path / "speed.png") as image:
        assert len(image.convert("RGB").quantize(256).getcolors()) > 20  # curves of several colours


@pytest.mark.parametrize("name", ["flash_lm", "transformer_pp_lm"])
def test_commands_differ_in_the_model_the_length_and_the_seed_alone(name):
    commands = planned_words(options_of(name, "--lengths", "512,4096", "--seeds", "2"))
    assert len(commands) == 4
    for command in commands:
        for option in ("--tokens-per-sample", "--seed"):
            command[command.index(option) + 1] = "X"
    assert all(command == commands[0] for command in commands)


@pytest.mark.parametrize(
    "name, clipped", [("transformer_lm", "0"), ("transformer_mlm", "0"), ("transformer_plus_lm", "0.1")]
)
def test_vanilla_transformers_are_not_clipped(name, clipped):
    command = planned_words(options_of(name))[0]
    assert command[command.index("--clip-norm") + 1] == clipped


def test_masked_commands():
    command = planned_words(options_of("flash_mlm.local_only"))[0]
    following = {option: command[command.index(option) + 1] for option in command[:-1] if option.startswith("--")}
    assert (following["--task"], following["--criterion"], following["--arch"]) == (
        "masked_lm",
        "masked_lm",
        "flash_mlm",
    )
    assert following["--encoder-layers"] == "4" and "--flash-no-linear" in command and "--decoder-layers" not in command


@pytest.mark.parametrize("figure, masked", [(5, True), (6, False), (7, False)])
def test_a_figure_chooses_models_and_lengths(figure, masked):
    options = options_of(None, "--figure", str(figure))
    names = [name.replace("_lm", "_mlm") if masked else name for name in FIGURES[figure].models]
    assert (options.models, options.lengths, options.masked) == (names, FIGURES[figure].lengths, masked)


def test_lengths_up_to_8192_and_any_size():
    more = "--lengths 1024,8192 --width 64 --layers 3 --heads 2 --masked --figure 8 --seeds 3".split()
    options = options_of(None, *more)
    assert (options.lengths, options.tokens_per_update, options.seeds) == ([1024, 8192], 8192, 3)
    assert options.shape == Shape(64, 3, 2) and options.models[0] == "flash_mlm.chunk_64"


def test_a_figure_has_its_own_folder():
    """Pictures of different figures do not replace each other."""
    folders = {options_of(None, "--figure", str(figure)).out.name for figure in FIGURES}
    assert len(folders) == len(FIGURES) and options_of("flash_lm").out.name not in folders
    assert options_of(None, "--figure", "7", "--out", "mine").out.name == "mine"


def test_units_are_half_a_layer():
    def value(architecture, option):
        arguments = SHAPE.arguments(architecture, 8)
        return arguments[arguments.index(option) + 1]

    assert int(value("flash_lm", "--decoder-layers")) == 2 * int(value("performer_lm", "--decoder-layers"))
    assert "--decoder-attention-heads" not in SHAPE.arguments("flash_quad_lm", 8)


def test_sizes_of_figure_3_are_their_own():
    arguments = SHAPE.arguments("flash_quad_lm.w96", None)
    assert arguments[arguments.index("--decoder-embed-dim") + 1] == "96"
    assert arguments[arguments.index("--decoder-layers") + 1] == "6"


@pytest.mark.parametrize("name", ALL_MODELS)
def test_every_model_can_be_built(tmp_path, name):
    (tmp_path / "dict.txt").write_text("a 1\n")
    model = ALL_MODELS[name]
    assert (name in MASKED_MODELS) == model.masked
    assert widths.count_parameters(tmp_path, Shape(32, 1, 2).arguments(name, None), 16, model.masked) > 1000


@pytest.mark.parametrize("kind", ["lm", "mlm"])
def test_equal_parameters(tmp_path, kind):
    (tmp_path / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(1996)))
    names = [f"{name}_{kind}" for name in ("flash", "performer", "transformer", "transformer_pp")]
    found = widths.equal_widths(tmp_path, names, 512)
    counts = {
        name: widths.count_parameters(tmp_path, SHAPE.arguments(name, width), 512, kind == "mlm")
        for name, width in found.items()
    }
    assert max(counts.values()) < 1.02 * min(counts.values())


def test_parameters_that_cannot_be_equal(tmp_path, monkeypatch, capsys):
    (tmp_path / "dict.txt").write_text("a 1\n")
    monkeypatch.setattr(widths, "TOLERANCE", 0.0)
    assert widths.main([str(tmp_path), "--archs", "flash_lm"]) == 1
    assert "widths: flash_lm has" in capsys.readouterr().err


@pytest.mark.parametrize("nearest, allowed", [(970, False), (980, True), (1020, True), (1030, False)])
def test_parameters_are_equal_within_2_per_cent_on_both_sides(tmp_path, monkeypatch, nearest, allowed):
    """The reference has 1000; the model 4000 and 0 at the ends of the line, and ``nearest`` at the width on it."""
    counts = iter([1000, 4000, 0, 0, nearest])
    monkeypatch.setattr(widths, "count_parameters", lambda *_: next(counts))
    if allowed:
        assert set(widths.equal_widths(tmp_path, ["flash_lm"], 512)) == {"flash_lm"}
    else:
        with pytest.raises(ValueError, match=f"flash_lm has {nearest:,} parameters"):
            widths.equal_widths(tmp_path, ["flash_lm"], 512)


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
    """The second time nothing runs but the search for widths; another text of the same size is refused."""
    arguments = [*canned(monkeypatch, tmp_path, answers), "--lengths", "128,64", "--updates", "15"]
    assert compare.main(arguments) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    cases = [(one["model"], one["length"]) for one in content["results"]]
    assert sorted(cases) == [(name, n) for name in ("flash_lm", "transformer_pp_lm") for n in (64, 128)]
    assert content["results"][0]["perplexity"] == 181.02
    assert content["widths"] == {"flash_lm": 232, "transformer_pp_lm": 344}
    monkeypatch.setattr(fairseq_training, "run", None)
    assert compare.main(arguments) == 0
    (tmp_path / "any.txt").write_text("y")
    assert compare.main(arguments) == 1
    assert "text_sha256 is " in capsys.readouterr().err


def test_a_training_without_its_validation_is_none(monkeypatch, tmp_path, capsys):
    arguments = canned(monkeypatch, tmp_path, lambda c: answers(c) if "recipes.flash.widths" in c else PARAMETERS)
    assert compare.main([*arguments, "--lengths", "64", "--updates", "15"]) == 1
    assert "does not end with a validation after update 15" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths", "0"], "0; allowed: at least 1"),
        (["--archs", "flash_lm,gpt"], f"gpt; allowed: {', '.join(ALL_MODELS)}"),
        (["--archs", "flash_lm,flash_mlm"], "flash_lm,flash_mlm; allowed: causal models alone"),
        (["--figure", "4"], "(choose from 3, 5, 6, 7, 8)"),
    ],
)
def test_refused_options(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit):
        compare.main(["--file", "x", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--updates", "2"], "compare: --updates is 2; allowed: at least 3"),
        (["--lengths", "512"], "compare: --file has 210 tokens"),
        (["--lengths", "512", "--tokens-per-update", "256"], "compare: --lengths has 512; allowed: at most"),
        (["--figure", "7"], "compare: --archs is given; allowed: without --figure, which is 7"),
        (["--masked"], f"compare: --archs has flash_lm; allowed with --masked: {', '.join(MASKED_MODELS)}"),
        (["--width", "30"], "compare: --width is 30; allowed: a multiple of 4, and of twice --heads, 4"),
    ],
)
def test_clear_failures(monkeypatch, tmp_path, capsys, arguments, message):
    assert compare.main([*canned(monkeypatch, tmp_path, answers), *arguments]) == 1
    assert capsys.readouterr().err.startswith(message)


def test_figure_6_is_causal(tmp_path, capsys):
    assert compare.main(["--file", "x", "--out", str(tmp_path), "--figure", "6", "--masked"]) == 1
    assert "--masked is given; allowed with --figure 6: not given" in capsys.readouterr().err


def test_end_to_end(tmp_path, imported_already):
    words = [a + b + c for a in "bdgk" for b in ("ar", "el", "io") for c in ("mon", "tas", "s")]
    lines = [" ".join(words[(i * k + k) % len(words)] for k in range(1, 9)) for i in range(600)]
    (tmp_path / "any.txt").write_text("".join(line + "\n" for line in lines))
    arguments = ["--file", str(tmp_path / "any.txt"), "--out", str(tmp_path / "out"), "--vocabulary", "280"]
    assert compare.main([*arguments, "--archs", "flash_lm", "--lengths", "64", "--updates", "4"]) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    (one,) = content["results"]
    assert 1 < one["perplexity"] < 1e6  # nothing is learned in four updates
    assert content["not_measured"] == []
    log = tmp_path / "out" / "runs" / "flash_lm.64.1" / "train.log"
    points = fairseq_log.parse_training(log.read_text().splitlines())
    assert [point.split for point in points] == ["train_inner"] * 4 + ["valid"]
