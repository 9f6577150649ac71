"""How long steps wait for data: the ranks of a data-parallel run that read a blend of many corpora.

    python benchmarks/data_wait.py --corpora 512 --step-ms 50

Each rank is a process with its own `mdata.Loader`, as in training. A step takes --step-ms, of which the main thread
holds Python's lock for --busy (launching kernels from Python does) and sleeps for the rest. Printed are, for each rank,
the share of the time in which it waited (`data_wait` of a run's metrics; the first step, for which nothing was read
ahead, apart), the longest wait, and how often the thread that reads slept in a step: for Python's lock, above all,
which a busy main thread hands over after 5 ms only. That number depends least on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mdata  # noqa: E402
from benchmarks.samples import some_lengths, write_pair  # noqa: E402
from mdata.loader.loader import BatchPlan  # noqa: E402


def write_blend(folder: Path, corpora: int, tokens: int) -> Path:
    """Corpora of about as many tokens each, blended with unequal shares."""
    random, words = np.random.default_rng(1), []
    for number in range(corpora):
        lengths = some_lengths(random, tokens // 1000)
        prefix = folder / f"c{number:04}"
        write_pair(prefix, lengths, tokens=random.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16))
        words += [f"{random.uniform(0.1, 1):.4f}", str(prefix)]
    mdata.make_blend(words, folder / "mix.json", tokenizer_unknown="ok")
    return folder / "mix.json"


def evict(folder: Path) -> None:
    """Drop the corpora from the page cache."""
    for path in folder.glob("*.bin"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def opened(mix: Path, options: argparse.Namespace) -> mdata.Dataset:
    """The blend as a run opens it."""
    keys = {"document_masks": True} if options.document_masks else {}
    how = {"sequence_length": options.length, "threads": options.threads, "tokenizer_unknown": "ok", **keys}
    return mdata.Dataset.from_options(mix, mdata.DatasetOptions.from_keys(how))


def sleeps() -> int:
    """How often the thread that reads has slept so far."""
    for thread in threading.enumerate():
        if thread.name == "mdata-prefetch":
            lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
            return int(next(line.split()[1] for line in lines if line.startswith("voluntary_ctxt_switches")))
    return 0


def run_rank(rank: int, mix: Path, options: argparse.Namespace, barrier: object, results: object) -> None:
    """The steps of one rank."""
    sys.setswitchinterval(options.switch_ms / 1e3)
    data = opened(mix, options)
    plan = BatchPlan(options.global_batch, options.micro_batch, dp_rank=rank, dp_size=options.ranks)
    steps = iter(mdata.Loader(data, plan, prefetch=options.prefetch))
    barrier.wait()
    waits, length, slept = [], options.step_ms / 1e3, sleeps()
    began_all = time.perf_counter()
    for _ in range(options.steps):
        began = time.perf_counter()
        batches = next(steps)
        got = time.perf_counter()
        waits.append(got - began)
        checksum = sum(int(batch.rows.text[0, 0]) for batch in batches)
        while time.perf_counter() < got + options.busy * length:
            checksum += sum(range(100))  # in Python, as launches are
        time.sleep(max(0.0, got + length - time.perf_counter()))
    whole = time.perf_counter() - began_all
    results.put((rank, waits, whole, (sleeps() - slept) / options.steps))


def alone(mix: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Wall and processor milliseconds that reading a rank's step takes, with nothing beside it."""
    data = opened(mix, options)
    plan = BatchPlan(options.global_batch, options.micro_batch, dp_size=options.ranks)
    steps = iter(mdata.Loader(data, plan, prefetch=1))
    for _ in range(20):
        next(steps)
    count = 40
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - began) / count * 1e3, (time.process_time() - cpu) / count * 1e3


def main() -> None:
    """Write, run, print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400_000, help="of a corpus")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=50)
    parser.add_argument("--busy", type=float, default=0.3, help="part of a step in which Python's lock is held")
    parser.add_argument("--switch-ms", type=float, default=5, help="sys.setswitchinterval")
    parser.add_argument("--threads", type=int, default=1, help="that read a batch")
    parser.add_argument("--cold", action="store_true", help="evict the corpora from the page cache first")
    parser.add_argument("--document-masks", action="store_true")
    parser.add_argument("--folder", type=Path, help="keep the corpora here, and use them again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        mix = folder / "mix.json"
        if not mix.exists():
            write_blend(folder, options.corpora, options.tokens)
        wall, cpu = alone(mix, options)
        print(f"reading a rank's step alone: {wall:.2f} ms, {cpu:.2f} ms of processor time", flush=True)
        if options.cold:
            evict(folder)
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(options.ranks), context.Queue()
        processes = [
            context.Process(target=run_rank, args=(rank, mix, options, barrier, results))
            for rank in range(options.ranks)
        ]
        for process in processes:
            process.start()
        found = sorted(results.get() for _ in processes)
        for process in processes:
            process.join()
    print("| rank | waits after the first step | median wait | longest | first step | sleeps of the reader in a step |")
    print("|---|---|---|---|---|---|")
    shares = []
    for rank, waits, whole, slept in found:
        first, rest = waits[0], waits[1:]
        shares.append(sum(rest) / (whole - first))
        print(
            f"| {rank} | {100 * shares[-1]:.3f} % | {statistics.median(rest) * 1e6:.0f} us "
            f"| {max(rest) * 1e3:.1f} ms | {first * 1e3:.0f} ms | {slept:.1f} |"
        )
    facts = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    print(json.dumps(facts | {"alone_ms": wall, "alone_cpu_ms": cpu, "data_wait": shares}))


if __name__ == "__main__":
    main()
