"""The whole comparison from generator to tables; its commands, its numbers, and the picture of a model."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

from recipes.lra import compare, pictures, published, speed
from recipes.lra.plan import ABLATIONS, MODELS, TABLES, TASKS, Arena
from recipes.shared.experiment import Data
from recipes.shared.scaled_windows import scaled_window_arguments

OPTIONS = Arena(length=256)


def option(arguments, name):
    return arguments[[str(word) for word in arguments].index(name) + 1]


def test_every_model_has_the_same_budget():
    """Commands, ordered by seed, differ only in architecture, FLASH's widths and seed."""
    trainings = compare.EXPERIMENT.planned(dataclasses.replace(OPTIONS, models=list(MODELS)), Data(Path("x"), {}))
    assert [run.training.name for run in trainings[: len(MODELS)]] == [f"{name}.1" for name in MODELS]
    differing = {"--arch", "--encoder-layers", "--encoder-attention-heads", "--encoder-ffn-embed-dim"}
    common = []
    for run in trainings:
        words = [str(word) for word in run.training.arguments]
        pairs = {(word, words[i + 1]) for i, word in enumerate(words[:-1]) if word.startswith("--")}
        common.append({pair for pair in pairs if pair[0] not in differing | {"--seed", "--encoder-attention-dim"}})
    flash = {("--flash-query-dim", "32")}
    reach = {option for name in MODELS for option in scaled_window_arguments(name, 256)[::2]}
    reach |= {option for model in ABLATIONS.values() for option in model.options[::2]}
    assert all({pair for pair in options - flash if pair[0] not in reach} == common[0] for options in common)
    assert option(trainings[0].training.arguments, "--valid-subset") == "valid,test"  # the first selects


def test_ablations_are_options_of_flow_attention():
    """Each table has the paper's number of rows; each row is Flowformer with distinct options, one with none."""
    assert [len(TABLES[table]) for table in ("2", "10", "11")] == [15, 3, 4]
    assert {name for rows in TABLES.values() for name in rows} <= set(MODELS)
    for table in ("10", "11"):
        built = [speed.build(OPTIONS, name, 32).encoder.sentence_encoder.layers[0] for name in TABLES[table]]
        inner = [layer.self_attn.inner.options for layer in built]
        assert len({(attention.phi, attention.competition, attention.allocation) for attention in inner}) == len(inner)
    models = {name: speed.build(OPTIONS, name, 32) for name in ("flow+no_competition", "flow+sigmoid_softmax")}
    first, second = (x.encoder.sentence_encoder.layers[0].self_attn.inner.options for x in models.values())
    assert (first.competition, first.allocation, first.phi) == ("none", "sigmoid", "sigmoid")
    assert (second.competition, second.allocation) == ("sigmoid", "softmax")


def test_a_table_chooses_the_models(capsys):
    assert compare.EXPERIMENT.parse(["--table", "11"]).models == TABLES["11"]
    for options, message in (
        (["--table", "3"], "'2', '10', '11'"),
        (["--table", "2", "--models", "flow"], "not allowed with"),
    ):
        with pytest.raises(SystemExit):
            compare.main(options)
        assert message in capsys.readouterr().err


def test_published_rows_belong_to_models():
    assert set(published.NAMES) <= set(MODELS) and set(published.NAMES.values()) == set(published.ACCURACIES)
    assert published.accuracy("favor", "text") == 65.40 and published.accuracy("flash", "text") is None


def test_other_tasks():
    arguments = dataclasses.replace(OPTIONS, task="retrieval").train_arguments(Path("x"), "flow", 1)
    assert option(arguments, "--task") == "sequence_pair_prediction"
    assert option(arguments, "--arch") == "flowformer_lra_retrieval"
    assert "--init-token" not in dataclasses.replace(OPTIONS, task="pathfinder").train_arguments(Path("x"), "flow", 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "image"], "--task is image without --data"),
        (["--task", "image", "--data", "none"], "--data is none"),
    ],
)
def test_data_that_is_missing(arguments, said, tmp_path, capsys):
    assert compare.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def compared(tmp_path_factory, imported_already):
    """A whole comparison of one tiny model: training, validation, speed."""
    out = tmp_path_factory.mktemp("compare")
    arguments = ["--quick", "--out", str(out), "--models", "flow", "--seeds", "1", "--length", "40", "--updates", "2"]
    arguments += ["--width", "8", "--speed-lengths", "16"]
    assert compare.main(arguments) == 0
    return out, arguments


def test_from_the_generator_to_the_table(compared, capsys, monkeypatch):
    """A second call runs nothing; another learning rate in the same folder is refused."""
    out, arguments = compared
    (result,) = json.loads((out / "results.json").read_text())["results"]
    log = (out / "runs" / "flow.1" / "train.log").read_text()
    assert f'"test_accuracy": "{result["test"]:g}"' in log  # read again, from the selected checkpoint
    assert result["best_test"] >= result["test"] and result["update"] in (1, 2)
    monkeypatch.setattr(compare, "run", None)
    assert compare.main(arguments) == 0
    assert compare.main([*arguments, "--lr", "0.5"]) == 1
    assert "lr is 0.5; allowed in" in capsys.readouterr().err


def test_other_examples_in_the_same_place_are_refused(compared, tmp_path):
    """Trainings on those before would be shown as theirs."""
    out, arguments = compared
    shutil.copytree(out / "data" / "data-bin", tmp_path / "data-bin")
    options = compare.EXPERIMENT.parse([*arguments, "--data", str(tmp_path)])
    assert compare.prepare(options).facts["examples"]["test"] == 40
    labels = tmp_path / "data-bin" / "label" / "test.bin"
    labels.write_bytes(labels.read_bytes()[::-1])
    with pytest.raises(ValueError, match=f"label/test.bin is .*; allowed in {out}"):
        compare.prepare(options)


def test_a_folder_without_examples_is_refused(compared, tmp_path):
    """Nothing is kept of it, so that the right folder is taken afterwards."""
    (tmp_path / "data-bin").mkdir()
    new = tmp_path / "new"
    options = compare.EXPERIMENT.parse([*compared[1], "--data", str(tmp_path), "--out", str(new)])
    with pytest.raises(ValueError, match="has no examples in train; allowed"):
        compare.prepare(options)
    assert not new.exists()


def test_picture_of_an_expression(compared, tmp_path, capsys):
    out, _ = compared
    common = ["--checkpoint", str(out / "runs" / "flow.1" / "checkpoints" / "checkpoint_best.pt")]
    common += ["--data", str(out / "data"), "--output", str(tmp_path / "weights.png")]
    hub = pictures.load(Path(common[1]), out / "data")
    weights = pictures.weigh(hub, pictures.read_row(out / "data", 0))
    assert weights.symbols[0] == "CLS" and len(weights.competition) == len(weights.allocation) == 1
    for layer in (*weights.competition, *weights.allocation):
        assert layer.shape == (2, len(weights.symbols))
    assert weights.competition[0].mean(1) == pytest.approx([1.0, 1.0], abs=1e-5)
    assert pictures.main([*common, "--expression", "[MAX 2 9 [MIN 4 7 ] 0 ]"]) == 0
    assert 500 < plt.imread(tmp_path / "weights.png").shape[1] < 1000  # as wide as ten symbols
    for further, message in (
        (["--expression", "[MAX 2 x ]"], "'x'"),
        (["--expression", "[MAX " + "1 " * 50 + "]"], "allowed: 40"),
        (["--example", "99"], "--example is 99"),
    ):
        (tmp_path / "weights.png").unlink(missing_ok=True)
        assert pictures.main([*common, *further]) == 1
        assert message in capsys.readouterr().err
    assert pictures.main(["--checkpoint", str(tmp_path / "none.pt"), "--data", str(out / "data")]) == 1
    assert pictures.main([*common[:2], "--data", str(tmp_path)]) == 1


def test_tasks_are_those_of_the_architectures():
    from fairseq_plugin.models.long_range_arena import OFFICIAL

    assert set(TASKS) == set(OFFICIAL)
