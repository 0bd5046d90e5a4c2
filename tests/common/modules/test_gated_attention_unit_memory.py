"""A gated attention unit recomputes what it did not save for the backward pass, which changes only its memory."""

import sys

import pytest
import torch
from torch import Tensor, nn

from common.modules import gated_attention_unit
from common.modules.gated_attention_unit import GatedAttentionUnit
from tests.common.inputs import padding
from tests.compare import assert_close

QUAD = {"chunk_size": None, "max_positions": 24}
FLASH = {"chunk_size": 5, "causal": True}
OPTIONS = {
    "flash": FLASH,
    "quad": QUAD,
    "no gate, one term": {**FLASH, "gate": False, "linear": False},
    "forget": {**FLASH, "forget": "head"},
    "dropout": {**FLASH, "dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
}


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(gated_attention_unit, "RECOMPUTED_FROM", 0)


def unit(dtype=torch.float64, **options) -> GatedAttentionUnit:
    module = GatedAttentionUnit(6, expanded_dim=8, query_dim=4, **options)
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.to(dtype)


def tokens(n=13, dtype=torch.float64) -> Tensor:
    return torch.randn(2, n, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def step(module, x, mask) -> tuple[list[Tensor], int]:
    """Output and gradients, and how many tensors the graph keeps outside of the recomputed part."""
    saved = []
    torch.manual_seed(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = module(x, mask)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])], len(saved)


def assert_equal_to_keeping_all(module, x, mask, monkeypatch) -> None:
    recomputed, few = step(module, x, mask)
    monkeypatch.setattr(gated_attention_unit, "RECOMPUTED_FROM", sys.maxsize)
    plain, many = step(module, x, mask)
    assert all(torch.equal(actual, expected) for actual, expected in zip(recomputed, plain, strict=True))
    assert few < 5 < 20 < many


@pytest.mark.parametrize(
    "dtype, side", [(torch.float64, "none"), (torch.float32, "left"), (torch.bfloat16, "holes")], ids=str
)
@pytest.mark.parametrize("options", OPTIONS)
def test_output_and_gradients_are_the_same_bit_for_bit(options, dtype, side, monkeypatch):
    assert_equal_to_keeping_all(unit(dtype, **OPTIONS[options]), tokens(dtype=dtype), padding(side, 2, 13), monkeypatch)


def test_under_autocast_too(monkeypatch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal_to_keeping_all(unit(torch.float32, **FLASH), tokens(dtype=torch.float32), None, monkeypatch)


@pytest.mark.parametrize("options", ["flash", "quad"])
def test_gradients_of_second_order(options):
    module = unit(**OPTIONS[options])
    assert torch.autograd.gradgradcheck(module, tokens(7), atol=1e-4)


def test_frozen_parameters():
    """Only the input, or only the scales of queries and keys, requires a gradient."""
    module, x = unit(**FLASH), tokens()
    wanted = torch.autograd.grad(module(x).square().sum(), [x, module.gamma])
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), x)[0], wanted[0])
    module.gamma.requires_grad_()
    (actual,) = torch.autograd.grad(module(x.detach()).square().sum(), module.gamma)
    assert_close("gradient of gamma", actual, wanted[1])
