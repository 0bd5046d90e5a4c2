"""Parts that no contract sees: FLASH's positions, norms and gates, and literal models of the papers."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.attention import InnerAttention, layer_kinds, record_attention
from common.modules.norms import ScaleNorm
from common.modules.relative_bias import RotaryBias, ToeplitzBias
from common.ops import flow_attention
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.kinds import (
    CHANNELS,
    LIMIT,
    build,
    call,
    ending_of,
    kind_of,
    noise,
    randomised,
    shown,
)
from tests.fairseq_plugin.helpers.text import padded, tokens


def changed_rows(arch: str, flag: str, sequence: Tensor) -> list[int]:
    """The tokens whose features ``flag`` changes, in one layer with equal parameters."""
    plain, changed = (shown(arch, "--encoder-layers", "1", *extra) for extra in ((), (flag,)))
    changed.load_state_dict(plain.state_dict(), strict=False)
    features = [model(sequence, features_only=True)[0] for model in (plain, changed)]
    return ((features[0] - features[1])[0].norm(dim=-1) > 1e-6).nonzero().flatten().tolist()


def test_first_tokens_of_flash() -> None:
    """Wherever the padding is, --flash-first-softmax changes one token, --flash-first-to-all one of each chunk."""
    for arch, flag, rows in (
        ("flash_mlm", "--flash-first-softmax", [0]),
        ("flash_quad_mlm", "--flash-first-softmax", [0]),
        ("flash_mlm", "--flash-first-to-all", [0, 8, 16]),
    ):
        assert changed_rows(arch, flag, tokens(1, 21)) == rows
        assert changed_rows(arch, flag, padded(tokens(1, 21), 3, 2)) == [row + 3 for row in rows]


@pytest.mark.parametrize("arch", ["flash_lm", "transformer_pp_lm", "performer_lm", "flash_mlm"])
def test_positions_are_scaled_sinusoids(arch: str) -> None:
    """Sines, then cosines, times a learned scalar, at first 1/√d; real tokens count, and padding is 0."""
    model = build(arch)
    side = model.encoder.sentence_encoder if arch.endswith("_mlm") else model.decoder
    angles = torch.arange(6.0)[:, None] * 10000.0 ** (-torch.arange(8.0) / 8.0)
    expected = torch.cat([torch.zeros(3, 16), torch.cat([angles.sin(), angles.cos()], dim=1) / 4.0])
    assert_close("positions", side.embed_positions(padded(tokens(1, 6), 3, 0))[0], expected)


@torch.no_grad()
def test_the_criterion_of_masked_models_gets_the_logits_of_masked_tokens() -> None:
    """What fairseq passes beside the tokens changes no logit."""
    for arch in ("flow_mlm", "flash_mlm"):
        model, sequence = shown(arch), tokens(3, 9)
        chosen = torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.3
        some = model(sequence, src_lengths=torch.full((3,), 9), src_id=torch.arange(3), masked_tokens=chosen)[0]
        assert_close("logits", some, model(sequence)[0][chosen])


@pytest.mark.parametrize("arch", ["flash_lm", "transformer_pp_lm", "mc_transformer_pp_mlm", "flash_quad_mlm"])
@torch.no_grad()
def test_every_norm_of_flash_is_one_and_comes_before_its_block(arch: str) -> None:
    """ScaleNorm or LayerNorm, also at the end; a block adds the same to an input of any scale."""
    for name, kind in (("scalenorm", ScaleNorm), ("layernorm", nn.LayerNorm)):
        model = shown(arch, "--flash-norm", name)
        side = model.encoder.sentence_encoder if arch.endswith("_mlm") else model.decoder
        norms = [type(x) for x in side.modules() if isinstance(x, ScaleNorm | nn.LayerNorm)]
        assert norms == [kind] * (3 if "flash" in arch else 5)
        x, further = 1e5 * noise(20, 2, 16), (None,) if arch.endswith("_mlm") else ()
        added = [y[0] - z if isinstance(y, tuple) else y - z for z in (x, 4 * x) for y in [side.layers[0](z, *further)]]
        assert added[0].abs().mean() > 1e-4
        assert_close("added", added[1], added[0], 1e-3)


#: Models, options, and their limit of tokens, towards which padding does not count; None if there is none.
LIMITS = [
    ("flash_lm", "", None),
    ("flash_quad_lm", "--flash-relative-bias rotary", None),
    ("flash_quad_lm", "--flash-relative-bias toeplitz", 8),
    ("flash_lm", "--decoder-learned-pos", 8),
    ("flash_lm", "--decoder-learned-pos --add-bos-token", 9),
    ("daft_full_lm", "", 8),
    ("daft_full_lm", "--add-bos-token", 9),
    ("daft_full_lm", "--max-target-positions 12", 12),
    ("daft_conv_lm", "", None),
    ("flash_quad_mlm", "", 8),
    ("flash_mlm", "", None),
    ("transformer_plus_mlm", "--encoder-learned-pos", 8),
    ("cosformer_wav2vec2", "--lineartime-max-frames 8", 8),
]


@pytest.mark.parametrize(("arch", "words", "limit"), LIMITS)
@torch.no_grad()
def test_only_parameters_of_positions_limit_the_length(arch: str, words: str, limit: int | None) -> None:
    """In one pass, in parts and in single steps; the error names the options that set the limit."""
    length = {"_lm": ("--tokens-per-sample", "8"), "_mlm": ("--max-positions", "8")}.get(ending_of(arch), ())
    kind, model = kind_of(arch), shown(arch, *length, *words.split())
    fitting = kind.rows(1, limit or 20)
    call(model, kind, fitting if arch.startswith("daft_full") else kind.pad(fitting, 0, 4))
    if not limit:
        return
    said = rf"{limit + 1} tokens; allowed: {limit}, which --[a-z-]+"
    with pytest.raises(ValueError, match=said):
        call(model, kind, kind.rows(1, limit + 1))
    if ending_of(arch) == "_lm":
        assert model.max_positions() == limit
        state: dict[str, Any] = {}
        model.decoder.extend_features(tokens(1, limit), state)
        with pytest.raises(ValueError, match=said):
            model.decoder(tokens(1, limit + 1), incremental_state=dict(state))
        with pytest.raises(ValueError, match=said):
            model.decoder.extend_features(tokens(1, 1), state)


def test_relative_bias_is_chosen_by_length() -> None:
    """Below 512 tokens per chunk or training sequence one parameter per distance, from 512 on two vectors."""
    for arch, option in (("flash_lm", "--flash-chunk-size"), ("flash_quad_lm", "--tokens-per-sample")):
        short, long = (build(arch, option, length).decoder.layers[1].unit.bias for length in ("511", "512"))
        assert isinstance(short, ToeplitzBias) and isinstance(long, RotaryBias)


def test_a_divisor_is_the_training_length() -> None:
    rotary = ("--flash-relative-bias", "rotary")
    trained = shown("flash_quad_lm", *rotary)
    for more, same in (("--flash-divisor", str(LIMIT)), True), ((), False):
        longer = build("flash_quad_lm", *rotary, "--max-target-positions", "200", *more).double().eval()
        longer.load_state_dict(trained.state_dict())
        assert torch.allclose(longer(tokens(1, 9))[0], trained(tokens(1, 9))[0]) == same


@pytest.mark.parametrize("arch", ["transformer_pp_lm", "transformer_plus_lm", "mc_transformer_pp_lm"])
def test_a_layer_of_flashs_transformers_by_hand(arch: str) -> None:
    """Pre-norm: x + g(x) o(x), then x + W2 (gelu(W1 norm(x)) V norm(x)) with GLU; the gate is silu of a projection."""
    plain, gated = (shown(arch, *x).decoder.layers[0] for x in ((), ("--flash-attention-gate",)))
    gated.load_state_dict(plain.state_dict(), strict=False)
    x, seen = noise(20, 2, 16), []
    for layer in (plain, gated):
        layer.self_attn.out_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    out = gated(x)[0]
    normed = gated.self_attn_layer_norm(x)
    plain(x)
    attended = F.silu(gated.self_attn.gate_proj(normed)) * seen[1]
    assert_close("gated", seen[0], attended)
    x = x + gated.self_attn.out_proj(attended)
    normed = gated.final_layer_norm(x)
    if hasattr(gated.fc1, "proj"):
        first, second = gated.fc1.proj(normed).chunk(2, dim=-1)
        inner = F.gelu(first) * second
    else:
        inner = F.gelu(gated.fc1(normed))
    assert_close("layer", out, x + gated.fc2(inner), 1e-6)  # fairseq's gelu computes in float32


# ---- Literal models of the papers


class Literal:
    """Layers of a model, from its parameters by their names."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = dict(model.named_parameters())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def flow(self, layer: str, x: Tensor, **options: Any) -> Tensor:
        heads = [self.linear(f"{layer}.self_attn.{y}_proj", x).unflatten(-1, (2, -1)).transpose(1, 2) for y in "qkv"]
        attended = flow_attention(*heads, form="released", **options)
        return self.linear(f"{layer}.self_attn.out_proj", attended.transpose(1, 2).flatten(2))


@torch.no_grad()
def test_decisions_are_those_of_the_authors_model() -> None:
    """Three embeddings plus the step's, norm, pre-norm layers with ReLU, norm, tanh at the state's token."""
    model = shown("flowformer_decision")
    batch, by = kind_of("flow_decision").rows(2, 9), Literal(model)
    steps = by.weights["embed_timestep.weight"][batch["timesteps"]]
    x = torch.stack([by.linear(f"embed_{y}", batch[f"{y}s"]) + steps for y in ("return", "state", "action")], dim=2)
    x = by.norm("embed_ln", x.flatten(1, 2))
    for i in range(2):
        layer = f"layers.{i}"
        x = x + by.flow(layer, by.norm(f"{layer}.self_attn_layer_norm", x), causal=True, clamp=10.0)
        x = x + by.linear(f"{layer}.fc2", F.relu(by.linear(f"{layer}.fc1", by.norm(f"{layer}.final_layer_norm", x))))
    x = by.norm("layer_norm", x).unflatten(1, (9, 3))
    assert_close("actions", model(**batch), torch.tanh(by.linear("predict_action.0", x[:, :, 1])), 1e-5)


@pytest.mark.parametrize("length", [LIMIT, 9])
@torch.no_grad()
def test_series_are_classified_as_by_the_authors_model(length: int) -> None:
    """Embedding times √D, positions, post-norm layers, final norm, gelu, and one weight per step and channel."""
    model, source = shown("flowformer_time_series"), noise(2, length, CHANNELS)
    by, width = Literal(model), model.args.encoder_embed_dim
    x = by.linear("encoder.embed_tokens", source) * math.sqrt(width)
    x = x + by.weights["encoder.embed_positions.weight"][1 : 1 + length]
    for i in range(2):
        layer = f"encoder.layers.{i}"
        x = by.norm(f"{layer}.self_attn_layer_norm", x + by.flow(layer, x, clamp=None, phi="sigmoid"))
        x = by.norm(f"{layer}.final_layer_norm", x + by.linear(f"{layer}.fc2", F.gelu(by.linear(f"{layer}.fc1", x))))
    x = F.gelu(by.norm("encoder.layer_norm", x)).flatten(1)
    expected = by.linear("classification_heads.toy.out_proj", F.pad(x, (0, LIMIT * width - x.shape[1])))
    assert_close("scores", model(source, classification_head_name="toy")[0], expected, 1e-6)


@pytest.mark.parametrize(("arch", "pooling"), [("softmax_lra_listops", "first"), ("softmax_lra_pathfinder", "mean")])
@torch.no_grad()
def test_a_layer_of_the_arena_by_hand(arch: str, pooling: str) -> None:
    """x + attention(norm(x)), x + W2 gelu(W1 norm(x)), the final norm, the pooling, and linear, relu, linear."""
    model, sequence = shown(arch, "--encoder-attention-dim", "8"), tokens(2, 9)
    encoder, head = model.encoder.sentence_encoder, model.classification_heads["toy"]
    x = encoder.embed_tokens(sequence) + encoder.embed_positions(sequence)  # not scaled
    for layer in encoder.layers:
        normed, attention = layer.self_attn_layer_norm(x), layer.self_attn
        q, k, v = (getattr(attention, f"{y}_proj")(normed).unflatten(-1, (2, 4)).transpose(1, 2) for y in "qkv")
        attended = (q @ k.transpose(-2, -1) / 2.0).softmax(-1) @ v  # √4
        x = x + attention.out_proj(attended.transpose(1, 2).flatten(2))
        x = x + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
    x = encoder.layer_norm(x)
    expected = head.out_proj(F.relu(head.dense(x[:, 0] if pooling == "first" else x.mean(1))))
    for left, right in ((0, 0), (2, 3)):
        scores = model(padded(sequence, left, right), classification_head_name="toy")[0]
        assert_close(f"scores with {left} and {right} of padding", scores, expected, 1e-6)


@torch.no_grad()
def test_two_sequences_share_the_encoder_and_do_not_see_each_other() -> None:
    """The head of the Arena takes their pooled features side by side; RoBERTa's head refuses two."""
    for arch in ("flow_lra_retrieval", "flash_lra_retrieval"):
        model = shown(arch, "--classifier-dim", "10")
        model.sequences = 2  # as the task says
        model.register_classification_head("pair", 3)
        model, head = randomised(model).double(), model.classification_heads["pair"]
        first, second = tokens(2, 9), padded(tokens(2, 5, seed=1), 0, 8)
        pooled = torch.cat([model(first)[0][:, 0], model(second[:, :5])[0][:, 0]], 1)
        expected = head.out_proj(F.relu(head.between(F.relu(head.dense(pooled)))))
        scores = model(first, src_tokens2=second, classification_head_name="pair")[0]
        assert_close("scores", scores, expected, 1e-6)
    model = build("flow_classifier")
    model.sequences = 2
    with pytest.raises(ValueError, match="--classifier-style is roberta; allowed.*arena"):
        model.register_classification_head("pair", 3)


@pytest.mark.parametrize("pooling", ["first", "mean"])
@torch.no_grad()
def test_classifiers_pool_real_tokens(pooling: str) -> None:
    """Also in half precision, whose sums would stagnate."""
    model, sequence = shown("flow_classifier", "--pooling", pooling), tokens(2, 11)
    features = model(sequence)[0]
    expected = model.classification_heads["toy"](features[:, :1] if pooling == "first" else features.mean(1)[:, None])
    assert_close("scores", model(padded(sequence, 3, 5), classification_head_name="toy")[0], expected, 1e-6)
    many = 60.0 + torch.rand(1, 5000, 16)
    wanted = many[:, 0] if pooling == "first" else many.mean(1)
    assert_close("mean", model.half().pool(many.half(), tokens(1, 5000)).float(), wanted, 1e-3)


@torch.no_grad()
def test_lstm_is_torchs_and_tcn_is_franceschis() -> None:
    """The last state; causal dilated convolutions with normalised weights, residuals, the maximum over time."""
    source = noise(2, 11, CHANNELS)
    model = shown("lstm_time_series")
    _, (states, _) = model.encoder.lstm(source)
    out = model.classification_heads["toy"].out_proj
    assert_close("scores", model(source, classification_head_name="toy")[0], out(states[-1]))
    model = shown("tcn_time_series")
    by, x = dict(model.state_dict()), source.transpose(1, 2)
    for i in range(len(model.encoder.blocks)):
        y = x
        for part in ("first", "second"):
            name = f"encoder.blocks.{i}.{part}"
            length, direction = (by[f"{name}.parametrizations.weight.original{j}"] for j in (0, 1))
            kernel = length * direction / direction.flatten(1).norm(dim=1)[:, None, None]
            past = F.pad(y, (2**i * (kernel.shape[2] - 1), 0))
            y = F.leaky_relu(F.conv1d(past, kernel, by[f"{name}.bias"], dilation=2**i))
        residual = f"encoder.blocks.{i}.residual"
        x = y + (F.conv1d(x, by[f"{residual}.weight"], by[f"{residual}.bias"]) if f"{residual}.weight" in by else x)
    out = model.classification_heads["toy"].out_proj
    assert_close("scores", model(source, classification_head_name="toy")[0], out(x.amax(-1)))


@torch.no_grad()
def test_series_are_pooled_over_real_steps() -> None:
    """The largest, the last and the mean of real steps; a row of only padding has the bias as its scores."""
    source = noise(1, 9, CHANNELS)
    for pooling in ("flat", "mean", "max", "last"):
        model = shown("flow_time_series", "--pooling", pooling)
        out, features = model.classification_heads["toy"].out_proj, F.gelu(model(source)[0])
        pooled = {"mean": features.mean(1), "max": features.amax(1), "last": features[:, -1]}
        if pooling in pooled:
            expected = out(pooled[pooling])
            assert_close(pooling, model(source, classification_head_name="toy")[0], expected, 1e-6)
            batch = kind_of("flow_time_series").pad({"source": source}, 2, 3)
            assert_close(pooling, model(**batch, classification_head_name="toy")[0], expected, 1e-5)
        nothing = model(source, torch.ones(1, 9, dtype=torch.bool), classification_head_name="toy")[0]
        assert_close("a row of padding", nothing[0], out.bias)


@pytest.mark.parametrize(("arch", "tokens_of_a_step"), [("flow_lm", 1), ("flow_decision", 3)])
@torch.no_grad()
def test_attention_is_recorded_in_every_layer(arch: str, tokens_of_a_step: int) -> None:
    kind, model = kind_of(arch), shown(arch)
    with record_attention(model) as records:
        call(model, kind, kind.pad(kind.rows(2, 7), 0, 2))
    assert len(records) == 2 and all(x.name.endswith(f"layers.{i}.self_attn.inner") for i, x in enumerate(records))
    assert records[0].competition.shape == (2, 2, 9 * tokens_of_a_step)


@torch.no_grad()
def test_slow_critics_follow_once_after_each_update() -> None:
    model = build("awac_decision", "--awac-target-rate", "0.25")
    slow, fast = model.targets[0][0].weight, model.critics[0][0].weight
    slow.zero_(), fast.fill_(1.0)
    for update, expected in ((0, 0.0), (1, 0.25), (1, 0.25), (2, 0.4375)):
        model.set_num_updates(update)
        assert torch.all(slow == expected)
    assert not any(parameter.requires_grad for parameter in model.targets.parameters())


SHORT, ENOUGH = (torch.arange(206) >= torch.tensor([[206], [real]]) for real in (17, 18))  # a frame reads 18 samples
#: Model and options, arguments of a call, and what the error says of them; None if the call is allowed.
CALLS: list[tuple[str, dict[str, Tensor], str | None]] = [
    ("flow_decision", {"states": noise(1, 5, 4)}, r"states has shape \(1, 5, 4\); allowed"),
    ("bc_decision", {"states": noise(1, 5, 4)}, r"states has shape \(1, 5, 4\); allowed"),
    ("flow_decision", {"timesteps": torch.full((1, 5), LIMIT)}, f"timesteps .* allowed: 0 to {LIMIT - 1}"),
    ("flow_time_series", {"source": noise(1, LIMIT + 1, CHANNELS)}, f"{LIMIT + 1} steps; allowed: {LIMIT}"),
    ("flow_time_series", {"source": noise(2, 5, 4)}, rf"\(2, 5, 4\); allowed: .*{CHANNELS} channels"),
    ("flow_wav2vec2", {"source": noise(2, 206), "padding_mask": SHORT}, "source .*17 samples.*a frame"),
    ("flow_hubert", {"source": noise(2, 206), "padding_mask": SHORT}, "source .*17 samples.*a frame"),
    ("flow_data2vec_audio", {"source": noise(2, 206), "padding_mask": SHORT}, "source .*17 samples.*a frame"),
    ("flow_wav2vec2", {"source": noise(2, 206), "padding_mask": ENOUGH}, None),
    ("flow_wav2vec2", {"source": noise(1, 3)}, "source .*3 samples.*a frame"),
    ("flow_wav2vec2 --crop-seq-to-multiple 4", {"source": noise(2, 49)}, None),
    ("flow_wav2vec2 --crop-seq-to-multiple 4", {"source": noise(2, 41)}, "41 samples, which are 3 frames"),
    ("daft_full_wav2vec2 --lineartime-max-frames 25", {"source": noise(1, 214)}, None),  # padded to an even number
    (
        "s2t_cosformer --max-source-positions 96",
        {"src_tokens": noise(1, 96, 10), "src_lengths": torch.tensor([96])},
        None,
    ),
    (
        "s2t_cosformer --max-source-positions 95",
        {"src_tokens": noise(1, 96, 10), "src_lengths": torch.tensor([96])},
        "96 ",
    ),
    ("s2t_flow", {"src_tokens": noise(2, 9, 10), "src_lengths": torch.tensor([9, 0])}, "src_lengths .*0 frames"),
]


@pytest.mark.parametrize(("words", "given", "said"), CALLS)
@torch.no_grad()
def test_input_that_cannot_be_read_is_refused(words: str, given: dict[str, Tensor], said: str | None) -> None:
    """Recordings without a frame also beside others: fairseq would take padding for audio."""
    arch, *options = words.split()
    model, kind = build(arch, *options).eval(), kind_of(arch)
    batch = {**kind.rows(len(next(iter(given.values()))), 5), **given}
    if said is None:
        assert torch.isfinite(call(model, kind, batch)).all()
        return
    with pytest.raises(ValueError, match=said):
        call(model, kind, batch)


def test_patterns_of_layers() -> None:
    """A pattern repeats and is cut where the layers end; softmax replaces non-causal mechanisms in decoders."""
    names = ["flow", "softmax", "local"]
    assert layer_kinds("flow*3,softmax", names, range(6)) == ["flow"] * 3 + ["softmax"] + ["flow"] * 2
    assert layer_kinds("flow*3,softmax", names, [1, 3, 7], whole=False) == ["flow", "softmax", "softmax"]
    for pattern, said in {
        "": "with ''",
        "flow*0": r"with 'flow\*0'",
        "softmax,flo": "'flo'; allowed: flow, so",
    }.items():
        with pytest.raises(ValueError, match=said):
            layer_kinds(pattern, names[:2], range(2))
    for words, expected in {
        "hybrid_lm --lineartime-layers gla,local --local-window 7": ["gla", "local"],
        "hybrid_classifier --lineartime-layers nystrom,softmax": ["nystrom", "softmax"],
        "hybrid --lineartime-layers nystrom,linear": ["nystrom", "linear", "softmax", "linear"],
        "hybrid_wav2vec2 --lineartime-layers linear,softmax": ["linear", "softmax"],
        "s2t_conformer_hybrid --lineartime-layers linear,softmax": ["linear", "softmax"] * 2,
    }.items():
        found = [x for x in build(*words.split()).modules() if isinstance(x, InnerAttention)]
        assert [x.name for x in found] == expected
        assert "7" not in words or found[1].options.window == 7
