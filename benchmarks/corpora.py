"""Ten thousand corpora from one blend manifest: time to open, descriptors and maps, loader workers that read.

    python benchmarks/corpora.py --corpora 10000 --descriptors 1024 --workers 8

The corpora (8 documents of 64 tokens each) are written first, which is not counted. Then one process opens the blend
under the limit of descriptors and reads random samples, and torch DataLoaders over it do so by forked and by spawned
workers, each of which checks every token it reads and reports its descriptors and maps. Processor time and wall time;
the latter depends more on other load than on mdata.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.many_corpora import write_corpora

SEQUENCE = 32


def held() -> tuple[int, int]:
    """Descriptors and maps of this process."""
    return len(list(Path("/proc/self/fd").iterdir())), len(Path("/proc/self/maps").read_text().splitlines())


class Checked:
    """A dataset for torch: item k is a batch of random samples, each token checked; gives what the process holds."""

    def __init__(self, data, batches: int, rows: int) -> None:
        self.data, self.batches, self.rows = data, batches, rows

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, number: int) -> tuple[int, int, int, float]:
        samples = np.random.RandomState(number).randint(0, 10**6, self.rows)
        rows = self.data.read(samples)
        components, inside = self.data.locate(samples)
        for row, component, sample in zip(rows.text, components.tolist(), inside.tolist(), strict=True):
            start, stop = self.data.components[component].samples.token_range(sample)
            expected = (31 * component + np.arange(start, stop)) % 50_000
            assert (row == expected).all(), f"sample {sample} of component {component} is not what was written"
        return os.getpid(), *held(), time.process_time()


def with_workers(checked: Checked, method: str, workers: int) -> None:
    """Read by a DataLoader and print what its workers held."""
    from torch.utils.data import DataLoader

    start = time.perf_counter()
    loader = DataLoader(checked, batch_size=None, num_workers=workers, multiprocessing_context=method)
    found, first = [], 0.0
    for item in loader:
        first = first or time.perf_counter() - start
        found.append(tuple(item))
    spent = time.perf_counter() - start
    processes = {int(pid): (int(files), int(maps), float(cpu)) for pid, files, maps, cpu in found}
    files, maps, cpu = (max(part) for part in zip(*processes.values(), strict=True))
    print(
        f"{method:6} {len(processes)} workers, {len(found)} batches of {checked.rows} samples:"
        f" first after {first:.2f} s, all after {spent:.2f} s;"
        f" a worker at most {files} descriptors, {maps:,} maps, {cpu:.2f} s of processor time",
        flush=True,
    )


def main() -> None:
    """Write, open, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpora", type=int, default=10_000)
    parser.add_argument("--descriptors", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--mode", default="mmap", choices=["mmap", "pread"])
    parser.add_argument("--split", default="100,0,0", help="another split than this needs tables of every corpus")
    parser.add_argument("--methods", nargs="+", default=["fork", "spawn"], choices=["fork", "spawn"])
    parser.add_argument("--folder", help="keep the corpora here, and use them again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        mix = folder / "mix.json"
        if not mix.exists():
            write_corpora(folder, arguments.corpora)
        resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.descriptors, arguments.descriptors))
        measure(mix, arguments)


def measure(mix: Path, arguments: argparse.Namespace) -> None:
    """Open, and read in this process and in workers."""
    import mdata
    from mdata.dataset import open_samples  # noqa: F401  imports are not counted

    start, cpu = time.perf_counter(), time.process_time()
    data = mdata.open_dataset(mix, sequence_length=SEQUENCE, mode=arguments.mode, split_shares=arguments.split)
    opened, cpu = time.perf_counter() - start, time.process_time() - cpu
    files, maps = held()
    print(
        f"{len(data.components):,} corpora, ulimit -n {arguments.descriptors}, {arguments.mode}:"
        f" open in {opened:.2f} s, {cpu:.2f} s of processor time; {files} descriptors, {maps:,} maps",
        flush=True,
    )
    checked = Checked(data, 4 * arguments.workers, 1000)
    for method in arguments.methods:
        with_workers(checked, method, arguments.workers)


if __name__ == "__main__":
    main()
