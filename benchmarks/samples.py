"""How fast samples are read, and how soon: batched reads beside a numpy loop, and the first sample of a cold process.

    python benchmarks/samples.py reading [--gb 1]         random samples of 4,096 uint16 tokens into one reused buffer
    python benchmarks/samples.py start [--documents 1e7]  import, open, first sample, in fresh processes

`reading` gives each way random samples of its own in turns, page cache warm and all pages in the process' tables, and
takes medians of processor time, which a shared machine disturbs least. The loop is what one would write: `out[i] =
tokens[a : a + S + 1]`. Two threads are judged by wall time, which needs a quiet machine: "2 threads" is one read that
two share, "2 callers" are two threads with a buffer each. Root can take a busy machine's cores for as long as it runs:
`chrt --fifo 1 python benchmarks/samples.py reading`. `start` writes a shard of so many documents with numpy (its .bin
is sparse) and a manifest that lists it once and one that lists it 100 times; modules are compiled before, as those of
an installed package are; private memory is what the process does not share with the page cache. `--json FILE` keeps the
numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from mdata.samples.rows import Rows

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import mdata  # noqa: E402
from mdata.indexed.pair_format import pack_header  # noqa: E402
from mdata.manifest.ids import sealed  # noqa: E402
from mdata.manifest.io import save_manifest  # noqa: E402

LENGTH = 4096
ROUNDS = 15
SAMPLES_A_ROUND = 2048
POOL_ROWS = 4096  # 134 MB, more than caches hold
SAMPLE_BYTES = 10 * (LENGTH + 1)
START_RUNS = 9
START = """
import sys, time
began = time.perf_counter()
import numpy
loaded = time.perf_counter()
if len(sys.argv) > 1:
    import mdata
    path, split, masks = sys.argv[1:]
    kind = mdata.Gpt(document_masks=masks == "masks")
    data = mdata.open_dataset(path, sequence_length=4096, split_shares=split, kind=kind)
    data[10**6]
done = time.perf_counter()
rollup = open("/proc/self/smaps_rollup").read()
private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
print(done - loaded, private / 1024)
"""


def write_pair(prefix: Path, lengths: np.ndarray, *, tokens: np.ndarray | None) -> None:
    """A pair of one document a sequence; without tokens a .bin of the right size that takes no room."""
    size = int(lengths.sum(dtype=np.int64)) * 2
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(pack_header(np.dtype("<u2"), num_sequences=len(lengths), num_documents=len(lengths)))
        lengths.astype("<i4").tofile(file)
        (np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64))) * 2).astype("<i8").tofile(file)
        np.arange(len(lengths) + 1, dtype="<i8").tofile(file)
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(size) if tokens is None else tokens.astype("<u2").tofile(file)


def some_lengths(random: np.random.Generator, documents: int) -> np.ndarray:
    """Lengths as text has them: most short, a few very long."""
    return np.clip(random.lognormal(6.5, 1.0, documents), 2, 60_000).astype(np.int32)


def each(read: Callable, batches: Iterable[np.ndarray]) -> None:
    """Batch after batch."""
    deque(map(read, batches), maxlen=0)


def ways(dataset: mdata.Dataset, masked: mdata.Dataset, two: mdata.Dataset, *, rows: int) -> dict[str, Callable]:
    """Name -> what reads batches of samples by their numbers; the loop is given where they begin."""
    kind = dataset.components[0].samples
    tokens = dataset.components[0].corpus.readers[0].tokens(0, dataset.num_corpus_tokens)
    out = np.zeros((rows, LENGTH + 1), np.int64)
    pool = np.ones((POOL_ROWS, LENGTH + 1), np.int64)  # zeros would all be one page
    room, others = Rows(out), Rows(out.copy())
    caller = ThreadPoolExecutor(1)

    def loop(samples: np.ndarray) -> None:
        for row, start in enumerate(loop.starts[samples.tobytes()]):
            out[row] = tokens[start : start + LENGTH + 1]

    def callers(batches: list[np.ndarray]) -> None:
        other = caller.submit(each, lambda samples: dataset.read(samples, out=others), batches[::2])
        each(lambda samples: dataset.read(samples, out=room), batches[1::2])
        other.result()

    loop.prepare = lambda found: setattr(
        loop, "starts", {s.tobytes(): [kind.token_range(int(k))[0] for k in s] for s in found}
    )

    def copy(samples: np.ndarray) -> None:
        for row, number in enumerate((samples % POOL_ROWS).tolist()):
            out[row] = pool[number]

    one_by_one = {
        "numpy loop": loop,
        "limit: copies of int64 rows": copy,
        "read": lambda samples: dataset.read(samples, out=room),
        "read, 2 threads": lambda samples: two.read(samples, out=room),
        "read, document masks": lambda samples: masked.read(samples, out=room),
        "the same, positions asked for": lambda samples: masked.read(samples, out=room).position_ids,
        "all fields asked for": lambda samples: masked.read(samples, out=room).fields,
        "single samples": lambda samples: [dataset[k] for k in samples.tolist()],
    }
    found = {name: partial(each, read) for name, read in one_by_one.items()}
    found["numpy loop"].prepare = loop.prepare
    return found | {"read, 2 callers": callers}


def touch(dataset: mdata.Dataset) -> None:
    """Have every page of its tokens in the tables of this process, so that no read is the first to want one."""
    dataset.components[0].corpus.readers[0].tokens(0, dataset.num_corpus_tokens)[::1024].max()


def reading(gigabytes: float) -> list[dict[str, object]]:
    """Rates of each way for 8 and 512 rows."""
    random = np.random.default_rng(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        size = int(gigabytes * 5e8)
        lengths = some_lengths(random, size // 1000)
        tokens = random.integers(0, 50_000, int(lengths.sum(dtype=np.int64)), dtype=np.uint16)
        write_pair(Path(folder) / "a", lengths, tokens=tokens)
        del tokens
        options = {"sequence_length": LENGTH}
        plain = mdata.open_dataset(Path(folder) / "a", **options)
        masked = mdata.open_dataset(Path(folder) / "a", **options, kind=mdata.Gpt(document_masks=True))
        two = mdata.open_dataset(Path(folder) / "a", **options, threads=2)
        each(touch, (plain, masked, two))
        for rows in (8, 512):
            found += compare(ways(plain, masked, two, rows=rows), random, rows)
    return found


def compare(readers: dict[str, Callable], random: np.random.Generator, rows: int) -> list[dict[str, object]]:
    """Processor and wall time a sample of each way, in turns."""
    cpu: dict[str, list[float]] = {name: [] for name in readers}
    wall: dict[str, list[float]] = {name: [] for name in readers}
    names = list(readers)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            read = readers[name]
            # Others for each way: what one has just read lies in a cache.
            batches = [random.integers(0, 100_000, rows) for _ in range(max(1, SAMPLES_A_ROUND // rows))]
            readers["numpy loop"].prepare(batches)
            began, ran = time.perf_counter(), time.process_time()
            read(batches)
            cpu[name].append((time.process_time() - ran) / rows / len(batches))
            wall[name].append((time.perf_counter() - began) / rows / len(batches))
    base_cpu, base_wall = statistics.median(cpu["numpy loop"]), min(wall["numpy loop"])
    print(f"\n{rows} rows{'':<26}{'CPU ns':>8}{'samples/s':>11}{'GB/s':>6}{'x loop':>8}{'x loop, wall (best)':>21}")
    table = []
    for name in readers:
        each, best = statistics.median(cpu[name]), min(wall[name])
        ratios = base_cpu / each, base_wall / best
        rates = f"{each * 1e9:>8.0f}{1 / each:>11,.0f}{SAMPLE_BYTES / each / 1e9:>6.1f}"
        print(f"{name:<32}{rates}{ratios[0]:>8.2f}{ratios[1]:>21.2f}")
        table.append({"rows": rows, "way": name, "cpu_s": each, "of_loop": ratios[0], "of_loop_wall": ratios[1]})
    return table


def manifest_of(prefix: Path, times: int) -> Path:
    """A manifest that lists one pair so many times."""
    bare = mdata.open_corpus(prefix).manifest
    path = prefix.with_name(f"x{times}.json")
    save_manifest(sealed(msgspec.structs.replace(bare, shards=bare.shards * times)), path)
    return path


def start(documents: int) -> list[dict[str, object]]:
    """Seconds over `import numpy` to the first sample, and private memory, of fresh processes in turns."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "a"
        write_pair(prefix, some_lengths(np.random.default_rng(1), documents), tokens=None)
        cases = {"import numpy": []}
        for times in (1, 100):
            path = str(manifest_of(prefix, times))
            name = f"{documents * times:.0e} in {times} shard{'s' * (times > 1)}"
            cases[name] = [path, "100,0,0", ""]
            cases[f"{name}, of a split"] = [path, "969,30,1", ""]
            cases[f"{name}, document masks"] = [path, "100,0,0", "masks"]
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        seen: dict[str, list[tuple[float, ...]]] = {name: [] for name in cases}
        for _ in range(START_RUNS + 1):
            for name, words in cases.items():
                command = [sys.executable, "-c", START, *words]
                done = subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True, text=True)
                seen[name].append(tuple(map(float, done.stdout.split())))
    print(f"\n{'first sample':<36}{'s over numpy':>14}{'best':>8}{'private MiB':>13}")
    table = []
    for name, runs in seen.items():
        times, memory = zip(*runs[1:], strict=True)  # the first run compiles
        seconds, best, private = statistics.median(times), min(times), statistics.median(memory)
        print(f"{name:<36}{seconds:>14.3f}{best:>8.3f}{private:>13.1f}")
        table.append({"case": name, "over_numpy_s": seconds, "best_s": best, "private_mib": private})
    return table


def main() -> None:
    """Measure what is asked for and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", default=["reading", "start"])
    parser.add_argument("--gb", type=float, default=1.0, help="size of the .bin that is read; default 1")
    parser.add_argument("--documents", type=float, default=1e7, help="of the shard that is opened; default 1e7")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    arguments = parser.parse_args()
    found: dict[str, object] = {}
    if "reading" in arguments.tables:
        found["reading"] = reading(arguments.gb)
    if "start" in arguments.tables:
        found["start"] = start(int(arguments.documents))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
