"""Tokenizers for transformers whose ids are those of a fairseq dictionary, from the files of its subwords.

Such a tokenizer does in one step what fairseq does in two: the text is encoded as subwords, and these are looked up in
the dictionary.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.data import Dictionary
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from common.checkpoints import listed
from common.ops.shared.checks import ArgumentError

from .huggingface_options import KINDS

#: Kinds in which any text is plain text: a special symbol is recognised nowhere.
_PLAIN = ("characters", "bytes")
#: Symbols with which fairseq-preprocess fills up a dictionary.
_FILLING = re.compile(r"madeupword\d{4}")
_NUMBERED = re.compile(r"U\+([0-9A-F]{4,6})")
_SPACE = "▁"
#: Characters at which Python, and so fairseq, splits a line.
_WHITESPACE = "".join(c for c in map(chr, range(sys.maxunicode + 1)) if c.isspace())
#: Types of pieces in a sentencepiece model.
_NORMAL, _USER_DEFINED, _BYTE = 1, 4, 6
_MODEL_TYPES = {1: "unigram", 2: "bpe"}


class Frame(NamedTuple):
    """Ids around a text, and between two texts, as the model was trained on them."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    between: tuple[int, ...] = ()


def save_tokenizer(folder: Path, kind: str, dictionary: Dictionary, frame: Frame, **options: Any) -> None:
    """Write the tokenizer of ``build_tokenizer`` into ``folder``."""
    build_tokenizer(kind, dictionary, frame, **options).save_pretrained(folder)


def build_tokenizer(
    kind: str,
    dictionary: Dictionary,
    frame: Frame,
    files: Mapping[str, Path] | None = None,
    bos: int | None = None,
    padding_side: str = "right",
    longest: int | None = None,
) -> PreTrainedTokenizerFast:
    """A tokenizer whose ids are those of ``dictionary``.

    Args:
        kind: a name in ``huggingface_options.KINDS``.
        frame: what it adds to a text.
        files: the files that ``kind`` needs, by the names there.
        bos: the id that begins a text; default: the dictionary's.
        padding_side: where it pads a batch, "left" for models that continue a text.
        longest: the largest number of tokens that the model takes; None for any.

    Raises:
        ValueError: a file is missing or of another format, or the dictionary lacks some of its subwords.
    """
    files = files or {}
    missing = [name for name in KINDS[kind] if name not in files]
    if missing:
        raise ArgumentError(f"`{missing[0]}` is not given; allowed with `bpe` {kind}: the file of the training")
    for name in files:
        if name not in KINDS[kind]:
            raise ArgumentError(f"`{name}` is {str(files[name])!r}; allowed with `bpe` {kind}: not given")
    tokenizer, names = _BUILDERS[kind](dictionary, *(files[name] for name in KINDS[kind]))
    tokenizer.post_processor = _post_processor(frame, names)
    special = {"unk": dictionary.unk(), "pad": dictionary.pad(), "eos": dictionary.eos()}
    special |= {"bos": dictionary.bos() if bos is None else bos}
    if frame.before and frame.after:
        special |= {"cls": frame.before[0], "sep": frame.after[-1]}
    if "<mask>" in dictionary:
        special["mask"] = dictionary.index("<mask>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{role}_token": names[i] for role, i in special.items()},
        **({} if longest is None else {"model_max_length": longest}),
        padding_side=padding_side,
        truncation_side="right",
        split_special_tokens=kind in _PLAIN,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def check_kind(kind: str, dictionary: Dictionary) -> None:
    """Raise ValueError if ``kind`` is "words" and the symbols of ``dictionary`` are no words of a text.

    A dictionary does not say what its symbols are, and text that is not encoded as in the training has other ids.
    """
    symbols = _own_symbols(dictionary)
    if kind != "words" or not symbols:
        return
    if all(x.isascii() and x.isdecimal() for x in symbols):
        kinds = "gpt2, for numbers of GPT-2's subwords; bytes, for numbers of bytes"
    elif any(x.startswith(_SPACE) for x in symbols):
        kinds = "characters, if each is one character; sentencepiece"
    elif any(x.endswith("@@") for x in symbols):
        kinds = "split, for the subwords of subword-nmt or fastBPE"
    else:
        return
    raise ArgumentError(
        f"`bpe` is words, and the dictionary has {', '.join(symbols[:4])}; allowed for it: {kinds}; or split, if the "
        "texts for the tokenizer will be encoded before"
    )


def _own_symbols(dictionary: Dictionary) -> list[str]:
    """Symbols of ``dictionary`` without special ones and without those that fill it up."""
    symbols = dictionary.symbols[dictionary.nspecial :]
    return [x for x in symbols if x != "<mask>" and not _FILLING.fullmatch(x)]


def _post_processor(frame: Frame, names: Mapping[int, str]) -> processors.TemplateProcessing:
    before, after, between = ([f"{names[i]}:0" for i in ids] for ids in frame)
    used = {i for ids in frame for i in ids}
    return processors.TemplateProcessing(
        single=[*before, "$A:0", *after],
        pair=[*before, "$A:0", *after, *between, "$B:0", *after],
        special_tokens=[(names[i], i) for i in sorted(used)],
    )


def _words(dictionary: Dictionary) -> tuple[Tokenizer, dict[int, str]]:
    """Symbols between whitespace, as in fairseq's ``tokenize_line``."""
    vocabulary = dict(dictionary.indices)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=dictionary.unk_word))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{_WHITESPACE}]+"), "removed")
    return tokenizer, _names(vocabulary)


def _characters(dictionary: Dictionary) -> tuple[Tokenizer, dict[int, str]]:
    """Single characters; a space is "▁" in the dictionary, "▁" and other whitespace are as "U+0009".

    The end of a line is fairseq's eos, and is a newline here.
    """
    vocabulary = {_character(x): i for x, i in dictionary.indices.items() if i != dictionary.eos()}
    vocabulary["\n"] = dictionary.eos()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=dictionary.unk_word))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")  # m: also a newline
    tokenizer.decoder = decoders.Fuse()
    return tokenizer, _names(vocabulary)


def _character(symbol: str) -> str:
    numbered = _NUMBERED.fullmatch(symbol)
    if symbol == _SPACE:
        return " "
    return chr(int(numbered[1], 16)) if numbered and int(numbered[1], 16) <= sys.maxunicode else symbol


def _bytes(dictionary: Dictionary) -> tuple[Tokenizer, dict[int, str]]:
    """Single bytes, in the dictionary as decimal numbers; the byte of a newline is fairseq's eos."""
    characters = _byte_characters()
    missing = [str(i) for i in range(256) if i != ord("\n") and str(i) not in dictionary]
    if missing:
        raise ArgumentError(
            f"`bpe` is bytes, and the dictionary lacks {len(missing)} of them{listed(missing)}; allowed with it: a "
            "symbol for each byte but the newline, 0 to 255"
        )
    of_bytes = {str(i): characters[i] for i in range(256)}
    vocabulary = {of_bytes.get(x, x): i for x, i in dictionary.indices.items() if i != dictionary.eos()}
    vocabulary[characters[ord("\n")]] = dictionary.eos()
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=dictionary.unk_word))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.Split(Regex(r"(?m:.)"), "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _names(vocabulary)


def _byte_characters() -> list[str]:
    """The character that stands for each byte in GPT-2's subwords: itself if it can be seen, or one from U+0100 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(0x100, 0x200))
    return [chr(i if i in seen else next(others)) for i in range(256)]


def _gpt2(dictionary: Dictionary, encoder_json: Path, vocab_bpe: Path) -> tuple[Tokenizer, dict[int, str]]:
    """GPT-2's subwords, whose numbers are the symbols of the dictionary."""
    numbers, merges = _read_encoder(encoder_json), _read_merges(vocab_bpe)
    unknown = [part for pair in merges for part in (*pair, "".join(pair)) if part not in numbers]
    if unknown:
        raise ArgumentError(
            f"`gpt2_vocab_bpe` is {str(vocab_bpe)!r}, whose subwords are not all in {str(encoder_json)!r}"
            f"{listed(unknown)}; allowed: two files of the same subwords"
        )
    _check_complete("gpt2", [(str(number), token) for token, number in numbers.items()], dictionary)
    vocabulary = {token: dictionary.index(str(number)) for token, number in numbers.items()}
    taken = set(vocabulary.values())
    vocabulary |= {x: i for x, i in dictionary.indices.items() if i not in taken}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, _names(vocabulary)


def _read_encoder(path: Path) -> dict[str, int]:
    with _reading("gpt2_encoder_json", path, "GPT-2's encoder.json"):
        numbers = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(numbers, dict) or not all(isinstance(x, int) for x in numbers.values()):
            raise ValueError("it is no dictionary from subwords to numbers")
    return numbers


def _read_merges(path: Path) -> list[tuple[str, str]]:
    with _reading("gpt2_vocab_bpe", path, "GPT-2's vocab.bpe"):
        lines = path.read_text(encoding="utf-8").split("\n")
        pairs = [tuple(line.split(" ")) for line in lines[lines[0].startswith("#version") :] if line]
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise ValueError("a line has not two subwords")
    return pairs


@contextmanager
def _reading(argument: str, path: Path, allowed: str) -> Iterator[None]:
    """Turn an error inside the ``with`` block into a ValueError that names the file ``path`` and what is allowed."""
    if not path.is_file():
        raise ArgumentError(f"`{argument}` is {str(path)!r}, which is no file; allowed: {allowed}")
    try:
        yield
    except Exception as error:  # the readers of sentencepiece and JSON raise many
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ArgumentError(
            f"`{argument}` is {str(path)!r}, which cannot be read ({reason}); allowed: {allowed}"
        ) from error


def _check_complete(kind: str, symbols: Iterable[tuple[str, str]], dictionary: Dictionary) -> None:
    """Raise ValueError unless ``dictionary`` has all ``symbols``, pairs of its symbol and the subword as people see it.

    Such subwords are unknown in fairseq, where subwords are formed first and looked up afterwards. transformers forms
    them from those in the vocabulary alone, and would form others.
    """
    missing = [shown for symbol, shown in symbols if symbol not in dictionary]
    if missing:
        raise ArgumentError(
            f"`bpe` is {kind}, and the dictionary lacks {len(missing)} of its subwords{listed(missing)}; allowed with "
            "it: a dictionary of all of them, as with fairseq-preprocess --srcdict; or `bpe` split, if the texts for "
            "the tokenizer will be encoded before"
        )


def _sentencepiece(dictionary: Dictionary, model: Path) -> tuple[Tokenizer, dict[int, str]]:
    """The pieces of a sentencepiece model, in the order of the dictionary."""
    with _reading("sentencepiece_model", model, "the model that encoded the training's text"):
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()
        proto.ParseFromString(model.read_bytes())
        if proto.trainer_spec.model_type not in _MODEL_TYPES or not proto.pieces:
            raise ValueError("it has no pieces of the types unigram or bpe")
    pieces = {x.piece: x for x in proto.pieces if x.type in (_NORMAL, _USER_DEFINED, _BYTE)}
    defined = [name for name, piece in pieces.items() if piece.type == _USER_DEFINED]
    if defined:
        raise ArgumentError(
            f"`sentencepiece_model` is {str(model)!r}, which has user-defined symbols{listed(defined)}; allowed: none, "
            "or `bpe` split, if the texts for the tokenizer will be encoded before"
        )
    _check_complete("sentencepiece", [(name, name) for name in pieces], dictionary)
    vocabulary = dict(dictionary.indices)
    fallback = proto.trainer_spec.byte_fallback
    if _MODEL_TYPES[proto.trainer_spec.model_type] == "unigram":
        least = min(x.score for x in pieces.values())
        names = _names(vocabulary)
        scored = [(names[i], pieces[names[i]].score if names[i] in pieces else least) for i in range(len(dictionary))]
        tokenizer = Tokenizer(models.Unigram(scored, unk_id=dictionary.unk(), byte_fallback=fallback))
    else:
        unknown = {"unk_token": dictionary.unk_word, "fuse_unk": True}
        tokenizer = Tokenizer(models.BPE(vocabulary, _merges(pieces), byte_fallback=fallback, **unknown))
    _normalise_as(proto.normalizer_spec, tokenizer, fallback)
    return tokenizer, _names(vocabulary)


def _merges(pieces: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs of pieces that are merged, the highest score first; sentencepiece stores only what they become."""
    ranked = [
        (-piece.score, name[:cut], name[cut:])
        for name, piece in pieces.items()
        if piece.type == _NORMAL
        for cut in range(1, len(name))
        if all(part in pieces and pieces[part].type == _NORMAL for part in (name[:cut], name[cut:]))
    ]
    return [(left, right) for _, left, right in sorted(ranked, key=lambda x: x[0])]


def _normalise_as(spec: Any, tokenizer: Tokenizer, byte_fallback: bool) -> None:
    """Set the normalisation of a sentencepiece model, and the decoder that undoes it."""
    steps = [normalizers.Precompiled(spec.precompiled_charsmap)] if spec.precompiled_charsmap else []
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))  # not to an empty text
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    undo = [decoders.Replace(_SPACE, " "), *([decoders.ByteFallback()] if byte_fallback else []), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if spec.add_dummy_prefix else undo)


def _names(vocabulary: Mapping[str, int]) -> dict[int, str]:
    return {i: name for name, i in vocabulary.items()}


_BUILDERS: dict[str, Callable[..., tuple[Tokenizer, dict[int, str]]]] = {
    "words": _words,
    "split": _words,  # of a text that is encoded as subwords already
    "characters": _characters,
    "bytes": _bytes,
    "sentencepiece": _sentencepiece,
    "gpt2": _gpt2,
}
