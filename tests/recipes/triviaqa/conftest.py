"""Generated questions, and the subwords of their pages, once for all tests."""

from pathlib import Path

import pytest
import sentencepiece

from recipes.shared.subword_text import train_sentencepiece, write_dictionary
from recipes.triviaqa import generated


@pytest.fixture(scope="package")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder laid out as triviaqa-rc."""
    folder = tmp_path_factory.mktemp("trivia") / "generated"
    assert generated.main(["--out", str(folder), "--train", "60", "--valid", "12", "--people", "4"]) == 0
    return folder


@pytest.fixture(scope="package")
def subwords(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the subwords as written by recipes.flash.prepare."""
    folder = tmp_path_factory.mktemp("subwords")
    model = folder / "sentencepiece.model"
    with open(questions / "pages.txt", encoding="utf-8") as lines:
        train_sentencepiece(lines, model, 380, masked=False, threads=1)
    write_dictionary(sentencepiece.SentencePieceProcessor(model_file=str(model)), folder / "dict.txt")
    return folder
