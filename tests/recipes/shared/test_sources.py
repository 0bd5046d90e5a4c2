"""Downloads of every preparer: continued, checked, kept, and files of others are not replaced."""

import hashlib
import random
import re
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from recipes.cifar10_pixels import prepare as cifar10
from recipes.enwik8 import prepare as enwik8
from recipes.flash import prepare as flash
from recipes.long_copy import prepare as long_copy
from recipes.offline_rl import prepare as offline_rl
from recipes.shared.download import Source
from recipes.shared.sources import D4RL, HUB, SOURCES, UEA
from recipes.wikitext103 import prepare as wikitext103
from tests.recipes.server import Page, serve, use_hub

BODY = random.Random(0).randbytes(5_000)
OTHER = BODY[:-1] + bytes([BODY[-1] ^ 1])


class Preparer(NamedTuple):
    """A command that downloads a file."""

    main: Callable[[list[str]], int]
    source: str  # its name in the table
    arguments: tuple[str, ...] = ()
    folder: str = "out"  # of the download, next to or in the folder that it prepares, "out"


PREPARERS = {
    "enwik8": Preparer(enwik8.main, "enwik8"),
    "cifar10_pixels": Preparer(cifar10.main, "cifar10"),
    "wikitext103": Preparer(wikitext103.main, "wikitext103", folder="out/text"),
    "offline_rl": Preparer(offline_rl.main, "hopper-medium-v2", ("--dataset", "hopper-medium-v2"), "downloads"),
}
#: Preparers whose files are not in the table or not downloaded.
WITHOUT_SOURCE = [
    Preparer(flash.main, "", ("wiki40b",)),
    Preparer(long_copy.main, ""),
]


@pytest.mark.parametrize("name", PREPARERS)
def test_a_download_is_continued_checked_and_kept(name, tmp_path, monkeypatch, capsys):
    """The file holds no data, so every run ends with an error; the last errors concern its content."""
    preparer, published = PREPARERS[name], SOURCES[PREPARERS[name].source]
    checked = published.sha256 is not None or published.md5 is not None
    path = tmp_path / preparer.folder / published.name
    pages = {f"/{published.name}": Page(BODY, cut=100)}
    with serve(pages) as served:
        use_hub(monkeypatch, served.address)  # WikiText-103 is on the hub as well
        small = Source(
            f"{served.address}/{published.name}",
            published.size and len(BODY),
            published.sha256 and hashlib.sha256(BODY).hexdigest(),
            published.members,
            published.md5 and hashlib.md5(BODY).hexdigest(),
        )
        monkeypatch.setitem(SOURCES, preparer.source, small)

        def fails(*words: str) -> None:
            assert preparer.main([*preparer.arguments, "--out", str(tmp_path / "out")]) == 1
            message = capsys.readouterr().err
            assert all(word in message for word in (published.name, *words)), message
            assert not (tmp_path / "out" / "data-bin").exists()

        fails("ended after 100 of 5000 bytes", "--file")
        assert not path.exists()
        if checked:
            pages[f"/{published.name}"] = Page(OTHER)
            fails("sha256" if published.sha256 else "md5", "allowed", "--file")
            assert not path.exists() and not list(path.parent.glob("*.part"))
        pages[f"/{published.name}"] = Page(BODY)
        fails("allowed")
        assert path.read_bytes() == BODY
        fails("allowed")
        requests = [request[1:] for request in served.requests if request[0] == f"/{published.name}"]
        assert [part for part, _ in requests] == [None, "bytes=100-", *[None] * checked]
        assert all("Mozilla" in agent for _, agent in requests)  # one host refuses urllib's default agent
    if checked:
        path.write_bytes(OTHER)  # not written by the preparer
        fails("sha256" if published.sha256 else "md5", "allowed", str(path))
        assert path.read_bytes() == OTHER


def test_every_source_is_whole():
    """Addresses are of files and checksums have the right length; files without checksums are listed here."""
    for source in SOURCES.values():
        assert urlsplit(source.url).scheme in ("http", "https") and source.name in source.url
        assert source.sha256 is None or (len(source.sha256) == 64 and int(source.sha256, 16) and source.size)
        assert source.md5 is None or (len(source.md5) == 32 and int(source.md5, 16))
    assert {name for name, source in SOURCES.items() if not (source.sha256 or source.md5)} == {"long_range_arena"}
    assert len({source.sha256 for source in (*UEA.values(), *D4RL.values())}) == len(UEA) + len(D4RL) == 18
    assert all(len(hub.revision) == 40 and "/" in hub.dataset for hub in HUB.values())


@pytest.mark.parametrize("preparer", [*PREPARERS.values(), *WITHOUT_SOURCE], ids=lambda one: one.main.__module__)
def test_a_file_that_is_not_there(preparer, tmp_path, capsys):
    """Reported before anything is written."""
    arguments = [*preparer.arguments, "--file", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert preparer.main(arguments) == 1
    assert re.search(r"--file is .*none.*; allowed", capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["cifar10_pixels"])
@pytest.mark.parametrize("content", [BODY[:-1], OTHER])
def test_another_file_of_the_user(name, content, tmp_path, monkeypatch, capsys):
    """Too short or damaged; other texts or data sets are checked elsewhere, by their content."""
    preparer, published = PREPARERS[name], SOURCES[PREPARERS[name].source]
    digest = published.sha256 and hashlib.sha256(BODY).hexdigest()
    small = published._replace(size=len(BODY), sha256=digest, md5=published.md5 and hashlib.md5(BODY).hexdigest())
    monkeypatch.setitem(SOURCES, preparer.source, small)
    path = tmp_path / "mine"
    path.write_bytes(content)
    assert preparer.main(["--file", str(path), "--out", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err
    assert str(path) in message and "allowed" in message and published.name in message
    assert ("4,999 bytes" in message) == (content != OTHER)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
