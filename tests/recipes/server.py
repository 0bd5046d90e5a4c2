"""A local web server for the download tests."""

import contextlib
import functools
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import huggingface_hub
import pytest


class Page(NamedTuple):
    """The response of an address."""

    body: bytes = b""
    status: int = 200
    cut: int | None = None  # send only this many bytes of the body, though Content-Length has all
    ranges: bool = True  # whether Range requests are supported


class Served(NamedTuple):
    """A running server."""

    address: str
    requests: list[tuple[str, str | None, str]]  # path, Range, User-Agent of every request


@contextlib.contextmanager
def serve(pages: dict[str, Page]) -> Iterator[Served]:
    """Serve ``pages`` by path; pages may be replaced while the server runs."""
    requests: list[tuple[str, str | None, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page, start = self.answer()
            self.wfile.write(page.body[start : page.cut])

        def do_HEAD(self) -> None:
            self.answer()

        def answer(self) -> tuple[Page, int]:
            """Send the headers; returns the page and the first byte to send."""
            requested, path = self.headers.get("Range"), self.path.partition("?")[0]
            requests.append((path, requested, self.headers["User-Agent"]))
            page = pages.get(path, Page(status=404))
            start, status = 0, page.status
            if requested and page.ranges:
                start, status = int(requested.removeprefix("bytes=").rstrip("-")), 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(page.body) - start))
            self.send_header("ETag", f'"{sha256(page.body)}"')  # additional headers of Hugging Face's hub
            self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            return page, start

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Served(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let huggingface_hub use the server at ``address``; HF_ENDPOINT must be set before its import."""
    monkeypatch.setattr(huggingface_hub, "HfApi", functools.partial(huggingface_hub.HfApi, endpoint=address))


def sha256(content: bytes) -> str:
    """Checksum in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def hub_pages(dataset: str, revision: str, files: dict[str, bytes]) -> dict[str, Page]:
    """Pages of a hub with ``files`` of a data set in one folder, which also has a subfolder and a small file."""
    tree: list[dict] = [
        {"type": "directory", "path": "x/y", "size": 0, "oid": "0"},
        {"type": "file", "path": "x/README.md", "size": 1, "oid": "0"},
    ]
    tree += [
        {
            "type": "file",
            "path": name,
            "size": len(body),
            "oid": "0",
            "lfs": {"oid": sha256(body), "size": len(body), "pointerSize": 1},
        }
        for name, body in files.items()
    ]
    folder = next(iter(files)).partition("/")[0]
    pages = {f"/api/datasets/{dataset}/tree/{revision}/{folder}": Page(json.dumps(tree).encode())}
    return pages | {f"/datasets/{dataset}/resolve/{revision}/{name}": Page(body) for name, body in files.items()}
