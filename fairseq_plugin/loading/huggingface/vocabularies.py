"""Tokenizers' vocabularies as dictionaries of fairseq: WordPiece of BERT, and the byte-level BPE of GPT-2 and RoBERTa.

A dictionary begins with ``<s>``, ``<pad>``, ``</s>`` and ``<unk>``, and that of a masked model ends with ``<mask>``.
Other symbols keep the order of their rows in the source's embedding. A symbol of a BPE is a number, as fairseq's
``--bpe gpt2`` writes it: first the 256 bytes, then the merges in their order.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from torch import Tensor

from common.files import json_files
from common.ops.shared.checks import shortened

from .folder import ALLOWED, read_object

#: BERT's symbols for fairseq's <s>, <pad>, </s>, <unk> and <mask>.
BERT_SYMBOLS = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
ROBERTA_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
#: GPT-2's end of a text, which follows the merges.
_END_OF_TEXT = "<|endoftext|>"
_MERGES_HEAD = "#version: 0.2"


class Vocabulary(NamedTuple):
    """A vocabulary in fairseq's terms. Legend: V symbols."""

    dictionary: Dictionary
    #: (V,): the row of each symbol in the source's embedding.
    rows: Tensor
    #: Files that fairseq's tokenizer needs beside the dictionary: name -> content.
    files: dict[str, str]


class BytePairs(NamedTuple):
    """A byte-level BPE."""

    #: Token -> its row in the embedding.
    tokens: dict[str, int]
    #: Token -> its number for fairseq's ``--bpe gpt2``.
    numbers: dict[str, int]
    merges: list[tuple[str, str]]

    def files(self) -> dict[str, str]:
        """encoder.json and vocab.bpe, in the format that ``--bpe gpt2`` reads."""
        lines = [_MERGES_HEAD, *(" ".join(pair) for pair in self.merges)]
        return {"encoder.json": json.dumps(self.numbers), "vocab.bpe": "".join(f"{line}\n" for line in lines)}


def bert_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a BERT whose embedding has ``vocab_size`` rows.

    Raises:
        ValueError: a file is missing, damaged or of another kind, a symbol is missing, or a row is not below
        ``vocab_size``.
    """
    pieces = read_pieces(folder)
    return _vocabulary(folder, pieces, {piece: piece for piece in pieces}, BERT_SYMBOLS, vocab_size)


def roberta_vocabulary(folder: Path, vocab_size: int) -> Vocabulary:
    """The vocabulary of a RoBERTa whose embedding has ``vocab_size`` rows; raises as ``bert_vocabulary`` does."""
    pairs = read_byte_pairs(folder)
    symbols = {token: str(pairs.numbers.get(token, token)) for token in pairs.tokens}
    vocabulary = _vocabulary(folder, pairs.tokens, symbols, ROBERTA_SYMBOLS, vocab_size)
    return vocabulary._replace(files=pairs.files())


def gpt2_vocabulary(folder: Path, vocab_size: int, begin: int, end: int, padding: int) -> Vocabulary:
    """The vocabulary of a GPT-2 whose embedding has ``vocab_size`` rows; raises as ``bert_vocabulary`` does.

    ``begin``, ``end`` and ``padding`` are the rows of fairseq's ``<s>``, ``</s>`` and ``<pad>``, which may be the same
    row. ``<unk>``, which GPT-2 has not, has the row of ``</s>``, as in GPT-2's own tokenizer.
    """
    pairs = read_byte_pairs(folder)
    special = [begin, padding, end, end]
    usual = {token: row for token, row in pairs.tokens.items() if row not in special}
    symbols = {token: str(pairs.numbers.get(token, token)) for token in usual}
    dictionary = _dictionary(folder, [symbols[token] for token in _ordered(usual)])
    rows = [*special, *(usual[token] for token in _ordered(usual))]
    _check_rows(folder, rows, len(set(special)) + len(usual), vocab_size)
    # A number for each symbol: the end of a text is </s>, which no text is split into.
    numbers = {token: number for token, number in pairs.numbers.items() if pairs.tokens.get(token) not in special}
    return Vocabulary(dictionary, torch.tensor(rows), pairs._replace(numbers=numbers).files())


def read_pieces(folder: Path) -> dict[str, int]:
    """The pieces of a WordPiece vocabulary and their rows, from tokenizer.json or else from vocab.txt.

    Raises:
        ValueError: there is neither, one is damaged or of another kind, or a symbol that BERT needs is missing.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        pieces = _tokens(path, _read_tokenizer(path, "WordPiece", "as BERT's"))
    elif (folder / "vocab.txt").exists():
        path = folder / "vocab.txt"
        pieces = {piece: row for row, piece in enumerate(_read_lines(path))}
    else:
        raise ValueError(f"{folder} has no tokenizer.json and no vocab.txt; allowed: {ALLOWED}")
    _check_symbols(path, pieces, BERT_SYMBOLS)
    return pieces


def read_byte_pairs(folder: Path) -> BytePairs:
    """The byte-level BPE of a folder, from tokenizer.json or else from vocab.json and merges.txt.

    Raises:
        ValueError: they are missing, damaged or of another kind.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        content = _read_tokenizer(path, "BPE", "at the level of bytes, as GPT-2's")
        if "ByteLevel" not in json.dumps(content.get("pre_tokenizer")):
            raise ValueError(f"{path} has no pre_tokenizer ByteLevel; allowed: a BPE at the level of bytes, as GPT-2's")
        tokens, merges = _tokens(path, content), content["model"].get("merges")
    else:
        path = folder / "merges.txt"
        tokens = json_files.typed(read_object(folder / "vocab.json"), dict[str, int], f"{folder / 'vocab.json'}")
        merges = [line for line in _read_lines(path) if line and not line.startswith("#version")]
    if not isinstance(merges, list):
        raise ValueError(f"{path} has no list of merges; allowed: {ALLOWED}")
    pairs = [_pair(path, merge) for merge in merges]
    numbers: dict[str, int] = {}
    for token in (*bytes_to_unicode().values(), *map("".join, pairs), _END_OF_TEXT):
        numbers.setdefault(token, len(numbers))
    return BytePairs(tokens, numbers, pairs)


def _read_tokenizer(path: Path, kind: str, words: str) -> dict[str, Any]:
    """The content of a tokenizer.json whose model is a ``kind``."""
    content = read_object(path)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type") != kind:
        given = model.get("type") if isinstance(model, dict) else model
        raise ValueError(f"{path} has the model {shortened(given)}; allowed: {kind}, {words}")
    return content


def _tokens(path: Path, content: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a tokenizer.json, with those that were added, and their rows."""
    tokens = json_files.typed(content["model"].get("vocab"), dict[str, int], f"{path}: vocab")
    added = content.get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str) and isinstance(token.get("id"), int):
            tokens.setdefault(token["content"], token["id"])
    return tokens


def _pair(path: Path, merge: Any) -> tuple[str, str]:
    """The two tokens of a merge, which tokenizer.json has as a text or as a list."""
    pair = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(x, str) and x for x in pair):
        raise ValueError(f"{path} has the merge {shortened(merge)}; allowed: two tokens")
    return pair[0], pair[1]


def _vocabulary(
    folder: Path, tokens: Mapping[str, int], symbols: Mapping[str, str], special: Sequence[str], vocab_size: int
) -> Vocabulary:
    """A vocabulary with ``special`` tokens for fairseq's symbols and <mask>, and the others by ``symbols``."""
    _check_symbols(folder, tokens, special)
    *begin, mask = special
    usual = [token for token in _ordered(tokens) if token not in special]
    rows = [*(tokens[token] for token in begin), *(tokens[token] for token in usual), tokens[mask]]
    _check_rows(folder, rows, len(rows), vocab_size)
    dictionary = _dictionary(folder, [*(symbols[token] for token in usual), "<mask>"])
    return Vocabulary(dictionary, torch.tensor(rows), {})


def _check_rows(folder: Path, rows: Sequence[int], different: int, vocab_size: int) -> None:
    """Raise ValueError unless ``rows`` has ``different`` rows of an embedding of ``vocab_size`` rows."""
    if len(set(rows)) != different or max(rows) >= vocab_size or min(rows) < 0:
        raise ValueError(
            f"the tokenizer in {folder} has {different} pieces with rows up to {max(rows)}; allowed: a row for each, "
            f"below vocab_size, {vocab_size}"
        )


def _dictionary(folder: Path, symbols: Sequence[str]) -> Dictionary:
    """fairseq's dictionary with ``symbols`` after its own four."""
    dictionary = Dictionary()
    own = len(dictionary)
    for symbol in symbols:
        if "\n" in symbol or "\r" in symbol:  # dict.txt has one symbol in each line
            raise ValueError(f"the tokenizer in {folder} has the piece {shortened(symbol)}; allowed: within a line")
        dictionary.add_symbol(symbol)
    if len(dictionary) != own + len(symbols):
        raise ValueError(f"the tokenizer in {folder} has a piece that is a symbol of fairseq's; allowed: none")
    return dictionary


def _check_symbols(path: Path, tokens: Mapping[str, int], needed: Sequence[str]) -> None:
    missing = [symbol for symbol in needed if symbol not in tokens]
    if missing:
        raise ValueError(f"the vocabulary in {path} has no {missing[0]}; allowed: one with {', '.join(needed)}")


def _ordered(tokens: Mapping[str, int]) -> list[str]:
    """The tokens in the order of their rows."""
    return sorted(tokens, key=lambda token: tokens[token])


def _read_lines(path: Path) -> list[str]:
    """The lines of a text file, which end at a line feed alone: other separators may be tokens."""
    if not path.is_file():
        raise ValueError(f"{path.parent} has no {path.name}; allowed: {ALLOWED}")
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; allowed: {ALLOWED}") from error
    return text.removesuffix("\n").split("\n")
