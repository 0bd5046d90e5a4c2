"""``--task prompted_language_modeling`` in fairseq's commands and in Python, beside ``language_modeling``."""

import re
from pathlib import Path

import pytest
from fairseq.models.transformer_lm import TransformerLanguageModel

from fairseq_plugin import FlowformerLanguageModel, PromptedLanguageModelingTask, PromptState, read_prompt
from tests.fairseq_plugin.helpers.commands import USER_DIR, run_in_turn, training_command
from tests.fairseq_plugin.helpers.logs import losses

TASKS = ("language_modeling", "prompted_language_modeling")
CLASSES = {"flowformer_lm": FlowformerLanguageModel, "transformer_lm": TransformerLanguageModel}
PROMPTS = "w3 w21 w28 w5 w6\n\nw5 <pad> w8\nw7 w9 w11\n"


def _hypotheses(output: str) -> list[tuple[str, float, str]]:
    """The sentence's number, score and words of each hypothesis that a command printed."""
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", output, re.MULTILINE)
    return [(number, float(score), words) for number, score, words in found]


@pytest.fixture(scope="module", params=CLASSES)
def trained(request: pytest.FixtureRequest, data_bin: str, tmp_path_factory: pytest.TempPathFactory):
    """An architecture, the folder of a short training by ``language_modeling``, and what each command then said."""
    arch, folder = request.param, tmp_path_factory.mktemp(request.param)
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(folder / "checkpoint_best.pt"), "--cpu", "--beam", "3"]
    base += ["--nbest", "3", "--max-len-b", "30"]
    commands = [("fairseq_cli.train", training_command(data_bin, str(folder), arch), "")]
    for task in TASKS:
        lines = ["--sample-break-mode", "eos", "--prefix-size", "4", "--batch-size", "4"]
        commands.append(("fairseq_cli.generate", [*base, "--task", task, *lines], ""))
        commands.append(
            ("fairseq_cli.interactive", [*base, "--task", task, "--buffer-size", "4", "--batch-size", "4"], PROMPTS)
        )
    return arch, folder, run_in_turn(*commands)[1:]


def test_commands_give_the_same(trained: tuple[str, Path, list[str]]) -> None:
    """fairseq-generate with beginnings of lines, fairseq-interactive with unequal prompts, an empty one too."""
    generated, typed, generated_by_ours, typed_by_ours = map(_hypotheses, trained[2])
    for found, expected in ((generated_by_ours, generated), (typed_by_ours, typed)):
        assert len(found) >= 12
        assert [(number, words) for number, _, words in found] == [(number, words) for number, _, words in expected]
        assert [score for _, score, _ in found] == pytest.approx([score for _, score, _ in expected], abs=1e-3)


def test_in_python(trained: tuple[str, Path, list[str]], data_bin: str) -> None:
    """``sample`` and ``generate`` of a model that was loaded, and its scores as before."""
    arch, folder, _ = trained
    hub = CLASSES[arch].from_pretrained(str(folder), "checkpoint_best.pt", data_name_or_path=data_bin).eval()
    prompts, options = ["w3 w21 w28 w5", "w5", ""], {"beam": 4, "max_len_b": 30}
    sampled = hub.sample(prompts, **options)
    scores = [one["score"] for one in hub.generate([hub.encode(prompts[0])], **options)[0]]
    scored = hub.score(prompts[0])["score"]
    hub.task = PromptedLanguageModelingTask.of(hub.task)
    assert hub.sample(prompts, **options) == sampled
    assert [float(one["score"]) for one in hub.generate([hub.encode(prompts[0])], **options)[0]] == pytest.approx(
        [float(score) for score in scores], abs=1e-4
    )
    assert float(hub.score(prompts[0])["score"]) == pytest.approx(float(scored))
    with pytest.raises(ValueError, match="4 tokens; allowed: 3"):
        hub.sample(prompts[:1], beam=2, max_len_b=3)


def test_a_text_is_read_once(trained: tuple[str, Path, list[str]], data_bin: str, tmp_path: Path) -> None:
    """fairseq-interactive keeps its state, and goes on from it, fairseq-generate too; in Python the same file."""
    arch, folder, _ = trained
    kept, text = tmp_path / "text.safetensors", "w3 w21 w28 w5"
    base = [data_bin, "--user-dir", USER_DIR, "--path", str(folder / "checkpoint_best.pt"), "--cpu", "--beam", "3"]
    base += ["--task", TASKS[1], "--max-len-b", "30"]
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
    hub = CLASSES[arch].from_pretrained(str(folder), "checkpoint_best.pt", data_name_or_path=data_bin).eval()
    plain = PromptedLanguageModelingTask.of(hub.task)
    read_prompt(hub, f"{text}\n", replace_newline_with_eos=True).save(tmp_path / "line.safetensors")
    for name, length in (("text", 4), ("line", 5)):
        state = PromptState.load(tmp_path / f"{name}.safetensors", hub.models, hub.task.dictionary)
        assert len(state) == length
        hub.task = PromptedLanguageModelingTask.of(plain, after=state)
        sampled = hub.sample("w5 w6", beam=3, max_len_b=30)
        assert sampled.startswith(text)
        if name == "text":
            assert sampled == expected[0][2]
    for refused, match in (("", "no tokens"), ("w5 <pad> w6", "<pad>")):
        with pytest.raises(ValueError, match=match):
            read_prompt(hub, refused)


def test_training_is_that_of_language_modeling(data_bin: str, tmp_path: Path) -> None:
    """The same losses; a model that was trained so reads prompts in one pass in Python by itself."""
    commands = [training_command(data_bin, str(tmp_path / task), "flowformer_lm", "--task", task) for task in TASKS]
    plain, prompted = (losses(output) for output in run_in_turn(*(("fairseq_cli.train", one, "") for one in commands)))
    assert plain == prompted
    folder = str(tmp_path / TASKS[1])
    hub = FlowformerLanguageModel.from_pretrained(folder, "checkpoint_best.pt", data_name_or_path=data_bin)
    assert isinstance(hub.task, PromptedLanguageModelingTask)
    assert hub.sample("w3 w21", beam=2, max_len_b=6).startswith("w3 w21")
