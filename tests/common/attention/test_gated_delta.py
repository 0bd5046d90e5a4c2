"""The gated delta rule as a module: its initial parameters, its gates, and DeltaNet without gates."""

import torch
from torch.nn import functional as F

from common.attention import build_attention
from tests.common.contract.mechanisms import tensors
from tests.compare import assert_close

SHAPE = {"num_heads": 2, "head_dim": 4}
BARE = {"output_norm": "none", "output_gate": "none"}


def test_rates_and_steps_begin_as_the_authors_have_them():
    """Rates are uniform up to 16, steps log-uniform from 0.001 to 0.1: checks means and extremes over 4,000 heads."""
    module = build_attention("gated_delta", True, num_heads=4000, head_dim=1, **BARE)
    rate, step = module.A_log.detach().exp(), F.softplus(module.dt_bias.detach()).log10()
    assert 0 < rate.min() < 0.1 and 15.9 < rate.max() <= 16 and abs(rate.mean() - 8) < 0.3
    assert -3 <= step.min() + 1e-4 and step.max() <= -1 + 1e-4 and abs(step.mean() + 2) < 0.05


def test_all_parameters_are_reset():
    module = build_attention("gated_delta", True, **SHAPE)
    with torch.no_grad():
        for x in module.parameters():
            x.fill_(7.0)
    module.reset_parameters()
    names = {name for name, x in module.named_parameters() if (x != 7.0).all()}
    assert names == {name for name, _ in module.named_parameters()}


def test_without_a_gate_nothing_is_forgotten():
    """DeltaNet has no decay parameters, and its outputs are those of a rate of 0."""
    gated = build_attention("gated_delta", True, **SHAPE).double()
    plain = build_attention("gated_delta", True, **SHAPE, gate="none").double()
    decay = {"decay_proj.weight", "A_log", "dt_bias"}
    assert {name for name, _ in gated.named_parameters()} - decay == {name for name, _ in plain.named_parameters()}
    for name, x in plain.named_parameters():
        x.data.copy_(gated.get_parameter(name))
    inputs = tensors(gated, 12, grad=False)
    assert not torch.allclose(gated(**inputs), plain(**inputs), rtol=1e-3)
    with torch.no_grad():
        gated.A_log.fill_(-torch.inf)
    assert_close("out", gated(**inputs), plain(**inputs))


def test_negative_eigenvalues_double_beta():
    """A token's value is written twice as strongly; for the first token, this doubles the whole output."""
    options = {**SHAPE, **BARE, "gate": "none"}
    module = build_attention("gated_delta", True, **options).double()
    two = build_attention("gated_delta", True, **options, negative_eigenvalues=True).double()
    two.beta_proj.load_state_dict(module.beta_proj.state_dict())
    inputs = tensors(module, 5, grad=False)
    assert_close("first token", two(**inputs)[:, :, 0], 2 * module(**inputs)[:, :, 0])
    assert not torch.allclose(two(**inputs)[:, :, 1:], 2 * module(**inputs)[:, :, 1:], rtol=1e-3)
