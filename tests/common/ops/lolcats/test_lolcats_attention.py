"""LoLCATs beyond the contract: its limits are softmax, local and linear attention; its window moves during decoding."""

import pytest
import torch

from common.attention import build_attention, only_part
from common.ops import hedgehog_attention, lolcats_attention
from tests.common.inputs import qkv
from tests.compare import assert_all_close, assert_close, gradients

H, D = 2, 4
causality = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def maps(rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    tensors = (torch.randn(H, rows, D, generator=generator, dtype=torch.float64) for _ in range(2))
    return dict(zip(("query_weight", "key_weight"), tensors))


def gate(value: float) -> torch.Tensor:
    return torch.full((H,), value, dtype=torch.float64)


@causality
def test_a_window_over_all_tokens_is_softmax_attention(causal):
    inputs = qkv(17, d=D)
    q, k, v = inputs
    out = lolcats_attention(q, k, v, **maps(), window_gate=gate(-1.0), window=40, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert_close("out", out, expected)
    assert_all_close(("q", "k", "v"), gradients(out, inputs), gradients(expected, inputs))


def test_with_a_closed_gate_far_tokens_alone_are_seen():
    """For the last token, the far tokens are all but the last w; its far sum is linear attention to them."""
    q, k, v = (x.detach() for x in qkv(17, d=D))
    window, map_tensors = 4, maps()
    out = lolcats_attention(q, k, v, **map_tensors, window_gate=gate(-80.0), window=window, causal=True)
    nothing = torch.zeros(H, 3, dtype=torch.float64)
    biases = {"query_bias": nothing, "key_bias": nothing}
    far = hedgehog_attention(q[:, :, -1:], k[:, :, :-window], v[:, :, :-window], **map_tensors, **biases)
    assert_close("out", out[:, :, -1:], far, 1e-4)  # up to the 1e-6 in Hedgehog's normaliser


def test_the_largest_score_of_the_window_belongs_to_the_formula():
    """Far weights are not divided by it: adding a constant to all scores leaves the window's share unchanged."""
    q, k, v = (x.detach() for x in qkv(17, d=D))
    arguments = {**maps(), "window_gate": gate(0.0), "window": 4, "causal": True}
    ones, shift = torch.ones_like(q[..., :1]), 50.0 * torch.ones_like(q[..., :1])
    wide = {name: torch.nn.functional.pad(x, (0, 1)) for name, x in maps().items()}  # not mapped
    q, k = (x * ((D + 1) / D) ** 0.25 for x in (q, k))  # so that scores stay unchanged with one more channel
    near = lolcats_attention(torch.cat([q, 0 * ones], -1), torch.cat([k, ones], -1), v, **{**arguments, **wide})
    far = lolcats_attention(torch.cat([q, shift], -1), torch.cat([k, ones], -1), v, **{**arguments, **wide})
    assert_close("out", far, near)


@causality
@pytest.mark.parametrize("part", ["window", "linear"])
@pytest.mark.parametrize("feature_map", ["softmax", "relu"])
def test_a_part_alone_is_the_literal_one(part, feature_map, causal):
    """With padding on both sides, including gradients; afterwards the whole attention is restored."""
    module = build_attention("lolcats", causal, num_heads=H, head_dim=D, window=4, feature_map=feature_map).double()
    inputs, mask = qkv(17, d=D), torch.zeros(2, 17, dtype=torch.bool)
    mask[0, :3] = mask[1, 14:] = True
    whole = module(*inputs, mask, mask)
    with only_part(module, part):
        out, expected = module(*inputs, mask, mask), module.reference(*inputs, mask, mask)
    assert_close(part, out, expected)
    assert_all_close(("q", "k", "v"), gradients(out, inputs), gradients(expected, inputs))
    assert not torch.allclose(out, whole) and torch.equal(module(*inputs, mask, mask), whole)


def test_the_parts_are_local_attention_and_hedgehog():
    q, k, v = qkv(17, d=D)
    nothing = torch.zeros(H, 3, dtype=torch.float64)
    options = {**maps(), "window_gate": gate(0.5), "window": 4, "causal": True}
    local = build_attention("local", True, window=4)(q, k, v)
    assert_close("window", lolcats_attention(q, k, v, **options, part="window"), local)
    hedgehog = hedgehog_attention(q, k, v, **maps(), query_bias=nothing, key_bias=nothing, causal=True)
    assert_close("linear", lolcats_attention(q, k, v, **options, part="linear"), hedgehog)


def test_parts_that_cannot_be():
    module = build_attention("lolcats", True, num_heads=H, head_dim=D)
    with (
        pytest.raises(ValueError, match="part is 'none'; allowed: 'both', 'window', 'linear'"),
        only_part(module, "none"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="model is a Linear without lolcats"),
        only_part(torch.nn.Linear(2, 2), "linear"),
    ):
        pass
    with only_part(module, "linear"), pytest.raises(ValueError, match="part is 'linear'; allowed .*: 'both'"):
        module.extend(*(torch.randn(1, H, 3, D) for _ in range(3)))


def test_the_window_weighs_at_first_what_its_option_says():
    """The authors use 0.1; the option is not recorded with the weights, since the window's weight is learned."""
    module = build_attention("lolcats", num_heads=H, head_dim=D)
    assert_close("weight", module.window_gate.sigmoid(), torch.full((H,), 0.1))
    equal = build_attention("lolcats", num_heads=H, head_dim=D, window_weight=0.5)
    assert torch.equal(equal.window_gate, torch.zeros(H))
    module.load_state_dict(equal.state_dict())
    assert torch.equal(module.window_gate, torch.zeros(H))
    with pytest.raises(ValueError, match="window_weight.* is 1.0; allowed: a number above 0 and below 1"):
        build_attention("lolcats", num_heads=H, head_dim=D, window_weight=1.0)
