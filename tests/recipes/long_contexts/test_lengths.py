"""Perplexity by position: windows, bins, models that read longer inputs, and once from a text to the results."""

import json
import math
from pathlib import Path

import pytest
import torch
from fairseq import options

from common.attention import ATTENTIONS
from common.files.json_files import read
from recipes.long_contexts import lengths, positions
from recipes.long_contexts.lengths import default_names, names
from recipes.long_contexts.lengths_report import best_first, refusals
from recipes.long_contexts.positions import Bin, binned, edges, everywhere, windows
from recipes.shared.comparison import Results
from recipes.shared.experiment import Data, Record
from recipes.shared.language_models import WHOLE
from recipes.shared.working_folder import working_folder

SIZES = "--width 8 --layers 1 --heads 2 --batch-tokens 64 --tokens-per-sample 16".split()


def test_bins_double_on_both_sides_of_the_training_length() -> None:
    assert edges(256, 2048) == [0, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert edges(24, 72) == [0, 1, 3, 6, 12, 24, 48, 72]


def test_every_bin_is_of_the_same_text() -> None:
    """Each piece of the text that counts stands once at every distance from the beginning of a window."""
    stream = torch.arange(1 + 12 * 4)
    found = windows(stream, 4, 16, most=100)
    assert found.shape == (9, 17) and found[2].tolist() == list(range(8, 25))
    kept = everywhere(9, 4, 16)
    for begin in range(0, 16, 4):
        predicted = found[:, 1:][:, begin : begin + 4][kept[:, begin : begin + 4]]
        assert predicted.tolist() == list(range(13, 37))
    assert len(windows(stream, 4, 16, most=5)) == 5
    with pytest.raises(ValueError, match="at least 29"):
        windows(stream[:28], 4, 16, most=100)


def test_bins_are_means_over_that_text() -> None:
    found = windows(torch.arange(200), 8, 32, most=100)
    loss = found[:, 1:].double() + torch.arange(32)  # of the text, and of the position
    parts = binned(loss, 8)
    assert [(part.begin, part.end) for part in parts] == [(0, 1), (1, 2), (2, 4), (4, 8), (8, 16), (16, 32)]
    text = torch.arange(1 + 24, 1 + 8 * len(found)).double().mean()
    for part in parts[-2:]:
        assert part.loss == pytest.approx(float(text) + (part.begin + part.end - 1) / 2)
    assert Bin(0, 1, 2.0, 5).perplexity == pytest.approx(math.exp(2)) and Bin(0, 1, 1e4, 5).perplexity == math.inf


def test_every_causal_mechanism_is_trained_with_the_longer_limit() -> None:
    causal = {name for name, attention in ATTENTIONS.items() if "causal" in attention.supports}
    assert causal | {"flash", "linear+forget", "flow+forget", "flow+short_conv"} <= {*default_names()} <= {*names()}
    plan = lengths.EXPERIMENT.parse(["--file", "text.txt", *SIZES])
    for name in default_names():
        words = [str(word) for word in plan.train_arguments(Path("data-bin"), name, 1)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
        assert (parsed.max_target_positions, parsed.tokens_per_sample) == (128, 16)
        assert getattr(parsed, "no_token_positional_embeddings", False) == name.endswith("+no_positions")
        assert (parsed.decoder_layers, parsed.decoder_ffn_embed_dim) == ((2, 16) if "flash" in name else (1, 32))


def test_the_best_at_the_last_positions_comes_first() -> None:
    """A model that cannot read so far comes last, and why it cannot is kept."""

    def measured(model: str, seed: int, last: float, refused: str | None = None) -> Record:
        bins = [] if refused else [Bin(0, 16, 1.0, 9)._asdict(), Bin(16, 32, math.log(last), 9)._asdict()]
        return {"model": model, "seed": seed, "bins": bins, "refused": refused}

    records = [measured("rfa", 1, 18.0), measured("flow", 1, 20.0), measured("flow", 2, 12.0)]
    records.append(measured("quadratic", 1, 0.0, "no weights for so many"))
    assert best_first(["quadratic", "rfa", "flow"], records) == ["flow", "rfa", "quadratic"]
    found = refusals(None, Data(Path(), {}), Results(records, {}))
    assert found == {"refused": {"quadratic.1": "no weights for so many"}}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Lines with something to learn."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"to be or not to be, {i}\n" for i in range(400)), encoding="utf-8")
    return path


def test_from_a_text_to_the_results_and_from_another_comparison(
    text: Path, tmp_path: Path, imported_already, capsys
) -> None:
    """Two short trainings; then the same models again, with windows of another length."""
    out = tmp_path / "out"
    arguments = ["--file", str(text), "--quick", "--out", str(out), "--models", "linear", "daft_full", "--times", "2"]
    arguments += ["--width", "8", "--heads", "2", "--layers", "1", "--tokens-per-sample", "16", "--batch-tokens", "64"]
    assert lengths.main(arguments) == 0
    results = json.loads((out / "results.json").read_text())["results"]
    assert {one["model"]: len(one["bins"]) for one in results} == {"linear": 6, "daft_full": 6}
    assert all(1 < math.exp(part["loss"]) < 1000 for one in results for part in one["bins"])
    kept = out / "positions" / "linear.1.json"
    kept.write_text(json.dumps({**read(kept, "bins"), "refused": "as it was"}))
    assert lengths.main(arguments) == 0  # goes on: nothing is trained or measured again
    assert "as it was" in capsys.readouterr().out
    longer = ["--runs", str(out), "--out", str(tmp_path / "longer"), "--times", "4"]
    assert lengths.main(longer) == 0
    shown = capsys.readouterr().out
    results = {one["model"]: one for one in json.loads((tmp_path / "longer" / "results.json").read_text())["results"]}
    assert len(results["linear"]["bins"]) == 7 and results["daft_full"]["bins"] == []
    assert "daft_full.1 cannot read longer inputs: " in shown and "allowed: 32" in results["daft_full"]["refused"]
    for change, said in (
        ([*arguments, "--windows", "9"], "windows is 9; allowed in"),
        ([*longer, "--file", str(text)], "--file and --runs"),
        (["--out", str(tmp_path / "none")], "--file and --runs"),
        ([*longer, "--times", "1"], "--times is 1"),
        (["--runs", str(tmp_path), "--out", str(tmp_path / "none")], "without settings.json"),
    ):
        assert lengths.main(change) == 1
        assert said in capsys.readouterr().err


def test_a_quick_run_has_enough_text_for_its_windows(tmp_path: Path, imported_already) -> None:
    """The windows of the default size, from the lines that --quick leaves of a text."""
    text = tmp_path / "long.txt"
    text.write_text("".join(f"to be or not to be, {i}\n" for i in range(9_000)), encoding="utf-8")
    options = lengths.EXPERIMENT.parse(["--file", str(text), "--quick", "--out", str(tmp_path / "out")])
    with working_folder(options.out, lengths.COMMAND, whole=WHOLE):
        assert lengths.text_of(options).facts["windows"] >= options.times


def test_other_models_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt"):
        positions.load_model(tmp_path / "other.pt", tmp_path, 32)
