"""Layers of the image models may be wrapped, as adapters such as LoRA do."""

import pytest
import torch
from torch import Tensor, nn

from common.attention.soft import SoftAttention
from tests.timm_plugin.helpers.models import CASES, build, images


class Wrapped(nn.Module):
    """What an adapter puts in place of a layer: it calls the layer, and has none of its attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("case", CASES)
def test_every_projection_and_convolution_can_be_wrapped(case: str) -> None:
    model = build(case)
    x = images(model)
    with torch.no_grad():
        expected = model(x)
        layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
        # SOFT's function takes the weights of its own convolutions.
        own = {id(x) for module in model.modules() if isinstance(module, SoftAttention) for x in module.children()}
        layers = [(name, layer) for name, layer in layers if id(layer) not in own]
        for name, layer in layers:
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Wrapped(layer))
        assert torch.equal(model(x), expected)
