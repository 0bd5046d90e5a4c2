"""Prompts that are read in one pass, and states of prompts in files, give fairseq's tokens and scores, or an error."""

import json
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks.language_modeling import LanguageModelingTask
from safetensors.torch import load_file
from torch import Tensor, nn

from common.files.tensor_files import read_safetensors, save_safetensors
from fairseq_plugin import PromptedLanguageModelingTask, PromptState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.language_models import awake, build_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import PAD, dictionary, tokens

EOS, WORDS, KNOWN = 2, 60, 40
FLOW, STOCK = "flowformer_lm", "transformer_lm"
#: Models that generate, of every kind of state and of positions: ours, and fairseq's own.
MODELS = (
    *(FLOW, "softmax_lm", "flash_lm", "combiner_lm", "transformer_pp_lm", "daft_full_lm", "daft_conv_lm"),
    *("linear_lm --linear-forget head", STOCK, f"{STOCK} --no-token-positional-embeddings"),
    f"{STOCK} --decoder-learned-pos --decoder-normalize-before",
)
#: Lengths of prompts after a text of ``KNOWN`` tokens, which differ by less and by more than what fairseq's loop reads.
LENGTHS = (3, 0, 70, 5)


def build(words: str, seed: int = 1) -> nn.Module:
    """A small model whose next words are not all alike."""
    model = awake(build_model(*words.split(), seed=seed)).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight.normal_(std=0.5)
    return model


def ensemble() -> list[nn.Module]:
    """Models of ours and of fairseq."""
    return [build(words, seed=i) for i, words in enumerate((FLOW, STOCK, "flash_lm"))]


def make_prompts(*lengths: int) -> Tensor:
    """Prompts of ``lengths``, with padding after them, as fairseq puts it."""
    rows = tokens(len(lengths), max(lengths), seed=7)
    return rows.masked_fill(torch.arange(rows.shape[1]) >= torch.tensor(lengths)[:, None], PAD)


def typed(prompts: Tensor, **places: tuple[list[int], list[int]]) -> Tensor:
    """``prompts`` with PAD, EOS or UNK at rows and columns."""
    prompts = prompts.clone()
    for name, place in places.items():
        prompts[place] = {"pad": PAD, "eos": EOS, "unk": 3}[name]
    return prompts


def make_sample(prompts: Tensor) -> dict[str, Any]:
    """A batch of ``prompts`` as the generator takes it."""
    source = torch.cat([torch.full((len(prompts), 1), EOS), prompts], dim=1)
    return {"net_input": {"src_tokens": source, "src_lengths": source.ne(PAD).sum(1)}}


def generate(models: list[nn.Module], prompts: Tensor, stock: bool = False, **options: Any) -> list:
    """The hypotheses of each prompt, the best first, by the task of prompts or by fairseq's own.

    ``options`` are of the generation, of the task, and ``prefix``, ``words``, ``extra`` and ``allowed``.
    """
    own = {name: options.pop(name) for name in ("load_state", "save_state", "prompt_block_size") if name in options}
    prefix, extra, allowed = (options.pop(name, None) for name in ("prefix", "extra", "allowed"))
    kind = LanguageModelingTask if stock else PromptedLanguageModelingTask
    task = kind(Namespace(**{"prompt_block_size": 32, **own}), dictionary(options.pop("words", WORDS)))
    settings = Namespace(**{"max_len_a": 0, "max_len_b": 120, "beam": 3, **options})
    return task.inference_step(
        task.build_generator(models, settings, None, extra, allowed), models, make_sample(prompts), prefix
    )


def check_same(actual: list, expected: list) -> None:
    """Tokens are equal, and scores are close."""
    for row, wanted in zip(actual, expected, strict=True):
        assert [x["tokens"].tolist() for x in row] == [x["tokens"].tolist() for x in wanted]
        for hypothesis, other in zip(row, wanted):
            assert_close("score", hypothesis["score"], other["score"], 1e-4)
            assert_close("scores of tokens", hypothesis["positional_scores"], other["positional_scores"], 1e-3)


def compare(models: list[nn.Module], prompts: Tensor, **options: Any) -> list:
    """Hypotheses of both tasks, which are the same."""
    found = generate(models, prompts, **options)
    check_same(found, generate(models, prompts, stock=True, **options))
    return found


def kept(models: list[nn.Module], path: Path, **options: Any) -> Tensor:
    """A text; its state is saved to ``path``."""
    text = tokens(1, KNOWN, seed=3)
    generate(models, text, save_state=str(path), **{"max_len_b": KNOWN + 2, "prompt_block_size": 32, **options})
    return text[0]


def after(text: Tensor, prompts: Tensor) -> Tensor:
    """The prompts with ``text`` (m,) in front of each."""
    return torch.cat([text.expand(len(prompts), -1), prompts], dim=1)


#: What counts the prompt: limits and scores, also at the maximum, with unknown words in it.
COUNTED: list[dict[str, Any]] = [
    {"unnormalized": True},
    {"lenpen": 0.3, "temperature": 1.7, "unkpen": 2.0},
    {"min_len": 117, "max_len_b": 119},
    {"min_len": 20, "beam": 1},
    {"max_len_a": 1, "max_len_b": 4},
    {"max_len_b": 110},
    {"prompt_block_size": 1},
]
#: Where ours differ from fairseq's, as the READMEs say; each has its own test.
OURS: list[dict[str, Any]] = [{"no_repeat_ngram_size": 2}, {"unnormalized": True, "diversity_rate": 2.0}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {"beam": 5}) for kind in MODELS), *((kind, x) for x in COUNTED for kind in (FLOW, STOCK))]
    + [(FLOW, x) for x in OURS],
    ids=str,
)
def test_tokens_and_scores_are_those_of_single_steps(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of unequal lengths in a batch, read in blocks, as a whole and after the state of their beginning.

    Some rows end before others. A new model with the same weights reads the file, and nothing else is written.
    """
    temperature = {key: x for key, x in options.items() if key == "temperature"}
    text = kept([build(kind)], tmp_path / "text", **temperature)
    models, prompts = [build(kind)], typed(make_prompts(*LENGTHS), unk=([0, 2], [1, 2]))
    whole = generate(models, after(text, prompts), **options)
    assert options != {"beam": 5} or [len(row) for row in whole] == [5] * len(LENGTHS)
    if options not in OURS:
        check_same(whole, generate(models, after(text, prompts), stock=True, **options))
    check_same(generate(models, prompts, load_state=str(tmp_path / "text"), **options), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


#: A value for every option of fairseq's generation, with the options that it requires.
EVERY_OPTION: dict[str, Any] = {
    "beam": 4,
    "nbest": 2,
    "max_len_a": 1.5,
    "max_len_b": 14,
    "min_len": 9,
    "lenpen": 0.3,
    "unkpen": 2.0,
    "temperature": 0.7,
    "sampling": {"sampling": True, "sampling_topk": 1},
    "sampling_topk": {"sampling": True, "sampling_topk": 1},
    "sampling_topp": {"sampling": True, "sampling_topp": 1e-9},
    "prefix_size": 4,
    "replace_unk": "file",
    "diverse_beam_strength": 0.9,
    "lm_weight": 0.5,
    "retain_dropout_modules": ["TransformerDecoder"],
    "decoding_format": "vanilla",
    "eos_token": "w3",
    **dict.fromkeys(("unnormalized", "no_early_stop", "no_beamable_mm", "sacrebleu", "print_step"), True),
    **dict.fromkeys(("retain_dropout", "retain_iter_history", "no_seed_provided"), True),
    **dict.fromkeys(("beam_mt", "max_len_a_mt", "max_len_b_mt", "lenpen_mt"), 3),
    **{x.name: 2 for x in fields(GenerationConfig) if x.name.startswith("iter_decode_")},
}
NOT_TAKEN = {
    "match_source_len": {"match_source_len": True},
    "print_alignment": {"print_alignment": "hard"},
    "constraints": {"constraints": "ordered"},
    "lm_path": {"extra": {"lm_model": nn.Identity()}},
}
#: Options that the READMEs describe as different or as fairseq's own; each has its own test.
OF_THEIR_OWN = {"no_repeat_ngram_size", "diverse_beam_groups", "diversity_rate", "score_reference"}


@pytest.mark.parametrize("option", sorted(x.name for x in fields(GenerationConfig) if x.name != "_name"))
def test_every_option_of_generation(option: str, tmp_path: Path) -> None:
    """An option gives fairseq's result or an error that names it; an option in no table fails this test."""
    model, prompts = build("linear_lm"), make_prompts(7, 3)
    if option in NOT_TAKEN:
        with refused_in_one_line(tmp_path, f"--{option.replace('_', '-')}"):
            generate([model], prompts, **NOT_TAKEN[option])
    elif option not in OF_THEIR_OWN:
        value = EVERY_OPTION[option]
        given = value if isinstance(value, dict) else {option: value}
        compare([model], prompts, **{"beam": 2, "max_len_b": 12, **given})


#: Typed padding, which fairseq replaces by a word that it chooses, ends of sentences, and prompts without tokens.
TYPED: dict[str, tuple[tuple[int, ...], dict, dict]] = {
    "in the middle": ((12, 12, 9), {"pad": ([0, 2], [4, 2])}, {}),
    "at the beginning": ((12, 12, 9), {"pad": ([0], [0])}, {}),
    "several": ((12, 12, 9), {"pad": ([0, 0, 0, 1, 2], [4, 5, 6, 9, 0])}, {}),
    "several, greedily": ((12, 12, 9), {"pad": ([0, 0, 0, 1, 2], [4, 5, 6, 9, 0])}, {"beam": 1}),
    "several, no sooner": ((12, 12, 9), {"pad": ([0, 0, 0, 1, 2], [4, 5, 6, 9, 0])}, {"min_len": 15}),
    "several, no further": ((12, 12, 9), {"pad": ([0, 0, 0, 1, 2], [4, 5, 6, 9, 0])}, {"max_len_b": 12}),
    "at the end": ((12, 12, 9), {"pad": ([0, 1], [11, 11])}, {}),
    "nothing else": ((12, 12, 9), {"pad": ([2] * 9, list(range(9)))}, {}),
    "an end": ((12, 12, 9), {"eos": ([0], [8]), "pad": ([0, 0, 0], [9, 10, 11])}, {}),
    "empty": ((0, 0), {}, {}),
    "one is empty": ((0, 9, 4), {}, {"beam": 4}),
    "one is empty, one is long": ((0, 70), {}, {"max_len_b": 80}),
}


@pytest.mark.parametrize("where", TYPED)
@pytest.mark.parametrize("arch", [FLOW, STOCK])
def test_typed_padding_and_ends_and_empty_prompts(arch: str, where: str) -> None:
    lengths, places, options = TYPED[where]
    compare([build(arch)], typed(make_prompts(*lengths), **places), **{"max_len_b": 20, **options})


def test_ensembles_and_a_prefix_apart_from_the_source(tmp_path: Path) -> None:
    """--prefix-size of fairseq-generate gives the first tokens of the target; states go on from states."""
    models, first, second, prompts = ensemble(), tmp_path / "one", make_prompts(12), make_prompts(4, 6)
    compare(models[::2], make_prompts(40, 40, 50), max_len_b=60)
    text = kept(models, first)
    generate(models, second, load_state=str(first), save_state=str(tmp_path / "two"), max_len_b=60)
    actual = generate(models, prompts, load_state=str(tmp_path / "two"), max_len_b=70)
    check_same(actual, compare(models, after(torch.cat([text, second[0]]), prompts), max_len_b=70))
    prompts = make_prompts(30, 30)
    compare([build("linear_lm")], prompts, prefix=prompts[:, :20], max_len_b=40)


@pytest.mark.parametrize("options", [{"diversity_rate": 9.0}, {"diverse_beam_groups": 2}], ids=str)
def test_penalties_of_diversity_begin_behind_the_prompt(options: dict) -> None:
    models, prompts = [build(FLOW)], make_prompts(40, 40)
    plain, diverse = (generate(models, prompts, beam=4, max_len_b=50, **extra) for extra in ({}, options))
    for plain_row, diverse_row in zip(plain, diverse):
        assert torch.equal(plain_row[0]["positional_scores"][:40], diverse_row[0]["positional_scores"][:40])
        assert [x["tokens"].tolist() for x in plain_row] != [x["tokens"].tolist() for x in diverse_row]


def test_allowed_words_are_asked_for_with_the_prompt() -> None:
    """``prefix_allowed_tokens_fn`` gets the sentence's index and all of its tokens so far."""
    prompts, calls = make_prompts(40), []

    def allowed(sentence: int, sequence: Tensor) -> list[int]:
        calls.append((sentence, sequence.tolist()))
        return [10, 11] if len(sequence) < 43 else [EOS]

    hypotheses = generate([build("linear_lm")], prompts, beam=2, max_len_b=45, allowed=allowed)
    assert calls and all(sentence == 0 and x[:41] == [EOS, *prompts[0].tolist()] for sentence, x in calls)
    assert all(set(hypothesis["tokens"][40:-1].tolist()) <= {10, 11} for hypothesis in hypotheses[0])


def test_no_ngram_is_repeated_from_the_prompt() -> None:
    """--no-repeat-ngram-size: greedy decoding avoids a bigram that already occurs in the prompt."""
    model, prompts = build(FLOW), make_prompts(40)
    options = {"beam": 1, "max_len_b": 70, "min_len": 70}
    (free,) = generate([model], prompts, **options)
    prompts[0, 20], prompts[0, 21] = prompts[0, -1], int(free[0]["tokens"][40])  # so that the pair is in the prompt
    (hypotheses,) = generate([model], prompts, no_repeat_ngram_size=2, **options)
    pairs = list(zip(hypotheses[0]["tokens"].tolist(), hypotheses[0]["tokens"].tolist()[1:]))
    assert all(pair not in pairs[:i] for i, pair in enumerate(pairs) if i >= 39)


@pytest.mark.parametrize("arch", [FLOW, "gated_delta_lm", "flash_lm", "softmax_lm", STOCK])
def test_half_precision(arch: str, tmp_path: Path) -> None:
    """As with --fp16: scores are those of float32 up to rounding, sums of states are kept in float32."""
    models, prompts, text = [build(arch)], make_prompts(5, 3), tokens(1, KNOWN, seed=3)[0]
    expected = generate(models, after(text, prompts), max_len_b=60)
    models = [models[0].half()]
    kept(models, tmp_path / "text")
    ways = ((after(text, prompts), {}), (prompts, {"load_state": str(tmp_path / "text")}))
    for actual in (generate(models, given, max_len_b=60, **options) for given, options in ways):
        for row, wanted in zip(actual, expected, strict=True):
            assert len(row) == 3 and all(int(hypothesis["tokens"][-1]) == EOS for hypothesis in row)
            scores = (x[0]["positional_scores"][: KNOWN + 3].float() for x in (row, wanted))
            assert_close("scores", *scores, 2e-2)
    kinds = {x.dtype for name, x in load_file(tmp_path / "text").items() if "attn_state" in name}
    assert arch in ("softmax_lm", STOCK) or torch.float16 not in kinds
    with refused_in_one_line(tmp_path, "--load-state", "precision", "float16", "float32"):
        generate([build(arch)], prompts, load_state=str(tmp_path / "text"))


def test_the_file_is_as_large_as_the_state(tmp_path: Path) -> None:
    """With a constant-size state, each token costs eight bytes, for its number and its score."""
    sizes = []
    for length in (50, 150):
        generate([build(FLOW)], tokens(1, length), save_state=f"{tmp_path}/{length}", max_len_b=152)
        sizes.append((tmp_path / str(length)).stat().st_size)
    assert 0 <= sizes[1] - sizes[0] - 8 * 100 <= 64  # plus digits in the header


#: What another model, task or prompt is that goes on from the state of a flowformer_lm, by words of the refusal.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "architecture": ("linear_lm", {}),
    "activation_fn": (f"{FLOW} --activation-fn gelu", {}),
    "another model, or of other options of its attention": (f"{FLOW} --flow-clamp 3", {}),
    "options of its attention": (f"{FLOW} --flow-forget head", {}),
    "attention_heads": (f"{FLOW} --decoder-attention-heads 2", {}),
    "no_token_positional_embeddings": (f"{FLOW} --no-token-positional-embeddings", {}),
    "another model": (FLOW, {"seed": 2}),
    "dictionary": (FLOW, {"words": 59}),
    "1 models": (FLOW, {"twice": True}),
    "--temperature is 2.0": (FLOW, {"temperature": 2.0}),
    "--load-state": (FLOW, {"max_len_b": KNOWN + 3}),
}


@pytest.mark.parametrize("said", OTHERS)
def test_a_state_of_something_else_is_refused(said: str, tmp_path: Path) -> None:
    kept([build(FLOW)], tmp_path / "text")
    words, given = OTHERS[said]
    options = dict(given)
    models = [build(words, seed=options.pop("seed", 1))] * (1 + options.pop("twice", False))
    with refused_in_one_line(tmp_path, said):
        generate(models, make_prompts(4), load_state=str(tmp_path / "text"), **options)


def test_a_state_in_memory_is_of_its_models_and_of_its_beginning(tmp_path: Path) -> None:
    model = build(FLOW)
    kept([model], tmp_path / "text")
    state = PromptState.load(tmp_path / "text", [model], dictionary(WORDS))
    task = PromptedLanguageModelingTask(Namespace(), dictionary(WORDS))
    task = PromptedLanguageModelingTask.of(task, after=state)
    with refused_in_one_line(tmp_path, "another model"):
        task.build_generator([build(FLOW, seed=2)], Namespace())
    task.args.add_bos_token = True
    generator = task.build_generator([model], Namespace())
    with refused_in_one_line(tmp_path, "</s>", "<s>"):
        task.inference_step(generator, [model], make_sample(make_prompts(4)))


DEEP = "[" * 100_000
#: Texts in a file, with the right digest: somebody who writes a file can write it, too.
SIGNED = [{"maker": x} for x in (DEEP, "null", "{}", '{"models": 3}', '{"models": [[]], "dictionary": "x"}')]
SIGNED += [{"temperature": x} for x in (DEEP, "null", '"hot"', "[1]", "1e999")]
SIGNED += [{"format": "another"}, {"maker": json.dumps({"models": 3, "dictionary": "x"})}]


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    """../../test_damaged_files.py damages bytes and tensors."""
    model, path = build("linear_lm"), tmp_path / "text"
    kept([model], path)
    tensors, about = read_safetensors(path)
    for texts in SIGNED:
        save_safetensors(tensors, path, {**about, **texts})
        with refused_in_one_line(tmp_path, "--load-state", "text"):
            generate([model], make_prompts(4), load_state=str(path))


@pytest.mark.parametrize(
    ("prompts", "options", "word"),
    [
        (make_prompts(20, 9), {"max_len_b": 15}, "--max-len-a and --max-len-b"),
        (typed(make_prompts(20, 9), pad=([0], [4]), eos=([0], [8])), {}, "<pad>"),
        (make_prompts(20), {"prompt_block_size": 0}, "--prompt-block-size is 0"),
        (make_prompts(20), {"save_state": "there"}, "--save-state"),
        (make_prompts(4, 5), {"save_state": "text"}, "more than one prompt"),
        (make_prompts(1)[:, :0], {"save_state": "text"}, "no tokens"),
        (typed(make_prompts(6), eos=([0], [3])), {"save_state": "text"}, "ends its sentence"),
        (typed(make_prompts(6), pad=([0], [3])), {"save_state": "text"}, "<pad>"),
    ],
)
def test_a_bad_prompt_is_refused(prompts: Tensor, options: dict, word: str, tmp_path: Path, monkeypatch) -> None:
    """No file is replaced, and none is written for prompts without a single state."""
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("the user's")
    with refused_in_one_line(tmp_path, word):
        generate([build("linear_lm")], prompts, **options)


def test_other_models_and_second_prompts_are_refused(tmp_path: Path) -> None:
    """As in fairseq-interactive, which reads one prompt after another: the state of the first stays."""
    with refused_in_one_line(tmp_path, "FlowformerTransformer", "transformer_lm"):
        generate([build_encoder_decoder("flowformer")], make_prompts(4))
    model = build("linear_lm")
    task = PromptedLanguageModelingTask(Namespace(save_state=str(tmp_path / "text")), dictionary(WORDS))
    generator, first = task.build_generator([model], Namespace(max_len_a=0, max_len_b=20)), make_sample(make_prompts(4))
    task.inference_step(generator, [model], first)
    with refused_in_one_line(tmp_path, "more than one prompt"):
        task.inference_step(generator, [model], first)
