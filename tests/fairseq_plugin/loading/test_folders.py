"""Archives and files that ``from_pretrained`` is given: extracted aside, read as data, and nothing else is changed."""

import argparse
import io
import os
import pickle
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

from fairseq_plugin import FlowformerLanguageModel
from fairseq_plugin.loading.folders import find_folder
from fairseq_plugin.models.flowformer import FlowformerLanguageModelConfig
from tests.fairseq_plugin.helpers.checkpoint_files import save_model
from tests.fairseq_plugin.helpers.one_line import refused_in_one_line


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


def test_an_archive_loads_from_a_path_and_from_a_url(data_bin: str, tmp_path: Path) -> None:
    """With model and dictionary in a folder, as on fairseq's hub; the user's file stays as it was."""
    save_model(tmp_path / "model.pt", "cfg", "flowformer_lm")
    released = tmp_path / "released.tar.gz"
    with tarfile.open(released, "w:gz") as archive:
        archive.add(tmp_path / "model.pt", "released/model.pt")
        archive.add(Path(data_bin) / "dict.txt", "released/dict.txt")
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "released.tar.gz"]


class _Attack:
    """Content of a malicious file: an object that runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("echo executed > executed",)


@pytest.mark.parametrize(
    "content",
    [
        argparse.Namespace(lr=[0.1], nested=argparse.Namespace(text="a", nothing=None, flag=True)),
        OmegaConf.create({"a": {"b": [1, 2.5, "c", None, True]}, "interpolated": "${a.b}"}),
        OmegaConf.create([1, {"x": "y"}]),
        OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(FlowformerLanguageModelConfig), enum_to_str=True)),
        {"best": np.float64(1.5), "low": np.float32(0.5)},  # as --eval-bleu leaves them, and arrays
    ],
    ids=["namespace", "dictionary", "list", "options of a model", "metrics"],
)
def test_fairseqs_configurations_and_metrics_load(content: object, tmp_path: Path) -> None:
    """By torch's default; also after timm, which allows namespaces only while it reads a file."""
    torch.save({"cfg": content, "meter": np.array([3.5, 2.25])}, tmp_path / "c.pt")
    with torch.serialization.safe_globals([argparse.Namespace]):
        pass
    loaded = torch.load(tmp_path / "c.pt", weights_only=True)
    assert loaded["cfg"] == content and loaded["meter"].tolist() == [3.5, 2.25]


def test_other_classes_are_still_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq's own loader stops before the file's code runs."""
    monkeypatch.chdir(tmp_path)
    torch.save({"cfg": {}, "args": _Attack(), "model": {}}, "attack.pt")
    with pytest.raises(pickle.UnpicklingError):
        load_checkpoint_to_cpu("attack.pt")
    assert not Path("executed").exists()
