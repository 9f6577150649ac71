"""A corpus of 100,000 shards, opened and read; and a model of 100 TB of text made on 1,000 nodes.

The shards are sparse files of 2 GB with real indices and a real manifest, so that opening costs what it would: two
system calls a shard, and the manifest. The model counts what a job of so many parts leaves behind, with sizes measured
on the manifest just written and rates given as options; the numbers that it assumes are printed with the result.

    python benchmarks/many_shards.py [--shards 100000] [--folder F]
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from mdata.manifest.ids import sealed, text_of
from mdata.manifest.types import BlockHashes, Shard
from tests.helpers.manifests import some_corpus

SHARD_BYTES = 2 << 30
BLOCK_BYTES = 4 << 20
DOCUMENTS = 64
OPEN = """
import re, sys, time
begun = time.perf_counter()
import mdata
# Since the program began; a child's ru_maxrss begins with its parent's.
peak_of = lambda: int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
path, what = sys.argv[1:3]
data = mdata.open_corpus(path) if what == "corpus" else mdata.open_dataset(path, sequence_length=4096)
opened, peak = time.perf_counter() - begun, peak_of()
begun = time.perf_counter()
data.read(data.num_tokens // 2, 4096) if sys.argv[2] == "corpus" else data[12345]
print(opened, peak, time.perf_counter() - begun, peak_of())
"""


@dataclass(frozen=True)
class Job:
    """What is assumed of a job: bytes of text, nodes, parts of each, and rates.

    Attributes:
        text_bytes: of all input.
        nodes, parts_per_node: how it is divided.
        node_text_bytes_per_s: tokenizing on one node, all its parts together.
        token_bytes_per_text_byte: 2 bytes for each of about 4.4 bytes of English text.
        text_bytes_per_document: the mean.
        copy_bytes_per_s: of one process that merges with --copy.
        stat_s: of one system call on the shared file system.
    """

    text_bytes: float = 100e12
    nodes: int = 1000
    parts_per_node: int = 8
    node_text_bytes_per_s: float = 400e6
    token_bytes_per_text_byte: float = 2 / 4.4
    text_bytes_per_document: float = 4_000
    copy_bytes_per_s: float = 1e9
    stat_s: float = 1e-3


def model(job: Job, manifest_bytes_per_shard: float) -> dict[str, float]:
    """Files, sizes and times of the job."""
    parts = job.nodes * job.parts_per_node
    token_bytes = job.text_bytes * job.token_bytes_per_text_byte
    documents = job.text_bytes / job.text_bytes_per_document
    return {
        "parts": parts,
        "hours": job.text_bytes / job.nodes / job.node_text_bytes_per_s / 3600,
        "bin_TB": token_bytes / 1e12,
        "bin_GB_of_a_part": token_bytes / parts / 1e9,
        "idx_TB": documents * 20 / 1e12,
        "block_hashes_GB": token_bytes / BLOCK_BYTES * 32 / 1e9,
        # A part leaves .bin, .idx, .json, .origins and .blake3, and a log and a state in the job's folder.
        "files": 7 * parts + 10,
        "metadata_calls_while_made": 60 * parts,
        "merged_manifest_MB": manifest_bytes_per_shard * parts / 1e6,
        "merge_by_reference_s": parts * (3 * job.stat_s + 0.003),
        "merge_copy_hours": token_bytes / job.copy_bytes_per_s / 3600,
        "open_s": parts * 2 * job.stat_s,
    }


def write_corpus(folder: Path, shards: int) -> Path:
    """Sparse pairs, a thousand in each folder, and their manifest."""
    length = SHARD_BYTES // 2 // DOCUMENTS
    pointers = np.arange(DOCUMENTS, dtype="<i8") * 2 * length
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, DOCUMENTS, DOCUMENTS + 1)
    index += np.full(DOCUMENTS, length, "<i4").tobytes() + pointers.tobytes()
    index += np.arange(DOCUMENTS + 1, dtype="<i8").tobytes()
    hashed = blake3(index).hexdigest()
    described = []
    for number in range(shards):
        prefix = folder / f"{number // 1000:03}" / f"corpus-{number + 1:06}-of-{shards:06}_text_document"
        prefix.parent.mkdir(exist_ok=True)
        prefix.with_suffix(".idx").write_bytes(index)
        with prefix.with_suffix(".bin").open("wb") as tokens:
            tokens.truncate(SHARD_BYTES)
        name = f"{prefix.parent.name}/{prefix.name}"
        # The shards are alike; hashes of the tokens are made up, so that the manifest has its real size.
        blocks = BlockHashes(path=f"{name}.bin.blake3", hash=blake3(name.encode()).hexdigest())
        described.append(
            Shard(
                path=name,
                documents=DOCUMENTS,
                sequences=DOCUMENTS,
                tokens=SHARD_BYTES // 2,
                bytes=SHARD_BYTES,
                contiguous=True,
                largest_id=50_000,
                idx_hash=hashed,
                blocks=blocks,
            )
        )
    corpus = msgspec.structs.replace(some_corpus(), tokenizer=None, shards=described, provenance=None, statistics=None)
    path = folder / "corpus.json"
    path.write_bytes(text_of(sealed(corpus)))
    return path


def main() -> int:
    """Write, open, read, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where the sparse files go; default: the system's")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        begun = time.perf_counter()
        path = write_corpus(Path(temporary), arguments.shards)
        size = path.stat().st_size
        print(
            f"{arguments.shards:,} shards written in {time.perf_counter() - begun:.0f} s; manifest {size / 1e6:.1f} MB"
        )
        found = {}
        for how in ("corpus", "dataset"):
            words = [sys.executable, "-c", OPEN, str(path), how]
            numbers = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
            opened, peak, first, after = map(float, numbers)
            found[how] = {"open_s": opened, "open_MB": peak / 1024, "read_s": first, "read_MB": after / 1024}
            print(f"{how}: open {opened:.2f} s, {peak / 1024:.0f} MB; first read {first:.2f} s, {after / 1024:.0f} MB")
    job = Job()
    told = model(job, size / arguments.shards)
    print("\nassumed:", ", ".join(f"{name} {value:,.4g}" for name, value in asdict(job).items()))
    print("\n".join(f"{name:26} {value:,.6g}" for name, value in told.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"measured": found, "assumed": asdict(job), "model": told}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
