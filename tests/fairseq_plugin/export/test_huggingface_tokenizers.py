"""Tokenizers for transformers: their ids are those of fairseq's dictionary, and they give the text back."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder
from transformers import PreTrainedTokenizerFast

from fairseq_plugin.export.huggingface_tokenizers import Frame, build_tokenizer, check_kind
from recipes.prepare_text import byte_symbols
from recipes.texts import spell, write_dictionary
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary

WHITESPACE = "".join(c for c in map(chr, range(0x3100)) if c.isspace())
#: Texts of which a tokenizer gets something wrong if it is not fairseq's.
TEXTS = [
    "w1 w2 w59",
    "",
    " ",
    "  w3 leads and trails w4   ",
    "words that are unknown, and w5.",
    "Zürich, 東京 und\u00a0Kraków\u2003w6 \U0001f600",
    "tabs\tand\x1cseparators\u2028w7\r",
    f"w8{WHITESPACE.replace(chr(10), '')}w9",
    "a ▁ in the text, ▁▁twice, and U+0009",
    "w1</w> don't  DON'T 12345 _ -- 'll",
    "a\x00b é e\u0301 ﬁ Ａ",
]
LM = Frame((2,))


def ids_of(symbols: Dictionary, line: str) -> list[int]:
    """fairseq's ids of a line, without the eos."""
    return symbols.encode_line(line, add_if_not_exist=False, append_eos=False).tolist()


def again(tokenizer: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    """``tokenizer``, saved and loaded twice."""
    for name in ("one", "two"):
        tokenizer.save_pretrained(folder / name)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / name)
    return tokenizer


def check(
    tokenizer: PreTrainedTokenizerFast,
    ids: Callable[[str], list[int]],
    more: Sequence[str],
    back: Callable[[str], str] | None = None,
) -> None:
    """The ids of ``TEXTS`` and ``more`` are those after the bos, and give texts without unknown words back."""
    for text in (*TEXTS, *more):
        assert tokenizer(text).input_ids == [2, *ids(text)], text
        assert tokenizer(text, add_special_tokens=False).input_ids == ids(text), text
        if back is not None and tokenizer.unk_token_id not in ids(text):
            assert tokenizer.decode(ids(text)) == back(text), text


def test_words(tmp_path: Path) -> None:
    """Any whitespace separates; symbols of the dictionary such as <unk> and </s> are found in a text."""
    symbols = dictionary()
    tokenizer = again(build_tokenizer("words", symbols, LM, bos=2, padding_side="left"), tmp_path)
    check(tokenizer, lambda text: ids_of(symbols, text), ["w1 </s> w2 <unk> <pad> <s>"])
    assert tokenizer("w1 w2" + tokenizer.eos_token).input_ids == [2, *symbols.encode_line("w1 w2").tolist()]
    assert tokenizer.decode(tokenizer("w1  w2\tw3").input_ids, skip_special_tokens=True) == "w1 w2 w3"
    batch = tokenizer(["w1 w2 w3", "w1"], padding=True)
    assert batch.input_ids[1] == [1, 1, 2, symbols.index("w1")] and batch.attention_mask[1] == [0, 0, 1, 1]
    assert set(batch) == {"input_ids", "attention_mask"}
    roles = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert roles == ("</s>", "</s>", "<pad>", "<unk>")


def test_frames(tmp_path: Path) -> None:
    """Ids around one text and between two, as RoBERTa has them; the symbol for masks."""
    symbols = dictionary()
    symbols.add_symbol("<mask>")
    tokenizer = again(build_tokenizer("words", symbols, Frame((0,), (2,), (2,)), longest=12), tmp_path)
    first, second = ids_of(symbols, "w1 w2"), ids_of(symbols, "w3")
    assert tokenizer("w1 w2").input_ids == [0, *first, 2]
    assert tokenizer("w1 w2", "w3").input_ids == [0, *first, 2, 2, *second, 2]
    assert tokenizer("w1 <mask>").input_ids == [0, first[0], symbols.index("<mask>"), 2]
    assert tokenizer.mask_token_id == symbols.index("<mask>") and tokenizer.model_max_length == 12
    assert (tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.padding_side) == (0, 2, "right")
    assert len(tokenizer) == len(symbols)


def test_characters(tmp_path: Path) -> None:
    """Lines as recipes.texts spells them; the eos at the end of each is a newline."""
    symbols, lines = Dictionary(), [text for text in TEXTS if "é" not in text]
    for line in lines:
        symbols.encode_line(spell(line), append_eos=False)
    tokenizer = again(build_tokenizer("characters", symbols, LM, bos=2), tmp_path)
    check(tokenizer, lambda text: ids_of(symbols, spell(text)), ["<unk> and </s> are characters here"])
    text = "\n".join(lines) + "\n"
    ids = [i for line in lines for i in symbols.encode_line(spell(line)).tolist()]
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    assert tokenizer.decode(ids) == text


def test_bytes(tmp_path: Path) -> None:
    """Bytes as recipes.prepare_text numbers them."""
    symbols, table = byte_symbols()
    tokenizer = again(build_tokenizer("bytes", symbols, LM, bos=2), tmp_path)
    check(tokenizer, lambda text: table[list(text.encode())].tolist(), ["lines\nand lines\n", "<pad> </s>"], str)


def sentencepiece_model(folder: Path, model_type: str, byte_fallback: bool) -> tuple[Path, Dictionary]:
    """A model of ``TEXTS`` and this file, and a dictionary of its pieces in another order."""
    path = folder / f"{model_type}.model"
    lines = [*TEXTS, *Path(__file__).read_text(encoding="utf-8").splitlines()]
    with open(path, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line.replace("\x00", "") for line in lines if line.strip()),
            model_writer=file,
            model_type=model_type,
            vocab_size=420,
            byte_fallback=byte_fallback,
            minloglevel=2,
            num_threads=1,
        )
    pieces = folder / "pieces.txt"
    write_dictionary(sentencepiece.SentencePieceProcessor(model_file=str(path)), pieces)
    reversed_lines = pieces.read_text(encoding="utf-8").split("\n")[-2::-1]
    pieces.write_text("".join(f"{line}\n" for line in reversed_lines), encoding="utf-8")
    return path, Dictionary.load(str(pieces))


@pytest.mark.parametrize("model_type, byte_fallback", [("unigram", True), ("unigram", False), ("bpe", True)])
def test_sentencepiece(model_type: str, byte_fallback: bool, tmp_path: Path) -> None:
    """Pieces have the ids of the dictionary, whatever their order there."""
    path, symbols = sentencepiece_model(tmp_path, model_type, byte_fallback)
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    files = {"sentencepiece_model": path}
    check(
        again(build_tokenizer("sentencepiece", symbols, LM, files, bos=2), tmp_path),
        lambda text: [symbols.index(piece) for piece in model.encode(text, out_type=str)],
        ["a line of this file: for text in TEXTS", "Привет, мир"],
        lambda text: model.decode(model.encode(text)),
    )
    lacking = Dictionary()
    for symbol in symbols.symbols[4:-3]:
        lacking.add_symbol(symbol)
    with pytest.raises(ValueError, match="lacks 3") as caught:
        build_tokenizer("sentencepiece", lacking, LM, files)
    assert symbols.symbols[-1] in str(caught.value)


def gpt2_files(folder: Path) -> tuple[dict[str, Path], dict[str, int]]:
    """Files of a byte-pair encoding of a few merges, and the number of each subword."""
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "w"), ("Ġw", "o"), ("r", "d"), ("Ġwo", "rd")]
    tokens = [*bytes_to_unicode().values(), *("".join(pair) for pair in merges), "<|endoftext|>"]
    numbers = {token: 3 * i for i, token in enumerate(tokens)}
    files = {"gpt2_encoder_json": folder / "encoder.json", "gpt2_vocab_bpe": folder / "vocab.bpe"}
    files["gpt2_encoder_json"].write_text(json.dumps(numbers))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    files["gpt2_vocab_bpe"].write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return files, numbers


def test_gpt2(tmp_path: Path) -> None:
    """The symbols of the dictionary are numbers of the subwords."""
    files, numbers = gpt2_files(tmp_path)
    symbols = Dictionary()
    for number in sorted(numbers.values(), reverse=True):
        symbols.add_symbol(str(number))
    symbols.pad_to_multiple_(8)
    bpe, more = get_encoder(*map(str, files.values())), ["the word in the\n words"]
    tokenizer = again(build_tokenizer("gpt2", symbols, LM, files, bos=2), tmp_path)
    ids = {text: [symbols.index(str(number)) for number in bpe.encode(text)] for text in (*TEXTS, *more)}
    check(tokenizer, ids.__getitem__, more, str)
    assert len(tokenizer) == len(symbols)
    lacking = Dictionary()
    lacking.add_symbol("3")
    with pytest.raises(ValueError, match="lacks 264"):
        build_tokenizer("gpt2", lacking, LM, files)


def test_missing_and_wrong_files_are_refused(tmp_path: Path) -> None:
    """And files that are not read."""
    files, wrong = gpt2_files(tmp_path)[0], tmp_path / "wrong"
    rows: list[tuple[str, dict[str, Path], tuple[str, ...]]] = [
        ("sentencepiece", {}, ("sentencepiece_model",)),
        ("words", files, ("gpt2_encoder_json", "words")),
        ("sentencepiece", {"sentencepiece_model": wrong}, ("sentencepiece_model", str(wrong))),
        *(("gpt2", {**files, name: wrong}, (name, str(wrong))) for name in files),
    ]
    for content in (None, "no such format"):
        if content is not None:
            wrong.write_text(content)
        for kind, given, words in rows:
            with refused_in_one_line(tmp_path, *words):
                build_tokenizer(kind, dictionary(), LM, given)


@pytest.mark.parametrize("symbols", [["12", "5"], ["▁", "a", "b"], ["▁the", "s"], ["new@@", "est"]])
def test_a_dictionary_that_holds_no_words_is_refused(symbols: list[str], tmp_path: Path) -> None:
    """Unless the user says that text is split already."""
    known = Dictionary()
    for symbol in symbols:
        known.add_symbol(symbol)
    with refused_in_one_line(tmp_path, symbols[0]):
        check_kind("words", known)
    check_kind("split", known)
    check_kind("words", dictionary())
