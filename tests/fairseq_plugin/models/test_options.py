"""Our models accept the options of ``transformer_lm``, through fairseq's own parser."""

from itertools import product

import pytest
import torch
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax
from fairseq.modules.fairseq_dropout import FairseqDropout

from fairseq_plugin.models.daft import DaftConvConfig, DaftFullConfig
from fairseq_plugin.models.flowformer import FlowformerLanguageModelConfig, LinearLanguageModelConfig
from tests.fairseq_plugin.helpers.language_models import ARCHITECTURES, awake, build_model
from tests.fairseq_plugin.helpers.text import tokens

HOST_OPTIONS = [
    "--share-decoder-input-output-embed",
    "--adaptive-softmax-cutoff 20,40 --adaptive-input --adaptive-input-cutoff 20,40 --tie-adaptive-weights",
    "--decoder-learned-pos --layernorm-embedding",
    "--character-embeddings",
    "--decoder-layerdrop 0.3",
    "--quant-noise-pq 0.1",
    "--decoder-layers-to-keep 0",
    "--dropout 0.1 --activation-dropout 0.1 --attention-dropout 0.1",
]
# Options of Transformers, and of models that can be post-norm.
TRANSFORMER_OPTIONS = ["--scale-attn --scale-fc --scale-heads --scale-resids", "--activation-fn gelu"]
POST_NORM = ["--lineartime-post-norm"]


@pytest.mark.parametrize(
    ("arch", "arguments"),
    [
        *product(("flowformer_lm", "linear_lm", "softmax_lm"), HOST_OPTIONS + TRANSFORMER_OPTIONS + POST_NORM),
        *product(("flash_lm", "flash_quad_lm"), HOST_OPTIONS),
        # Mixed chunks and Combiner have parameters inside their attention, GLU is an activation inside a layer.
        *product(("mc_transformer_pp_lm", "combiner_lm"), HOST_OPTIONS + TRANSFORMER_OPTIONS),
        # Keys have another width than queries and values, or there are no queries.
        *product(("daft_full_lm", "daft_conv_lm"), HOST_OPTIONS + TRANSFORMER_OPTIONS + POST_NORM),
        *product(("daft_full_lm", "daft_conv_lm"), ["--daft-no-query --quant-noise-pq 0.1 --scale-heads"]),
        ("daft_full_lm", "--daft-free-bias --attention-dropout 0.1"),
        ("daft_conv_lm", "--daft-plain-filter --daft-local-only"),
        ("daft_conv_lm", "--daft-gumbel-temperature 0.5"),
        *product(("transformer_plus_lm", "transformer_pp_lm", "performer_lm"), TRANSFORMER_OPTIONS),
        ("transformer_pp_lm", "--flash-attention-gate --quant-noise-pq 0.1"),
    ],
)
def test_option_builds_and_trains(arch: str, arguments: str) -> None:
    """Forward and backward pass; every parameter that a step uses gets a finite gradient."""
    model = build_model(arch, *arguments.split()).train()
    out = model(tokens(2, 20))[0]
    loss = model.decoder.adaptive_softmax(out, tokens(2, 20, seed=3).flatten())[0] if "softmax" in arguments else [out]
    torch.autograd.backward([part.float().square().mean() for part in loss if part is not None])
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    missing = {name for name, gradient in gradients.items() if gradient is None}
    # Character embeddings have one for symbols without characters; layer drop skips layers at random by
    # design; adaptive loss needs a word of each cluster.
    missing.discard("decoder.embed_tokens.symbol_embeddings")
    assert not missing or "layerdrop" in arguments or "adaptive" in arguments, missing
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values() if gradient is not None)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flowformer_lm_wiki103", "flash_lm_base", "daft_conv_lm_enwik8"])
def test_another_task_is_refused_by_name(arch: str) -> None:
    """The error names the task that a language model requires."""
    command = ["data", "--task", "masked_lm", "--arch", arch]
    with pytest.raises(ValueError, match=f"--task is masked_lm; allowed with --arch {arch}: language_modeling"):
        options.parse_args_and_arch(options.get_training_parser(), command)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flowformer_lm_wiki103", "daft_full_lm_cifar10"])
def test_post_norm_and_pre_norm_contradict_each_other(arch: str) -> None:
    """An error if both are typed; not if one of fairseq's architectures sets pre-norm."""
    flags = ["--lineartime-post-norm", "--decoder-normalize-before"]
    command = ["data", "--task", "language_modeling", "--arch", arch]
    with pytest.raises(ValueError, match="--decoder-normalize-before is given"):
        options.parse_args_and_arch(options.get_training_parser(), [*command, *flags])
    for flag in flags:
        options.parse_args_and_arch(options.get_training_parser(), [*command, flag])


def test_tied_adaptive_weights_have_one_width() -> None:
    """The error names the options that must be equal, with their values."""
    arguments = "--adaptive-softmax-cutoff 20,40 --adaptive-input --adaptive-input-cutoff 20,50 --tie-adaptive-weights"
    with pytest.raises(ValueError, match="--adaptive-input-cutoff is 20,50 and --adaptive-softmax-cutoff is 20,40"):
        build_model("flowformer_lm", *arguments.split())
    with pytest.raises(ValueError, match="--tie-adaptive-weights is given; allowed: with --adaptive-input"):
        build_model("flowformer_lm", "--tie-adaptive-weights")


def test_embedding_options_are_the_hosts() -> None:
    """Shared and adaptive embeddings and kept layers are where fairseq has them."""
    shared = build_model("flowformer_lm", "--share-decoder-input-output-embed").decoder
    assert shared.output_projection.weight is shared.embed_tokens.weight
    adaptive = build_model(
        "flowformer_lm", "--adaptive-softmax-cutoff", "20,40", "--adaptive-input", "--adaptive-input-cutoff", "20,40"
    ).decoder
    assert isinstance(adaptive.embed_tokens, AdaptiveInput) and isinstance(adaptive.adaptive_softmax, AdaptiveSoftmax)
    assert len(build_model("flowformer_lm", "--decoder-layers-to-keep", "0").decoder.layers) == 1
    assert len(build_model("flowformer_lm", "--decoder-layers", "3").decoder.layers) == 3


def test_normformer_options_reach_the_layers() -> None:
    """All four add parameters to every layer (fairseq's own transformer_lm drops them)."""
    layer = build_model(
        "flowformer_lm", "--scale-attn", "--scale-fc", "--scale-heads", "--scale-resids"
    ).decoder.layers[1]
    assert all(part is not None for part in (layer.attn_ln, layer.ffn_layernorm, layer.c_attn, layer.w_resid))
    plain = build_model("flowformer_lm").decoder.layers[1]
    assert all(part is None for part in (plain.attn_ln, plain.ffn_layernorm, plain.c_attn, plain.w_resid))


@pytest.mark.parametrize("arch", ["flash_lm", "flash_quad_lm"])
def test_quantisation_noise_reaches_the_gated_unit(arch: str) -> None:
    """Blocks of both dense weights are zeroed in training, as in fairseq's own layers."""
    model = build_model(arch, "--quant-noise-pq", "0.5").train()
    model(tokens(2, 20))
    for layer in model.decoder.layers:
        for linear in (layer.unit.in_proj, layer.unit.out_proj):
            assert 0.3 < (linear.weight == 0.0).float().mean() < 0.7


DROPOUTS = ("--dropout", "--attention-dropout", "--activation-dropout")


@pytest.mark.parametrize(
    ("arch", "option"),
    [
        ("flowformer_lm", "--attention-dropout"),
        *product(("flash_lm", "flash_quad_lm", "mc_transformer_pp_lm", "performer_lm", "combiner_lm"), DROPOUTS),
        *product(("daft_full_lm", "daft_conv_lm"), DROPOUTS),
    ],
)
def test_retained_dropout_reaches_the_layers(arch: str, option: str) -> None:
    """Every dropout is active in training, and at inference only under fairseq-generate --retain-dropout."""
    model = awake(build_model(arch, "--dropout", "0", option, "0.5"))

    def differs() -> bool:
        torch.manual_seed(0)
        with torch.no_grad():
            first, second = (model(tokens(2, 30))[0] for _ in range(2))
        return not torch.equal(first, second)

    assert differs()
    model.eval()
    assert not differs()
    model.decoder.dropout_module.p = 0.0  # the embeddings' dropout, which is fairseq's
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.make_generation_fast_(
                "x", retain_dropout=True, retain_dropout_modules=["GatedAttentionUnitDecoderLayer"]
            )
    assert differs() == arch.startswith("flash"), "--retain-dropout-modules names the layer's class"
    for module in model.modules():
        if isinstance(module, FairseqDropout):
            module.make_generation_fast_("x", retain_dropout=True)
    assert differs()


CONFIGS = [FlowformerLanguageModelConfig, LinearLanguageModelConfig, DaftFullConfig, DaftConvConfig]


@pytest.mark.parametrize("config", CONFIGS)
def test_own_options_are_prefixed(config) -> None:
    """No option of ours has a name that a task could use."""
    own_options = set(config.__dataclass_fields__) - set(TransformerLanguageModelConfig.__dataclass_fields__)
    assert own_options
    for name in own_options:
        assert name.split("_")[0] in ("daft", "flow", "linear", "lineartime"), name


def test_wiki103_is_the_papers_model() -> None:
    """6 layers, width 512, 8 heads, FFN 2048, shared embeddings, dropout 0.1; user options override these."""
    parser = options.get_training_parser()
    command = ["data", "--task", "language_modeling", "--arch", "flowformer_lm_wiki103"]
    arguments = options.parse_args_and_arch(parser, command)
    assert (arguments.decoder_layers, arguments.decoder_embed_dim, arguments.decoder_ffn_embed_dim) == (6, 512, 2048)
    assert (arguments.decoder_attention_heads, arguments.dropout) == (8, 0.1)
    assert arguments.share_decoder_input_output_embed and arguments.decoder_normalize_before
    narrower = options.parse_args_and_arch(options.get_training_parser(), [*command, "--decoder-layers", "2"])
    assert narrower.decoder_layers == 2


def test_registered_names() -> None:
    """Each architecture belongs to the class that documents it."""
    assert {name: ARCH_MODEL_REGISTRY[name].__name__ for name in ARCHITECTURES} == {
        "flowformer_lm": "FlowformerLanguageModel",
        "flowformer_lm_wiki103": "FlowformerLanguageModel",
        "linear_lm": "LinearLanguageModel",
        "softmax_lm": "SoftmaxLanguageModel",
        "flash_lm": "FlashLanguageModel",
        "flash_quad_lm": "FlashQuadLanguageModel",
        "transformer_plus_lm": "TransformerPlusLanguageModel",
        "transformer_pp_lm": "TransformerPlusPlusLanguageModel",
        "mc_transformer_pp_lm": "MixedChunkTransformerLanguageModel",
        "performer_lm": "PerformerLanguageModel",
        "combiner_lm": "CombinerLanguageModel",
        "daft_full_lm": "DaftFullLanguageModel",
        "daft_conv_lm": "DaftConvLanguageModel",
    }


def test_where_gates_and_convolutions_are_no_options() -> None:
    """Not for masked models, which see later tokens, or softmax, whose state grows; errors name the option."""
    for (arch, task), option in product(
        (("flow_mlm", "masked_lm"), ("softmax_lm", "language_modeling")), (["forget", "head"], ["short-conv", "3"])
    ):
        command = ["data", "--task", task, "--arch", arch, f"--{arch.split('_')[0]}-{option[0]}", option[1]]
        with pytest.raises(SystemExit):
            options.parse_args_and_arch(options.get_training_parser(), command)
    with pytest.raises(ValueError, match="--flow-short-conv is -1; allowed: an integer of at least 1"):
        build_model("flowformer_lm", "--flow-short-conv", "-1")
