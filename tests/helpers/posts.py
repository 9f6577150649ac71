"""An HTTP server of this machine that keeps what is posted to it."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Posts:
    """What was posted, oldest first.

    Args:
        address: of the server, without a path.

    Attributes:
        bodies: with a Content-Encoding of none. hangs: for how long each of the next requests hangs, unanswered.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.hangs: list[float] = []
        self.release = threading.Event()


@contextmanager
def receiving_posts() -> Iterator[Posts]:
    """The server, as long as the context lasts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if posts.hangs:
                posts.release.wait(posts.hangs.pop(0))
                return
            posts.bodies.append(body)
            posts.paths.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        posts = Posts(f"http://127.0.0.1:{server.server_address[1]}")
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield posts
        posts.release.set()
        server.shutdown()
