"""Language models on any text: their commands, their names, and the text in subwords."""

from pathlib import Path

import pytest
import sentencepiece
from fairseq import options

from common.attention import ATTENTIONS
from recipes.shared import language_models
from recipes.shared.characters import spell
from recipes.shared.experiment import Data
from recipes.shared.language_models import WHOLE, LanguageModels, default_names, model_names, tokenise
from recipes.shared.split_text import SPLITS, split_path
from recipes.shared.working_folder import working_folder
from recipes.wikitext103.compare import EXPERIMENT

MODELS = LanguageModels(
    models=model_names(), seeds=2, updates=100, width=8, layers=1, heads=2, batch_tokens=64, tokens_per_sample=16
)


def test_characters_lose_nothing() -> None:
    assert spell("Ab, ▁c\td\n") == "A b , ▁ U+2581 c U+0009 d\n" and spell("\n") == "\n"


def test_every_model_has_the_same_budget() -> None:
    """fairseq's parser accepts every model's options, which differ only in the architecture's and the seed."""
    trainings = EXPERIMENT.planned(MODELS, Data(Path("data-bin"), {}))
    assert [run.training.name for run in trainings[:: len(MODELS.models)]] == [
        f"{MODELS.models[0]}.{seed}" for seed in (1, 2)
    ]
    common = []
    for run in trainings[: len(MODELS.models)]:
        words = [str(word) for word in run.training.arguments]
        options.parse_args_and_arch(options.get_training_parser(), [*words, "--cpu"])
        common.append(words[words.index("--decoder-layers") :])
        assert ("--arch flowformer_lm" in " ".join(words)) == run.model.startswith("flow")
        assert ("-short-conv 4" in " ".join(words)) == ("+short_conv" in run.model)
    assert all(words == common[0] for words in common)


def test_windows_and_chunks_are_a_quarter_of_a_sequence() -> None:
    assert MODELS.attention_arguments("daft_conv+short_conv")[2:] == ["--daft-window", 4, "--daft-short-conv", 4]
    assert MODELS.attention_arguments("mixed_chunk")[2:] == ["--mixed-chunk-chunk-size", 4]
    assert MODELS.attention_arguments("local")[2:] == ["--local-window", 4]
    assert MODELS.attention_arguments("flow")[2:] == []  # its chunk size affects speed only


def test_models_are_the_causal_mechanisms() -> None:
    causal = [name for name, attention in ATTENTIONS.items() if "causal" in attention.supports]
    assert model_names()[: len(causal)] == causal
    assert "daft_conv+short_conv" in model_names() and "softmax+short_conv" not in model_names()
    assert {"softmax", "flow", "linear", "flow+short_conv"} <= {*default_names()} <= {*model_names()}
    assert "combiner" not in default_names()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sixty short lines."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of a small text\n" for i in range(60)), encoding="utf-8")
    return path


def test_subwords_are_of_the_train_part_and_lose_no_line(text: Path, tmp_path: Path) -> None:
    """A token is a subword or the end of a line; another number of subwords gives another text."""

    def prepared(out: Path, subwords: int) -> dict[str, int]:
        with working_folder(out, EXPERIMENT.command, whole=WHOLE):
            return tokenise(text, out, False, None, subwords)

    with pytest.raises(ValueError, match="--subwords is 9000; allowed for this text: at most"):
        prepared(tmp_path / "out", 9000)
    out = tmp_path / "out"  # which the refused number does not bind
    tokens = prepared(out, 285)
    lines = (out / "text" / "wiki.valid.tokens").read_text(encoding="utf-8").splitlines()
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "text" / "sentencepiece.model"))
    assert len(model) == 285 - 1 and tokens["valid"] == sum(len(line.split()) + 1 for line in lines)
    assert [model.decode(line.split()) for line in lines] == text.read_text().splitlines()[54:57]
    with pytest.raises(ValueError, match="subwords is 290; allowed in"):
        prepared(out, 290)


@pytest.mark.parametrize("is_folder", [False, True])
def test_another_text_of_the_same_size_is_refused(is_folder: bool, tmp_path: Path, monkeypatch) -> None:
    """In a folder, one of the three splits; other files there do not matter."""
    monkeypatch.setattr(language_models, "binarise", lambda *_, **__: None)
    path, out = tmp_path / "texts", tmp_path / "out"
    path.mkdir()
    for split in SPLITS:
        split_path(path, split).write_text(f"the {split} split\n" * 20)
    changed = split_path(path, "valid")

    def prepared() -> dict[str, int]:
        with working_folder(out, EXPERIMENT.command, whole=WHOLE):
            return tokenise(path if is_folder else changed, out, True, None)

    tokens = prepared()
    (path / "more.txt").write_text("notes")
    assert prepared() == tokens
    changed.write_text(changed.read_text().replace("the", "any"))
    with pytest.raises(ValueError, match="file_sha256 is .*; allowed in"):
        prepared()
