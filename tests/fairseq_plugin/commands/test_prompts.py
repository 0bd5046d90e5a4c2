"""``--task prompted_language_modeling`` in fairseq's commands and in Python, beside ``language_modeling``."""

import re
from pathlib import Path

import pytest
from fairseq.hub_utils import GeneratorHubInterface

from fairseq_plugin import FlowformerLanguageModel, PromptedLanguageModelingTask, PromptState, read_prompt
from tests.fairseq_plugin.helpers.commands import USER_DIR, NamedRuns, run_in_turn, run_named, training_command
from tests.fairseq_plugin.helpers.logs import losses

TASKS = ("language_modeling", "prompted_language_modeling")
PROMPTS = "w3 w21 w28 w5 w6\n\nw5 <pad> w8\nw7 w9 w11\n"


def _hypotheses(output: str) -> list[tuple[str, float, str]]:
    """The sentence's number, score and words of each hypothesis that a command printed."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return [(number, float(score), words) for number, score, words in found]


@pytest.fixture(scope="module")
def trained(data_bin: str, tmp_path_factory: pytest.TempPathFactory) -> NamedRuns:
    """Short trainings by both tasks, and what each command said of the first one.

    Models of fairseq are in generation/test_prompt_sequence_generator.py.
    """
    folder = tmp_path_factory.mktemp("prompts")
    path = str(folder / TASKS[0] / "checkpoint_best.pt")
    base = [data_bin, "--user-dir", USER_DIR, "--path", path, "--cpu", "--beam", "3", "--nbest", "3"]
    base += ["--max-len-b", "30", "--batch-size", "4"]
    commands = {}
    for task in TASKS:
        training = training_command(data_bin, str(folder / task), "flowformer_lm", "--task", task)
        lines = ["--sample-break-mode", "eos", "--prefix-size", "4"]
        commands[f"train {task}"] = ("fairseq_cli.train", training, "")
        commands[f"generate {task}"] = ("fairseq_cli.generate", [*base, "--task", task, *lines], "")
        typed = [*base, "--task", task, "--buffer-size", "4"]
        commands[f"interactive {task}"] = ("fairseq_cli.interactive", typed, PROMPTS)
    return run_named(folder, commands)


def _loaded(runs: NamedRuns, task: str, data: str) -> GeneratorHubInterface:
    folder = str(runs.folder / task)
    return FlowformerLanguageModel.from_pretrained(folder, "checkpoint_best.pt", data_name_or_path=data).eval()


def test_commands_give_the_same(trained: NamedRuns) -> None:
    """fairseq-generate with beginnings of lines, fairseq-interactive with unequal prompts, an empty one too."""
    for command in ("generate", "interactive"):
        expected, found = (_hypotheses(trained.outputs[f"{command} {task}"]) for task in TASKS)
        assert len(found) >= 12
        assert [(number, words) for number, _, words in found] == [(number, words) for number, _, words in expected]
        assert [score for _, score, _ in found] == pytest.approx([score for _, score, _ in expected], abs=1e-3)


def test_a_text_is_read_once(trained: NamedRuns, data_bin: str, tmp_path: Path) -> None:
    """fairseq-interactive keeps its state, and goes on from it, fairseq-generate too; in Python the same file."""
    kept, text = tmp_path / "text.safetensors", "w3 w21 w28 w5"
    path = str(trained.folder / TASKS[0] / "checkpoint_best.pt")
    base = [data_bin, "--user-dir", USER_DIR, "--path", path, "--cpu", "--beam", "3", "--task", TASKS[1]]
    base += ["--max-len-b", "30"]
    lines = ["--sample-break-mode", "eos", "--prefix-size", "4", "--batch-size", "4"]
    _, after, whole, generated = run_in_turn(
        ("fairseq_cli.interactive", [*base, "--save-state", str(kept)], f"{text}\n"),
        ("fairseq_cli.interactive", [*base, "--load-state", str(kept)], "w5 w6\n\nw1\n"),
        ("fairseq_cli.interactive", base, f"{text} w5 w6\n{text}\n{text} w1\n"),
        ("fairseq_cli.generate", [*base, *lines, "--load-state", str(kept)], ""),
    )
    found, expected = _hypotheses(after), _hypotheses(whole)
    assert [words for _, _, words in found] == [words for _, _, words in expected] and len(found) == 3
    assert [score for _, score, _ in found] == pytest.approx([score for _, score, _ in expected], abs=1e-3)
    assert all(words.startswith(text) for _, _, words in _hypotheses(generated))
    hub = _loaded(trained, TASKS[0], data_bin)
    state = PromptState.load(kept, hub.models, hub.task.dictionary)
    hub.task = PromptedLanguageModelingTask.of(hub.task, after=state)
    assert len(state) == 4 and hub.sample("w5 w6", beam=3, max_len_b=30) == expected[0][2]
    with pytest.raises(ValueError, match="6 tokens, .*; allowed: 3"):
        hub.sample("w5 w6", beam=2, max_len_b=3)
    hub = _loaded(trained, TASKS[0], data_bin)
    read_prompt(hub, f"{text}\n", replace_newline_with_eos=True).save(tmp_path / "line.safetensors")
    assert len(PromptState.load(tmp_path / "line.safetensors", hub.models, hub.task.dictionary)) == 5
    for refused, match in (("", "no tokens"), ("w5 <pad> w6", "<pad>")):
        with pytest.raises(ValueError, match=match):
            read_prompt(hub, refused)


def test_training_is_that_of_language_modeling(trained: NamedRuns, data_bin: str) -> None:
    """The same losses; a model that was trained so reads prompts in one pass in Python by itself."""
    plain, prompted = (losses(trained.outputs[f"train {task}"]) for task in TASKS)
    assert plain == prompted
    hub = _loaded(trained, TASKS[1], data_bin)
    assert isinstance(hub.task, PromptedLanguageModelingTask)
    assert hub.sample("w3 w21", beam=2, max_len_b=6).startswith("w3 w21")
