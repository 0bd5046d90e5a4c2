"""Archives passed to ``from_pretrained`` are extracted into a temporary folder; nothing else is changed."""

import io
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from fairseq_plugin import FlowformerLanguageModel
from fairseq_plugin.loading.folders import find_folder
from tests.fairseq_plugin.helpers.checkpoint_files import save_model


def _archive(path: Path, *members: tarfile.TarInfo) -> Path:
    """A tar file of ``members``; each regular file has a few bytes."""
    with tarfile.open(path, "w:gz") as archive:
        for member in members:
            member.size = 3 if member.isreg() else 0
            archive.addfile(member, io.BytesIO(b"abc") if member.isreg() else None)
    return path


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


MALICIOUS = {
    "above": [_member("../../escaped")],
    "above a folder": [_member("model/../../escaped")],
    "symbolic link, then through it": [_member("link", tarfile.SYMTYPE, "../.."), _member("link/escaped")],
    "symbolic link to an absolute name": [_member("link", tarfile.SYMTYPE, "/etc/passwd")],
    "hard link": [_member("link", tarfile.LNKTYPE, "../../escaped")],
    "character device": [_member("device", tarfile.CHRTYPE)],
    "block device": [_member("device", tarfile.BLKTYPE)],
    "pipe": [_member("pipe", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("case", MALICIOUS)
def test_malicious_archives_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError; nothing is written outside of the temporary folder, and the archive is kept."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a" / "b"))
    (tmp_path / "a" / "b").mkdir(parents=True)
    archive = _archive(tmp_path / "model.tar.gz", *MALICIOUS[case])
    before = _files(tmp_path)
    with pytest.raises(ValueError, match="model_name_or_path is '.*model.tar.gz'; allowed: "):
        FlowformerLanguageModel.from_pretrained(str(archive))
    assert _files(tmp_path) == before


def test_absolute_names_stay_inside(tmp_path: Path) -> None:
    """Extracted without the leading slash, as tar does."""
    archive = _archive(tmp_path / "model.tar.gz", _member(f"{tmp_path}/escaped"), _member("other"))
    folder = Path(find_folder("model_name_or_path", str(archive)))
    assert not (tmp_path / "escaped").exists()
    assert (folder / str(tmp_path)[1:] / "escaped").read_bytes() == b"abc"


@pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b\x08 cut"], ids=["empty", "text", "cut gzip"])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    """A file that is not an archive is refused and kept."""
    (tmp_path / "model.tar.gz").write_bytes(content)
    with pytest.raises(ValueError, match="data_name_or_path is '.*model.tar.gz'; allowed"):
        find_folder("data_name_or_path", str(tmp_path / "model.tar.gz"))
    assert (tmp_path / "model.tar.gz").read_bytes() == content


@pytest.fixture
def released(data_bin: str, tmp_path: Path) -> Path:
    """An archive as on fairseq's hub: a folder with the model and its dictionary."""
    save_model(tmp_path / "model.pt", "cfg", "flowformer_lm")
    with tarfile.open(tmp_path / "released.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "model.pt", "released/model.pt")
        archive.add(Path(data_bin) / "dict.txt", "released/dict.txt")
    return tmp_path / "released.tar.gz"


def test_an_archive_loads_and_stays(released: Path) -> None:
    """Model and dictionary are read from the archive; the user's file is unchanged."""
    content = released.read_bytes()
    hub = FlowformerLanguageModel.from_pretrained(str(released))
    assert type(hub.models[0]) is FlowformerLanguageModel and len(hub.task.source_dictionary) == 64
    assert released.read_bytes() == content
    assert sorted(path.name for path in released.parent.iterdir()) == ["model.pt", "released.tar.gz"]


def test_an_archive_at_a_url_loads(released: Path) -> None:
    """An archive at a URL loads; a URL without a file is refused."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(released.parent))
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            hub = FlowformerLanguageModel.from_pretrained(f"{url}/released.tar.gz")
            with pytest.raises(ValueError, match="model_name_or_path is 'http.*/nothing.tar.gz'; allowed: .*404"):
                FlowformerLanguageModel.from_pretrained(f"{url}/nothing.tar.gz")
        finally:
            server.shutdown()
            thread.join()
    assert type(hub.models[0]) is FlowformerLanguageModel
