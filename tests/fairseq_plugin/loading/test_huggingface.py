"""Folders of Hugging Face's BERT, RoBERTa and GPT-2 as a start for ours, compared with transformers' own models."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.encoders.gpt2_bpe import GPT2BPE, GPT2BPEConfig
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForMaskedLM

from common.checkpoints import read_checkpoint
from fairseq_plugin.convert import main
from fairseq_plugin.loading.huggingface import read_foreign_model
from tests.compare import assert_close
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2_SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_inner": 24, "n_positions": 24}
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"the a cat ##s dog sat on mat red . ,".split()]
MERGES = [("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("Ġ", "s"), ("Ġs", "at")]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


class Folder(NamedTuple):
    """A model of transformers in a folder, the architecture that is the same model, and rows of fairseq's symbols."""

    path: Path
    model: nn.Module
    arch: str
    rows: list[int]


def byte_pairs(special: dict[str, int], first: int) -> Tokenizer:
    """A byte-level BPE, whose tokens have rows from ``first`` on in some order."""
    tokens = {token: first + i for i, token in enumerate([*map("".join, MERGES), *LETTERS])} | special
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


#: The tokenizers of RoBERTa, with rows in an order of its own, and of GPT-2.
TOKENIZERS = {
    "roberta": byte_pairs(
        {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<|endoftext|>": 265, "madeupword0000": 266, "<mask>": 267}, 4
    ),
    "gpt2": byte_pairs({"<|endoftext|>": 261}, 0),
}


def awake(model: nn.Module) -> nn.Module:
    """``model`` with weights under which attention and every bias show."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
        if "orm.weight" in name or "ln_" in name and name.endswith("weight"):
            parameter.data += 1.0
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """BERT with more rows than pieces, RoBERTa with positions behind that of padding, GPT-2 with vocab.json."""
    path = tmp_path_factory.mktemp("folders")
    for name in ("bert", "roberta", "gpt2"):
        (path / name).mkdir()
    (path / "bert" / "vocab.txt").write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    TOKENIZERS["roberta"].save(str(path / "roberta" / "tokenizer.json"))
    TOKENIZERS["gpt2"].model.save(str(path / "gpt2"))
    of_bert = BertForMaskedLM(BertConfig(**SIZES, intermediate_size=24, max_position_embeddings=24))
    sizes = {**SIZES, "vocab_size": 268, "intermediate_size": 24, "max_position_embeddings": 26, "type_vocab_size": 1}
    of_roberta = RobertaForMaskedLM(RobertaConfig(**sizes, layer_norm_eps=1e-5))
    of_gpt2 = GPT2LMHeadModel(GPT2Config(**GPT2_SIZES, vocab_size=262, bos_token_id=261, eos_token_id=261))
    first = [PIECES.index(x) for x in ("[CLS]", "[PAD]", "[SEP]", "[UNK]")]
    rows = [*first, 1, *range(6, len(PIECES)), PIECES.index("[MASK]")]
    made = {
        "bert": Folder(path / "bert", awake(of_bert), "softmax_mlm", rows),
        "roberta": Folder(path / "roberta", awake(of_roberta), "softmax_mlm", list(range(268))),
        "gpt2": Folder(path / "gpt2", awake(of_gpt2), "softmax_lm", [261] * 4 + list(range(261))),
    }
    for folder in made.values():
        folder.model.save_pretrained(folder.path)
    return made


def batch(symbols: int, length: int) -> Tensor:
    """Two sequences of fairseq's symbols, the second one shorter."""
    tokens = torch.randint(4, symbols, (2, length), generator=torch.Generator().manual_seed(1))
    tokens[1, length - 5 :] = 1
    return tokens


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
def test_softmax_models_are_transformers_models(name: str, folders: dict[str, Folder], tmp_path: Path) -> None:
    """All logits, of the file that the command writes and fairseq loads, beside padding too; and fairseq's tokens."""
    folder = folders[name]
    main([str(folder.path), str(tmp_path / "start.pt"), "--arch", folder.arch])
    (ours,), _, task = load_model_ensemble_and_task([str(tmp_path / "start.pt")], {"data": str(tmp_path)})
    rows, symbols = torch.tensor(folder.rows), batch(len(folder.rows), 24)
    assert len(task.source_dictionary) == len(rows)
    for tokens in (symbols, symbols.roll(5, 1) if name == "gpt2" else symbols[:, :9]):
        real = tokens.ne(1)
        further = {"position_ids": (real.cumsum(1) - 1).clamp(min=0)} if name == "gpt2" else {}
        with torch.no_grad():
            theirs = folder.model(rows[tokens], attention_mask=real.long(), **further).logits
            scores = ours.eval()(tokens)[0]
        assert_close("logits", scores[real], theirs[real][:, rows], tolerance=1e-5)
    if name == "bert":
        assert sorted(x.name for x in tmp_path.iterdir()) == ["dict.txt", "start.pt"]
        return
    assert sorted(x.name for x in tmp_path.iterdir()) == ["dict.txt", "encoder.json", "start.pt", "vocab.bpe"]
    files = {"gpt2_encoder_json": str(tmp_path / "encoder.json"), "gpt2_vocab_bpe": str(tmp_path / "vocab.bpe")}
    bpe = GPT2BPE(GPT2BPEConfig(**files))
    for text in ("the cat sat", " on 3 mats: über\tcats!"):
        encoded = bpe.encode(text)
        assert (
            rows[task.source_dictionary.encode_line(encoded)[:-1].long()].tolist() == TOKENIZERS[name].encode(text).ids
        )
        assert bpe.decode(encoded) == text
    numbers = json.loads((tmp_path / "encoder.json").read_text())  # as in GPT-2's own file
    assert (numbers["!"], numbers["Ġ"], numbers["Ġc"]) == (0, 220, 256)
    assert all(str(number) in task.source_dictionary for number in numbers.values())


def test_what_is_left_out_and_new_is_said(folders: dict[str, Folder], tmp_path: Path, capsys) -> None:
    """The pooler and further token types; a head that is missing, and an attention's own parameters."""
    shutil.copytree(folders["bert"].path, tmp_path / "bert")
    tensors = load_file(tmp_path / "bert" / "model.safetensors")
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


def test_tensors_in_parts_or_of_torch_are_the_same(folders: dict[str, Folder], tmp_path: Path) -> None:
    """Also in another precision, which becomes float32; a file outside of the folder is refused."""
    source = folders["roberta"].path
    expected, tensors = read_foreign_model(source).weights, load_file(source / "model.safetensors")
    for name in ("parts", "torch"):
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("model.safetensors"))
    halves = {f"model-{i + 1}-of-2.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, tmp_path / "parts" / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({name: x.double() for name, x in tensors.items()}, tmp_path / "torch" / "pytorch_model.bin")
    for name in ("parts", "torch"):
        found = read_foreign_model(tmp_path / name).weights
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[x], expected[x]) and found[x].dtype == torch.float32 for x in found)
    index["weight_map"][next(iter(tensors))] = "../model.safetensors"
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused_in_one_line(tmp_path, "../model.safetensors"):
        read_foreign_model(tmp_path / "parts")


def more_tensors(path: Path) -> None:
    """Add a tensor that no model has."""
    file = path / "model.safetensors"
    save_file({**load_file(file), "other": torch.zeros(2)}, file)


#: Folder, other entries of its config.json, a tensor that it lacks or what else is changed, and words of the refusal.
REFUSED = [
    ("bert", {"model_type": "xlm-roberta"}, "model_type xlm-roberta bert"),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type relative_key"),
    ("bert", {"hidden_act": "silu"}, "hidden_act silu gelu"),
    ("bert", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    ("bert", {"is_decoder": True}, "is_decoder True False"),
    ("roberta", {"tie_word_embeddings": False}, "tie_word_embeddings False True"),
    ("roberta", {"vocab_size": 100}, "267 vocab_size 100"),
    ("roberta", {"pad_token_id": 30}, "pad_token_id 30"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True False"),
    ("gpt2", {"activation_function": "silu"}, "activation_function silu gelu_new"),
    ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon 1e-06 1e-05"),
    ("gpt2", {"n_positions": 30}, "wpe.weight (30, 16)"),
    ("gpt2", {"n_layer": "two"}, "n_layer two integer"),
    ("gpt2", {"n_layer": 3}, "16 missing"),
    ("gpt2", "transformer.ln_f.bias", "decoder.layer_norm.bias"),
    ("gpt2", "transformer.wte.weight", "wte.weight"),
    ("gpt2", more_tensors, "other (2,)"),
    ("gpt2", lambda path: (path / "merges.txt").unlink(), "merges.txt"),
    ("gpt2", lambda path: (path / "merges.txt").write_text("a b c\n"), "merge tokens"),
    ("gpt2", lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
    ("gpt2", lambda path: (path / "model.safetensors").write_text("words"), "model.safetensors"),
    ("gpt2", lambda path: (path / "config.json").write_text("[]"), "config.json"),
    ("gpt2", lambda path: (path / "config.json").unlink(), "config.json"),
    ("roberta", lambda path: (path / "tokenizer.json").write_text('{"model": {"type": "Unigram"}}'), "Unigram BPE"),
    ("gpt2", lambda path: (path.parent / "dict.txt").write_text("other 1\n"), "dict.txt there"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED, ids=[row[2] for row in REFUSED])
def test_a_folder_without_a_counterpart_is_refused(
    name: str, change: Any, words: str, folders: dict[str, Folder], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(folders[name].path, folder)
    if isinstance(change, dict):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    elif isinstance(change, str):
        tensors = load_file(folder / "model.safetensors")
        save_file({key: x for key, x in tensors.items() if key != change}, folder / "model.safetensors")
    else:
        change(folder)
    with refused_in_one_line(tmp_path, *words.split(" ", 2)):
        main([str(folder), str(tmp_path / "new.pt"), "--arch", folders[name].arch])


def test_an_architecture_of_other_weights_is_refused(folders: dict[str, Folder], tmp_path: Path) -> None:
    """The default is a language model."""
    with refused_in_one_line(tmp_path, "roberta", "--arch flowformer_lm"):
        main([str(folders["bert"].path), str(tmp_path / "new.pt")])
