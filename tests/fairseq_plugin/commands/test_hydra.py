"""fairseq-hydra-train with a YAML file in fairseq's nested form and overrides, as a user runs it."""

import math
from pathlib import Path

import pytest
import torch
import yaml
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from fairseq_plugin import LinearTimeTransformer
from tests.fairseq_plugin.helpers import language_models, masked_models
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.processes import Command, Forked


def write_config(folder: Path, task: dict, model: dict, criterion: dict) -> list[str]:
    """The arguments of a short training whose configuration is a file in ``folder``."""
    config = {
        "common": {"user_dir": USER_DIR, "cpu": True},
        "task": task,
        "model": model,
        "criterion": criterion,
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"max_tokens": 384, "num_workers": 0, "disable_validation": True},
        "optimization": {"max_update": 2, "lr": [0.003]},
        "checkpoint": {"save_dir": str(folder / "out")},
        "hydra": {"run": {"dir": str(folder / "run")}},
    }
    (folder / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    return ["--config-dir", str(folder), "--config-name", "tiny"]


@pytest.fixture
def command(pairs_bin: str, tmp_path: Path) -> list[str]:
    """The arguments of a short training of an encoder-decoder, without overrides."""
    sides = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2}
    model = {"_name": "flowformer", "encoder": sides, "decoder": {**sides, "layers": 1}, "flow_phi": "relu"}
    task = {"_name": "translation", "data": pairs_bin}
    return write_config(tmp_path, task, model, {"_name": "label_smoothed_cross_entropy"})


#: Task, options of the model beyond its sizes, and criterion: a model without a dataclass, and one with options of the
#: criterion.
FLAT = {
    "flash_mlm": ("masked_lm", {"flash_first_to_all": True}, {"_name": "masked_lm"}),
    "daft_conv_lm": (
        "language_modeling",
        {"daft_gumbel_temperature": 0.25},
        {"_name": "sparse_cross_entropy", "entropy_weight": 0.01},
    ),
}


@pytest.mark.parametrize("arch", FLAT)
def test_a_flat_file(arch: str, data_bin: str, tmp_path: Path) -> None:
    """Options of model and criterion in a YAML file; the checkpoint holds them, and validates."""
    task, options, criterion = FLAT[arch]
    flags = (masked_models if arch.endswith("_mlm") else language_models).small(arch)
    sizes = {flag.strip("-").replace("-", "_"): int(value) for flag, value in zip(flags[::2], flags[1::2])}
    task = {"_name": task, "data": data_bin, "tokens_per_sample": 48}
    file = str(tmp_path / "out" / "checkpoint_last.pt")
    checked = [
        data_bin,
        "--user-dir",
        USER_DIR,
        "--task",
        task["_name"],
        "--path",
        file,
        "--cpu",
        "--max-tokens",
        "384",
    ]
    _, validated = run_in_turn(
        ("fairseq_cli.hydra_train", write_config(tmp_path, task, {"_name": arch, **options, **sizes}, criterion), ""),
        ("fairseq_cli.validate", [*checked, "--log-format", "json"], ""),
    )
    (model,), stored, _ = load_model_ensemble_and_task([file])
    assert math.isfinite(entries(validated, "valid")[0]["valid_loss"])
    if arch == "flash_mlm":
        layers = model.encoder.sentence_encoder.layers
        assert len(layers) == 2 and all(layer.unit.first_to_all and layer.unit.chunk_size == 16 for layer in layers)
    else:
        inner = model.decoder.layers[1].self_attn.inner
        assert (inner.options.window, inner.options.gumbel_temperature) == (9, 0.25)
        assert stored.criterion.entropy_weight == 0.01 and inner.gamma.abs().max() > 0.0, "it was trained"


def test_a_nested_file_and_overrides(command: list[str], pairs_bin: str, tmp_path: Path) -> None:
    """They build the sizes that they name; the checkpoint has them, and loads with overrides of its own.

    It also loads in Python, although hydra's logging, with the path of a file, is stored in it.
    """
    overrides = ["model.encoder.embed_dim=32", "+model.encoder_learned_pos=true"]
    Forked(Command("fairseq_cli.hydra_train", [*command, *overrides])).outputs()
    file = str(tmp_path / "out" / "checkpoint_last.pt")
    (model,), stored, _ = load_model_ensemble_and_task([file], arg_overrides={"decoder_layerdrop": 0.25})
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)
    assert model.encoder.embed_tokens.embedding_dim == 32 and model.decoder.embed_tokens.embedding_dim == 16
    assert model.encoder.layers[0].self_attn.inner.options.phi == "relu" and stored.model.encoder_learned_pos
    assert stored.model.encoder_embed_dim == 32 and model.decoder.decoder_layerdrop == 0.25
    hub = LinearTimeTransformer.from_pretrained(str(tmp_path / "out"), "checkpoint_last.pt", pairs_bin)
    assert hub.translate("w3 w21", max_len_b=5)

    state = torch.load(file)
    state["cfg"]["model"].update(encoder={"embed_dim": 80}, encoder_layerz=3)  # as earlier versions stored it
    torch.save(state, file)
    assert load_model_ensemble_and_task([file])[0][0].encoder.embed_tokens.embedding_dim == 32


def test_a_key_that_nothing_reads_ends_the_training(command: list[str], tmp_path: Path) -> None:
    (output,) = Forked(Command("fairseq_cli.hydra_train", [*command, "+model.encoder_layerz=3"])).printed()
    assert "model.encoder_layerz is 3, which flowformer does not read; allowed: model.encoder_layers" in output
    assert not list(tmp_path.glob("out/*.pt"))
