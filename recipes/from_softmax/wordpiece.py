"""BERT's tokens: words, and pieces of words from a vocabulary, the longest first (Devlin et al., 2019; WordPiece)."""

import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.data import Dictionary

from common.files import json_files
from fairseq_plugin.loading.huggingface.vocabularies import BERT_SYMBOLS, read_pieces

UNKNOWN = BERT_SYMBOLS[3]
#: The mark of a piece that goes on in a word.
_INSIDE = "##"
#: Words of more characters are unknown.
_LONGEST = 100
_ALLOWED = "the files of a BERT's tokenizer, tokenizer.json or vocab.txt"
#: First and last character of each range of Chinese characters, each of which is a word.
_CHINESE = (
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x2A6DF)),
    *((0x2A700, 0x2CEAF), (0x2F800, 0x2FA1F)),
)


class WordPiece(NamedTuple):
    """The vocabulary of a tokenizer, and how it changes a text."""

    vocabulary: dict[str, int]  # piece -> its row in the embedding
    lowercase: bool = True
    strip_accents: bool = True

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, without [CLS] and [SEP]."""
        return [piece for word in self.words(text) for piece in self._pieces_of(word)]

    def words(self, text: str) -> list[str]:
        """The words of a text: it is cleaned and split at spaces and at each sign of punctuation."""
        if self.lowercase:
            text = text.lower()
        if self.strip_accents:
            text = "".join(x for x in unicodedata.normalize("NFD", text) if unicodedata.category(x) != "Mn")
        return "".join(_spaced(character) for character in text).split()

    def _pieces_of(self, word: str) -> list[str]:
        """The longest piece that a word begins with, then that of the rest; [UNK] if there is none."""
        pieces, start = [], 0
        while start < len(word) <= _LONGEST:
            mark = _INSIDE if start else ""
            ends = range(len(word), start, -1)
            end = next((end for end in ends if mark + word[start:end] in self.vocabulary), None)
            if end is None:
                break
            pieces.append(mark + word[start:end])
            start = end
        return pieces if start == len(word) else [UNKNOWN]


def read_wordpiece(folder: Path) -> WordPiece:
    """The tokenizer of a folder, from tokenizer.json or else from vocab.txt.

    Raises:
        ValueError: there is neither, one is damaged or of another kind, or a symbol that BERT needs is missing.
    """
    pieces, path = read_pieces(folder), folder / "tokenizer.json"
    if path.exists():
        options = _as_object(_as_object(json_files.read(path, _ALLOWED)).get("normalizer"))
        if options.get("type") != "BertNormalizer":
            raise ValueError(f"{path} has the normalizer {options.get('type')!r}; allowed: BertNormalizer, as BERT's")
        lowercase = options.get("lowercase", True)
    else:
        config = folder / "tokenizer_config.json"
        options = _as_object(json_files.read(config, _ALLOWED)) if config.exists() else {}
        lowercase = options.get("do_lower_case", True)
    strip_accents = options.get("strip_accents")  # by default as where letters become small ones
    return WordPiece(pieces, bool(lowercase), bool(lowercase if strip_accents is None else strip_accents))


def _as_object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _spaced(character: str) -> str:
    """A character; between spaces if it is a word by itself, a space in place of whitespace, nothing for a control."""
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    if category.startswith("C") or character == "\ufffd":
        return ""
    symbol = character.isascii() and not character.isalnum()  # $, + and their like count as punctuation too
    chinese = any(first <= ord(character) <= last for first, last in _CHINESE)
    return f" {character} " if symbol or chinese or category.startswith("P") else character


def numbers_in(dictionary: Dictionary, tokenizer: WordPiece) -> dict[str, int]:
    """Pieces and their numbers in ``dictionary``, whose own symbols stand for BERT's."""
    own = (dictionary.bos(), dictionary.pad(), dictionary.eos(), dictionary.unk(), dictionary.index("<mask>"))
    usual = {piece: dictionary.index(piece) for piece in tokenizer.vocabulary if piece not in BERT_SYMBOLS}
    return {**usual, **dict(zip(BERT_SYMBOLS, own))}
