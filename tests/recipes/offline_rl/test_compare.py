"""The comparison: complete trainings give tables and a picture, commands are fairseq's, time sets updates."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from fairseq import options
from PIL import Image

import fairseq_plugin  # noqa: F401  registers what the commands name
from fairseq_plugin.data.episode_folder import EpisodeDescription
from recipes.offline_rl import compare
from recipes.offline_rl.compare import Acting
from recipes.shared.architectures import known_names
from recipes.shared.comparison import Results
from recipes.shared.experiment import Record
from tests.recipes.folders import made_by

UPDATES = 10
TARGETS = [0.0, 50.0, 100.0]


DATA = EpisodeDescription("Toy-v0, own data", "", [0.0], [1.0], [-1.0], [1.0], 200, 0.0, 40.0, 100.0)
FACTS = {"data": DATA.as_dict(), "updates": 10, "targets": TARGETS}


def result(seed: int, totals: list[float]) -> Record:
    """The result of a training with returns ``totals`` for ``TARGETS``."""
    episodes = [{"target": target, "seed": 0, "total": total, "steps": 200} for target, total in zip(TARGETS, totals)]
    fields = {"model": "flowformer", "seed": seed, "parameters": 166_000, "seconds": 60.0}
    return {**fields, "updates": [5, 10], "losses": [0.5, 0.1 * seed], "action_mse": 0.1 * seed, "episodes": episodes}


def test_complete_trainings_become_tables_and_a_picture(comparison: Path, tmp_path: Path, capsys) -> None:
    """Nothing is trained again; models act once, and their returns are stored."""
    out = tmp_path / "out"
    made_by(compare.EXPERIMENT.command, shutil.copytree(comparison, out))
    arguments = ["--env", "Pendulum-v1", "--archs", "flowformer,linear_decision", "--seeds", "1", "--episodes", "1"]
    arguments += ["--updates", str(UPDATES), "--out", str(out)]
    assert compare.main(arguments) == 0
    output = capsys.readouterr().out
    assert "flowformer_decision" in output and "linear_decision" in output and "This is not D4RL" in output
    content = json.loads((out / "results.json").read_text())
    assert [row["model"] for row in content["results"]] == ["flowformer", "linear"]
    assert len(content["targets"]) == 5 == len(content["results"][0]["episodes"])
    assert content["results"][0]["updates"] == list(range(1, UPDATES + 1))
    with Image.open(out / "returns.png") as image:
        assert image.width > 600
    modified = (out / "linear.1" / "returns.json").stat().st_mtime_ns
    assert compare.main(arguments) == 0
    assert (out / "linear.1" / "returns.json").stat().st_mtime_ns == modified
    assert compare.main([*arguments, "--context", "20"]) == 1
    assert "--context is 20; allowed in" in capsys.readouterr().err


def test_tables() -> None:
    """Means and deviations over seeds; whether returns follow their targets; missing values are dashes."""
    options = Acting(env="Toy-v0", models=["flowformer", "softmax"], seeds=2, episodes=1)
    records = [result(1, [10.0, 60.0, 110.0]), result(2, [90.0, 90.0, 90.0])]
    models, returns = compare.EXPERIMENT.report(options, FACTS, Results(records, {"softmax.1": "out of memory"})).tables
    assert models.rows[0][1:] == (
        "0.17 M", "0.1500 ± 0.0707", "100 ± 14", "100.0 ± 14.1", "0.50 ± 0.71", "2", "1.0"
    )  # fmt: skip
    assert models.rows[1][1:] == (*"-----", "0", "-") and "not trained: softmax.1: out of memory" in models.notes
    assert returns.rows == [("flowformer_decision", "50 ± 57", "75 ± 21", "100 ± 14")]


@pytest.mark.parametrize("context, batch", [("20", 64), ("full", 4)])
def test_commands_are_fairseqs_and_differ_in_the_model_alone(context: str, batch: int) -> None:
    """The authors' optimiser; fairseq's parser accepts every option of every architecture."""
    own_options = {}
    for name in set(known_names(compare.SUFFIX)) - set(compare.FURTHER_UPDATES):
        command = [str(x) for x in compare.train_arguments(Path("data"), name, context, 600, 1)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, "--cpu"])
        assert (parsed.optimizer, parsed.lr, parsed.clip_norm, parsed.batch_size) == ("adam", [0.001], 0.25, batch)
        assert (parsed.warmup_updates, parsed.windows_per_epoch, parsed.max_update) == (60, 60 * batch, 600)
        own_options[name] = [x for x in command if x != f"{name}_decision"]
    assert {"flowformer", "softmax", "linear", "favor", "cosformer", "rfa_gate"} <= own_options.keys()
    assert all(command == own_options["flowformer"] for command in own_options.values())


@pytest.mark.parametrize(
    "name, attention, wanted",
    [
        ("flowformer+forget+short_conv", "flow", {"forget": "head", "short_conv": 4}),
        ("linear+forget_channel", "linear", {"forget": "channel"}),
        ("gated_delta+short_conv", "gated_delta", {"short_conv": 4}),
    ],
)
def test_additions_are_options_of_the_mechanism(name: str, attention: str, wanted: dict[str, object]) -> None:
    """A name with additions is the mechanism's architecture with the additions' fairseq options."""
    assert compare.architectures(name) == [name]
    command = [str(x) for x in compare.train_arguments(Path("data"), name, "10", 600, 1)]
    parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, "--cpu"])
    assert parsed.arch == f"{name.partition('+')[0]}_decision"
    assert {option: getattr(parsed, f"{attention}_{option}") for option in wanted} == wanted


def test_time_becomes_updates_once(comparison: Path, tmp_path: Path) -> None:
    """More time gives more updates; the number is stored and not measured again."""
    options = Acting(models=["linear"], seeds=1, minutes=1.0, out=tmp_path)
    data = comparison / "behaviour" / "data"
    first = compare.plan_updates(options, data)
    assert first >= 10 and compare.plan_updates(options, data) == first
    (tmp_path / "updates.json").unlink()
    assert compare.plan_updates(dataclasses.replace(options, minutes=1000.0), data) > 3 * first
    assert compare.plan_updates(dataclasses.replace(options, updates=7), data) == 7


def test_unknown_architectures_are_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        compare.main(["--archs", "flowformer,gpt"])
    assert "gpt; allowed: " in capsys.readouterr().err
    for name in ("bc+forget", "softmax+short_conv", "linear+gate"):
        with pytest.raises(SystemExit):
            compare.main(["--models", name])
        plain = name.partition("+")[0]
        assert f"{name}; allowed: {plain}" in capsys.readouterr().err
    assert compare.main(["--context", "0"]) == 1
    assert "--context is 0; allowed: full" in capsys.readouterr().err


def test_models_without_attention_have_commands_of_their_own() -> None:
    """Ten times the updates in as many epochs; AWAC has its own criterion and rate, without clipping."""
    for name, criterion, rate, clip in (("bc", "action_mse", 0.001, 0.25), ("awac", "awac", 0.0003, 0.0)):
        command = [str(x) for x in compare.train_arguments(Path("data"), name, "10", 600, 1)]
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*command, "--cpu"])
        assert (parsed.criterion, parsed.lr, parsed.clip_norm) == (criterion, [rate], clip)
        assert (parsed.warmup_updates, parsed.windows_per_epoch, parsed.max_update) == (600, 600 * 64, 6000)
        assert "--decoder-embed-dim" not in command


def test_names_may_stand_apart_or_between_commas() -> None:
    """``--archs`` is another name of ``--models``; no model is trained twice."""
    assert compare.EXPERIMENT.parse(["--models", "bc", "awac,linear"]).models == ["bc", "awac", "linear"]
    assert compare.EXPERIMENT.parse(["--archs", "bc,bc_decision"]).models == ["bc"]
    assert compare.EXPERIMENT.parse(["--models", "linear_decision+forget", "linear+forget"]).models == ["linear+forget"]
    assert compare.EXPERIMENT.parse([]).models == list(compare.DEFAULT_NAMES)
