"""transformers' generation: every public entry and setting, and texts that go on from a cache or from its file."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, pipeline
from transformers.generation import GenerationMixin

from common.files.tensor_files import read_safetensors, save_safetensors
from common.huggingface import LineartimeCache, LineartimeForCausalLM, LineartimeForSeq2SeqLM
from common.huggingface.generation import CACHE_FIELD

from .models import byte_tokenizer, language_model, padded, small, stock_model, texts

#: Attentions with every kind of state.
ATTENTIONS = [{"kind": "linear"}, {"kind": "gated_delta", "options": {"short_conv": 3}}, {"kind": "softmax"}]
SEVEN = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}


@pytest.fixture(scope="module")
def model() -> LineartimeForCausalLM:
    """A language model in evaluation mode."""
    return language_model(ATTENTIONS)


@torch.no_grad()
def read(model: nn.Module, ids: Tensor, cache: Any = None) -> Any:
    """The cache after ``ids``."""
    cache = LineartimeCache() if cache is None else cache
    model(ids, attention_mask=ids.ne(1).long(), use_cache=True, past_key_values=cache)
    return cache


def watched(model: nn.Module, name: str = "input_ids") -> tuple[nn.Module, list[int]]:
    """A copy of the model, and a list to which each of its calls adds its number of tokens."""
    model, seen = copy.deepcopy(model), []
    model.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs[name].shape[1]), with_kwargs=True)
    return model, seen


@pytest.mark.parametrize("form", ["whole", "next"])
def test_a_prefix_is_read_once_as_by_a_stock_model(form: str, model: nn.Module) -> None:
    """transformers' documentation: the whole text with a copy of the cache of its beginning, or a mask of all of it."""
    whole, stock = padded(texts(12, 12)), stock_model()
    given = {"input_ids": whole if form == "whole" else whole[:, 5:], "attention_mask": torch.ones_like(whole)}
    for each, cache in ((model, LineartimeCache()), (stock, DynamicCache(config=stock.config))):
        expected = each.generate(whole, **SEVEN)
        read(each, whole[:, :5], cache)
        each, seen = watched(each)
        found = each.generate(**given, past_key_values=copy.deepcopy(cache), **SEVEN)
        assert seen == [7, *[1] * 6]
        assert torch.equal(found[:, -7:], expected[:, -7:]) and torch.equal(found[:, :-7], given["input_ids"])


@pytest.mark.parametrize("beams, left, with_mask", [(1, True, False), (3, False, True), (3, True, False)])
def test_rows_of_different_lengths_go_on(beams: int, left: bool, with_mask: bool, model: nn.Module) -> None:
    """Their beginnings have other padding; the cache may be repeated for beams already, and is not changed."""
    beginnings, ends = texts(3, 7, 5), texts(6, 1, 3, seed=1, first=9)
    whole = padded([torch.cat(pair) for pair in zip(beginnings, ends)])
    mask = {"attention_mask": whole.ne(1).long()}
    expected = model.generate(whole, **mask, num_beams=beams, **SEVEN)
    cache = read(model, padded(beginnings, left))
    repeated = cache.copy()
    repeated.batch_repeat_interleave(beams)
    for given in (cache, repeated):
        found = model.generate(whole, past_key_values=given, num_beams=beams, **SEVEN, **(mask if with_mask else {}))
        assert torch.equal(found, expected)
    assert beams == 1 or cache.batch_size == 3, "the caller's own is copied where it has to be repeated"


def _saved(cache: LineartimeCache, folder: Path) -> LineartimeCache:
    cache.save(folder / "cache")
    return LineartimeCache.load(folder / "cache")


#: What can be done to a cache of three rows, and which of these rows are its rows then.
CHANGES: dict[str, tuple[Callable[[LineartimeCache, Path], Any], list[int]]] = {
    "reordered": (lambda x, _: x.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
    "selected": (lambda x, _: x.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
    "masked": (lambda x, _: x.batch_select_indices(torch.tensor([False, True, False])), [1]),
    "repeated": (lambda x, _: x.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    "cropped": (lambda x, _: x.crop(0), [0, 1, 2]),
    "pickled": (lambda x, _: copy.deepcopy(x), [0, 1, 2]),
    "saved": (_saved, [0, 1, 2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_cache_knows_what_its_rows_have_read(name: str, model: nn.Module, tmp_path: Path) -> None:
    """It goes on from those texts, and refuses others before anything is computed."""
    change, rows = CHANGES[name]
    beginnings, ends = texts(3, 7, 5), texts(6, 1, 3, seed=1, first=9)
    cache = read(model, padded(beginnings))
    cache = change(cache, tmp_path) or cache
    whole = padded([torch.cat([beginnings[i], ends[i]]) for i in rows])
    mask = {"attention_mask": whole.ne(1).long()}
    found = model.generate(whole, past_key_values=cache.copy(), **mask, **SEVEN)
    assert torch.equal(found, model.generate(whole, **mask, **SEVEN))
    other = whole.clone()
    other[-1, -len(ends[rows[-1]]) - 1] += 1  # the last token that was read
    each, seen = watched(model)
    with pytest.raises(ValueError, match="(?s)input_ids.*allowed"):
        each.generate(other, past_key_values=cache.copy(), **mask, **SEVEN)
    assert seen == []


def test_texts_that_are_neither_whole_nor_next_are_refused(model: nn.Module) -> None:
    """In one line, before anything is computed; what a mask says to be next tokens is taken as such."""
    (text,) = texts(9)
    cache, (each, seen) = read(model, text[None, :6]), watched(model)
    narrow = {"attention_mask": torch.ones(1, 8)}
    for given, more, message in (
        (text[None, :6], {}, "input_ids has no token in row 0 after the 6"),
        (text[None, :4], {}, "input_ids does not begin in row 0 with the 6 tokens .* attention_mask of 10 columns"),
        (torch.cat([text[:5], text[4:]])[None], {}, "input_ids does not begin in row 0.* attention_mask of 16 columns"),
        (text.repeat(2, 1), {}, "cache has 1 rows; allowed: 2"),
        (text[None], narrow, r"attention_mask has shape \(1, 8\); allowed: \(1, 9\), .* or \(1, 15\)"),
        (None, {}, "input_ids is None; allowed with a cache"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            each.generate(given, past_key_values=cache.copy(), **more, **SEVEN)
        assert "\n" not in str(caught.value)
    assert seen == []
    again = torch.cat([text[:6], text[:4]])[None]
    found = model.generate(text[None, :4], attention_mask=torch.ones(1, 10), past_key_values=cache, **SEVEN)
    assert torch.equal(found[:, 4:], model.generate(again, **SEVEN)[:, 10:])


def test_a_chat_of_growing_texts_reads_each_token_once(model: nn.Module) -> None:
    """Each turn gives the whole text, with the cache of the turn before; so does ``pipeline``."""
    tokenizer, cache = byte_tokenizer(), LineartimeCache()
    ids = tokenizer("a question", return_tensors="pt").input_ids
    each, seen = watched(model)
    for turn in ("another one", "and the last"):
        answer = each.generate(ids, past_key_values=cache, **SEVEN)
        assert torch.equal(answer, model.generate(ids, **SEVEN))
        assert cache.columns == sum(seen) == answer.shape[1] - 1
        ids = torch.cat([answer, tokenizer(turn, return_tensors="pt").input_ids], dim=1)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    cache = read(model, tokenizer("You are brief. ", return_tensors="pt").input_ids)
    options = {"max_new_tokens": 7, "do_sample": False}
    expected = generator("You are brief. And so?", **options)
    assert generator("You are brief. And so?", past_key_values=cache, **options) == expected


@torch.no_grad()
def test_a_target_goes_on_and_is_asked_for() -> None:
    """The whole target with the cache of its beginning; without a target, the error is about the target."""
    translator = small(LineartimeForSeq2SeqLM).eval()
    source, target, cache = padded(texts(6, 6)), padded(texts(8, 8, seed=1)), LineartimeCache()
    translator(source, decoder_input_ids=target[:, :5], cache=cache)
    expected = translator.generate(source, decoder_input_ids=target, **SEVEN)
    each, seen = watched(translator, "decoder_input_ids")
    found = each.generate(source, decoder_input_ids=target, past_key_values=cache.copy(), **SEVEN)
    assert torch.equal(found, expected) and seen[0] == 3
    seen.clear()
    for given, message in (
        (target[:, [0, *range(2, 8)]], "decoder_input_ids does not begin in row 0 with the 5 tokens"),
        (target[:, 5:], r"decoder_input_ids begins with \d+; allowed with a cache: 2"),
        (None, "decoder_input_ids is None; allowed with a cache"),
    ):
        with pytest.raises(ValueError, match=message):
            each.generate(source, decoder_input_ids=given, past_key_values=cache.copy(), **SEVEN)
    assert seen == []
    with pytest.raises(ValueError, match="decoder_input_ids and labels are None; allowed"):
        translator(source)


#: Public members of ``GenerationMixin``; a new one has to be put into one of the two sets.
WORK = {
    *("generate", "prepare_inputs_for_generation", "compute_transition_scores", "heal_tokens", "output_modalities"),
    *("load_custom_generate", "adjust_generation_fn", "destroy_cached_continuous_batching_manager"),
}
REFUSED = {"generate_batch", "init_continuous_batching", "continuous_batching_context_manager"}


def test_every_entry_of_generation_works_or_is_refused(model: nn.Module) -> None:
    """Refused in one line when it is called, before there are pages or threads."""
    public = {name for name in dir(GenerationMixin) if not name.startswith("_")}
    assert public - WORK == REFUSED & public
    for name in REFUSED:
        with pytest.raises(ValueError, match=f"{name} is called; allowed.*: generate"):
            getattr(model, name)([[4, 5]], GenerationConfig(max_new_tokens=2))
    model.destroy_cached_continuous_batching_manager()
    ids = padded(texts(6, 6))
    out = model.generate(ids, num_beams=2, return_dict_in_generate=True, output_scores=True, **SEVEN)
    scores = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    assert torch.allclose(scores.sum(1) / 7, out.sequences_scores, atol=1e-5)
    custom = model.generate(ids, custom_generate=lambda model, input_ids, **_: input_ids.flip(1))
    assert torch.equal(custom, ids.flip(1))
    assert len(model.heal_tokens(ids, byte_tokenizer())) == 2


#: Values of settings that cannot work, or would have no effect.
WITHOUT_EFFECT = {
    **{"assistant_model": 1, "prompt_lookup_num_tokens": 2, "assistant_early_exit": 1, "use_mtp": True},
    **{"speculation_type": "dflash", "is_assistant": True, "penalty_alpha": 0.6, "low_memory": True},
    **{"cache_implementation": "static", "cache_config": {}, "max_cache_len": 9, "compile_config": object()},
    "continuous_batching_config": object(),
}
#: Those that act on scores, lengths, stops and outputs, in transformers' own code; that it refuses itself; and of
#: assistants, which have default values in any configuration.
OF_EVERY_MODEL = """
max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams use_cache
temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
length_penalty no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias token_healing
guidance_scale watermarking_config num_return_sequences output_attentions output_hidden_states output_scores
output_logits return_dict_in_generate pad_token_id bos_token_id eos_token_id encoder_no_repeat_ngram_size
decoder_start_token_id disable_compile prefill_chunk_size transformers_version dola_layers constraints force_words_ids
num_beam_groups diversity_penalty num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
assistant_lookbehind assistant_ensemble_weight target_lookbehind max_matching_ngram_size
""".split()


def test_every_setting_of_generation_acts_or_is_refused(model: nn.Module) -> None:
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names <= WITHOUT_EFFECT.keys() | set(OF_EVERY_MODEL)
    ids = padded(texts(6, 6))
    for name, value in WITHOUT_EFFECT.items():
        with pytest.raises(ValueError, match=f"{name} is given; allowed for LineartimeForCausalLM: None"):
            model.generate(ids, **{name: value}, **SEVEN)
    for name, value in {"dola_layers": "low", "force_words_ids": [[5]], "num_beam_groups": 2}.items():
        with pytest.raises(ValueError, match="trust_remote_code"):
            model.generate(ids, **{name: value}, num_beams=1 if name == "dola_layers" else 2, **SEVEN)


@pytest.mark.parametrize(
    "options",
    [{"prefill_chunk_size": 4, "num_beams": 2}, {"guidance_scale": 1.5}, {"num_return_sequences": 2}],
    ids=str,
)
def test_options_give_with_a_cache_what_they_give_without(options: dict[str, Any], model: nn.Module) -> None:
    """A prompt in chunks, guidance, and several sampled answers; also after the cache of the prompt's beginning."""
    whole = padded(texts(13, 9))
    mask, beginning = whole.ne(1).long(), whole[:, :6]
    options = {**SEVEN, **options, "do_sample": "num_return_sequences" in options}
    plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    results = []
    for cache in ({"use_cache": False, **plain}, options, {CACHE_FIELD: read(model, beginning), **options}):
        torch.manual_seed(5)
        results.append(model.generate(whole, attention_mask=mask, **cache))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# Files of a cache whose digest is right and whose content is not

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def renamed(old: str, new: str) -> Change:
    """A change of the beginning of names."""
    return lambda x: {new + name[len(old) :] if name.startswith(old) else name: tensor for name, tensor in x.items()}


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """A change of one tensor."""
    return lambda x: {**x, name: change(x[name])}


def without(name: str) -> Change:
    """A change that leaves out what begins with ``name``."""
    return lambda x: {key: tensor for key, tensor in x.items() if not key.startswith(name)}


#: Refused when it is loaded.
WRONG_FILES = (
    *(renamed("self.0.", name) for name in ("selves.0.", "self.x.", "self.-1.", f"self.{'9' * 5000}.")),
    *(renamed("seen.first", "seen.last"), without("self.0."), without("self."), without("seen.fingerprint")),
    *(replaced("seen.count", Tensor.float), replaced("seen.read", lambda x: x[:, None])),
    *(replaced(name, lambda x: x[:1]) for name in ("seen.read", "self.0.sum_kv")),
    replaced("self.0.sum_kv", lambda x: x[0, 0, 0, 0]),
)
#: Refused when it is used: changes that only the model of the cache can know.
WRONG_FOR_THE_MODEL = (
    *(renamed("self.0.sum_kv", "self.0.sum"), renamed("self.1.", "source.0."), without("self.1.k"), without("self.1.")),
    *(replaced("self.0.sum_kv", change) for change in (lambda x: x[..., 1:], Tensor.half, Tensor.long)),
    replaced("self.1.k", lambda x: x[..., 1:]),
)


@torch.no_grad()
def test_a_file_with_another_content_is_refused(tmp_path: Path) -> None:
    model, path = language_model([{"kind": "linear"}, {"kind": "softmax"}]), tmp_path / "cache"
    read(model, torch.tensor([[2, 4, 5], [2, 6, 7]])).save(path)
    tensors, metadata = read_safetensors(path)
    for change in (*WRONG_FILES, *WRONG_FOR_THE_MODEL):
        save_safetensors(change(dict(tensors)), path, metadata)
        with pytest.raises(ValueError, match="allowed") as caught:
            cache = LineartimeCache.load(path)
            assert change in WRONG_FOR_THE_MODEL
            model(torch.tensor([[8], [9]]), cache=cache)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    for columns in ("", "-1", "1.5", "\u0663", "9" * 5000):
        save_safetensors(tensors, path, dict.fromkeys(metadata, columns))
        with pytest.raises(ValueError, match="holds no cache; allowed: a file of LineartimeCache.save"):
            LineartimeCache.load(path)
