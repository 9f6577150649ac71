"""The speed of blends: Megatron's, and the native blend.

    python benchmarks/blend.py --peer /path/to/an/environment/with/megatron-core/bin/python --samples 1000000

The peer's build_blending_indices (in its own interpreter) and ours fill the same arrays, which are compared by hash;
processor time, the median of five, in turn. Without --peer only ours is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PEER = """
import hashlib, json, sys, time
import numpy as np
from megatron.core.datasets import helpers_cpp
for line in sys.stdin:
    case, size = json.loads(line)
    weights = np.array([float.fromhex(weight) for weight in case])
    components, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
    components[:] = samples[:] = 1
    start = time.process_time()
    helpers_cpp.build_blending_indices(components, samples, weights, len(weights), size, False)
    spent = time.process_time() - start
    found = hashlib.sha256(components.tobytes() + samples.tobytes()).hexdigest()
    print("result", json.dumps([spent, found]), flush=True)
"""
KINDS = ("random", "zipf", "square", "mixed", "near", "equal")
ROUNDS = 5


def shares(kind: str, count: int) -> np.ndarray:
    """float64[count], summing to 1."""
    ranks = np.arange(1, count + 1)
    drawn = np.random.RandomState(count).rand(count)
    weights = {
        "random": drawn + 1e-6,
        "zipf": 1 / ranks,
        "square": 1 / ranks**2,
        "mixed": np.where(ranks <= 3, 100 + drawn, 0.01 * (0.5 + drawn)),
        "near": 1 + 1e-9 * drawn,
        "equal": np.ones(count),
    }[kind]
    whole: np.ndarray = weights / weights.sum()
    return whole


def timed(work: Callable[[], object], rounds: int = 3) -> float:
    """Median processor time, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def ours_once(weights: np.ndarray, size: int) -> tuple[float, str]:
    """Processor time and hash of the arrays."""
    from mdata import _core

    components, samples = np.ones(size, np.int16), np.ones(size, np.int64)
    spent = timed(lambda: _core.fill_blend(weights, components, samples), 1)
    return spent, hashlib.sha256(components.tobytes() + samples.tobytes()).hexdigest()


def peer_once(peer: subprocess.Popen[str], weights: np.ndarray, size: int) -> tuple[float, str]:
    """The same of the peer's."""
    assert peer.stdin is not None and peer.stdout is not None
    peer.stdin.write(json.dumps([[weight.hex() for weight in weights.tolist()], size]) + "\n")
    peer.stdin.flush()
    line = next(line for line in peer.stdout if line.startswith("result "))
    spent, found = json.loads(line.removeprefix("result "))
    return spent, found


def megatron_part(python: str | None, size: int) -> None:
    """Ours and theirs in turn, case by case."""
    print(f"Megatron's fill, {size:,} samples, processor time, median of {ROUNDS}")
    pipe = subprocess.PIPE
    peer = subprocess.Popen([python, "-c", PEER], stdin=pipe, stdout=pipe, text=True) if python else None
    for count in (10, 100, 1000):
        for kind in KINDS:
            weights = shares(kind, count)
            mine, other = [], []
            for _ in range(ROUNDS):
                mine.append(ours_once(weights, size))
                other += [peer_once(peer, weights, size)] if peer else []
            ours = statistics.median(spent for spent, _ in mine)
            line = f"{count:5} {kind:7} ours {ours:7.3f} s {ours / size * 1e9:6.1f} ns a sample"
            if peer:
                theirs = statistics.median(spent for spent, _ in other)
                same = "equal" if [found for _, found in mine] == [found for _, found in other] else "DIFFERENT"
                line += f"  theirs {theirs:7.3f} s  {theirs / ours:5.1f} times, {same} arrays"
            print(line, flush=True)
    if peer:
        peer.communicate()


def native_part() -> None:
    """Opening a blend of many components, and finding samples in it."""
    from mdata.mixing.native_blend import NativeBlend

    weights = [int(weight * 2**40) + 1 for weight in shares("zipf", 1000)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    blend = NativeBlend(weights)
    blend.counts(10**9)
    opened = time.perf_counter() - start
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"native blend, 1,000 components x 1e9 samples: open {opened:.4f} s, {grown:.1f} MiB more")
    for name, ids in (("sequential", np.arange(10**6)), ("random", np.random.RandomState(0).randint(0, 10**9, 10**6))):
        print(f"  ids {name}: {len(ids) / timed(partial(blend.locate, ids)):,.0f} a second")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="a Python that can import megatron.core")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--parts", nargs="+", default=["megatron", "native"])
    arguments = parser.parse_args()
    if "megatron" in arguments.parts:
        megatron_part(arguments.peer, arguments.samples)
    if "native" in arguments.parts:
        native_part()


if __name__ == "__main__":
    main()
