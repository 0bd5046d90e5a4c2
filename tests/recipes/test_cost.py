"""Costs: products against counts by hand, and the command for every kind of model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.ops import daft_conv, flow_attention, gated_delta_attention, linear_attention
from recipes import cost

B, H, D = 2, 3, 8
TINY = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2".split()


@pytest.mark.parametrize("n", [32, 96])
def test_products_by_hand(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal softmax attention computes the whole square, linear attention k v and q (k v), Flow-Attention six more
    products of n vectors with one, and DAFT-conv windows of keys by values and keys. Kernels add and read each entry.
    """
    q, k, v = (torch.randn(B, H, n, D) for _ in range(3))
    count = cost.multiply_adds
    for causal in (False, True):
        assert count(lambda c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c)) == B * H * n * n * 2 * D
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "0")
    assert count(lambda: linear_attention(q, k, v)) == B * H * 2 * n * D * D
    assert count(lambda: flow_attention(q, k, v)) == B * H * (2 * n * D * D + 6 * n * D)
    x, keys = torch.randn(B, n, H * D), torch.randn(B, n, H)
    assert count(lambda: daft_conv(x, keys, x, torch.randn(H, 5))) == B * H * n * 5 * (D + 1)
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "1")
    gates = {"beta": torch.rand(B, H, n), "log_decay": -torch.rand(B, H, n)}
    assert count(lambda: flow_attention(q, k, v, causal=True)) == B * H * n * D * D * 2
    assert count(lambda: gated_delta_attention(q, k, v, **gates)) == B * H * n * D * D * 3


def test_products_that_torchs_counter_may_not_know_memory_and_mode() -> None:
    x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert cost.multiply_adds(lambda: torch.zeros(3, 4, 6).baddbmm_(x, y)) == 3 * 4 * 5 * 6
    assert cost.multiply_adds(lambda: torch.zeros(4, 6).addmm_(x[0], y[0])) == 4 * 5 * 6
    assert cost.multiply_adds(lambda: x[0] @ y[0, :, 0]) == 4 * 5
    lstm = nn.LSTM(7, 8, 2, batch_first=True)
    with torch.no_grad():
        assert cost.multiply_adds(lambda: lstm(torch.randn(3, 9, 7))) == 3 * 9 * 4 * 8 * (7 + 8 + 8 + 8)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(8))).train()
    found, layer = cost.cost(cost.Subject(model, (torch.randn(512, 64),))), 512 * 64 * 4
    assert found["multiply-adds"] == 8 * 512 * 64 * 64 and found["parameters"] == 8 * 65 * 64
    assert layer <= found["inference"] <= 3 * layer and found["training"] >= 7 * layer
    assert model.training and all(x.grad is None and x.requires_grad for x in model.parameters())


ENCODER = [word.replace("decoder", "encoder") for word in TINY]


@pytest.mark.parametrize(
    "words",
    [
        ["--arch", "flowformer_lm", "softmax_lm", *TINY],
        ["--arch", "softmax_mlm", *ENCODER],
        ["--arch", "flow_lra_image", "awac_decision"],
        ["--arch", "flowformer_time_series", "--encoder-layers", "1", "--encoder-embed-dim", "16"],
        ["--arch", "linear_decision", *TINY],
        ["--arch", "flow", *TINY, *ENCODER],
        ["--model", "flowformer_hier_test", "resnet10t"],
    ],
    ids=lambda words: words[1],
)
def test_every_kind_of_model(words: list[str], capsys: pytest.CaptureFixture) -> None:
    """Twice the length takes about twice the products, and twice the side of an image four times."""
    sizes = ["--img-size", "64", "128"] if "--model" in words else ["--tokens", "48", "96", "--vocabulary", "60"]
    cost.main([*words, *sizes, "--no-memory"])
    rows = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    for short, long in zip(rows[::2], rows[1::2], strict=True):
        once, twice = float(short[3].removesuffix(" G ").strip(" G")), float(long[3].strip(" G"))
        assert once == 0 or 1.6 * once <= twice <= 5 * once  # of three digits


@pytest.mark.parametrize(
    "words", [[], ["--arch", "gpt_lm"], ["--model", "gpt"], ["--model", "test_vit", "--depth", "3"]]
)
def test_what_is_not_known_is_named(words: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cost.main(words)
    assert "allowed: --" in capsys.readouterr().err
