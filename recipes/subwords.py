"""Sentencepiece models as fairseq sees them: a dictionary with every piece."""

from pathlib import Path

import sentencepiece


def load_sentencepiece(prefix: Path) -> sentencepiece.SentencePieceProcessor:
    """The model written as ``prefix``.model."""
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def write_dictionary(model: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """Every piece of ``model`` as a fairseq dictionary, so that no split has an unknown piece."""
    pieces = (model.id_to_piece(i) for i in range(len(model)) if not (model.is_control(i) or model.is_unknown(i)))
    # The counts are not used by the model; fairseq wants one.
    path.write_text("".join(f"{piece} 1\n" for piece in pieces), encoding="utf-8")
