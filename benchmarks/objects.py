"""How fast does `mdata preprocess` read text in object storage, compared with the same text on a disk?

    python benchmarks/objects.py --corpus FILE.jsonl --vocab FOLDER [--rounds N]

The server is one process on loopback that answers ranges of one file over HTTP by sendfile; its own rate is measured
first, by as many streams as mdata opens, without mdata. Runs take turns, with GPT-2's vocabulary and 2 workers; each
is a whole process, memory is the peak of proportional shares, and results are compared. Times are medians of rounds.
Signatures and TLS of real storage are not measured.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from measured import machine, measure

STREAMS, BLOCK_BYTES = 4, 4 << 20


class Handler(BaseHTTPRequestHandler):
    """One file, whole or by ranges."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        """Nothing."""

    def do_HEAD(self):
        """The size and version alone."""
        self.do_GET()

    def do_GET(self):
        """The range that is asked for, from the page cache."""
        size = self.server.path.stat().st_size
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last or size) + 1, size)
        self.send_response(206 if self.headers.get("Range") else 200)
        if self.headers.get("Range"):
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", '"one"')
        self.end_headers()
        self.wfile.flush()
        if self.command == "GET":
            with self.server.path.open("rb") as file:
                self.connection.sendfile(file, start, stop - start)


def main() -> int:
    """Serve, measure, print."""
    arguments = parse()
    if arguments.serve:  # until it is ended
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.path = arguments.corpus
        print(server.server_address[1], flush=True)
        server.serve_forever()
    serving = subprocess.Popen(
        [sys.executable, __file__, "--serve", "--corpus", arguments.corpus], stdout=subprocess.PIPE, text=True
    )
    try:
        url = f"http://127.0.0.1:{int(serving.stdout.readline())}/{arguments.corpus.name}"
        report(arguments, url)
    finally:
        serving.terminate()
        serving.wait()
    return 0


def report(arguments, url):
    """The server's rate, then the rounds."""
    megabytes = arguments.corpus.stat().st_size / 1e6
    print(machine())
    print(f"server alone: {megabytes / server_seconds(url, arguments.corpus.stat().st_size):.0f} MB/s")
    found = {"disk": [], "storage": []}
    hashes = set()
    for turn in range(arguments.rounds + 1):
        for name, source in (("disk", arguments.corpus), ("storage", url)):
            with tempfile.TemporaryDirectory() as folder:
                one = measure(command(arguments, source), Path(folder), pss_hz=0 if turn else 5)
                assert one.code == 0, one.output
                hashes.add(hashlib.sha256(Path(folder, "x_text_document.bin").read_bytes()).hexdigest())
            if turn:
                found[name].append(one.wall_s)
            else:
                print(f"{name}: RSS {one.rss_bytes / 1e6:.0f} MB, PSS {one.pss_bytes / 1e6:.0f} MB")
    assert len(hashes) == 1, "the bytes of .bin differ"
    rates = {name: megabytes / statistics.median(times) for name, times in found.items()}
    print(f"disk {rates['disk']:.1f} MB/s, storage {rates['storage']:.1f} MB/s", found)
    print(f"storage / disk: {rates['storage'] / rates['disk']:.3f} (bar 0.9); the bytes are the same")


def server_seconds(url, size):
    """The time in which the streams that mdata would open read the whole file, block by block."""
    address = urllib.parse.urlsplit(url)

    def stream(number):
        connection = http.client.HTTPConnection(address.netloc)
        for start in range(number * BLOCK_BYTES, size, STREAMS * BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, size)
            connection.request("GET", address.path, headers={"Range": f"bytes={start}-{stop - 1}"})
            assert len(connection.getresponse().read()) == stop - start

    start = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as pool:
        list(pool.map(stream, range(STREAMS)))
    return time.perf_counter() - start


def command(arguments, source):
    """The run, in the folder that it is started in."""
    vocab = ["--vocab-file", arguments.vocab / "vocab.json", "--merge-file", arguments.vocab / "merges.txt"]
    options = ["--tokenizer-type", "GPT2BPETokenizer", *vocab, "--append-eod", "--workers", "2"]
    return [sys.executable, "-m", "mdata", "preprocess", "--input", source, "--output-prefix", "x", *options]


def parse():
    """The options; --serve is how this file starts its server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--vocab", type=lambda text: Path(text).resolve())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
