"""The DAFT modules: the ops with learned biases and filters, selection, entropy, and refused arguments."""

import copy
import math

import pytest
import scipy.stats
import torch
from torch import nn
from torch.nn import functional as F

from common.attention import DaftConvAttention, DaftFullAttention, LinearAttention, build_attention, position_entropy
from common.ops import daft_conv
from common.ops.daft.conv_reference import daft_conv_reference
from tests.common.attention.build import build, narrow
from tests.common.inputs import padding, qkv
from tests.compare import assert_close, gradients, weights

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
gating = pytest.mark.parametrize("query", [True, False], ids=["gated", "ungated"])


def joined(*tensors):
    """(B, H, n, c) -> (B, n, H c), heads joined as the ops expect them; None is returned as None."""
    return [None if x is None else torch.cat(x.unbind(1), dim=-1) for x in tensors]


def heads_of(x, heads):
    """The inverse of ``joined`` for one tensor."""
    return torch.stack(x.chunk(heads, dim=-1), dim=1)


def conv_inputs(tokens, heads=2, channels=4, query=True, **options):
    """q (or None), k of one channel and v."""
    q, k, v = qkv(tokens, heads=heads, d=channels, e=channels, **options)
    return q if query else None, k[..., :1].detach().requires_grad_(), v


def compare(out, expected, inputs, module):
    """Compare the outputs, and the gradients of the inputs and of every parameter."""
    assert_close("out", out, expected)
    leaves = {name: x for name, x in zip("qkv", inputs) if x is not None}
    leaves.update(module.named_parameters())
    for name, actual, wanted in zip(leaves, gradients(out, leaves.values()), gradients(expected, leaves.values())):
        if name == "beta" and module.local_only:  # cancels where a token sees only its window
            assert actual.abs().max() < 1e-9
        else:
            assert_close(f"gradient of {name}", actual, wanted, 1e-8)


def literal_filters(module):
    """γ (r - mean) / std + β per head, entry by entry, with the population standard deviation."""
    filters = []
    for head in range(module.r.shape[0]):
        entries = module.r[head].flatten()
        mean = sum(entries) / len(entries)
        variance = sum((x - mean) ** 2 for x in entries) / len(entries)
        deviation = (variance + 1e-6).sqrt()  # so that the standard deviation of a single entry is not 0
        scaled = [module.gamma[head, 0] * (x - mean) / deviation + module.beta[head, 0] for x in entries]
        filters.append(torch.stack(scaled).view_as(module.r[head]))
    return torch.stack(filters)


# DAFT-full


@causality
def test_the_bias_goes_from_keys_to_queries(causal):
    """One large entry in row t, column t' sends token t to t', and not t' to t."""
    module = build("daft_full", causal, bias_dim=None, max_tokens=6)
    with torch.no_grad():
        module.w.zero_()[4, 1] = 60.0
    _, k, v = qkv(6, d=3)
    out = module(torch.full_like(v, 60.0), k, v)
    assert_close("token 4", out[:, :, 4], v[:, :, 1])
    assert not torch.allclose(out[:, :, 1], v[:, :, 4], atol=0.1)


@causality
def test_heads_have_no_effect_in_daft_full(causal):
    module = build("daft_full", causal)
    q, k, v = qkv(11, heads=12, d=1, e=1)
    expected = joined(module(q, k, v))[0]
    for heads in (1, 2, 3, 6):
        out = module(*(heads_of(x, heads) for x in joined(q, k, v)))
        assert_close(f"{heads} heads", joined(out)[0], expected)


def test_the_parameters_of_daft_full():
    module = build_attention("daft_full", max_tokens=500)
    assert {name: tuple(x.shape) for name, x in weights(module.state_dict()).items()} == {
        "pe0": (500, 128),
        "pe1": (500, 128),
    }
    assert all(abs(x.std() - 0.1) < 2e-3 and abs(x.mean()) < 2e-3 for x in module.parameters())
    free = build_attention("daft_full", max_tokens=200, bias_dim=None)
    assert {name: tuple(x.shape) for name, x in weights(free.state_dict()).items()} == {"w": (200, 200)}
    assert abs(free.w.std() - 0.02) < 1e-3 and abs(free.w.mean()) < 1e-3
    for each in (module, free):
        before = copy.deepcopy(each.state_dict())
        each.reset_parameters()
        assert all(not torch.equal(x, before[name]) for name, x in each.named_parameters())


# DAFT-conv


@pytest.mark.parametrize("window", [5, (5, 3)], ids=str)
def test_filters_are_standardised_and_scaled_per_head(window):
    module = build("daft_conv", num_heads=3, window=window)
    compare(module.position_bias(), literal_filters(module), (), module)
    assert module.position_bias().shape == module.r.shape == (3, *module.window_shape)
    flat = module.position_bias().flatten(1)
    assert_close("mean", flat.mean(1), module.beta.flatten())
    assert_close("deviation", flat.std(1, correction=0), module.gamma.flatten().abs(), 1e-5)
    plain = build("daft_conv", num_heads=3, window=window, reparameterize=False)
    assert torch.equal(plain.position_bias(), plain.r)


@causality
@pytest.mark.parametrize(("heads", "channels"), [(1, 6), (6, 1), (3, 2)], ids=str)
@pytest.mark.parametrize("window", [1, 3, 61])
def test_one_head_one_channel_and_any_window(window, heads, channels, causal):
    """A window of one entry has standard deviation 0, so its filter is β."""
    inputs = conv_inputs(9, heads=heads, channels=channels)
    module = build("daft_conv", causal, num_heads=heads, window=window)
    r = module.beta if window == 1 else literal_filters(module)
    assert_close("filters", module.position_bias(), r)
    expected = heads_of(daft_conv_reference(*joined(*inputs), r, causal=causal), heads)
    out = module(*inputs)
    assert_close("out", out, expected)
    assert all(torch.isfinite(x).all() for x in gradients(out, [*inputs, *module.parameters()]))


@causality
def test_at_first_attention_is_by_key_alone(causal):
    inputs = q, k, v = conv_inputs(9)
    for reparameterize in (True, False):
        module = build_attention(
            "daft_conv", causal=causal, num_heads=2, window=5, reparameterize=reparameterize
        ).double()
        assert (module.position_bias() == 0).all()
        scores = k.transpose(2, 3).expand(-1, -1, 9, -1)  # (B, H, n, 1) -> (B, H, n, n)
        if causal:
            scores = scores.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
        assert_close("out", module(*inputs), torch.sigmoid(q) * (scores.softmax(-1) @ v))


def test_the_parameters_of_daft_conv():
    module = build_attention("daft_conv", num_heads=64, window=(11, 11))
    shapes = {name: tuple(x.shape) for name, x in weights(module.state_dict()).items()}
    assert shapes == {"r": (64, 11, 11), "gamma": (64, 1), "beta": (64, 1)}
    assert (module.gamma == 0).all() and (module.beta == 0).all()
    assert abs(module.r.std() - 1.0) < 0.05 and abs(module.r.mean()) < 0.05
    plain = build_attention("daft_conv", num_heads=64, window=7, reparameterize=False)
    assert {name: tuple(x.shape) for name, x in weights(plain.state_dict()).items()} == {"r": (64, 7)}
    assert (plain.r == 0).all()
    causal = build_attention("daft_conv", causal=True, num_heads=1)
    assert causal.options.window is None and causal.r.shape == (1, 64)
    for each in (module, plain):
        nn.init.normal_(each.r, 3.0)
        for name, x in each.named_parameters():
            if name != "r":
                nn.init.ones_(x)
        old = each.r.detach().clone()
        each.reset_parameters()
        assert (each.position_bias() == 0).all() and not torch.equal(each.r, old)


# Selection


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_filters_of_half_precision_are_standardised_in_float32(dtype):
    module, inputs = build("daft_conv", dtype=dtype).eval(), conv_inputs(19, dtype=dtype)
    double = copy.deepcopy(module).double()
    assert_close("filters", module.position_bias(), double.position_bias(), 1e-4)
    out = module(*inputs)
    assert out.dtype == dtype
    assert_close("out", out, double(*(x.double() for x in inputs)))


@causality
def test_training_multiplies_filters_by_a_sample_of_gumbel_softmax(causal):
    inputs, mask = conv_inputs(13), padding("left", 2, 13)
    module = build("daft_conv", causal, gumbel_temperature=0.5).train()
    torch.manual_seed(3)
    # Gumbel noise by its definition, as torch draws it: -log of an exponential variable.
    noise = -torch.empty(2, 5, dtype=torch.float64).exponential_().log()
    r = literal_filters(module)
    sample = ((r + noise) / 0.5).softmax(1)
    expected = daft_conv(*joined(*inputs), r * sample, causal=causal, key_padding_mask=mask)
    torch.manual_seed(3)
    compare(module(*inputs, mask, mask), heads_of(expected, 2), inputs, module)
    torch.manual_seed(3)
    assert_close("reference", module.reference(*inputs, mask, mask), heads_of(expected, 2))
    torch.manual_seed(3)
    assert not torch.equal(module(*inputs), module(*inputs)), "another sample in every call"


def test_the_sample_is_over_the_whole_window_of_an_image_and_the_temperature_counts():
    inputs = conv_inputs(12)
    outputs = []
    for temperature in (0.5, 5.0):
        module = build("daft_conv", window=(3, 5), gumbel_temperature=temperature)
        module.load_state_dict(build("daft_conv", window=(3, 5)).state_dict())
        torch.manual_seed(0)
        nn.init.normal_(module.r)
        torch.manual_seed(4)
        outputs.append(module(*inputs, spatial_shape=(3, 4)))
        torch.manual_seed(4)
        sample = F.gumbel_softmax(module.position_bias().flatten(1), tau=temperature)
        r = module.position_bias() * sample.unflatten(1, (3, 5))
        assert_close("out", joined(outputs[-1])[0], daft_conv(*joined(*inputs), r, spatial_shape=(3, 4)))
    assert not torch.allclose(*outputs)


# Entropy


@pytest.mark.parametrize("options", [{}, {"reparameterize": False}, {"gumbel_temperature": 0.5}], ids=str)
@pytest.mark.parametrize("window", [5, (3, 7)], ids=str)
def test_the_entropy_of_a_module(window, options):
    module = build("daft_conv", num_heads=3, window=window, **options)
    flat = module.position_bias().detach().flatten(1)
    assert module.entropy().item() == pytest.approx(scipy.stats.entropy(flat.exp().numpy(), axis=1).sum())
    assert all((x != 0).any() for x in torch.autograd.grad(module.entropy(), [module.r]))
    module.reset_parameters()
    assert module.entropy().item() == pytest.approx(3 * math.log(flat.shape[1])), "no place is preferred at first"
    with torch.no_grad():
        module.r.zero_().view(3, -1)[:, 1] = 1e5
        if module.options.reparameterize:
            module.gamma.fill_(1e5)
    assert module.entropy().item() == pytest.approx(0.0, abs=1e-6) and torch.isfinite(module.entropy())


def test_the_entropy_of_a_model_is_the_sum_over_its_modules():
    first, second = build("daft_conv"), build("daft_conv", num_heads=3, window=(3, 3))
    model = nn.Sequential(first, nn.Sequential(build("daft_full"), second))
    assert_close("entropy", position_entropy(model), first.entropy() + second.entropy())
    assert torch.equal(position_entropy(second), second.entropy())
    position_entropy(model).backward()
    assert all((module.gamma.grad != 0).all() for module in (first, second))
    match = "^model is a Sequential without DAFT-conv; allowed"
    for others in (nn.Sequential(LinearAttention()), nn.Sequential(build("daft_full"))):
        with pytest.raises(ValueError, match=match):
            position_entropy(others)


# Both modules


@pytest.mark.parametrize("name", ["daft_conv", "daft_full"])
def test_queries_are_given_where_they_are_wanted_alone(name):
    q, k, v = qkv(5, d=4, e=4)
    for query, wrong, shown, allowed in ((True, None, "None", "a tensor"), (False, q, "given", "None")):
        module = build(name, True, query=query)
        for call in (module, module.extend):
            with pytest.raises(ValueError, match=f"^q is {shown}; allowed .*query={query}.*: {allowed}"):
                call(wrong, narrow(module, k), v)


@pytest.mark.parametrize("name", ["daft_conv", "daft_full"])
@causality
def test_a_mask_of_queries_hides_outputs_without_queries_too(causal, name):
    _, k, v = qkv(9, d=4, e=4)
    mask, module = padding("right", 2, 9), build(name, causal, query=False)
    expected = module(None, narrow(module, k), v).masked_fill(mask[:, None, :, None], 0.0)
    assert torch.equal(module(None, narrow(module, k), v, query_padding_mask=mask), expected)


def test_a_pair_from_a_command_line_is_a_window():
    assert DaftConvAttention(num_heads=1, window=[3, 5]).r.shape == (1, 3, 5)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match="^local_only=True is given; allowed: without gumbel_temperature"):
        DaftConvAttention(num_heads=2, window=5, local_only=True, gumbel_temperature=0.5)
    with pytest.raises(ValueError, match=r"^window is \(5, 5\); allowed"):
        DaftConvAttention(True, num_heads=2, window=(5, 5))
    assert DaftConvAttention(True, num_heads=2, window=4).r.shape == (2, 4)
    with pytest.raises(ValueError, match="^max_tokens is 2.5; allowed"):
        DaftFullAttention(max_tokens=2.5)
