"""Fine-tuning masked models on labelled sentences with fairseq's sentence_prediction, as its RoBERTa recipe does."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.commands import masked_training_command, run_in_turn
from tests.fairseq_plugin.helpers.fine_tuning import LIMIT, fine_tuning, preprocessing, validation
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.masked_models import build_masked, build_random, features, randomised

#: Architecture and options of each fine-tuning; the tweaks are those of the paper's Table 4. RoBERTa and models that
#: were converted from it are in test_transfer_masked.py.
RUNS = {
    "all tweaks": ("flash_mlm", "--flash-first-softmax", "--flash-first-to-all", "--flash-chunk-size", "8"),
    "transformer_pp_mlm": ("transformer_pp_mlm",),
}


class FineTuned(NamedTuple):
    """Labelled data, pretrained checkpoints by architecture, and what became of each fine-tuning."""

    text: Path
    pretrained: dict[str, Path]
    folders: dict[str, Path]
    training: dict[str, str]
    validation: dict[str, str]


@pytest.fixture(scope="module")
def fine_tuned(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> FineTuned:
    """Preprocessing, pretraining, every fine-tuning, validation; and "restored", one update at a learning rate of 0."""
    root = tmp_path_factory.mktemp("fine_tuning")
    text, data = root / "text", str(root / "text" / "bin")
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
    return FineTuned(text, pretrained, folders, dict(zip(runs, outputs)), dict(zip(RUNS, outputs[len(runs) :])))


@pytest.mark.parametrize("run", RUNS)
def test_learns_the_labels(fine_tuned: FineTuned, run: str) -> None:
    """From chance to nearly all of the held-out sentences; fairseq-validate finds what the training found last."""
    log = fine_tuned.training[run]
    assert "Loaded checkpoint" in log
    assert entries(log, "train_inner")[0]["accuracy"] < 85.0
    (validated,), last = entries(fine_tuned.validation[run], "valid"), entries(log, "valid")[-1]
    assert validated["valid_accuracy"] == last["valid_accuracy"] >= 95.0
    assert abs(validated["valid_loss"] - last["valid_loss"]) < 2e-3


def test_pretrained_weights_are_restored(fine_tuned: FineTuned) -> None:
    """Each is the pretrained one; of the biases by distance, the distances of the smaller chunk; the head is new."""
    pretrained, restored = (
        weights(torch.load(path)["model"])
        for path in (fine_tuned.pretrained["flash_mlm"], fine_tuned.folders["restored"] / "checkpoint_last.pt")
    )
    names = {name for name in restored if not name.startswith("classification_heads.sentence_classification_head.")}
    assert names == set(pretrained) and restored.keys() > names
    biases = {name for name in names if name.endswith("unit.bias.weight")}
    assert len(biases) == 2
    for name in names:
        expected = pretrained[name][:, 8:-8] if name in biases else pretrained[name]  # 31 distances, 15 of them left
        assert torch.equal(restored[name], expected), name
    log = fine_tuned.training["restored"]
    assert log.count("a relative bias for 16 tokens is read for 8") == len(biases)
    assert "a relative bias" not in fine_tuned.training["transformer_pp_mlm"]


@pytest.mark.parametrize(
    ("arch", "argument", "value", "name"),
    [
        ("flash_mlm", "--flash-chunk-size", "32", "unit.bias.weight"),
        ("flash_mlm", "--flash-query-dim", "32", "unit.in_proj.weight"),
        ("flash_quad_mlm", "--max-positions", "512", "unit.bias"),
        ("flash_quad_mlm", "--max-positions", "64", "unit.bias.weight"),
    ],
)
def test_what_does_not_fit_is_refused(arch: str, argument: str, value: str, name: str) -> None:
    """Larger chunks, other query widths, more positions than the pretrained bias by distance has."""
    state = build_masked(arch, *LIMIT).state_dict()
    with pytest.raises(ValueError, match=name):
        build_masked(arch, *LIMIT, argument, value).load_state_dict(state)


def test_fewer_positions_fit() -> None:
    """FLASH-Quad restored for shorter sentences gives the features that the pretrained one gives."""
    long, short = (build_masked("flash_quad_mlm", "--max-positions", limit).eval() for limit in ("48", "20"))
    short.load_state_dict(randomised(long).state_dict())
    sequence = torch.arange(5, 22)[None]
    assert_close("features", features(short, sequence), features(long, sequence))


@pytest.mark.parametrize("arch", ["flash_mlm", "combiner_mlm"])
def test_head_reads_the_first_token(arch: str) -> None:
    """Logits of a named head come from the first token's features, and with its own number of classes."""
    model = build_random(arch)
    model.register_classification_head("three", num_classes=3)
    head = model.classification_heads["three"].double()
    sequence = torch.randint(4, 60, (2, 19))
    logits, _ = model(sequence, features_only=True, classification_head_name="three")
    first = features(model, sequence)[:, 0]
    assert_close("logits", logits, head.out_proj(torch.tanh(head.dense(first))))
