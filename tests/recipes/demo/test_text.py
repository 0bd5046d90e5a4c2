"""The text part of the demo with fairseq's real commands, on minimal text."""

import pytest

from recipes.demo import text
from recipes.demo.text import Budget
from recipes.shared import corpus

BUDGET = Budget(updates=8, train_bytes=60_000, lengths=[64], epochs=1)


@pytest.fixture(scope="module")
def small():
    """Use small splits, vocabulary and model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SPLIT_BYTES", {"test": 5_000, "valid": 2_000, "train": 0})
        patch.setattr(corpus, "MAX_FILE_BYTES", 10_000)
        patch.setattr(text, "VOCABULARY", 500)
        patch.setattr(text, "TOKENS_PER_SAMPLE", 512)
        patch.setattr(text, "SAMPLE_TOKENS", 60)
        yield


def test_train_evaluate_and_write_text(small, tmp_path, imported_already, monkeypatch):
    monkeypatch.setattr(text, "ARCHITECTURES", {"flowformer_lm": "Flow-Attention"})
    result = text.run_text(tmp_path, BUDGET)
    (model,) = result.models
    assert model.evaluation.tokens == result.tokens["test"]
    assert model.bits_per_byte == pytest.approx(
        model.evaluation.bits_per_token * result.tokens["test"] / result.text_bytes["test"]
    )
    assert [point.update for point in model.points if point.split == "train_inner"] == list(range(1, 9))
    assert [point.update for point in model.points if point.split == "valid"] == [2, 4, 6, 8]
    assert model.training.peak_bytes > 2**27
    assert len(result.samples) == len(text.PROMPTS)
    for prompt, sample in zip(text.PROMPTS, result.samples, strict=True):
        assert sample.startswith(corpus.from_line(prompt).strip())


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path):
    """Training neither continues from it nor replaces it."""
    foreign = tmp_path / "flowformer_lm" / "checkpoint_last.pt"
    foreign.parent.mkdir()
    foreign.write_text("a user's")
    with pytest.raises(ValueError, match=r"checkpoint_last\.pt"):
        text.train_model(tmp_path, "flowformer_lm", BUDGET)
    assert foreign.read_text() == "a user's"


def test_models_have_the_same_shape(monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(text, "train", lambda command, *_: (commands.append(command), []))
    for architecture in text.ARCHITECTURES:
        text.train_model(tmp_path, architecture, BUDGET)
    for command, architecture in zip(commands, text.ARCHITECTURES, strict=True):
        command[command.index(architecture)] = "NAME"
        command[-1] = "FOLDER"
    assert commands[0] == commands[1] == commands[2]


def test_a_token_without_a_score_is_an_error(monkeypatch, tmp_path):
    def run(command, log):
        log.parent.mkdir()
        log.write_text("Evaluated 90 tokens in 1.0s\nLoss (base 2): 7.0, Perplexity: 128.0\n")

    monkeypatch.setattr(text, "run", run)
    with pytest.raises(ValueError, match="90 tokens .* all 100"):
        text.evaluate(tmp_path, "flowformer_lm", 100)
