"""The Long Range Arena's architectures: sizes, head, initialisation, one layer by hand, and pairs."""

import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import options, tasks
from fairseq.models import ARCH_MODEL_REGISTRY
from torch.nn import functional as F

from common.attention import supporting
from fairseq_plugin.models.long_range_arena import OFFICIAL, RELEASED
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.text import dictionary, padded, tokens

TASK = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", "--num-classes", "3"]
MECHANISMS = supporting("bidirectional")
TINY = "--encoder-embed-dim 12 --encoder-attention-dim 8 --encoder-ffn-embed-dim 10 --encoder-attention-heads 2".split()


def configuration(arch, *arguments):
    command = ["data", *TASK, "--arch", arch, "--max-positions", "40", *arguments]
    return options.parse_args_and_arch(options.get_training_parser(), command)


def build(arch, *arguments, sequences=1):
    """The model that fairseq-train builds, in evaluation mode."""
    torch.manual_seed(1)
    task = SimpleNamespace(source_dictionary=dictionary(), max_positions=lambda: 40, sequences=sequences)
    model = tasks.FairseqTask.build_model(task, configuration(arch, *arguments)).eval()
    model.register_classification_head("head", num_classes=3)
    return model


def size(args):
    names = "layers attention_heads embed_dim attention_dim ffn_embed_dim".split()
    return tuple(getattr(args, f"encoder_{name}") for name in names)


@pytest.mark.parametrize(
    ("arch", "wanted", "dropout", "pooling", "learned"),
    [
        ("softmax_lra_listops", (4, 8, 512, 512, 1024), 0.1, "first", False),
        ("flow_lra_text", (4, 4, 256, 256, 1024), 0.1, "first", False),
        ("linear_lra_retrieval", (4, 4, 128, 128, 512), 0.1, "first", False),
        ("daft_conv_lra_image", (1, 8, 128, 64, 128), 0.3, "first", True),
        ("mixed_chunk_lra_pathfinder", (4, 4, 32, 16, 32), 0.2, "mean", False),
        ("flowformer_lra_listops_released", (1, 2, 512, 512, 1024), 0.1, "first", False),
        ("flowformer_lra_text_released", (1, 4, 256, 256, 1024), 0.1, "first", False),
        ("flowformer_lra_retrieval_released", (4, 4, 128, 128, 512), 0.1, "first", False),
        ("flowformer_lra_image_released", (1, 4, 128, 64, 128), 0.3, "first", True),
        ("flowformer_lra_pathfinder_released", (1, 8, 256, 128, 256), 0.2, "mean", False),
    ],
)
def test_sizes(arch, wanted, dropout, pooling, learned):
    args = configuration(arch)
    assert size(args) == wanted
    assert (args.dropout, args.activation_dropout) == (dropout, dropout)
    assert getattr(args, "pooling", "first") == pooling and args.encoder_learned_pos == learned
    released = arch.endswith("_released")
    assert (getattr(args, "flow_competition", "softmax") == "softmax_heads") == released
    if released:
        assert args.flow_phi == "relu" and args.flow_clamp == math.inf


def test_every_attention_has_every_task():
    names = {f"{name}_lra_{task}" for name in (*MECHANISMS, "flowformer", "flash") for task in OFFICIAL}
    assert names <= set(ARCH_MODEL_REGISTRY)
    assert {f"flowformer_lra_{task}_released" for task in RELEASED} <= set(ARCH_MODEL_REGISTRY)


@pytest.mark.parametrize("task", ["image", "pathfinder"])
@pytest.mark.parametrize("name", [*MECHANISMS, "flash"])
@torch.no_grad()
def test_every_attention_runs_in_the_arenas_small_sizes(name, task):
    """Sizes with heads of 4 or 8 channels, and attention narrower than the embeddings."""
    model = build(f"{name}_lra_{task}")
    scores = model(tokens(2, 40), classification_head_name="head")[0]
    assert torch.isfinite(scores).all()


def test_attention_narrower_than_the_tokens_is_refused_where_it_takes_them():
    with pytest.raises(
        ValueError, match="--encoder-attention-dim is 8; allowed with combiner .*--encoder-embed-dim, 16"
    ):
        build("combiner_lra_image", *TINY, "--encoder-embed-dim", "16", "--encoder-attention-dim", "8")


def test_options_of_the_command_line_win():
    args = configuration("flowformer_lra_image", "--encoder-layers", "2", "--dropout", "0.0", "--pooling", "mean")
    assert size(args) == (2, 8, 128, 64, 128) and args.dropout == 0.0 and args.pooling == "mean"


@pytest.mark.parametrize("task", OFFICIAL)
def test_gated_attention_units_have_as_many_parameters(task):
    """At most 10 per cent more than the Arena's Transformer, without embeddings and norms."""

    def count(arch):
        layers = build(arch).encoder.sentence_encoder.layers
        return sum(x.numel() for name, x in layers.named_parameters() if x.dim() > 1 and "bias" not in name)

    softmax, flash = count(f"softmax_lra_{task}"), count(f"flash_lra_{task}")
    assert 0.9 * softmax < flash < 1.1 * softmax


def test_first_weights():
    model = build("flow_lra_image", "--encoder-embed-dim", "64", "--encoder-attention-dim", "32")
    encoder = model.encoder.sentence_encoder
    embedded = encoder.embed_tokens.weight.detach()
    assert embedded[0].abs().max() == 0 and embedded[1:].std() == pytest.approx(1.0, abs=0.05)
    assert encoder.embed_positions.weight.detach().std() == pytest.approx(0.02, abs=0.005)
    attention, layer = encoder.layers[0].self_attn, encoder.layers[0]
    for linear in (attention.q_proj, attention.out_proj, layer.fc1):
        limit = math.sqrt(6 / (linear.in_features + linear.out_features))
        assert 0.9 * limit < linear.weight.abs().max() <= limit
    assert attention.q_proj.bias is None and attention.out_proj.bias is None
    assert tuple(attention.q_proj.weight.shape) == (32, 64) and tuple(attention.out_proj.weight.shape) == (64, 32)
    assert 0 < layer.fc1.bias.abs().max() < 1e-5


@pytest.mark.parametrize(("arch", "pooling"), [("softmax_lra_listops", "first"), ("softmax_lra_pathfinder", "mean")])
@torch.no_grad()
def test_one_layer_by_hand(arch, pooling):
    """x + attention(norm(x)), x + W2 gelu(W1 norm(x)), the final norm, the pooling, and linear, relu, linear."""
    model, sequence = build(arch, *TINY, "--encoder-layers", "1"), tokens(2, 9)
    sequence[:, 0] = 0
    encoder = model.encoder.sentence_encoder
    layer, attention = encoder.layers[0], encoder.layers[0].self_attn
    x = encoder.embed_tokens(sequence) + encoder.embed_positions(sequence)  # not scaled

    def heads(x):
        return x.unflatten(-1, (2, 4)).transpose(1, 2)

    normed = layer.self_attn_layer_norm(x)
    q, k, v = (heads(project(normed)) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    weights = (q @ k.transpose(-2, -1) / 2.0).softmax(-1)  # √4
    x = x + attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    x = x + layer.fc2(F.gelu(layer.fc1(layer.final_layer_norm(x))))
    x = encoder.layer_norm(x)
    pooled = x[:, 0] if pooling == "first" else x.mean(1)
    head = model.classification_heads["head"]
    expected = head.out_proj(F.relu(head.dense(pooled)))
    assert tuple(head.dense.weight.shape) == (10, 12)
    for left, right in ((0, 0), (2, 3)):
        scores = model(padded(sequence, left, right), classification_head_name="head")[0]
        assert_close(f"scores with {left} and {right} of padding", scores, expected, 2e-5)


@pytest.mark.parametrize("arch", ["flow_lra_retrieval", "flash_lra_retrieval"])
@torch.no_grad()
def test_two_sequences_share_the_encoder_and_do_not_see_each_other(arch):
    small = ["--encoder-embed-dim", "12", "--encoder-layers", "1", "--classifier-dim", "10"]
    model = build(arch, *small, sequences=2)
    first, second = tokens(2, 9), padded(tokens(2, 5, seed=1), 0, 8)
    head = model.classification_heads["head"]
    pooled = torch.cat([model(first)[0][:, 0], model(second[:, :5])[0][:, 0]], 1)
    expected = head.out_proj(F.relu(head.between(F.relu(head.dense(pooled)))))
    assert tuple(head.dense.weight.shape) == (10, 24) and tuple(head.between.weight.shape) == (5, 10)
    scores = model(first, src_tokens2=second, classification_head_name="head")[0]
    assert_close("scores", scores, expected, 2e-5)


def test_wrong_options_are_named():
    with pytest.raises(ValueError, match="--encoder-attention-heads is 3; allowed.*--encoder-attention-dim, 8"):
        build("flow_lra_text", *TINY, "--encoder-attention-heads", "3")
    with pytest.raises(ValueError, match="--encoder-attention-dim is 0; allowed"):
        build("flow_lra_text", "--encoder-attention-dim", "0")
    with pytest.raises(ValueError, match="--classifier-dim is -1; allowed"):
        build("flow_lra_text", *TINY, "--classifier-dim", "-1")
    with pytest.raises(ValueError, match="--classifier-style is roberta; allowed.*arena"):
        build("flow_lra_text", *TINY, "--classifier-style", "roberta", sequences=2)
    with pytest.raises(ValueError, match="--flow-competition is 'softmax_heads'; allowed with causal"):
        command = "data --task language_modeling --arch flow_lm --flow-competition softmax_heads".split()
        args = options.parse_args_and_arch(options.get_training_parser(), [*command, "--tokens-per-sample", "40"])
        symbols = dictionary()
        task = SimpleNamespace(source_dictionary=symbols, target_dictionary=symbols)
        tasks.FairseqTask.build_model(task, args)
