"""Language models in folders of safetensors: written from checkpoints, loaded, and turned into checkpoints again.

tests/test_damaged_files.py damages the files of a folder.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from common.modules.stored_options import is_extra_state
from fairseq_plugin import FlowformerLanguageModel, LinearTimeLanguageModel, from_safetensors, to_safetensors
from tests.fairseq_plugin.helpers.checkpoint_files import save, save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary, tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small checkpoint as fairseq-train writes it, its dictionary, and both as "whole" and "half"."""
    path = tmp_path_factory.mktemp("folder")
    save_model(path / "model.pt", "cfg", "flowformer_lm")
    dictionary().save(str(path / "dict.txt"))
    for name, options in (("whole", []), ("half", ["--half"])):
        to_safetensors.main([str(path / "model.pt"), str(path / name), "--dict", str(path / "dict.txt"), *options])
    return path


def _logits(folder: Path, *file: str) -> Tensor:
    return FlowformerLanguageModel.from_pretrained(str(folder), *file).models[0](tokens(2, 20))[0]


def test_the_folder_gives_the_outputs_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    """By the name of the file or without it, and as a checkpoint again, after as many updates."""
    expected = _logits(folder, "model.pt")
    assert expected.std() > 0.1
    from_safetensors.main([str(folder / "whole"), str(tmp_path / "back")])
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["dict.txt", "model.pt"]
    for found in (
        _logits(folder / "whole"),
        _logits(folder / "whole", "model.safetensors"),
        _logits(tmp_path / "back"),
    ):
        assert torch.equal(found, expected)
    assert torch.load(tmp_path / "back" / "model.pt")["optimizer_history"][-1]["num_updates"] == 7


def test_the_folder_is_data_without_places(folder: Path) -> None:
    """Three files; the configuration names neither data nor folders of the training."""
    assert sorted(path.name for path in (folder / "whole").iterdir()) == [
        "config.json",
        "dict.txt",
        "model.safetensors",
    ]
    config = json.loads((folder / "whole" / "config.json").read_text())
    assert config["cfg"]["model"]["_name"] == "flowformer_lm" and config["cfg"]["task"]["data"] == "."
    assert not {"checkpoint", "common", "distributed_training", "optimizer"} & config["cfg"].keys()


def test_half_precision_takes_half_of_the_memory(folder: Path) -> None:
    """The records of options survive."""
    half, whole = (load_file(folder / name / "model.safetensors") for name in ("half", "whole"))
    assert {x.dtype for x in half.values() if x.is_floating_point()} == {torch.float16}
    assert any(map(is_extra_state, half))
    assert all(torch.equal(half[name].float(), whole[name]) for name in filter(is_extra_state, half))
    torch.testing.assert_close(_logits(folder / "half"), _logits(folder / "whole"), atol=0.02, rtol=0.02)
    assert not torch.equal(_logits(folder / "half"), _logits(folder / "whole"))


MASKED = ("--task", "masked_lm", "--criterion", "masked_lm")
PIECES = ("--bpe", "sentencepiece", "--sentencepiece-model", "/data/spm.model")
#: How a checkpoint is stored, its architecture and options, and further options of the command, by a word of the line
#: that refuses it. The first ones are of wrong dictionaries and too large numbers, the others of other checkpoints.
REFUSED: dict[str, tuple[str, str, tuple[str, ...], list[str]]] = {
    "6 symbols": ("cfg", "flowformer_lm", (), ["--dict", "short.txt"]),
    "nothing.txt": ("cfg", "flowformer_lm", (), ["--dict", "nothing.txt"]),
    "bytes.txt": ("cfg", "flowformer_lm", (), ["--dict", "bytes.txt"]),
    "decoder.embed_tokens.weight": ("cfg", "flowformer_lm", (), ["--half"]),
    "(cfg)": ("args", "flowformer_lm", (), []),
    "flowformer_mlm": ("args", "flowformer_mlm", MASKED, []),
    "transformer_lm": ("cfg", "transformer_lm", (), []),
    "/data/spm.model": ("cfg", "flowformer_lm", PIECES, []),
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_stored_is_refused(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, arch, arguments, options = REFUSED[word]
    weights = save_model(tmp_path / "model.pt", kind, "flowformer_lm").state_dict()
    weights["decoder.embed_tokens.weight"][5, 3] = 1e5  # more than half precision holds
    save(tmp_path / "model.pt", weights, kind, arch, *arguments)
    dictionary().save(str(tmp_path / "dict.txt"))
    Path("short.txt").write_text("a 1\nb 1\n")
    Path("bytes.txt").write_bytes(b"\xff\xfe 1\n")
    with refused_in_one_line(tmp_path, word):
        to_safetensors.main(["model.pt", "new", "--dict", "dict.txt", *options])


def test_a_folder_with_code_or_without_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """The checksum only finds accidents, since anybody can leave it away."""
    for name in ("config.json", "dict.txt", "model.safetensors"):
        shutil.copytree(folder / "whole", tmp_path / f"without-{name}")
        (tmp_path / f"without-{name}" / name).unlink()
        with refused_in_one_line(tmp_path, name):
            from_safetensors.main([str(tmp_path / f"without-{name}"), str(tmp_path / "new")])
    config = json.loads((folder / "whole" / "config.json").read_text())
    del config["sha256"]
    config["cfg"]["model"]["adaptive_input_cutoff"] = "__import__('os').getcwd()"
    shutil.copytree(folder / "whole", tmp_path / "code")
    (tmp_path / "code" / "config.json").write_text(json.dumps(config))
    with refused_in_one_line(tmp_path, "config.json", "adaptive_input_cutoff"):
        LinearTimeLanguageModel.from_pretrained(str(tmp_path / "code"))
