"""Prompt states in a file and in memory: continuing equals generation from the whole text; what is refused."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.files.tensor_files import read_safetensors, save_safetensors
from fairseq_plugin import PromptedLanguageModelingTask, PromptState
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.prompts import (
    EOS,
    MODELS,
    WORDS,
    assert_same_hypotheses,
    build_generating,
    generate,
    make_prompts,
    make_sample,
)
from tests.fairseq_plugin.helpers.text import PAD, dictionary, tokens

KNOWN = 90
KINDS = {**MODELS, "linear, head": ("linear_lm", "--linear-forget", "head")}


def _generate(models: list[nn.Module], prompts: Tensor, words: int = WORDS, **options):
    """Hypotheses that the task generates for ``prompts``; state options are passed to the task."""
    names = ("load_state", "save_state", "prompt_block_size")
    task_options = {"prompt_block_size": 32, **{name: options.pop(name) for name in names if name in options}}
    options = {"beam": 3, "words": words, "task_options": task_options, **options}
    return generate(PromptedLanguageModelingTask, models, prompts, **options)


def _after(text: Tensor, prompts: Tensor) -> Tensor:
    """The prompts with ``text`` (m,) in front of each."""
    return torch.cat([text.expand(len(prompts), -1), prompts], dim=1)


def _kept(models: list[nn.Module], path: Path, **options) -> Tensor:
    """A text; its state is saved to ``path``."""
    text = tokens(1, KNOWN, seed=3)
    _generate(models, text, save_state=str(path), max_len_b=KNOWN + 2, **options)
    return text[0]


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_after_a_file_are_those_of_the_whole_text(kind: str, tmp_path: Path) -> None:
    """Prompts of unequal lengths, long ones and an empty one, by a new model with the same weights."""
    text = _kept([build_generating(*KINDS[kind])], tmp_path / "text")
    models, prompts = [build_generating(*KINDS[kind])], make_prompts(3, 0, 70, 5)
    actual = _generate(models, prompts, load_state=str(tmp_path / "text"))
    assert_same_hypotheses(actual, _generate(models, _after(text, prompts)))
    assert (tmp_path / "text").exists() and not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    "options",
    [
        {"unkpen": 2.0, "lenpen": 0.3},
        {"temperature": 1.7},
        {"max_len_a": 1, "max_len_b": 4},
        {"min_len": 120, "max_len_b": 125},
        {"no_repeat_ngram_size": 2},
        {"unnormalized": True, "diversity_rate": 2.0},
    ],
    ids=str,
)
def test_options_of_generation_count_the_text(options: dict, tmp_path: Path) -> None:
    """Lengths, penalties and scores include the text."""
    models, prompts = [build_generating("flowformer_lm")], make_prompts(6, 9)
    text = _kept(models, tmp_path / "text", **{k: x for k, x in options.items() if k == "temperature"})
    actual = _generate(models, prompts, load_state=str(tmp_path / "text"), **options)
    assert_same_hypotheses(actual, _generate(models, _after(text, prompts), **options))


def test_ensembles_and_states_of_states(tmp_path: Path) -> None:
    """One file holds the states of an ensemble, stock models included; a state can continue another."""
    models = [
        build_generating("flowformer_lm"),
        build_generating("transformer_lm", seed=2),
        build_generating("flash_lm", seed=3),
    ]
    text, second_text, prompts = _kept(models, tmp_path / "one"), make_prompts(20), make_prompts(4, 6)
    options = {"load_state": str(tmp_path / "one"), "save_state": str(tmp_path / "two"), "max_len_b": 115}
    _generate(models, second_text, **options)
    actual = _generate(models, prompts, load_state=str(tmp_path / "two"))
    assert_same_hypotheses(actual, _generate(models, _after(torch.cat([text, second_text[0]]), prompts)))


@pytest.mark.parametrize("arch", ["flowformer_lm", "gated_delta_lm", "softmax_lm"])
def test_half_precision(arch: str, tmp_path: Path) -> None:
    """As with --fp16: sums are kept in float32, scores are those of the whole text up to rounding."""
    models, prompts = [build_generating(arch).half()], make_prompts(5, 3)
    text = _kept(models, tmp_path / "text")
    actual = _generate(models, prompts, load_state=str(tmp_path / "text"))
    for row, expected_row in zip(actual, _generate(models, _after(text, prompts))):
        length = KNOWN + 3
        assert_close(
            "scores", row[0]["positional_scores"][:length], expected_row[0]["positional_scores"][:length], 2e-2
        )
    kinds = {x.dtype for name, x in load_file(tmp_path / "text").items() if "attn_state" in name}
    assert arch == "softmax_lm" or torch.float16 not in kinds
    with pytest.raises(ValueError, match="precision.*float16.*float32"):
        _generate([build_generating(arch)], prompts, load_state=str(tmp_path / "text"))


def test_the_file_is_as_large_as_the_state(tmp_path: Path) -> None:
    """With a constant-size state, each token costs eight bytes, for its number and its score."""
    models, sizes = [build_generating("flowformer_lm")], []
    for length in (50, 150):
        path = tmp_path / str(length)
        _generate(models, tokens(1, length), save_state=str(path), max_len_b=160)
        sizes.append(path.stat().st_size)
    assert 0 <= sizes[1] - sizes[0] - 8 * 100 <= 64  # plus digits in the header


@pytest.mark.parametrize(
    "other, match",
    [
        (("linear_lm",), "architecture"),
        (("flowformer_lm", "--activation-fn", "gelu"), "activation_fn"),
        (("flowformer_lm", "--flow-clamp", "3"), "options of its attention"),
        (("flowformer_lm", "--flow-forget", "head"), "options of its attention"),
        (("flowformer_lm", "--decoder-attention-heads", "2"), "attention_heads"),
        (("flowformer_lm", "--no-token-positional-embeddings"), "no_token_positional_embeddings"),
    ],
    ids=str,
)
def test_other_models_refuse_it(other: tuple[str, ...], match: str, tmp_path: Path) -> None:
    """The message names what differs."""
    _kept([build_generating("flowformer_lm")], tmp_path / "text")
    with pytest.raises(ValueError, match=f"--load-state is .*{match}"):
        _generate([build_generating(*other)], make_prompts(4), load_state=str(tmp_path / "text"))


def test_other_weights_dictionaries_temperatures_and_beginnings_refuse_it(tmp_path: Path) -> None:
    """Also with another number of models; for states in memory and in files."""
    model, path, prompts = build_generating("flowformer_lm"), str(tmp_path / "text"), make_prompts(4)
    _kept([model], tmp_path / "text")
    with pytest.raises(ValueError, match="another model.* allowed"):
        _generate([build_generating("flowformer_lm", seed=2)], prompts, load_state=path)
    with pytest.raises(ValueError, match="another dictionary .* allowed"):
        _generate([model], prompts, words=59, load_state=path)
    with pytest.raises(ValueError, match="1 models; allowed: of 2"):
        _generate([model, model], prompts, load_state=path)
    with pytest.raises(ValueError, match="--temperature is 2.0; allowed .* 1.0"):
        _generate([model], prompts, load_state=path, temperature=2.0)
    with pytest.raises(ValueError, match="96 tokens, 90 of them by --load-state; allowed: 95"):
        _generate([model], make_prompts(6), load_state=path, max_len_b=95)
    state = PromptState.load(path, [model], dictionary(WORDS))
    task = PromptedLanguageModelingTask(Namespace(), dictionary(WORDS))
    task = PromptedLanguageModelingTask.of(task, after=state)
    with pytest.raises(ValueError, match="another model"):
        task.build_generator([build_generating("flowformer_lm", seed=2)], Namespace())
    task.args.add_bos_token = True
    generator = task.build_generator([model], Namespace())
    with pytest.raises(ValueError, match="begins with </s>; allowed: with <s>"):
        task.inference_step(generator, [model], make_sample(prompts))


def _edited(path: Path, **texts: str) -> None:
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file(load_file(path), path, {**about, **texts})


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """A missing file, another program's, exchanged tensors or texts; tests/test_damaged_files.py damages bytes."""
    model, path, prompts = build_generating("linear_lm"), tmp_path / "text", make_prompts(4)
    _kept([model], path)
    whole = path.read_bytes()
    names = {"models": 3, "dictionary": "x"}
    for damage in (
        lambda: save_file({"x": torch.zeros(2)}, path),
        lambda: _edited(path, format="another"),
        lambda: _edited(path, maker="{}"),
        lambda: _edited(path, maker=json.dumps(names)),
        lambda: _edited(path, temperature="hot"),
        lambda: save_file({**load_file(path), "states.0.nowhere.attn_state.x": torch.zeros(1)}, path),
        path.unlink,
    ):
        path.write_bytes(whole)
        damage()
        with pytest.raises(ValueError, match=r"(?s)--load-state.*text.*allowed"):
            _generate([model], prompts, load_state=str(path))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "texts",
    [
        *({"maker": maker} for maker in (DEEP, "null", "{}", '{"models": 3}', '{"models": [[]], "dictionary": "x"}')),
        *({"temperature": temperature} for temperature in (DEEP, "null", '"hot"', "[1]", "1e999")),
    ],
)
def test_texts_with_a_right_digest_are_checked(texts: dict[str, str], tmp_path: Path) -> None:
    """Somebody who writes a file can write its digest, too."""
    model, path = build_generating("linear_lm"), tmp_path / "text"
    _kept([model], path)
    tensors, about = read_safetensors(path)
    save_safetensors(tensors, path, {**about, **texts})
    with pytest.raises(ValueError, match="--load-state is .*text.*allowed") as error:
        _generate([model], make_prompts(4), load_state=str(path))
    assert len(str(error.value)) < 500


def test_what_is_kept_is_of_one_prompt_in_a_new_file(tmp_path: Path) -> None:
    """No file is replaced, and none is written for prompts without a single state."""
    model, path = build_generating("linear_lm"), tmp_path / "text"
    with pytest.raises(ValueError, match="more than one prompt .* allowed with --save-state: one"):
        _generate([model], make_prompts(4, 5), save_state=str(path))
    with pytest.raises(ValueError, match="no tokens"):
        _generate([model], make_prompts(1)[:, :0], save_state=str(path))
    for typed, match in ((EOS, "ends its sentence"), (PAD, "<pad>")):
        prompt = make_prompts(6)
        prompt[0, 3] = typed
        with pytest.raises(ValueError, match=match):
            _generate([model], prompt, save_state=str(path))
    assert not list(tmp_path.iterdir())
    path.write_text("the user's")
    with pytest.raises(ValueError, match="--save-state is .*text, a file that is there already"):
        _generate([model], make_prompts(4), save_state=str(path))
    assert path.read_text() == "the user's"


def test_a_second_prompt_leaves_the_state_of_the_first(tmp_path: Path) -> None:
    """As in fairseq-interactive, which reads one prompt after another."""
    model, path = build_generating("linear_lm"), tmp_path / "text"
    task = PromptedLanguageModelingTask(Namespace(save_state=str(path)), dictionary(WORDS))
    generator = task.build_generator([model], Namespace(max_len_a=0, max_len_b=20))
    first = make_sample(make_prompts(4))
    task.inference_step(generator, [model], first)
    content = path.read_bytes()
    with pytest.raises(ValueError, match="more than one prompt"):
        task.inference_step(generator, [model], first)
    assert path.read_bytes() == content
