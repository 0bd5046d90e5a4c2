"""lm-evaluation-harness on a folder: its own ``hf``, and ``lineartime`` with the same numbers and fewer tokens."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

from common.huggingface.evaluation import LineartimeLM
from fairseq_plugin.lm_eval import main

from .models import byte_tokenizer, language_model, save_folder, stock_model

TASKS = Path(__file__).parents[3] / "recipes" / "evaluation_harness"
LONG = "The Moon goes around the Earth. " * 8


def requests(*arguments: tuple[str, ...]) -> list[SimpleNamespace]:
    """What the harness passes for texts, or for contexts and continuations."""
    return [SimpleNamespace(args=x) for x in arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A language model and its tokenizer."""
    return save_folder(tmp_path_factory.mktemp("folder"), language_model())


@pytest.fixture(scope="module")
def results(folder: str) -> dict[str, dict[str, Any]]:
    """The three tasks of the project, evaluated as ``--model hf`` and ``--model lineartime`` do."""
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)
    names = ["facts_capitals", "facts_sums", "facts_texts"]
    arguments = {"model_args": {"pretrained": folder}, "batch_size": 6, "device": "cpu", "bootstrap_iters": 0}
    return {
        model: simple_evaluate(model, tasks=names, task_manager=tasks, log_samples=True, **arguments)
        for model in ("hf", "lineartime")
    }


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """What the model answered to each request of a task."""
    return [response for sample in results["samples"][task] for response in sample["resps"]]


def test_tasks_have_the_numbers_of_hf_from_fewer_tokens(results: dict[str, dict[str, Any]]) -> None:
    """Log-likelihoods of choices and of texts that are shorter than a window, and generated texts."""
    for task in ("facts_capitals", "facts_texts"):
        ours, theirs = (answers(results[model], task) for model in ("lineartime", "hf"))
        values = [[x[0][0] if isinstance(x[0], (tuple, list)) else x[0] for x in side] for side in (ours, theirs)]
        assert values[0] == pytest.approx(values[1], rel=1e-5) and len({round(x, 3) for x in values[0]}) > 3
    assert answers(results["lineartime"], "facts_sums") == answers(results["hf"], "facts_sums")
    for task, measures in results["hf"]["results"].items():
        for name, value in measures.items():
            if isinstance(value, float) and "stderr" not in name:
                assert results["lineartime"]["results"][task][name] == pytest.approx(value, rel=1e-4)
    counts = results["lineartime"]["config"]
    assert counts["tokens_requested"] > 0 < counts["tokens_read"]


def test_a_context_is_read_once_for_its_choices(folder: str) -> None:
    """Every context, and every token of a continuation but the last."""
    model, encode = LineartimeLM(folder, device="cpu", batch_size=5), byte_tokenizer().encode
    pairs = [(context, choice) for context in ("A cat", "The longer dog") for choice in (" sat.", " ran", "s")]
    model.loglikelihood(requests(*pairs), disable_tqdm=True)
    later = sum(len(encode(choice)) - 1 for _, choice in pairs)
    assert model.tokens_read == sum(len(encode(x)) for x in {context for context, _ in pairs}) + later
    assert model.tokens_requested == sum(len(encode(context)) for context, _ in pairs) + later


@pytest.mark.parametrize("batch_size", [1, 4])
def test_continuations_of_any_lengths(folder: str, batch_size: int) -> None:
    """Of one token too, after contexts of different lengths, of none, and of more tokens than the model takes."""
    pairs = [("A cat", "s"), ("A cat", " sat."), ("The", " end"), (LONG, " ok"), ("", "x"), ("The", "n"), ("", "yz")]
    ours, theirs = (
        kind(folder, device="cpu", batch_size=batch_size).loglikelihood(requests(*pairs), disable_tqdm=True)
        for kind in (LineartimeLM, HFLM)
    )
    assert [x[0] for x in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [x[1] for x in ours] == [x[1] for x in theirs]


def test_greedy_continuations_are_recognised(folder: str) -> None:
    """The most probable next character, where it is one, and another one."""
    model, tokenizer = LineartimeLM(folder, device="cpu", batch_size=9), byte_tokenizer()
    with torch.no_grad():
        best = model.model(torch.arange(4, 260)[:, None]).logits[:, 0].argmax(-1)
    pairs = [(tokenizer.decode([i + 4]), tokenizer.decode([j])) for i, j in enumerate(best.tolist()) if j >= 4]
    pairs = [(first, second) for first, second in pairs if (first + second).isascii() and not first.isspace()]
    asked = requests(*((first, second + end) for first, second in pairs for end in ("", "#")))
    greedy = [answer for _, answer in model.loglikelihood(asked, disable_tqdm=True)]
    assert len(pairs) > 3 and all(greedy[::2]) and not all(greedy[1::2])


def test_a_long_text_is_one_stream(tmp_path: Path) -> None:
    """Several blocks, beside texts that end before; in windows it is another number."""
    path = save_folder(tmp_path, language_model())
    model, texts = LineartimeLM(path, device="cpu", batch_size=3), [LONG * 5, "short", LONG[:100], ""]
    rolled = model.loglikelihood_rolling(requests(*((text,) for text in texts)), disable_tqdm=True)
    for text, log_likelihood in zip(texts, rolled):
        tokens = torch.tensor([[0, *byte_tokenizer().encode(text)]])
        with torch.no_grad():
            log_probs = model.model(tokens).logits.log_softmax(-1)[0, :-1]
        expected = float(log_probs.gather(1, tokens[0, 1:, None]).sum())
        assert log_likelihood == pytest.approx(expected, rel=1e-5)
    assert len(texts[0]) > 1200 and model.tokens_read == model.tokens_requested == sum(map(len, texts))
    begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # as an exported tokenizer does
    model.tokenizer.backend_tokenizer.post_processor = begin
    again = model.loglikelihood_rolling(requests((LONG,), ("short",)), disable_tqdm=True)
    assert again[1] == pytest.approx(rolled[1])
    windows = HFLM(path, device="cpu").loglikelihood_rolling(requests((LONG,)), disable_tqdm=True)
    assert not math.isclose(windows[0], again[0], rel_tol=1e-4)


def test_a_limited_number_of_positions_is_evaluated_in_windows(tmp_path: Path) -> None:
    path = save_folder(tmp_path, language_model(positions="learned"))
    ours, theirs = (
        kind(path, device="cpu").loglikelihood_rolling(requests((LONG,)), disable_tqdm=True)
        for kind in (LineartimeLM, HFLM)
    )
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_other_folders_and_a_continuation_beyond_the_longest_length_are_refused(folder: str, tmp_path: Path) -> None:
    """In one line; the beginning of the continuation would be taken for its context."""
    for pretrained, error in (
        ("nothing", "has no config.json"),
        (save_folder(tmp_path, stock_model()), "type 'llama'"),
    ):
        with pytest.raises(ValueError, match=f"pretrained .*{error}.*; allowed: "):
            LineartimeLM(pretrained, device="cpu")
    with pytest.raises(ValueError, match="a continuation has 9 tokens; allowed: 8"):
        LineartimeLM(folder, device="cpu", max_length=8).loglikelihood(requests(("A", "123456789")), disable_tqdm=True)


def test_the_command_is_the_harness(capsys: pytest.CaptureFixture) -> None:
    """Its options, and one line for those that it has not."""
    for arguments, status in ((["--help"], 0), (["--taks", "facts_sums"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
    out, err = capsys.readouterr()
    assert "--include_path" in out and "--taks" in err.splitlines()[-1]
