"""fairseq-hydra-train with a YAML file in fairseq's nested form and overrides, as a user runs it."""

from pathlib import Path

import pytest
import torch
import yaml
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from fairseq_plugin import LinearTimeTransformer
from tests.fairseq_plugin.helpers.commands import USER_DIR
from tests.processes import Command, Forked


@pytest.fixture
def command(pairs_bin: str, tmp_path: Path) -> list[str]:
    """The arguments of a short training of an encoder-decoder, without overrides."""
    sides = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2}
    config = {
        "common": {"user_dir": USER_DIR, "cpu": True},
        "task": {"_name": "translation", "data": pairs_bin},
        "model": {"_name": "flowformer", "encoder": sides, "decoder": {**sides, "layers": 1}, "flow_phi": "relu"},
        "criterion": {"_name": "label_smoothed_cross_entropy"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"max_tokens": 384, "num_workers": 0, "disable_validation": True},
        "optimization": {"max_update": 2, "lr": [0.003]},
        "checkpoint": {"save_dir": str(tmp_path / "out")},
        "hydra": {"run": {"dir": str(tmp_path / "run")}},
    }
    (tmp_path / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    return ["--config-dir", str(tmp_path), "--config-name", "tiny"]


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
