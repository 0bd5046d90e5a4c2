"""A web server on this machine for the download tests."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Page(NamedTuple):
    """What an address answers."""

    body: bytes = b""
    status: int = 200
    cut: int | None = None  # send only so many bytes of the body, though all are announced
    ranges: bool = True  # whether a part can be asked for


class Served(NamedTuple):
    """A running server."""

    address: str
    requests: list[tuple[str, str | None, str]]  # path, Range, User-Agent of every request


@contextlib.contextmanager
def serve(pages: dict[str, Page]) -> Iterator[Served]:
    """Serve ``pages`` by path; pages may be replaced while it runs."""
    requests: list[tuple[str, str | None, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            requests.append((self.path, asked, self.headers["User-Agent"]))
            page = pages.get(self.path, Page(status=404))
            start, status = 0, page.status
            if asked and page.ranges:
                start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            self.send_response(status)
            self.send_header("Content-Length", str(len(page.body) - start))
            self.end_headers()
            self.wfile.write(page.body[start : page.cut])

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
