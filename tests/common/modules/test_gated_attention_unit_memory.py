"""A gated attention unit forms tensors again in its backward pass, and nothing but memory changes."""

import pytest
import torch
from torch import Tensor, nn

from common.modules.gated_attention_unit import GatedAttentionUnit
from common.ops.shared import formed_again
from tests.common.inputs import padding
from tests.compare import assert_close

QUAD = {"chunk_size": None, "max_positions": 24}
FLASH = {"chunk_size": 5, "causal": True}
OPTIONS = {
    "flash": FLASH,
    "flash, not causal": {"chunk_size": 5},
    "quad": QUAD,
    "heads": {**FLASH, "heads": 2},
    "laplace": {**FLASH, "kernel": "laplace", "bias": "rotary"},
    "one term": {**FLASH, "linear": False},
    "no gate": {**FLASH, "gate": False},
    "no positions": {**FLASH, "rotary": False, "bias": "none"},
    "forget": {**FLASH, "forget": "head"},
    "scalenorm": {**FLASH, "norm": "scalenorm"},
    "dropout": {**FLASH, "dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3},
}


@pytest.fixture(autouse=True)
def small_tensors_too(monkeypatch):
    monkeypatch.setattr(formed_again, "LEAST_NUMBERS", 0)


def unit(dtype=torch.float64, **options) -> GatedAttentionUnit:
    module = GatedAttentionUnit(6, expanded_dim=8, query_dim=4, **options)
    generator = torch.Generator().manual_seed(2)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return module.to(dtype)


def tokens(n=13, dtype=torch.float64) -> Tensor:
    return torch.randn(2, n, 6, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def step(module, x, mask, keep: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients, and what the graph keeps if ``keep``: then all that autograd wants is kept."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    torch.manual_seed(0)
    if keep:
        with hooks:
            out = module(x, mask)
    else:
        out = module(x, mask)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])], kept


@pytest.mark.parametrize(
    "dtype, side", [(torch.float64, "none"), (torch.float32, "left"), (torch.bfloat16, "holes")], ids=str
)
@pytest.mark.parametrize("options", OPTIONS)
def test_output_and_gradients_are_the_same_bit_for_bit(options, dtype, side):
    module, x, mask = unit(dtype, **OPTIONS[options]), tokens(dtype=dtype), padding(side, 2, 13)
    (formed, _), (kept, tensors) = step(module, x, mask, False), step(module, x, mask, True)
    assert len(tensors) > 10
    assert all(torch.equal(one, other) for one, other in zip(formed, kept, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_too(dtype):
    module, x = unit(torch.float32, **FLASH), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        (formed, _), (kept, _) = step(module, x, None, False), step(module, x, None, True)
    assert all(torch.equal(one, other) for one, other in zip(formed, kept, strict=True))


@pytest.mark.parametrize("options", ["flash", "quad", "heads"])
def test_gradients_of_second_order(options):
    module = unit(**OPTIONS[options])
    assert torch.autograd.gradgradcheck(module, tokens(7), atol=1e-4)


def test_frozen_parameters():
    """Nothing but the input, or nothing but the scales of queries and keys, needs a gradient."""
    module, x = unit(**FLASH), tokens()
    wanted = torch.autograd.grad(module(x).square().sum(), [x, module.gamma])
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(module(x).square().sum(), x)[0], wanted[0])
    module.gamma.requires_grad_()
    (actual,) = torch.autograd.grad(module(x.detach()).square().sum(), module.gamma)
    assert_close("gradient of gamma", actual, wanted[1])
