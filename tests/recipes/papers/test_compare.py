"""All rows of a table in small: their commands, the order beside the published one, and once from a text to a table."""

import importlib
import json
import shlex
from pathlib import Path

import pytest
from fairseq import options
from PIL import Image

from recipes.papers import compare, small
from recipes.papers.measured import kendall, value
from recipes.papers.small import TABLES, Rows, small_command, trained_rows
from recipes.papers.tables import PAPERS, read_paper
from recipes.shared import comparison
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data, Record
from recipes.shared.tables import Run
from tests.recipes.small_images import write_few

KINDS = [
    (*table, masked) for table, values in TABLES.items() for masked in ([False, True] if values.masked else [False])
]


def plan(paper: str, table: str, masked: bool = False, *more: str) -> Rows:
    """All rows of a table, one seed."""
    arguments = [paper, table, *["--masked"] * masked, "--file", "text.txt", "--seeds", "1", "--updates", "10", *more]
    return compare.EXPERIMENT.parse(arguments)


def built(training) -> dict:
    """What fairseq-train reads of a training."""
    words = [str(word) for word in training.arguments]
    return vars(options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"]))


@pytest.mark.parametrize(("paper", "table", "masked"), KINDS)
def test_every_row_of_every_table_is_of_one_size(paper, table, masked):
    """The command of each row is taken by fairseq, its folder is its own, and two units stand for a layer."""
    made = plan(paper, table, masked)
    planned = compare.EXPERIMENT.planned(made, Data(Path("data-bin"), {}))
    assert len({one.training.name for one in planned}) == len(planned) == len(made.models) > 3
    side = "encoder" if masked else "decoder"
    for one in planned:
        found = built(one.training)
        units = found["arch"].startswith("flash")
        assert found[f"{side}_embed_dim"] == 64 and found[f"{side}_layers"] == (4 if units else 2), one.model
        assert found["task"] == ("masked_lm" if masked else "language_modeling") and found["dropout"] == 0.0
        assert found["max_update"] == 10 and found["tokens_per_sample"] == 128


def test_a_row_keeps_what_tells_it_from_the_others():
    """Options, one head or several, a head for each channel; widths and windows shrink in proportion."""
    words = {name: " ".join(map(str, plan(*table).model_arguments(name))) for table, name in ROWS}
    for (_, name), said in ROWS.items():
        assert all(one in words[name] for one in said), (name, words[name])


def test_layers_are_pre_norm_or_post_norm():
    """The paper does not say which one its trainings have; each form has its folder, and its results name it."""
    made = {flag: plan("flowformer", "4", False, *["--post-norm"] * flag) for flag in (False, True)}
    for post_norm, chosen in made.items():
        planned = compare.EXPERIMENT.planned(chosen, Data(Path("data-bin"), {}))
        assert all(built(one.training)["decoder_normalize_before"] is not post_norm for one in planned)
        facts = compare.measured(chosen, Data(Path(), {"tokens": {"train": 1}, "unit": "words"}), Results([], {}))
        assert facts["measured"]["what"].startswith("post-norm, 2 layers" if post_norm else "pre-norm, 2 layers")
    assert made[False].out != made[True].out and made[False].models == made[True].models


ROWS = {
    (("flash", "1"), "single-head → multi-head"): ["--decoder-attention-heads 4", "--flash-query-dim 32"],
    (("flash", "1"), "no gating"): ["--flash-no-gate --flash-separate-ffn", "--decoder-layers 4"],
    (("flash", "2"), "multi-head → single-head"): ["--decoder-layers 2 --decoder-attention-heads 1"],
    (("flash", "2"), "add gating"): ["--flash-attention-gate", "--decoder-ffn-embed-dim 208"],
    (("flowformer", "4"), "FLOWFORMER W/O ALLOCATION"): ["--flow-allocation none", "--decoder-ffn-embed-dim 256"],
    (("daft", "5"), "DAFT-conv-64"): ["--decoder-attention-heads 64", "--daft-window 8"],
    (("daft", "5"), "DAFT-full"): ["--decoder-attention-heads 1", "--daft-bias-dim 16"],
    (("daft", "4"), "Sparse Transformer strided"): ["--sparse-stride 11", "--decoder-layers 2"],
    (("daft", "4"), "Image Transformer local2d"): ["--local-window 11"],
}


def test_rows_come_in_the_published_order():
    assert trained_rows("flowformer", "4")[:3] == [
        "FLOWFORMER",
        "FLOWFORMER W/O COMPETITION",
        "TRF-TRANSFORMER-GATE (2021)",
    ]
    causal, masked = trained_rows("flash", "1"), trained_rows("flash", "1", masked=True)
    assert causal[-1] == "single-head → multi-head" and masked[-1] == "no gating"
    assert value("-0.05 ± 0.01") == -0.05 and value("1,234.5") == 1234.5


def test_a_report_has_the_order_and_what_was_not_run(tmp_path):
    def record(row: str, bits: float) -> Record:
        known = {"model": row, "seed": 1, "parameters": 4321, "seconds": 60.0, "peak_bytes": 2**30}
        return known | {"perplexity": 2.0**bits + 0.25, "bits": bits, "tokens_per_second": 1000.0}

    def report(options: Rows, tokens: dict[str, int], records: list[Record]) -> comparison.Report:
        facts, compared = {"tokens": tokens, "unit": "words"}, Results(records, {})
        facts |= compare.measured(options, Data(tmp_path, facts), compared)
        return compare.EXPERIMENT.report(options, facts, compared)

    made = plan("daft", "4")
    records = [record(row, 0.0 + place) for place, row in enumerate(reversed(made.models))]
    shown = report(made, {"train": 900_000, "valid": 50_000, "test": 50_000}, records)
    run = Run("python -m recipes.papers.compare", "a machine", "", "2026-11-25", 1)
    plain = comparison.write(tmp_path, shown, run)
    assert "Kendall's tau between the orders: -1.00" in plain and "not run: PixelCNN: cited" in plain
    assert "bits per token" in plain and "1.0 million" in plain
    content = json.loads((tmp_path / "results.json").read_text())["measured"]
    assert content["cells"][made.models[-1]] == "0.000"
    assert content["column"] == "Test loss" and content["part"] == 0
    assert kendall(content["cells"], made.published_cells()) == -1.0 and content["what"].endswith(", 1 seed")
    again = [record(made.models[0], 2.0) | {"seed": seed} for seed in (2, 3)]
    more = report(made, {"train": 1}, [*records, *again])
    assert more.content["measured"]["what"].endswith(", 1 to 3 seeds"), "those that there are, not those asked for"
    part = report(plan("flash", "1", True, "--rows", "no gating"), {"train": 1}, [])
    assert "not run: original GAU: not asked for" in part.tables[0].notes
    said = " ".join(part.tables[0].notes)
    assert "Fewer than three rows" in said and "2 layers, or 4 gated attention units, of width 64" in said


@pytest.mark.parametrize("paper", PAPERS)
def test_commands_in_small_are_taken_by_their_programs(paper):
    commands = {small_command(paper, number) for number in read_paper(paper).tables} - {None}
    assert commands
    for command in commands:
        words = shlex.split(command.removeprefix("LINEARTIME_CPU_KERNELS=0 "))
        assert words[:2] == ["python", "-m"]
        module = importlib.import_module(words[2])
        (module.EXPERIMENT if hasattr(module, "EXPERIMENT") else module).parser().parse_args(words[3:])
    assert small_command("flash", "6") is None and small_command("flash", "2").startswith(f"python -m {small.COMMAND}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mega", "1"], ["mega", "flowformer"]),
        (["flash", "3"], ["TABLE is 3", "allowed for flash: 1, 2"]),
        (["flowformer", "11"], ["allowed for flowformer: 4", "recipes.lra.compare --table 11"]),
        (["daft", "5", "--masked"], ["--masked", "flash 1, flash 2"]),
        (["flash", "1", "--post-norm"], ["--post-norm", "allowed: flowformer 4"]),
        (["daft", "5", "--rows", "Mega"], ["--rows has Mega", "DAFT-conv-64"]),
        (["daft", "5", "--data-dir", "few"], ["--data-dir is few", "--pixels"]),
        (["daft", "4", "--rows", "pixelcnn"], ["convolutional", "DAFT-full"]),
    ],
)
def test_what_is_not_there_is_an_error_with_what_is(arguments, said, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        compare.main([*arguments, "--file", "text.txt", "--out", str(out)])
    assert ended.value.code == 2 and not out.exists()
    error = capsys.readouterr().err
    assert all(one in error for one in said)


@pytest.mark.usefixtures("imported_already")
@pytest.mark.parametrize("masked", [False, True])
def test_from_a_text_to_the_table(masked, tmp_path, capsys):
    """A row of a tiny size."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i} of a small text\n" for i in range(60)), encoding="utf-8")
    arguments = [
        "flash",
        "1",
        "--file",
        str(text),
        "--quick",
        "--seeds",
        "1",
        "--updates",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    arguments += ["--width", "16", "--layers", "1", "--heads", "2", "--batch-tokens", "64", "--tokens-per-sample", "16"]
    arguments += ["--masked"] if masked else []
    assert compare.main([*arguments, "--rows", "NO gating"]) == 0
    shown = capsys.readouterr().out
    assert "The same as Markdown and JSON" in shown and "not run: relu² → softmax: not asked for" in shown
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [one["model"] for one in content["results"]] == ["no gating"]
    assert value(content["measured"]["cells"]["no gating"]) > 1 and content["measured"]["part"] == int(masked)


@pytest.mark.usefixtures("imported_already")
def test_from_images_to_the_table(tmp_path, capsys):
    """A row whose text is the grey values of images. Other tokens, no text, or other images there are refused.

    Images that are refused, since they are too few, do not bind the folder.
    """
    out, few = tmp_path / "out", write_few(tmp_path / "few")
    arguments = ["daft", "5", "--out", str(out), "--rows", "Linear Transformer", "--seeds", "1"]
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert "allowed: one of --file and --pixels" in capsys.readouterr().err
    arguments += ["--pixels", "4", "--data-dir", str(few), "--updates", "2"]
    for wrong, said in (
        (["--characters"], "--characters or --subwords is given with --pixels"),
        (["--tokens-per-sample", "128"], "--tokens-per-sample is 128; allowed: with --file"),
    ):
        with pytest.raises(SystemExit):
            compare.main([*arguments, *wrong])
        assert said in capsys.readouterr().err
    arguments += "--width 16 --layers 1 --heads 2 --batch-tokens 68".split()
    assert compare.main([*arguments, "--pixels", "9"]) == 1 and not out.exists()
    assert "--pixels is 9, 82 tokens for each image; allowed: " in capsys.readouterr().err
    fewer = write_few(tmp_path / "fewer")
    for path in [path for images in fewer.glob("*/*") for path in sorted(images.iterdir())[1:]]:
        path.unlink()
    assert compare.main([*arguments, "--data-dir", str(fewer)]) == 1
    assert "lines to use; allowed: at least 20" in capsys.readouterr().err
    assert compare.main(arguments) == 0
    shown = capsys.readouterr().out
    assert "bits per pixel" in shown and "few in 4 x 4 pixels: 1 layers of width 16, 2 updates of 68 pixels" in shown
    assert "of an image with its end, over its pixels" in shown
    lines = (out / "pixels.txt").read_text().splitlines()
    assert len(lines) == 36 and {len(line.split()) for line in lines} == {16}
    content = json.loads((out / "results.json").read_text())
    (record,) = content["results"]
    assert record["perplexity"] > 1 and "--tokens-per-sample 17" in record["command"]
    assert content["measured"]["cells"] == {"Linear Transformer": f"{record['bits'] * 17 / 16:.3f}"}
    changed = next((few / "train" / "0").iterdir())
    Image.open(changed).transpose(Image.Transpose.ROTATE_90).save(changed)
    for stored in ("settings.json", "pixels.json"):  # the second one of a comparison that ended before its trainings
        assert compare.main(arguments) == 1
        assert "images is few, sha256" in capsys.readouterr().err
        (out / stored).unlink()
