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
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from measured import machine
from range_server import server_seconds, serving

import mdata
from mdata.block_cache.corpus_blocks import THREADS
from mdata.loader.loader import BatchPlan, Loader

S, ROWS = 4096, 32


def main() -> int:
    """Make a corpus, serve it, measure, print."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        path = make_corpus(Path(folder), round(arguments.gb * 1e9 / 2))
        with serving(Path(folder)) as served:
            found = measure(f"{served}/{path.name}", path, Path(folder, "cache"), rounds=arguments.rounds)
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
    near = mdata.open_dataset(path, sequence_length=S)
    size = path.with_suffix(".bin").stat().st_size
    found = {"server alone, MB/s": size / 1e6 / server_seconds(url.replace(".json", ".bin"), size, streams=THREADS)}

    def opened():
        return mdata.open_dataset(url, sequence_length=S, cache=str(cache))

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


def parse():
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
