"""Tasks through fairseq's commands: they learn, evaluate as they were validated, and what they train predicts and acts.

All commands run in one process. That trainings go on as if they had never stopped is in ../commands/test_resumption.py.
"""

import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from fairseq_plugin import DecisionTransformer, TimeSeriesClassifier
from fairseq_plugin.data.episode_folder import write_folder as write_recorded
from fairseq_plugin.data.series_folder import write_folder as write_series
from fairseq_plugin.models._decision import DecisionModel
from fairseq_plugin.models.decision_baselines import AdvantageWeightedActorCritic, BehaviourCloning
from fairseq_plugin.tasks.span_extraction import HEAD
from tests.fairseq_plugin.helpers import episodes, masked_models, pixels, series, spans, tasks
from tests.fairseq_plugin.helpers.commands import USER_DIR, NamedRuns, run_named
from tests.fairseq_plugin.helpers.episodes import ACTION, STATE
from tests.fairseq_plugin.helpers.language_models import SMALL
from tests.fairseq_plugin.helpers.logs import entries, losses
from tests.fairseq_plugin.helpers.series import CHANNELS, LABELS, LIMIT

STEPS = 20  # that decision models have embeddings for
SERIES = "--task time_series_classification --criterion sentence_prediction --valid-subset test --batch-size 8"
TOKENS = f"--tokens-per-sample {pixels.SHAPE.length}"
PIXELS = f"--task pixel_modeling {TOKENS}"
SPANS = " ".join(spans.TASK)
LEARNED = "--encoder-learned-pos"
WHOLE = "--required-batch-size-multiple 1"
#: A masked model with learned positions, that the training of spans begins with.
MASKED = "--task masked_lm --criterion masked_lm --arch softmax_mlm --optimizer adam --max-update 2 --batch-size 8 "
MASKED += f"--tokens-per-sample 32 --max-positions 32 --no-epoch-checkpoints {LEARNED} "
MASKED += " ".join(masked_models.small("softmax_mlm"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """The output of every command; together they take the seconds."""
    root = tmp_path_factory.mktemp("runs")
    series.write_waves(root / "data of series")
    episodes.write_episodes(root / "data of episodes")
    pixels.write_pixels(root / "data of pixels")
    spans.write_names(root / "data of spans")
    (root / "data of text").mkdir()
    for file in (root / "data of spans" / "dict.txt", *(root / "data of spans" / "document").iterdir()):
        (root / "data of text" / file.name).symlink_to(file)

    def train(kind: ModuleType, name: str, arch: str, words: str = "", folder: str = "") -> list[str]:
        data = root / f"data of {kind.__name__.rpartition('.')[2]}"
        return ["train", *kind.training_command(data, str(root / (folder or name)), arch, *words.split())]

    def use(program: str, data: str, words: str, path: str = "") -> list[str]:
        found = ["--path", str(root / path)] if path else ["--save-dir", str(root / data)]
        return [program, str(root / f"data of {data}"), *words.split(), *found]

    masked = f"{LEARNED} --reset-optimizer --reset-dataloader --reset-meters --reset-lr-scheduler --restore-file "
    masked += str(root / "text" / "checkpoint_last.pt")
    best = f"{masked} --best-checkpoint-metric f1 --maximize-best-checkpoint-metric --max-epoch 10"
    validated = f"--task pixel_modeling --valid-subset test --batch-size 4 {WHOLE}"
    of_pixels, sampled = "pixels/checkpoint_last.pt", "--batch-size 4 --sampling --beam 2 --nbest 2 --prefix-size 30"
    updates = f"--max-update 12 --log-interval 1 --seed 1 --optimizer adam --lr 3e-3 {WHOLE}"
    commands = {
        "series": train(series, "series", "flowformer_time_series"),
        "longer series": train(
            series, "longer series", "flash_time_series", "--max-length 31 --pooling mean --flash-chunk-size 8"
        ),
        "series, validated": use("validate", "series", f"{SERIES} {WHOLE}", "series/checkpoint_last.pt"),
        "acts": train(episodes, "acts", "flowformer_decision"),
        "acts on episodes": train(episodes, "acts on episodes", "linear_decision", "--max-epoch 1 --context full"),
        "acts in a window": train(episodes, "acts in a window", "cosformer_decision", "--max-epoch 1"),
        "clones": train(episodes, "clones", "bc_decision", "--max-epoch 3"),
        "weighs": train(episodes, "weighs", "awac_decision", "--criterion awac --max-epoch 3"),
        "begun": train(episodes, "begun", "awac_decision", "--criterion awac --max-epoch 1", "resumed"),
        "resumed": train(episodes, "resumed", "awac_decision", "--criterion awac --max-epoch 3"),
        "pixels": use("train", "pixels", f"{PIXELS} --arch flowformer_lm --batch-size 8 {updates} {' '.join(SMALL)}"),
        "pixels, evaluated": use("eval_lm", "pixels", f"{PIXELS} --batch-size 4", of_pixels),
        "pixels, evaluated as text": use("eval_lm", "pixels", f"{TOKENS} --batch-size 4", of_pixels),
        "pixels, validated": use("validate", "pixels", validated, of_pixels),
        "pixels, generated": use("generate", "pixels", f"{PIXELS} {sampled} {WHOLE}", of_pixels),
        "masked": use("train", "text", MASKED),
        "spans": train(spans, "spans", "softmax_mlm", best),
        "still": train(spans, "still", "softmax_mlm", f"{masked} --lr 0 --max-update 1"),
        "spans, validated": use(
            "validate", "spans", f"{' '.join(spans.TASK)} --batch-size 5", "spans/checkpoint_best.pt"
        ),
    }
    always = ["--user-dir", USER_DIR, "--cpu", "--log-format", "json"]
    return run_named(root, {name: (f"fairseq_cli.{x[0]}", [*x[1:], *always], "") for name, x in commands.items()})


def last(runs: NamedRuns, name: str) -> dict[str, torch.Tensor]:
    return torch.load(runs.folder / name / "checkpoint_last.pt")["model"]


# ---- They learn, and evaluate as they were validated


def test_series(runs: NamedRuns) -> None:
    """Guessing is right in 33 %; the log says how many series were cut after the steps of the longest in training."""
    validated, trained = (
        entries(runs.outputs[x], "test")[-1]["test_accuracy"] for x in ("series, validated", "series")
    )
    assert validated == trained > 75.0
    longer = sum(len(one) > LIMIT for one in series.waves(24, 2, LIMIT + 4)[0])
    assert f"{longer} of them cut after {LIMIT} steps" in runs.outputs["series"]
    assert "of them cut" not in runs.outputs["longer series"]


def test_episodes(runs: NamedRuns) -> None:
    """The error of actions, and those of AWAC's critics, whose log has the error of actions, too."""
    first, last = (entries(runs.outputs["acts"], "train")[i]["train_loss"] for i in (0, -1))
    assert last < 0.5 * first
    first, last = (entries(runs.outputs["clones"], "train")[i]["train_loss"] for i in (0, -1))
    assert last < first
    first, last = (entries(runs.outputs["weighs"], "train")[i] for i in (0, -1))
    assert last["train_critic_loss"] < first["train_critic_loss"]
    assert 0.0 < last["train_action_mse"] < 1.0  # two actions are as likely in a state


def test_awac_goes_on_as_if_never_stopped(runs: NamedRuns) -> None:
    """Critics, slow copies, random actions and Adam's state come back: the same losses, the same weights."""
    begun, resumed, whole = (losses(runs.outputs[x]) for x in ("begun", "resumed", "weighs"))
    assert begun + resumed == whole
    one, other = last(runs, "weighs"), last(runs, "resumed")
    assert all(torch.equal(one[name], other[name]) for name in one) and int(one["updates"]) > 0


def test_pixels(runs: NamedRuns) -> None:
    """Bits per dimension, the mean over all values of the test images, under either task; images are continued."""
    trained = losses(runs.outputs["pixels"])
    assert len(trained) == 12 and trained[-1] < trained[0] - 0.5
    checkpoint, count = str(runs.folder / "pixels" / "checkpoint_last.pt"), pixels.COUNTS["test"]
    (model,), _, _ = load_model_ensemble_and_task([checkpoint], {"data": str(runs.folder / "data of pixels")})
    target = torch.from_numpy(pixels.toy_images("test", count).reshape(count, -1).astype(np.int64)) + 4
    with torch.no_grad():
        scores = model.eval()(torch.cat([torch.full((count, 1), 2), target[:, :-1]], dim=1))[0].double()
    expected = -scores.log_softmax(-1).gather(-1, target[..., None]).mean().item() / np.log(2)
    for name in ("pixels, evaluated", "pixels, evaluated as text"):
        found = re.search(r"Evaluated 420 tokens[^$]*Loss \(base 2\): ([\d.]+)", runs.outputs[name])
        assert float(found[1]) == pytest.approx(expected, abs=1e-4)
    (validated,) = entries(runs.outputs["pixels, validated"], "test")
    assert validated["test_loss"] == pytest.approx(expected, abs=1e-3)
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", runs.outputs["pixels, generated"], re.MULTILINE))
    samples = re.findall(r"^H-(\d+)\t\S+\t(.*)$", runs.outputs["pixels, generated"], re.MULTILINE)
    assert len(samples) == 2 * count == 2 * len(targets)
    for index, sample in samples:
        values = sample.split()
        assert len(values) == pixels.SHAPE.length and all(0 <= int(value) <= 255 for value in values)
        assert values[:30] == targets[index].split()[:30]


def test_spans(runs: NamedRuns) -> None:
    """Of a span by chance F1 is below 10; the best checkpoint is that of the highest F1, and validates so.

    At a learning rate of 0 all weights are the pretrained ones, and the head is new.
    """
    found = entries(runs.outputs["spans"], "valid")
    assert found[-1]["valid_f1"] > 80 and found[-1]["valid_em"] > 60
    assert found[-1]["valid_loss"] < 0.7 * found[0]["valid_loss"]
    best = max(entry["valid_f1"] for entry in found)
    state = torch.load(runs.folder / "spans" / "checkpoint_best.pt")
    assert state["extra_state"]["best"] == found[-1]["valid_best_f1"] == best
    (again,) = entries(runs.outputs["spans, validated"], "valid")  # with batches of another size
    assert again["valid_f1"] == best
    pretrained, still = last(runs, "text"), last(runs, "still")
    new = {name for name in still if name not in pretrained}
    assert new and all(name.startswith(f"classification_heads.{HEAD}.") for name in new)
    assert all(torch.equal(still[name], tensor) for name, tensor in pretrained.items())


# ---- What they train predicts


@pytest.mark.parametrize("run", ["series", "longer series"])
def test_prediction_from_python(runs: NamedRuns, run: str) -> None:
    """From the checkpoint alone, without the data: labels as given, of ragged lists, arrays and nothing at all."""
    hub = TimeSeriesClassifier.from_pretrained(str(runs.folder / run), "checkpoint_last.pt")
    given, labels = series.waves(24, 2, LIMIT + 4)
    predicted = hub.predict(given, cut=True, batch_size=7)
    right = 100.0 * np.mean(predicted == np.array(labels))
    assert right == pytest.approx(entries(runs.outputs[run], "test")[-1]["test_accuracy"], abs=0.06)
    chances = hub.probabilities(given, cut=True)
    assert set(hub.labels.tolist()) == set(LABELS) and np.allclose(chances.sum(1), 1.0, atol=1e-5)
    assert (hub.labels[chances.argmax(1)] == predicted).all()
    array = np.stack([one[:6] for one in given]).astype(np.float32)
    assert (hub.predict(array) == hub.predict(list(array))).all() and hub.predict([]).shape == (0,)


def test_what_cannot_be_predicted_is_refused(runs: NamedRuns) -> None:
    hub = TimeSeriesClassifier.from_pretrained(str(runs.folder / "series"), "checkpoint_last.pt")
    good, large = np.full((5, CHANNELS), 50.0), [np.full((5, CHANNELS), 1e6)]
    for bad, said in (
        ([good, np.full((5, CHANNELS), np.nan)], r"series 1 is nan at \(0, 0\)"),
        ([good, np.full((5, CHANNELS), 1e39)], r"series 1.* is 1e\+39 .*float32"),
        ([good, np.full((5, CHANNELS), 1e38)], "scores are not finite"),
        ([good, np.zeros((5, CHANNELS + 1))], rf"series 1 has shape \(5, 4\); allowed: .*{CHANNELS}"),
        ([good, np.zeros((0, CHANNELS))], "series 1 has shape"),
        ([good, np.full((LIMIT + 1, CHANNELS), 50.0)], f"series 1 has {LIMIT + 1} steps; allowed: at most {LIMIT}"),
        (good, rf"series has shape \(5, {CHANNELS}\); allowed"),
    ):
        with pytest.raises(ValueError, match=said):
            hub.predict(bad)
    with pytest.raises(ValueError, match="batch_size is 0"):
        hub.predict([good], batch_size=0)
    assert len(hub.predict(large)) == 1
    with pytest.raises(ValueError, match="float16"):
        hub.half().predict(large)


def test_series_of_other_folders(runs: NamedRuns, tmp_path: Path) -> None:
    """A checkpoint is evaluated with its own statistics and classes; other channels and labels are refused.

    A training that begins with the weights of another, whose labels are others, is told of it.
    """
    hub = TimeSeriesClassifier.from_pretrained(str(runs.folder / "series"), "checkpoint_last.pt")
    given, labels = series.waves(6, 3)
    two = [i for i, label in enumerate(labels) if label != "Fast"]
    write_series(tmp_path / "fewer", {"train": ([given[i] for i in two], [labels[i] for i in two])})
    hub.task.cfg.data = str(tmp_path / "fewer")
    hub.task.load_dataset("train")
    dataset = hub.task.dataset("train")
    assert [hub.labels[i] for i in dataset.classes.tolist()] == [labels[i] for i in two]
    assert torch.allclose(dataset[0]["source"], hub.prepare([given[two[0]]])[0])
    write_series(tmp_path / "more", {"train": (given, ["loud", *labels[1:]])})
    write_series(tmp_path / "wide", {"train": ([np.zeros((4, 5))], ["slow"])})
    for folder, said in (("more", "label 'loud'"), ("wide", f"5 channels; allowed: {CHANNELS}")):
        hub.task.cfg.data = str(tmp_path / folder)
        with pytest.raises(ValueError, match=said):
            hub.task.load_dataset("train")
    capitals = [label.upper() for label in labels]
    write_series(tmp_path / "series", {"train": (given, capitals)})
    task, args = tasks.typed("series", tmp_path, "--arch", "flowformer_time_series")
    there, here = (re.escape(repr(sorted(set(x)))) for x in (LABELS, capitals))
    with pytest.warns(UserWarning, match=f"labels={there}.*labels={here}"):
        task.build_model(args).load_state_dict(last(runs, "series"))


# ---- What they train acts


def load(runs: NamedRuns, run: str):
    return DecisionTransformer.from_pretrained(str(runs.folder / run), "checkpoint_last.pt")


def act_in(hub, context: int | str | None) -> np.ndarray:
    """The actions (steps, N, A) of two episodes whose states follow from the actions."""
    rng = np.random.default_rng(0)
    hub.reset([3.0, 12.0], context)
    states, rewards, found = 5.0 + rng.normal(size=(2, STATE)), None, []
    for _ in range(STEPS):
        found.append(hub.act(states, rewards))
        rewards = found[-1][:, 0]
        states = 5.0 + 0.5 * (states - 5.0) + rng.normal(size=(2, STATE)) + found[-1].sum(1, keepdims=True)
    return np.stack(found)


def test_a_higher_target_gives_other_actions(runs: NamedRuns) -> None:
    """In the toy's data the sign of an action is that of a high return."""
    hub, states, actions = load(runs, "acts"), np.array([[7.0, 7.0, 5.0], [3.0, 3.0, 5.0]]), []
    for target in (0.0, 10.0):
        hub.reset([target, target])
        actions.append(hub.act(states) * np.array([[1.0], [-1.0]]))
    assert (actions[0] < 0).all() and (actions[1] > 0).all()


def test_the_state_gives_the_actions_of_recomputation(runs: NamedRuns) -> None:
    """Where the context holds the whole episode; by default a window of as many steps as in training is read."""
    for run, context in (("acts on episodes", STEPS), ("acts on episodes", None), ("acts", STEPS)):
        assert np.allclose(act_in(load(runs, run), context), act_in(load(runs, run), "full"), atol=1e-5)
    hub = load(runs, "acts")
    short, whole = act_in(hub, None), act_in(hub, STEPS)
    assert np.array_equal(short, act_in(hub, 5))
    assert np.allclose(short[:5], whole[:5], atol=1e-5) and not np.allclose(short[5:], whole[5:], atol=1e-4)


def test_one_episode_is_a_row_of_several(runs: NamedRuns) -> None:
    hub, states = load(runs, "acts"), np.array([[7.0, 4.0, 5.0], [3.0, 5.0, 5.0]])
    hub.reset([10.0, 2.0], "full")
    several = hub.act(states), hub.act(states + 1.0, [0.5, 1.0])
    hub.reset(10.0, "full")
    single = hub.act(states[0]), hub.act(states[0] + 1.0, 0.5)
    assert single[0].shape == (ACTION,)
    assert all(np.allclose(one, many[0], atol=1e-6) for one, many in zip(single, several))


@pytest.mark.parametrize(("run", "kind"), [("clones", BehaviourCloning), ("weighs", AdvantageWeightedActorCritic)])
def test_policies_of_states_act_whatever_is_asked_for(runs: NamedRuns, run: str, kind: type) -> None:
    """Loaded by their own class and by the common one, from a window and from the state."""
    actions = []
    for model, target, context in ((kind, 0.0, None), (DecisionModel, 10.0, "full")):
        hub = model.from_pretrained(str(runs.folder / run), "checkpoint_last.pt")
        hub.reset(target, context)
        actions.append([hub.act(np.full(STATE, 4.0)), hub.act(np.full(STATE, 6.0), 1.0)])
    assert np.allclose(*actions, atol=1e-6) and not np.allclose(actions[0][0], actions[0][1])


def test_what_cannot_be_acted_is_refused(runs: NamedRuns, tmp_path: Path) -> None:
    hub, state = load(runs, "acts"), np.zeros(STATE)
    with pytest.raises(ValueError, match="before reset"):
        hub.act(state)
    rows = [
        (hub.reset, (np.nan,), "target is nan"),
        (hub.reset, ([],), r"target is \[\]"),
        (hub.reset, (1e300,), r"target is 1e\+300.*float32"),
        (hub.reset, (1.0, 0), "context is 0"),
        (hub.act, (np.zeros(STATE + 1), None), r"states have shape \(4,\) at step 0; allowed: \(3,\)"),
        (hub.act, (np.full(STATE, np.nan), None), "not finite at step 0"),
        (hub.act, (np.full(STATE, 1e39), None), r"state at step 0 is 1e\+39.*float32"),
        (hub.act, (state, 1.0), "rewards are 1.0 at step 0; allowed: None"),
        (hub.act, (state, None), "rewards are None at step 1; allowed"),
        (hub.act, (state, [1.0, 2.0]), "at step 1; allowed: 1 finite numbers"),
        (hub.act, (state, 1e300), r"return that remains at step 1 is .*float32"),
    ]
    hub.reset(1.0)
    for call, bad, said in rows:
        if said.startswith("rewards are None"):
            hub.act(state)
        with pytest.raises(ValueError, match=said):
            call(*bad)
    for _ in range(STEPS - 1):  # the refused ones were no steps
        hub.act(state, 0.0)
    with pytest.raises(ValueError, match=f"more than {STEPS} steps; allowed: {STEPS}, as --max-episode-length"):
        hub.act(state, 0.0)
    with pytest.raises(ValueError, match=f"'full', {STEPS} steps; allowed for this attention: at most 5, .*--context"):
        load(runs, "acts in a window").reset(1.0, "full")
    narrow = [one._replace(states=one.states[:, :1]) for one in episodes.episodes(2)]
    write_recorded(tmp_path / "other", {"train": narrow}, "toy")
    hub.task.cfg.data = str(tmp_path / "other")
    with pytest.raises(ValueError, match="states and actions of 1 and 2 numbers; allowed: 3 and 2"):
        hub.task.load_dataset("train")
