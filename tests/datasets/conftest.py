import http.server
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Server:
    """Files over http on this machine, with ranges, and with a connection that can be cut.

    Args:
        address: with port.
        files: content by path.
        cut_after: bytes of the body after which the next connections break, one per entry.
        ranges: whether ranges are understood.
        redirects: target by path.
        asked: (path, Range header) of every request.
    """

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: list[int] = field(default_factory=list)
    ranges: bool = True
    redirects: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)

    def url(self, name: str) -> str:
        return f"http://{self.address}/{name}"


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, span = self.path.lstrip("/"), self.headers.get("Range")
            state.asked.append((name, span))
            if name in state.redirects:
                self.send_response(302)
                self.send_header("Location", state.redirects[name])
                self.end_headers()
                return
            if name not in state.files:
                self.send_error(404)
                return
            body, tag = state.files[name], f'"{hash(state.files[name])}"'
            same = self.headers.get("If-Range") in (None, tag)
            start = int(span.removeprefix("bytes=").rstrip("-")) if span and state.ranges and same else 0
            if start and start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            if state.cut_after:
                self.wfile.write(rest[: state.cut_after.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(rest)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    state.address = f"127.0.0.1:{listener.server_address[1]}"
    yield state
    listener.shutdown()
    thread.join()
    listener.server_close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    return root
