"""Every entry and setting of transformers' generation, and texts that go on from a cache."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, pipeline
from transformers.generation import GenerationMixin

from common.huggingface import LineartimeCache, LineartimeConfig, LineartimeForCausalLM, LineartimeForSeq2SeqLM
from common.huggingface.generation import CACHE_FIELD

from .tiny_folders import byte_tokenizer, language_model

#: Attentions with every kind of state.
ATTENTIONS = [{"kind": "linear"}, {"kind": "gated_delta", "options": {"short_conv": 3}}, {"kind": "softmax"}]
SEVEN = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
ALLOWED = "allowed"


@pytest.fixture(scope="module")
def model() -> LineartimeForCausalLM:
    """A language model in evaluation mode."""
    return language_model(ATTENTIONS)


@pytest.fixture(scope="module")
def stock() -> LlamaForCausalLM:
    """A stock language model of the same vocabulary."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, **ids))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def texts(*lengths: int, seed: int = 0, first: int = 2) -> list[Tensor]:
    """Rows of random tokens after the token that begins a text."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 260, (length,), generator=generator) for length in lengths]
    for row in rows:
        row[:1] = first
    return rows


def padded(rows: list[Tensor], left: bool = True) -> Tensor:
    """Rows of different lengths as one tensor."""
    longest = max(map(len, rows))
    sides = [((longest - len(row), 0) if left else (0, longest - len(row))) for row in rows]
    return torch.stack([nn.functional.pad(row, side, value=1) for row, side in zip(rows, sides)])


@torch.no_grad()
def read(model: nn.Module, ids: Tensor, cache: Any = None) -> Any:
    """The cache after ``ids``."""
    cache = LineartimeCache() if cache is None else cache
    model(ids, attention_mask=ids.ne(1).long(), use_cache=True, past_key_values=cache)
    return cache


def widths(model: nn.Module) -> list[int]:
    """A list to which each call of the model adds its number of tokens."""
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, inputs: seen.append(inputs["input_ids"].shape[1]), with_kwargs=True)
    return seen


@pytest.mark.parametrize("form", ["whole", "next"])
def test_a_prefix_is_read_once_as_by_a_stock_model(form: str, model: nn.Module, stock: nn.Module) -> None:
    """transformers' documentation: the whole text with a copy of the cache of its beginning, or a mask of all of it."""
    whole = padded(texts(12, 12))
    given = {"input_ids": whole if form == "whole" else whole[:, 5:], "attention_mask": torch.ones_like(whole)}
    for each, cache in ((model, LineartimeCache()), (stock, DynamicCache(config=stock.config))):
        each = copy.deepcopy(each)
        expected = each.generate(whole, **SEVEN)
        read(each, whole[:, :5], cache)
        seen = widths(each)
        found = each.generate(**given, past_key_values=copy.deepcopy(cache), **SEVEN)
        assert seen == [7, *[1] * 6]
        assert torch.equal(found[:, -7:], expected[:, -7:])
        assert torch.equal(found[:, :-7], given["input_ids"])


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("with_mask", [True, False])
def test_rows_of_different_lengths_go_on(with_mask: bool, left: bool, beams: int, model: nn.Module) -> None:
    """Their beginnings are of different lengths too, and padded on any side; the cache may be repeated already."""
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


def changed_caches() -> dict[str, Callable[[LineartimeCache, Any], tuple[LineartimeCache, list[int]]]]:
    """What can be done to a cache of three rows, and which of these rows are its rows then."""

    def of(rows: list[int], change: Callable[[LineartimeCache], Any]) -> Callable:
        def apply(cache: LineartimeCache, folder: Any) -> tuple[LineartimeCache, list[int]]:
            change(cache)
            return cache, rows

        return apply

    def saved(cache: LineartimeCache, folder: Any) -> tuple[LineartimeCache, list[int]]:
        cache.save(folder / "cache")
        return LineartimeCache.load(folder / "cache"), [0, 1, 2]

    return {
        "reordered": of([2, 0, 0], lambda x: x.reorder_cache(torch.tensor([2, 0, 0]))),
        "selected": of([2, 0], lambda x: x.batch_select_indices(torch.tensor([2, 0]))),
        "masked": of([1], lambda x: x.batch_select_indices(torch.tensor([False, True, False]))),
        "repeated": of([0, 0, 1, 1, 2, 2], lambda x: x.batch_repeat_interleave(2)),
        "cropped": of([0, 1, 2], lambda x: x.crop(0)),
        "saved": saved,
    }


@pytest.mark.parametrize("name", changed_caches())
def test_a_changed_cache_knows_what_its_rows_have_read(name: str, model: nn.Module, tmp_path) -> None:
    """It goes on from those texts, and refuses others before anything is computed."""
    beginnings, ends = texts(3, 7, 5), texts(6, 1, 3, seed=1, first=9)
    cache, rows = changed_caches()[name](read(model, padded(beginnings)), tmp_path)
    whole = padded([torch.cat([beginnings[i], ends[i]]) for i in rows])
    mask = {"attention_mask": whole.ne(1).long()}
    found = model.generate(whole, past_key_values=cache.copy(), **mask, **SEVEN)
    assert torch.equal(found, model.generate(whole, **mask, **SEVEN))
    other = whole.clone()
    other[-1, -len(ends[rows[-1]]) - 1] += 1  # the last token that was read
    seen = widths(each := copy.deepcopy(model))
    with pytest.raises(ValueError, match=rf"input_ids .* in row {len(rows) - 1} .*cache; {ALLOWED}|{ALLOWED}"):
        each.generate(other, past_key_values=cache.copy(), **mask, **SEVEN)
    assert seen == []


def test_texts_that_are_neither_whole_nor_next_are_refused(model: nn.Module) -> None:
    """In one line, before anything is computed; what a mask says to be next tokens is taken as such."""
    (text,) = texts(9)
    cache, seen = read(model, text[None, :6]), widths(each := copy.deepcopy(model))
    for given, message in (
        (text[:6], "no token in row 0 after the 6"),
        (text[:4], "does not begin in row 0 with the 6 tokens .* attention_mask of 10 columns"),
        (torch.cat([text[:5], text[4:]]), "does not begin in row 0 with the 6 tokens .* attention_mask of 16 columns"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            each.generate(given[None], past_key_values=cache.copy(), **SEVEN)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="cache has 1 rows; allowed: 2"):
        each.generate(text.repeat(2, 1), past_key_values=cache.copy(), **SEVEN)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(1, 8\); allowed: \(1, 9\), .* or \(1, 15\)"):
        each.generate(text[None], attention_mask=torch.ones(1, 8), past_key_values=cache.copy(), **SEVEN)
    with pytest.raises(ValueError, match="input_ids is None; allowed with a cache"):
        each.generate(past_key_values=cache.copy(), **SEVEN)
    assert seen == []
    again = torch.cat([text[:6], text[:4]])[None]
    found = model.generate(text[None, :4], attention_mask=torch.ones(1, 10), past_key_values=cache, **SEVEN)
    assert torch.equal(found[:, 4:], model.generate(again, **SEVEN)[:, 10:])


def test_a_chat_of_growing_texts_reads_each_token_once(model: nn.Module) -> None:
    """Each turn gives the whole text, with the cache of the turn before; so does ``pipeline``."""
    tokenizer, cache = byte_tokenizer(), LineartimeCache()
    ids = tokenizer("a question", return_tensors="pt").input_ids
    seen = widths(each := copy.deepcopy(model))
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


@pytest.fixture(scope="module")
def translator() -> LineartimeForSeq2SeqLM:
    """An encoder-decoder."""
    sizes = {"vocab_size": 260, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    more = {"normalize_before": True, "final_norm": True, "positions": "sinusoidal", "max_position_embeddings": 64}
    side = {**sizes, **more, "attention": [{"kind": "flow"}]}
    fields = {**side, **{f"encoder_{name}": value for name, value in side.items()}, "is_encoder_decoder": True}
    torch.manual_seed(0)
    return LineartimeForSeq2SeqLM(LineartimeConfig(**fields, cross_attention=[{"kind": "linear"}])).eval()


@torch.no_grad()
def test_a_target_goes_on_and_is_asked_for(translator: LineartimeForSeq2SeqLM) -> None:
    """The whole target with the cache of its beginning; without a target, the error is about the target."""
    source, target = padded(texts(6, 6)), padded(texts(8, 8, seed=1))
    cache = LineartimeCache()
    translator(source, decoder_input_ids=target[:, :5], cache=cache)
    expected = translator.generate(source, decoder_input_ids=target, **SEVEN)
    seen: list[int] = []
    hook = lambda _, __, inputs: seen.append(inputs["decoder_input_ids"].shape[1])  # noqa: E731
    with_hook = translator.register_forward_pre_hook(hook, with_kwargs=True)
    found = translator.generate(source, decoder_input_ids=target, past_key_values=cache.copy(), **SEVEN)
    assert torch.equal(found, expected) and seen[0] == 3
    seen.clear()
    for given, message in (
        (target[:, [0, *range(2, 8)]], "decoder_input_ids does not begin in row 0 with the 5 tokens"),
        (target[:, 5:], r"decoder_input_ids begins with \d+; allowed with a cache: 2"),
        (None, "decoder_input_ids is None; allowed with a cache"),
    ):
        with pytest.raises(ValueError, match=message):
            translator.generate(source, decoder_input_ids=given, past_key_values=cache.copy(), **SEVEN)
    with_hook.remove()
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
    "options", [{"prefill_chunk_size": 4}, {"prefill_chunk_size": 4, "num_beams": 2}, {"guidance_scale": 1.5}], ids=str
)
def test_a_prompt_in_chunks_or_with_guidance_gives_the_same(options: dict[str, Any], model: nn.Module) -> None:
    """Also after the cache of its beginning; the other side is without any cache."""
    whole = padded(texts(13, 9))
    mask, beginning = whole.ne(1).long(), whole[:, :6]
    plain = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
    expected = model.generate(whole, attention_mask=mask, use_cache=False, **plain, **SEVEN)
    for cache in ({}, {CACHE_FIELD: read(model, beginning)}):
        assert torch.equal(model.generate(whole, attention_mask=mask, **cache, **options, **SEVEN), expected)
