"""Options: each does something, and mistakes are named as they were typed."""

import re
from collections.abc import Iterator

import pytest
import torch
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from recipes.models import model_options
from tests.compare import weights
from tests.fairseq_plugin.helpers.kinds import build, command, flags_of, kind_of, models, shown
from tests.fairseq_plugin.helpers.text import tokens

pytestmark = pytest.mark.usefixtures("plain_pytorch")
TEXT = models("_lm", "_mlm")
#: An option that needs another one, and options that change speed alone, training alone, or nothing in two layers.
NEEDED = {"--flash-separate-ffn": ("--flash-no-gate",)}
WITHOUT_EFFECT = ("cumulative-sum", "chunk-size", "linear-only", "trained-parameters", "-layers", "-activations")


def own_options(name: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Each option that fairseq's own model does not have, and command lines with its values."""
    stock = flags_of(kind_of(name).stock)
    for flag, action in flags_of(name).items():
        if flag not in stock and not flag.endswith(WITHOUT_EFFECT):
            values = action.choices or (("0.25", "0.5") if action.type is float else ("3", "4"))
            given = [[]] if action.nargs == 0 else [[str(x)] for x in values if x != "auto"]  # means another value
            yield flag, [[flag, *value, *NEEDED.get(flag, ())] for value in given]


@torch.no_grad()
def effect(name: str, plain: nn.Module, expected: Tensor, sequence: Tensor, words: list[str]) -> bool | None:
    """Whether options change anything: parameters, whose option an error then names, or outputs; None if refused."""
    try:
        model = shown(name, *words)
    except (ValueError, SystemExit):
        return None
    shapes = [[x.shape for x in weights(y.state_dict()).values()] for y in (model, plain)]
    if shapes[0] != shapes[1]:
        with pytest.raises(ValueError, match=f"does not fit .*{words[0]}[ :,)]"):
            model.load_state_dict(plain.state_dict(), model_cfg=model_options(command(name, *words)))
        return True
    model.load_state_dict(plain.state_dict(), strict=False)  # stored options differ
    model.train(words[0].endswith("temperature"))
    return bool((model(sequence)[0] - expected).abs().max() > 1e-6) or repr(model) != repr(plain)


@pytest.mark.parametrize("name", TEXT)
def test_every_own_option_does_something(name: str) -> None:
    """Each value that a model allows, but the default; nothing else may be without effect."""
    plain, sequence = shown(name), tokens(2, 37)
    sequence[:, 9] = 2  # the end of a document
    expected = plain(sequence)[0].detach()
    for flag, lines in own_options(name):
        effects: list[bool | None] = []
        for words in lines:
            if flags_of(name)[flag].choices or True not in effects:  # of two numbers one may be the default
                effects.append(effect(name, plain, expected, sequence, words))
        assert effects.count(False) <= (len(lines) > 1), f"{flag}: {effects}"


HOST = """
--share-decoder-input-output-embed
--adaptive-softmax-cutoff 20,40 --adaptive-input --adaptive-input-cutoff 20,40 --tie-adaptive-weights
--decoder-learned-pos --layernorm-embedding
--character-embeddings
--decoder-layerdrop 0.3
--quant-noise-pq 0.5
--decoder-layers-to-keep 0
--dropout 0.3
--activation-dropout 0.3
--attention-dropout 0.3
--scale-attn --scale-fc --scale-heads --scale-resids
--activation-fn tanh
--lineartime-post-norm
--encoder-learned-pos
--encoder-layerdrop 0.3
--encoder-layers-to-keep 0
--layernorm-embedding
--untie-weights-roberta
""".strip().splitlines()
#: fairseq's layer, a gated attention unit, parameters within attention, keys of another width, other norms.
HOSTED = "flowformer_lm flash_lm mc_transformer_pp_lm daft_conv_lm flowformer_mlm flash_mlm combiner_mlm".split()


@pytest.mark.parametrize("words", HOST)
@pytest.mark.parametrize("name", HOSTED)
def test_options_of_fairseq_change_a_training(name: str, words: str) -> None:
    """Each changes parameters or outputs in training, every parameter gets a gradient, and evaluation draws nothing."""
    flags = flags_of(name)
    if any(x.startswith("--") and x not in flags for x in words.split()):
        return
    if name.startswith("flash") and words.startswith(("--scale", "--activation-fn", "--lineartime-post")):
        return  # refused, see below
    plain, model = shown(name).train(), shown(name, *words.split()).train()
    torch.manual_seed(1)
    out = model(tokens(2, 20))[0]
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    parts = [out] if adaptive is None else [x for x in adaptive(out, tokens(2, 20).flatten())[0] if x is not None]
    sum(x.double().square().mean() for x in parts).backward()
    missing = {key for key, x in model.named_parameters() if x.grad is None and not key.endswith("symbol_embeddings")}
    assert not missing or "layerdrop" in words or adaptive is not None, missing
    if weights(model.state_dict()).keys() == weights(plain.state_dict()).keys():
        torch.manual_seed(1)
        assert not torch.allclose(out, plain(tokens(2, 20))[0]), "nothing changes"
        model.eval()
        assert torch.equal(model(tokens(2, 20))[0], model(tokens(2, 20))[0])
    if "quant-noise" in words:
        linear = {key: x for key, x in model.named_modules() if isinstance(x, nn.Linear) and "layers" in key}
        dense = [x for key, x in linear.items() if "inner" not in key]
        assert dense and all(x._forward_pre_hooks for x in dense)
    if words.endswith("dropout 0.3"):
        for module in model.modules():  # fairseq-generate --retain-dropout
            if isinstance(module, FairseqDropout):
                module.make_generation_fast_("x", retain_dropout=True)
        assert not torch.equal(model(tokens(2, 20))[0], model(tokens(2, 20))[0])


#: What is typed after --arch, and what the error says, in order.
REFUSED = """
flash_lm --flash-query-dim 7 | ^--flash-query-dim is 7; allowed
flash_lm --decoder-attention-heads 5 | ^--decoder-attention-heads is 5; allowed: .* --decoder-ffn-embed-dim, 16
flash_mlm --encoder-attention-heads 3 | ^--encoder-attention-heads is 3; allowed: .* --encoder-ffn-embed-dim, 16
flash_lm --decoder-xformers-att-config {'name':'linformer'} | --decoder-xformers-att-config is given
flash_quad_lm --flash-divisor 0 | --flash-divisor is 0; allowed: above 0
flash_quad_lm --flash-divisor 8 --flash-kernel softmax | --flash-divisor is 8; allowed.*without softmax
flash_lm --flash-no-local --flash-no-linear | --flash-no-local is given; allowed: without --flash-no-linear
flash_lm --flash-forget head --flash-no-linear | --flash-forget is 'head'; allowed: with.*--flash-no-linear
flash_lm --flash-separate-ffn | --flash-separate-ffn is given; allowed: with --flash-no-gate
flash_lm --dropout 1.5 | --dropout is 1.5; allowed
flash_lm --scale-heads | ^--scale-heads is given; allowed
flash_mlm --flash-overlap --flash-first-softmax | --flash-overlap is given; allowed: without --flash-first-softmax
flash_mlm --mha-reg-scale-factor 0.1 | --mha-reg-scale-factor is 0.1.*0.0
flash_quad_mlm --ffn-blocks-to-remove 2 | --ffn-blocks-to-remove is 2.*-1
combiner_mlm --mha-heads-to-keep 2 | --mha-heads-to-keep is 2.*-1
flash_mlm --activation-fn relu | --activation-fn is relu.*gelu
softmax_mlm --lineartime-norm-eps 0 | --lineartime-norm-eps is 0.0.*above 0 and below 1
performer_mlm --encoder-attention-heads 16 | --encoder-embed-dim / --encoder-attention-heads is 1.*even
daft_conv_lm --daft-window -4 | --daft-window is -4; allowed
daft_conv_lm --daft-gumbel-temperature nan | --daft-gumbel-temperature is nan; allowed
daft_conv_lm --daft-gumbel-temperature 1 --daft-local-only | --daft-local-only is given; allowed: without
daft_full_lm --daft-bias-dim 0 | --daft-bias-dim is 0; allowed
daft_conv_lm --daft-gumbel-temperature 0 | --daft-gumbel-temperature is 0.0; allowed
daft_full_lm --max-target-positions 70000 --daft-free-bias | --max-target-positions is 70,000
daft_full_lm --max-target-positions 0 | --max-target-positions is 0; allowed
daft_conv_lm --max-target-positions 1000000000 | --max-target-positions is 1,000,000,000, .*; allowed
daft_conv_mlm --daft-conv-window 8 | ^--daft-conv-window is 8; allowed when not causal
daft_conv_time_series --daft-conv-window 8 | ^--daft-conv-window is 8; allowed when not causal
flowformer_lm --flow-short-conv -1 | --flow-short-conv is -1; allowed: an integer of at least 1
flowformer_lm --adaptive-softmax-cutoff 20,40 --adaptive-input --adaptive-input-cutoff 20,50 --tie-adaptive-weights \
| --adaptive-input-cutoff is 20,50 and --adaptive-softmax-cutoff is 20,40
flowformer_lm --tie-adaptive-weights | --tie-adaptive-weights is given; allowed: with --adaptive-input
flowformer_lm --lineartime-post-norm --decoder-normalize-before | --decoder-normalize-before is given
flowformer_lm --task masked_lm | --task is masked_lm; allowed with --arch flowformer_lm: language_modeling
daft_conv_lm_enwik8 --task masked_lm | --task is masked_lm; allowed with --arch daft_conv_lm_enwik8: language_modeling
daft_full_lm_cifar10 --lineartime-post-norm --decoder-normalize-before | --decoder-normalize-before is given
flow_lm --lineartime-decay-linear-only --optimizer composite | --optimizer is composite; allowed with --lineartime-decay
flow_lm --flow-competition softmax_heads | --flow-competition is 'softmax_heads'; allowed with causal
hybrid_lm --lineartime-layers gla*3 | --lineartime-layers is 'gla.3', a pattern of 3 layers; allowed: of at most 2
hybrid_lm --lineartime-layers nystrom | --lineartime-layers is 'nystrom', with 'nystrom'; allowed: .*softmax
hybrid_lm --lineartime-layers flow --local-window 3 | --local-window is 3 and --lineartime-layers 'flow'; allowed: with
flow_lra_text --encoder-attention-dim 0 | --encoder-attention-dim is 0; allowed
flow_lra_text --encoder-attention-heads 3 | --encoder-attention-heads is 3; allowed
flow_lra_text --classifier-dim -1 | --classifier-dim is -1; allowed
combiner_lra_image --encoder-attention-dim 8 | --encoder-attention-dim is 8; .*combiner .*--encoder-embed-dim, 16
flowformer_time_series --encoder-embed-dim 0 | --encoder-embed-dim is 0; allowed
flowformer_time_series --flow-clamp -1 | --flow-clamp is -1
linear_time_series --encoder-attention-heads 3 | ^--encoder-attention-heads is 3; allowed: .* --encoder-[a-z-]+dim
tcn_time_series --tcn-channels 0 | --tcn-channels is 0; allowed
flowformer_decision --decoder-embed-dim 0 | --decoder-embed-dim is 0; allowed
linear_decision --decoder-attention-heads 3 | --decoder-attention-heads is 3; allowed
awac_decision --awac-target-rate 1.5 | --awac-target-rate is 1.5; allowed
flow_wav2vec2 --crop-seq-to-multiple 0 | --crop-seq-to-multiple is 0.*at least 1
cosformer_wav2vec2 --required-seq-len-multiple 0 | --required-seq-len-multiple is 0.*at least 1
hedgehog_lm --lineartime-trained-parameters all --criterion attention_transfer | parameters is all; allowed.*new
softmax_lm --lineartime-trained-parameters attention | softmax attention alone; allowed .*attention_transfer
linear_lm --lineartime-trained-parameters new | --lineartime-trained-parameters is new.*linear attention has no
flow_wav2vec2 --layer-type conformer --pos-enc-type rope | --pos-enc-type is rope.*abs
flow_wav2vec2 --layer-type conformer --attn-type espnet | --attn-type .*not given
flow_wav2vec2 --encoder-attention-heads 3 | --encoder-attention-heads is 3.*divisor
flow_wav2vec2 --conv-feature-layers exit() | conv_feature_layers .*exit.*no code
flow_wav2vec2 --conv-feature-layers [(1,1,1)]*101 | conv_feature_layers .*101.*no code
cosformer_wav2vec2 --lineartime-max-frames 0 | --lineartime-max-frames is 0.*at least 1
flow_wav2vec2 --lineartime-block-frames 0 | --lineartime-block-frames is 0.*at least 1
s2t_conformer_flow --pos-enc-type rope | --pos-enc-type is rope.*abs
s2t_flow --load-pretrained-encoder-from none.pt | --load-pretrained-encoder-from is .*none.pt.*exists
s2t_flow --load-pretrained-encoder-from README.md | --load-pretrained-encoder-from is .*cannot be loaded.*allowed
s2t_flow --cross-linear-phi relu | --cross-linear-phi is relu.*linear alone
flowformer --lineartime-cross-attention linear --no-cross-attention | --no-cross-attention is given
flowformer --lineartime-cross-attention linear --cross-favor-features 9 | --cross-favor-features is 9
flowformer --lineartime-cross-attention flow_source --encoder-embed-dim 32 | --encoder-embed-dim is 32
flowformer --encoder-xformers-att-config {'name':'linformer'} | --encoder-xformers-att-config
flowformer --decoder-attention-heads 3 | --decoder-attention-heads is 3
""".strip().splitlines()


@pytest.mark.parametrize("row", REFUSED)
def test_a_mistake_is_named_as_it_was_typed(row: str) -> None:
    """One line with the option, its value and what is allowed."""
    (arch, *words), said = row.split(" | ")[0].split(), row.split(" | ")[1]
    with pytest.raises(ValueError, match=said) as raised:
        build(arch, *words)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", models("_lm", "_mlm", "_classifier", "_time_series", "_decision"))
def test_every_option_of_a_size_is_named(name: str) -> None:
    side = "decoder" if "--decoder-attention-heads" in flags_of(name) else "encoder"
    flags = [x for x in flags_of(name) if x.endswith(("-chunk-size", "-row-length", "-query-dim"))]
    for flag, value in [(f"--{side}-attention-heads", "3"), *((flag, "-1") for flag in flags)]:
        if flag in flags_of(name):
            with pytest.raises(ValueError, match=f"^{re.escape(flag)} is {value}; allowed"):
                build(name, flag, value)


@pytest.mark.parametrize("call", [{"attn_mask": torch.zeros(5, 5)}, {"static_kv": True}, {"need_weights": True},
                                  {"key": torch.zeros(5, 2, 16)}], ids=lambda call: next(iter(call)))  # fmt: skip
def test_what_an_attention_cannot_do_is_refused(call: dict[str, object]) -> None:
    """What only a softmax over keys can do is an error, never a different result."""
    attention = build("flow_lm").decoder.layers[0].self_attn
    with pytest.raises(ValueError, match=f"{next(iter(call))}.*allowed"):
        attention(torch.zeros(5, 2, 16), **call)
    attention = build("flow", "--lineartime-cross-attention", "linear").decoder.layers[0].encoder_attn
    if "attn_mask" in call:
        with pytest.raises(ValueError, match="attn_mask .*allowed"):
            attention(torch.zeros(5, 2, 16), *[torch.zeros(7, 2, 16)] * 2, **call)


@pytest.mark.parametrize("words", ["--mha-heads-to-keep 2", "--ffn-blocks-to-remove 1 --flash-attention-gate"])
def test_pruning_that_works_is_allowed(words: str) -> None:
    """Heads of an attention without parameters of its own, and blocks of any plain feed-forward layer."""
    build("transformer_plus_mlm", *words.split())


UNKNOWN = """
flash_quad_mlm --flash-first-to-all
transformer_plus_mlm --flash-first-softmax
performer_mlm --flash-kernel=relu2
flash_lm --flash-first-to-all
flow_mlm --flow-forget=head
softmax_lm --softmax-short-conv=3
flow --lineartime-cross-attention=nope
linear_classifier --lineartime-reset-at-eos
""".strip().splitlines()


@pytest.mark.parametrize("row", UNKNOWN)
def test_options_of_other_models_are_unknown(row: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        build(*row.split())
    assert row.split()[1].partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", models("_lm", "_mlm", "_classifier"))
def test_every_option_has_a_help_text_and_a_name_of_its_own(name: str) -> None:
    stock = set(flags_of(kind_of(name).stock))
    for flag, action in flags_of(name).items():
        assert flag in stock or len(action.help) >= 15, flag
