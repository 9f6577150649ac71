"""An S3-compatible server on loopback (moto's application), which breaks requests like a bad network.

Faults: the connection is reset, the answer is 503, its body is truncated, or it is late. `cut_at` passes this many
bytes of the sent bodies, breaks the request in which they end and refuses all later ones: what storage sees of a client
that was killed at that point. A request whose last byte arrived is carried out, and its answer is lost. Methods in
`denied` are answered as for a client without permission; requests in `drops` are not carried out.
"""

from __future__ import annotations

import io
import random
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("reset", "503", "short", "slow")
_HOP = {"connection", "transfer-encoding", "content-length", "server", "date"}


class ObjectServer(ThreadingHTTPServer):
    """moto's S3, with faults. Its own server finds the service of each request anew, which takes more CPU than S3."""

    daemon_threads = True

    def __init__(self):
        from moto.server import create_backend_app

        super().__init__(("127.0.0.1", 0), _Handler)
        self.application, self.slow_s = create_backend_app("s3"), 1.5
        self.share, self.random, self.lock = 0.0, random.Random(7), threading.Lock()
        self.faults, self.requests = Counter(), 0
        self.cut_at: int | None = None
        self.denied: set[str] = set()
        self.drops = lambda method, path: False
        self.received, self.refused = 0, 0  # bytes of bodies; requests after the cut
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def forget(self):
        """Drop all buckets, which otherwise stay in the memory of this process, and of each of its forks."""
        from moto.core.model_instances import reset_model_data

        reset_model_data()

    def handle_error(self, request, client_address):
        """Broken connections are the point."""

    def fault(self):
        with self.lock:
            self.requests += 1
            if self.cut_at is not None and self.received >= self.cut_at:
                self.refused += 1
                return "refuse"
            if self.random.random() >= self.share:
                return None
            # Each kind as often as the others; waiting for slow answers is what takes time.
            kind = self.random.choices(FAULTS, (8, 8, 8, 1))[0]
            self.faults[kind] += 1
            return kind


def answering(answer):
    """The URL of a server on loopback that answers each request with answer(request) -> (status, headers, body)."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self):
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, headers, body = answer(self)
            requested = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if requested and status == 200:
                first, stop = int(requested[1]), min(int(requested[2] or len(body)) + 1, len(body))
                headers = {**headers, "Content-Range": f"bytes {first}-{stop - 1}/{len(body)}"}
                status, body = 206, body[first:stop]
            self.send_response(status)
            for name, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

        def log_message(self, *args):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a header and its body are two packets; the second would wait 40 ms

    def log_message(self, *args):
        """Nothing."""

    def _reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _serve(self):
        fault = self.server.fault()
        length = int(self.headers.get("Content-Length") or 0)
        if fault in ("refuse", "reset"):
            return self._reset()
        body = self.rfile.read(length)
        with self.server.lock:
            left = None if self.server.cut_at is None else self.server.cut_at - self.server.received
            self.server.received += length
        if (left is not None and left < length) or self.server.drops(self.command, self.path):
            return self._reset()
        if fault == "503" or self.command in self.server.denied:
            self.send_response(503 if fault == "503" else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if fault == "slow":
            time.sleep(self.server.slow_s)
        status, headers, data = self._answer(body)
        if left is not None and left == length > 0:
            return self._reset()
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in _HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", headers.get("Content-Length") or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if fault == "short" and data else data)
        if fault == "short":
            self._reset()
        return None

    def _answer(self, body):
        """The application's (status, headers, body)."""
        path, _, query = self.path.partition("?")
        host, port = self.server.server_address
        environ = {
            "REQUEST_METHOD": self.command,
            "PATH_INFO": urllib.parse.unquote(path, "latin-1"),
            "QUERY_STRING": query,
            "RAW_URI": self.path,
            "SERVER_NAME": host,
            "SERVER_PORT": str(port),
            "SERVER_PROTOCOL": self.protocol_version,
            "CONTENT_LENGTH": str(len(body)),
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "wsgi.version": (1, 0),
            "wsgi.url_scheme": "http",
            "wsgi.input": io.BytesIO(body),
            "wsgi.errors": sys.stderr,
            "wsgi.multithread": True,
            "wsgi.multiprocess": False,
            "wsgi.run_once": False,
        }
        environ |= {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in self.headers.items()}
        begun = []
        chunks = self.server.application(environ, lambda status, headers, error=None: begun.append((status, headers)))
        data = b"".join(chunks)
        ((status, headers),) = begun
        return int(status.split()[0]), dict(headers), data

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve
