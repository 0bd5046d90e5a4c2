"""The contract of every classifier of time series, and the literal model of the Flowformer paper's Table 6."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.models import MODEL_REGISTRY
from torch import Tensor
from torch.nn import functional as F

from common.attention import ATTENTIONS, record_attention, supporting
from common.ops import flow_attention
from fairseq_plugin.data.series_folder import Description
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.masked_models import randomised
from tests.fairseq_plugin.helpers.series import CHANNELS, LIMIT, build_classifier, configuration, scores

#: For models in float64: fairseq's gelu and some mechanisms compute in float32 internally.
TOLERANCE = 1e-6
MODELS = sorted(name for name in MODEL_REGISTRY if name.endswith("_time_series"))
#: Models without attention and without checkpointed activations.
BASELINES = ("lstm_time_series", "tcn_time_series")


def series(batch: int, length: int, seed: int = 0) -> Tensor:
    """Random series (batch, length, CHANNELS) in float64."""
    return torch.randn(batch, length, CHANNELS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pad(source: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """source (B, T, C) between padding that holds large numbers, and the padding mask."""
    padded = F.pad(source, (0, 0, left, right), value=1e3)
    mask = torch.ones(padded.shape[:2], dtype=torch.bool)
    mask[:, left : left + source.shape[1]] = False
    return padded, mask


def test_every_mechanism_that_sees_all_steps_has_one() -> None:
    """Only these have one, besides the gated attention units and a second name."""
    named = {f"{name}_time_series" for name in supporting("bidirectional")}
    assert set(MODELS) >= named | {"flowformer_time_series", "flash_time_series"}
    assert not any(f"{name}_time_series" in MODELS for name in ATTENTIONS if f"{name}_time_series" not in named)


@pytest.mark.parametrize("pooling", ["flat", "mean", "max", "last"])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_padding_and_neighbours_never_change_scores(name: str, pooling: str) -> None:
    """Padding on either side and rows of other lengths; rows of only padding are finite; the last step is used."""
    model = randomised(build_classifier(name, pooling=pooling).double())
    source = series(2, 19)
    alone = scores(model, source)
    for left, right in ((0, 0), (5, 0), (0, 7), (3, 2)):
        assert_close(
            f"scores with {left} and {right} of padding", scores(model, *pad(source, left, right)), alone, TOLERANCE
        )
    short, short_mask = pad(source[:1, :6], 9, LIMIT - 15)
    whole, whole_mask = pad(source, 0, LIMIT - 19)
    batch = torch.cat([whole, short, torch.zeros_like(short)])
    mask = torch.cat([whole_mask, short_mask, torch.ones_like(short_mask)])
    together = scores(model, batch, mask)
    assert torch.isfinite(together).all()
    assert_close("rows beside others", together[:2], alone, TOLERANCE)
    assert_close("a short row", together[2:3], scores(model, source[:1, :6]), TOLERANCE)
    changed = source.clone()
    changed[:, -1] += 1.0
    assert (scores(model, changed) - alone).norm() > 1e-6 * alone.norm()


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_checkpointed_activations(name: str) -> None:
    """All parameters but unused positions learn; gradients are the same with --checkpoint-activations."""
    results = []
    further = () if name in BASELINES else ({"checkpoint_activations": True}, {"offload_activations": True})
    for options in ({}, *further):
        model = build_classifier(name, **options).train()
        scores(model, *pad(series(2, 20).float(), 0, 3)).square().mean().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None for gradient in gradients)
        results.append(torch.cat([gradient.flatten() for gradient in gradients]))
    assert torch.isfinite(results[0]).all()
    for gradients in results[1:]:
        assert_close("gradients", gradients, results[0])


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_half_precision(name: str) -> None:
    """fairseq's --fp16, which casts model and input to half precision."""
    model, (source, mask) = build_classifier(name), pad(series(2, 20).float().clamp(-2, 2), 0, 3)
    expected = scores(model, source, mask)
    assert_close("scores", scores(model.half(), source.half(), mask).float(), expected, 2e-2)


@torch.no_grad()
def literal(model, source: Tensor) -> Tensor:
    """The authors' model, written literally, for whole series: source (B, T, C) -> (B, classes)."""
    weights = dict(model.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    width = model.args.encoder_embed_dim
    x = linear("encoder.embed_tokens", source) * math.sqrt(width)
    x = x + weights["encoder.embed_positions.weight"][1 : 1 + source.shape[1]]
    for i in range(model.args.encoder_layers):
        layer = f"encoder.layers.{i}"
        heads = [linear(f"{layer}.self_attn.{y}_proj", x).unflatten(-1, (2, -1)).transpose(1, 2) for y in "qkv"]
        attended = flow_attention(*heads, form="released", clamp=None, phi="sigmoid").transpose(1, 2).flatten(2)
        x = norm(f"{layer}.self_attn_layer_norm", x + linear(f"{layer}.self_attn.out_proj", attended))
        inner = F.gelu(linear(f"{layer}.fc1", x))
        x = norm(f"{layer}.final_layer_norm", x + linear(f"{layer}.fc2", inner))
    x = F.gelu(norm("encoder.layer_norm", x)).flatten(1)
    return linear("classification_heads.toy.out_proj", F.pad(x, (0, LIMIT * width - x.shape[1])))


@pytest.mark.parametrize("length", [LIMIT, 9])
def test_flowformer_is_the_authors_model(length: int) -> None:
    """Embedding times √D, positions, post-norm layers, final norm, gelu, and one weight per step and channel."""
    model = randomised(build_classifier("flowformer_time_series", encoder_layers=2).double())
    source = series(2, length)
    assert_close("scores", scores(model, source), literal(model, source), TOLERANCE)


def test_defaults_are_the_papers_size() -> None:
    """6.4 M parameters for JapaneseVowels; positions within 0.02; no clamp; two gated units per layer."""
    described = Description(list("123456789"), [0.0] * 12, [1.0] * 12, 26)
    task = SimpleNamespace(description=described, max_length=26)
    model = tasks.FairseqTask.build_model(task, configuration("flowformer_time_series"))
    model.register_classification_head("toy", 9)
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_446_089
    layer = model.encoder.layers[0]
    assert (len(model.encoder.layers), layer.fc1.out_features, layer.self_attn.num_heads) == (2, 2048, 8)
    assert not layer.normalize_before and layer.activation_dropout_module.p == layer.dropout_module.p == 0.1
    assert layer.self_attn.inner.options.clamp is None and layer.self_attn.inner.options.form == "released"
    positions = model.encoder.embed_positions.weight
    assert 0.019 < positions.abs().max() <= 0.02 and positions[0].abs().max() == 0.0
    flash = configuration("flash_time_series")
    assert (flash.encoder_layers, flash.encoder_attention_heads) == (4, 1)


def test_competition_and_allocation_can_be_recorded() -> None:
    """One record per layer; padded steps have weight 0."""
    model = build_classifier("flowformer_time_series", encoder_layers=2)
    with torch.no_grad(), record_attention(model) as records:
        scores(model, *pad(series(2, 20).float(), 0, 3))
    assert len(records) == 2 and records[0].competition.shape == (2, 2, 23)
    assert (records[0].competition[..., 20:] == 0).all()


def test_what_cannot_be_read_is_refused() -> None:
    """Errors name too many steps, wrong channels, another task and a size of 0, with allowed values."""
    model = build_classifier("flowformer_time_series")
    with pytest.raises(ValueError, match=f"{LIMIT + 1} steps; allowed: {LIMIT}"):
        scores(model, series(2, LIMIT + 1).float())
    scores(model, *pad(series(2, LIMIT).float(), 2, 2))  # padding does not count
    with pytest.raises(ValueError, match=rf"\(2, 5, 4\); allowed: .*{CHANNELS} channels"):
        scores(model, torch.zeros(2, 5, 4))
    with pytest.raises(ValueError, match="--encoder-embed-dim is 0; allowed"):
        build_classifier("flowformer_time_series", encoder_embed_dim=0)
    with pytest.raises(ValueError, match="--flow-clamp is -1"):
        build_classifier("flowformer_time_series", flow_clamp=-1.0)
    with pytest.raises(ValueError, match="--task is SimpleNamespace; allowed .*time_series_classification"):
        tasks.FairseqTask.build_model(SimpleNamespace(), configuration("linear_time_series"))
    for name in ("linear_time_series", "flash_time_series"):
        with pytest.raises(ValueError, match="^--encoder-attention-heads is 3; allowed: .* --encoder-[a-z-]+dim"):
            build_classifier(name, encoder_attention_heads=3)
    with pytest.raises(ValueError, match="^--daft-conv-window is 8; allowed when not causal"):
        build_classifier("daft_conv_time_series", daft_conv_window=8)
