"""Batches against the batched read they are made by: the sampler, `collate_step` and the prefetching Loader.

    python benchmarks/batches.py --gb 0.5

All ways read the same samples of 4,096 tokens in the same order, in turns; processor time of the whole process
(median), and wall time (best). The read into one buffer stays inside the processor's cache. A loader that reads ahead
cannot: the read that cycles through as many buffers as the Loader holds shows the cost of its thread beside that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from mdata.loader.loader import BatchPlan, collate_step
from mdata.samples.rows import Rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mdata  # noqa: E402
from benchmarks.samples import LENGTH, some_lengths, write_pair  # noqa: E402
from mdata.loader.sampler import Sampler  # noqa: E402

PREFETCH = 2
SHAPES = ((8, 4), (32, 4), (64, 8))  # rows of a microbatch, microbatches of a step
ROUNDS = 11
SAMPLES_A_ROUND = 8192
READ = "read into one buffer"
WAITS = ("Loader",)


def ways(data: mdata.Dataset, rows: int, parts: int) -> dict[str, Callable[[int], None]]:
    """Name -> what reads so many steps and goes on there the next time."""
    plan = BatchPlan(rows * parts, rows)
    steps = plan.sampler(data, 0)
    one = data.empty_rows(rows)
    many = [data.empty_rows(rows) for _ in range((PREFETCH + 2) * parts)]

    def read(out: Iterator[Rows | None]) -> Callable[[int], None]:
        numbers = Ahead(steps)

        def take(count: int) -> None:
            for step in numbers.take(count):
                for part in step:
                    data.read(part, out=next(out))

        take.prepare = numbers.prepare
        return take

    def collate(count: int, use: Callable[[mdata.Batch], object]) -> None:
        batches = (collate_step(data, step) for step in itertools.islice(collate.steps, count))
        deque(map(use, itertools.chain.from_iterable(batches)), maxlen=0)  # keeps none

    def load(count: int) -> None:
        for _ in itertools.islice(load.steps, count):
            pass

    collate.steps = iter(steps)
    load.steps = iter(mdata.Loader(data, plan, prefetch=PREFETCH))
    return {
        READ: read(itertools.repeat(one)),
        "read into as many as a Loader holds": read(itertools.cycle(many)),
        "read into new rows": read(itertools.repeat(None)),
        "sampler and collate_step": lambda count: collate(count, lambda _: None),
        "the same, loss masks asked for": lambda count: collate(count, lambda batch: batch.loss_mask),
        WAITS[0]: load,
    }


class Ahead:
    """The numbers of steps, drawn before they are asked for."""

    def __init__(self, steps: Sampler) -> None:
        self._steps, self._drawn = iter(steps), []

    def prepare(self, count: int) -> None:
        """Draw the next ones."""
        self._drawn = [[np.ascontiguousarray(part) for part in step] for step in itertools.islice(self._steps, count)]

    def take(self, count: int) -> list[list[np.ndarray]]:
        """Those that were drawn."""
        assert count == len(self._drawn)
        return self._drawn


def compare(data: mdata.Dataset, rows: int, parts: int) -> list[dict[str, object]]:
    """Time a sample of each way."""
    readers = ways(data, rows, parts)
    steps = max(SAMPLES_A_ROUND // (rows * parts), 8 * (PREFETCH + 2))
    cpu: dict[str, list[float]] = {name: [] for name in readers}
    wall: dict[str, list[float]] = {name: [] for name in readers}
    names = list(readers)
    for turn in range(ROUNDS + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            getattr(readers[name], "prepare", lambda _: None)(steps)
            began, ran = time.perf_counter(), time.process_time()
            readers[name](steps)
            wall[name].append((time.perf_counter() - began) / (steps * rows * parts))
            if name in WAITS:
                time.sleep(0.05)  # it reads ahead again what was there in the beginning
            cpu[name].append((time.process_time() - ran) / (steps * rows * parts))
    readers[WAITS[0]].steps.close()
    return table(f"{parts} x {rows} rows, {data.options.threads} threads", cpu, wall)


def table(title: str, cpu: dict[str, list[float]], wall: dict[str, list[float]]) -> list[dict[str, object]]:
    """Print; the first round is not counted."""
    middle = {name: statistics.median(times[1:]) for name, times in cpu.items()}
    best = {name: min(times[1:]) for name, times in wall.items()}
    print(f"\n{title:<38}{'CPU ns':>8}{'of read':>9}{'clock ns':>10}{'of read':>9}")
    found = []
    for name, each in middle.items():
        shares = middle[READ] / each, best[READ] / best[name]
        rates = f"{each * 1e9:>8.0f}{shares[0]:>9.0%}{best[name] * 1e9:>10.0f}{shares[1]:>9.0%}"
        print(f"{name:<38}{rates}", flush=True)
        found.append({"case": title, "way": name, "cpu_s": each, "clock_s": best[name], "shares": shares})
    return found


def main() -> None:
    """Write a corpus, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5, help="size of the .bin that is read; default 0.5")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        random = np.random.default_rng(1)
        lengths = some_lengths(random, int(arguments.gb * 5e5))
        tokens = random.integers(0, 50_000, int(lengths.sum(dtype=np.int64)), dtype=np.uint16)
        write_pair(Path(folder) / "a", lengths, tokens=tokens)
        del tokens
        for threads in arguments.threads:
            data = mdata.open_dataset(Path(folder) / "a", sequence_length=LENGTH, threads=threads)
            for rows, parts in SHAPES:
                found += compare(data, rows, parts)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
