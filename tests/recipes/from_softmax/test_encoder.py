"""A pretrained encoder: its tokens, its pairs of texts, and once from its folder to the results."""

import json
from pathlib import Path

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from safetensors.torch import save_file
from torch import nn

from recipes.from_softmax import encoder
from recipes.from_softmax.bert import read_bert
from recipes.from_softmax.encoder_models import embed
from recipes.from_softmax.sentences import read_texts
from tests.compare import assert_close

PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES += "the a cat dog un ##aff ##able ##s sat on mat , . $ cafe 猫 red ο ##δ ##ο ##σ ##ς 中 文 ##文 b".split()
#: Words at pieces, signs, accents, Chinese, emoji, controls, long words, Greek capitals, an added token.
ODD = ["The unaffable cats,dogs.", "Café\tunhappy $a", "e\u0301 CAFÉ", "A猫\u200bdog\u00a0red", "中文 a中", "ΟΔΟΣ οδος"]
ODD += ["a\x0bb\x85b\u2028b", "\U0001fae8 a", "un" + 100 * "aff", "a <ent> b", "[CLS] a[MASK] b [mask] [SEP]", "", " "]
WIDTH, LAYERS, POSITIONS = 8, 2, 24
CONFIG = {"model_type": "bert", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
CONFIG |= {"intermediate_size": 16, "max_position_embeddings": POSITIONS, "vocab_size": len(PIECES) + 1}
CONFIG |= {"layer_norm_eps": 1e-12, "hidden_act": "gelu"}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small BERT without a language-model head."""
    table = {"word": CONFIG["vocab_size"], "position": POSITIONS, "token_type": 2}
    shapes = {f"embeddings.{name}_embeddings.weight": (rows, WIDTH) for name, rows in table.items()}
    linear = dict.fromkeys(("attention.self.query", "attention.self.key", "attention.self.value"), (WIDTH, WIDTH))
    linear |= {"attention.output.dense": (WIDTH, WIDTH), "attention.output.LayerNorm": (WIDTH,)}
    linear |= {"intermediate.dense": (16, WIDTH), "output.dense": (WIDTH, 16), "output.LayerNorm": (WIDTH,)}
    modules = {f"encoder.layer.{i}.{name}": shape for i in range(LAYERS) for name, shape in linear.items()}
    for name, shape in {"embeddings.LayerNorm": (WIDTH,), **modules}.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {name: 1 + x for name, x in tensors.items() if name.endswith("LayerNorm.weight")}
    (tmp_path / "bert").mkdir()
    save_file(tensors, tmp_path / "bert" / "model.safetensors")
    (tmp_path / "bert" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "bert" / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return tmp_path / "bert"


@pytest.mark.parametrize("settings", [{"do_lower_case": True}, {"do_lower_case": False, "strip_accents": True}])
def test_tokens_are_those_of_transformers(folder, settings):
    """From either of the tokenizer's files; tokenizer.json also has an added token, a longest length and padding."""
    from transformers import BertTokenizerFast  # its import costs seconds

    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = BertTokenizerFast.from_pretrained(folder)
    own = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": "<unk>", "[MASK]": "<mask>"}
    for _ in range(2):
        bert = read_bert(folder)
        for text in ODD:
            pieces = theirs.convert_ids_to_tokens(theirs(text, add_special_tokens=False)["input_ids"])
            for longest in (5, POSITIONS):
                expected = [own.get(piece, piece) for piece in ("[CLS]", *pieces[: longest - 2], "[SEP]")]
                assert [bert.model.dictionary[x] for x in bert.encode(text, longest).tolist()] == expected, text
        theirs.add_tokens(["<ent>"])
        theirs("the cat", truncation=True, max_length=4, padding="max_length")
        theirs.save_pretrained(folder)


def test_what_is_measured_is_not_learned_from(tmp_path):
    """Pairs are halves of paragraphs or of a file; such texts are left out, wherever they stand."""
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.tsv"
    text.write_text("".join(f"{i} a b\nc d e f g\n\n" for i in range(40)))
    learned, found = read_texts(text)
    assert learned == [f"{i} a b c d e f g" for i in range(36)]
    assert found == [(f"{i} a b c", "d e f g") for i in range(36, 40)]
    lines = [f"{i} a b c d e f g" for i in range(40)]
    lines[3] = lines[38]
    text.write_text("\n".join(lines))
    assert read_texts(text)[0] == [line for line in lines[:36] if line != lines[38]]
    pairs.write_text(f"{lines[5]}\tother\n7 a b c\td e f g\n")
    assert read_texts(text, pairs)[0] == [lines[i] for i in range(36) if i not in (3, 5, 7)]
    assert read_texts(text, pairs)[1] == [(lines[5], "other"), ("7 a b c", "d e f g")]
    pairs.write_text("one\tein\ntwo\n")
    with pytest.raises(SystemExit, match="--pairs.*line 2 has 1 texts; allowed: 2"):
        read_texts(text, pairs)
    text.write_text((lines[0] + "\n") * 40)
    with pytest.raises(SystemExit, match="0 paragraphs to learn from.*allowed"):
        read_texts(text)


def test_from_a_folder_to_the_results(folder, tmp_path, monkeypatch, capsys):
    """Two forms; a second time nothing is trained, and fairseq loads what was made. Other files are refused."""
    text, out = tmp_path / "text.txt", tmp_path / "out"
    words = "the cat sat on the mat , and a red dog b . ".split()
    text.write_text("".join(" ".join(words[i % 7 :] + words[: i % 5]) + "\n" for i in range(60)))
    arguments = ["--folder", str(folder), "--file", str(text), "--out", str(out), "--quick", "--longest", "16"]
    arguments += ["--models", "linear", "lolcats,softmax", "--window", "4"]
    encoder.main(arguments)
    teacher, linear, windowed = json.loads((out / "results.json").read_text())
    assert teacher["cosine, after stage 2"] == pytest.approx(1.0)
    for record in (linear, windowed):
        assert len({1.0, *(round(record[f"cosine, {stage}"], 9) for stage in encoder.STAGES)}) == 4
    # Projections of two layers; in one layer of two, maps of queries and keys and a gate of 2 heads of 4 channels.
    assert linear["learned"] == 2 * 3 * (WIDTH * WIDTH + WIDTH) and windowed["learned"] == 2 * (2 * 2 * 4 + 1)
    for name in ("train_transfer", "train_distillation"):
        monkeypatch.setattr(encoder, name, None)
    encoder.main(arguments)
    assert json.loads((out / "results.json").read_text()) == [teacher, linear, windowed]
    (model,), *_ = load_model_ensemble_and_task([str(out / "runs" / "linear.1.pt")], {"data": str(out / "runs")})
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 2 * LAYERS + 2 and {norm.eps for norm in norms} == {1e-12}
    for wrong, said in (("--longest 99", "--longest is 99"), ("--longest 2", "3 to 24"), ("--models flow*3", "flow")):
        with pytest.raises(SystemExit):
            encoder.main([*arguments, *wrong.split()])
        assert said in capsys.readouterr().err
    text.write_text(text.read_text().replace("mat", "cat"))
    with pytest.raises(SystemExit, match="begun with"):
        encoder.main(arguments)


def test_embeddings_do_not_depend_on_the_batch(folder):
    """They are means over real tokens."""
    bert = read_bert(folder)
    model, padding = bert.build("softmax_mlm"), bert.model.dictionary.pad()
    texts = [bert.encode(text, 20) for text in ("the cat sat on the mat", "a dog", "red")]
    alone = torch.cat([embed(model, [text], padding) for text in texts])
    assert_close("embeddings", embed(model, texts, padding), alone)
    mean = model(texts[1][None], features_only=True)[0].mean(1)
    assert_close("mean", alone[1], nn.functional.normalize(mean, dim=-1)[0])
