"""Time until the arrays of Megatron's order and the first sample are ready, compared with megatron-core's GPTDataset.

    python -m venv /tmp/megatron && /tmp/megatron/bin/pip install torch==2.13.0 megatron-core==0.16.1
    python benchmarks/samples_build.py --megatron-python /tmp/megatron/bin/python [--documents 1e7] [--runs 3]

Writes a shard of so many documents, about 1,000 tokens each (its .bin takes no room), and builds document, sample and
shuffle index for one and for three epochs of samples of 4,096 tokens, in fresh processes that take turns: the arrays
alone, the arrays and their files, and a cold process up to its first sample, imports included. megatron-core stays in
an environment of its own: this file starts itself there with --peer, where it imports nothing of ours; mdata does the
same with --own. Both must give the same arrays: exits 1 if not. Tables show medians of processor time, which a busy
machine disturbs least, and the best wall time; ratios are of mdata to megatron-core. Peak memory counts mapped files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LENGTH, SEED, EPOCHS = 4096, 1234, (1, 3)
BARS = {"arrays": 0.5, "arrays and files": 0.5, "first sample": 0.2}


def digest(arrays: list[np.ndarray]) -> str:
    """Of types, shapes and values."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def timed(build: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What it gives, and its processor and wall time."""
    began, ran = time.perf_counter(), time.process_time()
    found = build()
    return found, {"cpu_s": time.process_time() - ran, "wall_s": time.perf_counter() - began}


def own(prefix: Path, epochs: int, *, what: str, folder: Path) -> dict[str, Any]:
    """mdata's side, in a process of its own."""
    sys.path.insert(0, str(ROOT))
    os.environ["MDATA_CACHE"] = str(folder)
    import mdata

    num_samples = samples_of(prefix, epochs)
    if what == "first sample":
        data = mdata.open_dataset(
            f"{prefix}.json", sequence_length=LENGTH, seed=SEED, num_samples=num_samples, order=mdata.MegatronOrder()
        )
        return {"first": int(data[0]["tokens"].sum())}
    from mdata.order.megatron_order import MegatronRequest, build

    corpus = mdata.open_corpus(f"{prefix}.json", checked=False)
    lengths = corpus.lengths  # checked here, as the peer reads them before
    request = MegatronRequest(first=0, stop=len(lengths), sequence_length=LENGTH, num_samples=num_samples, seed=SEED)

    def made() -> list[np.ndarray]:
        found = build(lengths, request)
        arrays = [found.documents, found.samples, found.shuffle]
        if what == "arrays and files":
            for name, array in zip("dsx", arrays, strict=True):
                np.save(folder / f"{name}.npy", array)
        return arrays

    arrays, times = timed(made)
    return times | {"digest": digest(arrays)}


def peer(prefix: Path, epochs: int, *, what: str, folder: Path) -> dict[str, Any]:
    """megatron-core's side, in its environment."""
    if what == "arrays":
        np.save = lambda *_, **__: None
    make = peer_maker(prefix, folder)
    data, times = timed(lambda: make(samples_of(prefix, epochs)))
    if what == "first sample":
        return {"first": int(data[0]["tokens"].sum())}
    return times | {"digest": digest([data.document_index, data.sample_index, data.shuffle_index])}


def peer_maker(prefix: Path, folder: Path) -> Callable[[int | None], Any]:
    """What opens megatron-core's dataset for so many samples; the pair is open, its arrays are not made."""
    import torch
    from megatron.core.datasets import gpt_dataset
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    torch.distributed.get_rank = lambda: 0  # it asks for the rank without a process group
    told = {"eod": 0, "pad": -1, "vocab_size": 60_000, "unique_identifiers": {"class": "benchmark"}}
    config = gpt_dataset.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=([str(prefix)], None),
        split="100,0,0",
        path_to_cache=str(folder),
        tokenizer=type("Tokenizer", (), told)(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    low = IndexedDataset(str(prefix))
    documents = np.arange(len(low), dtype=np.int32)
    return lambda count: gpt_dataset.GPTDataset(low, str(prefix), documents, count, Split.train, config)


def samples_of(prefix: Path, epochs: int) -> int | None:
    """How many samples are asked for: half an epoch less than so many; None for one epoch."""
    tokens = Path(f"{prefix}.bin").stat().st_size // 2
    return None if epochs == 1 else int((epochs - 0.5) * tokens) // LENGTH


def run(python: str, side: str, *, prefix: Path, epochs: int, what: str) -> dict[str, Any]:
    """One fresh process; its own times, or those of all of it where its first sample counts."""
    with tempfile.TemporaryDirectory(dir=prefix.parent) as folder:
        command = [python, __file__, side, what, "--prefix", str(prefix), "--epochs", str(epochs), "--folder", folder]
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{side[2:]} failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    if what == "first sample":
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found |= {"cpu_s": cpu, "wall_s": wall}
    return found


def make_shard(prefix: Path, documents: int) -> None:
    """The pair and its manifest, with mdata."""
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    import samples

    import mdata
    from mdata.manifest.io import save_manifest

    samples.write_pair(prefix, samples.some_lengths(np.random.default_rng(1), documents), tokens=None)
    save_manifest(mdata.open_corpus(prefix).manifest, Path(f"{prefix}.json"))


def compare(prefix: Path, megatron_python: str, *, runs: int) -> list[dict[str, Any]]:
    """Rows of the table: each measure of each side in turns."""
    rows = []
    for epochs in EPOCHS:
        for what, bar in BARS.items():
            ours, theirs = [], []
            for _ in range(runs):
                theirs.append(run(megatron_python, "--peer", prefix=prefix, epochs=epochs, what=what))
                ours.append(run(sys.executable, "--own", prefix=prefix, epochs=epochs, what=what))
            same = "digest" not in ours[0] or len({found["digest"] for found in (*ours, *theirs)}) == 1
            row: dict[str, Any] = {"epochs": epochs, "what": what, "same": same, "bar": bar}
            for side, found in (("mdata", ours), ("megatron", theirs)):
                row[f"{side}_cpu_s"] = statistics.median(one["cpu_s"] for one in found)
                row[f"{side}_wall_s"] = min(one["wall_s"] for one in found)
                row[f"{side}_peak_mib"] = max(one["peak_mib"] for one in found)
            row["cpu_ratio"] = row["mdata_cpu_s"] / row["megatron_cpu_s"]
            row["wall_ratio"] = row["mdata_wall_s"] / row["megatron_wall_s"]
            rows.append(row)
            print_row(row, heading=len(rows) == 1)
    return rows


def print_row(row: dict[str, Any], *, heading: bool) -> None:
    """One line of the table, as soon as it is known."""
    if heading:
        sides = "".join(f"{side + ' CPU s':>16}{'wall s':>9}{'peak MiB':>10}" for side in ("megatron-core", "mdata"))
        print(f"{'epochs':<8}{'what':<18}{sides}{'CPU':>7}{'wall':>7}{'bar':>6}  arrays")
    sides = "".join(
        f"{row[f'{side}_cpu_s']:>16.2f}{row[f'{side}_wall_s']:>9.2f}{row[f'{side}_peak_mib']:>10.0f}"
        for side in ("megatron", "mdata")
    )
    ratios = f"{row['cpu_ratio']:>7.2f}{row['wall_ratio']:>7.2f}{row['bar']:>6.1f}"
    same = "" if row["what"] == "first sample" else "same bits" if row["same"] else "DIFFERENT"
    print(f"{row['epochs']:<8}{row['what']:<18}{sides}{ratios}  {same}", flush=True)


def main() -> int:
    """Compare, or do one side's part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron-python", help="the interpreter that has megatron-core")
    parser.add_argument("--documents", type=float, default=1e7)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--peer", choices=tuple(BARS), help=argparse.SUPPRESS)
    parser.add_argument("--own", choices=tuple(BARS), help=argparse.SUPPRESS)
    parser.add_argument("--prefix", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for side, what in ((own, arguments.own), (peer, arguments.peer)):
        if what:
            found = side(arguments.prefix, arguments.epochs, what=what, folder=arguments.folder)
            found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(json.dumps(found))
            return 0
    if not arguments.megatron_python:
        parser.error("--megatron-python is needed: the interpreter of an environment with megatron-core")
    with tempfile.TemporaryDirectory() as folder:
        make_shard(Path(folder) / "a", int(arguments.documents))
        rows = compare(Path(folder) / "a", arguments.megatron_python, runs=arguments.runs)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["same"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
