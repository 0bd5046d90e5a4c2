"""A pretrained encoder: its weights and tokens as BERT has them, and once from a folder to the results."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.from_softmax import encoder, encoder_models
from recipes.from_softmax.bert import read_bert, write_checkpoint
from recipes.from_softmax.sentences import read_texts
from recipes.from_softmax.stages import DISTILLED, EXCHANGED, TRANSFERRED
from tests.compare import assert_close

WORDS = "the a cat dog un ##aff ##able ##s sat on mat , . $ cafe 猫 ran to see red blue sky is and of it".split()
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
PIECES += "ο ##δ ##ο ##σ ##ς 中 文 ##文 b ##b é caf ##é ##e A < > ent ! \U0002b821".split()
#: Words at pieces, signs, accents, Chinese, emoji, controls, long words, Greek capitals, symbols, an added token.
ODD = (
    *(
        "The unaffable cats,dogs.",
        "Café\tunhappy $a",
        "é e\u0301 CAFÉ",
        "A猫\u200bdog\u00a0red",
        "中文 a中",
        "ΟΔΟΣ οδος",
    ),
    *("a\u200db", "a\x0bb", "a\x0cb", "a\x85b", "a\x1cb", "a\u2028b", "a\ufffdb", "\U0001fae8 a", "a\U0001fae8"),
    *("ΟΔΟΣ οδος", "\U0002b821a", "un" + 100 * "aff", "a <ent> b", "[CLS] a[MASK] b [mask] [SEP]", "", " "),
)
WIDTH, LAYERS, HEADS, FFN, POSITIONS = 8, 2, 2, 16, 24
CONFIG = {
    "model_type": "bert",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": FFN,
    "max_position_embeddings": POSITIONS,
    "vocab_size": len(PIECES) + 3,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
LINE = "the cat sat on the mat , and a red dog ran to see the blue sky . \n"


def copied(folder: Path, target: Path) -> None:
    """Copy the files of an encoder."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of a BERT without a language-model head."""
    found = {
        "embeddings.word_embeddings.weight": (CONFIG["vocab_size"], WIDTH),
        "embeddings.position_embeddings.weight": (POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "pooler.dense.weight": (WIDTH, WIDTH),
        "pooler.dense.bias": (WIDTH,),
    }
    modules = {"embeddings.LayerNorm": None}
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}."
        modules |= {f"{layer}attention.self.{x}": (WIDTH, WIDTH) for x in ("query", "key", "value")}
        modules |= {f"{layer}attention.output.dense": (WIDTH, WIDTH), f"{layer}attention.output.LayerNorm": None}
        modules |= {f"{layer}intermediate.dense": (FFN, WIDTH), f"{layer}output.dense": (WIDTH, FFN)}
        modules[f"{layer}output.LayerNorm"] = None
    for name, shape in modules.items():
        found |= {f"{name}.weight": shape or (WIDTH,), f"{name}.bias": (shape or (WIDTH,))[:1]}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT; its embeddings are small, so that the eps of a LayerNorm shows."""
    folder = tmp_path_factory.mktemp("bert")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}
    for name, x in tensors.items():
        x.mul_(0.01 if "_embeddings" in name else 0.5)
        x.add_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return folder


def literal(tensors: dict[str, Tensor], rows: list[int]) -> Tensor:
    """The last layer (T, D) of BERT for one text, from its formulas."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
        return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]

    words, positions, types = (tensors[f"embeddings.{x}_embeddings.weight"] for x in ("word", "position", "token_type"))
    x = norm("embeddings.LayerNorm", words[rows] + positions[: len(rows)] + types[0])
    for i in range(LAYERS):
        layer = f"encoder.layer.{i}."
        q, k, v = (
            linear(f"{layer}attention.self.{name}", x).view(len(rows), HEADS, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        weights = (q @ k.transpose(1, 2) / math.sqrt(WIDTH / HEADS)).softmax(-1)
        attended = linear(f"{layer}attention.output.dense", (weights @ v).transpose(0, 1).flatten(1))
        x = norm(f"{layer}attention.output.LayerNorm", x + attended)
        inner = linear(f"{layer}intermediate.dense", x)
        inner = inner * (1.0 + torch.erf(inner / math.sqrt(2.0))) / 2.0
        x = norm(f"{layer}output.LayerNorm", x + linear(f"{layer}output.dense", inner))
    return x


def test_the_model_is_bert(folder: Path, tmp_path: Path) -> None:
    """As built and as fairseq loads it from a file; beside padding, too. fairseq's GELU has float32 alone."""
    bert = read_bert(folder)
    tensors = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
    texts = ["The cat sat on the mat, unaffable.", "a dog"]
    tokens = [bert.encode(text, POSITIONS) for text in texts]
    batch = torch.full((2, len(tokens[0])), bert.dictionary.pad())
    for row, sequence in zip(batch, tokens):
        row[: len(sequence)] = sequence
    built = bert.build("softmax_mlm")
    write_checkpoint(tmp_path / "bert.pt", built, bert.command("softmax_mlm"))
    bert.dictionary.save(str(tmp_path / "dict.txt"))
    (loaded,), _, task = load_model_ensemble_and_task([str(tmp_path / "bert.pt")], {"data": str(tmp_path)})
    assert task.source_dictionary.symbols == bert.dictionary.symbols
    for model in (built, loaded.eval()):
        features = model.double()(batch, features_only=True)[0]
        for row, sequence, text in zip(features, tokens, texts):
            rows = [PIECES.index(x) for x in ("[CLS]", *bert.tokenizer.encode(text).tokens[1:-1], "[SEP]")]
            assert_close("features", row[: len(sequence)], literal(tensors, rows), tolerance=1e-6)


def test_a_language_model_head_is_taken(folder: Path, tmp_path: Path) -> None:
    """With the names of BertForMaskedLM; its table is that of the embedding."""
    tensors = {f"bert.{name}": x for name, x in load_file(folder / "model.safetensors").items()}
    head = {"transform.dense.weight": (WIDTH, WIDTH), "bias": (CONFIG["vocab_size"],)}
    head |= {f"transform.{x}": (WIDTH,) for x in ("dense.bias", "LayerNorm.weight", "LayerNorm.bias")}
    tensors |= {f"cls.predictions.{name}": torch.randn(shape) for name, shape in head.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "vocab.txt"):
        (tmp_path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    bert = read_bert(tmp_path)
    model = bert.build("softmax_mlm").double()
    tokens = bert.encode("the cat", POSITIONS)[None]
    scores, features = model(tokens)[0], model(tokens, features_only=True)[0]
    weights = {name.removeprefix("cls.predictions."): x.double() for name, x in tensors.items() if "cls" in name}
    x = F.gelu(F.linear(features, weights["transform.dense.weight"], weights["transform.dense.bias"]))
    x = F.layer_norm(x, (WIDTH,), weights["transform.LayerNorm.weight"], weights["transform.LayerNorm.bias"], 1e-12)
    expected = x @ tensors["bert.embeddings.word_embeddings.weight"].double().T + weights["bias"]
    rows = [PIECES.index(piece) for piece in PIECES if piece != "[MASK]"]
    order = [bert.numbers[row] for row in rows]
    assert_close("scores", scores[..., order], expected[..., rows], tolerance=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True, "model_max_length": int(1e30)},  # an integer, as transformers writes no limit
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_tokens_are_those_of_transformers(folder: Path, tmp_path: Path, settings: dict) -> None:
    """From either of the tokenizer's files; tokenizer.json also has an added token, a longest length and padding.

    Importing transformers costs seconds.
    """
    from transformers import BertTokenizerFast, PreTrainedTokenizerFast

    copied(folder, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = BertTokenizerFast.from_pretrained(tmp_path)
    check_tokens(theirs, tmp_path)
    theirs.add_tokens(["<ent>"])
    theirs("the cat", truncation=True, max_length=4, padding="max_length")
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    assert stored["truncation"] and stored["padding"]
    stored["model"]["max_input_chars_per_word"] = 3
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    check_tokens(PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json")), tmp_path)


def check_tokens(theirs: Callable, folder: Path) -> None:
    """Compare tokens of odd texts, whole and cut, with those of a tokenizer of transformers."""
    bert = read_bert(folder)
    own = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": "<unk>", "[MASK]": "<mask>"}
    for text in ODD:
        for longest in (5, POSITIONS):
            pieces = theirs.convert_ids_to_tokens(theirs(text, add_special_tokens=False)["input_ids"])
            expected = ["[CLS]", *pieces[: longest - 2], "[SEP]"]
            tokens = bert.encode(text, longest).tolist()
            assert [bert.dictionary[token] for token in tokens] == [own.get(piece, piece) for piece in expected], text


def test_a_tokenizer_that_cannot_be_read_is_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    copied(folder, tmp_path)
    model = {"type": "WordPiece", "vocab": {piece: row for row, piece in enumerate(PIECES)}}
    for change, said in (({"type": "BPE"}, "BPE.*allowed: WordPiece"), ({}, "tokenizer.json cannot be read.*allowed")):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {**model, **change}}))
        with pytest.raises(ValueError, match=said):
            read_bert(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "text.txt").write_text(LINE)
    given = ["--folder", str(folder), "--file", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert encoder.main(given) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install tokenizers" in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta'; allowed"),
        ({"hidden_act": "silu"}, "hidden_act 'silu'; allowed"),
        ({"hidden_size": "wide"}, "hidden_size is .*allowed"),
        ({"vocab_size": 5}, f"rows up to {len(PIECES) - 1}; allowed.* 5"),
    ],
)
def test_an_encoder_that_is_not_like_bert_is_refused(folder: Path, tmp_path: Path, change: dict, said: str) -> None:
    copied(folder, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(ValueError, match=said):
        read_bert(tmp_path)


def test_pairs_are_halves_of_paragraphs_or_of_a_file(tmp_path: Path) -> None:
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.tsv"
    text.write_text("".join(f"{i} a b\nc d e f g\n\n" for i in range(40)))
    texts = read_texts(text)
    assert len(texts.train) == 36 and texts.train[1] == "1 a b c d e f g"
    assert texts.pairs == [(f"{i} a b c", "d e f g") for i in range(36, 40)]
    pairs.write_text("one\tein\ntwo\tzwei\n")
    assert read_texts(text, pairs).pairs == [("one", "ein"), ("two", "zwei")]
    assert read_texts(text, pairs).train == texts.train
    pairs.write_text("one\tein\ntwo\n")
    with pytest.raises(ValueError, match="--pairs.*line 2 has 1 texts; allowed: 2"):
        read_texts(text, pairs)
    text.write_text("".join(f"a b {i}\n" for i in range(40)))
    pairs.write_text("a\tb\nc\td\n")
    assert len(read_texts(text, pairs).train) == 36
    with pytest.raises(ValueError, match="0 paragraphs of at least 8 words; allowed"):
        read_texts(text)


def test_what_is_measured_is_not_learned_from(tmp_path: Path) -> None:
    """Wherever it stands: a paragraph of the last tenth, a text of a pair, and both together."""
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.tsv"
    lines = [f"{i} a b c d e f g" for i in range(40)]
    lines[3] = lines[38]
    text.write_text("\n".join(lines))
    assert read_texts(text).train == [line for line in lines[:36] if line != lines[38]]
    pairs.write_text(f"{lines[5]}\tother\n7 a b c\td e f g\n")
    assert read_texts(text, pairs).train == [lines[i] for i in range(36) if i not in (3, 5, 7)]
    text.write_text((lines[0] + "\n") * 40)
    with pytest.raises(ValueError, match="--file is .*allowed: other texts"):
        read_texts(text)


def test_from_a_folder_to_the_results(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Two forms; a second time nothing is trained, and fairseq loads what was made. Other files are refused."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    (tmp_path / "bert").mkdir()
    copied(folder, tmp_path / "bert")
    words = LINE.split()
    text.write_text("".join(" ".join(words[i % 7 :] + words[: i % 5]) + "\n" for i in range(60)))
    arguments = ["--folder", str(tmp_path / "bert"), "--file", str(text), "--out", str(out), "--quick"]
    arguments += ["--longest", "16"]
    arguments += ["--models", "linear", "lolcats,softmax", "--window", "4"]
    assert encoder.main(arguments) == 0
    teacher, linear, windowed = json.loads((out / "results.json").read_text())["results"]
    assert teacher["measures"][DISTILLED]["cosine"] == pytest.approx(1.0)
    for record in (linear, windowed):
        stages = [record["measures"][stage]["cosine"] for stage in (EXCHANGED, TRANSFERRED, DISTILLED)]
        assert len({round(cosine, 9) for cosine in (*stages, 1.0)}) == 4
    # Projections of two layers; in one layer of two, maps of queries and keys and a gate of 2 heads of 4 channels.
    assert linear["learned"] == 2 * 3 * (WIDTH * WIDTH + WIDTH) and windowed["learned"] == 2 * (2 * 2 * 4 + 1)
    for name in ("train_transfer", "train_distillation"):
        monkeypatch.setattr(encoder, name, None)
    assert encoder.main(arguments) == 0
    assert json.loads((out / "results.json").read_text())["results"] == [teacher, linear, windowed]
    (model,), *_ = load_model_ensemble_and_task([str(out / "runs" / "linear.1.pt")], {"data": str(out / "runs")})
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * LAYERS + 2 and {norm.eps for norm in norms} == {1e-12}
    assert encoder.main([*arguments, "--window", "8"]) == 1
    capsys.readouterr()
    for path in (text, *(tmp_path / "bert" / name for name in ("config.json", "model.safetensors", "vocab.txt"))):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # of the same name and size
        assert encoder.main(arguments) == 1
        assert f"{'file' if path == text else 'folder'}_sha256 is" in capsys.readouterr().err
        path.write_bytes(content)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("a\tb\nc\td\n")
    settings = [encoder.EXPERIMENT.parse([*arguments, "--pairs", str(pairs)]).settings()]
    pairs.write_text("a\tb\nc\te\n")
    settings.append(encoder.EXPERIMENT.parse([*arguments, "--pairs", str(pairs)]).settings())
    assert {name for name in settings[0] if settings[0][name] != settings[1][name]} == {"pairs_sha256"}


def test_embeddings_do_not_depend_on_the_batch(folder: Path) -> None:
    """They are means over real tokens."""
    bert = read_bert(folder)
    model, padding = bert.build("softmax_mlm"), bert.dictionary.pad()
    texts = [bert.encode(text, 20) for text in ("the cat sat on the mat", "a dog", "red")]
    together = encoder_models.embed(model, texts, padding)
    alone = torch.cat([encoder_models.embed(model, [text], padding) for text in texts])
    assert_close("embeddings", together, alone)
    states = model(texts[1][None], features_only=True)[0]
    assert_close("mean", together[1], F.normalize(states.mean(1), dim=-1)[0])


def test_what_is_missing_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Before anything is trained."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{LINE.strip()} {i}\n" for i in range(40)))
    given = ["--folder", str(folder), "--file", str(text), "--out", str(tmp_path / "out"), "--longest", "16"]
    for change, said in (
        (["--folder", str(tmp_path)], "no config.json"),
        (["--longest", "99"], "--longest is 99"),
        (["--longest", "2"], "--longest is 2"),
        (["--models", "flow*3,softmax"], "flow*3,softmax"),
        (["--pairs", str(tmp_path / "none.tsv")], "none.tsv"),
    ):
        assert encoder.main([*given, *change]) == 1
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
