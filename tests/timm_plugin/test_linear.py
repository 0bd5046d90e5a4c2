"""The linear layers of the image models are those of ``common.linear``."""

import pytest
import timm
import torch
from torch import nn

import timm_plugin  # noqa: F401  (registers the models)
from common import linear
from tests.linear_layers import compare_both_ways


@pytest.mark.parametrize("name", ["flowformer_hier_test", "flowformer_deit_ti"])
def test_every_linear_layer_of_a_block(name):
    model = timm.create_model(name, **(dict(depth=2, img_size=64) if name.endswith("ti") else {}))
    blocks = [module for module in model.modules() if hasattr(module, "attn")]
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 4 * len(blocks)
    assert all(type(module) is linear.Linear for module in layers)


def test_a_model_gives_the_same_numbers():
    model = timm.create_model("flowformer_hier_test")
    x = torch.randn(16, 3, *model.patch_embed.img_size)
    many, few = compare_both_ways(model, lambda: model(x))
    assert many > few + 4
