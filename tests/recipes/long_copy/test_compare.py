"""The comparison from a text to the table, once; its commands, what counts as right, and the table."""

import json
from pathlib import Path

import pytest
from fairseq import options
from PIL import Image

import fairseq_plugin  # noqa: F401  registers what the commands name
from recipes.long_copy import compare, generated, results
from recipes.long_copy.generated import Counted
from recipes.long_copy.passages import Layout
from recipes.long_copy.plan import CROSS_ATTENTIONS, DEFAULT_MODELS, STOCK, Plan, attentions, reads_source_in_one_state
from recipes.long_copy.prepare import Data
from recipes.long_copy.results import Result
from recipes.shared import comparison
from recipes.shared.comparison import Compared
from recipes.shared.tables import Run

LAYOUT = Layout(2048, 2, 3)
SIZES = {"width": 64, "layers": 1, "heads": 2, "batch_size": 4, "layout": LAYOUT, "beam": 5}
PLAN = Plan(models=["transformer", "flow/linear"], seeds=2, updates=100, lr=4e-3, evaluations=10, more=[], **SIZES)
DATA = Data(LAYOUT, {"train": 900, "valid": 20, "test": 30}, 1)
RUN = Run("python -m recipes.long_copy.compare", "2 CPU cores", "Python 3.11", "2026-11-22", 9.0)


def test_every_model_has_the_same_budget():
    """But for the architecture and its attentions commands are equal; fairseq's own parser takes them all."""
    names = [STOCK, *(f"{name}/{cross}" for name in attentions() for cross in ("softmax", "linear"))]
    names += [f"flow/{cross}" for cross in CROSS_ATTENTIONS] + [
        "flow+short_conv/linear",
        "linear+forget/linear",
        "cosformer/cosformer",
    ]
    assert set(DEFAULT_MODELS) <= set(names)
    commands = []
    for name in names:
        words = [str(word) for word in PLAN.train_arguments(Path("data-bin"), name, 1)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
        sizes = (parsed.encoder_layers, parsed.decoder_layers, parsed.encoder_embed_dim, parsed.decoder_ffn_embed_dim)
        assert sizes == (1, 1, 64, 128) and (parsed.max_source_positions, parsed.max_target_positions) == (2049, 7)
        if name != STOCK:
            assert parsed.lineartime_cross_attention == name.partition("/")[2]
        common = words[: words.index("--arch")] + words[words.index("--encoder-layers") :]
        commands.append(common)
    assert all(command == commands[0] for command in commands)
    conv = PLAN.train_arguments(Path("data-bin"), "flow+short_conv/linear", 1)
    assert conv[conv.index("--flow-short-conv") + 1] == 4


def test_a_target_is_generated_whole():
    """Two passages of three characters: six, whatever is the length of one."""
    command = PLAN.generate_command(Path("data-bin"), Path("best.pt"))
    assert command[command.index("--max-len-b") + 1] == "6"


def test_the_table_has_the_accuracy_of_the_checkpoint_that_is_best():
    """Not the last one's."""
    counted = Counted(10.0, 20.0, 30.0, 5.0)
    one = Result("flow/linear", 1, 9, 50, [(50, 61.5), (100, 43.2)], counted, 0.1, 2**20, 2**20, 9.0, "command")
    (found,) = results.report(PLAN, DATA, Compared([one], {}, 0)).tables
    row = next(row for row in found.rows if row[0] == "flow/linear")
    assert row[2] == "61.5"


def test_state_of_a_source():
    constant = [name for name in DEFAULT_MODELS if reads_source_in_one_state(name)]
    assert "flow/flow_source" in constant and "linear/linear" in constant
    assert not {STOCK, "flow/softmax", "linear/softmax"} & set(constant)


@pytest.mark.parametrize("name", ["gpt", "flow", "gpt/linear", "flow/flow", "flow+nothing/linear"])
def test_unknown_models_are_refused(name, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--file", "x", "--models", name])
    assert f"{name}; allowed: " in capsys.readouterr().err


LOG = """\
S-1\t<mark>a b <mark>c
T-1\ta b c d e f
H-1\t-0.5\ta b c d e f
D-1\t-0.5\ta b c d e f
H-1\t-0.9\tx
S-0\ta
T-0\ta b c d e f
H-0\t-1.5\tx a b d e
T-2\ta b c d e f
H-2\t-1.5\ta b c d e f g
T-3\ta b c d e f
H-3\t-1.5\t
2026-11-22 10:00:00 | INFO | fairseq_cli.generate | Translated 4 sentences (1,020 tokens) in 2.0s (2.00 sentences/s)
"""


def test_what_counts_as_right():
    """Whole targets, with nothing after them; passages and tokens in their places; the best hypothesis alone."""
    counted = generated.count(LOG.splitlines(), 3)
    assert counted == Counted(25.0, 100 * (2 + 0 + 2 + 0) / 8, 100 * (6 + 2 + 6 + 0) / 24, 500.0)
    with pytest.raises(ValueError, match="no end"):
        generated.count(LOG.splitlines()[:-1], 3)


def result(seed, tokens):
    """A training with these numbers."""
    counted = Counted(tokens / 2, tokens / 4, tokens, 40.0)
    return Result(
        "flow/linear", seed, 90_432, 100, [(50, 10.0), (100, tokens)], counted, 0.025, 2**30, 2**29, 60.0, "x"
    )


def test_tables_and_files(tmp_path):
    failed = {"transformer.1": "no memory"}
    report = results.report(PLAN, DATA, Compared([result(1, 40.0), result(2, 60.0)], failed))
    plain = comparison.write(tmp_path, report, RUN)
    rows = (tmp_path / "results.md").read_text().splitlines()
    cells = "90,432 | 50.0 ± 14.1 | 25.0 ± 7.1 | 12.5 ± 3.5 | 50.0 ± 14.1 | 2 | 40 | 512 | 25 | 1,024"
    assert f"| flow/linear | {cells} |" in rows
    assert "| transformer" + 5 * " | -" + " | 0" + 4 * " | -" + " |" in rows
    assert "failed: transformer.1: no memory" in plain and "2 marked passages of 3 each" in plain
    assert json.loads((tmp_path / "results.json").read_text())["results"][0]["counted"]["tokens"] == 40.0
    with Image.open(tmp_path / "results.png") as image:
        assert image.width > 600


@pytest.fixture(scope="module")
def compared(tmp_path_factory, imported_already):
    """A whole comparison of one tiny model: training and generation.

    With sources of more than 1,024 tokens, which fairseq-generate refuses unless it is told.
    """
    out = tmp_path_factory.mktemp("compare")
    (out / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(1500)))
    arguments = ["--file", str(out / "text.txt"), "--out", str(out / "out"), "--quick", "--seeds", "1"]
    arguments += ["--models", "flow/flow_source", "--width", "8", "--updates", "2", "--test", "5"]
    arguments += ["--source-tokens", "1100"]
    assert compare.main(arguments) == 0
    return out / "out", arguments


def test_from_the_text_to_the_table(compared, capsys, monkeypatch):
    """The second time nothing runs; another learning rate is refused in the same folder."""
    out, arguments = compared
    (one,) = json.loads((out / "results.json").read_text())["results"]
    assert one["model"] == "flow/flow_source" and [update for update, _ in one["curve"]] == [1, 2]
    # fairseq-generate tells tenths of a second, of which so few sources may take none.
    assert 0 <= one["counted"]["tokens"] < 100 and 0 <= one["counted"]["milliseconds"] < 60_000
    log = (out / "runs" / "flow-flow_source.1" / "generate.log").read_text()
    assert sum(line.startswith("T-") for line in log.splitlines()) == 5  # given, so not that of --quick
    monkeypatch.setattr(compare, "run", None)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--lr", "0.5"]) == 1
    assert "lr is 0.5; allowed in" in capsys.readouterr().err


def test_no_file(tmp_path, capsys):
    assert compare.main(["--file", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")]) == 1
    assert "none.txt, which is no file" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
