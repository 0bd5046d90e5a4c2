"""``--lineartime-decay-linear-only`` in every kind of model and with every optimizer, and ``--optimizer radam``."""

import re
from typing import Any

import pytest
import torch
from fairseq.optim import FairseqOptimizer, FP16Optimizer, build_optimizer
from torch import nn

from fairseq_plugin.optim.linear_decay import NAMES
from tests.fairseq_plugin.helpers.kinds import build, command
from tests.fairseq_plugin.helpers.transfer import configuration

FLAG = "--lineartime-decay-linear-only"
Parameters = dict[str, nn.Parameter]


def configured(optimizer: str, *words: str) -> Any:
    """The configuration of a training with weight decay, as fairseq-train makes it."""
    words = command("daft_conv_lm", "--optimizer", optimizer, "--weight-decay", "0.5", "--lr", "0.1", *words)
    return configuration(*words)


def optimizer_of(parameters: Parameters, name: str, *words: str) -> FairseqOptimizer:
    return build_optimizer(configured(name, *words).optimizer, list(parameters.values()))


def trainable(arch: str, *words: str) -> tuple[nn.Module, Parameters]:
    """A model with no parameter that is 0, and its parameters."""
    model = build(arch, *words)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model, dict(model.named_parameters())


def moved(optimizer: FairseqOptimizer, parameters: Parameters) -> set[str]:
    """The names of what one update changes whose gradients are 0: decay alone does that."""
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer.zero_grad()
    for parameter in optimizer.params:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {name for name, parameter in parameters.items() if not torch.equal(before[name], parameter)}


def linear_weights(model: nn.Module) -> set[str]:
    """The weights of linear layers that are no embedding too."""
    embeddings = {id(x.weight) for x in model.modules() if isinstance(x, nn.Embedding)}
    linear = {id(x.weight) for x in model.modules() if isinstance(x, nn.Linear)} - embeddings
    return {name for name, x in model.named_parameters() if id(x) in linear}


#: Models of every kind and their options, and the parameters inside an attention that decay too.
DECAYED = {
    "daft_conv_lm": set(),
    "daft_conv_lm --share-decoder-input-output-embed": set(),
    "flash_lm": set(),
    "flow_mlm": set(),
    "flow_classifier": set(),  # with a head, which a task adds later
    "flow": set(),
    "flow_decision": set(),
    "flow_time_series": set(),
    "flow_wav2vec2": set(),
    "s2t_flow": set(),
    "synthesizer_lm": {"columns"},
    "synthesizer_lm --synthesizer-form random": set(),
    "t2r_lm": {"map_weight"},
    "hedgehog_lm": {"query_weight", "key_weight"},
}


@pytest.mark.parametrize("words", DECAYED)
def test_weights_of_linear_layers_decay_alone(words: str) -> None:
    """No bias, norm, embedding or position; without the option everything does, as in fairseq."""
    model, parameters = trainable(*words.split(), FLAG)
    decayed = moved(optimizer_of(parameters, "adam", FLAG), parameters)
    inside = {name for name in decayed if ".inner." in name}
    assert decayed - inside == linear_weights(model) and {x.rpartition(".")[2] for x in inside} == DECAYED[words]
    _, parameters = trainable(*words.split())
    assert moved(optimizer_of(parameters, "adam"), parameters) == {k for k, x in parameters.items() if x.requires_grad}


@pytest.mark.parametrize("name", [x for x in NAMES if x not in ("lamb", "cpu_adam")])  # of further packages
def test_every_optimizer_decays_them_alone(name: str) -> None:
    model, parameters = trainable("daft_conv_lm", FLAG)
    assert moved(optimizer_of(parameters, name, FLAG), parameters) == linear_weights(model)


def test_half_precision_and_a_stored_state_go_on() -> None:
    """Copies in float32 are told apart; a decay in ``--optimizer-overrides`` is for linear weights alone."""
    config = configured("adam", FLAG, "--fp16", "--fp16-no-flatten-grads")
    model, parameters = trainable("daft_conv_lm", FLAG)
    optimizer = FP16Optimizer.build_optimizer(config, list(model.half().parameters()))
    optimizer.zero_grad()
    before = {name: x.detach().clone() for name, x in parameters.items()}
    optimizer.step()
    assert {name for name, x in parameters.items() if not torch.equal(before[name], x)} == linear_weights(model)
    with pytest.raises(ValueError, match="--fp16-no-flatten-grads"):
        build_optimizer(config.optimizer, [nn.Parameter(torch.ones(9))])
    model, parameters = trainable("daft_conv_lm", FLAG)
    first, second = (build_optimizer(config.optimizer, list(parameters.values())) for _ in range(2))
    moved(first, parameters)
    second.load_state_dict(first.state_dict(), {"weight_decay": 0.25, "lr": 0.2})
    assert second.get_lr() == 0.2 and moved(second, parameters) == linear_weights(model)


def test_an_optimizer_that_does_not_read_the_option_is_refused() -> None:
    """As hydra could have it; fairseq sets the update number once before there is an optimizer."""
    (model, _), (trained, parameters) = (trainable("daft_conv_lm", FLAG) for _ in range(2))
    for each in (model, trained):
        each.set_num_updates(5)
    optimizer_of(parameters, "adam", FLAG)
    trained.set_num_updates(5)
    with pytest.raises(ValueError, match="optimizer=lineartime_adam"):
        model.set_num_updates(5)


# ---- RAdam


def radam(parameters: list[nn.Parameter], words: str) -> FairseqOptimizer:
    """The optimizer that fairseq builds from ``--optimizer radam`` and its options, at a learning rate of 0.1."""
    return build_optimizer(configured("radam", *words.split()).optimizer, parameters)


def two_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


def update(optimizer: Any, parameters: list[nn.Parameter], steps: range) -> None:
    """Updates with gradients that depend on the number of the update alone."""
    for step in steps:
        for i, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()


#: Options of ours, and torch's.
RADAM = {
    "--radam-betas (0.8,0.95) --radam-eps 1e-3 --radam-foreach on": {
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "foreach": True,
    },
    "--radam-decoupled-weight-decay --radam-foreach off": {"decoupled_weight_decay": True, "foreach": False},
}


@pytest.mark.parametrize("ours", RADAM)
def test_updates_of_radam_are_torchs(ours: str) -> None:
    """Before and after the rectification begins, also resumed from a state; typed options win over stored ones."""
    actual, expected = two_parameters(), two_parameters()
    first, second = radam(actual, ours), radam(actual, ours)
    update(first, actual, range(7))
    second.load_state_dict(first.state_dict(), {"lr": 0.1})
    update(second, actual, range(7, 12))
    update(torch.optim.RAdam(expected, lr=0.1, weight_decay=0.5, **RADAM[ours]), expected, range(12))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected))
    second.load_state_dict(first.state_dict(), {"lr": 0.7})
    assert second.get_lr() == 0.7


@pytest.mark.parametrize(
    "words", ["--radam-betas (0.9,1.0)", "--radam-betas 0.9", "--radam-eps=-1.0", "--weight-decay=-0.5"]
)
def test_values_that_radam_refuses(words: str) -> None:
    option, value = words.replace("=", " ").split()
    with pytest.raises(ValueError, match=rf"{option} is '?{re.escape(value)}'?; allowed"):
        radam(two_parameters(), words)
