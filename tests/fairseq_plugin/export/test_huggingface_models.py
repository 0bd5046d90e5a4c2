"""Models for transformers compute what the same models of fairseq compute; and their generation and cache."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from common.huggingface import LineartimeCache, LineartimeConfig, LineartimeForCausalLM
from tests.compare import assert_close, weights
from tests.fairseq_plugin.helpers.huggingface_models import (
    cache_of,
    classifiers,
    encoder_decoder,
    language_models,
    left_padded,
    masked,
)
from tests.fairseq_plugin.helpers.text import PAD, tokens

SHARED = ("--share-decoder-input-output-embed",)
#: Language models, by the name of a test: every part of a layer, and every kind of state, at least once.
CAUSAL = {
    "flow": ("flowformer_lm",),
    "flow-post-norm": (
        *("flowformer_lm", "--lineartime-post-norm", "--decoder-learned-pos", "--share-decoder-input-output-embed"),
        *("--layernorm-embedding", "--activation-fn", "gelu_accurate"),
    ),
    "flow-documents": ("flowformer_lm", "--lineartime-reset-at-eos"),
    "linear-gates": ("linear_lm", "--linear-forget", "head", "--linear-short-conv", "4"),
    "projections": ("linear_lm", "--decoder-input-dim", "24", "--decoder-output-dim", "24", *SHARED),
    "output-projection": ("flowformer_lm", "--decoder-output-dim", "24"),
    "gated-delta": ("gated_delta_lm", "--gated-delta-short-conv", "4", "--no-scale-embedding"),
    "softmax": ("softmax_lm", "--no-token-positional-embeddings"),
    "favor": ("favor_lm", "--favor-redraw", "5"),
    "rfa-gate": ("rfa_gate_lm",),
    "cosformer": ("cosformer_lm",),
    "retention": ("retention_lm",),
    "daft-conv": ("daft_conv_lm",),
    "daft-full": ("daft_full_lm",),
    "hybrid": ("hybrid_lm", "--lineartime-layers", "flow,softmax"),
    "flash": ("flash_lm", "--share-decoder-input-output-embed"),
    "flash-gates": ("flash_lm", "--flash-forget", "channel", "--decoder-learned-pos"),
    "flash-quad": ("flash_quad_lm", "--flash-norm", "scalenorm"),
    "transformer-pp": ("transformer_pp_lm", "--flash-attention-gate", "--flash-norm", "scalenorm"),
}
#: Some of them, for slower tests.
SOME = ("flow-post-norm", "projections", "gated-delta", "hybrid", "flash")


def of(name: str) -> tuple[torch.nn.Module, LineartimeForCausalLM]:
    return language_models(*CAUSAL[name])


@pytest.fixture
def sequences() -> tuple[Tensor, Tensor]:
    """Tokens of three rows with padding on either side and eos in the middle, and transformers' mask."""
    sequence = tokens(3, 21)
    sequence[:, 9] = 2
    sequence[0, :4] = PAD
    sequence[1, 15:] = PAD
    return sequence, sequence.ne(PAD).long()


def real(x: Tensor, mask: Tensor) -> Tensor:
    """The real tokens (R, V) of x (B, n, V)."""
    return x[mask.bool()]


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_are_those_of_fairseq(name: str, sequences: tuple[Tensor, Tensor]) -> None:
    (host, model), (sequence, mask) = of(name), sequences
    expected = real(host(sequence)[0], mask)
    assert_close("logits", real(model(sequence, mask).logits, mask), expected, 1e-6)
    assert_close("without a mask", real(model(sequence).logits, mask), expected, 1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_in_half_precision_logits_are_those_of_fairseq(name: str, sequences: tuple[Tensor, Tensor]) -> None:
    host, model = (copy.deepcopy(x).bfloat16() for x in of(name))
    sequence, mask = sequences
    assert_close("logits", real(model(sequence, mask).logits, mask), real(host(sequence)[0], mask))


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_a_cache_goes_on(name: str, sequences: tuple[Tensor, Tensor], tmp_path) -> None:
    """Tokens in several calls, one by one or many at once, from memory or from a file, give the logits of one call."""
    model, (sequence, mask) = of(name)[1], sequences
    whole = model(sequence, mask).logits
    first = model(sequence[:, :12], mask[:, :12], use_cache=True)
    cache_of(first).save(tmp_path / "cache.safetensors")
    step = model(sequence[:, 12:13], mask[:, :13], cache=cache_of(first))
    rest = model(sequence[:, 13:], mask, cache=cache_of(step))
    assert cache_of(rest).get_seq_length() == 21
    parts = torch.cat([first.logits, step.logits, rest.logits], dim=1)
    assert_close("in parts", real(parts, mask), real(whole, mask))
    loaded = LineartimeCache.load(tmp_path / "cache.safetensors")
    rest = model(sequence[:, 12:], mask[:, 12:], cache=loaded)
    assert_close("after loading", real(rest.logits, mask[:, 12:]), real(whole[:, 12:], mask[:, 12:]))


@torch.no_grad()
@pytest.mark.parametrize("name", SOME)
def test_rows_of_a_cache_can_be_chosen_repeated_and_forgotten(name: str) -> None:
    model, sequence = of(name)[1], tokens(3, 9)
    cache = cache_of(model(sequence[:, :6], use_cache=True))
    for change, rows in (
        (lambda x: x.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda x: x.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
        (lambda x: x.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    ):
        changed = cache.copy()
        change(changed)
        logits = model(sequence[rows, 6:], cache=changed).logits
        assert_close("logits", logits, model(sequence[rows]).logits[:, 6:])
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-1)
    cache.crop(0)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_close("after a reset", model(sequence, cache=cache).logits, model(sequence).logits)


def generated(model: LineartimeForCausalLM, inputs: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    """The seven tokens that follow ``inputs``."""
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, **options}
    return model.generate(inputs, attention_mask=mask, **options)[:, inputs.shape[1] :]


@pytest.mark.parametrize("options", ({}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}), ids=str)
@pytest.mark.parametrize("name", SOME)
def test_a_padded_batch_generates_what_each_prompt_does_alone(name: str, options: dict) -> None:
    model = of(name)[1]
    prompts = [tokens(1, length, seed=length)[0] for length in (3, 8, 5)]
    together = generated(model, *left_padded(prompts), **options)
    alone = torch.cat([generated(model, prompt[None], **options) for prompt in prompts])
    assert torch.equal(together, alone)
    assert torch.equal(together, generated(model, *left_padded(prompts), use_cache=False, **options))


def test_sampling_generates_several_sequences_and_goes_on_from_a_cache() -> None:
    model, prompt = of("flow")[1], tokens(2, 6)
    torch.manual_seed(1)
    several = generated(model, prompt, do_sample=True, num_return_sequences=3)
    assert several.shape == (6, 7)
    assert len(several.unique(dim=0)) > 2
    greedy = generated(model, prompt)
    with torch.no_grad():
        cache = cache_of(model(prompt[:, :4], use_cache=True))
    assert torch.equal(generated(model, prompt[:, 4:], cache=cache.copy()), greedy)
    mask = torch.ones_like(prompt)
    assert torch.equal(generated(model, prompt[:, 4:], mask[:, 4:], cache=cache.copy()), greedy)
    assert torch.equal(generated(model, prompt[:, 4:], mask, cache=cache.copy()), greedy)
    with pytest.raises(ValueError, match="attention_mask has shape .*5.; allowed: .*2., .*, or .*6."):
        generated(model, prompt[:, 4:], mask[:, 1:], cache=cache.copy())
    rest = tokens(2, 9, seed=3)  # more tokens than the cache has read
    longer = torch.cat([prompt[:, :4], rest], dim=1)
    assert torch.equal(generated(model, rest, torch.ones_like(rest), cache=cache.copy()), generated(model, longer))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generated(model, prompt[:, 4:], cache=cache, **beams), generated(model, prompt, **beams))
    assert cache.batch_size == 2


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    """Documents that positions tell apart, as transformers' collators pack them, give what each gives alone."""
    model, sequence = of("flow")[1], tokens(1, 15)
    positions = torch.cat([torch.arange(6), torch.arange(9)])[None]
    packed = model(sequence, position_ids=positions).logits
    alone = torch.cat([model(sequence[:, :6]).logits, model(sequence[:, 6:]).logits], dim=1)
    assert_close("logits", packed, alone)
    cache = cache_of(model(sequence[:, :8], position_ids=positions[:, :8], use_cache=True))
    assert_close("later", model(sequence[:, 8:], cache=cache).logits, alone[:, 8:])
    with pytest.raises(ValueError, match="position_ids is 3.*allowed: 0"):
        model(sequence, position_ids=torch.arange(3, 18)[None])


def test_the_loss_and_gradients_are_those_of_fairseq() -> None:
    host, model = of("flash")
    sequence = tokens(2, 12)
    loss = model(sequence, labels=sequence).loss
    scores = host(sequence[:, :-1])[0]
    expected = torch.nn.functional.cross_entropy(scores.flatten(0, 1), sequence[:, 1:].flatten())
    assert_close("loss", loss, expected, 1e-6)
    name = "decoder.layers.0.unit.in_proj.weight"
    grads = (torch.autograd.grad(x, dict(m.named_parameters())[name]) for x, m in ((loss, model), (expected, host)))
    assert_close("gradient", *(grad for (grad,) in grads))


@torch.no_grad()
@pytest.mark.parametrize("name", ("flow-post-norm", "favor", "gated-delta", "flash-gates"))
def test_a_saved_folder_loads_bit_by_bit(name: str, tmp_path) -> None:
    """A model is built without values, "on meta", and then filled: every buffer has to come back too."""
    model, sequence = of(name)[1], tokens(2, 12)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LineartimeForCausalLM
    for (key, tensor), (other_key, other) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert key == other_key
        assert torch.equal(tensor, other), key
    assert torch.equal(loaded(sequence).logits, model(sequence).logits)
    assert loaded.decoder.training is False
    buffers = dict(loaded.named_buffers())
    for key, buffer in model.named_buffers():
        assert torch.equal(buffers[key], buffer), key


def test_missing_and_foreign_weights_are_refused(tmp_path) -> None:
    model = of("flow")[1]
    state = model.state_dict()
    missing = {key: x for key, x in state.items() if key != "decoder.layers.1.fc2.weight"}
    model.save_pretrained(tmp_path / "missing", state_dict=missing)
    with pytest.raises(ValueError, match="1 missing.*layers.1.fc2.weight"):
        LineartimeForCausalLM.from_pretrained(tmp_path / "missing")
    model.save_pretrained(tmp_path / "further", state_dict={**state, "decoder.another": torch.zeros(2)})
    with pytest.raises(ValueError, match="not of this model.*decoder.another"):
        LineartimeForCausalLM.from_pretrained(tmp_path / "further")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"prompt_lookup_num_tokens": 2}, "prompt_lookup_num_tokens"),
        ({"inputs_embeds": torch.zeros(1, 4, 16)}, "input"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_generation_that_takes_tokens_back_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of("flow")[1].generate(tokens(1, 4), max_new_tokens=2, **options)


def test_bad_input_is_refused() -> None:
    model, sequence = of("flow")[1], tokens(2, 4)
    cache = cache_of(model(sequence, use_cache=True))
    for arguments, message in (
        ({"input_ids": None}, "input_ids is None"),
        ({"input_ids": sequence, "attention_mask": torch.ones(2, 3)}, r"attention_mask has shape \(2, 3\)"),
        ({"input_ids": sequence, "output_attentions": True}, "output_attentions"),
        ({"input_ids": sequence[:1], "cache": cache}, "2 rows; allowed.* 1 rows"),
        ({"input_ids": sequence, "cache": {}}, "cache is a dict"),
        ({"input_ids": sequence, "cache": cache, "use_cache": False}, "use_cache is False"),
        ({"input_ids": sequence, "cache": cache_of(of("flash")[1](sequence, use_cache=True))}, "initial_state"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**arguments)
    with pytest.raises(ValueError, match="41 tokens; allowed: 40"):
        of("flow-post-norm")[1](tokens(1, 41))


#: Masked models and classifiers.
MASKED = {
    "flow": ("flowformer_mlm", "--encoder-learned-pos"),
    "post-norm": ("softmax_mlm", "--lineartime-post-norm", "--lineartime-norm-eps", "1e-3", "--untie-weights-roberta"),
    "bigbird": ("bigbird_mlm",),
    "documents": ("flowformer_mlm", "--lineartime-reset-at-eos"),
    "flash": ("flash_mlm",),
    "flash-first": ("flash_mlm", "--flash-first-softmax", "--flash-first-to-all"),
    "combiner": ("combiner_mlm",),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MASKED)
def test_logits_of_a_masked_model_are_those_of_fairseq(name: str, sequences: tuple[Tensor, Tensor], tmp_path) -> None:
    (host, model), (sequence, mask) = masked(*MASKED[name]), sequences
    logits = model(sequence, mask, labels=sequence).logits
    assert_close("logits", real(logits, mask), real(host(sequence)[0], mask), 2e-6)
    if name in ("bigbird", "post-norm"):
        model.save_pretrained(tmp_path)
        assert torch.equal(type(model).from_pretrained(tmp_path)(sequence, mask).logits, logits)


CLASSIFIERS = {
    "first": ("flowformer_classifier",),
    "mean": ("linear_classifier", "--pooling", "mean", "--classifier-style", "arena", "--encoder-attention-dim", "16"),
    "flash": ("flash_classifier", "--classifier-dim", "12"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_of_a_classifier_are_those_of_fairseq(name: str, sequences: tuple[Tensor, Tensor], tmp_path) -> None:
    (host, model), (sequence, mask) = classifiers(*CLASSIFIERS[name]), sequences
    expected = host(sequence, classification_head_name="sentence_classification_head")[0]
    output = model(sequence, mask, labels=torch.tensor([0, 2, 1]))
    assert_close("scores", output.logits, expected, 2e-6)
    assert_close("loss", output.loss, torch.nn.functional.cross_entropy(expected, torch.tensor([0, 2, 1])), 2e-6)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(sequence, mask).logits, output.logits)


ENCODER_DECODERS = {
    "flow": ("flowformer",),
    "flow-source": ("flowformer", "--lineartime-cross-attention", "flow_source", "--share-all-embeddings"),
    "cosformer": ("cosformer", "--lineartime-cross-attention", "cosformer", "--decoder-normalize-before"),
    "linear": ("linear", "--lineartime-cross-attention", "linear", "--encoder-normalize-before"),
    "longformer": ("longformer",),
}


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_logits_of_an_encoder_decoder_are_those_of_fairseq(
    name: str, sequences: tuple[Tensor, Tensor], tmp_path
) -> None:
    (host, model), (source, mask) = encoder_decoder(*ENCODER_DECODERS[name]), sequences
    target = torch.cat([torch.full((3, 1), 2), tokens(3, 9, seed=1)], dim=1)
    expected = host(source, None, target)[0]
    logits = model(source, mask, target).logits
    assert_close("logits", logits, expected, 2e-6)
    first = model(source, mask, target[:, :4], use_cache=True)
    second = model(source, mask, target[:, 4:], cache=cache_of(first))
    assert_close("in parts", torch.cat([first.logits, second.logits], dim=1), expected)
    labels = target[:, 1:]
    output = model(source, mask, labels=labels)
    expected_loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), labels.flatten())
    assert_close("loss", output.loss, expected_loss, 2e-6)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(source, mask, target).logits, logits)


@pytest.mark.parametrize("name", ("flow", "flow-source", "cosformer"))
def test_a_padded_batch_of_sources_generates_what_each_does_alone(name: str) -> None:
    model = encoder_decoder(*ENCODER_DECODERS[name])[1]
    sources = [tokens(1, length, seed=length)[0] for length in (4, 9)]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 3}
    together, mask = left_padded(sources)
    batch = model.generate(together, attention_mask=mask, **options)
    assert torch.equal(batch, model.generate(together, **options))  # padding is seen in the tokens
    alone = [model.generate(source[None], **options) for source in sources]
    assert torch.equal(batch, torch.cat(alone))


def test_a_configuration_refuses_what_no_model_has() -> None:
    config = of("flow")[1].config
    fields = config.to_dict()
    for change, message in (
        ({"attention": [{"kind": "flaw"}]}, "attention.0. is of kind 'flaw'.*flow"),
        ({"attention": [{"kind": "flow", "option": 1}]}, "option.*options"),
        ({"family": "gau"}, "allowed in family gau"),
        ({"lineartime_version": "99.0"}, "lineartime_version is 99.0"),
        ({"pooling": "middle"}, "pooling"),
    ):
        with pytest.raises(ValueError, match=message):
            LineartimeConfig(**{**fields, **change})
    for change, message in (
        ({"attention": None}, "attention is None"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3"),
        ({"positions": "rotary"}, "positions"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ({"attention": [{"kind": "flow", "options": {"phi": "cosine"}}]}, "phi"),
    ):
        with pytest.raises(ValueError, match=message):
            LineartimeForCausalLM(LineartimeConfig(**{**fields, **change}))


def test_names_of_weights_are_those_of_fairseq() -> None:
    """Export is the identity on weights."""
    for host, model in (of("flash"), masked(*MASKED["flow"]), encoder_decoder(*ENCODER_DECODERS["flow"])):
        names = {name for name in host.state_dict() if not name.endswith("version")}
        assert names == set(model.state_dict())
        assert weights(model.state_dict()).keys() <= names
