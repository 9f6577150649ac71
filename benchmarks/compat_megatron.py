"""Do megatron-core and mdata read the same tokens from the same files, whoever wrote them?

    python -m venv /tmp/megatron && /tmp/megatron/bin/pip install torch==2.13.0 megatron-core==0.16.1
    python benchmarks/compat_megatron.py --megatron-python /tmp/megatron/bin/python [PREFIX ...]

Run it with an interpreter that has mdata. megatron-core stays in an environment of its own: this file starts itself
there with `--peer`, where it imports nothing of ours, opens each prefix with megatron's IndexedDataset and leaves a
hash of every sequence and all document boundaries; then mdata reads the same prefix and each is compared. Without
PREFIX it first makes pairs of both token types with mdata's writer and with megatron's IndexedDatasetBuilder (empty
documents, several sequences a document) and also compares them with what was written, byte for byte. Prints a table,
writes JSON with --json, and exits 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Lengths of the sequences of each document; both sides make the same ids from a seeded generator.
SHAPES = {
    "one sequence a document": [[7], [1], [300], [12]] * 50,
    "sentences and empty documents": [[3, 2, 9], [], [1], [], [40, 40], []] * 20,
    "one document": [[1000]],
}
LARGEST = {"uint16": 65535, "int32": 2**31 - 1}


def main() -> int:
    """Compare, or do the peer's part where megatron-core is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="pairs to compare; default: pairs made here")
    parser.add_argument("--megatron-python", help="the interpreter that has megatron-core")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--peer", choices=("read", "write"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer == "read":
        megatron_read(arguments.prefixes, arguments.folder)
        return 0
    if arguments.peer == "write":
        megatron_write(arguments.folder)
        return 0
    if not arguments.megatron_python:
        parser.error("--megatron-python is needed: the interpreter of an environment with megatron-core")
    rows = compare(arguments.prefixes, arguments.megatron_python)
    print_table(rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(row["result"] == "equal" for row in rows) else 1


def compare(prefixes: Sequence[str], megatron_python: str) -> list[dict[str, Any]]:
    """One row for each prefix and check."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows: list[dict[str, Any]] = []
        if not prefixes:
            for writer in ("mdata", "megatron"):
                (folder / writer).mkdir()
            mdata_write(folder / "mdata")
            run_peer(megatron_python, "write", folder / "megatron", [])
            rows += same_bytes(folder)
            prefixes = [str(folder / writer / case) for writer in ("mdata", "megatron") for case, _, _ in cases()]
        run_peer(megatron_python, "read", folder, prefixes)
        for number, prefix in enumerate(prefixes):
            rows.append(compare_reads(prefix, folder / f"{number}.npz"))
        return rows


def run_peer(python: str, mode: str, folder: Path, prefixes: Sequence[str]) -> None:
    """Start this file in megatron's environment."""
    command = [python, __file__, "--peer", mode, "--folder", str(folder), *prefixes]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"megatron-core's side failed:\n{done.stderr[-2000:]}")


def cases() -> list[tuple[str, str, list[list[int]]]]:
    """(name, dtype, lengths of each document's sequences)."""
    return [(f"{i}_{dtype}", dtype, shape) for i, shape in enumerate(SHAPES.values()) for dtype in LARGEST]


def ids_of(dtype: str, count: int) -> np.ndarray:
    """The same ids on both sides; the largest of the type is among them."""
    ids = np.random.Generator(np.random.PCG64(count)).integers(0, LARGEST[dtype], count, endpoint=True)
    ids[count // 2] = LARGEST[dtype]
    return ids


def mdata_write(folder: Path) -> None:
    """Every case by our writer."""
    from mdata.indexed.writer import IndexedWriter

    for name, dtype, documents in cases():
        lengths = np.array([length for document in documents for length in document])
        ends = np.cumsum([len(document) for document in documents])
        with IndexedWriter(folder / name, np.dtype(dtype)) as writer:
            writer.append(ids_of(dtype, int(lengths.sum())), lengths, document_ends=ends)
            writer.commit()


def megatron_write(folder: Path) -> None:
    """Every case by megatron's builder."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, dtype, documents in cases():
        builder = IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.dtype(dtype).type)
        ids = torch.from_numpy(ids_of(dtype, sum(sum(document) for document in documents)))
        start = 0
        for document in documents:
            builder.add_document(ids[start : start + sum(document)], document)
            start += sum(document)
        builder.finalize(f"{folder / name}.idx")


def megatron_read(prefixes: Sequence[str], folder: Path) -> None:
    """What megatron-core reads of each prefix, as <number>.npz."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for number, prefix in enumerate(prefixes):
        data = IndexedDataset(prefix)
        np.savez(
            folder / f"{number}.npz",
            dtype=np.dtype(data.index.dtype).name,
            hashes=np.array([digest(data[i]) for i in range(len(data))], "S16"),
            lengths=np.array(data.sequence_lengths),
            boundaries=np.array(data.document_indices),
        )


def digest(tokens: np.ndarray) -> bytes:
    """Of one sequence, its token type included."""
    return hashlib.sha256(tokens.dtype.name.encode() + tokens.tobytes()).hexdigest()[:16].encode()


def same_bytes(folder: Path) -> list[dict[str, Any]]:
    """Whether the two writers made the same files of the same documents."""
    rows = []
    for name, dtype, documents in cases():
        pairs = [
            [(folder / who / f"{name}{end}").read_bytes() for end in (".bin", ".idx")] for who in ("mdata", "megatron")
        ]
        row = {"check": "both writers' bytes", "pair": name, "dtype": dtype, "documents": len(documents)}
        row["tokens"] = len(pairs[0][0]) // np.dtype(dtype).itemsize
        rows.append(row | {"result": "equal" if pairs[0] == pairs[1] else "DIFFERENT"})
    return rows


def compare_reads(prefix: str, peer: Path) -> dict[str, Any]:
    """What mdata reads against what megatron-core read."""
    from mdata.indexed.reader import IndexedReader

    reader, theirs = IndexedReader(Path(prefix)), np.load(peer)
    ours = np.array([digest(reader.sequence(i)) for i in range(reader.num_sequences)], "S16")
    result = "equal"
    if str(theirs["dtype"]) != reader.dtype.name:
        result = f"DIFFERENT dtype: {theirs['dtype']}"
    elif not np.array_equal(theirs["lengths"], reader.lengths):
        result = "DIFFERENT lengths"
    elif not np.array_equal(theirs["boundaries"], reader.boundaries):
        result = "DIFFERENT documents"
    elif not np.array_equal(theirs["hashes"], ours):
        result = f"DIFFERENT tokens in sequence {int(np.flatnonzero(theirs['hashes'] != ours)[0])}"
    return {
        "check": "both readers' tokens",
        "pair": "/".join(Path(prefix).parts[-2:]),
        "dtype": reader.dtype.name,
        "documents": reader.num_documents,
        "sequences": reader.num_sequences,
        "tokens": reader.num_tokens,
        "result": result,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a row, aligned."""
    columns = ("check", "pair", "dtype", "documents", "sequences", "tokens", "result")
    cells = [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
