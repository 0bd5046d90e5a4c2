"""A RoBERTa that fairseq trained, in linear time: both stages, then fine-tuning, beside that of the RoBERTa itself."""

from pathlib import Path

import pytest
import torch

from tests.compare import weights
from tests.fairseq_plugin.helpers.commands import NamedRuns, masked_training_command, run_named
from tests.fairseq_plugin.helpers.fine_tuning import LIMIT, fine_tuning, preprocessing, validation
from tests.fairseq_plugin.helpers.logs import entries

#: Where RoBERTa has its norms and positions, for a student.
LAYERS = "--lineartime-post-norm --layernorm-embedding --encoder-learned-pos".split()
#: The student's options; criterions/test_attention_transfer.py has other attentions.
KINDS = "linear,lolcats"


@pytest.fixture(scope="module")
def run(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """Every step of a user in one process, each a second or two: 9 commands."""
    folder = tmp_path_factory.mktemp("transfer_masked")
    data, teacher = str(folder / "text" / "bin"), folder / "teacher" / "checkpoint_last.pt"
    commands = {f"data {i}": x for i, x in enumerate(preprocessing(folder / "text", f"{data_bin}/dict.txt"))}

    def train(name: str, arch: str, *arguments: str) -> None:
        command = masked_training_command(data_bin, str(folder / name), arch, *LIMIT, *arguments)
        commands[name] = ("fairseq_cli.train", [*command, "--no-epoch-checkpoints"], "")

    def fine_tune(name: str, pretrained: Path, arch: str, *arguments: str) -> None:
        save_dir = folder / f"{name} fine"
        commands[save_dir.name] = ("fairseq_cli.train", fine_tuning(data, pretrained, save_dir, arch, *arguments), "")
        commands[f"{name} valid"] = ("fairseq_cli.validate", validation(data, save_dir), "")

    train("teacher", "roberta")
    fine_tune("teacher", teacher, "roberta")
    start, options = str(folder / "start.pt"), [*LAYERS, "--lineartime-layers", KINDS]
    overrides = str({"lineartime_layers": KINDS})
    convert = [str(teacher), start, "--arch", "hybrid_mlm", "--model-overrides", overrides]
    commands["convert"] = ("fairseq_plugin.convert", convert, "")
    for stage, criterion in (("stage 1", "attention_transfer"), ("stage 2", "distillation")):
        learned = ["--teacher", str(teacher), "--lineartime-trained-parameters"]
        learned.append("attention" if stage == "stage 1" else "all")
        train(stage, "hybrid_mlm", *options, "--finetune-from-model", start, "--criterion", criterion, *learned)
        start = str(folder / stage / "checkpoint_last.pt")
    fine_tune("stage 2", Path(start), "hybrid_mlm", *options)
    return run_named(folder, commands)


@pytest.mark.parametrize("name", ["teacher", "stage 2"])
def test_it_learns_the_labels(run: NamedRuns, name: str) -> None:
    """With every weight of the model before, and fairseq-validate finds what the training found last."""
    stored, tuned = (
        weights(torch.load(file, weights_only=False)["model"])
        for file in (run.folder / x / "checkpoint_last.pt" for x in (name, f"{name} fine"))
    )
    new = tuned.keys() - stored.keys()
    assert stored.keys() < tuned.keys() and all(x.startswith("classification_heads.") for x in new)
    assert all(tuned[x].shape == stored[x].shape for x in stored)
    found = entries(run.outputs[f"{name} fine"], "valid")[-1]
    assert found["valid_accuracy"] >= 95.0
    (validated,) = entries(run.outputs[f"{name} valid"], "valid")
    assert validated["valid_accuracy"] == found["valid_accuracy"]


def test_stages_of_a_masked_model(run: NamedRuns) -> None:
    """What learns in stage 1 is an attention's alone; in stage 2 all does."""
    files = ("stage 1", "stage 2", "teacher")
    one, two, teacher = (
        weights(torch.load(run.folder / file / "checkpoint_last.pt", weights_only=False)["model"]) for file in files
    )
    changed = {x for x in teacher if "version" not in x and not torch.equal(one[x], teacher[x])}
    assert changed and all(x.split(".")[-2] in ("q_proj", "k_proj", "v_proj") for x in changed)
    assert any(".inner." in x for x in one.keys() - teacher.keys())
    assert not torch.equal(one["encoder.lm_head.dense.weight"], two["encoder.lm_head.dense.weight"])
