"""Linear layers as convolutions of one pixel: the same numbers, taken where and only where they are faster."""

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import Mlp
from torch import nn
from torch.nn import functional as F

import timm_plugin  # noqa: F401  (registers the models)
from tests.compare import assert_close, gradients
from timm_plugin import linear
from timm_plugin.linear import PointwiseLinear, convolutions_are_faster, make_pointwise


@pytest.fixture
def convolutions(monkeypatch):
    """A machine on which convolutions are faster; the number of them so far, in a list."""
    monkeypatch.setattr(linear, "convolutions_are_faster", lambda: True)
    seen, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda *arguments: seen.append(1) or convolve(*arguments))
    return seen


def layer(**options) -> PointwiseLinear:
    return PointwiseLinear(40, 24, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_same_numbers_and_gradients(convolutions, bias, transposed):
    module = layer(bias=bias)
    x = torch.randn(16, 40, 39).transpose(1, 2) if transposed else torch.randn(16, 39, 40)
    x.requires_grad_()
    leaves = [x, *module.parameters()]
    out, expected = module(x), F.linear(x, module.weight, module.bias)
    assert len(convolutions) == 1
    assert out.is_contiguous()
    assert_close("out", out, expected)
    for actual, wanted in zip(gradients(out, leaves), gradients(expected, leaves)):
        assert_close("gradient", actual, wanted)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(16, 39, 40, dtype=torch.float64),
        torch.randn(16, 39, 40, dtype=torch.bfloat16),
        torch.randn(700, 40),
        torch.randn(16, 3, 13, 40),
        torch.randn(16, 3, 40),
    ],
    ids=["float64", "bfloat16", "a matrix", "a map", "few numbers"],
)
def test_any_other_input_goes_the_usual_way(convolutions, x):
    module = layer().to(x.dtype)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    assert not convolutions


def test_the_usual_way_under_autocast(convolutions):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer()(torch.randn(16, 39, 40)).dtype == torch.bfloat16
    assert not convolutions


def test_few_images_only_with_threads(convolutions):
    threads, x = torch.get_num_threads(), torch.randn(1, 600, 40)
    try:
        for number, taken in ((1, 0), (2, 1)):
            torch.set_num_threads(number)
            layer()(x)
            assert len(convolutions) == taken
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("vendor", "capability", "faster"),
    [("AuthenticAMD", "AVX512", True), ("GenuineIntel", "AVX512", False), ("AuthenticAMD", "AVX2", False)],
)
def test_only_on_wide_cpus_that_are_not_intels(monkeypatch, tmp_path, vendor, capability, faster):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setattr(linear, "Path", lambda name: tmp_path / Path(name).name)
    for backend in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(backend, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert convolutions_are_faster.__wrapped__() is faster
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert not convolutions_are_faster.__wrapped__()


def test_not_on_systems_that_do_not_say(monkeypatch, tmp_path):
    monkeypatch.setattr(linear, "Path", lambda name: tmp_path / "missing")
    assert not convolutions_are_faster.__wrapped__()


def test_layers_keep_their_parameters():
    mlp = Mlp(8, 16)
    parameters = dict(mlp.named_parameters())
    make_pointwise(mlp)
    assert type(mlp.fc1) is type(mlp.fc2) is PointwiseLinear
    assert all(parameter is parameters[name] for name, parameter in mlp.named_parameters())
    assert (mlp.fc1.in_features, mlp.fc1.out_features) == (8, 16)


def test_without_a_bias():
    module = nn.Sequential(nn.Linear(3, 2, bias=False))
    make_pointwise(module)
    assert module[0].bias is None and list(module.state_dict()) == ["0.weight"]


@pytest.mark.parametrize("name", ["flowformer_hier_test", "flowformer_deit_ti"])
def test_every_linear_layer_of_a_block(convolutions, name):
    model = timm.create_model(name, **(dict(depth=2, img_size=64) if name.endswith("ti") else {}))
    blocks = [module for module in model.modules() if hasattr(module, "attn")]
    layers = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    assert len(layers) == 4 * len(blocks)
    assert all(type(module) is PointwiseLinear for module in layers)


def test_a_model_gives_the_same_numbers(convolutions):
    model = timm.create_model("flowformer_hier_test")
    x = torch.randn(16, 3, *model.patch_embed.img_size)
    out, parameters = model(x), list(model.parameters())
    found, taken = gradients(out, parameters), len(convolutions)
    assert taken > 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "convolutions_are_faster", lambda: False)
        expected = model(x)
    assert_close("logits", out, expected)
    for name, actual, wanted in zip(dict(model.named_parameters()), found, gradients(expected, parameters)):
        assert_close(f"gradient of {name}", actual, wanted, 1e-4)
