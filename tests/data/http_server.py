"""A server of http on the loopback of this machine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar


class Server(BaseHTTPRequestHandler):
    """Serves ``files``, with ranges. What ``behave`` has of a path happens before an answer."""

    address: ClassVar[str] = ""
    files: ClassVar[dict[str, bytes]] = {}
    behave: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[Counter[str]] = Counter()

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        name = self.path[1:]
        Server.asked[name] += 1
        content = self.files.get(name)
        if content is None:
            self.send_error(404)
            return
        first, last = 0, len(content) - 1
        if asked := self.headers.get("Range"):
            begin, end = asked.removeprefix("bytes=").split("-")
            first, last = int(begin), min(int(end or last), last)
        body = content[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", str(hash(content)))
        self.end_headers()
        if with_body and (behave := self.behave.get(name)):
            body = behave(self, first, body)
        if with_body and body is not None:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving() -> Iterator[str]:
    """Serve at the address that is returned, until the block ends."""
    Server.files.clear(), Server.behave.clear(), Server.asked.clear()
    running = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    Server.address = f"http://127.0.0.1:{running.server_port}"
    yield Server.address
    running.shutdown()
    running.server_close()
