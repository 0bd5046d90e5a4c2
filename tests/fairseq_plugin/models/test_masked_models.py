"""The masked models: padding, positions, options, sizes, initialisation; attention clearly affects outputs."""

from functools import partial
from types import SimpleNamespace

import fairseq.models.roberta.model as roberta
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.modules import LayerDropModuleList
from fairseq.tasks import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

import fairseq_plugin.models._encoder
from common.modules.norms import ScaleNorm
from fairseq_plugin.modules.positions import LearnedPositions, ScaledSinPositions
from tests.common.refusals import refused
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.language_models import build_model
from tests.fairseq_plugin.helpers.masked_models import (
    GATED_ATTENTION_UNITS,
    MASKED,
    build_masked,
    build_random,
    features,
)
from tests.fairseq_plugin.helpers.text import PAD, dictionary, padded, tokens

LENGTH = 37  # odd; two chunks of 16 and a remainder, four rows of 8 and a remainder


def _layers(model) -> nn.ModuleList:
    return model.encoder.sentence_encoder.layers


@pytest.mark.parametrize("arch", MASKED)
def test_padding_never_changes_real_features(arch: str) -> None:
    """Also with learned positions, and with padding between tokens."""
    model, sequence = build_random(arch, "--encoder-learned-pos"), tokens(2, LENGTH)
    alone = features(model, sequence)
    beside = features(model, padded(sequence, 3, 20))[:, 3 : 3 + LENGTH]
    assert_close("features with padding", beside, alone)
    between = torch.cat([padded(sequence[:, :21], 0, 2), sequence[:, 21:]], dim=1)
    assert_close("features with padding in between", features(model, between)[between.ne(PAD)], alone.flatten(0, 1))


@pytest.mark.parametrize("arch", MASKED)
def test_what_the_criterion_passes(arch: str) -> None:
    """``masked_tokens`` selects rows of the logits; lengths and sample index, passed by fairseq, have no effect."""
    model, sequence = build_random(arch), tokens(3, LENGTH)
    logits = model(sequence)[0]
    chosen = torch.rand(3, LENGTH) < 0.3
    some = model(sequence, src_lengths=torch.full((3,), LENGTH), src_id=torch.arange(3), masked_tokens=chosen)[0]
    assert logits.shape == (3, LENGTH, len(model.encoder.dictionary))
    assert_close("logits of the chosen", some, logits[chosen])


@pytest.mark.parametrize("arch", MASKED)
def test_every_parameter_is_used(arch: str) -> None:
    """Each parameter has a nonzero finite gradient from the logits, with and without gates."""
    gate = "--flash-no-gate" if arch in GATED_ATTENTION_UNITS else "--flash-attention-gate"
    for arguments in ((), (gate,)):
        model = build_random(arch, *arguments)
        logits = model(padded(tokens(2, LENGTH), 0, 2))[0]
        (logits * torch.randn(logits.shape, dtype=logits.dtype)).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.any(), name
            assert torch.isfinite(parameter.grad).all(), name
            if name.endswith("in_proj.bias"):  # it holds U, V and Z in this order
                assert all(part.any() for part in parameter.grad.split([16] * (len(parameter) // 16))), name


@pytest.mark.parametrize("arch", GATED_ATTENTION_UNITS)
def test_dropouts_reach_the_unit(arch: str) -> None:
    """fairseq's three dropouts are the unit's of the same name; 0 by default, as in the paper."""
    names = ("dropout", "attention_dropout", "activation_dropout")
    arguments = "--dropout 0.1 --attention-dropout 0.2 --activation-dropout 0.3".split()
    for options, expected in ((arguments, [0.1, 0.2, 0.3]), ([], [0.0, 0.0, 0.0])):
        for layer in _layers(build_masked(arch, *options)):
            assert [getattr(layer.unit, name).p for name in names] == expected


@pytest.mark.parametrize("arch", MASKED)
def test_norms(arch: str) -> None:
    """ScaleNorm before every branch and at the end, or LayerNorm as an option; Combiner has one more norm."""
    names = ["unit.norm"] if arch in GATED_ATTENTION_UNITS else ["self_attn_layer_norm", "final_layer_norm"]
    for arguments, expected in (((), ScaleNorm), (("--flash-norm", "layernorm"), nn.LayerNorm)):
        encoder = build_masked(arch, *arguments).encoder.sentence_encoder
        assert isinstance(encoder.layer_norm, expected)
        for layer in encoder.layers:
            norms = {
                name: type(part) for name, part in layer.named_modules() if isinstance(part, (ScaleNorm, nn.LayerNorm))
            }
            summary_norm = norms.pop("self_attn.inner.summary_norm", None)
            assert norms == dict.fromkeys(names, expected) and (summary_norm is nn.LayerNorm) == (
                arch == "combiner_mlm"
            )


@pytest.mark.parametrize("arch", MASKED)
def test_the_final_norm_is_applied(arch: str) -> None:
    """The root mean square of each token's features is ScaleNorm's scalar, unlike for a sum of branches."""
    model = build_random(arch)
    scale = model.encoder.sentence_encoder.layer_norm.weight
    rms = features(model, tokens(2, LENGTH)).square().mean(-1).sqrt()
    assert_close("root mean square", rms, scale.abs().expand_as(rms), tolerance=1e-3)


def test_the_eps_of_every_norm_is_an_option() -> None:
    """Those of layers, of embeddings and of the head; 1e-5 by default."""
    for arguments, eps in ((), 1e-5), (("--lineartime-norm-eps", "1e-3"), 1e-3):
        model = build_masked("softmax_mlm", "--layernorm-embedding", *arguments)
        norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
        assert len(norms) == 2 * len(_layers(model)) + 3 and {norm.eps for norm in norms} == {eps}


def test_learned_positions() -> None:
    """One learned embedding per position replaces the scaled sinusoids (tests in models/test_flash.py)."""
    assert isinstance(build_masked("flash_mlm").encoder.sentence_encoder.embed_positions, ScaledSinPositions)
    model = build_random("flash_mlm", "--encoder-learned-pos")
    embed = model.encoder.sentence_encoder.embed_positions
    assert isinstance(embed, LearnedPositions) and embed.max_positions == 128
    before = features(model, tokens(1, 5))
    with torch.no_grad():
        embed.weight[embed.padding_idx + 5] += 1.0  # of the fifth token
    assert (features(model, tokens(1, 5)) - before)[0, 4].norm() > 1e-2


@pytest.mark.parametrize(
    ("arch", "arguments", "limit"),
    [
        *[(arch, "--encoder-learned-pos", 24) for arch in ("flash_mlm", "flash_quad_mlm", "transformer_plus_mlm")],
        ("flash_quad_mlm", "", 24),  # of its relative bias
        ("flash_quad_mlm", "--flash-relative-bias rotary", None),
        ("flash_mlm", "", None),
        ("transformer_plus_mlm", "", None),
    ],
)
def test_only_tables_have_a_limit(arch: str, arguments: str, limit: int | None) -> None:
    """Only models with a parameter per position refuse inputs beyond --max-positions; padding does not count."""
    model = build_random(arch, "--max-positions", "24", *arguments.split())
    assert model.max_positions() == model.encoder.sentence_encoder.max_positions() == 24
    assert torch.isfinite(features(model, padded(tokens(1, limit or 40), 2, 2))).all()
    if limit is not None:
        with pytest.raises(ValueError, match="25 tokens; allowed: 24, .*--max-positions"):
            features(model, tokens(1, 25))


def test_position_limit_is_the_samples_length() -> None:
    """Without --max-positions, the limit is --tokens-per-sample."""
    assert build_masked("flash_mlm", "--tokens-per-sample", "77").max_positions() == 77


def _changed_rows(arch: str, flag: str, sequence: Tensor) -> list[int]:
    """The tokens whose features ``flag`` changes, in one layer with equal parameters."""
    plain, changed = (build_random(arch, "--encoder-layers", "1", *extra) for extra in ((), (flag,)))
    changed.load_state_dict(plain.state_dict())
    change = (features(plain, sequence) - features(changed, sequence))[0].norm(dim=-1)
    assert ((change > 1e-4) | (change < 1e-12)).all()
    return (change > 1e-4).nonzero().flatten().tolist()


@pytest.mark.parametrize("arch", GATED_ATTENTION_UNITS)
def test_first_softmax_changes_the_first_real_token(arch: str) -> None:
    """No other token changes, wherever the padding is."""
    assert _changed_rows(arch, "--flash-first-softmax", tokens(1, LENGTH)) == [0]
    assert _changed_rows(arch, "--flash-first-softmax", padded(tokens(1, LENGTH), 3, 2)) == [3]


def test_first_to_all_changes_the_first_of_each_chunk() -> None:
    """The first of each chunk of 16 real tokens."""
    assert _changed_rows("flash_mlm", "--flash-first-to-all", tokens(1, LENGTH)) == [0, 16, 32]
    assert _changed_rows("flash_mlm", "--flash-first-to-all", padded(tokens(1, LENGTH), 3, 2)) == [3, 19, 35]


def test_first_to_all_sees_all() -> None:
    """Without the linear term, first tokens depend on other chunks only with this option."""
    for arguments, depends in ((("--flash-first-to-all",), True), ((), False)):
        model = build_random("flash_mlm", "--encoder-layers", "1", "--flash-no-linear", *arguments)
        sequence = tokens(1, LENGTH)
        other_sequence = sequence.clone()
        other_sequence[0, -1] = 4 if sequence[0, -1] != 4 else 5
        change = (features(model, sequence) - features(model, other_sequence))[0].norm(dim=-1)
        assert (change[0] > 1e-9) == (change[16] > 1e-9) == depends
        assert change[1] < 1e-12 and change[17] < 1e-12


def _differs_in_training(model) -> bool:
    model.train()
    sequence = tokens(1, LENGTH)
    return (features(model, sequence) - features(model, sequence)).abs().max().item() > 1e-6


@pytest.mark.parametrize("arch", MASKED)
@pytest.mark.parametrize(
    "option", ["--dropout", "--attention-dropout", "--activation-dropout", "--quant-noise-pq", "--encoder-layerdrop"]
)
def test_noise_of_training(arch: str, option: str) -> None:
    """Off by default; each option makes training passes differ, never evaluation; gradients are finite."""
    assert not _differs_in_training(build_random(arch))
    model = build_random(arch, option, "0.4", "--encoder-layers", "6")
    sequence = tokens(1, LENGTH)
    assert torch.equal(features(model, sequence), features(model, sequence))
    assert _differs_in_training(model)
    features(model, sequence).norm().backward()
    reached = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert reached and all(torch.isfinite(gradient).all() for gradient in reached)


@pytest.mark.parametrize("arch", MASKED)
def test_quantisation_noise_is_in_every_dense_layer(arch: str) -> None:
    """fairseq's hook is on each projection of our layers, as in its own, except Combiner's summaries."""
    for layer in _layers(build_masked(arch, "--quant-noise-pq", "0.1")):
        dense = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        noisy = [name for name, module in dense.items() if module._forward_pre_hooks]
        assert len(noisy) >= 2 and noisy == [name for name in dense if "summary" not in name]


@pytest.mark.parametrize("arch", MASKED)
def test_kept_layers(arch: str) -> None:
    """--encoder-layers-to-keep builds these layers only, and loads them from a deeper checkpoint."""
    deep = build_random(arch, "--encoder-layers", "3")
    pruned = build_random(arch, "--encoder-layers", "3", "--encoder-layers-to-keep", "0,2")
    assert len(_layers(pruned)) == 2
    pruned.load_state_dict(deep.state_dict(), model_cfg=pruned.args)
    for layer, original in zip(_layers(pruned), (_layers(deep)[0], _layers(deep)[2])):
        assert all(torch.equal(value, original.state_dict()[name]) for name, value in layer.state_dict().items())
    dropping = build_masked(arch, "--encoder-layerdrop", "0.5").encoder.sentence_encoder
    assert isinstance(dropping.layers, LayerDropModuleList)


@pytest.mark.parametrize("arch", MASKED)
def test_initialisation(arch: str) -> None:
    """Dense weights, embeddings, scales, relative biases N(0, 0.02); other biases and offsets 0, norms 1."""
    model = build_masked(arch, "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "256")
    kinds = set()
    for name, parameter in model.encoder.sentence_encoder.named_parameters():
        value, kind = parameter.detach(), name.split(".")[-1]
        if name.endswith("embed_tokens.weight"):
            assert not value[PAD].any()
            value = value[PAD + 1 :]
        if "norm" in name or kind in ("beta", "scale") or (kind == "bias" and value.dim() == 1):
            expected = 64**-0.5 if kind == "scale" else float("norm" in name and kind == "weight")
            assert torch.equal(value, torch.full_like(value, expected)), name
        else:
            kinds.add(kind)
            assert abs(value.mean()) < 0.01 and 0.015 < value.std() < 0.025, f"{name}: {value.mean()}, {value.std()}"
    units = {"weight", "gamma"}
    assert kinds == (units if arch in (*GATED_ATTENTION_UNITS, "mc_transformer_pp_mlm") else {"weight"})


# Millions of parameters, vocabulary of 32,000 and shared embeddings (Tables 8 and 9); test_flash.py has all sizes.
PAPER = {"flash_mlm_base": 112, "flash_quad_mlm_large": 496, "transformer_pp_mlm_base": 110, "combiner_mlm_large": 562}
PAPER |= {"performer_mlm_base": 110, "transformer_plus_mlm_w768": 110}


@pytest.mark.parametrize("arch", PAPER)
def test_parameter_counts_are_the_papers(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 %, not counting RoBERTa's head: d² + d, a LayerNorm's 2d, a bias per word; embeddings count."""
    for module in (roberta, fairseq_plugin.models._encoder):
        monkeypatch.setattr(module, "init_bert_params", lambda module: None)  # which moves data that is not there
    with torch.device("meta"):
        model = build_masked(arch, "--tokens-per-sample", "512", sizes=False, words=32000 - 4)
    width = model.args.encoder_embed_dim
    head = sum(p.numel() for name, p in model.encoder.lm_head.named_parameters() if name != "weight")
    assert head == width * width + 3 * width + 32000 and len(model.encoder.dictionary) == 32000
    count = sum(p.numel() for p in model.parameters()) - head
    assert abs(count / 1e6 / PAPER[arch] - 1.0) < 0.01, f"{count / 1e6:.1f} M"


def test_rows_of_combiner_are_the_papers_chunks() -> None:
    """256 and 512; checkpoints stored before the names had these values keep 128."""
    sizes = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-attention-heads 2".split()

    task = SimpleNamespace(source_dictionary=dictionary(60))

    def rows(model) -> int:
        return _layers(model)[0].self_attn.inner.options.row_length

    for arch, expected in (("combiner_mlm", 256), ("combiner_mlm_base", 256), ("combiner_mlm_large", 512)):
        model = build_masked(arch, *sizes, sizes=False)
        assert rows(model) == expected
        assert rows(type(model).build_model(model.args, task)) == expected
        del model.args.flash_row_length  # as earlier versions stored it
        ARCH_CONFIG_REGISTRY[arch](model.args)  # as fairseq does when it loads a checkpoint
        assert rows(type(model).build_model(model.args, task)) == 128


def test_vanilla_transformer_has_learned_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's Transformer of Table 8: 12 layers of RoBERTa's base size, 110 M including positions."""
    for module in (roberta, fairseq_plugin.models._encoder):
        monkeypatch.setattr(module, "init_bert_params", lambda module: None)  # which moves data that is not there
    sizes = "--encoder-learned-pos --dropout 0 --attention-dropout 0 --tokens-per-sample 512".split()
    with torch.device("meta"):
        model = build_masked("softmax_mlm", *sizes, sizes=False, words=32000 - 4)
    encoder = model.encoder.sentence_encoder
    assert isinstance(encoder.embed_positions, nn.Embedding) and len(encoder.layers) == 12
    head = sum(p.numel() for name, p in model.encoder.lm_head.named_parameters() if name != "weight")
    assert round((sum(p.numel() for p in model.parameters()) - head) / 1e6) == 110


BAD = [
    ("flash_mlm", "--encoder-attention-heads 3", ("--encoder-attention-heads", "3", "of --encoder-ffn-embed-dim, 64")),
    (
        "flash_mlm",
        "--flash-overlap --flash-first-softmax",
        ("--flash-overlap", "given", "without --flash-first-softmax"),
    ),
    (
        "flash_mlm",
        "--flash-no-local --flash-first-to-all",
        ("--flash-no-local", "", "without --flash-no-linear, --flash-first-softmax and --flash-first-to-all"),
    ),
    ("flash_mlm", "--mha-reg-scale-factor 0.1", ("--mha-reg-scale-factor", "0.1", "0.0")),
    ("flash_quad_mlm", "--ffn-blocks-to-remove 2", ("--ffn-blocks-to-remove", "2", "-1")),
    ("transformer_pp_mlm", "--mha-heads-to-keep 2", ("--mha-heads-to-keep", "2", "-1")),
    ("combiner_mlm", "--mha-heads-to-keep 2", ("--mha-heads-to-keep", "2", "-1")),
    ("performer_mlm", "--mha-heads-to-keep 2 --flash-attention-gate", ("--mha-heads-to-keep", "2", "-1")),
    ("flash_mlm", "--activation-fn relu", ("--activation-fn", "relu", "gelu")),
    ("softmax_mlm", "--lineartime-norm-eps 0", ("--lineartime-norm-eps", "0.0", "above 0 and below 1")),
    ("performer_mlm", "--encoder-attention-heads 32", ("--encoder-embed-dim / --encoder-attention-heads", "1", "even")),
]


@pytest.mark.parametrize(("arch", "arguments", "message"), BAD)
def test_bad_values_are_refused(arch: str, arguments: str, message: tuple[str, str, str]) -> None:
    """A ValueError names argument, value and allowed values."""
    with refused(*message):
        build_masked(arch, *arguments.split())


@pytest.mark.parametrize("arguments", ["--mha-heads-to-keep 2", "--ffn-blocks-to-remove 1 --flash-attention-gate"])
def test_pruning_that_works_is_allowed(arguments: str) -> None:
    """Heads of an attention without its own parameters, and blocks of any plain feed-forward layer, can be pruned."""
    build_masked("transformer_plus_mlm", *arguments.split())


def test_task_of_causal_models_is_refused() -> None:
    """The error lists the tasks for masked models."""
    configuration = build_masked("flash_mlm").args
    task = LanguageModelingTask(SimpleNamespace(), dictionary())
    with refused("--task", "language_modeling", "masked_lm"):
        FairseqTask.build_model(task, configuration)


@pytest.mark.parametrize(
    ("build", "arch", "flag"),
    [
        (build_masked, "flash_quad_mlm", "--flash-first-to-all"),
        (build_masked, "transformer_plus_mlm", "--flash-first-softmax"),
        (build_masked, "flash_quad_mlm", "--flash-chunk-size=16"),
        (build_masked, "performer_mlm", "--flash-kernel=relu2"),
        (partial(build_model, sizes=()), "flash_lm", "--flash-first-to-all"),
        (partial(build_model, sizes=()), "flash_lm", "--flash-first-softmax"),
    ],
)
def test_options_of_other_models_are_unknown(build, arch: str, flag: str, capsys: pytest.CaptureFixture) -> None:
    """The command line refuses them, also options of masked models for a causal one."""
    with pytest.raises(SystemExit):
        build(arch, flag)
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err
