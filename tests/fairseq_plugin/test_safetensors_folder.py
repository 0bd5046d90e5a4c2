"""Language models in folders of safetensors: written from checkpoints, loaded, and turned into checkpoints again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from common.modules.stored_options import is_extra_state
from fairseq_plugin import FlowformerLanguageModel, LinearTimeLanguageModel, from_safetensors, to_safetensors
from tests.fairseq_plugin.helpers.checkpoint_files import save, save_model
from tests.fairseq_plugin.helpers.text import tokens


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint as fairseq-train writes it."""
    path = tmp_path_factory.mktemp("checkpoint") / "checkpoint_best.pt"
    save_model(path, "cfg", "flowformer_lm")
    return path


def _write(checkpoint: Path, folder: Path, dictionary: str, *options: str) -> Path:
    to_safetensors.main([str(checkpoint), str(folder), "--dict", dictionary, *options])
    return folder


@pytest.fixture(scope="module")
def dictionary(data_bin: str) -> str:
    """The dictionary of the toy text, whose number of symbols the models have."""
    return f"{data_bin}/dict.txt"


@pytest.fixture(scope="module")
def folder(checkpoint: Path, dictionary: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint as a folder of safetensors."""
    return _write(checkpoint, tmp_path_factory.mktemp("folder") / "model", dictionary)


def _logits(folder: Path, *file: str) -> Tensor:
    hub = FlowformerLanguageModel.from_pretrained(str(folder), *file)
    return hub.models[0](tokens(2, 20))[0]


def test_the_folder_gives_the_outputs_of_the_checkpoint(checkpoint: Path, folder: Path, data_bin: str) -> None:
    """By the name of the file or without it, and as a checkpoint again."""
    hub = FlowformerLanguageModel.from_pretrained(str(checkpoint.parent), checkpoint.name, data_bin)
    expected = hub.models[0](tokens(2, 20))[0]
    assert expected.std() > 0.1
    for file in ((), ("model.safetensors",)):
        assert torch.equal(_logits(folder, *file), expected)
    back = folder.parent / "back"
    from_safetensors.main([str(folder), str(back)])
    assert sorted(path.name for path in back.iterdir()) == ["dict.txt", "model.pt"]
    assert torch.equal(_logits(back), expected)


def test_the_folder_is_data_without_places(folder: Path) -> None:
    """Three files; the configuration names neither data nor folders of the training."""
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "dict.txt", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    assert config["cfg"]["model"]["_name"] == "flowformer_lm" and config["cfg"]["task"]["data"] == "."
    assert config["updates"] == 7
    assert not {"checkpoint", "common", "distributed_training", "optimizer"} & config["cfg"].keys()


def test_half_precision_takes_half_of_the_memory(folder: Path, checkpoint: Path, dictionary: str, tmp_path) -> None:
    """The records of options survive."""
    half = _write(checkpoint, tmp_path / "half", dictionary, "--half")
    stored, whole = (load_file(path / "model.safetensors") for path in (half, folder))
    assert {x.dtype for x in stored.values() if x.is_floating_point()} == {torch.float16}
    assert any(map(is_extra_state, stored))
    for name in filter(is_extra_state, stored):
        assert torch.equal(stored[name].float(), whole[name])
    torch.testing.assert_close(_logits(half), _logits(folder), atol=0.02, rtol=0.02)
    assert not torch.equal(_logits(half), _logits(folder))


def _other_dictionary(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    (folder / "dict.txt").write_text("a 1\nb 1\n")
    return ["--dict", str(folder / "dict.txt")]


def _no_dictionary(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    return ["--dict", str(folder / "nothing.txt")]


def _bytes_as_dictionary(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    (folder / "dict.txt").write_bytes(b"\xff\xfe 1\n")
    return ["--dict", str(folder / "dict.txt")]


def _large(folder: Path, weights: dict[str, Tensor]) -> list[str]:
    weights["decoder.embed_tokens.weight"][5, 3] = 1e5
    return ["--half"]


#: A word of the message, and what is changed: options, files or weights.
REFUSED: dict[str, Callable[[Path, dict[str, Tensor]], list[str]]] = {
    "6 symbols": _other_dictionary,
    "nothing.txt": _no_dictionary,
    "dict.txt": _bytes_as_dictionary,
    "decoder.embed_tokens.weight": _large,
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_stored_is_one_line(word: str, dictionary: str, tmp_path: Path) -> None:
    """Nothing is written."""
    model: nn.Module = save_model(tmp_path / "model.pt", "cfg", "linear_lm")
    weights = model.state_dict()
    options = REFUSED[word](tmp_path, weights)
    save(tmp_path / "model.pt", weights, "cfg", "linear_lm")
    with pytest.raises(SystemExit, match=word) as error:
        to_safetensors.main([str(tmp_path / "model.pt"), str(tmp_path / "new"), "--dict", dictionary, *options])
    assert "allowed" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "case",
    [
        ("args", "flowformer_lm", ()),
        ("args", "flowformer_mlm", ("--task", "masked_lm", "--criterion", "masked_lm")),
        ("cfg", "transformer_lm", ()),
        ("cfg", "flowformer_lm", ("--bpe", "sentencepiece", "--sentencepiece-model", "/data/spm.model")),
    ],
    ids=["older configuration", "masked model", "stock model", "a file of the training's machine"],
)
def test_other_checkpoints_are_refused(case: tuple, dictionary: str, tmp_path: Path) -> None:
    """Those with options in one namespace, of other models, and with paths in their configuration."""
    kind, arch, arguments = case
    model = save_model(tmp_path / "model.pt", kind, "flowformer_lm")
    save(tmp_path / "model.pt", model.state_dict(), kind, arch, *arguments)
    with pytest.raises(SystemExit, match="model.pt.*allowed"):
        to_safetensors.main([str(tmp_path / "model.pt"), str(tmp_path / "new"), "--dict", dictionary])
    assert not (tmp_path / "new").exists()


def test_a_configuration_with_code_is_not_loaded(folder: Path, tmp_path: Path) -> None:
    """The checksum only finds accidents, since anybody can leave it away."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sha256"]
    config["cfg"]["model"]["adaptive_input_cutoff"] = "__import__('os').getcwd()"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json.*adaptive_input_cutoff"):
        LinearTimeLanguageModel.from_pretrained(str(tmp_path))


def test_a_folder_that_lacks_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    """Whatever the missing file is, the message names it."""
    for missing in folder.iterdir():
        part = tmp_path / f"without-{missing.name}"
        part.mkdir()
        for path in folder.iterdir():
            if path != missing:
                (part / path.name).write_bytes(path.read_bytes())
        with pytest.raises(SystemExit, match=missing.name):
            from_safetensors.main([str(part), str(tmp_path / "new")])
        assert not (tmp_path / "new").exists()
