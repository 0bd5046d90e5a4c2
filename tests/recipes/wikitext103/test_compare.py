"""The comparison of language models: its commands, its tables, and once from a text to the results."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
from fairseq import options
from PIL import Image

from common.attention import ATTENTIONS
from recipes.shared import comparison
from recipes.shared.characters import spell
from recipes.shared.comparison import Compared
from recipes.shared.subwords import load_sentencepiece
from recipes.shared.tables import Run
from recipes.shared.trainings import Trained
from recipes.shared.working_folder import working_folder
from recipes.wikitext103 import compare, results
from recipes.wikitext103.plan import Plan, default_names, model_names
from recipes.wikitext103.results import Result
from tests.recipes.folders import made_by

SIZES = {"width": 8, "layers": 1, "heads": 2, "batch_tokens": 64, "tokens_per_sample": 16}
MODELS = ["softmax", "flow", "flow+short_conv"]
PLAN = Plan(models=MODELS, seeds=2, updates=100, lr=3e-3, evaluations=8, more=[], **SIZES)
RUN = Run("python -m recipes.wikitext103.compare", "2 CPU cores", "Python 3.11", "2026-11-22", 9.0)


def test_characters_lose_nothing() -> None:
    assert spell("Ab, ▁c\td\n") == "A b , ▁ U+2581 c U+0009 d\n" and spell("\n") == "\n"


def test_every_model_has_the_same_budget() -> None:
    """fairseq's parser takes every model's options; they differ in the architecture's own, and in the seed."""
    plan = dataclasses.replace(PLAN, models=model_names())
    trainings = plan.trainings(Path("data-bin"))
    assert [one.training.name for one in trainings[:: len(plan.models)]] == [
        f"{plan.models[0]}.{seed}" for seed in (1, 2)
    ]
    common = []
    for one in trainings[: len(plan.models)]:
        words = [str(word) for word in one.training.arguments]
        options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
        common.append(words[words.index("--decoder-layers") :])
        assert ("--arch flowformer_lm" in " ".join(words)) == one.model.startswith("flow")
        assert ("-short-conv 4" in " ".join(words)) == ("+short_conv" in one.model)
    assert all(words == common[0] for words in common)


def test_a_folder_is_of_one_budget() -> None:
    """Models and seeds may be added; anything else that is changed is another budget."""
    assert dataclasses.replace(PLAN, models=["linear"], seeds=3).settings() == PLAN.settings()
    for name in {field.name for field in dataclasses.fields(PLAN)} - {"models", "seeds"}:
        assert dataclasses.replace(PLAN, **{name: None}).settings() != PLAN.settings(), name


def test_windows_and_chunks_are_a_quarter_of_a_sequence() -> None:
    assert PLAN.attention_arguments("daft_conv+short_conv")[2:] == ["--daft-window", 4, "--daft-short-conv", 4]
    assert PLAN.attention_arguments("mixed_chunk")[2:] == ["--mixed-chunk-chunk-size", 4]
    assert PLAN.attention_arguments("local")[2:] == ["--local-window", 4]
    assert PLAN.attention_arguments("flow")[2:] == []  # its chunk size is of speed alone


def test_models_are_the_causal_mechanisms() -> None:
    causal = [name for name, attention in ATTENTIONS.items() if "causal" in attention.supports]
    assert model_names()[: len(causal)] == causal
    assert "daft_conv+short_conv" in model_names() and "softmax+short_conv" not in model_names()
    assert {"softmax", "flow", "linear", "flow+short_conv"} <= {*default_names()} <= {*model_names()}
    assert "combiner" not in default_names()


def test_table_and_files(tmp_path: Path) -> None:
    def result(model: str, seed: int, perplexity: float) -> Result:
        return Result(model, seed, 4321, perplexity, 96, [(12, 9.0), (96, 8.0)], 1000.0, 2**30, 60.0, "fairseq-train")

    found = [result("softmax", 1, 6.0), result("softmax", 2, 7.0), result("flow", 1, 9.0)]
    tokens = {"train": 900, "valid": 50, "test": 50}
    report = results.report(PLAN, tokens, "words", Compared(found, {"flow.2": "Loss exploded"}))
    plain = comparison.write(tmp_path, report, RUN)
    rows = (tmp_path / "results.md").read_text().splitlines()
    spread = f"6.50 ± {statistics.stdev((6.0, 7.0)):.2f}"
    assert f"| softmax | 4,321 | {spread} | 2 | 1,000 | 1,024 | grows | 1.0 |" in rows
    assert "| flow | 4,321 | 9.00 | 1 | 1,000 | 1,024 | constant | 1.0 |" in rows
    assert "| flow+short_conv | - | - | 0 | - | - | constant | - |" in rows
    assert "not trained: flow.2: Loss exploded" in plain and "900 train" in plain
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["results"][2]["perplexity"] == 9.0 and content["plan"]["updates"] == 100
    with Image.open(tmp_path / "results.png") as image:
        assert image.width > 600


def point(split: str, update: int, **values: float) -> str:
    """A line of a log, as fairseq writes it."""
    updates = "num_updates" if split == "train_inner" else f"{split}_num_updates"
    return f"| INFO | {split} | {json.dumps({'epoch': 1, **values, updates: str(update)})}"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sixty short lines."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text\n" for i in range(60)), encoding="utf-8")
    return path


def test_from_a_text_to_the_results(text: Path, tmp_path: Path, imported_already, capsys, monkeypatch) -> None:
    """One training and one that is complete already; a second time nothing runs."""
    out = tmp_path / "out"
    done = out / "runs" / "softmax.1"
    done.mkdir(parents=True)
    trained = Trained("softmax.1", "fairseq-train", 60.0, 2**30, "2026-11-22", "a machine", "versions")
    (done / "result.json").write_text(json.dumps(trained._asdict()))
    lines = ["num. shared model params: 4,321 (num. trained: 4,321)"]
    for update, speed, valid, test in ((1, 400, 20.0, 21.0), (2, 600, 18.0, 19.5)):
        lines.append(point("train_inner", update, wps=speed))
        lines += [point("valid", update, valid_ppl=valid), point("test", update, test_ppl=test)]
    (done / "train.log").write_text("\n".join(lines) + "\n")
    arguments = ["--file", str(text), "--quick", "--out", str(out), "--models", "softmax", "flow+short_conv"]
    arguments += ["--seeds", "1", "--updates", "4", "--width", "8", "--heads", "2", "--tokens-per-sample", "16"]
    arguments += ["--batch-tokens", "64"]
    made_by(compare.COMMAND, out)
    assert compare.main(arguments) == 0
    softmax, flow = json.loads((out / "results.json").read_text())["results"]
    assert (softmax["perplexity"], softmax["update"], softmax["tokens_per_second"]) == (19.5, 2, 500.0)
    assert [update for update, _ in flow["curve"]] == [1, 2, 3, 4] and flow["perplexity"] > 1.0
    assert json.loads((out / "results.json").read_text())["unit"] == "characters"
    monkeypatch.setattr(compare, "binarise", None)
    assert compare.main(arguments) == 0
    capsys.readouterr()
    for change, said in ((["--lr", "0.5"], "lr is 0.5; allowed in"), (["--words"], "characters is False; allowed in")):
        assert compare.main([*arguments, *change]) == 1
        assert said in capsys.readouterr().err


def test_subwords_are_of_the_train_part_and_lose_no_line(text: Path, tmp_path: Path) -> None:
    """A token is a subword or the end of a line; another number of subwords is another text."""

    def prepared(out: Path, subwords: int) -> dict[str, int]:
        with working_folder(out, compare.COMMAND, whole={"data-bin": compare.WRITER}):
            return compare.prepare(text, out, False, None, subwords)

    with pytest.raises(ValueError, match="--subwords is 9000; allowed for this text: at most"):
        prepared(tmp_path / "many", 9000)
    out = tmp_path / "out"
    tokens = prepared(out, 285)
    lines = (out / "text" / "wiki.valid.tokens").read_text(encoding="utf-8").splitlines()
    model = load_sentencepiece(out / "text" / "sentencepiece")
    assert len(model) == 285 - 1 and tokens["valid"] == sum(len(line.split()) + 1 for line in lines)
    assert [model.decode(line.split()) for line in lines] == text.read_text().splitlines()[54:57]
    with pytest.raises(ValueError, match="subwords is 290; allowed in"):
        prepared(out, 290)


def test_what_is_wrong_is_said(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert compare.main(["--file", str(tmp_path / "none.txt"), "--out", str(tmp_path / "out")]) == 1
    assert "none.txt" in capsys.readouterr().err
    for models in (["gpt"], ["softmax+short_conv"]):
        with pytest.raises(SystemExit):
            compare.main(["--file", str(text), "--models", *models])
        assert f"{models[0]}; allowed: " in capsys.readouterr().err
