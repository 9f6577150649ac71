"""Blends and samplers against the clock: Megatron's fill, the native blend, and reading by a sampler.

    python benchmarks/blend.py --peer /path/to/an/environment/with/megatron-core/bin/python --samples 1000000

The peer's build_blending_indices (in its own interpreter) and ours fill the same arrays, which are compared by hash;
processor time, the median of three. Without --peer only ours is measured. The reading part reads random ids.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PEER = """
import hashlib, json, sys, time
import numpy as np
from megatron.core.datasets import helpers_cpp
cases, size = json.loads(sys.stdin.read())
for case in cases:
    weights = np.array([float.fromhex(weight) for weight in case])
    times = []
    for _ in range(3):
        components, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        start = time.process_time()
        helpers_cpp.build_blending_indices(components, samples, weights, len(weights), size, False)
        times.append(time.process_time() - start)
    found = hashlib.sha256(components.tobytes() + samples.tobytes()).hexdigest()
    print("result", json.dumps([sorted(times)[1], found]))
"""
CASES = tuple((count, kind) for count in (10, 100, 1000) for kind in ("random", "zipf", "equal"))


def shares(kind: str, count: int) -> np.ndarray:
    """float64[count], summing to 1."""
    ranks = np.arange(1, count + 1)
    drawn = np.random.RandomState(count).rand(count)
    weights = {"random": drawn + 1e-6, "zipf": 1 / ranks, "equal": np.ones(count)}[kind]
    return weights / weights.sum()


def timed(work: Callable[[], object], rounds: int = 3) -> float:
    """Median processor time, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def of_peer(peer: str, size: int) -> list[tuple[float, str]]:
    """Median time and hash of the arrays of each case."""
    words = json.dumps([[[weight.hex() for weight in shares(kind, count).tolist()] for count, kind in CASES], size])
    done = subprocess.run([peer, "-c", PEER], input=words, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    return [tuple(json.loads(line.removeprefix("result "))) for line in lines]


def megatron_part(peer: str | None, size: int) -> None:
    """Ours and theirs, case by case."""
    from mdata import _core

    print(f"Megatron's fill, {size:,} samples, processor time")
    theirs = of_peer(peer, size) if peer else [None] * len(CASES)
    for (count, kind), found in zip(CASES, theirs, strict=True):
        weights = shares(kind, count)
        components, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        ours = timed(lambda w=weights, c=components, s=samples: _core.fill_blend(w, c, s))
        line = f"{count:5} {kind:7} ours {ours:7.3f} s"
        if found is not None:
            same = hashlib.sha256(components.tobytes() + samples.tobytes()).hexdigest() == found[1]
            line += (
                f"  theirs {found[0]:7.3f} s  {found[0] / ours:5.1f} times, {'equal' if same else 'DIFFERENT'} arrays"
            )
        print(line, flush=True)


def native_part() -> None:
    """Opening a blend of many components, and finding samples in it."""
    from mdata.blend import NativeBlend

    weights = [int(weight * 2**40) + 1 for weight in shares("zipf", 1000)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    blend = NativeBlend(weights)
    blend.counts(10**9)
    opened = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"native blend, 1,000 components x 1e9 samples: open {opened:.4f} s, {grown:.1f} MiB more")
    for name, ids in (("sequential", np.arange(10**6)), ("random", np.random.RandomState(0).randint(0, 10**9, 10**6))):
        print(f"  ids {name}: {len(ids) / timed(lambda ids=ids: blend.locate(ids)):,.0f} a second")


def reading_part() -> None:
    """Batches by a sampler beside the batched read alone."""
    import mdata
    from mdata.indexed import IndexedWriter
    from mdata.loading.batch_sizes import constant
    from mdata.loading.loader import collate
    from mdata.loading.sampler import Sampler

    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("a", 8000), ("b", 7999)):
            with IndexedWriter(Path(folder) / name, np.dtype(np.uint16)) as writer:
                text = np.random.RandomState(count).randint(0, 50_000, count * 1000).astype(np.uint16)
                writer.append(text, np.full(count, 1000), document_ends=np.arange(1, count + 1))
                writer.finish()
        data = mdata.open(f"0.3 {folder}/a 0.7 {folder}/b", sequence_length=4096)
        out = data.empty_rows(32)
        numbers = np.random.RandomState(2).randint(0, 3000, 32 * 40).reshape(40, 32)
        rate = numbers.size / timed(lambda: [data.read(part, out=out) for part in numbers], 5)
        fresh = numbers.size / timed(lambda: [data.read(part) for part in numbers], 5)
        sampler = Sampler(data_id=data.data_id, sizes=constant(128), micro_batch=32, dp_size=2)
        steps = 20
        rows = steps * 2 * 32
        through = rows / timed(lambda: [collate(data, r) for step in islice(sampler, steps) for r in step], 5)
        print(f"reading 4,096 tokens: read into one buffer {rate:,.0f} samples a second, into new rows {fresh:,.0f}")
        print(
            f"  sampler and collate (new rows) {through:,.0f}: {through / fresh:.0%} and {through / rate:.0%} of these"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that can import megatron.core")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", default=["megatron", "native", "reading"])
    arguments = parser.parse_args()
    if "megatron" in arguments.parts:
        megatron_part(arguments.peer, arguments.samples)
    if "native" in arguments.parts:
        native_part()
    if "reading" in arguments.parts:
        reading_part()


if __name__ == "__main__":
    main()
