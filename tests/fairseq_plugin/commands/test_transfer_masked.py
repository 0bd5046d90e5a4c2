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
#: Students: architecture, options of its attention, and what learns in stage 1.
STUDENTS = {
    "stack": ("hybrid_mlm", {"lineartime_layers": "linear,softmax"}, "attention"),
    "learned maps": ("lolcats_mlm", {"lolcats_window": 4}, "new"),
}


@pytest.fixture(scope="module")
def run(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """Every step of a user in one process, each a second or two: 13 commands."""
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
    for name, (arch, overrides, trained) in STUDENTS.items():
        start = str(folder / f"{name}.pt")
        options = [*LAYERS, *(word for x, y in overrides.items() for word in (f"--{x.replace('_', '-')}", str(y)))]
        convert = [str(teacher), start, "--arch", arch, "--model-overrides", str(overrides)]
        commands[f"{name} convert"] = ("fairseq_plugin.convert", convert, "")
        learned = ["--teacher", str(teacher), "--lineartime-trained-parameters", trained]
        begun = ["--finetune-from-model", start, "--criterion", "attention_transfer", *learned]
        train(f"{name} 1", arch, *options, *begun)
        begun = ["--finetune-from-model", str(folder / f"{name} 1" / "checkpoint_last.pt"), "--teacher", str(teacher)]
        train(f"{name} 2", arch, *options, *begun, "--criterion", "distillation")
        fine_tune(name, folder / f"{name} 2" / "checkpoint_last.pt", arch, *options)
    return run_named(folder, commands)


@pytest.mark.parametrize("name", ["teacher", *STUDENTS])
def test_it_learns_the_labels(run: NamedRuns, name: str) -> None:
    """With every weight of the model before, and fairseq-validate finds what the training found last."""
    before = run.folder / (name if name == "teacher" else f"{name} 2") / "checkpoint_last.pt"
    stored, tuned = (
        weights(torch.load(file, weights_only=False)["model"])
        for file in (before, run.folder / f"{name} fine" / "checkpoint_last.pt")
    )
    new = tuned.keys() - stored.keys()
    assert stored.keys() < tuned.keys() and all(x.startswith("classification_heads.") for x in new)
    assert all(tuned[x].shape == stored[x].shape for x in stored)
    found = entries(run.outputs[f"{name} fine"], "valid")[-1]
    assert found["valid_accuracy"] >= 95.0
    (validated,) = entries(run.outputs[f"{name} valid"], "valid")
    assert validated["valid_accuracy"] == found["valid_accuracy"]


@pytest.mark.parametrize("name", STUDENTS)
def test_stages_of_a_masked_model(run: NamedRuns, name: str) -> None:
    """What learns in stage 1 is an attention's alone; in stage 2 all does."""
    files = (f"{name} 1", f"{name} 2", "teacher")
    one, two, teacher = (
        weights(torch.load(run.folder / file / "checkpoint_last.pt", weights_only=False)["model"]) for file in files
    )
    changed = {x for x in teacher if "version" not in x and not torch.equal(one[x], teacher[x])}
    projections = ("q_proj", "k_proj", "v_proj") if name == "stack" else ()
    assert bool(changed) == bool(projections)
    assert all(x.split(".")[-2] in projections and ".layers.0." in x for x in changed)
    assert not torch.equal(one["encoder.lm_head.dense.weight"], two["encoder.lm_head.dense.weight"])
