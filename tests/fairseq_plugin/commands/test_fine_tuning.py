"""Fine-tuning masked models on labelled sentences with fairseq's sentence_prediction, as its RoBERTa recipe does."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.commands import masked_training_command, run_in_turn
from tests.fairseq_plugin.helpers.fine_tuning import LIMIT, fine_tuning, preprocessing, validation
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.masked_models import build_masked, build_random, features

HEAD = "classification_heads.sentence_classification_head."
#: Architecture and options of each fine-tuning; the tweaks are those of the paper's Table 4.
RUNS = {
    "plain": ("flash_mlm",),
    "all tweaks": ("flash_mlm", "--flash-first-softmax", "--flash-first-to-all", "--flash-chunk-size", "8"),
    "flash_quad_mlm": ("flash_quad_mlm", "--flash-first-softmax"),
    "transformer_pp_mlm": ("transformer_pp_mlm",),
}


class FineTuned(NamedTuple):
    """Labelled data, pretrained checkpoints by architecture, and what became of each fine-tuning."""

    data: str
    text: Path
    pretrained: dict[str, Path]
    folders: dict[str, Path]
    training: dict[str, str]
    validation: dict[str, str]


@pytest.fixture(scope="module")
def fine_tuned(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    """Preprocessing, pretraining, every fine-tuning, validation; and "restored", one update at a learning rate of 0."""
    root = tmp_path_factory.mktemp("fine_tuning")
    text = root / "text"
    data = str(text / "bin")
    prepared = preprocessing(text, f"{data_bin}/dict.txt")
    pretrained = {arch: root / arch / "checkpoint_last.pt" for arch in sorted({arch for arch, *_ in RUNS.values()})}
    pretraining = [
        ("fairseq_cli.train", masked_training_command(data_bin, str(path.parent), arch, "--max-update", "8"), "")
        for arch, path in pretrained.items()
    ]
    runs = {**RUNS, "restored": (*RUNS["all tweaks"], "--lr", "0", "--max-update", "1")}
    folders = {name: root / name.replace(" ", "_") / "out" for name in runs}
    training = [
        ("fairseq_cli.train", fine_tuning(data, pretrained[arch], folders[name], arch, *arguments), "")
        for name, (arch, *arguments) in runs.items()
    ]
    validated = [("fairseq_cli.validate", validation(data, folders[name]), "") for name in RUNS]
    outputs = run_in_turn(*prepared, *pretraining, *training, *validated)
    outputs = outputs[len(prepared) + len(pretraining) :]
    return FineTuned(data, text, pretrained, folders, dict(zip(runs, outputs)), dict(zip(RUNS, outputs[len(runs) :])))


@pytest.mark.parametrize("run", RUNS)
def test_learns_the_labels(fine_tuned: FineTuned, run: str) -> None:
    """From chance to nearly all of the held-out sentences; the word counts leave no doubt about more of them."""
    log = fine_tuned.training[run]
    assert "Loaded checkpoint" in log
    assert entries(log, "train_inner")[0]["accuracy"] < 85.0
    assert entries(log, "valid")[-1]["valid_accuracy"] >= 95.0


@pytest.mark.parametrize("run", RUNS)
def test_validation(fine_tuned: FineTuned, run: str) -> None:
    """fairseq-validate finds the accuracy that the training found last."""
    (validated,) = entries(fine_tuned.validation[run], "valid")
    last = entries(fine_tuned.training[run], "valid")[-1]
    assert validated["valid_accuracy"] == last["valid_accuracy"]
    assert abs(validated["valid_loss"] - last["valid_loss"]) < 2e-3


@pytest.mark.parametrize("run", RUNS)
def test_prediction_in_python(fine_tuned: FineTuned, run: str) -> None:
    """``from_pretrained`` brings head and tweaks; it predicts the label of single sentences, without padding."""
    arch, *arguments = RUNS[run]
    hub = (
        ARCH_MODEL_REGISTRY[arch]
        .from_pretrained(str(fine_tuned.folders[run]), "checkpoint_last.pt", data_name_or_path=fine_tuned.data)
        .eval()
    )
    for layer in hub.model.encoder.sentence_encoder.layers if arch.startswith("flash") else ():
        assert layer.unit.first_softmax == ("--flash-first-softmax" in arguments)
        assert layer.unit.first_to_all == ("--flash-first-to-all" in arguments)
        assert layer.unit.chunk_size == {"flash_quad_mlm": None}.get(arch, 8 if run == "all tweaks" else 16)
    words, labels = hub.task.source_dictionary, hub.task.label_dictionary
    correct = 0
    sentences = (fine_tuned.text / "valid.input0").read_text().splitlines()[:40]
    expected = (fine_tuned.text / "valid.label").read_text().split()
    for sentence, label in zip(sentences, expected):
        tokens = words.encode_line(f"<s> {sentence}", add_if_not_exist=False).long()
        with torch.no_grad():
            best = hub.predict("sentence_classification_head", tokens).argmax().item()
        correct += labels.string([best + labels.nspecial]) == label
    assert correct >= 37


def test_pretrained_weights_are_restored(fine_tuned: FineTuned) -> None:
    """Each is the pretrained one; of the biases by distance, the distances of the smaller chunk; the head is new."""
    pretrained, restored = (
        weights(torch.load(path)["model"])
        for path in (fine_tuned.pretrained["flash_mlm"], fine_tuned.folders["restored"] / "checkpoint_last.pt")
    )
    names = {name for name in restored if not name.startswith("classification_heads.")}
    assert names == set(pretrained)
    biases = {name for name in names if name.endswith("unit.bias.weight")}
    assert len(biases) == 2
    for name in names:
        expected = pretrained[name][:, 8:-8] if name in biases else pretrained[name]  # 31 distances, 15 of them left
        assert torch.equal(restored[name], expected), name
    assert {name[len(HEAD) :]: tuple(value.shape) for name, value in restored.items() if name not in names} == {
        "dense.weight": (32, 32),
        "dense.bias": (32,),
        "out_proj.weight": (2, 32),
        "out_proj.bias": (2,),
    }
    log = fine_tuned.training["restored"]
    assert log.count("a relative bias for 16 tokens is read for 8") == len(biases)
    assert "a relative bias" not in fine_tuned.training["plain"]


@pytest.mark.parametrize(
    ("arch", "argument", "value", "name"),
    [
        ("flash_mlm", "--flash-chunk-size", "32", "unit.bias.weight"),
        ("flash_mlm", "--flash-query-dim", "32", "unit.in_proj.weight"),
        ("flash_quad_mlm", "--max-positions", "512", "unit.bias"),
        ("flash_quad_mlm", "--max-positions", "64", "unit.bias.weight"),
    ],
)
def test_what_does_not_fit_is_refused(fine_tuned: FineTuned, arch: str, argument: str, value: str, name: str) -> None:
    """Larger chunks, other query widths, more positions than the pretrained bias by distance has."""
    state = torch.load(fine_tuned.pretrained[arch])["model"]
    build_masked(arch, *LIMIT, words=61).load_state_dict(state)
    with pytest.raises(ValueError, match=name):
        build_masked(arch, *LIMIT, argument, value, words=61).load_state_dict(state)


def test_fewer_positions_fit(fine_tuned: FineTuned) -> None:
    """FLASH-Quad restored for shorter sentences gives the features that the pretrained one gives."""
    state = torch.load(fine_tuned.pretrained["flash_quad_mlm"])["model"]
    models = [build_masked("flash_quad_mlm", "--max-positions", limit, words=61).eval() for limit in ("48", "20")]
    for model in models:
        model.load_state_dict(state)
        for name, parameter in model.named_parameters():
            if "gamma" in name or "beta" in name:
                torch.nn.init.constant_(parameter, 1.0)  # so that attention shows
            if "unit.bias" in name:
                parameter.data.mul_(20.0)
    sequence = torch.arange(5, 22)[None]
    assert_close("features", features(models[1], sequence), features(models[0], sequence))


@pytest.mark.parametrize("arch", ["flash_mlm", "flash_quad_mlm", "combiner_mlm"])
def test_head_reads_the_first_token(arch: str) -> None:
    """Logits of a named head come from the first token's features, and with its own number of classes."""
    model = build_random(arch)
    model.register_classification_head("three", num_classes=3)
    head = model.classification_heads["three"].double()
    sequence = torch.randint(4, 60, (2, 19))
    logits, _ = model(sequence, features_only=True, classification_head_name="three")
    first = features(model, sequence)[:, 0]
    assert_close("logits", logits, head.out_proj(torch.tanh(head.dense(first))))
