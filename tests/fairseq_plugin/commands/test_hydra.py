"""fairseq-hydra-train with a YAML file and overrides, as a user runs it, with every kind of options of this plugin."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from common.attention import position_entropy
from fairseq_plugin import LinearTimeTransformer
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn
from tests.fairseq_plugin.helpers.logs import entries
from tests.processes import Command, Forked

SIDES = {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2}
#: Groups of a configuration: an encoder-decoder in fairseq's nested form, a criterion of ours, a masked model.
GROUPS: dict[str, dict[str, Any]] = {
    "translation": {
        "task": {"_name": "translation"},
        "model": {"_name": "flowformer", "encoder": SIDES, "decoder": {**SIDES, "layers": 1}, "flow_phi": "relu"},
        "criterion": {"_name": "label_smoothed_cross_entropy"},
    },
    "sparse": {
        "task": {"_name": "language_modeling", "tokens_per_sample": 48},
        "model": {"_name": "daft_conv_lm", "daft_window": 9, "daft_gumbel_temperature": 0.25, "decoder_layers": 2}
        | {"decoder_embed_dim": 32, "decoder_input_dim": 32, "decoder_output_dim": 32, "decoder_attention_heads": 4},
        "criterion": {"_name": "sparse_cross_entropy", "entropy_weight": 0.01},
    },
    "masked": {
        "task": {"_name": "masked_lm", "tokens_per_sample": 48},
        "model": {"_name": "flash_mlm", "flash_first_to_all": True, "flash_query_dim": 8, "flash_chunk_size": 16}
        | {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24, "encoder_layers": 2},
        "criterion": {"_name": "masked_lm"},
    },
}

pytestmark = pytest.mark.usefixtures("plain_pytorch")


def _command(name: str, data: str, folder: Path) -> list[str]:
    """The arguments of a short training in ``folder``, without overrides."""
    groups = GROUPS[name]
    config = {
        "common": {"user_dir": USER_DIR, "cpu": True},
        **{**groups, "task": {**groups["task"], "data": data}},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "dataset": {"max_tokens": 384, "num_workers": 0, "disable_validation": True},
        "optimization": {"max_update": 2, "lr": [0.003]},
        "checkpoint": {"save_dir": str(folder / "out")},
        "hydra": {"run": {"dir": str(folder / "run")}},
    }
    (folder / "tiny.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    return ["--config-dir", str(folder), "--config-name", "tiny"]


def test_a_nested_file_and_overrides(pairs_bin: str, tmp_path: Path) -> None:
    """They build the sizes that they name; the checkpoint has them, and loads with overrides of its own.

    It also loads in Python, although hydra's logging, with the path of a file, is stored in it. A key that nothing
    reads ends a training.
    """
    command, file = _command("translation", pairs_bin, tmp_path), str(tmp_path / "out" / "checkpoint_last.pt")
    (output,) = Forked(Command("fairseq_cli.hydra_train", [*command, "+model.encoder_layerz=3"])).printed()
    assert "model.encoder_layerz is 3, which flowformer does not read; allowed: model.encoder_layers" in output
    assert not list(tmp_path.glob("out/*.pt"))
    overrides = ["model.encoder.embed_dim=32", "+model.encoder_learned_pos=true"]
    Forked(Command("fairseq_cli.hydra_train", [*command, *overrides])).outputs()
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


@pytest.mark.parametrize("name", ["sparse", "masked"])
def test_options_of_model_and_criterion(name: str, data_bin: str, tmp_path: Path) -> None:
    """They reach the layers, which are trained; the checkpoint holds them, and validates, the sparse one in fp16."""
    file = str(tmp_path / "out" / "checkpoint_last.pt")
    task = GROUPS[name]["task"]["_name"]
    validate = [data_bin, "--user-dir", USER_DIR, "--task", task, "--cpu", "--path", file, "--max-tokens", "384"]
    validate += ["--log-format", "json", *(["--fp16"] if name == "sparse" else [])]
    training = ("fairseq_cli.hydra_train", _command(name, data_bin, tmp_path), "")
    _, output = run_in_turn(training, ("fairseq_cli.validate", validate, ""))
    (validated,) = entries(output, "valid")
    (model,), stored, _ = load_model_ensemble_and_task([file])
    assert 0.0 < validated["valid_loss"] < 7.0
    if name == "sparse":
        assert stored.criterion.entropy_weight == 0.01
        inner = model.decoder.layers[1].self_attn.inner
        assert (inner.options.window, inner.options.gumbel_temperature) == (9, 0.25)
        assert inner.gamma.abs().max() > 0.0, "it was trained"
        assert validated["valid_position_entropy"] == pytest.approx(position_entropy(model).item(), rel=1e-3)
    else:
        layers = model.encoder.sentence_encoder.layers
        assert len(layers) == 2 and all(layer.unit.first_to_all and layer.unit.chunk_size == 16 for layer in layers)
