"""LoLCATs beyond the contract: its limits are softmax, local and linear attention; its window moves while decoding."""

import pytest
import torch

from common.attention import build_attention
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
    """Of the last token they are all but the last w; its own far sum is linear attention to them."""
    q, k, v = (x.detach() for x in qkv(17, d=D))
    window, given = 4, maps()
    out = lolcats_attention(q, k, v, **given, window_gate=gate(-80.0), window=window, causal=True)
    nothing = torch.zeros(H, 3, dtype=torch.float64)
    biases = {"query_bias": nothing, "key_bias": nothing}
    far = hedgehog_attention(q[:, :, -1:], k[:, :, :-window], v[:, :, :-window], **given, **biases)
    assert_close("out", out[:, :, -1:], far, 1e-4)  # up to the 1e-6 in Hedgehog's normaliser


def test_the_largest_score_of_the_window_belongs_to_the_formula():
    """Far weights are not divided by it: scores that all grow alike leave the window's share as it is."""
    q, k, v = (x.detach() for x in qkv(17, d=D))
    given = {**maps(), "window_gate": gate(0.0), "window": 4, "causal": True}
    ones, shift = torch.ones_like(q[..., :1]), 50.0 * torch.ones_like(q[..., :1])
    wide = {name: torch.nn.functional.pad(x, (0, 1)) for name, x in maps().items()}  # the further channel is not mapped
    q, k = (x * ((D + 1) / D) ** 0.25 for x in (q, k))  # so that scores stay as they are beside one more channel
    near = lolcats_attention(torch.cat([q, 0 * ones], -1), torch.cat([k, ones], -1), v, **{**given, **wide})
    far = lolcats_attention(torch.cat([q, shift], -1), torch.cat([k, ones], -1), v, **{**given, **wide})
    assert_close("out", far, near)


def test_one_token_at_a_time_keeps_the_window_and_moves_the_rest_into_sums():
    q, k, v = (x.detach() for x in qkv(30, d=D))
    module = build_attention("lolcats", causal=True, num_heads=H, head_dim=D, window=6, rows=3).double()
    state, outs = None, []
    for i in range(30):
        out, state = module.extend(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], None, state)
        outs.append(out)
    assert_close("out", torch.cat(outs, 2), module(q, k, v))
    assert torch.equal(state["k"], k[:, :, -6:]) and int(state["count"][0]) == 30
    features = torch.cat([(x := k @ module.key_weight.transpose(1, 2)).softmax(-1), (-x).softmax(-1)], -1)
    assert_close("sum_k", state["sum_k"], features[:, :, :-6].sum(2))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"window": 0}, "window is 0; allowed"),
        ({"feature_map": "exp"}, "feature_map is 'exp'; allowed.*relu.*softmax"),
        ({"window_gate": torch.zeros(3)}, r"window_gate is \(3,\); allowed: a tensor \(2,\)"),
        ({"key_weight": torch.zeros(H, 2, D)}, "equally many rows"),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_what_does_not_fit_is_said(change, said):
    with pytest.raises(ValueError, match=said):
        lolcats_attention(*qkv(6, d=D), **{**maps(), "window_gate": gate(0.0), "window": 3, **change})
