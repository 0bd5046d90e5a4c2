"""Folders, archives and files that models are loaded from: data alone, and nothing else is changed.

Language models in folders of safetensors are also written, and turned into checkpoints again.
../../test_damaged_files.py damages the files of a folder.
"""

import argparse
import io
import json
import os
import pickle
import shutil
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from common.modules.stored_options import is_extra_state
from fairseq_plugin import FlowformerLanguageModel, LinearTimeLanguageModel, from_safetensors, to_safetensors
from fairseq_plugin.loading.folders import find_folder
from fairseq_plugin.models.flowformer import FlowformerLanguageModelConfig
from tests.fairseq_plugin.helpers.checkpoint_files import save, save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line
from tests.fairseq_plugin.helpers.text import dictionary, tokens

# ---- Archives


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, target, 3 if kind == tarfile.REGTYPE else 0
    return member


def _archive(path: Path, *members: tarfile.TarInfo) -> Path:
    """A tar file of ``members``; each regular file has a few bytes."""
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"abc") if member.isreg() else None)
    return path


MALICIOUS = {
    "above": [_member("../../escaped")],
    "above a folder": [_member("model/../../escaped")],
    "symbolic link, then through it": [_member("link", tarfile.SYMTYPE, "../.."), _member("link/escaped")],
    "symbolic link to an absolute name": [_member("link", tarfile.SYMTYPE, "/etc/passwd")],
    "hard link": [_member("link", tarfile.LNKTYPE, "../../escaped")],
    "character device": [_member("device", tarfile.CHRTYPE)],
    "pipe": [_member("pipe", tarfile.FIFOTYPE)],
}
NO_ARCHIVES = {"empty": b"", "text": b"no archive", "cut gzip": b"\x1f\x8b\x08 cut"}


@pytest.mark.parametrize("case", [*MALICIOUS, *NO_ARCHIVES])
def test_an_archive_that_is_malicious_or_none_is_refused(case: str, tmp_path: Path, monkeypatch) -> None:
    """Nothing is written outside of the temporary folder, of which nothing is left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    archive = tmp_path / "model.tar.gz"
    archive.write_bytes(NO_ARCHIVES[case]) if case in NO_ARCHIVES else _archive(archive, *MALICIOUS[case])
    with refused_in_one_line(tmp_path, "model_name_or_path is", "model.tar.gz"):
        FlowformerLanguageModel.from_pretrained(str(archive))


def test_absolute_names_stay_inside(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "model.tar.gz", _member(f"{tmp_path}/escaped"), _member("other"))
    folder = Path(find_folder("model_name_or_path", str(archive)))
    assert not (tmp_path / "escaped").exists()
    assert (folder / str(tmp_path)[1:] / "escaped").read_bytes() == b"abc"


def test_an_archive_loads_from_a_path_and_from_a_url(tmp_path: Path) -> None:
    """With model and dictionary in a folder, as on fairseq's hub; the user's file stays as it was."""
    save_model(tmp_path / "model.pt", "cfg", "flowformer_lm")
    dictionary().save(str(tmp_path / "dict.txt"))
    released = tmp_path / "released.tar.gz"
    with tarfile.open(released, "w:gz") as archive:
        for name in ("model.pt", "dict.txt"):
            archive.add(tmp_path / name, f"released/{name}")
    content = released.read_bytes()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            hubs = [FlowformerLanguageModel.from_pretrained(x) for x in (str(released), f"{url}/released.tar.gz")]
            with refused_in_one_line(tmp_path, "model_name_or_path is", "nothing.tar.gz", "404"):
                FlowformerLanguageModel.from_pretrained(f"{url}/nothing.tar.gz")
        finally:
            server.shutdown()
            thread.join()
    assert all(type(x.models[0]) is FlowformerLanguageModel and len(x.task.source_dictionary) == 64 for x in hubs)
    assert released.read_bytes() == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dict.txt", "model.pt", "released.tar.gz"]


# ---- Files of torch


class _Attack:
    """Content of a malicious file: an object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


def test_files_of_torch_are_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq's configurations and metrics load by torch's default, also after timm, which allows namespaces only while
    it reads a file; of other classes fairseq's own loader runs nothing.
    """
    monkeypatch.chdir(tmp_path)
    model = OmegaConf.to_container(OmegaConf.structured(FlowformerLanguageModelConfig), enum_to_str=True)
    for content in (
        argparse.Namespace(lr=[0.1], nested=argparse.Namespace(text="a", nothing=None, flag=True)),
        OmegaConf.create({"a": {"b": [1, 2.5, "c", None, True]}, "interpolated": "${a.b}"}),
        OmegaConf.create([1, {"x": "y"}]),
        OmegaConf.create(model),
        {"best": np.float64(1.5), "low": np.float32(0.5)},  # as --eval-bleu leaves them, and arrays
    ):
        torch.save({"cfg": content, "meter": np.array([3.5, 2.25])}, "c.pt")
        with torch.serialization.safe_globals([argparse.Namespace]):
            pass
        loaded = torch.load("c.pt", weights_only=True)
        assert loaded["cfg"] == content and loaded["meter"].tolist() == [3.5, 2.25]
    torch.save({"cfg": {}, "args": _Attack(), "model": {}}, "attack.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint_to_cpu("attack.pt")
    assert not Path("executed").exists()


# ---- Folders of safetensors


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


def test_a_folder_is_the_checkpoint_without_its_places(folder: Path, tmp_path: Path) -> None:
    """By the name of the file or without it, and as a checkpoint again, after as many updates."""
    expected = _logits(folder, "model.pt")
    from_safetensors.main([str(folder / "whole"), str(tmp_path / "back")])
    assert {path.name for path in (tmp_path / "back").iterdir()} == {"dict.txt", "model.pt"}
    for read in ((folder / "whole",), (folder / "whole", "model.safetensors"), (tmp_path / "back",)):
        assert torch.equal(_logits(*read), expected) and expected.std() > 0.1
    assert torch.load(tmp_path / "back" / "model.pt")["optimizer_history"][-1]["num_updates"] == 7
    assert {path.name for path in (folder / "whole").iterdir()} == {"config.json", "dict.txt", "model.safetensors"}
    config = json.loads((folder / "whole" / "config.json").read_text())
    assert config["cfg"]["model"]["_name"] == "flowformer_lm" and config["cfg"]["task"]["data"] == "."
    assert not {"checkpoint", "common", "distributed_training", "optimizer"} & config["cfg"].keys()


def test_in_half_precision_the_records_of_options_survive(folder: Path) -> None:
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
def test_what_cannot_be_stored_is_refused(word: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    kind, arch, arguments, options = REFUSED[word]
    weights = torch.load(folder / "model.pt")["model"]
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
