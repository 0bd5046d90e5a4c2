"""Folders of Hugging Face's BERT, RoBERTa and GPT-2 as a start for ours, compared with transformers' own models."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

from common.checkpoints import read_checkpoint
from fairseq_plugin.convert import convert_foreign, main
from fairseq_plugin.criterions.attention_transfer import AttentionTransferCriterion
from fairseq_plugin.loading.huggingface import read_foreign_model
from fairseq_plugin.loading.huggingface.vocabularies import read_byte_pairs
from tests.compare import assert_close

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2_SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 24}
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the a cat ##s dog sat on mat red . ,".split()]
MERGES = [("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("Ġ", "s"), ("Ġs", "at")]
TEXTS = ("the cat sat", " on 3 mats: über\tcats!")


class Folder(NamedTuple):
    """A model of transformers in a folder, and the architecture that is the same model."""

    path: Path
    model: nn.Module
    arch: str


def byte_pairs(path: Path, special: dict[str, int], first: int) -> dict[str, int]:
    """Write the tokenizer.json of a byte-level BPE, whose tokens have rows from ``first`` on in some order."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {token: first + i for i, token in enumerate([*map("".join, MERGES), *letters])} | special
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path / "tokenizer.json"))
    return tokens


def awake(model: nn.Module) -> nn.Module:
    """``model`` with weights under which attention and every bias show."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
        if "orm.weight" in name or "ln_" in name and name.endswith("weight"):
            parameter.data += 1.0
    return model.eval()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """BERT with its head, and WordPiece; more rows than pieces."""
    path = tmp_path_factory.mktemp("bert")
    (path / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    config = BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=24)
    model = awake(BertForMaskedLM(config))
    model.save_pretrained(path)
    return Folder(path, model, "softmax_mlm")


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """RoBERTa: positions behind those of padding, and rows in an order of its own."""
    path = tmp_path_factory.mktemp("roberta")
    special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<|endoftext|>": 265, "madeupword0000": 266, "<mask>": 267}
    byte_pairs(path, special, 4)
    config = RobertaConfig(
        **{**SIZES, "vocab_size": 268},
        intermediate_size=24,
        max_position_embeddings=26,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
    model = awake(RobertaForMaskedLM(config))
    model.save_pretrained(path)
    return Folder(path, model, "softmax_mlm")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """GPT-2, with vocab.json and merges.txt."""
    path = tmp_path_factory.mktemp("gpt2")
    tokens = byte_pairs(path, {"<|endoftext|>": 261}, 0)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(tokens), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
    (path / "merges.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    config = GPT2Config(**GPT2_SIZES, vocab_size=262, bos_token_id=261, eos_token_id=261)
    model = awake(GPT2LMHeadModel(config))
    model.save_pretrained(path)
    return Folder(path, model, "softmax_lm")


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Folder:
    """One of the three, by its name."""
    return request.getfixturevalue(request.param)


def batch(rows: Tensor, length: int) -> Tensor:
    """Two sequences of fairseq's symbols, the second one shorter; ``rows`` has the row of each symbol."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, len(rows), (2, length), generator=generator)
    tokens[1, length - 5 :] = 1
    return tokens


@pytest.mark.parametrize("folder", ["bert", "roberta", "gpt2"], indirect=True)
def test_softmax_models_are_transformers_models(folder: Folder, tmp_path: Path) -> None:
    """All logits, of the file that the command writes and fairseq loads, beside padding too."""
    target = tmp_path / "start.pt"
    main([str(folder.path), str(target), "--arch", folder.arch])
    (ours,), _, task = load_model_ensemble_and_task([str(target)], {"data": str(tmp_path)})
    vocabulary = read_foreign_model(folder.path).vocabulary
    assert task.source_dictionary.symbols == vocabulary.dictionary.symbols
    rows = vocabulary.rows
    symbols = batch(rows, ours.max_positions() if folder.arch == "softmax_lm" else 24)
    for tokens in (symbols, symbols.roll(5, 1) if folder.arch == "softmax_lm" else symbols[:, :9]):
        real = tokens.ne(1)
        further = {"position_ids": (real.cumsum(1) - 1).clamp(min=0)} if folder.arch == "softmax_lm" else {}
        with torch.no_grad():
            theirs = folder.model(rows[tokens], attention_mask=real.long(), **further).logits
            scores = ours.eval()(tokens)[0]
        assert_close("logits", scores[real], theirs[real][:, rows], tolerance=1e-5)


@pytest.mark.parametrize("folder", ["roberta", "gpt2"], indirect=True)
def test_fairseq_has_the_tokens_of_the_folder(folder: Folder, tmp_path: Path) -> None:
    """Its ``--bpe gpt2`` with the files that are written gives the rows that the folder's tokenizer gives."""
    main([str(folder.path), str(tmp_path / "start.pt"), "--arch", folder.arch])
    assert sorted(x.name for x in tmp_path.iterdir()) == ["dict.txt", "encoder.json", "start.pt", "vocab.bpe"]
    files = {"gpt2_encoder_json": str(tmp_path / "encoder.json"), "gpt2_vocab_bpe": str(tmp_path / "vocab.bpe")}
    bpe = GPT2BPE(GPT2BPEConfig(**files))
    tokens, *_ = read_byte_pairs(folder.path)
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = read_foreign_model(folder.path).vocabulary
    for text in TEXTS:
        symbols = bpe.encode(text).split()
        numbers = torch.tensor([vocabulary.dictionary.index(symbol) for symbol in symbols])
        assert vocabulary.rows[numbers].tolist() == tokenizer.encode(text).ids
        assert bpe.decode(" ".join(symbols)) == text
    numbers = json.loads((tmp_path / "encoder.json").read_text())  # as in GPT-2's own file
    assert (numbers["!"], numbers["Ġ"], numbers["Ġc"]) == (0, 220, 256)
    assert all(str(number) in vocabulary.dictionary for number in numbers.values())


def test_symbols_that_stand_for_fairseqs(bert: Folder, roberta: Folder, gpt2: Folder) -> None:
    """<s>, <pad>, </s>, <unk>, and <mask> at the end."""
    rows = {x.path.name[:4]: read_foreign_model(x.path).vocabulary.rows.tolist() for x in (bert, roberta, gpt2)}
    assert rows["bert"][:4] == [PIECES.index(x) for x in ("[CLS]", "[PAD]", "[SEP]", "[UNK]")]
    assert rows["bert"][4:] == [1, *range(6, len(PIECES)), PIECES.index("[MASK]")]
    assert rows["robe"] == list(range(268))
    assert rows["gpt2"] == [261] * 4 + list(range(261))


def test_what_is_left_out_and_new_is_said(bert: Folder, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The pooler and further token types; a head that is missing, and an attention's own parameters."""
    shutil.copytree(bert.path, tmp_path / "bert")
    tensors = load_file(bert.path / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.startswith("cls.")}
    tensors |= {"bert.pooler.dense.weight": torch.zeros(16, 16), "bert.pooler.dense.bias": torch.zeros(16)}
    save_file(tensors, tmp_path / "bert" / "model.safetensors")
    overrides = "{'lineartime_layers': 'hedgehog,softmax'}"
    main([str(tmp_path / "bert"), str(tmp_path / "a.pt"), "--arch", "hybrid_mlm", "--model-overrides", overrides])
    said = capsys.readouterr().out
    assert "3 left out (" in said and all(name in said for name in ("pooler.dense.weight", "token_type_embeddings"))
    assert "--encoder-layers 2" in said and "dict.txt" in said
    model = read_checkpoint(tmp_path / "a.pt")["model"]
    assert any(".inner." in name for name in model) and not model["encoder.lm_head.bias"].any()
    main([str(tmp_path / "bert"), str(tmp_path / "b.pt"), "--arch", "linear_mlm"])  # beside the same dictionary
    assert "5 new (encoder.lm_head." in capsys.readouterr().out


def test_attention_transfer_begins_with_a_folder(gpt2: Folder, tmp_path: Path) -> None:
    """The folder is teacher and student: only the new parameters have gradients, and the loss is finite."""
    foreign = read_foreign_model(gpt2.path)
    new = {"lineartime_trained_parameters": "new"}
    for name, arch, overrides in (("teacher", "softmax_lm", {}), ("start", "hedgehog_lm", new)):
        torch.save(convert_foreign(foreign, str(gpt2.path), arch, overrides)[0], tmp_path / f"{name}.pt")
    foreign.dictionary.save(str(tmp_path / "dict.txt"))
    (student,), _, task = load_model_ensemble_and_task([str(tmp_path / "start.pt")], {"data": str(tmp_path)})
    tokens = batch(foreign.vocabulary.rows, 12)
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": tokens.ne(1).sum(1)}, "target": tokens}
    sample |= {"ntokens": int(tokens.ne(1).sum()), "nsentences": 2}
    criterion = AttentionTransferCriterion(task, str(tmp_path / "teacher.pt"), "outputs", 0.0, "pytorch_ddp", 1)
    loss, *_ = criterion(student.train(), sample)
    loss.backward()
    learning = {name for name, x in student.named_parameters() if x.grad is not None and x.grad.abs().sum() > 0}
    assert learning and all(".inner." in name for name in learning) and torch.isfinite(loss)


def test_tensors_in_parts_or_of_torch_are_the_same(roberta: Folder, tmp_path: Path) -> None:
    """Also half precision, which becomes float32; a file outside of the folder is refused."""
    expected = read_foreign_model(roberta.path).weights
    tensors = load_file(roberta.path / "model.safetensors")
    for name in ("parts", "torch"):
        shutil.copytree(roberta.path, tmp_path / name, ignore=shutil.ignore_patterns("model.safetensors"))
    halves = {f"model-{i + 1}-of-2.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "parts" / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({name: x.double() for name, x in tensors.items()}, tmp_path / "torch" / "pytorch_model.bin")
    for name in ("parts", "torch"):
        weights = read_foreign_model(tmp_path / name).weights
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[x], expected[x]) and weights[x].dtype == torch.float32 for x in weights)
    index["weight_map"][list(tensors)[0]] = "../model.safetensors"
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"lists the file \.\./model.safetensors.*allowed"):
        read_foreign_model(tmp_path / "parts")


def config_with(**changes: object) -> Callable[[Path], None]:
    """A function that changes entries of the config.json of a folder."""

    def change(path: Path) -> None:
        content = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**content, **changes}))

    return change


def tensors_with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """A function that changes the tensors of a folder."""

    def write(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return write


#: Folder, what is changed in it, and what the line that refuses it says.
REFUSED = [
    ("bert", config_with(model_type="xlm-roberta"), "config.json has the model_type 'xlm-roberta'; allowed: bert, "),
    ("bert", config_with(position_embedding_type="relative_key"), "position_embedding_type 'relative_key'; allowed"),
    ("bert", config_with(hidden_act="silu"), "hidden_act 'silu'; allowed: gelu"),
    ("bert", config_with(pruned_heads={"0": [1]}), "pruned_heads .*; allowed"),
    ("bert", config_with(is_decoder=True), "is_decoder True; allowed: False"),
    ("roberta", config_with(tie_word_embeddings=False), "tie_word_embeddings False; allowed: True"),
    ("roberta", config_with(vocab_size=100), "rows up to 267; allowed: .*100"),
    ("gpt2", config_with(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx True; allowed: False"),
    ("gpt2", config_with(activation_function="silu"), "activation_function 'silu'; allowed: gelu_new"),
    ("gpt2", config_with(layer_norm_epsilon=1e-6), "layer_norm_epsilon 1e-06; allowed: 1e-05"),
    ("gpt2", config_with(n_positions=30), r"wpe.weight.*\(24, 16\); allowed: \(30, 16\)"),
    ("gpt2", config_with(n_layer="two"), "n_layer is 'two'; allowed: an integer"),
    ("gpt2", config_with(n_layer=3), "16 missing"),
    ("gpt2", tensors_with(lambda x: x.pop("transformer.ln_f.bias")), r"1 missing \(decoder.layer_norm.bias"),
    ("gpt2", tensors_with(lambda x: x.pop("transformer.wte.weight")), "lack wte.weight; allowed"),
    ("gpt2", tensors_with(lambda x: x.update(other=torch.zeros(2))), r"have other \(2,\); allowed: those of GPT-2"),
    ("gpt2", lambda path: (path / "merges.txt").unlink(), "has no merges.txt; allowed"),
    ("gpt2", lambda path: (path / "merges.txt").write_text("a b c\n"), "the merge 'a b c'; allowed: two tokens"),
    ("gpt2", lambda path: (path / "model.safetensors").unlink(), "has no model.safetensors.*; allowed"),
    ("gpt2", lambda path: (path / "model.safetensors").write_text("words"), "cannot be read"),
    ("gpt2", lambda path: (path / "config.json").write_text("[]"), "config.json is no object"),
    ("gpt2", lambda path: (path / "config.json").unlink(), "has no config.json; allowed"),
    ("roberta", lambda path: (path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'), "'Unigram'; al"),
    ("gpt2", lambda path: (path.parent / "dict.txt").write_text("other 1\n"), "dict.txt is there already"),
]


@pytest.mark.parametrize(("folder", "change", "said"), REFUSED, indirect=["folder"])
def test_other_folders_are_refused(folder: Folder, change: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    """On one line that says what is wrong; nothing is written."""
    shutil.copytree(folder.path, tmp_path / "copy")
    change(tmp_path / "copy")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=f"^python -m fairseq_plugin.convert: .*{said}") as refusal:
        main([str(tmp_path / "copy"), str(tmp_path / "new.pt"), "--arch", folder.arch])
    assert "\n" not in str(refusal.value) and sorted(tmp_path.iterdir()) == before


def test_an_architecture_of_other_weights_is_refused(bert: Folder, tmp_path: Path) -> None:
    """The default is a language model."""
    with pytest.raises(SystemExit, match="like fairseq's 'roberta'; allowed with --arch flowformer_lm: one like"):
        main([str(bert.path), str(tmp_path / "new.pt")])
