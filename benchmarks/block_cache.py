"""How fast are samples of a corpus in object storage read through the node's cache, beside the same corpus on a disk?

    python benchmarks/block_cache.py [--gb 0.5] [--rounds N]

Random batches of 32 samples of 4,096 tokens, of random ids, by one thread. "stage" fetches all blocks into an empty
cache; "cold" reads an epoch with an empty cache by a `Loader`, which looks ahead; both from one server process on
loopback, whose own rate for as many streams is measured before. "stale": the cache is full, and each block is compared
with its hash at its first read; "warm": all blocks were compared before. "disk" is `mdata.open` of the files, in the
page cache; disk and warm take turns, medians are given, and rows are compared. Signatures, TLS and the latency of real
storage are not measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path

import numpy as np
from measured import machine

import mdata
from mdata.block_cache.corpus_blocks import THREADS
from mdata.loader.loader import BatchPlan, Loader

S, ROWS, BLOCK_BYTES = 4096, 32, 4 << 20


class Handler(BaseHTTPRequestHandler):
    """The files of a folder, whole or by ranges, from the page cache."""

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


def main() -> int:
    """Make a corpus, serve it, measure, print."""
    arguments = parse()
    if arguments.serve:  # until it is ended
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.folder = arguments.serve
        print(server.server_address[1], flush=True)
        server.serve_forever()
    with tempfile.TemporaryDirectory() as folder:
        path = make_corpus(Path(folder), round(arguments.gb * 1e9 / 2))
        serving = subprocess.Popen([sys.executable, __file__, "--serve", folder], stdout=subprocess.PIPE, text=True)
        try:
            url = f"http://127.0.0.1:{int(serving.stdout.readline())}/{path.name}"
            found = measure(url, path, Path(folder, "cache"), rounds=arguments.rounds)
        finally:
            serving.terminate()
            serving.wait()
    print(machine(), "load", os.getloadavg()[0])
    for name, value in found.items():
        print(f"{name:42} {value:10.2f}")
    print(json.dumps(found))
    return 0


def make_corpus(folder, tokens):
    """Random ids of 16 bits, documents of 1,000."""
    from mdata.indexed.pair_format import pack_header

    count = tokens // 1000
    np.random.default_rng(0).integers(0, 50_000, count * 1000, np.uint16).tofile(folder / "x.bin")
    tables = [np.full(count, 1000, "<i4"), np.arange(count, dtype="<i8") * 2000, np.arange(count + 1, dtype="<i8")]
    header = pack_header(np.dtype("<u2"), num_sequences=count, num_documents=count)
    (folder / "x.idx").write_bytes(header + b"".join(table.tobytes() for table in tables))
    mdata.adopt(folder / "x", None, full=True)
    return folder / "x.json"


def measure(url, path, cache, *, rounds):
    """What is printed, by name."""
    near = mdata.open(path, sequence_length=S)
    size = path.with_suffix(".bin").stat().st_size
    found = {"server alone, MB/s": size / 1e6 / server_seconds(url.replace(".json", ".bin"), size)}

    def opened():
        return mdata.open(url, sequence_length=S, cache=str(cache))

    blocks = opened().components[0].corpus.blocks
    begin = time.perf_counter()
    blocks.bring(np.arange(blocks.layout.num_blocks))
    found["stage: all blocks, MB/s"] = size / 1e6 / (time.perf_counter() - begin)
    del blocks
    shutil.rmtree(cache)
    far = opened()
    per_epoch = near.components[0].samples.samples_per_epoch
    steps = per_epoch // ROWS
    begin = time.perf_counter()
    for _ in islice(Loader(far, BatchPlan(ROWS, ROWS)), steps):
        pass
    found["cold: an epoch by a Loader, MB/s"] = size / 1e6 / (time.perf_counter() - begin)
    del far
    far = opened()
    batches = np.random.default_rng(1).integers(0, per_epoch, (steps, ROWS))
    begin = time.perf_counter()
    for batch in batches:
        far.read(batch)
    found["stale: compared at the first read, MB/s"] = size / 1e6 / (time.perf_counter() - begin)
    for rows_at_once in (1, ROWS, 512):
        batches = np.random.default_rng(2).integers(0, per_epoch, (max(1, 4096 // rows_at_once), rows_at_once))
        times = {"disk": [], "warm": []}
        for _ in range(rounds):
            for name, dataset in (("disk", near), ("warm", far)):
                begin = time.perf_counter()
                for batch in batches:
                    rows = dataset.read(batch)
                times[name].append((time.perf_counter() - begin) / batches.size * 1e6)
        assert (rows.text == near.read(batches[-1]).text).all()
        disk, warm = (statistics.median(times[name]) for name in ("disk", "warm"))
        found |= {f"disk, us a sample of {rows_at_once} rows": disk, f"warm, us a sample of {rows_at_once}": warm}
        found[f"warm / disk rate, {rows_at_once} rows a read"] = disk / warm
    return found


def server_seconds(url, size):
    """The time in which as many streams as fetch blocks read the whole file."""
    address = urllib.parse.urlsplit(url)

    def stream(number):
        connection = http.client.HTTPConnection(address.netloc)
        for start in range(number * BLOCK_BYTES, size, THREADS * BLOCK_BYTES):
            stop = min(start + BLOCK_BYTES, size)
            connection.request("GET", address.path, headers={"Range": f"bytes={start}-{stop - 1}"})
            assert len(connection.getresponse().read()) == stop - start

    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(stream, range(THREADS)))
    return time.perf_counter() - begin


def parse():
    """The options; --serve is how this file starts its server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
