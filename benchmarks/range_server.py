"""A web server on loopback that answers ranges of a folder's files from the page cache, and the rate that it reaches.

    python benchmarks/range_server.py FOLDER

One process, by sendfile, without signatures and TLS. Benchmarks start it with `serving`.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BLOCK_BYTES = 4 << 20


class Handler(BaseHTTPRequestHandler):
    """The files of a folder, whole or by ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Nothing."""

    def do_HEAD(self):
        """The size and version alone."""
        self.do_GET()

    def do_GET(self):
        """The range that is asked for."""
        path = self.server.folder / self.path.rpartition("/")[2]
        size = path.stat().st_size
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or size) + 1, size)
        self.send_response(206 if self.headers.get("Range") else 200)
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{size}"')
        self.end_headers()
        self.wfile.flush()
        if self.command == "GET":
            with path.open("rb") as file:
                self.connection.sendfile(file, start, stop - start)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a folder while a process serves it."""
    process = subprocess.Popen([sys.executable, __file__, folder], stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()


def server_seconds(url, size, *, streams):
    """The time in which this many streams read a whole file, block by block."""
    address = urllib.parse.urlsplit(url)

    def stream(number):
        connection = http.client.HTTPConnection(address.netloc)
        for start in range(number * BLOCK_BYTES, size, streams * BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, size)
            connection.request("GET", address.path, headers={"Range": f"bytes={start}-{stop - 1}"})
            assert len(connection.getresponse().read()) == stop - start

    start = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        list(pool.map(stream, range(streams)))
    return time.perf_counter() - start


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder = Path(sys.argv[1])
    print(server.server_address[1], flush=True)
    server.serve_forever()
