"""Generation with a one-pass prompt gives fairseq's tokens and scores; unsupported options raise an error."""

from dataclasses import fields

import pytest
import torch
from fairseq.dataclass.configs import GenerationConfig
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor, nn

from fairseq_plugin import PromptedLanguageModelingTask
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.encoder_decoders import build_model as build_encoder_decoder
from tests.fairseq_plugin.helpers.prompts import (
    EOS,
    MODELS,
    assert_same_hypotheses,
    build_generating,
    generate,
    make_prompts,
)
from tests.fairseq_plugin.helpers.text import PAD, dictionary

#: The lengths differ by less and by more than what is decoded step by step.
LENGTHS = (3, 70, 150, 75, 150)
KINDS = {**MODELS, "no positions": ("transformer_lm", "--no-token-positional-embeddings")}


def _generate(task: type, models: list[nn.Module], prompts: Tensor, *prefix: Tensor, block_size: int = 64, **options):
    return generate(task, models, prompts, *prefix, task_options={"prompt_block_size": block_size}, **options)


def _compare(models: list[nn.Module], prompts: Tensor, **options) -> list:
    actual = _generate(PromptedLanguageModelingTask, models, prompts, **options)
    assert_same_hypotheses(actual, _generate(LanguageModelingTask, models, prompts, **options))
    return actual


@pytest.mark.parametrize(("kind", "beam"), [*((kind, 5) for kind in KINDS), ("flowformer_lm", 1), ("sinusoids", 1)])
def test_tokens_and_scores_are_those_of_single_steps(kind: str, beam: int) -> None:
    """Prompts of unequal lengths in a batch, read in blocks; some rows end before others."""
    model = build_generating(*KINDS[kind])
    hypotheses = _compare([model], make_prompts(*LENGTHS), beam=beam)
    assert [len(row) for row in hypotheses] == [beam] * len(LENGTHS)


@pytest.mark.parametrize(
    "options",
    [
        {"unnormalized": True},
        {"lenpen": 0.3, "temperature": 1.7, "unkpen": 2.0},
        {"min_len": 160, "max_len_b": 165},
        {"min_len": 20},
        {"max_len_a": 1, "max_len_b": 4},
        {"max_len_b": 150},
        {"block_size": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["flowformer_lm", "transformer_lm"])
def test_options_of_generation(arch: str, options: dict) -> None:
    """Lengths include the prompt, also at the maximum; scores are normalised and weighted as in fairseq."""
    _compare([build_generating(arch)], make_prompts(*LENGTHS[1:]), beam=3, **options)


#: A value for every option of fairseq's generation, with the options that it requires.
EVERY_OPTION = {
    "beam": 4,
    "nbest": 2,
    "max_len_a": 1.5,
    "max_len_b": 14,
    "min_len": 9,
    "unnormalized": True,
    "no_early_stop": True,
    "no_beamable_mm": True,
    "lenpen": 0.3,
    "unkpen": 2.0,
    "temperature": 0.7,
    "sampling": {"sampling": True, "sampling_topk": 1},
    "sampling_topk": {"sampling": True, "sampling_topk": 1},
    "sampling_topp": {"sampling": True, "sampling_topp": 1e-9},
    "prefix_size": 4,
    "replace_unk": "file",
    "sacrebleu": True,
    "diverse_beam_strength": 0.9,
    "print_step": True,
    "lm_weight": 0.5,
    "retain_dropout": True,
    "retain_dropout_modules": ["TransformerDecoder"],
    "retain_iter_history": True,
    "decoding_format": "vanilla",
    "no_seed_provided": True,
    "eos_token": "w3",
    **dict.fromkeys(("beam_mt", "max_len_a_mt", "max_len_b_mt", "lenpen_mt"), 3),
    **{x.name: 2 for x in fields(GenerationConfig) if x.name.startswith("iter_decode_")},
}
REFUSED = {
    "match_source_len": {"match_source_len": True},
    "print_alignment": {"print_alignment": "hard"},
    "constraints": {"constraints": "ordered"},
    "lm_path": {"extra": {"lm_model": nn.Identity()}},
}
#: Options that the READMEs describe as different or as fairseq's own; each has its own test.
OF_THEIR_OWN = {"no_repeat_ngram_size", "diverse_beam_groups", "diversity_rate", "score_reference"}


@pytest.mark.parametrize("option", sorted(x.name for x in fields(GenerationConfig) if x.name != "_name"))
def test_every_option_of_generation(option: str) -> None:
    """An option gives fairseq's result or an error that names it; an option in no table fails this test."""
    model, prompts = build_generating("linear_lm"), make_prompts(7, 3)
    if option in REFUSED:
        with pytest.raises(ValueError, match=f"--{option.replace('_', '-')}"):
            _generate(PromptedLanguageModelingTask, [model], prompts, **REFUSED[option])
    elif option not in OF_THEIR_OWN:
        value = EVERY_OPTION[option]
        _compare(
            [model], prompts, **{"beam": 2, "max_len_b": 12, **(value if isinstance(value, dict) else {option: value})}
        )


#: Positions of typed padding in prompts of 12, 12 and 9 tokens: rows and columns.
TYPED = {
    "in the middle": ([0, 2], [4, 2]),
    "at the beginning": ([0], [0]),
    "several": ([0, 0, 0, 1, 2], [4, 5, 6, 9, 0]),
    "at the end": ([0, 1], [11, 11]),
    "nothing else": ([2] * 9, list(range(9))),
}


@pytest.mark.parametrize("options", [{}, {"beam": 1}, {"min_len": 15}, {"max_len_b": 12}], ids=str)
@pytest.mark.parametrize("where", TYPED)
@pytest.mark.parametrize("arch", ["flowformer_lm", "transformer_lm"])
def test_typed_padding(arch: str, where: str, options: dict) -> None:
    """fairseq replaces typed padding with a word that it chooses, and continues with the words after it."""
    prompts = make_prompts(12, 12, 9)
    prompts[TYPED[where]] = PAD
    _compare([build_generating(arch)], prompts, **{"beam": 3, "max_len_b": 20, **options})


@pytest.mark.parametrize("options", [{"diversity_rate": 9.0}, {"diverse_beam_groups": 2}], ids=str)
def test_penalties_of_diversity_begin_behind_the_prompt(options: dict) -> None:
    """A prompt's scores are those of beam search, whatever the diversity options."""
    models, prompts = [build_generating("flowformer_lm")], make_prompts(90, 90)
    plain, diverse = (
        _generate(PromptedLanguageModelingTask, models, prompts, beam=4, max_len_b=100, **extra)
        for extra in ({}, options)
    )
    for plain_row, diverse_row in zip(plain, diverse):
        assert torch.equal(plain_row[0]["positional_scores"][:90], diverse_row[0]["positional_scores"][:90])
        assert [x["tokens"].tolist() for x in plain_row] != [x["tokens"].tolist() for x in diverse_row]


def test_a_prompt_of_unknown_words() -> None:
    """The penalty of unknown words is part of the prompt's scores."""
    prompts = make_prompts(5, 5)
    prompts[0, 1:3] = dictionary().unk()
    _compare([build_generating("flowformer_lm")], prompts, beam=2, unkpen=3.0, max_len_b=9)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 9, 4), (0, 90)], ids=str)
@pytest.mark.parametrize("arch", ["linear_lm", "transformer_lm"])
def test_empty_prompts(arch: str, lengths: tuple[int, ...]) -> None:
    """Empty prompts alone, with short ones, and with long ones in a batch."""
    _compare([build_generating(arch)], make_prompts(*lengths), beam=4, max_len_b=100)


def test_ensembles() -> None:
    """Ensembles of our models and fairseq's own."""
    models = [
        build_generating("flowformer_lm"),
        build_generating("transformer_lm", seed=2),
        build_generating("flash_lm", seed=3),
    ]
    _compare(models, make_prompts(70, 70, 90), beam=3, max_len_b=110)
    _compare(models[::2], make_prompts(70, 70, 90), beam=3, max_len_b=110)


@pytest.mark.parametrize("arch", ["flowformer_lm", "flash_lm", "transformer_lm"])
def test_half_precision(arch: str) -> None:
    """As with --fp16: the prompt's scores are those of float32 up to rounding, and every sentence ends."""
    model, prompts, options = build_generating(arch), make_prompts(70, 90), {"beam": 3, "max_len_b": 100}
    expected = _generate(PromptedLanguageModelingTask, [model], prompts, **options)
    actual = _generate(PromptedLanguageModelingTask, [model.half()], prompts, **options)
    for row, expected_row in zip(actual, expected):
        assert len(row) == 3 and all(int(hypothesis["tokens"][-1]) == EOS for hypothesis in row)
        scores, expected_scores = (hypotheses[0]["positional_scores"][:70] for hypotheses in (row, expected_row))
        assert_close("scores", scores.float(), expected_scores, 2e-2)


def test_a_prompt_that_ends_its_sentence() -> None:
    """As with --prefix-size and a shorter line: that sentence ends, the others continue."""
    prompts = make_prompts(12, 12)
    prompts[0, 8] = EOS
    prompts[0, 9:] = PAD
    hypotheses = _compare([build_generating("flowformer_lm")], prompts, beam=3, max_len_b=20)
    assert all(hypothesis["tokens"].tolist() == prompts[0, :9].tolist() for hypothesis in hypotheses[0])


def test_a_prefix_apart_from_the_source() -> None:
    """--prefix-size of fairseq-generate gives the first tokens of the target."""
    models, prompts = [build_generating("linear_lm")], make_prompts(30, 30)
    generated = [
        _generate(task, models, prompts, prompts[:, :20], beam=3, max_len_b=40)
        for task in (PromptedLanguageModelingTask, LanguageModelingTask)
    ]
    assert_same_hypotheses(*generated)


def test_sampling_draws_what_is_likely() -> None:
    """Samples differ from step-by-step ones but have their distribution: frequencies of the first word agree."""
    model, prompts = build_generating("flowformer_lm"), make_prompts(90)
    torch.manual_seed(0)
    (hypotheses,) = _generate(
        PromptedLanguageModelingTask, [model], prompts, beam=60, sampling=True, max_len_b=91, block_size=32
    )
    with torch.no_grad():
        logits = model(torch.cat([torch.full((1, 1), EOS), prompts], dim=1))[0][0, -1]
    logits[PAD] = -torch.inf
    probabilities = logits.softmax(0)
    frequencies = torch.bincount(
        torch.stack([hypothesis["tokens"][90] for hypothesis in hypotheses]), minlength=len(probabilities)
    ) / len(hypotheses)
    assert (frequencies - probabilities).abs().sum() < 0.7  # 2 for disjoint distributions


def test_allowed_words_are_asked_for_with_the_prompt() -> None:
    """``prefix_allowed_tokens_fn`` gets the sentence's index and all of its tokens so far."""
    prompts, calls = make_prompts(90, 4), []

    def allowed(sentence: int, sequence: Tensor) -> list[int]:
        calls.append((sentence, sequence.tolist()))
        return [10, 11] if len(sequence) < 93 else [EOS]

    hypotheses = _generate(
        PromptedLanguageModelingTask,
        [build_generating("linear_lm")],
        prompts[:1],
        beam=2,
        max_len_b=95,
        allowed=allowed,
    )
    assert calls and all(entry[:91] == [EOS, *prompts[0].tolist()] for sentence, entry in calls if sentence == 0)
    assert all(set(hypothesis["tokens"][90:-1].tolist()) <= {10, 11} for hypothesis in hypotheses[0])


def test_no_ngram_is_repeated_from_the_prompt() -> None:
    """--no-repeat-ngram-size: greedy decoding avoids a bigram that already occurs in the prompt."""
    model, prompts = build_generating("flowformer_lm"), make_prompts(90)
    options = {"beam": 1, "max_len_b": 120, "min_len": 120}
    (free,) = _generate(PromptedLanguageModelingTask, [model], prompts, **options)
    next_word = int(free[0]["tokens"][90])
    prompts[0, 40], prompts[0, 41] = prompts[0, -1], next_word  # so that the pair occurs in the prompt
    (hypotheses,) = _generate(PromptedLanguageModelingTask, [model], prompts, no_repeat_ngram_size=2, **options)
    pairs = list(zip(hypotheses[0]["tokens"].tolist(), hypotheses[0]["tokens"].tolist()[1:]))
    before = set(pairs[:89])
    for pair in pairs[89:]:
        assert pair not in before
        before.add(pair)


def test_what_is_refused() -> None:
    """Errors name the options of the command line."""
    model, prompts = build_generating("linear_lm"), make_prompts(20, 9)
    with pytest.raises(ValueError, match="20 tokens; allowed: 15, by --max-len-a and --max-len-b"):
        _generate(PromptedLanguageModelingTask, [model], prompts, max_len_b=15)
    ended = prompts.clone()
    ended[0, 4], ended[0, 8] = PAD, EOS
    with pytest.raises(ValueError, match="<pad>.*</s>"):
        _generate(PromptedLanguageModelingTask, [model], ended)
    with pytest.raises(ValueError, match="--prompt-block-size is 0"):
        _generate(PromptedLanguageModelingTask, [model], prompts, block_size=0)
    with pytest.raises(ValueError, match="FlowformerTransformer; allowed .* transformer_lm"):
        _generate(PromptedLanguageModelingTask, [build_encoder_decoder("flowformer")], prompts)
