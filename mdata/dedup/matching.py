"""The middle stages of `dedup`: documents with equal keys become pairs, and with `verify` pairs are compared.

match: a task takes a range of all hashes and bands, and merges the runs of all parts. For each document with the key of
an earlier one it writes the pair (first with this key, this document); with `verify` also (the one before, this
document), so that a document that shares a key by chance does not hide the others. Work stays linear, however many
documents share a key.
sets: the distinct hashes of all n-grams of the documents in such pairs, by part.
verify: the pairs that truly have enough n-grams in common, by the part of the later document. Documents with equal
hashes are not compared.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import _core
from mdata.dedup.plan import DedupJob, Keys, Stage
from mdata.dedup.runs import SortedRun, SortedWriter, check_size, merged
from mdata.dedup.signing import SignedPart, in_threads, runs_of_earlier, signed_parts
from mdata.errors import UsageError
from mdata.progress import Progress
from mdata.sources.chunk import Chunk, chunk_digest, read_chunk
from mdata.sources.parse import parse
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io
from mdata.util.machine_limits import usable_cores

PAIRS_AT_ONCE = 1 << 18
BY_LATER, BY_EARLIER = "later", "earlier"


class KeyRange(NamedTuple):
    """A range of the keys of hashes (section 0) or of band `section` - 1."""

    section: int
    low: int
    high: int


def pieces_of(sections: int, task: PartNumber) -> list[KeyRange]:
    """The ranges of keys that a task of `match` merges: the `number`-th of `count` equal parts of all sections."""
    start, stop = ((sections << 64) * number // task.count for number in (task.number - 1, task.number))
    bounds = [(section, section << 64) for section in range(sections)]
    ends = [(section, max(start, low), min(stop, low + (1 << 64)), low) for section, low in bounds]
    return [KeyRange(section, begin - low, end - low) for section, begin, end, low in ends if begin < end]


def match(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Write the pairs of a range of keys."""
    parts = signed_parts(job)
    for part in parts:
        for path, counts in part.runs:
            check_size(path, 24 * counts[0] + 16 * sum(counts[1:]))
    folder = _emptied(job, "match", task)
    pieces = pieces_of(1 + job.options.bands, task)
    progress.begin("matching", len(pieces), unit="sections")

    def run(piece: KeyRange) -> dict[str, Any]:
        return _match_piece(job, piece, parts, folder)

    made = []
    with ThreadPoolExecutor(job.options.workers or usable_cores()) as pool:
        for facts in pool.map(run, pieces):
            made.append(facts)
            progress.advance(1)
    progress.end()
    _finish(job, "match", task, {"pieces": made, "of": _digest(job, parts)})


def _match_piece(job: DedupJob, piece: KeyRange, parts: list[SignedPart], folder: Path) -> dict[str, Any]:
    exact = piece.section == 0
    runs = runs_of_earlier(job, piece.section)
    runs += [run for part in parts for run in part.of_section(piece.section)]
    runs = [] if exact and not job.options.join_equal else runs
    words = 2 if piece.section else 3
    name = f"{piece.section:03}"
    compared = bool(job.options.verify) and not exact
    with merged(runs, words, scratch=folder / name, low=piece.low, high=piece.high) as merger:
        if compared:
            writers = [SortedWriter(folder / f"{name}.{order}", 2) for order in (BY_LATER, BY_EARLIER)]
            while len(edges := merger.edges(PAIRS_AT_ONCE, chain=True)):
                writers[0].add(np.ascontiguousarray(edges[:, ::-1]))
                writers[1].add(edges)
            by_later, _ = (writer.finish() for writer in writers)
            return {"name": name, "exact": False, "count": by_later.count}
        count = 0
        with atomic_io.atomic_file(folder / f"{name}.edges") as fd:
            while len(edges := merger.edges(PAIRS_AT_ONCE, chain=False)):
                atomic_io.write_all(fd, edges.data)
                count += len(edges)
    return {"name": name, "exact": exact, "count": count}


def _digest(job: DedupJob, parts: list[SignedPart]) -> str:
    """Identifies the parts from which pairs were made."""
    paths = [job.done_path("sign", part.task) for part in parts]
    return blake3(b"".join(path.read_bytes() for path in paths)).hexdigest(length=16)


def matches(job: DedupJob, parts: list[SignedPart]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The folder and the facts of each piece of all tasks of `match`.

    Raises:
        UsageError: some are not done, or were made of other parts.
    """
    all_facts, of = job.done("match", job.options.ranges), _digest(job, parts)
    for place, facts in enumerate(all_facts, 1):
        task = PartNumber(place, len(all_facts))
        if facts["of"] != of:
            raise UsageError(
                f"{job.done_path('match', task)} was made of other parts",
                found=f"{facts['of'][:8]}",
                expected=f"{of[:8]}, of {len(parts)} parts",
                fix=f"remove it, then mdata dedup match --shard {place}/{len(all_facts)}",
            )
        for piece in facts["pieces"]:
            yield job.data_path("match", task, ""), piece


def _sorted_pairs(job: DedupJob, parts: list[SignedPart], order: str) -> list[SortedRun]:
    runs = []
    for folder, piece in matches(job, parts):
        if not piece["exact"]:
            runs.append(SortedRun(folder / f"{piece['name']}.{order}", 0, piece["count"]))
            check_size(runs[-1].path, 16 * piece["count"])
    return runs


def _part_range(parts: list[SignedPart], task: PartNumber) -> tuple[SignedPart, int, int]:
    if task.count != len(parts):
        raise UsageError(
            f"part {task.number} of {task.count}", expected=f"parts of {len(parts)}, as mdata dedup sign had"
        )
    part = parts[task.number - 1]
    return part, part.base, part.base + part.rows


def write_sets(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Write the sets of n-grams of a part's documents that are in a pair."""
    parts = signed_parts(job)
    part, low, high = _part_range(parts, task)
    folder = _emptied(job, "sets", task)
    needed = np.zeros(part.rows, np.bool_)
    for order in (BY_LATER, BY_EARLIER):
        runs = _sorted_pairs(job, parts, order)
        with merged(runs, 2, scratch=folder / order, low=low, high=high) as merger:
            while len(pairs := merger.records(PAIRS_AT_ONCE)):
                needed[pairs[:, 0].astype(np.int64) - low] = True
    index, words = [np.empty((0, 3), np.uint64)], 0
    with atomic_io.atomic_file(folder / "sets") as fd:
        for rows, hashes, ends in _sets_of(job, part, needed, progress):
            counts = np.diff(ends, prepend=0)
            index.append(np.column_stack((rows, 8 * (words + ends - counts), counts)).astype(np.uint64))
            atomic_io.write_all(fd, hashes.data)
            words += len(hashes)
    offsets = np.concatenate(index)
    atomic_io.atomic_write(folder / "index", offsets.data)
    _finish(job, "sets", task, {"documents": len(offsets), "bytes": 8 * words})


def _sets_of(
    job: DedupJob, part: SignedPart, needed: npt.NDArray[np.bool_], progress: Progress
) -> Iterator[tuple[npt.NDArray[np.int64], Keys, npt.NDArray[np.int64]]]:
    """(rows in the part, hashes, ends) of the needed documents, chunk by chunk."""
    numbered, files = job.files_of(part.task), part.files()
    firsts, before = list[list[int]](), 0
    for file in files:
        rows = np.cumsum([0, *file.chunk_rows])
        firsts.append((rows + before).tolist())
        before += int(rows[-1])

    def sets(chunk: Chunk) -> tuple[npt.NDArray[np.int64], Keys, npt.NDArray[np.int64]]:
        first, stop = firsts[chunk.file_number][chunk.number : chunk.number + 2]
        wanted = needed[first:stop]
        if not wanted.any():
            return np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64)
        data = read_chunk(chunk, job.spec)
        if chunk_digest(data).hex() != files[chunk.file_number].digest(chunk.number):
            raise UsageError(f"{chunk.source.path} has changed since it was signed", fix="run mdata dedup again")
        batch = parse(chunk.source.format, data, spec=job.spec)
        rows = np.arange(batch.rows) if batch.kept is None else np.array(batch.kept, np.int64) - 1
        texts = batch.columns[0].sentences
        places = np.flatnonzero(wanted[rows])
        return first + rows[places], *job.signer.ngram_sets([texts[place] for place in places.tolist()])

    sources = [file for _, file in numbered]
    progress.begin("reading documents to compare", sum(file.disk_bytes for file in sources), unit="B")
    for chunk, of_chunk in in_threads(job, sources, (0, 0), sets):
        yield of_chunk
        progress.advance(chunk.file_bytes)
    progress.end()


def verify(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Write the pairs whose later document is in this part, and that have enough n-grams in common."""
    parts = signed_parts(job)
    _, low, high = _part_range(parts, task)
    facts = job.done("sets", len(parts))
    for part, of_sets in zip(parts, facts, strict=True):
        check_size(job.data_path("sets", part.task, "sets"), of_sets["bytes"])
        check_size(job.data_path("sets", part.task, "index"), 24 * of_sets["documents"])
    folder = _emptied(job, "verify", task)
    runs = _sorted_pairs(job, parts, BY_LATER)
    progress.begin("comparing documents", None, unit="pairs")
    compared = kept = 0
    before = np.zeros((0, 2), np.uint64)
    with (
        merged(runs, 2, scratch=folder / "edges", low=low, high=high) as merger,
        atomic_io.atomic_file(folder / "edges") as fd,
    ):
        while len(pairs := merger.records(PAIRS_AT_ONCE)):
            joined = np.concatenate((before, pairs))
            is_new = np.ones(len(joined), np.bool_)
            is_new[1:] = (joined[1:] != joined[:-1]).any(axis=1)
            is_new[: len(before)] = False
            before, pairs = pairs[-1:], joined[is_new]
            edges = pairs[_are_near(job, pairs.astype(np.int64), task.number - 1, parts)][:, ::-1]
            atomic_io.write_all(fd, np.ascontiguousarray(edges).data)
            compared, kept = compared + len(pairs), kept + len(edges)
            progress.advance(len(pairs))
    progress.end()
    _finish(job, "verify", task, {"compared": compared, "count": kept})


def _are_near(
    job: DedupJob, pairs: npt.NDArray[np.int64], later: int, parts: list[SignedPart]
) -> npt.NDArray[np.bool_]:
    """bool[n]: pairs (later, earlier) with enough n-grams in common; the later documents are all in one part."""
    bases = np.array([part.base for part in parts])
    owners = np.searchsorted(bases, pairs[:, 1], side="right") - 1
    least = Fraction(str(job.options.verify))
    near = np.zeros(len(pairs), np.bool_)
    for owner in np.unique(owners).tolist():
        places = np.flatnonzero(owners == owner)
        ends = list[npt.NDArray[np.int64]]()
        fds: list[int] = []
        try:
            for number, column in ((later, 0), (owner, 1)):
                index = np.fromfile(job.data_path("sets", parts[number].task, "index"), "<u8").reshape(-1, 3)
                index = index.astype(np.int64)
                rows = np.searchsorted(index[:, 0], pairs[places, column] - parts[number].base)
                fds.append(os.open(job.data_path("sets", parts[number].task, "sets"), os.O_RDONLY | os.O_CLOEXEC))
                ends.append(np.column_stack((np.full(len(places), fds[-1]), index[rows, 1:])))
            common = _core.common_words(np.column_stack(ends).astype(np.uint64)).astype(np.int64)
        finally:
            for fd in fds:
                os.close(fd)
        sizes, others = ends[0][:, 2], ends[1][:, 2]
        of = {"union": sizes + others - common, "min": np.minimum(sizes, others), "max": np.maximum(sizes, others)}
        # Exactly: common / of >= least.
        near[places] = common * least.denominator >= of[job.options.jaccard] * least.numerator
    return near


def edge_files(job: DedupJob, parts: list[SignedPart]) -> Iterator[tuple[Path, int, bool]]:
    """The files of pairs that join groups, those of equal texts first: path, pairs, whether they are equal."""
    near = []
    for folder, piece in matches(job, parts):
        path = folder / f"{piece['name']}.edges"
        if piece["exact"]:
            yield path, piece["count"], True
        elif not job.options.verify:
            near.append((path, piece["count"], False))
    if job.options.verify and job.options.bands:
        for part, facts in zip(parts, job.done("verify", len(parts)), strict=True):
            near.append((job.data_path("verify", part.task, "edges"), facts["count"], False))
    yield from near


def _emptied(job: DedupJob, stage: Stage, task: PartNumber) -> Path:
    folder = job.data_path(stage, task, "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _finish(job: DedupJob, stage: Stage, task: PartNumber, facts: dict[str, Any]) -> None:
    atomic_io.atomic_write(job.done_path(stage, task), json.dumps(facts).encode())
