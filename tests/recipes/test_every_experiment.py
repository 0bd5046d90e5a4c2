"""Every experiment: its options, its trainings, its tables and picture, what it reads, and going on in a folder."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fairseq import options as fairseq_options
from PIL import Image

from fairseq_plugin.data.episode_folder import EpisodeDescription
from recipes.flash import compare as flash
from recipes.flash import speed as flash_speed
from recipes.from_softmax import compare as from_softmax
from recipes.from_softmax import encoder as from_softmax_encoder
from recipes.from_softmax import images as from_softmax_images
from recipes.from_softmax.parts import PARTS
from recipes.from_softmax.results import with_shares
from recipes.long_contexts import lengths
from recipes.long_copy import compare as long_copy
from recipes.offline_rl import compare as offline_rl
from recipes.papers import compare as papers
from recipes.papers import compare_images as papers_images
from recipes.papers import larger_images
from recipes.pretrained import compare as pretrained
from recipes.shared import comparison
from recipes.shared.commands import ROOT
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data, Experiment, Record
from recipes.shared.json_files import read_json
from recipes.shared.tables import Run
from recipes.shared.trainings import TrainingResult
from recipes.speech import compare as speech
from recipes.translation import compare as translation
from recipes.wikitext103 import compare, gates, recall
from tests.recipes.folders import made_by

RUN = Run("python -m recipes.AREA.compare", "2 CPU cores", "Python 3.11", "2026-11-22", 9.0)
#: What all records have.
KNOWN = {"parameters": 4321, "seconds": 60.0, "peak_bytes": 2**30, "command": "fairseq-train"}
#: Arguments of fairseq-train that are equal for all models, beside the number of updates.
BUDGET = "optimizer lr lr_scheduler clip_norm max_tokens batch_size".split()


class Case(NamedTuple):
    """An experiment, and what a test needs to know of it."""

    experiment: Experiment
    arguments: tuple[str, ...] = ()  # that the command needs, and small sizes; "FILE" is a text
    facts: Record = {}  # as ``prepare`` and ``measure`` find them
    record: Record = {}  # what ``read`` adds to ``KNOWN``
    log: dict[str, dict[str, float]] | None = None  # what fairseq logs of each split at an update
    files: dict[str, Any] = {}  # of a complete training, beside its log
    shown: tuple[str, ...] = ()  # cells of the row of the first model, with ``record`` twice
    said: tuple[str, ...] = ()  # elsewhere in the tables and the notes, or a row as Markdown
    others: tuple[Record, ...] = ()  # further records


EPISODES = EpisodeDescription("Toy-v0, own data", "", [0.0], [1.0], [-1.0], [1.0], 200, 0.0, 40.0, 100.0)
PLAYED = [{"target": target, "seed": 0, "total": 0.9 * target, "steps": 200} for target in (0.0, 100.0)]
#: Losses of a teacher and of what is made of it: stage 1 wins back half of the lead, stage 2 all of it.
STAGES = {"exchanged": 2.0, "transfer": 1.5, "distillation": 1.0, "scratch": 1.5}
LOSSES = {name: dict.fromkeys(("valid", "test", "cross-entropy"), loss) for name, loss in STAGES.items()}
FORM = with_shares(
    {"learned": 320, "teacher": LOSSES["distillation"], "losses": LOSSES, "parts": {}, "commands": {}}
    | {"seconds": {"transfer": 10.0, "distillation": 20.0, "scratch": 20.0}}
)
PARTS_LOSSES = {part: {"test": math.log(2.0 + i)} for i, part in enumerate(PARTS)}
TEACHER_AND_WINDOWED = (
    {"model": "teacher", "seed": 1, **KNOWN, "losses": LOSSES["distillation"]},
    {"model": "lolcats*3,softmax", "seed": 1, **KNOWN, **FORM, "parts": PARTS_LOSSES},
)
#: How near to its teacher an encoder is.
MEASURES = {
    stage: {"cosine": share, "nearest": 100.0 * share}
    for stage, share in (("exchanged", 0.1), ("transfer", 0.5), ("distillation", 0.9))
}
STARTED = {"before": 8.25, "after": 6.75}
WORDS = {"documents": 9, "empty_documents": 0, "words": 500, "tokens": 900, "tokens_per_word": 1.8}
BIN = {"loss": 2.0, "tokens": 100}
REACH_BINS = [{"begin": 128, "end": 256}, {"begin": 256, "end": 512}]
#: How far back a model reads that finds half of the needles, and a teacher that finds all.
REACH_FACTS = {"distances": [8, 252], "windows": 48, "choices": 5}
HALF, ALL = ({"found": [share, share], "bins": [BIN | part for part in REACH_BINS]} for share in (50.0, 100.0))
TEXT_FACTS = {"tokens": {"train": 900, "valid": 50, "test": 50}, "unit": "words"}
PERPLEXITY = {
    "perplexity": 9.5,
    "bits": 3.25,
    "update": 96,
    "curve": [[12, 9.0], [96, 8.0]],
    "tokens_per_second": 1000.0,
}
GENERATED = {"exact": 25.0, "passages": 50.0, "tokens": 60.0, "milliseconds": 40.0}
TRANSLATED = {"bleu": 12.5, "chrf": 30.5, "milliseconds": 40.0}
TIMES = [
    {"model": model, "length": 512, "milliseconds": milliseconds, "faster": 90.0 / milliseconds}
    for model, milliseconds in (("flow/linear", 60.0), ("transformer", 90.0))
]
READ = [
    {"length": length, "cer": cer, "milliseconds": 4.5, "peak_bytes": 3 * 2**20}
    for length, cer in ((5, 4.5), (600, 9.0))
]
TEXT_LOG = {"train_inner": {"wps": 500.0}, "valid": {"ppl": 18.0, "loss": 4.17}, "test": {"ppl": 19.5, "loss": 4.285}}


def by_perplexity(experiment: Experiment, models: tuple[str, str], state: str) -> Case:
    """A comparison of language models; the first model's decoding state is constant or grows."""
    shown = (models[0], "4,321", "9.50 ± 0.00", "2", "1,000", "1,024", state, "1.0")
    return Case(experiment, ("--file", "FILE", "--models", *models), TEXT_FACTS, PERPLEXITY, TEXT_LOG, shown=shown)


CASES = {
    "wikitext103.compare": by_perplexity(compare.EXPERIMENT, ("softmax", "flow+short_conv"), "grows"),
    "wikitext103.gates": by_perplexity(gates.EXPERIMENT, ("linear+fixed", "linear+no_positions"), "constant"),
    "wikitext103.recall": Case(
        recall.EXPERIMENT,
        ("--models", "local", "linear"),
        {},
        {"accuracy": 50.0},
        shown=("local", "50.0 ± 0.0"),
    ),
    "long_copy.compare": Case(
        long_copy.EXPERIMENT,
        ("--file", "FILE", "--models", "flow/linear", "transformer"),
        {},
        {"update": 50, "next": 61.5, "curve": [[50, 61.5], [100, 43.2]], **GENERATED}
        | {"seconds_per_update": 0.025, "generate_bytes": 2**29},
        {"train_inner": {"ups": 40.0}, "valid": {"loss": 0.5, "accuracy": 61.5}},
        {"generated.json": {"counted": GENERATED, "peak_bytes": 2**29}},
        shown=("flow/linear", "4,321", "61.5 ± 0.0", "25.0 ± 0.0", "50.0 ± 0.0", "60.0 ± 0.0")
        + ("2", "40", "512", "25", "1,024"),
        said=("16 marked passages of 1 each", "32,000 train"),
    ),
    "offline_rl.compare": Case(
        offline_rl.EXPERIMENT,
        ("--models", "flowformer+forget", "bc,linear_decision"),
        {"data": EPISODES.as_dict(), "updates": 100, "targets": [0.0, 100.0]},
        {"updates": [5, 10], "losses": [0.5, 0.25], "action_mse": 0.25, "episodes": PLAYED, "milliseconds": 3.0},
        shown=("flowformer_decision+forget", "0.00 M", "0.2500 ± 0.0000", "90 ± 0", "90.0 ± 0.0", "1.00 ± 0.00")
        + ("2", "1.0"),
        said=("This is not D4RL", "+forget: gates of each head", "bc: any target is the same"),
    ),
    "flash.compare": Case(
        flash.EXPERIMENT,
        ("--file", "FILE", "--archs", "flash_lm,transformer_pp_lm", "--lengths", "512"),
        {"text": dict.fromkeys(("train", "valid"), WORDS), "widths": {"flash_lm": 64}, "not_measured": []},
        {"length": 512, "perplexity": 9.5, "tokens_per_second": 8192.0, "curve": [[10, 12.0], [20, 9.5]]},
        shown=("FLASH", "flash_lm", "4,321", "9.50 ± 0.00"),
        said=("relu² in chunks of 256, linear across", "0.500", "1,024", "mean and standard deviation of 2 seeds"),
    ),
    "flash.speed": Case(
        flash_speed.EXPERIMENT,
        ("--models", "flash_lm", "transformer_pp_lm", "--lengths", "512"),
        {"widths": {}, "threads": 1, "kernels": False, "clock": "time"},
        {"length": 512, "seconds": 0.5, "ratio": 1.25},
        shown=("FLASH", "relu² in chunks of 256, linear across", "4,321", "1.25 ± 0.00"),
        said=("| FLASH | 0.500 ± 0.000 |", "kernels for CPUs (LINEARTIME_CPU_KERNELS): off", "threads: 1"),
    ),
    "from_softmax.compare": Case(
        from_softmax.EXPERIMENT,
        ("--file", "FILE", "--models", "flow", "lolcats*3,softmax"),
        TEXT_FACTS | REACH_FACTS,
        FORM | {"reach": {"exchanged": HALF, "distillation": ALL}},
        shown=("flow", "320", "7.39 ± 0.00", "4.48 ± 0.00", "2.72 ± 0.00", "4.48 ± 0.00", "50.0 ± 0.0", "100.0 ± 0.0")
        + ("50.0 ± 0.0", "2", "30", "20"),
        said=(
            *("900 train", "learning rate 0.01", "lolcats_relu is lolcats"),
            "| teacher | 4,321 | 2,000 updates | 2.72 | 2.72 | 1 | 60 |",
            "| lolcats*3,softmax | 2.00 | 3.00 | 4.00 | 5.00 | 1 |",
            "| teacher | 100 | 100 | 1 |",
            "| flow, untrained | 50 ± 0 | 50 ± 0 | 2 |",
            "| flow, trained | - | 7.39 ± 0.00 | 7.39 ± 0.00 | - | - | +0 % | 2 |",
            "the first 4 tokens of the sequence, the sinks",
            *("one of the 5 next rarest", "guessing finds 20.0"),
        ),
        others=(TEACHER_AND_WINDOWED[0] | {"reach": {"teacher": ALL}}, TEACHER_AND_WINDOWED[1]),
    ),
    "from_softmax.encoder": Case(
        from_softmax_encoder.EXPERIMENT,
        ("--folder", "encoder", "--file", "FILE", "--models", "flow", "lolcats*3,softmax"),
        {"texts": 900, "pairs_of_texts": 30, "layers": 6, "width": 384},
        {"learned": 320, "measures": MEASURES, "seconds": {"transfer": 10.0, "distillation": 20.0}},
        shown=("flow", "4,321", "320", "0.100 ± 0.000", "0.500 ± 0.000", "0.900 ± 0.000", "10.0 ± 0.0", "50.0 ± 0.0")
        + ("90.0 ± 0.0", "2", "30"),
        said=(
            "| teacher | 4,321 | - | - | - | 0.900 | - | - | 90.0 | 1 | - |",
            "6 layers of width 384",
            "30 pairs to measure: halves of paragraphs",
        ),
        others=(
            {"model": "teacher", "seed": 1, **KNOWN, "learned": 0, "seconds": {}}
            | {"measures": {"distillation": MEASURES["distillation"]}},
        ),
    ),
    "from_softmax.images": Case(
        from_softmax_images.EXPERIMENT,
        ("--models", "flow", "lolcats*3,softmax"),
        {},
        FORM,
        shown=("flow", "320", "2.00 ± 0.00", "1.50 ± 0.00", "1.00 ± 0.00", "1.50 ± 0.00", "50.0 ± 0.0", "100.0 ± 0.0")
        + ("50.0 ± 0.0", "2", "30", "20"),
        said=("| teacher | 4,321 | 40 epochs | 1.00 | 1.00 | 1 | 60 |", "timm's LogitDistillationTask"),
        others=TEACHER_AND_WINDOWED,
    ),
    "long_contexts.lengths": Case(
        lengths.EXPERIMENT,
        ("--file", "FILE", "--models", "flow+no_positions", "linear", "--tokens-per-sample", "64", "--times", "2"),
        TEXT_FACTS | {"windows": 200, "refused": {}},
        {"bins": [BIN | {"begin": 32, "end": 64}, BIN | {"begin": 64, "end": 128}], "refused": None},
        shown=("flow+no_positions", "4,321", "-", "7.39 ± 0.00", "7.39 ± 0.00", "+0 %", "2"),
        said=("200 windows of 128 tokens", "tokens have no positions"),
    ),
    "papers.compare": Case(
        papers.EXPERIMENT,
        ("--file", "FILE", "flowformer", "4", "--rows", "FLOWFORMER", "TRANSFORMER (2017)"),
        TEXT_FACTS | {"measured": {"what": "small models", "cells": {"FLOWFORMER": "9.5"}, "limits": "little"}},
        PERPLEXITY,
        TEXT_LOG,
        shown=("FLOWFORMER", "4,321", "9.50 ± 0.00", "30.8", "2", "1,000", "1,024", "1.0"),
        said=("small models", "not asked for", "little"),
    ),
    "papers.compare_images": Case(
        papers_images.EXPERIMENT,
        ("daft", "2"),
        {"measured": [{"what": "small digits", "limits": "little"}], "order": "In their order."},
        {"top1": 90.0},
        shown=("DAFT-conv, Heads 384, Epochs 300", "4,321", "90.00 ± 0.00", "80.8", "2", "1.0"),
        said=("small digits", "In their order.", "little"),
    ),
    "papers.larger_images": Case(
        larger_images.EXPERIMENT,
        ("--sides", "28", "56"),
        {"images": "MNIST", "counts": {"train": 4000, "validation": 1000}},
        {"trained": 28, "top1": {"28": 90.0, "49": 87.0, "56": 85.0}},
        shown=("DeiT", "28", "4,321", "90.00 ± 0.00", "87.00 ± 0.00", "85.00 ± 0.00", "2", "1.0"),
        said=("MNIST, 4,000 images", "those trained at 49", "new keys and queries have timm's deviation of 0.02"),
    ),
    "pretrained.compare": Case(
        pretrained.EXPERIMENT,
        ("--file", "FILE"),
        {"text": "any.txt", "digits": 1437, "stock": {pretrained.text.SOURCE: 6.5, pretrained.images.SOURCE: 0.125}},
        {"start": "stock", **STARTED},
        shown=("flowformer_lm", "stock weights", "8.250", "6.750"),
        said=(
            "| linear_lm | random weights | - | - |",
            "bits per token of 2,000 subwords; the stock model, transformer_lm after 300 updates, has 6.500",
            "deit_tiny_patch16_224 of the same size after 16 epochs, has 0.125",
            "| model | started from | before | after 198 updates | top-1, % |",
            "| daft_conv_s_h16 | random weights | 8.250 | 6.750 | 91.2 |",
        ),
        others=({"model": "daft_conv_s_h16.random", "start": "random", **STARTED, "top1": 91.25},),
    ),
    "speech.compare": Case(
        speech.EXPERIMENT,
        ("--models", "wav2vec2", "flowformer", "--lengths", "5", "600"),
        {"parts": {"train": {"recordings": 800, "seconds": 3600.0}}, "recordings": None},
        {"read": READ},
        shown=("wav2vec2", "4,321", "4.5 ± 0.0", "9.0 ± 0.0", "2", "1.0"),
        said=(
            *(
                "commands spoken by espeak-ng",
                "train: 800 of 60.0 min",
                "| wav2vec2 | 4.5 | 4.5 |",
                "| wav2vec2 | 3 | 3 |",
            ),
            "| linear from wav2vec2 | 44.5 | 14.5 | 6.5 | 75.0 | 95.0 | 1 |",
        ),
        others=(
            {"model": "linear from wav2vec2", "seed": 1, **KNOWN}
            | {"cer": {"exchanged": 44.5, "transfer": 14.5, "tuned": 6.5}},
        ),
    ),
    "translation.compare": Case(
        translation.EXPERIMENT,
        ("--models", "flow/linear", "transformer"),
        {"parts": {"train": [900, 7], "valid": [50, 2], "test": [40, 2]}, "copied_bleu": 5.25, "speeds": TIMES},
        {"update": 50, "next": 61.5, "curve": [[50, 61.5], [100, 43.2]], **TRANSLATED}
        | {"seconds_per_update": 0.025, "generate_bytes": 2**29},
        {"train_inner": {"ups": 40.0}, "valid": {"loss": 0.5, "accuracy": 61.5}},
        {"generated.json": {"counted": TRANSLATED, "peak_bytes": 2**29}},
        ("flow/linear", "4,321", "12.5 ± 0.0", "30.5 ± 0.0", "61.5 ± 0.0", "2", "40", "25", "1.0"),
        ("from en to de: train 900 of 7 programs", "| flow/linear | 60 (1.50x) |", "BLEU of 5.2"),
    ),
}


def test_every_experiment_is_here():
    """A file that describes one is a case."""
    folder = ROOT / "recipes"
    paths = [path for path in folder.rglob("*.py") if "\nEXPERIMENT = " in path.read_text(encoding="utf-8")]
    assert {".".join(path.relative_to(folder).with_suffix("").parts) for path in paths} == CASES.keys()


@pytest.fixture(params=CASES, ids=str)
def case(request) -> Case:
    """Each experiment."""
    return CASES[request.param]


def where(fits: Callable[[Case], object]) -> pytest.MarkDecorator:
    """Run a test for the experiments that it fits."""
    chosen = {name: case for name, case in CASES.items() if fits(case)}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


def options_of(case: Case) -> set[str]:
    """The fields that are options of the command."""
    return {field.name for field in dataclasses.fields(case.experiment.options) if field.metadata}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Some short lines."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text\n" for i in range(60)), encoding="utf-8")
    return path


def command_line(case: Case, text: Path, *more: str) -> list[str]:
    """The arguments of the command."""
    return [str(text) if word == "FILE" else word for word in case.arguments] + list(more)


def records_of(case: Case, model: str) -> list[Record]:
    """Records of two seeds."""
    return [{"model": model, "seed": seed, **KNOWN, **case.record} for seed in (1, 2)]


def data_of(case: Case) -> Data:
    """Data that is not there."""
    return Data(Path("data-bin"), dict(case.facts))


def test_help_has_every_option_and_a_text_for_it(case, capsys):
    with pytest.raises(SystemExit) as ended:
        case.experiment.parse(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert case.experiment.command in shown
    for field in dataclasses.fields(case.experiment.options):
        if field.metadata and not field.metadata["names"]:
            assert f"--{field.name.replace('_', '-')}" in shown and field.metadata["help"]


@where(lambda case: "quick" in options_of(case))
def test_an_option_that_is_typed_wins_over_quick(case, text):
    usual, quick = (case.experiment.parse(command_line(case, text, *more)) for more in ([], ["--quick"]))
    changed = [name for name, value in usual.settings().items() if quick.settings()[name] != value]
    assert changed
    for name in {"updates", "epochs"} & options_of(case):
        again = case.experiment.parse(command_line(case, text, "--quick", f"--{name}", "77"))
        assert getattr(again, name) == 77


def test_models_and_seeds_may_be_added_and_nothing_else_changed(case, text):
    options = case.experiment.parse(command_line(case, text))
    assert dataclasses.replace(options, models=["x"], seeds=9).settings() == options.settings()
    for field in dataclasses.fields(options):
        if field.metadata.get("setting") and field.name in options.settings():
            assert dataclasses.replace(options, **{field.name: 55}).settings() != options.settings()


@where(lambda case: case.experiment.train is None)
def test_fairseq_takes_the_arguments_of_every_training(case, text):
    """With the same budget for all models; where facts have another number of updates, it is that of some."""
    experiment, budgets = case.experiment, set()
    options = experiment.parse(command_line(case, text, "--seeds", "2"))
    planned = experiment.planned(options, data_of(case))
    assert len({item.training.name for item in planned}) == len(planned)
    assert {item.model for item in planned} == set(options.models)
    for item in planned:
        if item.training.program is None:
            words = [str(word) for word in item.training.arguments]
            parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), [*words, "--cpu"])
            assert parsed.seed == item.seed
            updates = None if parsed.max_update == case.facts.get("updates") else parsed.max_update
            budgets.add((updates, *(str(getattr(parsed, name)) for name in BUDGET)))
    assert len({budget[1:] for budget in budgets}) <= 1 and len({budget[0] for budget in budgets} - {None}) <= 1


def test_records_make_the_tables_and_the_picture(case, text, tmp_path):
    """One model has two records, one has none."""
    options = dataclasses.replace(case.experiment.parse(command_line(case, text)), seeds=2)
    records = [*records_of(case, options.models[0]), *case.others]
    found = case.experiment.report(options, dict(case.facts), Results(records, {"x.2": "Loss exploded"}))
    plain = comparison.write(tmp_path, found, RUN)
    rows = (tmp_path / "results.md").read_text(encoding="utf-8").splitlines()
    assert "| " + " | ".join(case.shown) + " |" in rows
    assert f"{case.experiment.lacking}: x.2: Loss exploded" in plain
    assert all(said in plain or said in rows for said in case.said)
    content = read_json(tmp_path / "results.json")
    assert content["results"] == json.loads(json.dumps(records)) and content["plan"]["seeds"] == 2
    assert case.facts.items() <= content.items()
    if case.experiment.picture is not None:
        with Image.open(tmp_path / case.experiment.picture_name) as image:
            assert image.width > 250
    assert case.experiment.report(options, dict(case.facts), Results([], {})).draw is None


def point(split: str, update: int, **values: float) -> str:
    """A line of a log, as fairseq writes it."""
    updates = "num_updates" if split == "train_inner" else f"{split}_num_updates"
    named = values if split == "train_inner" else {f"{split}_{name}": value for name, value in values.items()}
    return f"| INFO | {split} | {json.dumps({'epoch': 1, **named, updates: str(update)})}"


def worsened(name: str, value: float, factor: float) -> float:
    """An accuracy that is lower, or another number that is higher."""
    return value / factor if name == "accuracy" else value * factor


@where(lambda case: case.log is not None)
def test_a_stored_log_is_read(case, text, tmp_path):
    """Of two evaluations the better one is the first."""
    lines = ["num. shared model params: 4,321 (num. trained: 4,321)"]
    for update, worse in ((50, 1.0), (100, 1.5)):
        for split, values in case.log.items():
            lines.append(point(split, update, **{name: worsened(name, value, worse) for name, value in values.items()}))
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    for name, content in case.files.items():
        (tmp_path / name).write_text(json.dumps(content))
    options = case.experiment.parse(command_line(case, text))
    record = case.experiment.read(options, tmp_path, {"model": options.models[0], "seed": 1, **KNOWN})
    assert record.keys() == case.record.keys()
    assert json.loads(json.dumps(record))["update"] == 50
    for name in case.files:
        (tmp_path / name).unlink()
        assert case.experiment.read(options, tmp_path, {"model": options.models[0], "seed": 1, **KNOWN}) is None


TRAINED = TrainingResult("softmax.1", "fairseq-train", 60.0, 2**30, "2026-11-22", "a machine", "versions")


def test_from_a_text_to_the_results(text: Path, tmp_path: Path, imported_already, capsys, monkeypatch) -> None:
    """One training and one that is complete already; a second time nothing runs, and another budget is refused."""
    out = tmp_path / "out"
    done = out / "runs" / "softmax.1"
    done.mkdir(parents=True)
    (done / "result.json").write_text(json.dumps(TRAINED._asdict()))
    lines = ["num. shared model params: 4,321 (num. trained: 4,321)"]
    for update, speed, valid, test in ((1, 400, 20.0, 21.0), (2, 600, 18.0, 19.5)):
        lines.append(point("train_inner", update, wps=speed))
        lines += [point("valid", update, ppl=valid, loss=4.2), point("test", update, ppl=test, loss=4.285)]
    (done / "train.log").write_text("\n".join(lines) + "\n")
    arguments = ["--file", str(text), "--quick", "--out", str(out), "--models", "softmax", "flow+short_conv"]
    arguments += ["--seeds", "1", "--updates", "4", "--width", "8", "--heads", "2", "--tokens-per-sample", "16"]
    arguments += ["--batch-tokens", "64"]
    made_by(compare.EXPERIMENT.command, out)
    assert compare.main(arguments) == 0
    softmax, flow = json.loads((out / "results.json").read_text())["results"]
    assert (softmax["perplexity"], softmax["update"], softmax["tokens_per_second"]) == (19.5, 2, 500.0)
    assert softmax["bits"] == 4.285
    assert [update for update, _ in flow["curve"]] == [1, 2, 3, 4] and flow["perplexity"] > 1.0
    assert flow["parameters"] > 0 and flow["peak_bytes"] > 0 and "fairseq_cli.train" in flow["command"]
    assert json.loads((out / "results.json").read_text())["unit"] == "characters"
    logs = {path: path.stat().st_mtime_ns for path in out.rglob("*.log")}
    assert compare.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.log")} == logs
    capsys.readouterr()
    for change, said in ((["--lr", "0.5"], "lr is 0.5; allowed in"), (["--words"], "characters is False; allowed in")):
        assert compare.main([*arguments, *change]) == 1
        assert said in capsys.readouterr().err


@where(lambda case: "models" in options_of(case))
@pytest.mark.parametrize("name", ["gpt", "softmax+nothing"])
def test_wrong_models_are_refused(name, case, text, capsys):
    with pytest.raises(SystemExit) as ended:
        case.experiment.main(command_line(case, text, "--models", name))
    assert ended.value.code == 2 and name in capsys.readouterr().err


@where(lambda case: {"batch_tokens", "tokens_per_sample"} <= options_of(case))
def test_sequences_longer_than_a_batch_are_refused(case, text, tmp_path, capsys):
    """Before anything is made."""
    out = tmp_path / "out"
    sizes = ("--tokens-per-sample", "65", "--batch-tokens", "64")
    assert case.experiment.main(command_line(case, text, *sizes, "--out", str(out))) == 1
    said = capsys.readouterr().err
    assert "--tokens-per-sample is 65; allowed: " in said and "at most --batch-tokens, 64" in said and not out.exists()


@where(lambda case: "FILE" in case.arguments)
def test_wrong_files_are_refused(case, tmp_path, capsys):
    out = tmp_path / "out"
    assert case.experiment.main(command_line(case, tmp_path / "none.txt", "--out", str(out))) == 1
    assert "none.txt" in capsys.readouterr().err and not out.exists()


def test_cells_are_of_all_seeds():
    """Mean and deviation."""
    column = next(column for column in compare.EXPERIMENT.columns if column.header == "perplexity")
    assert column.cell("x", [{"perplexity": 6.0}, {"perplexity": 7.0}]) == f"6.50 ± {statistics.stdev((6.0, 7.0)):.2f}"
