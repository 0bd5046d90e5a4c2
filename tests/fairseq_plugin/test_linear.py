"""The linear layers of the language models are those of ``common.linear``, and fairseq quantises them as its own."""

import pytest
import torch
from fairseq.modules.quantization.pq.modules import PQLinear
from fairseq.modules.quantization.pq.utils import SizeTracker, quantize_model_
from fairseq.modules.quantization.quantization_options import parse_config_yaml
from fairseq.modules.quantization.scalar.modules import IntLinear
from torch import nn

from common import linear
from tests.linear_layers import compare_both_ways

from .toy import ARCHITECTURES, awake, build_model, tokens
from .toy_masked import MASKED, build_masked


def _layers(model: nn.Module):
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_linear_layer_of_a_language_model(arch: str) -> None:
    layers = _layers(build_model(arch, "--share-decoder-input-output-embed"))
    assert len(layers) >= 5 and all(type(layer) is linear.Linear for layer in layers)


@pytest.mark.parametrize("arch", MASKED)
def test_every_linear_layer_of_a_masked_model(arch: str) -> None:
    layers = _layers(build_masked(arch))
    assert len(layers) >= 5 and all(type(layer) is linear.Linear for layer in layers)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm"])
def test_a_model_gives_the_same_numbers(arch: str) -> None:
    """Two sequences, which fairseq keeps as (T, B, C)."""
    model = awake(build_model(arch)).eval()
    assert compare_both_ways(model, lambda: model(tokens(2, 160))[0]) == (len(_layers(model)), 0)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "transformer_pp_lm"])
def test_scalar_quantisation(arch: str) -> None:
    """Not run: fairseq's quantised layers move themselves to a GPU."""
    expected = len(_layers(build_model(arch)))
    model = build_model(arch, "--quant-noise-scalar", "0.5")
    quantized = [module for module in model.modules() if type(module) is IntLinear]
    assert _layers(model) == [] and len(quantized) == expected
    assert all(layer.p == 0.5 and layer.weight.shape[1] == layer.in_features for layer in quantized)


def test_product_quantisation() -> None:
    """As ``fairseq-train --quantization-config-path`` does it, with fairseq's own settings."""
    model, config = build_model("flowformer_lm", "--quant-noise-pq", "0.1"), parse_config_yaml({})
    layers, blocks, centroids = (config[name] for name in ("layers_to_quantize", "block_sizes", "n_centroids"))
    centroids["Linear"] = ["in_features", {"*": 8}]  # a toy has few blocks
    quantized = quantize_model_(model, SizeTracker(model), layers[:1], blocks, centroids, n_iter=2)
    assert len(quantized) == 4
    assert all(isinstance(model.get_submodule(name), PQLinear) for name in quantized)
    assert torch.isfinite(model.eval()(tokens(2, 20))[0]).all()
