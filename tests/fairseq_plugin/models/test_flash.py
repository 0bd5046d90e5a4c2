"""The causal models of the FLASH paper: sizes, parts, defaults, and the effect of every option."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from common.attention import QuadraticAttention, SoftmaxAttention
from common.modules.norms import ScaleNorm
from common.modules.relative_bias import RotaryBias, ToeplitzBias
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import FLASH_FAMILY, awake, build_model
from tests.fairseq_plugin.helpers.text import tokens

GATED_UNITS = ("flash_lm", "flash_quad_lm")
TRANSFORMERS = tuple(arch for arch in FLASH_FAMILY if arch not in GATED_UNITS)


def _logits(model: nn.Module, length: int = 101) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, length))[0]


# ---- Sizes of Tables 8 and 9


@pytest.mark.parametrize(
    ("arch", "millions", "layers", "heads"),
    [
        ("flash_lm_base", 112, 24, 1),
        ("flash_lm_large", 496, 72, 1),
        ("flash_quad_lm_base", 112, 24, 1),
        ("flash_quad_lm_large", 496, 72, 1),
        ("transformer_plus_lm_base", 110, 12, 12),
        ("transformer_plus_lm_large", 486, 36, 16),
        ("transformer_pp_lm_base", 110, 12, 12),
        ("transformer_pp_lm_large", 486, 36, 16),
        ("mc_transformer_pp_lm_base", 110, 12, 12),
        ("mc_transformer_pp_lm_large", 486, 36, 16),
        ("performer_lm_base", 110, 12, 12),
        ("performer_lm_large", 486, 36, 16),
        ("combiner_lm_base", 124, 12, 12),
        ("combiner_lm_large", 562, 36, 16),
    ],
)
def test_size_is_the_papers(arch: str, millions: int, layers: int, heads: int) -> None:
    """Parameters with the paper's 32,000 words, within 1 %, in total and by part."""
    with torch.device("meta"):
        model = build_model(arch, "--tokens-per-sample", "512", sizes=(), words=32000 - 4)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert abs(parameters / 1e6 - millions) <= 0.01 * millions
    decoder, width = model.decoder, 768 if arch.endswith("base") else 1024
    assert (len(decoder.layers), decoder.embed_dim) == (layers, width)
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    chunk = 256 if arch.endswith("base") else 512
    if arch.startswith("combiner"):
        assert decoder.layers[0].self_attn.inner.options.row_length == chunk
    if arch.startswith("flash"):
        unit = decoder.layers[0].unit
        assert (unit.heads, unit.expanded_dim, unit.query_dim) == (heads, 2 * width, 128)
        assert unit.chunk_size == (None if "quad" in arch else chunk)
    else:
        attention = decoder.layers[0].self_attn
        assert attention.num_heads == heads
        assert not arch.startswith("mc") or attention.inner.options.chunk_size == chunk


@pytest.mark.parametrize(
    ("arch", "options", "millions"),
    [
        ("flash_quad_lm_w768", "", 105),
        ("flash_quad_lm_w768", "--flash-kernel softmax", 105),
        ("flash_quad_lm_w768", "--decoder-attention-heads 12", 105),
        ("flash_quad_lm_w768", "--flash-no-gate --flash-separate-ffn", 131),
        ("transformer_plus_lm_w768", "", 110),
        ("transformer_plus_lm_w768", "--flash-kernel relu2", 110),
        ("transformer_plus_lm_w768", "--decoder-attention-heads 1", 110),
        ("transformer_plus_lm_w768", "--flash-attention-gate --decoder-ffn-embed-dim 2496", 106),
    ],
)
def test_rows_of_tables_1_and_2(arch: str, options: str, millions: int) -> None:
    """Each row has the paper's number of parameters, rounded to millions."""
    with torch.device("meta"):
        model = build_model(arch, "--tokens-per-sample", "512", *options.split(), sizes=(), words=32000 - 4)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize(
    "size, width, units, layers", [("w512", 512, 15, 8), ("w768", 768, 22, 12), ("w1024", 1024, 46, 24)]
)
def test_sizes_of_figure_3(size: str, width: int, units: int, layers: int) -> None:
    """Widths and layers of the figure's table; heads of 64 channels."""
    for kind, count in (("flash_quad", units), ("transformer_plus", layers), ("transformer_pp", layers)):
        with torch.device("meta"):
            decoder = build_model(f"{kind}_lm_{size}", "--tokens-per-sample", "512", sizes=()).decoder
        assert (len(decoder.layers), decoder.embed_dim) == (count, width)
        layer = decoder.layers[0]
        heads = layer.unit.heads if kind == "flash_quad" else layer.self_attn.num_heads
        assert heads == (1 if kind == "flash_quad" else width // 64)


@pytest.mark.parametrize("arch", ["flash_lm_large", "transformer_pp_lm_base"])
def test_users_options_win_over_a_named_size(arch: str) -> None:
    """A size sets only options that are not on the command line."""
    chunk = ["--flash-chunk-size", "64"] if arch.startswith("flash") else []
    decoder = build_model(arch, "--decoder-layers", "2", "--decoder-embed-dim", "48", *chunk, sizes=()).decoder
    assert (len(decoder.layers), decoder.embed_dim) == (2, 48)
    assert not chunk or decoder.layers[0].unit.chunk_size == 64


@pytest.mark.parametrize(
    ("arch", "inner"),
    [
        ("flash_lm", 96),
        ("flash_quad_lm", 96),
        ("transformer_plus_lm", 192),
        ("transformer_pp_lm", 128),
        ("mc_transformer_pp_lm", 128),
        ("performer_lm", 192),
        ("combiner_lm", 192),
    ],
)
def test_widths_follow_the_embedding(arch: str, inner: int) -> None:
    """--decoder-embed-dim alone is enough; --decoder-ffn-embed-dim overrides the default."""
    sizes = ("--decoder-layers", "1", "--decoder-attention-heads", "4", "--decoder-embed-dim", "48")
    for arguments, expected in (((), inner), (("--decoder-ffn-embed-dim", "80"), 80)):
        decoder = build_model(arch, *arguments, sizes=sizes).decoder
        assert decoder.project_in_dim is None and decoder.project_out_dim is None
        assert decoder.output_projection.weight.shape[1] == decoder.embed_tokens.embedding_dim == 48
        layer = decoder.layers[0]
        second = layer.unit.out_proj if arch in GATED_UNITS else layer.fc2
        assert (second.in_features, second.out_features) == (expected, 48)
        assert _logits(build_model(arch, *arguments, sizes=sizes)).shape == (2, 101, 64)


def test_glu_width_that_is_no_integer_is_rounded_up() -> None:
    """8/3 of 40 is 106.7; 112 is the next multiple of 8."""
    sizes = ("--decoder-layers", "1", "--decoder-attention-heads", "4", "--decoder-embed-dim", "40")
    assert build_model("transformer_pp_lm", sizes=sizes).decoder.layers[0].fc2.in_features == 112


# ---- Defaults


@pytest.mark.parametrize("arch", FLASH_FAMILY)
def test_defaults_are_the_papers(arch: str) -> None:
    """No dropout, unscaled embeddings, pre-norm layers, a final norm, scaled sinusoids."""
    decoder = build_model(arch).decoder
    assert decoder.embed_scale == 1.0 and decoder.dropout_module.p == 0.0
    assert isinstance(decoder.layer_norm, nn.LayerNorm)
    assert decoder.embed_positions.scaled_sin.dim == 32
    for layer in decoder.layers:
        if arch in GATED_UNITS:
            unit = layer.unit
            assert (unit.kernel, unit.gate, unit.rotary, unit.query_dim) == ("relu2", True, True, 128)
            assert (unit.dropout.p, unit.attention_dropout.p, unit.activation_dropout.p) == (0.0, 0.0, 0.0)
        else:
            assert layer.normalize_before and layer.dropout_module.p == layer.self_attn.dropout_module.p == 0.0


@pytest.mark.parametrize("arch", GATED_UNITS)
def test_embeddings_of_gated_units_are_small_at_first(arch: str) -> None:
    """N(0, 0.02), padding 0, so that a model with branches near zero does not predict its input token."""
    model = build_model(arch, "--share-decoder-input-output-embed", words=2000)
    weight = model.decoder.embed_tokens.weight
    assert abs(weight.std().item() - 0.02) <= 0.001 and weight[1].abs().max() == 0.0
    sequence = tokens(2, 64)
    with torch.no_grad():
        logits = model.eval()(sequence)[0]
    assert F.cross_entropy(logits[:, :-1].flatten(0, 1), sequence[:, 1:].flatten()) < math.log(2004) + 0.7


@pytest.mark.parametrize("arch", TRANSFORMERS)
def test_embeddings_of_transformers_are_fairseqs(arch: str) -> None:
    """N(0, 1/√d)."""
    weight = build_model(arch, words=2000).decoder.embed_tokens.weight
    assert abs(weight.std().item() - weight.shape[1] ** -0.5) <= 0.01


@pytest.mark.parametrize("arch", FLASH_FAMILY)
def test_layers_are_pre_norm(arch: str) -> None:
    """A layer's residual branch does not depend on the scale of its input, unlike in a post-norm layer."""
    layer = awake(build_model(arch)).eval().double().decoder.layers[0]
    x = 1e5 * torch.randn(20, 2, 32, dtype=torch.double)
    added = [layer(scale * x)[0] - scale * x for scale in (1.0, 4.0)]
    assert added[0].square().mean() > 1e-4
    assert_close("added", added[1], added[0], tolerance=1e-3)


# ---- Positions


@pytest.mark.parametrize("arch", FLASH_FAMILY)
def test_positions_are_scaled_sinusoids(arch: str) -> None:
    """Sines, then cosines, times a learned scalar, at first 1/sqrt(d); only real tokens count, padding is 0."""
    model = build_model(arch)
    positions = model.decoder.embed_positions
    (scale,) = positions.parameters()
    assert scale.item() == pytest.approx(1.0 / math.sqrt(32))
    sequence = tokens(1, 9)
    sequence[0, :3] = 1
    angles = torch.arange(6.0)[:, None] * 10000.0 ** (-torch.arange(16.0) / 16.0)
    expected = torch.cat([torch.zeros(3, 32), torch.cat([angles.sin(), angles.cos()], dim=1) / math.sqrt(32)])
    assert_close("positions", positions(sequence)[0], expected)
    model(sequence)[0].square().mean().backward()
    assert scale.grad.abs().item() > 0.0


@pytest.mark.parametrize(
    ("arch", "arguments", "limit"),
    [
        *[(arch, "--flash-relative-bias rotary" if arch == "flash_quad_lm" else "", None) for arch in FLASH_FAMILY],
        *[(arch, "--decoder-learned-pos", 8) for arch in FLASH_FAMILY],
        ("flash_quad_lm", "--flash-relative-bias toeplitz", 8),
        ("flash_quad_lm", "--flash-relative-bias toeplitz --no-token-positional-embeddings", 8),
        ("flash_quad_lm", "--flash-relative-bias toeplitz --add-bos-token", 9),
        ("flash_lm", "--decoder-learned-pos --add-bos-token", 9),
        ("flash_lm", "--decoder-learned-pos --add-bos-token --max-target-positions 8", 8),
    ],
)
def test_only_tables_have_a_limit(arch: str, arguments: str, limit: int | None) -> None:
    """Only models with a parameter per position refuse longer inputs; padding does not count."""
    model = build_model(arch, "--tokens-per-sample", "8", *arguments.split()).eval()
    assert model.max_positions() == (limit or 8)
    fits = limit or 20
    sequence = torch.cat([torch.ones(2, 5, dtype=torch.long), tokens(2, fits)], dim=1)
    with torch.no_grad():
        assert_close("logits", model(sequence)[0][:, 5:], model(tokens(2, fits))[0], tolerance=1e-4)
    if limit is not None:
        for options in ({}, {"incremental_state": {}}):
            with pytest.raises(ValueError, match=f"{limit + 1} tokens; allowed: {limit}, .*--tokens-per-sample"):
                model.decoder(tokens(1, limit + 1), **options)


# ---- Options


def test_separate_feed_forward() -> None:
    """The separate feed-forward is a residual block of the unit's width."""
    unit = build_model("flash_lm", "--flash-no-gate", "--flash-separate-ffn").decoder.layers[0].unit
    assert unit.ffn.in_proj.out_features == unit.expanded_dim


def test_relative_bias_is_chosen_by_length() -> None:
    """Below 512 tokens per chunk or training sequence: one parameter per distance; from 512 on: two vectors."""
    for arch, option in (("flash_lm", "--flash-chunk-size"), ("flash_quad_lm", "--tokens-per-sample")):
        short, long = (build_model(arch, option, length).decoder.layers[1].unit.bias for length in ("511", "512"))
        assert isinstance(short, ToeplitzBias) and short.max_positions == 511
        assert isinstance(long, RotaryBias)


@pytest.mark.parametrize("arch", FLASH_FAMILY)
def test_scalenorm_is_everywhere(arch: str) -> None:
    """ScaleNorm before every block and at the end; Combiner has another norm for its row summaries."""
    model = build_model(arch, "--flash-norm", "scalenorm")
    assert isinstance(model.decoder.layer_norm, ScaleNorm)
    layer_norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert all(name.endswith("summary_norm") for name in layer_norms)
    assert len(layer_norms) == (2 if arch == "combiner_lm" else 0)
    norms = sum(isinstance(module, ScaleNorm) for module in model.modules())
    assert norms == 1 + 2 * (1 if arch in GATED_UNITS else 2)


@pytest.mark.parametrize("arch", ["transformer_pp_lm", "mc_transformer_pp_lm"])
def test_feed_forward_is_gelu_times_a_projection(arch: str) -> None:
    """x + W_2 (gelu(x' W) ⊙ x' V)."""
    layer = build_model(arch).eval().decoder.layers[0]
    nn.init.zeros_(layer.self_attn.out_proj.weight)
    nn.init.zeros_(layer.self_attn.out_proj.bias)
    x = torch.randn(20, 2, 32)
    normed = layer.final_layer_norm(x)
    (weight, bias), width = (layer.fc1.proj.weight, layer.fc1.proj.bias), layer.fc2.in_features
    gate = F.gelu(F.linear(normed, weight[:width], bias[:width]))
    expected = x + layer.fc2(gate * F.linear(normed, weight[width:], bias[width:]))
    assert_close("layer", layer(x)[0], expected)


@pytest.mark.parametrize("arch", ["transformer_plus_lm", "performer_lm", "combiner_lm"])
def test_feed_forward_is_gelu(arch: str) -> None:
    """x + W_2 gelu(x' W)."""
    layer = build_model(arch).eval().decoder.layers[0]
    nn.init.zeros_(layer.self_attn.out_proj.weight)
    nn.init.zeros_(layer.self_attn.out_proj.bias)
    x = torch.randn(20, 2, 32)
    expected = x + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
    assert_close("layer", layer(x)[0], expected)


@pytest.mark.parametrize("arch", TRANSFORMERS)
def test_attention_gate_multiplies_what_attention_gives(arch: str) -> None:
    """The gate is silu of a projection of the input, applied before W_o; the attention is unchanged."""
    plain = build_model(arch).eval().decoder.layers[0].self_attn
    gated = build_model(arch, "--flash-attention-gate").eval().decoder.layers[0].self_attn
    missing, unexpected = gated.load_state_dict(plain.state_dict(), strict=False)
    assert missing == ["gate_proj.weight", "gate_proj.bias"] and not unexpected
    attended = []
    for attention in (plain, gated):
        attention.out_proj.register_forward_pre_hook(lambda module, args: attended.append(args[0]))
    x = torch.randn(20, 2, 32)
    for attention in (plain, gated):
        attention(x)
    assert_close("gated", attended[1], F.silu(gated.gate_proj(x)) * attended[0])


@pytest.mark.parametrize("kernel", ["softmax", "relu2", "laplace"])
@pytest.mark.parametrize("arch", ["transformer_plus_lm", "transformer_pp_lm"])
def test_kernel_of_a_transformer(arch: str, kernel: str) -> None:
    """softmax is torch's fused attention; the other kernels divide by the maximum length, a constant."""
    attention = build_model(arch, "--flash-kernel", kernel, "--tokens-per-sample", "128").decoder.layers[1].self_attn
    inner = attention.inner.inner  # within the rotation
    if kernel == "softmax":
        assert isinstance(inner, SoftmaxAttention)
    else:
        assert isinstance(inner, QuadraticAttention) and (inner.options.kernel, inner.options.divisor) == (
            kernel,
            128.0,
        )
    assert attention.inner.causal and inner.causal


def test_divisor_is_the_training_length() -> None:
    """The divisor is not the current length; --flash-divisor keeps it under a larger maximum length."""
    rotary = ("--flash-relative-bias", "rotary")
    trained = awake(build_model("flash_quad_lm", "--tokens-per-sample", "128", *rotary))
    assert [layer.unit.divisor for layer in trained.decoder.layers] == [128, 128]
    expected = _logits(trained)
    longer = ("--tokens-per-sample", "128", "--max-target-positions", "200", *rotary)
    for arguments, unchanged in (("--flash-divisor", "128"), True), ((), False):
        model = build_model("flash_quad_lm", *longer, *arguments)
        model.load_state_dict(trained.state_dict())
        assert ((_logits(model) - expected).abs().max().item() < 1e-5) == unchanged
    assert _logits(model, 200).shape == (2, 200, 64)


# ---- Bad input


BAD = [
    ("flash_lm", "--flash-query-dim 7", "--flash-query-dim is 7; allowed"),
    ("flash_lm", "--decoder-attention-heads 5", "is 5; allowed: .*--decoder-ffn-embed-dim, 64"),
    ("transformer_plus_lm", "--decoder-attention-heads 32", "--decoder-embed-dim / .*heads is 1; allowed.* even"),
    ("flash_lm", "--decoder-xformers-att-config {'name':'linformer'}", "--decoder-xformers-att-config is given"),
    ("performer_lm", "--decoder-xformers-att-config {'name':'linformer'}", "--decoder-xformers-att-config is"),
    ("flash_quad_lm", "--flash-divisor 0", "--flash-divisor is 0; allowed: above 0"),
    ("flash_quad_lm", "--flash-divisor 8 --flash-kernel softmax", "--flash-divisor is 8; allowed.*without softmax"),
    ("flash_lm", "--flash-no-local --flash-no-linear", "--flash-no-local is given; allowed: without --flash-no-linear"),
    ("flash_lm", "--flash-no-local --flash-overlap", "--flash-overlap is given; allowed: without --flash-no-local"),
    ("flash_lm", "--flash-forget head --flash-no-linear", "--flash-forget is 'head'; allowed: with.*--flash-no-linear"),
    ("flash_lm", "--flash-separate-ffn", "--flash-separate-ffn is given; allowed: with --flash-no-gate"),
    ("flash_lm", "--dropout 1.5", "--dropout is 1.5; allowed"),
    *(("flash_lm", f"--scale-{x}", f"^--scale-{x} is given; allowed") for x in ("attn", "fc", "heads", "resids")),
]


@pytest.mark.parametrize(("arch", "arguments", "message"), BAD)
def test_bad_options_are_named(arch: str, arguments: str, message: str) -> None:
    """The error at construction names argument, value and allowed values."""
    with pytest.raises(ValueError, match=message):
        build_model(arch, *arguments.split())


@pytest.mark.parametrize("option", ["encoder_out", "prev_self_attn_state", "prev_attn_state"])
def test_gated_unit_attends_to_itself_alone(option: str) -> None:
    """The unit accepts neither encoder outputs nor another layer's state."""
    layer = build_model("flash_lm").decoder.layers[0]
    with pytest.raises(ValueError, match=option.replace("self_", "").replace("prev_attn", "prev_\\*")):
        layer(torch.randn(4, 1, 32), **{option: torch.randn(4, 1, 32)})
