"""Hydra configurations: every registered model reads all keys, flat, nested or complete, or raises an error."""

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq import models
from fairseq.dataclass.initialize import add_defaults
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta.model import base_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import DictConfig, OmegaConf
from torch import nn

from tests.fairseq_plugin.helpers.registry import OURS
from tests.fairseq_plugin.helpers.text import dictionary

ARCHITECTURES = sorted(name for name, model in ARCH_MODEL_REGISTRY.items() if model in map(MODEL_REGISTRY.get, OURS))
#: Small sizes that are no defaults and differ between encoder and decoder.
SIDES = {
    "encoder": {"embed_dim": 24, "layers": 3, "attention_heads": 3, "ffn_embed_dim": 40},
    "decoder": {"embed_dim": 32, "layers": 2, "attention_heads": 4, "ffn_embed_dim": 56},
}
#: Sizes for models that refuse some of the above.
OWN_SIZES = {"flash": {"attention_heads": 1}}
TASK = {"_name": "language_modeling", "tokens_per_sample": 48, "max_target_positions": None, "add_bos_token": False}
#: Name endings of models with one side only.
ENDS = {
    "_lm": "decoder",
    "_mlm": "encoder",
    "_classifier": "encoder",
    "_time_series": "encoder",
    "_decision": "decoder",
}
WHOLE = [name for name in OURS if not name.endswith(("_time_series", "_decision"))]


def sides(name: str) -> list[str]:
    """The sides that a model has."""
    name = ARCH_MODEL_NAME_REGISTRY.get(name, name)
    return [side for end, side in ENDS.items() if name.endswith(end)] or list(SIDES)


def nested(name: str) -> dict[str, dict[str, int]]:
    """The sizes that the model has, in groups."""
    model_options = {x.replace("-", "_") for x in flags(name)}
    of_model = {} if not name.startswith("flash_") else OWN_SIZES["flash"]
    groups = {side: {**SIDES[side], **of_model} for side in sides(name)}
    return {
        side: {x: size for x, size in sizes.items() if f"{side}_{x}" in model_options} for side, sizes in groups.items()
    }


def flags(name: str) -> set[str]:
    """The options of a model on a command line."""
    parser = ArgumentParser()
    MODEL_REGISTRY[name].add_args(parser)
    return set(vars(parser.parse_args([])))


def flat(groups: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The sizes under the names of a command line."""
    return {f"{side}_{x}": size for side, sizes in groups.items() for x, size in sizes.items()}


def task() -> SimpleNamespace:
    """A task with the attributes that models read."""
    symbols, data = dictionary(), SimpleNamespace(channels=3, state_size=3, action_size=2)
    return SimpleNamespace(
        source_dictionary=symbols,
        target_dictionary=symbols,
        max_positions=lambda: 48,
        max_length=48,
        context=None,
        max_episode_length=16,
        description=data,
    )


def configured(name: str, **model: Any) -> tuple[nn.Module, DictConfig]:
    """The model that fairseq-hydra-train builds, and its configuration as stored in a checkpoint."""
    model = {"_name": name, **model}
    config = OmegaConf.create({"common": {"tpu": False}, "task": TASK, "model": model})
    add_defaults(config)
    return models.build_model(config.model, task()), config.model


def from_options(name: str, **options: Any) -> nn.Module:
    """The model that a command line with ``options`` builds."""
    of_task = {} if not name.endswith("_lm") else {x: TASK[x] for x in TASK if x != "_name"} | {"tpu": False}
    return models.build_model(Namespace(_name=name, arch=name, **{**of_task, **options}), task())


def shapes(model: nn.Module) -> dict[str, Any]:
    """Everything that depends on sizes: shapes of tensors, and heads."""
    heads = {name: module.num_heads for name, module in model.named_modules() if hasattr(module, "num_heads")}
    return {**{name: x.shape for name, x in model.state_dict().items() if "extra_state" not in name}, **heads}


def sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Width, layers, heads and feed-forward width of each side of a Transformer."""
    result = {}
    for side in SIDES:
        part = getattr(model, side, None)
        part = getattr(part, "sentence_encoder", part)
        if part is not None:
            (*_, layer) = part.layers
            heads, ffn = layer.self_attn.num_heads, layer.fc1.weight.shape[0]
            result[side] = (layer.self_attn.embed_dim, len(part.layers), heads, ffn)
    return result


def whole(name: str) -> dict[str, Any]:
    """The complete configuration, with these sizes, of the stock model that ``name`` replaces."""
    groups = nested(name)
    if name.endswith("_lm"):
        config = OmegaConf.structured(TransformerLanguageModelConfig(**flat(groups)))
        return {x: value for x, value in OmegaConf.to_container(config, enum_to_str=True).items() if x != "_name"}
    if len(groups) == 1:
        completed = Namespace(**flat(groups))
        base_architecture(completed)
        return vars(completed)
    parts = {"encoder": EncDecBaseConfig(**groups["encoder"]), "decoder": DecoderConfig(**groups["decoder"])}
    config = OmegaConf.structured(TransformerConfig(**parts))
    return {x: value for x, value in OmegaConf.to_container(config, enum_to_str=True).items() if x != "_name"}


@pytest.mark.parametrize("name", OURS)
def test_groups_are_read(name: str) -> None:
    """fairseq's nested form builds the same as the command line; the configuration in a checkpoint is flat."""
    groups = nested(name)
    model, stored = configured(name, **groups)
    decoder = groups.get("decoder", {}) if name.endswith("_lm") else {}
    follow = {f"decoder_{x}": decoder["embed_dim"] for x in ("input_dim", "output_dim") if decoder}
    assert shapes(model) == shapes(from_options(name, **flat(groups), **follow))
    assert flat(groups).items() <= dict(stored).items() and not any(OmegaConf.is_dict(x) for x in stored.values())
    assert shapes(models.build_model(stored, task(), from_checkpoint=True)) == shapes(model)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_configuration_of_the_stock_model_is_read(name: str) -> None:
    """Sizes are those of the configuration; fairseq's defaults that a model does not use are ignored."""
    model, _ = configured(name, **whole(name))
    options = flat(nested(name)) if len(sides(name)) == 2 else whole(name)
    options = {x: value for x, value in options.items() if not str(value).startswith("${")}
    if name in ("flash_lm", "flash_quad_lm"):
        assert options.pop("activation_fn") == "relu"
    assert shapes(model) == shapes(from_options(name, **options))


@pytest.mark.parametrize(
    ("stock", "ours", "given"),
    [
        ("transformer", "flowformer", SIDES),
        ("transformer", "hybrid", SIDES),
        ("transformer", "flowformer", {"decoder": {"layers": 2}}),
        ("transformer", "flowformer", {"encoder": {"embed_dim": 24, "attention_heads": 3}, "decoder_layers": 2}),
        ("transformer", "flowformer", {"embed_dim": 24, "attention_heads": 3, "decoder": {"ffn_embed_dim": 24}}),
        ("transformer", "flowformer", {**SIDES, "decoder_layers": 6}),
        ("transformer_iwslt_de_en", "flowformer_iwslt_de_en", {"encoder": {"layers": 2}}),
        ("transformer_tiny", "flowformer_tiny", {"encoder_layers": 1, "quant_noise": {"pq": 0.1}}),
        ("roberta", "flowformer_mlm", flat({"encoder": SIDES["encoder"]})),
        ("transformer_lm", "flowformer_lm", flat({"decoder": SIDES["decoder"]})),
    ],
)
def test_sizes_are_those_of_the_stock_model(stock: str, ours: str, given: dict[str, Any]) -> None:
    """Both models build the same sizes from one configuration, including its defaults."""
    assert sizes(configured(ours, **given)[0]) == sizes(configured(stock, **given)[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_key_that_nothing_reads_is_refused(name: str) -> None:
    """The error names key, model and the closest valid key, for flat and nested configurations."""
    for side in sides(name):
        with pytest.raises(ValueError, match=rf"model\.{side}_layerz is 3.* {name} .*model\.{side}_layers$"):
            configured(name, **{f"{side}_layerz": 3})
        with pytest.raises(ValueError, match=rf"model\.{side}\.embed_dimm is 3.* {name} .*model\.{side}\.embed_dim$"):
            configured(name, **{side: {"embed_dimm": 3}})


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("flash_lm", {"activation_fn": "gelu"}, ["model.activation_fn", "'gelu'", "silu"]),
        ("flash_time_series", {"activation_fn": "gelu"}, ["model.activation_fn", "'gelu'", "silu"]),
        ("flowformer", {"activation_fn": "gelo"}, ["model.activation_fn", "'gelo'", "gelu"]),
        ("flowformer_mlm", {"flow_phi": "sigmoidd"}, ["model.flow_phi", "'sigmoidd'", "sigmoid"]),
        ("flowformer_classifier", {"pooling": "last"}, ["model.pooling", "'last'", "first", "mean"]),
        ("flowformer_lm", {"decoder": {"layers": "two"}}, ["model.decoder.layers", "'two'", "an integer"]),
        ("flowformer", {"encoder": {"layers": 2.5}}, ["model.encoder.layers", "2.5", "an integer"]),
        ("flowformer_decision", {"dropout": "none"}, ["model.dropout", "'none'", "a number"]),
        (
            "flowformer",
            {"encoder_layers": 3, "encoder": {"layers": 2}},
            ["model.encoder_layers", "model.encoder.layers"],
        ),
        ("flowformer", {"encodr": {"layers": 2}}, ["model.encodr", "model.encoder"]),
        ("flowformer_lm", {"decoder": 3}, ["model.decoder is 3", "model.decoder.layers"]),
        ("flowformer_lm", {"adaptive_input_cutoff": [20]}, ["model.adaptive_input_cutoff", "[20]", "a text"]),
        ("flowformer_lm", {"dropout": None}, ["model.dropout", "None", "a number"]),
        ("flowformer_lm", {"tokens_per_sample": "many"}, ["model.tokens_per_sample", "'many'", "an integer"]),
        ("flowformer_lm", {"flow_phi": None}, ["model.flow_phi", "None", "sigmoid"]),
        ("hybrid_mlm", {"lineartime_layers": ["linear", "flow"]}, ["model.lineartime_layers", "['linear'", "a text"]),
        ("flowformer_mlm", {"no_scale_embedding": [1]}, ["model.no_scale_embedding", "[1]", "true, false"]),
        ("flowformer", {"encoder": {"layers_to_keep": "first"}}, ["model.encoder.layers_to_keep", "'first'", "0,2"]),
    ],
)
def test_a_value_is_refused_in_the_words_that_were_typed(name: str, given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        configured(name, **given)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize("name", ["hybrid_lm", "hybrid_mlm", "hybrid", "flash_classifier", "flowformer_decision"])
def test_a_group_in_the_place_of_any_option_is_refused(name: str) -> None:
    for option in flags(name):
        with pytest.raises(ValueError, match=rf"model\.{option} is {{'a': 1}}; allowed with {name}: "):
            configured(name, **{option: {"a": 1}})


@pytest.mark.parametrize("given", [{"layers_to_keep": [0, 2]}, {"layers_to_keep": "0,2"}, {"layers_to_keep": 1}])
def test_layers_to_keep(given: dict[str, Any]) -> None:
    """Accepted as a list, as fairseq declares it, or as a string, as fairseq reads it."""
    model, _ = configured("flowformer", encoder={**SIDES["encoder"], **given})
    assert len(model.encoder.layers) == 2 - (given == {"layers_to_keep": 1})


@pytest.mark.parametrize("name", ["flowformer_lm_wiki103", "daft_conv_lm_enwik8", "flash_lm_base", "flowformer_tiny"])
def test_a_named_size_is_read(name: str) -> None:
    """A named size is used, except for the number that the configuration sets."""
    side = sides(name)[0]
    model, stored = configured(name, **{f"{side}_layers": 1})
    of_task = {} if len(sides(name)) == 2 else {x: TASK[x] for x in TASK if x != "_name"}
    parsed = Namespace(**{f"{side}_layers": 1}, **of_task)
    models.ARCH_CONFIG_REGISTRY[name](parsed)
    # Pre- or post-norm and the maximum of positions follow from other options when the model is built.
    of_size = {x: value for x, value in vars(parsed).items() if x not in TASK and "normalize" not in x}
    assert of_size.items() <= dict(stored).items()
    assert len(getattr(model, side).layers) == 1


@pytest.mark.parametrize("name", ["flowformer", "flowformer_mlm", "flowformer_lm"])
def test_a_checkpoint_of_an_earlier_version_loads(name: str) -> None:
    """A checkpoint may hold unused keys and groups in addition to the model's options."""
    model, stored = configured(name, **flat(nested(name)))
    side = sides(name)[0]
    dead = {f"{side}_layerz": 3, side: {"embed_dim": 80, "layers": 1}}
    config = OmegaConf.create({"task": TASK, "model": {**stored, **dead}}, flags={"allow_objects": True})
    assert shapes(models.build_model(config.model, task(), from_checkpoint=True)) == shapes(model)
