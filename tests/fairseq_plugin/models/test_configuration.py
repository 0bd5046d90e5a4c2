"""Configurations of fairseq-hydra-train: groups are read, and mistakes are named as they were typed."""

from typing import Any

import pytest
from fairseq import models as models_of_fairseq
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import nn

from tests.fairseq_plugin.helpers.kinds import build, ending_of, flags_of, host, models
from tests.fairseq_plugin.helpers.text import dictionary

SIDES = {
    "encoder": {"embed_dim": 24, "layers": 3, "attention_heads": 3, "ffn_embed_dim": 40},
    "decoder": {"embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_embed_dim": 56},
}
TASK = {"_name": "language_modeling", "tokens_per_sample": 48, "max_target_positions": None, "add_bos_token": False}
#: Groups have no options of mechanisms, whose models are made alike: some of each kind represent the others.
SOME = ("flow", "hybrid", "daft_full", "mixed_chunk", "lstm", "awac")
CONFIGURED = [x for x in models("_lm", "_mlm", "_classifier", "_time_series", "_decision", "") if x.startswith(SOME)]


def configured(name: str, **model: Any) -> tuple[nn.Module, Any]:
    """The model that fairseq-hydra-train builds, and its configuration as stored in a checkpoint."""
    config = OmegaConf.create({"common": {"tpu": False}, "task": TASK, "model": {"_name": name, **model}})
    add_defaults(config)
    return models_of_fairseq.build_model(config.model, host(name, dictionary())), config.model


def groups_of(name: str) -> dict[str, dict[str, int]]:
    known = {x.removeprefix("--").replace("-", "_") for x in flags_of(name)}
    groups = {side: {x: y for x, y in sizes.items() if f"{side}_{x}" in known} for side, sizes in SIDES.items()}
    return {side: sizes for side, sizes in groups.items() if len(sizes) > 1}


def flat(groups: dict[str, dict[str, int]]) -> dict[str, int]:
    return {f"{side}_{x}": size for side, sizes in groups.items() for x, size in sizes.items()}


def shapes(model: nn.Module) -> dict[str, Any]:
    return {name: x.shape for name, x in model.state_dict().items() if "extra_state" not in name}


@pytest.mark.parametrize("name", CONFIGURED)
def test_groups_of_a_configuration_are_read_and_unknown_keys_are_refused(name: str) -> None:
    """fairseq's nested form is the flat one; the error names key, model and the closest valid key."""
    groups = groups_of(name)
    model, stored = configured(name, **groups)
    follow = {f"decoder_{x}": 32 for x in ("input_dim", "output_dim") if ending_of(name) == "_lm"}
    assert shapes(configured(name, **flat(groups), **follow)[0]) == shapes(model)
    assert flat(groups).items() <= dict(stored).items() and not any(OmegaConf.is_dict(x) for x in stored.values())
    again = models_of_fairseq.build_model(stored, host(name, dictionary()), from_checkpoint=True)
    assert shapes(again) == shapes(model)
    for side in groups:
        with pytest.raises(ValueError, match=rf"model\.{side}_layerz is 3.* {name} .*model\.{side}_layers$"):
            configured(name, **{f"{side}_layerz": 3})
        with pytest.raises(ValueError, match=rf"model\.{side}\.layerz is 3.* {name} .*model\.{side}\.layers$"):
            configured(name, **{side: {"layerz": 3}})


def test_a_configuration_of_audio() -> None:
    sizes = {"encoder_embed_dim": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "conv_pos_groups": 2}

    def made(**more: int) -> nn.Module:
        config = OmegaConf.create({"_name": "local_wav2vec2", **sizes, **more})
        return models_of_fairseq.build_model(config, host("local_wav2vec2", dictionary()))

    assert made(local_window=7).encoder.layers[0].self_attn.inner.options.window == 7
    with pytest.raises(ValueError, match="model.local_windw is 7, .*model.local_window$"):
        made(local_windw=7)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("flash_lm", {"activation_fn": "gelu"}, ["model.activation_fn", "'gelu'", "silu"]),
        ("flowformer_mlm", {"flow_phi": "sigmoidd"}, ["model.flow_phi", "'sigmoidd'", "sigmoid"]),
        ("flowformer_classifier", {"pooling": "last"}, ["model.pooling", "'last'", "first", "mean"]),
        ("flowformer_lm", {"decoder": {"layers": "two"}}, ["model.decoder.layers", "'two'", "an integer"]),
        ("flowformer_decision", {"dropout": "none"}, ["model.dropout", "'none'", "a number"]),
        (
            "flowformer",
            {"encoder_layers": 3, "encoder": {"layers": 2}},
            ["model.encoder_layers", "model.encoder.layers"],
        ),
        ("flowformer", {"encodr": {"layers": 2}}, ["model.encodr", "model.encoder"]),
        ("flowformer_lm", {"decoder": 3}, ["model.decoder is 3", "model.decoder.layers"]),
        ("flowformer_lm", {"adaptive_input_cutoff": [20]}, ["model.adaptive_input_cutoff", "[20]", "a text"]),
        ("flowformer_lm", {"flow_phi": None}, ["model.flow_phi", "None", "sigmoid"]),
        ("flowformer_lm", {"flow_phi": {"a": 1}}, ["model.flow_phi is {'a': 1}; allowed"]),
        ("hybrid_mlm", {"lineartime_layers": ["linear", "flow"]}, ["model.lineartime_layers", "['linear'", "a text"]),
        ("flowformer_mlm", {"no_scale_embedding": [1]}, ["model.no_scale_embedding", "[1]", "true, false"]),
        ("flowformer", {"encoder": {"layers_to_keep": "first"}}, ["model.encoder.layers_to_keep", "'first'", "0,2"]),
    ],
)
def test_a_value_is_refused_in_the_words_that_were_typed(name: str, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        configured(name, **given)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["flowformer_lm_wiki103", "daft_conv_lm_enwik8", "flash_lm_base", "flowformer_tiny"])
def test_a_named_size_is_read(name: str) -> None:
    """All but the number that the configuration sets; layers to keep may be a list or a text."""
    side = "encoder" if name == "flowformer_tiny" else "decoder"
    model, stored = configured(name, **{f"{side}_layers": 1})
    part = getattr(model, side)
    assert len(part.layers) == 1 and part.embed_tokens.embedding_dim == stored[f"{side}_embed_dim"] != 0
    assert build(name, f"--{side}-layers", "1", sizes=False).state_dict().keys() == model.state_dict().keys()
    for kept in ([0, 2], "0,2"):
        model, _ = configured("flowformer", encoder={**SIDES["encoder"], "layers_to_keep": kept})
        assert len(model.encoder.layers) == 2


def test_no_class_stands_where_peft_reads_options() -> None:
    ours = [x for x in MODEL_REGISTRY.values() if x.__module__.startswith("fairseq_plugin")]
    assert len(ours) > 100 and not [x for x in ours if isinstance(getattr(x, "config", None), type)]
