"""Linear layers as convolutions of one pixel: the same numbers, taken where and only where they are faster."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common import linear
from common.linear import Linear, convolutions_are_faster, use_faster_linear
from tests.compare import assert_close, gradients


@pytest.fixture
def convolutions(monkeypatch):
    """A machine on which convolutions are faster, with any number of products; the images of each so far, in a list."""
    monkeypatch.setattr(linear, "convolutions_are_faster", lambda: True)
    monkeypatch.setattr(linear, "_MIN_PRODUCTS", 1)
    seen, convolve = [], F.conv2d
    monkeypatch.setattr(F, "conv2d", lambda x, *others: seen.append(x.shape[0]) or convolve(x, *others))
    return seen


@pytest.fixture
def threads():
    """Sets the number of threads for as long as the test runs."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("shape", "images"), [((16, 39, 40), 16), ((2, 8, 39, 40), 16), ((640, 40), 16), ((613, 40), 1), ((3, 211, 40), 1)]
)
def test_the_same_numbers_and_gradients(convolutions, threads, shape, images, bias):
    threads(2)
    module, x = Linear(40, 24, bias=bias), torch.randn(*shape, requires_grad=True)
    leaves = [x, *module.parameters()]
    out, expected = module(x), F.linear(x, module.weight, module.bias)
    assert convolutions == [images]
    assert out.is_contiguous()
    assert_close("out", out, expected)
    for actual, wanted in zip(gradients(out, leaves), gradients(expected, leaves)):
        assert_close("gradient", actual, wanted)


def test_tokens_that_do_not_lie_one_behind_the_other(convolutions):
    module, tokens = Linear(40, 24), torch.randn(40, 50, 32)
    for x in (tokens.permute(2, 1, 0), tokens.permute(1, 2, 0), tokens.transpose(0, 2)[::2]):
        assert_close("out", module(x), F.linear(x, module.weight, module.bias))
    assert convolutions == [16, 16, 16]


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(16, 39, 40, dtype=torch.float64),
        torch.randn(16, 39, 40, dtype=torch.bfloat16),
        torch.randn(16, 32, 40),
        torch.randn(0, 40),
        torch.randn(40),
        torch.randn(640, 40).as_subclass(type("Tagged", (torch.Tensor,), {})),
    ],
    ids=["float64", "bfloat16", "few numbers", "no tokens", "one token", "a subclass"],
)
def test_any_other_input_goes_the_usual_way(convolutions, x):
    module = Linear(40, 24).to(x.dtype)
    assert torch.equal(module(x), F.linear(x, module.weight, module.bias))
    assert not convolutions


def test_few_tokens_and_few_products_go_the_usual_way(convolutions, monkeypatch):
    wide, module = Linear(400, 24), Linear(40, 24)
    wide(torch.randn(120, 400))
    assert not convolutions
    x = torch.randn(640, 40)
    monkeypatch.setattr(linear, "_MIN_PRODUCTS", 640 * 40 * 24 + 1)
    module(x)
    assert not convolutions
    monkeypatch.setattr(linear, "_MIN_PRODUCTS", 640 * 40 * 24)
    module(x)
    assert convolutions == [16]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_no_channels(convolutions):
    module = Linear(0, 24)
    assert torch.equal(module(torch.randn(640, 0)), module.bias.expand(640, 24))


def test_another_width_is_refused_as_by_torch(convolutions):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Linear(40, 24)(torch.randn(16, 40, 39))


def test_the_usual_way_under_autocast(convolutions):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Linear(40, 24)(torch.randn(16, 39, 40)).dtype == torch.bfloat16
    assert not convolutions


def test_the_usual_way_in_a_graph(convolutions):
    module, x = Linear(40, 24), torch.randn(16, 39, 40)
    expected = F.linear(x, module.weight, module.bias)
    for form in (
        torch.jit.script(module),
        torch.jit.trace(module, x, check_trace=False),
        torch.compile(module, backend="eager", fullgraph=True),
        torch.export.export(module, (x,)).module(),
    ):
        assert torch.equal(form(x), expected)
    assert not convolutions


def test_gradients_of_each_sample(convolutions):
    """By torch.func, which sees operations on one sample."""
    module, x = Linear(40, 24), torch.randn(3, 640, 40)
    weights = dict(module.named_parameters())

    def loss(weights, x):
        return torch.func.functional_call(module, weights, (x,)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    for i, sample in enumerate(x):
        expected = torch.autograd.grad(loss(weights, sample), list(weights.values()))
        for name, wanted in zip(weights, expected):
            assert_close(name, found[name][i], wanted)


def test_one_image_only_with_threads(convolutions, threads):
    """What torch asks of an image to give it to oneDNN."""
    module, x = Linear(40, 24), torch.randn(1, 613, 40)
    for number, taken in ((1, 0), (2, 1)):
        threads(number)
        module(x)
        assert len(convolutions) == taken


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


def test_layers_stay_what_they_are():
    module = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Sequential(nn.Linear(16, 4)))
    parameters, calls = dict(module.named_parameters()), []
    module[0].register_forward_pre_hook(lambda *_: calls.append(1))
    use_faster_linear(module)
    assert type(module[0]) is type(module[2][0]) is Linear and type(module[1]) is nn.ReLU
    assert all(parameter is parameters[name] for name, parameter in module.named_parameters())
    assert (module[0].in_features, module[0].out_features, module[0].bias) == (8, 16, None)
    x = torch.randn(3, 8)
    for twin in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(nn.Sequential(*module[1:])))):
        assert type(twin[-1][0]) is Linear
    module(x)
    assert calls == [1]


def test_a_layer_itself():
    layer = nn.Linear(8, 16)
    use_faster_linear(layer)
    assert type(layer) is Linear


def test_layers_of_another_class_are_left_alone():
    class Noisy(nn.Linear):
        pass

    module = nn.Sequential(Noisy(8, 16))
    use_faster_linear(module)
    assert type(module[0]) is Noisy
