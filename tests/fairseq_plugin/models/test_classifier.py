"""Classifiers of sequences: pooling over real tokens, and fairseq's commands with the task sentence_prediction."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks

from tests.compare import assert_close
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.fairseq_plugin.helpers.text import dictionary, padded, tokens, write_labelled_text

SIZES = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2".split()
TASK = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "2"]
RUNS = {
    "flow_classifier": ["--pooling", "mean", "--flow-phi", "relu"],
    "daft_full_classifier": ["--init-token", "0", "--daft-full-bias-dim", "8"],
}


def _classifier(arch: str, *arguments: str):
    """A classifier in evaluation mode, configured through the command line of its task."""
    command = ["data", *TASK, "--arch", arch, "--max-positions", "40", *SIZES, *arguments]
    configuration = options.parse_args_and_arch(options.get_training_parser(), command)
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=dictionary(), max_positions=lambda: 40)
    model = tasks.FairseqTask.build_model(task, configuration).eval()
    model.register_classification_head("toy", num_classes=3)
    return model


@pytest.mark.parametrize("pooling", ["first", "mean"])
@pytest.mark.parametrize("arch", ["flow_classifier", "combiner_classifier"])
@torch.no_grad()
def test_pooling_is_over_real_tokens(arch: str, pooling: str) -> None:
    """Scores are the head's output for the first or mean features, with padding on either side."""
    model, sequence = _classifier(arch, "--pooling", pooling), tokens(2, 11)
    features = model(sequence)[0]
    pooled = features[:, 0] if pooling == "first" else features.mean(1)
    expected = model.classification_heads["toy"](pooled[:, None])
    for left, right in ((0, 0), (3, 0), (0, 5)):
        scores = model(padded(sequence, left, right), features_only=True, classification_head_name="toy")[0]
        assert_close(f"scores with {left} and {right} of padding", scores, expected, 2e-5)
    assert torch.isfinite(model(torch.full((1, 4), 1), classification_head_name="toy")[0]).all()


def test_features_of_half_precision_are_summed_in_full() -> None:
    """The mean over thousands of tokens, for which a float16 sum would stagnate or overflow."""
    model = _classifier("flow_classifier", "--pooling", "mean").half()
    features = 60.0 + torch.rand(1, 5000, 16)
    pooled = model.pool(features.half(), tokens(1, 5000))
    assert_close("mean", pooled.float(), features.mean(1), 1e-3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """The output of training and validation of each run."""
    root: Path = tmp_path_factory.mktemp("classifiers")
    write_labelled_text(root)
    commands = []
    for kind in ("input0", "label"):
        splits = [f"--{split}pref={root / split}.{kind}" for split in ("train", "valid")]
        destination = ["--only-source", "--destdir", str(root / "bin" / kind), "--workers", "1"]
        commands.append(("fairseq_cli.preprocess", [*destination, *splits], ""))
    common = [str(root / "bin"), "--user-dir", USER_DIR, *TASK, "--max-positions", "40", "--cpu", "--num-workers", "0"]
    common += ["--batch-size", "16", "--required-batch-size-multiple", "1", "--log-format", "json"]
    for arch, arguments in RUNS.items():
        save_dir = ["--save-dir", str(root / arch), "--no-epoch-checkpoints", "--max-epoch", "4", "--seed", "1"]
        training = ["--arch", arch, *SIZES, *arguments, "--optimizer", "adam", "--lr", "5e-3", *save_dir]
        checkpoint = ["--path", str(root / arch / "checkpoint_last.pt")]
        commands.append(("fairseq_cli.train", [*common, *training], ""))
        first_token = ["--init-token", "0"] if "--init-token" in arguments else []
        commands.append(("fairseq_cli.validate", [*common, *checkpoint, *first_token], ""))
    outputs = run_in_turn(*commands)[2:]
    return {name: (outputs[2 * i], outputs[2 * i + 1]) for i, name in enumerate(RUNS)}


@pytest.mark.parametrize("arch", RUNS)
def test_it_trains_and_validates(trained: dict[str, tuple[str, str]], arch: str) -> None:
    """Better than chance after four epochs; fairseq-validate gives the same result for the checkpoint."""
    training, validation = trained[arch]
    last = entries(training, "valid")[-1]
    assert last["valid_accuracy"] > 75.0
    assert entries(validation, "valid")[-1]["valid_accuracy"] == pytest.approx(last["valid_accuracy"], abs=0.1)
