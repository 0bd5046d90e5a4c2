"""The language models of the DAFT paper: projections, sizes, defaults, lengths, bad input."""

import pytest
import torch
from fairseq import options
from fairseq.modules import MultiheadAttention
from torch import nn

from fairseq_plugin.modules.multihead_attention import InnerMultiheadAttention, LayerDesign, NoProjection
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import DAFT_FAMILY, awake, build_model
from tests.fairseq_plugin.helpers.text import tokens


def _logits(model: nn.Module, length: int = 101) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens(2, length))[0]


def _decoded(model: nn.Module, sequence: torch.Tensor) -> torch.Tensor:
    """Logits (B, T, V), decoded one step at a time."""
    state, steps = {}, []
    with torch.no_grad():
        for end in range(1, sequence.shape[1] + 1):
            steps.append(model.decoder(sequence[:, :end], incremental_state=state)[0])
    return torch.cat(steps, dim=1)


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


# ---- The attention between fairseq's projections


def _daft_full(query: bool) -> InnerMultiheadAttention:
    torch.manual_seed(0)
    attention = InnerMultiheadAttention(
        16, 4, LayerDesign("daft_full", {"bias_dim": 3, "query": query}, max_tokens=15), causal=True
    )
    return awake(attention)


def _daft_conv(query: bool) -> InnerMultiheadAttention:
    torch.manual_seed(0)
    return awake(InnerMultiheadAttention(16, 4, LayerDesign("daft_conv", {"window": 5, "query": query}), True))


@pytest.mark.parametrize("query", [True, False], ids=["query", "no-query"])
def test_projections_are_fairseqs(query: bool) -> None:
    """Names and shapes as in fairseq, except DAFT-conv's one key per head and unused query projections."""
    stock = {name: tuple(p.shape) for name, p in MultiheadAttention(16, 4, self_attention=True).named_parameters()}
    if not query:
        del stock["q_proj.weight"], stock["q_proj.bias"]
    full, conv = ({n: s for n, s in _shapes(f(query)).items() if "inner" not in n} for f in (_daft_full, _daft_conv))
    assert full == stock
    assert conv == {**stock, "k_proj.weight": (4, 16), "k_proj.bias": (4,)}


def test_narrow_keys_start_as_fairseqs() -> None:
    """Xavier's bound for a width of one key per head, times fairseq's gain for q, k and v."""
    weight = InnerMultiheadAttention(256, 64, LayerDesign("daft_conv"), causal=True).k_proj.weight
    bound = (0.5 * 6.0 / (256 + 64)) ** 0.5
    assert 0.99 * bound <= weight.abs().max() <= bound
    assert abs(weight.std().item() - bound / 3**0.5) <= 0.02 * bound


@pytest.mark.parametrize("arguments", [[], ["--daft-no-query"]], ids=["query", "no-query"])
@pytest.mark.parametrize("arch", DAFT_FAMILY)
def test_quantisation_noise_reaches_every_projection(arch: str, arguments) -> None:
    """Blocks of all weights, including those of the narrow keys, are zeroed in training."""
    model = build_model(arch, "--quant-noise-pq", "0.5", "--decoder-attention-heads", "32", *arguments).train()
    model(tokens(2, 20))
    for layer in model.decoder.layers:
        attention = layer.self_attn
        projections = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
        assert isinstance(attention.q_proj, NoProjection) == bool(arguments)
        for linear in projections[bool(arguments) :]:
            assert 0.25 < (linear.weight == 0.0).float().mean() < 0.75


# ---- The paper's models

_LAYER = 3 * (512 * 512 + 512) + (512 * 2048 + 2048) + (2048 * 512 + 512) + 4 * 512  # without keys and positions


@pytest.mark.parametrize(
    ("arch", "length", "attention"),
    [
        ("daft_full_lm_enwik8", 1024, (512 * 512 + 512) + 2 * 1024 * 128),
        ("daft_full_lm_cifar10", 3072, (512 * 512 + 512) + 2 * 3072 * 256),
        ("daft_conv_lm_enwik8", 1024, (512 * 512 + 512) + 512 * (64 + 2)),
        ("daft_conv_lm_cifar10", 3072, (512 * 512 + 512) + 512 * (256 + 2)),
    ],
)
def test_named_sizes(arch: str, length: int, attention: int) -> None:
    """12 layers, width 512, FFN 2048, dropout 0.1; exact parameter count with 256 symbols."""
    with torch.device("meta"):
        model = build_model(arch, "--tokens-per-sample", str(length), sizes=(), words=252)
    decoder = model.decoder
    assert (len(decoder.layers), decoder.embed_dim, decoder.dropout_module.p) == (12, 512, 0.1)
    assert all(layer.fc1.out_features == 2048 and layer.normalize_before for layer in decoder.layers)
    expected = 12 * (_LAYER + attention) + 2 * 512 + 2 * 256 * 512  # layers, last norm, embeddings and output
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    inner = decoder.layers[11].self_attn.inner
    if arch.startswith("daft_full"):
        assert (inner.shape.max_tokens, inner.options.bias_dim) == (length, 256 if "cifar10" in arch else 128)
    else:
        assert (inner.options.window, inner.shape.num_heads) == (256 if "cifar10" in arch else 64, 512)


def _parsed(arch: str, *arguments: str):
    command = ["data", "--task", "language_modeling", "--arch", arch, *arguments]
    return options.parse_args_and_arch(options.get_training_parser(), command)


@pytest.mark.parametrize("size", ["enwik8", "cifar10"])
@pytest.mark.parametrize(("arch", "option"), [("daft_full_lm", "daft_bias_dim"), ("daft_conv_lm", "daft_window")])
def test_users_options_win_over_a_named_size(arch: str, option: str, size: str) -> None:
    """A size sets only options not on the command line; input and output widths follow the layers' width."""
    flags = "--decoder-layers 2 --decoder-embed-dim 48 --decoder-ffn-embed-dim 80 --decoder-attention-heads 3"
    parsed = _parsed(f"{arch}_{size}", *flags.split(), "--dropout", "0.3", f"--{option.replace('_', '-')}", "7")
    assert (parsed.decoder_layers, parsed.decoder_embed_dim, parsed.decoder_ffn_embed_dim) == (2, 48, 80)
    assert (parsed.decoder_input_dim, parsed.decoder_output_dim) == (48, 48)
    assert (parsed.decoder_attention_heads, parsed.dropout, getattr(parsed, option)) == (3, 0.3, 7)
    for width, arguments in ((512, []), (48, ["--decoder-embed-dim", "48"])):
        heads = _parsed(f"{arch}_{size}", *arguments).decoder_attention_heads
        assert heads == (1 if arch == "daft_full_lm" else width)  # a key and a filter for each channel of DAFT-conv


def test_defaults_are_the_papers() -> None:
    """Biases of width 128 for the training length; a window of 64 with queries and scaled filters."""
    sizes = ("--decoder-layers", "1", "--decoder-embed-dim", "32", "--decoder-input-dim", "32")
    sizes = (*sizes, "--decoder-output-dim", "32")
    full, conv = (build_model(arch, sizes=sizes).decoder.layers[0].self_attn.inner for arch in DAFT_FAMILY)
    assert (full.causal, full.shape.max_tokens, full.options.as_dict()) == (True, 256, {"bias_dim": 128, "query": True})
    expected = dict(window=64, query=True, local_only=False, reparameterize=True, gumbel_temperature=None)
    assert (conv.causal, conv.shape.num_heads, conv.options.as_dict()) == (True, 8, expected)
    assert conv.position_bias().abs().max() == 0.0


def test_biases_are_for_the_longest_input() -> None:
    """--max-target-positions if given, else --tokens-per-sample; fairseq's generator reads it."""
    for arguments, limit in (((), 256), (("--max-target-positions", "300"), 300)):
        model = build_model("daft_full_lm", *arguments)
        assert model.decoder.layers[0].self_attn.inner.pe0.shape == (limit, 12)
        assert model.max_positions() == limit


def test_window_and_what_is_outside_of_it() -> None:
    """With --daft-local-only a token sees one window per layer, otherwise all tokens before it."""
    sequence = tokens(1, 40)
    for arguments, visible in ((["--daft-local-only"], 2 * (9 - 1)), ([], 39)):
        model = awake(build_model("daft_conv_lm", "--no-token-positional-embeddings", *arguments)).eval()
        embedded: list = []
        model.decoder.embed_tokens.register_forward_hook(
            lambda module, args, out, kept=embedded: kept.append(out) or out
        )
        (gradient,) = torch.autograd.grad(model(sequence)[0][:, 39].square().sum(), embedded)
        reached = gradient[0].abs().amax(-1) > 0.0
        assert reached.tolist() == [39 - t <= visible for t in range(40)]


# ---- Bad input


BAD = [
    ("daft_conv_lm", "--daft-window -4", "--daft-window is -4; allowed"),
    ("daft_conv_lm", "--daft-gumbel-temperature 0", "--daft-gumbel-temperature is 0.0; allowed"),
    ("daft_conv_lm", "--daft-gumbel-temperature nan", "--daft-gumbel-temperature is nan; allowed"),
    ("daft_conv_lm", "--daft-gumbel-temperature 1 --daft-local-only", "--daft-local-only is given; allowed: without"),
    ("daft_full_lm", "--daft-bias-dim 0", "--daft-bias-dim is 0; allowed"),
    ("daft_full_lm", "--max-target-positions 0", "--max-target-positions is 0; allowed"),
    ("daft_conv_lm", "--max-target-positions 1000000000", "--max-target-positions is 1,000,000,000, .*; allowed"),
    (
        "daft_full_lm",
        "--max-target-positions 70000 --daft-free-bias --no-token-positional-embeddings",
        "--max-target-positions is 70,000, .*; allowed",
    ),
    ("daft_full_lm", "--decoder-attention-heads 5", "heads is 5; allowed: .*--decoder-embed-dim, 32"),
    ("daft_conv_lm", "--decoder-xformers-att-config {'name':'linformer'}", "--decoder-xformers-att-config is"),
]


@pytest.mark.parametrize(("arch", "arguments", "message"), BAD)
def test_bad_options_are_named(arch: str, arguments: str, message: str) -> None:
    """The error at construction names argument, value and allowed values."""
    with pytest.raises(ValueError, match=message):
        build_model(arch, *arguments.split())


@pytest.mark.parametrize("arguments", [[], ["--daft-free-bias"], ["--no-token-positional-embeddings"]], ids=str)
def test_more_tokens_than_positions(arguments) -> None:
    """The error names both lengths, in the full forward and in decoding; lengths up to the limit work."""
    model = build_model("daft_full_lm", "--tokens-per-sample", "8", *arguments).eval()
    sequence, state = tokens(2, 9), {}
    with torch.no_grad():
        assert_close("logits", _decoded(model, sequence[:, :8]), model(sequence[:, :8])[0], tolerance=1e-5)
        with pytest.raises(ValueError, match=r"9 tokens; allowed: 8, .*--max-target-positions.*--tokens-per-sample"):
            model(sequence)
        for end in range(1, 9):
            model.decoder(sequence[:, :end], incremental_state=state)
        with pytest.raises(ValueError, match=r"9 tokens; allowed: 8, .*--max-target-positions.*--tokens-per-sample"):
            model.decoder(sequence, incremental_state=state)


def test_the_token_of_add_bos_has_a_position() -> None:
    """Without --max-target-positions there is one more position than --tokens-per-sample."""
    model = build_model("daft_full_lm", "--tokens-per-sample", "8", "--add-bos-token").eval()
    assert model.max_positions() == model.decoder.layers[0].self_attn.inner.shape.max_tokens == 9
    assert _logits(model, 9).shape[1] == 9
    with pytest.raises(ValueError, match="10 tokens; allowed: 9"):
        model(tokens(1, 10))


def test_daft_conv_takes_any_length() -> None:
    """DAFT-conv accepts inputs longer than its window and than its training length."""
    model = awake(build_model("daft_conv_lm", "--tokens-per-sample", "8"))
    assert torch.isfinite(_logits(model, 50)).all()
