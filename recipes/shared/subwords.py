"""Load a sentencepiece model, and write its vocabulary as a fairseq dictionary."""

from pathlib import Path

import sentencepiece

from .working_folder import write_text


def load_sentencepiece(prefix: Path) -> sentencepiece.SentencePieceProcessor:
    """The model written as ``prefix``.model."""
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def write_dictionary(model: sentencepiece.SentencePieceProcessor, path: Path) -> None:
    """Write all subwords of ``model`` as a fairseq dictionary, so that no split has an unknown one."""
    subwords = (model.id_to_piece(i) for i in range(len(model)) if not (model.is_control(i) or model.is_unknown(i)))
    # fairseq's format has a count per entry, which our models ignore.
    write_text(path, "".join(f"{subword} 1\n" for subword in subwords))
