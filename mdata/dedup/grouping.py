"""The last stage of `dedup`, in one process: pairs become groups, of which the first document stays.

Groups are joined by union-find with 8 bytes for each document; all else is streamed. Writes dedup.json, removed.bits
and chunks.bin (mdata/dedup/row_set.py), and clusters.jsonl, whose lines are groups. Signatures to keep are moved to
their places before dedup.json is written; a task that is killed in between leaves the rest to the next one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import _core
from mdata.dedup import plan
from mdata.dedup.matching import edge_files
from mdata.dedup.plan import CLUSTERS, SIGNATURES, SIGNED, DedupJob
from mdata.dedup.row_set import BITS, CHUNK, FACTS, ReadFile, footer_hash, path_of, write_row_set
from mdata.dedup.runs import SortedWriter, check_size, merged
from mdata.dedup.signing import PartFile, SignedPart, signed_parts
from mdata.errors import ResourceError, UsageError, counted
from mdata.progress import Progress
from mdata.util import atomic_io
from mdata.version import __version__

_PAIRS_AT_ONCE = 1 << 20
_LINES_AT_ONCE = 1 << 16
_ROWS_AT_ONCE = 1 << 22


def group(job: DedupJob, progress: Progress) -> None:
    """Join all pairs, and write the result."""
    parts = signed_parts(job)
    rows = sum(part.rows for part in parts)
    total = job.earlier_rows + rows
    files, as_read = _files(job, parts)
    # The first row of the input.
    first = job.earlier_rows + sum(file.rows for file in files[: job.num_known])
    _check_texts(job, parts, rows, progress)
    for name in (FACTS, BITS):
        (job.folder / name).unlink(missing_ok=True)
    parents, exact = _joined(job, parts, total, first, progress)
    scratch = job.work / "group"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    places = [place for result in job.earlier for place in result.files] + [(file.path, file.rows) for file in files]
    clusters = _write_clusters(job.folder / CLUSTERS, places, parents, begin=first, scratch=scratch)
    removed = _removed(parents, first)
    counts = {"rows": total - first, "removed": int(removed.sum()), "exact": exact, "clusters": clusters}
    facts = {"made_by": f"mdata {__version__}", "made_of": job.identity, "job": job.name, "counts": counts}
    chunks = _chunks(as_read[job.num_known :])
    if job.options.keep_signatures:
        _keep_signatures(job, parts, files)
    read = files[job.num_known :]
    write_row_set(job.folder, read, removed, chunks=chunks, chunk_bytes=plan.BLOCK_BYTES, facts=facts)


def _keep_signatures(job: DedupJob, parts: Sequence[SignedPart], files: Sequence[ReadFile]) -> None:
    folder = job.folder / SIGNATURES / job.name
    for other in folder.parent.glob("*"):
        if other != folder:
            shutil.rmtree(other) if other.is_dir() else other.unlink()
    runs = []
    for part in parts:
        for path, counts in part.runs:
            name = f"{part.task.number:05}-of-{part.task.count:05}/{path.name}"
            runs.append((f"{job.name}/{name}", part.base - job.earlier_rows, counts))
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                atomic_io.rename(path, folder / name)
                atomic_io.sync_folder((folder / name).parent)
    facts = {
        "made_by": f"mdata {__version__}",
        "job": job.name,
        "signed": job.options.signature,
        "rows": sum(file.rows for file in files),
        "files": [(file.path, file.rows) for file in files],
        "runs": runs,
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.atomic_write(folder.parent / SIGNED, json.dumps(facts).encode())


def _chunks(files: Sequence[PartFile]) -> npt.NDArray[Any]:
    chunks = np.empty(sum(len(file.chunk_rows) for file in files), CHUNK)
    chunks["rows"] = np.concatenate([np.empty(0, np.int64), *(file.chunk_rows for file in files)])
    digests = b"".join(bytes.fromhex(file.digests) for file in files)
    chunks["digest"] = np.frombuffer(digests, "V32")
    return chunks


def _files(job: DedupJob, parts: Sequence[SignedPart]) -> tuple[list[ReadFile], list[PartFile]]:
    """All files of the job as they were read, in whatever parts, and their chunks."""
    joined = [PartFile(number, None) for number in range(len(job.files))]
    for part in parts:
        for file in part.files():
            joined[file.number].chunk_rows += file.chunk_rows
            joined[file.number].digests += file.digests
    hashes = [blake3(bytes.fromhex(file.digests)).hexdigest() for file in joined]
    files = [
        ReadFile(
            path_of(source), source.size_bytes, file.rows, hash, chunks=len(file.chunk_rows), footer=footer_hash(source)
        )
        for source, file, hash in zip(job.files, joined, hashes, strict=True)
    ]
    return files, joined


def _check_texts(job: DedupJob, parts: Sequence[SignedPart], total: int, progress: Progress) -> None:
    """Report rows without text; refuse an input that has none at all."""
    if not (missing := total - sum(part.texts for part in parts)):
        return
    key = job.options.json_key
    if missing == total:
        shutil.rmtree(job.work)
        raise UsageError(
            f"no row has a text under {key!r}", found=counted(total, "row"), fix="name its key with --json-key"
        )
    progress.note(f"{missing:,} of {total:,} rows have no text under {key!r}; they are left to preprocess")


def _joined(
    job: DedupJob, parts: list[SignedPart], total: int, first: int, progress: Progress
) -> tuple[npt.NDArray[np.int64], int]:
    """For each document the first one of its group; and how many of the input equal an earlier text."""
    try:
        parents = np.arange(total, dtype=np.int64)
    except MemoryError as error:
        raise ResourceError("not enough memory to group the documents", expected=f"{8 * total:,} bytes") from error
    exact = 0
    paths = list(edge_files(job, parts))
    progress.begin("grouping", sum(count for _, count, _ in paths), unit="pairs")
    for path, count, are_equal in paths:
        check_size(path, 16 * count)
        for start in range(0, count, _PAIRS_AT_ONCE):
            number = min(_PAIRS_AT_ONCE, count - start)
            edges = np.fromfile(path, "<u8", 2 * number, offset=16 * start).reshape(-1, 2)
            _core.join_groups(parents, edges)
            exact += int((edges[:, 1] >= first).sum()) if are_equal else 0
            progress.advance(number)
    _core.flatten_groups(parents)
    progress.end()
    return parents, exact


def _removed(parents: npt.NDArray[np.int64], first: int) -> npt.NDArray[np.bool_]:
    removed = np.empty(len(parents) - first, np.bool_)
    for start in range(first, len(parents), _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, len(parents))
        removed[start - first : stop - first] = parents[start:stop] != np.arange(start, stop)
    return removed


def _write_clusters(
    path: Path, files: Sequence[tuple[str, int]], parents: npt.NDArray[np.int64], *, begin: int, scratch: Path
) -> int:
    """Write a line for each group with removed documents; returns their number.

    Args:
        begin: the first document of the input; those before it, with which it is compared, all stay.
    """
    writer = SortedWriter(scratch / "members", 2)
    for start in range(begin, len(parents), _ROWS_AT_ONCE):
        roots = parents[start : start + _ROWS_AT_ONCE]
        members = np.flatnonzero(roots != np.arange(start, start + len(roots)))
        if len(members):
            writer.add(np.column_stack((roots[members], members + start)).astype(np.uint64))
    run = writer.finish()
    count = 0
    with merged([run], 2, scratch=run.path) as merger, atomic_io.atomic_file(path) as fd:
        places = _Places(files)
        root = -1
        while len(records := merger.records(_LINES_AT_ONCE).astype(np.int64)):
            roots = records[:, 0]
            starts = np.flatnonzero(np.diff(roots, prepend=root))
            removed, root = places.of(records[:, 1]), int(roots[-1])
            lines = [", ".join(["", *removed[: starts[0] if len(starts) else None]])]  # of the group before
            firsts, ends = places.of(roots[starts]), np.append(starts, len(roots))[1:].tolist()
            for number, start, end, first in zip(roots[starts].tolist(), starts.tolist(), ends, firsts, strict=True):
                line = f'{{"id": {number}, "kept": {first}, "removed": [{", ".join(removed[start:end])}'
                lines.append(f"]}}\n{line}" if count else line)
                count += 1
            atomic_io.write_all(fd, "".join(lines).encode())
        if count:
            atomic_io.write_all(fd, b"]}\n")
    return count


class _Places:
    """Documents of files (path, rows) as [file, row], rows from 1, as JSON."""

    def __init__(self, files: Sequence[tuple[str, int]]) -> None:
        rows = np.array([count for _, count in files], np.int64)
        self._ends = np.cumsum(rows)
        self._starts = self._ends - rows
        self._names = [json.dumps(path) for path, _ in files]

    def of(self, documents: npt.NDArray[np.int64]) -> list[str]:
        """Each document's place."""
        numbers = np.searchsorted(self._ends, documents, side="right")
        rows = documents - self._starts[numbers] + 1
        names = self._names
        return [f"[{names[number]}, {row}]" for number, row in zip(numbers.tolist(), rows.tolist(), strict=True)]


def result_counts(folder: Path) -> dict[str, Any]:
    """The counts of a finished result."""
    counts = json.loads((folder / FACTS).read_bytes())["counts"]
    assert isinstance(counts, dict), "written by `group`"
    return counts
