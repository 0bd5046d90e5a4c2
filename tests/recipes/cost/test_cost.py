"""Costs: products against counts by hand at two lengths, memory, every kind of model, and the command."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.ops import daft_conv, flow_attention, gated_delta_attention, linear_attention
from recipes.cost import __main__ as command
from recipes.cost.counting import cost, multiply_adds
from recipes.cost.models import Sizes, fairseq_subject, timm_subject

B, H, D = 2, 3, 8
LENGTHS = (32, 96)
TINY = "--decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 --decoder-attention-heads 2".split()


def heads(n: int, count: int = 3, d: int = D) -> list[Tensor]:
    return [torch.randn(B, H, n, d) for _ in range(count)]


@pytest.mark.parametrize("n", LENGTHS)
def test_products_by_hand(n: int) -> None:
    """Causal softmax attention computes the whole square. Linear attention has k v and q (k v), and
    Flow-Attention six more products of n vectors with one vector, for its flows. DAFT-conv multiplies windows of keys
    by values and sums the keys, for each head.
    """
    for causal in (False, True):
        counted = multiply_adds(lambda c=causal: F.scaled_dot_product_attention(*heads(n), is_causal=c))
        assert counted == B * H * n * n * 2 * D
    assert multiply_adds(lambda: linear_attention(*heads(n))) == B * H * 2 * n * D * D
    assert multiply_adds(lambda: flow_attention(*heads(n))) == B * H * (2 * n * D * D + 6 * n * D)
    causal_flow = multiply_adds(lambda: flow_attention(*heads(n), causal=True))
    assert B * H * 2 * n * D * D <= causal_flow <= B * H * n * (2 * D * D + 2 * 64 * 2 * D + 20 * D)
    q, k, v = torch.randn(B, n, H * D), torch.randn(B, n, H), torch.randn(B, n, H * D)
    assert multiply_adds(lambda: daft_conv(q, k, v, torch.randn(H, 5))) == B * H * n * 5 * (D + 1)


def test_products_inside_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators of kernels for CPUs count what their sums need: to add and to read each entry, for each token."""
    monkeypatch.setenv("LINEARTIME_CPU_KERNELS", "1")
    n, (q, k, v) = 40, heads(40)
    gates = {"beta": torch.rand(B, H, n), "log_decay": -torch.rand(B, H, n)}
    counted = [
        multiply_adds(lambda: linear_attention(q, k, v, causal=True)),
        multiply_adds(lambda: flow_attention(q, k, v, causal=True)),
        multiply_adds(lambda: flow_attention(q, k, v)),
        multiply_adds(lambda: gated_delta_attention(q, k, v, **gates)),
    ]
    assert counted == [B * H * n * D * D * entries for entries in (2, 2, 2, 3)]
    assert multiply_adds(lambda: flow_attention(q[:, :, :20], k, v)) == B * H * (20 + n) * D * D
    leaf = q.clone().requires_grad_()
    both = multiply_adds(lambda: linear_attention(leaf, k, v, causal=True).sum().backward())
    assert both == B * H * n * D * D * (2 + 4)


def test_products_that_torchs_counter_may_not_know() -> None:
    """In-place products, products with a vector, and an LSTM, whose layers are one operation on a CPU."""
    x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert multiply_adds(lambda: torch.zeros(3, 4, 6).baddbmm_(x, y)) == 3 * 4 * 5 * 6
    assert multiply_adds(lambda: torch.zeros(4, 6).addmm_(x[0], y[0])) == 4 * 5 * 6
    assert multiply_adds(lambda: x[0] @ y[0, :, 0]) == 4 * 5
    lstm = nn.LSTM(7, 8, 2, batch_first=True)
    with torch.no_grad():
        assert multiply_adds(lambda: lstm(torch.randn(3, 9, 7))) == 3 * 9 * 4 * 8 * (7 + 8 + 8 + 8)


def test_memory_and_mode() -> None:
    """One layer's outputs in inference, all layers' in training; the model is unchanged afterwards."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(8))).train()
    costs = cost(model, torch.randn(512, 64))
    layer = 512 * 64 * 4
    assert costs.multiply_adds == 8 * 512 * 64 * 64 and costs.parameters == 8 * 65 * 64
    assert layer <= costs.inference_bytes <= 3 * layer and costs.training_bytes >= 7 * layer
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert cost(model, torch.randn(512, 64), memory=False)[2:] == (None, None)
    with pytest.raises(ValueError, match="returns NoneType; allowed: a tensor"):
        cost(Silent(), torch.randn(2, 2))


class Silent(nn.Linear):
    """A model that returns nothing."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def forward(self, x: Tensor) -> None:
        """Return None."""


@pytest.mark.parametrize(
    "arch, arguments",
    [
        ("flowformer_lm", TINY),
        ("flash_lm", [*TINY[:4], "--flash-query-dim", "8"]),
        ("softmax_mlm", [word.replace("decoder", "encoder") for word in TINY]),
        ("flow_lra_image", []),
        ("flowformer_time_series", ["--encoder-layers", "1", "--encoder-embed-dim", "16"]),
        ("lstm_time_series", ["--encoder-embed-dim", "16"]),
        ("linear_decision", TINY),
        ("awac_decision", []),
        ("flow", [*TINY, *(word.replace("decoder", "encoder") for word in TINY)]),
    ],
)
def test_every_kind_of_fairseqs_models(arch: str, arguments: list[str]) -> None:
    """Models are built without data; twice the length gives about twice the products."""
    sizes = Sizes(vocabulary=60, channels=3, classes=2)
    counted = []
    for tokens in (48, 96):
        subject = fairseq_subject(arch, tokens, arguments, sizes)
        counted.append(cost(subject.model, *subject.inputs, memory=tokens == 48, **subject.named))
    assert counted[0].training_bytes > 0 and counted[0].inference_bytes > 0
    assert 1.9 * counted[0].multiply_adds <= counted[1].multiply_adds <= 4.0 * counted[0].multiply_adds


def test_images() -> None:
    """One of our models and one of timm's at their own and another size, and a convolutional network."""
    subject = timm_subject("flowformer_hier_test", None, {})
    small = timm_subject("flowformer_hier_test", 96, {"num_classes": 3})
    assert (subject.size, small.size) == ("64 x 64", "96 x 96") and small.model(*small.inputs).shape == (1, 3)
    costs = [
        cost(timm_subject("resnet10t", size, {}).model, torch.randn(1, 3, size, size), memory=False)
        for size in (32, 64)
    ]
    assert 3.5 < costs[1].multiply_adds / costs[0].multiply_adds < 4.5


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command prints a line per model and length with the paper's values, and writes files."""
    out = tmp_path / "cost"
    arguments = ["--arch", "flowformer_lm", "softmax_lm", "--tokens", "16", "32", "--vocabulary", "60", *TINY]
    arguments += ["--model", "flowformer_hier_test", "--no-memory", "--published", "softmax_lm=1.5", "--out", str(out)]
    assert command.main(arguments) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "_lm " in line or "_test " in line]
    assert [row[0] for row in rows[:5]] == ["flowformer_lm"] * 2 + ["softmax_lm"] * 2 + ["flowformer_hier_test"]
    content = json.loads((out / "results.json").read_text())
    assert len(content["rows"]) == 5 and content["rows"][0]["cost"]["multiply_adds"] > 0
    assert "| softmax_lm | 16 tokens | " in (text := (out / "results.md").read_text()) and "| 1.5 G |" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "neither --arch nor --model is given; allowed"),
        (["--arch", "gpt_lm"], "--arch is gpt_lm; allowed"),
        (["--model", "gpt"], "--model is gpt; allowed"),
        (["--model", "flowformer_hier_test", "--depth", "3"], "--depth is not known; allowed"),
        (["--model", "flowformer_hier_test", "--model-kwargs", "colour=3"], "'colour'; allowed"),
        (["--arch", "flowformer_lm", "--vocabulary", "3"], "--vocabulary is 3; allowed: above 4"),
        (["--model", "flowformer_hier_test", "--published", "deit=4.6"], "--published is deit=4.6; allowed: of flow"),
        (["--arch", "linear_lm", "--published", "linear_lm=abc"], "--published is linear_lm=abc; allowed: a number"),
    ],
)
def test_what_is_not_known_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert command.main(arguments) == 1
    assert message in capsys.readouterr().err
