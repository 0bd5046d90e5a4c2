"""``--lineartime-decay-linear-only``: which parameters decay, by optimizer and kind of model, and what is refused."""

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import FP16Optimizer, build_optimizer
from torch import nn

from fairseq_plugin.optim.linear_decay import NAMES
from tests.fairseq_plugin.helpers import encoder_decoders, language_models, masked_models
from tests.fairseq_plugin.helpers.episodes import build_decision
from tests.fairseq_plugin.helpers.series import build_classifier
from tests.fairseq_plugin.helpers.text import dictionary

FLAG = "--lineartime-decay-linear-only"
DECAY = ["--weight-decay", "0.5", "--lr", "0.1", FLAG]
#: Those that need a package of their own.
PACKAGES = ("lamb", "cpu_adam")
TASK = type("Task", (), {"source_dictionary": dictionary(), "target_dictionary": dictionary()})()


def parsed(optimizer: str, *arguments: str, arch: str = "daft_conv_lm"):
    """The configuration of ``fairseq-train --arch ARCH --optimizer OPTIMIZER --weight-decay 0.5``, as it trains."""
    command = ["data", "--task", "language_modeling", "--arch", arch, *language_models.small(arch), "--optimizer"]
    command += [optimizer, *DECAY, "--tokens-per-sample", "32", *arguments]
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), command))


def trainable(configuration) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """The model, with no parameter that is 0, and its parameters."""
    model = tasks.FairseqTask.build_model(TASK, configuration.model)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(1.0)
    return model, parameters


def moved(optimizer, parameters: dict[str, nn.Parameter]) -> set[str]:
    """The names of what one update changes whose gradients are 0: decay alone does that."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in optimizer.params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)}


#: Of each layer of ``daft_conv_lm``; biases, norms, the embedding of tokens and what DAFT-conv holds are not there.
OF_A_LAYER = [f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")] + ["fc1", "fc2"]
LINEAR = {f"decoder.layers.{i}.{name}.weight" for i in range(2) for name in OF_A_LAYER}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PACKAGES])
def test_weights_of_linear_layers_decay_alone(name: str) -> None:
    """With every optimizer; the separate matrix of the output is a linear layer."""
    configuration = parsed(name)
    assert configuration.optimizer._name == f"lineartime_{name}"
    _, parameters = trainable(configuration)
    optimizer = build_optimizer(configuration.optimizer, list(parameters.values()))
    assert moved(optimizer, parameters) == LINEAR | {"decoder.output_projection.weight"}
    assert "decoder.layers.0.self_attn.inner.r" in parameters


@pytest.mark.parametrize(
    ("arch", "arguments", "decayed"),
    [
        ("daft_conv_lm", ["--share-decoder-input-output-embed"], LINEAR),
        ("flash_lm", [], None),
        ("flash_quad_lm_base", [], None),
    ],
)
def test_what_decays_of_other_models(arch: str, arguments: list[str], decayed: set[str] | None) -> None:
    """No embedding that is the output too; of a gated attention unit no scale, offset or position bias.

    A named size is checked like its model. Without the option everything decays, as fairseq has it, in one group.
    """
    configuration = parsed("adam", *arguments, arch=arch)
    _, parameters = trainable(configuration)
    if decayed is None:
        decayed = {name for name in parameters if name.endswith(("_proj.weight", "output_projection.weight"))}
    assert moved(build_optimizer(configuration.optimizer, list(parameters.values())), parameters) == decayed
    configuration.model.lineartime_decay_linear_only, configuration.optimizer._name = False, "adam"
    _, parameters = trainable(configuration)
    assert moved(build_optimizer(configuration.optimizer, list(parameters.values())), parameters) == set(parameters)


@pytest.mark.parametrize(
    ("arch", "arguments", "weights"),
    [
        ("synthesizer_lm", [], {"columns"}),
        ("synthesizer_lm", ["--synthesizer-form", "random"], set()),
        ("t2r_lm", [], {"map_weight"}),
        ("hedgehog_lm", [], {"query_weight", "key_weight"}),
    ],
)
def test_weights_of_linear_layers_inside_an_attention_decay(arch: str, arguments: list[str], weights: set[str]) -> None:
    """Synthesizer's second matrix and feature maps; no table of positions and no bias."""
    configuration = parsed("adam", *arguments, arch=arch)
    _, parameters = trainable(configuration)
    decayed = moved(build_optimizer(configuration.optimizer, list(parameters.values())), parameters)
    assert {name.rpartition(".")[2] for name in decayed if ".inner." in name} == weights


KINDS = {
    "masked": (lambda: masked_models.build_masked("flow_mlm", FLAG), "encoder.sentence_encoder.layers.0.fc1.weight"),
    "translation": (lambda: encoder_decoders.build_model("flow", FLAG), "decoder.layers.0.encoder_attn.k_proj.weight"),
    "decision": (lambda: build_decision("flow_decision", lineartime_decay_linear_only=True), "embed_state.weight"),
    "series": (
        lambda: build_classifier("flow_time_series", lineartime_decay_linear_only=True),
        "encoder.embed_tokens.weight",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_marks_its_parameters(kind: str) -> None:
    """Those of a classifier's head as well, which a task adds later."""
    build, a_linear_weight = KINDS[kind]
    model = build()
    if kind == "masked":
        model.register_classification_head("toy", num_classes=3)
    scales = {name: x.optim_overrides["optimizer"]["weight_decay_scale"] for name, x in model.named_parameters()}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    linear -= {"encoder.lm_head.weight"}
    assert {name for name, scale in scales.items() if scale} == linear & scales.keys()
    assert scales[a_linear_weight] == 1.0
    assert kind != "masked" or scales["classification_heads.toy.dense.weight"] == 1.0


def test_half_precision() -> None:
    """The float32 copies are told apart; the flat one, which fairseq makes by default, is refused."""
    configuration = parsed("adam", "--fp16", "--fp16-no-flatten-grads")
    model, parameters = trainable(configuration)
    halves = list(model.half().parameters())
    optimizer = FP16Optimizer.build_optimizer(configuration, halves)
    optimizer.zero_grad()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.step()
    changed = {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)}
    assert changed == LINEAR | {"decoder.output_projection.weight"}
    with pytest.raises(ValueError, match="--fp16-no-flatten-grads"):
        build_optimizer(configuration.optimizer, [nn.Parameter(torch.ones(9))])


def test_a_stored_state_goes_on() -> None:
    """``--optimizer-overrides`` of the decay are for the linear weights; the others keep 0."""
    _, parameters = trainable(configuration := parsed("adam"))
    first, second = (build_optimizer(configuration.optimizer, list(parameters.values())) for _ in range(2))
    moved(first, parameters)
    second.load_state_dict(first.state_dict(), {"weight_decay": 0.25, "lr": 0.2})
    assert [group["weight_decay"] for group in second.param_groups] == [0.25, 0.0]
    assert [group["lr"] for group in second.param_groups] == [0.2, 0.2]
    assert moved(second, parameters) == LINEAR | {"decoder.output_projection.weight"}


def test_what_is_refused() -> None:
    """An optimizer without weight decay; one that does not read the marks, as hydra could have it."""
    command = ["data", "--task", "language_modeling", "--arch", "daft_conv_lm", "--optimizer", "composite", FLAG]
    with pytest.raises(ValueError, match="--optimizer is composite; allowed with --lineartime-decay.*: .*adam"):
        options.parse_args_and_arch(options.get_training_parser(), command)
    (model, _), (trained, parameters) = (trainable(configuration := parsed("adam")) for _ in range(2))
    for each in (model, trained):
        each.set_num_updates(5)  # as fairseq does with a checkpoint, before there is an optimizer
    build_optimizer(configuration.optimizer, list(parameters.values()))
    trained.set_num_updates(5)
    with pytest.raises(ValueError, match="optimizer=lineartime_adam"):
        model.set_num_updates(5)
