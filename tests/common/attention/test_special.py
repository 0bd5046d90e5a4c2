"""Special properties of single mechanisms, beyond the contract: first parameters, formulas, selection, refusals."""

import copy
import math

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import DaftConvAttention, InnerAttention, LinearAttention, build_attention, position_entropy
from common.ops import daft_conv
from common.ops.daft.conv_reference import daft_conv_reference
from tests.common.contract.mechanisms import Case, at, tensors
from tests.common.inputs import padding, qkv
from tests.compare import assert_all_close, assert_close, gradients, weights

causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
SHAPE = {"num_heads": 2, "head_dim": 4, "max_tokens": 24}


def build(name: str, causal: bool = False, dtype: torch.dtype = torch.float64, **options) -> InnerAttention:
    """Build the attention with parameters large enough to affect the output."""
    module = build_attention(name, causal=causal, **{**SHAPE, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in weights(module.state_dict()).items()}


def test_softmax_drops_entries_of_the_map():
    q, k, _ = qkv(30, e=1)
    identity = torch.eye(30, dtype=torch.float64).expand(2, 2, 30, 30)
    attention = build_attention("softmax")
    share = attention(q, k, identity, dropout_p=0.5) / attention(q, k, identity)
    is_kept = share > 1.0
    assert_close("kept", share[is_kept], torch.full_like(share[is_kept], 2.0))
    assert (share[~is_kept] == 0).all() and 0.4 < is_kept.double().mean() < 0.6
    assert torch.equal(attention(q, k, identity), attention(q, k, identity, dropout_p=0.0))


# Combiner: rows are summarised from what their tokens attend to.


@torch.no_grad()
def test_summaries_are_formed_once_when_their_row_is_full():
    """Most steps therefore cost only what a token sees; a state of rows of another length is refused."""
    module = build("combiner", causal=True, row_length=4)
    inputs = tensors(module, 16, batch=1, grad=False)
    _, first = module.extend(**at(inputs, slice(0, 8)))
    module.summary_k_proj.weight.fill_(torch.nan)
    finite, states, state = [], [], first
    for t in range(8, 16):
        out, state = module.extend(**at(inputs, slice(t, t + 1)), state=state)
        finite.append(bool(out.isfinite().all()))
        states.append(state)
    assert finite == [True] * 4 + [False] * 4 and states[2]["summary_k"] is first["summary_k"]
    for wrong in (3, 20):
        other = build("combiner", causal=True, row_length=wrong)
        with pytest.raises(ValueError, match=f"^initial_state .*tokens.*allowed.*row_length={wrong}"):
            other.extend(**at(inputs, slice(9, 16)), state=states[0])


# The gated delta rule


def test_rates_and_steps_of_the_delta_rule_begin_as_the_authors_have_them():
    """Rates are uniform up to 16, steps log-uniform from 0.001 to 0.1: checks means and extremes over 4,000 heads."""
    options = {"output_norm": "none", "output_gate": "none"}
    module = build_attention("gated_delta", True, num_heads=4000, head_dim=1, **options)
    rate, step = module.A_log.detach().exp(), F.softplus(module.dt_bias.detach()).log10()
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() <= 16 and abs(rate.mean() - 8) < 0.3
    assert -3 <= step.min() + 1e-4 and step.max() <= -1 + 1e-4 and abs(step.mean() + 2) < 0.05


def test_without_a_gate_nothing_is_forgotten():
    """DeltaNet has no decay parameters, and its outputs are those of a rate of 0."""
    gated, plain = (build_attention("gated_delta", True, **SHAPE, **x).double() for x in ({}, {"gate": "none"}))
    plain.load_state_dict({name: x for name, x in gated.state_dict().items() if name in plain.state_dict()})
    decay = {name for name, _ in gated.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert decay == {"decay_proj.weight", "A_log", "dt_bias"}
    inputs = tensors(gated, 12, grad=False)
    assert not torch.allclose(gated(**inputs), plain(**inputs), rtol=1e-3)
    with torch.no_grad():
        gated.A_log.fill_(-torch.inf)
    assert_close("out", gated(**inputs), plain(**inputs))


# TorchScript beyond the contract: masks, as used for a batch of images of several sizes.


@torch.no_grad()
def test_scripted_flow_takes_masks_and_keys_of_another_sequence():
    module, masks = build_attention("flow"), (padding("right", 2, 17), padding("left", 2, 11))
    inputs = qkv(11, 17)
    assert_close("out", torch.jit.script(module)(*inputs, *masks), module(*inputs, *masks))


@pytest.mark.parametrize("name", ["daft_conv", "daft_full"])
def test_scripted_daft_refuses_masks(name):
    module = Case(name, False, image=True).build()
    inputs, mask = tensors(module, 21, grad=False), torch.zeros(2, 21, dtype=torch.bool)
    with pytest.raises(torch.jit.Error, match="mask"):
        torch.jit.script(module)(**inputs, key_padding_mask=mask)


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


def joined(*tensors: Tensor) -> list[Tensor]:
    """(B, H, n, c) -> (B, n, H c), heads joined as the ops expect them."""
    return [torch.cat(x.unbind(1), dim=-1) for x in tensors]


# DAFT-conv


def conv_inputs(tokens: int, heads: int = 2, channels: int = 4, **options) -> tuple[Tensor, Tensor, Tensor]:
    """q, k of one channel and v."""
    q, k, v = qkv(tokens, heads=heads, d=channels, e=channels, **options)
    return q, k[..., :1].detach().requires_grad_(), v


def literal_filters(module: InnerAttention) -> Tensor:
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


@pytest.mark.parametrize("window", [5, (5, 3)], ids=str)
def test_filters_are_standardised_and_scaled_per_head(window):
    """In half precision, in float32."""
    module = build("daft_conv", num_heads=3, window=window)
    filters, expected, named = module.position_bias(), literal_filters(module), dict(module.named_parameters())
    assert_close("filters", filters, expected)
    assert_all_close(named, gradients(filters, named.values()), gradients(expected, named.values()), 1e-8)
    assert filters.shape == module.r.shape == (3, *module.window_shape)
    plain = build("daft_conv", num_heads=3, window=window, reparameterize=False)
    assert torch.equal(plain.position_bias(), plain.r)
    half = copy.deepcopy(module).bfloat16()
    assert_close("half", half.position_bias(), copy.deepcopy(half).double().position_bias(), 1e-4)


@causality
@pytest.mark.parametrize(("heads", "channels", "window"), [(1, 6, 1), (6, 1, 3), (3, 2, 61)])
def test_one_head_one_channel_and_any_window(window, heads, channels, causal):
    """A window of one entry has standard deviation 0, so its filter is β."""
    inputs, module = conv_inputs(9, heads, channels), build("daft_conv", causal, num_heads=heads, window=window)
    r = module.beta if window == 1 else literal_filters(module)
    out = module(*inputs)
    assert_close("out", joined(out)[0], daft_conv_reference(*joined(*inputs), r, causal=causal))
    assert all(torch.isfinite(x).all() for x in gradients(out, [*inputs, *module.parameters()]))


def test_the_parameters_of_daft_conv_and_attention_by_key_alone_at_first():
    for options in ({"window": (11, 11)}, {"window": 7, "reparameterize": False}, {"causal": True}):
        module = build_attention("daft_conv", **{"num_heads": 64, **options})
        window = {"r": (64, *module.window_shape)}
        scales = {} if "reparameterize" in options else {"gamma": (64, 1), "beta": (64, 1)}
        assert shapes(module) == {**window, **scales} and (module.position_bias() == 0).all()
        assert not scales or (abs(module.r.std() - 1.0) < 0.2 and abs(module.r.mean()) < 0.3)
        before = module.r.detach().clone()
        for x in module.parameters():
            nn.init.ones_(x)
        module.reset_parameters()
        assert (module.position_bias() == 0).all() and (not scales or not torch.equal(module.r, before))
    assert shapes(build_attention("daft_conv", True, num_heads=1)) == {"r": (1, 64), "gamma": (1, 1), "beta": (1, 1)}
    assert DaftConvAttention(num_heads=1, window=[3, 5]).r.shape == (1, 3, 5), "a pair from a command line"


@causality
def test_training_multiplies_filters_by_a_sample_of_gumbel_softmax(causal):
    """Literally, with padding; the reference has the same sample, and each call another."""
    inputs, mask = conv_inputs(13), padding("left", 2, 13)
    module = build("daft_conv", causal, window=5, gumbel_temperature=0.5).train()
    torch.manual_seed(3)
    # Gumbel noise by its definition, as torch draws it: -log of an exponential variable.
    noise = -torch.empty(2, 5, dtype=torch.float64).exponential_().log()
    r = literal_filters(module)
    expected = daft_conv(*joined(*inputs), r * ((r + noise) / 0.5).softmax(1), causal=causal, key_padding_mask=mask)
    named = {**dict(zip("qkv", inputs)), **dict(module.named_parameters())}
    for call in (module, module.reference):
        torch.manual_seed(3)
        out = joined(call(*inputs, mask, mask))[0]
        assert_close("out", out, expected)
        wanted = gradients(expected, named.values(), retain_graph=True)
        assert_all_close(named, gradients(out, named.values()), wanted, 1e-8)
    assert not torch.equal(module(*inputs), module(*inputs)), "another sample in every call"


def test_the_sample_is_over_the_whole_window_of_an_image_and_the_temperature_counts():
    inputs, outputs = conv_inputs(12), []
    source = build("daft_conv", window=(3, 5))
    for temperature in (0.5, 5.0):
        module = build("daft_conv", window=(3, 5), gumbel_temperature=temperature)
        module.load_state_dict(
            {name: x for name, x in source.state_dict().items() if "extra" not in name}, strict=False
        )
        torch.manual_seed(4)
        outputs.append(module(*inputs, spatial_shape=(3, 4)))
        torch.manual_seed(4)
        sample = F.gumbel_softmax(module.position_bias().flatten(1), tau=temperature)
        r = module.position_bias() * sample.unflatten(1, (3, 5))
        assert_close("out", joined(outputs[-1])[0], daft_conv(*joined(*inputs), r, spatial_shape=(3, 4)))
    assert not torch.allclose(*outputs)


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
    first, second = build("daft_conv", window=5), build("daft_conv", num_heads=3, window=(3, 3))
    model = nn.Sequential(first, nn.Sequential(build("daft_full"), second))
    assert_close("entropy", position_entropy(model), first.entropy() + second.entropy())
    assert torch.equal(position_entropy(second), second.entropy())
    position_entropy(model).backward()
    assert all((module.gamma.grad != 0).all() for module in (first, second))
    for others in (nn.Sequential(LinearAttention()), nn.Sequential(build("daft_full"))):
        with pytest.raises(ValueError, match="^model is a Sequential without DAFT-conv; allowed"):
            position_entropy(others)


@pytest.mark.parametrize("name", ["daft_conv", "daft_full"])
@causality
def test_queries_of_daft_are_given_where_they_are_wanted_alone(causal, name):
    """Without queries too, their mask hides outputs."""
    q, k, v = qkv(9, d=4, e=4)
    k = k[..., : 1 if name == "daft_conv" else 4]
    for query, wrong, shown, allowed in ((True, None, "None", "a tensor"), (False, q, "given", "None")):
        module = build(name, causal, query=query, window=5) if name == "daft_conv" else build(name, causal, query=query)
        with pytest.raises(ValueError, match=f"^q is {shown}; allowed .*query={query}.*: {allowed}"):
            module(wrong, k, v)
    mask = padding("right", 2, 9)
    expected = module(None, k, v).masked_fill(mask[:, None, :, None], 0.0)
    assert torch.equal(module(None, k, v, query_padding_mask=mask), expected)


#: Options that no mechanism accepts: name, causal, options, and how the message begins.
REFUSED = [
    ("flows", False, {}, "attention is 'flows'"),
    *((name, False, {"head_dim": 5}, "head_dim is 5") for name in ("combiner", "mixed_chunk")),
    *((name, False, {"max_tokens": 10**12}, "max_tokens") for name in ("daft_full", "linformer", "synthesizer")),
    *(("daft_conv", False, {"window": window}, "window is") for window in (4, (5, 4), (5, 5, 5), ())),
    ("daft_conv", True, {"window": (5, 5)}, r"window is \(5, 5\)"),
    ("daft_conv", False, {"window": 5, "local_only": True, "gumbel_temperature": 0.5}, "local_only=True is given"),
    ("daft_full", False, {"max_tokens": 2.5}, "max_tokens is 2.5"),
]


@pytest.mark.parametrize("name, causal, options, said", REFUSED)
def test_options_that_are_refused(name, causal, options, said):
    with pytest.raises(ValueError, match=f"^{said}.*allowed"):
        build_attention(name, causal, **{**SHAPE, **options})
