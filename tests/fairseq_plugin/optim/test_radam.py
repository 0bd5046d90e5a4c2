"""``--optimizer radam``: torch's own updates, its options, and its state in a checkpoint."""

import pytest
import torch
from fairseq.optim import build_optimizer
from omegaconf import OmegaConf

from fairseq_plugin.optim.radam import FairseqRAdamConfig


def build(parameters, **options):
    """The optimizer that fairseq builds from ``--optimizer radam`` and ``options``."""
    config = OmegaConf.structured(FairseqRAdamConfig(lr=[0.01]))
    OmegaConf.set_struct(config, False)
    config._name = "radam"
    for name, value in options.items():
        config[name] = value
    return build_optimizer(config, parameters)


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


def run(optimizer, params, steps: int, first: int = 0) -> None:
    """``steps`` updates with gradients that depend on the number of the update alone."""
    for step in range(first, first + steps):
        for i, parameter in enumerate(params):
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * step + i))
        optimizer.step()


OPTIONS = [
    (
        {"radam_betas": "(0.8, 0.95)", "radam_eps": 1e-3, "weight_decay": 0.1, "radam_foreach": "on"},
        {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1, "foreach": True},
    ),
    (
        {"weight_decay": 0.1, "radam_decoupled_weight_decay": True, "radam_foreach": "off"},
        {"weight_decay": 0.1, "decoupled_weight_decay": True, "foreach": False},
    ),
]


@pytest.mark.parametrize("ours, theirs", OPTIONS, ids=["all", "decoupled"])
def test_updates_are_torchs(ours, theirs) -> None:
    """Before and after the rectification begins, with every option."""
    actual, expected = parameters(), parameters()
    run(build(actual, **ours), actual, 12)
    run(torch.optim.RAdam(expected, lr=0.01, **theirs), expected, 12)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected))


def test_state_is_saved_and_resumed() -> None:
    """Seven updates in two parts are seven updates; options of the command line win over those in the file."""
    whole, parts = parameters(), parameters()
    run(build(whole), whole, 7)
    first = build(parts)
    run(first, parts, 4)
    second = build(parts)
    second.load_state_dict(first.state_dict(), {"lr": 0.01})
    run(second, parts, 3, first=4)
    assert all(torch.equal(one, other) for one, other in zip(whole, parts))
    second.load_state_dict(first.state_dict(), {"lr": 0.5})
    assert second.get_lr() == 0.5


@pytest.mark.parametrize(
    "option, value, named",
    [
        ("radam_betas", "(0.9, 1.0)", r"--radam-betas is '\(0.9, 1.0\)'"),
        ("radam_betas", "0.9", "--radam-betas is '0.9'"),
        ("radam_eps", -1.0, "--radam-eps is -1.0"),
        ("weight_decay", -0.5, "--weight-decay is -0.5"),
    ],
)
def test_values_that_are_not_allowed(option: str, value, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build(parameters(), **{option: value})
