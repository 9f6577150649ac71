"""`dedup`: which documents repeat earlier ones, exactly or nearly, in bounded memory on one machine.

1. Sign. Each document becomes a normal form of words (mdata_cpp/minhash.hpp), its BLAKE3, and a key for each band of
   the MinHash signature of its n-grams (Broder 1997). Records (key, number of the document) are written as sorted runs
   of about half a million documents, from which an interrupted command continues.
2. Match. The runs of a band are merged; documents with equal keys are joined into groups, and so are those with equal
   hashes. Two documents with a share J of common n-grams have a common band with probability 1 - (1 - J^r)^b.
3. The first document of each group stays. So the result depends on nothing but the texts and their order.

Documents with fewer words than an n-gram are compared by hash only. Bad rows and rows without a text are never removed.
Documents are numbered by row over all files. Slow twin: tests/reference/dedup.py.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import _core
from mdata.dedup.row_set import BITS, FACTS, ReadFile, path_of, write_row_set
from mdata.errors import ResourceError, UsageError, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk, chunk_digest, chunks, read_chunk
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import STDIN, SourceFile, check_unchanged, find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.util import atomic_io, file_lock
from mdata.util.machine_limits import usable_cores
from mdata.version import __version__

WORK, LOCK, CLUSTERS = ".work", ".lock", "clusters.jsonl"
BLOCK_BYTES = 1 << 22  # of a chunk, as in preprocess
RUN_DOCUMENTS = 1 << 19  # of a sorted run: files of 130 MB with 14 bands
_PRIME = (1 << 61) - 1
_SEED = 1  # of the permutations, as datatrove's
_CHUNKS_AHEAD = 2  # for each thread

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class DedupOptions:
    """Options of `dedup`.

    Args:
        input: files, folders or patterns of texts, as for `preprocess`.
        output: a folder for the result.
        against: texts that are kept whatever they repeat; documents of `input` that repeat them are removed.
        include, exclude: patterns for files in folders.
        json_key: the key or column that holds the text. input_format: "auto" decides by name and content.
        text_documents: a document of plain text is a file, or a paragraph.
        bands, rows: of a signature; documents with an equal band are near-duplicates. bands 0: only equal texts are.
        ngram: words of an n-gram.
        workers: threads; the result is the same.
    """

    input: str | Path | Sequence[str | Path]
    output: str | Path
    against: Sequence[str | Path] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    json_key: str = "text"
    input_format: Any = "auto"
    text_documents: Any = "file"
    bands: int = 14
    rows: int = 8
    ngram: int = 5
    workers: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("bands", 0, 256), ("rows", 1, 256), ("ngram", 1, 64)):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} is {getattr(self, name)}", expected=f"{least} to {most}")
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}", expected="at least 1, or 0 for all cores")

    @cached_property
    def inputs(self) -> tuple[str | Path, ...]:
        """`input` as a sequence."""
        return (self.input,) if isinstance(self.input, str | Path) else tuple(self.input)

    @property
    def content(self) -> dict[str, Any]:
        """What decides the result, besides the files."""
        names = ("json_key", "input_format", "text_documents", "bands", *(("rows", "ngram") if self.bands else ()))
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DedupResult:
    """What was found.

    Args:
        folder: for `preprocess --skip-rows`. rows: of the input. removed: rows that repeat earlier ones.
        exact: those whose normal form an earlier document has. clusters: groups of two documents or more.
    """

    folder: Path
    rows: int
    removed: int
    exact: int
    clusters: int


def permutations(count: int) -> tuple[Keys, Keys]:
    """a and b of the permutations (a x + b) mod (2^61 - 1), as datatrove draws them."""
    draws = np.random.RandomState(_SEED)
    a = draws.randint(1, _PRIME, dtype=np.uint64, size=count)
    return a, draws.randint(0, _PRIME, dtype=np.uint64, size=count)


class Signed(NamedTuple):
    """The documents of a chunk.

    Args:
        rows: of the chunk. kept: int64[d], the row of each document, from 0. digest: of the chunk.
        hashes: uint64[d, 2], of normal forms. keys: uint64[d, bands]. has_ngram: bool[d].
    """

    rows: int
    kept: npt.NDArray[np.int64]
    digest: bytes
    hashes: Keys
    keys: Keys
    has_ngram: npt.NDArray[np.bool_]


def sign_texts(texts: list[str], signer: _core.MinHashSigner) -> tuple[Keys, Keys, npt.NDArray[np.bool_]]:
    """(hashes, keys, has_ngram) of texts, see `Signed`; a text without a word is its own normal form."""
    forms, ends, keys, has_ngram = signer.sign(texts)
    view, begin = memoryview(forms), 0
    hashes = bytearray()
    for text, end in zip(texts, ends.tolist(), strict=True):
        form = view[begin:end] if end > begin else b"\0" + text.encode()
        hashes += blake3(form).digest(length=16)
        begin = end
    return np.frombuffer(bytes(hashes), "<u8").reshape(-1, 2), keys, has_ngram.view(np.bool_)


def dedup(options: DedupOptions, progress: Progress = SILENT) -> DedupResult:
    """Find the documents that repeat earlier ones; an interrupted command continues.

    Writes to the folder: dedup.json and removed.bits (mdata/dedup/row_set.py), and clusters.jsonl, whose lines are
    groups: the document that stays and those that repeat it, each as [file, row], rows from 1.

    Raises:
        UsageError: unusable options or input, or the folder holds a result of other options.
        BadInputError: compressed data or parquet is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    folder = Path(options.output)
    chosen = PathFilter(options.include, options.exclude)

    def find(names: Sequence[str | Path]) -> Sequence[SourceFile]:
        return find_inputs(names, format=options.input_format, filter=chosen, progress=progress).files

    known = find(options.against) if options.against else ()
    files = (*known, *find(options.inputs))
    if any(file.path == STDIN for file in files):
        raise UsageError("mdata dedup cannot read standard input", fix="give files: preprocess reads them again")
    with os_errors_named(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        held = "another mdata dedup writes to this folder", "wait for it to end"
        with file_lock.hold(folder / LOCK, remove=True, held=held):
            job = _Job(options, files, num_known=len(known), folder=folder, progress=progress)
            return job.finished() or job.run()


@dataclass
class _State:
    """How far signing is: files that were read (the last maybe in part), sorted runs, documents in them."""

    files: list[ReadFile]
    digests: list[str]  # of the chunks of the last file
    runs: int


class _Job:
    """See `dedup`."""

    def __init__(
        self, options: DedupOptions, files: Sequence[SourceFile], *, num_known: int, folder: Path, progress: Progress
    ) -> None:
        self.options, self.files, self.num_known = options, files, num_known
        self.folder, self.work, self.progress = folder, folder / WORK, progress
        self.spec = ReadSpec(json_keys=(options.json_key,), text_documents=options.text_documents, sentence_lists=False)
        bands = max(1, options.bands)
        self.signer = _core.MinHashSigner(*permutations(bands * options.rows), rows=options.rows, ngram=options.ngram)
        self.identity = {
            **options.content,
            "num_known": num_known,
            "inputs": [[path_of(file), file.size_bytes, file.modified_ns] for file in files],
        }

    def finished(self) -> DedupResult | None:
        """The result, if it is there already; refuses one of another job."""
        path = self.folder / FACTS
        if not path.exists():
            return None
        facts = json.loads(path.read_bytes())
        made_of, asked = facts.get("made_of", {}), json.loads(json.dumps(self.identity))
        if differing := [name for name, value in asked.items() if made_of.get(name) != value]:
            raise UsageError(
                f"{self.folder} holds the result of other input or options",
                found="different " + ", ".join(differing),
                fix="give another --output, or remove it",
            )
        self.progress.note("this result is finished and made of the same input; nothing is left to do")
        shutil.rmtree(self.work, ignore_errors=True)
        return DedupResult(self.folder, **facts["counts"])

    def run(self) -> DedupResult:
        """All three steps."""
        state = self._sign(self._resumed())
        total = sum(file.rows for file in state.files)
        first = sum(file.rows for file in state.files[: self.num_known])  # the first row of the input
        self._check_texts(state, total)
        parents = self._parents(total)
        exact = self._match("hash", state.runs, parents)
        is_exact = int((_roots(parents) != np.arange(total))[first:].sum()) if exact else 0
        for band in range(self.options.bands):
            self._match(f"band-{band:03}", state.runs, parents)
        roots = _roots(parents)
        removed = (roots != np.arange(total))[first:]
        clusters = self._write_clusters(state.files, roots)
        counts = {"rows": total - first, "removed": int(removed.sum()), "exact": is_exact, "clusters": clusters}
        facts = {"made_by": f"mdata {__version__}", "made_of": self.identity, "counts": counts}
        write_row_set(self.folder, state.files[self.num_known :], removed, chunk_bytes=BLOCK_BYTES, facts=facts)
        shutil.rmtree(self.work)
        return DedupResult(self.folder, **counts)

    def _resumed(self) -> _State:
        """The state of an interrupted run of this job; a new one otherwise."""
        path = self.work / "state.json"
        if path.exists():
            record = json.loads(path.read_bytes())
            if record.pop("made_of") == json.loads(json.dumps(self.identity)):
                self.progress.note("continuing an interrupted run")
                return _State([ReadFile(**file) for file in record["files"]], record["digests"], record["runs"])
            self.progress.note("the interrupted run in this folder was of other input or options; starting over")
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        (self.folder / BITS).unlink(missing_ok=True)
        return _State([], [], 0)

    def _sign(self, state: _State) -> _State:
        """Read all files and write their runs."""
        done = sum(file.disk_bytes for file in self.files[: max(0, len(state.files) - 1)])
        self.progress.begin("signing", sum(file.disk_bytes for file in self.files), unit="B", done=done)
        start = (len(state.files) - 1, len(state.digests)) if state.files else (0, 0)
        if state.files and state.files[-1].hash:
            start = len(state.files), 0
        signed, count = list[tuple[int, Signed]](), 0
        rows = sum(file.rows for file in state.files)
        for chunk, part in self._signed_chunks(start):
            self._open(state, chunk.file_number + 1)
            signed.append((rows, part))
            rows, count = rows + part.rows, count + len(part.kept)
            state.files[-1] = replace(state.files[-1], rows=state.files[-1].rows + part.rows)
            state.digests.append(part.digest.hex())
            self.progress.advance(chunk.file_bytes, documents=rows)
            if count >= RUN_DOCUMENTS:
                self._write_runs(state, signed)
                signed, count = [], 0
        self._open(state, len(self.files))
        if self.files:
            check_unchanged(self.files[-1])
        self._close_last(state)
        if signed:
            self._write_runs(state, signed)
        self.progress.end()
        return state

    def _check_texts(self, state: _State, total: int) -> None:
        """Report rows without a text; refuse an input that has no text at all."""
        sizes = ((self.work / f"hash-{number:05}.run").stat().st_size for number in range(state.runs))
        if not (missing := total - sum(sizes) // 24):
            return
        key = self.options.json_key
        if missing == total:
            shutil.rmtree(self.work)
            raise UsageError(
                f"no row has a text under {key!r}", found=f"{total:,} rows", fix="name its key with --json-key"
            )
        self.progress.note(f"{missing:,} of {total:,} rows have no text under {key!r}; they are left to preprocess")

    def _open(self, state: _State, count: int) -> None:
        """Begin the files up to number `count`; those before the last are complete."""
        while len(state.files) < count:
            if state.files:
                check_unchanged(self.files[len(state.files) - 1])
                self._close_last(state)
            file = self.files[len(state.files)]
            state.files.append(ReadFile(path_of(file), file.size_bytes, 0, ""))

    def _close_last(self, state: _State) -> None:
        if state.files and not state.files[-1].hash:
            whole = blake3(b"".join(map(bytes.fromhex, state.digests))).hexdigest()
            state.files[-1] = replace(state.files[-1], hash=whole)
            state.digests = []

    def _signed_chunks(self, start: tuple[int, int]) -> Iterator[tuple[Chunk, Signed]]:
        """The chunks from `start` on, signed in threads, in order."""
        workers = self.options.workers or usable_cores()
        waiting = deque[tuple[Chunk, Future[Signed]]]()
        with (
            ThreadPoolExecutor(workers) as pool,
            closing(chunks(self.files, BLOCK_BYTES, spec=self.spec, start=start)) as read,
        ):
            try:
                for chunk in read:
                    waiting.append((replace(chunk, data=None), pool.submit(self._signed, chunk)))
                    if len(waiting) > _CHUNKS_AHEAD * workers:
                        following, future = waiting.popleft()
                        yield following, future.result()
                while waiting:
                    following, future = waiting.popleft()
                    yield following, future.result()
            finally:
                for _, future in waiting:
                    future.cancel()

    def _signed(self, chunk: Chunk) -> Signed:
        data = read_chunk(chunk, self.spec)
        batch = parse(chunk.source.format, data, spec=self.spec)
        rows = np.arange(batch.rows) if batch.kept is None else np.array(batch.kept, np.int64) - 1
        return Signed(batch.rows, rows, chunk_digest(data), *sign_texts(batch.columns[0].sentences, self.signer))

    def _write_runs(self, state: _State, signed: Sequence[tuple[int, Signed]]) -> None:
        """One sorted run for hashes and one for each band; then the state that counts them."""
        documents = np.concatenate([part.kept + before for before, part in signed]).astype(np.uint64)
        hashes = np.concatenate([part.hashes for _, part in signed])
        self._write_run("hash", state.runs, np.column_stack((hashes, documents)))
        if self.options.bands:
            keys = np.concatenate([part.keys for _, part in signed])
            has_ngram = np.concatenate([part.has_ngram for _, part in signed])
            for band in range(self.options.bands):
                records = np.column_stack((keys[has_ngram, band], documents[has_ngram]))
                self._write_run(f"band-{band:03}", state.runs, records)
        state.runs += 1
        record = {"files": [asdict(file) for file in state.files], "digests": state.digests, "runs": state.runs}
        atomic_io.atomic_write(self.work / "state.json", json.dumps({"made_of": self.identity, **record}).encode())

    def _write_run(self, name: str, number: int, records: Keys) -> None:
        records = np.ascontiguousarray(records)
        _core.sort_records(records)
        atomic_io.atomic_write(self.work / f"{name}-{number:05}.run", records.data)

    def _parents(self, total: int) -> npt.NDArray[np.int64]:
        try:
            return np.arange(total, dtype=np.int64)
        except MemoryError as error:
            raise ResourceError("not enough memory to group the documents", expected=f"{8 * total:,} bytes") from error

    def _match(self, name: str, num_runs: int, parents: npt.NDArray[np.int64]) -> int:
        """Join the documents with equal keys; the number of those whose key an earlier one has."""
        words = 3 if name == "hash" else 2
        runs = [
            np.memmap(path, "<u8", "r").reshape(-1, words)
            for path in (self.work / f"{name}-{number:05}.run" for number in range(num_runs))
            if path.stat().st_size
        ]
        edges = _core.bucket_edges(runs, [0] * len(runs))
        _core.join_groups(parents, edges)
        return len(edges)

    def _write_clusters(self, files: Sequence[ReadFile], roots: npt.NDArray[np.int64]) -> int:
        """clusters.jsonl; the number of clusters."""
        members = np.flatnonzero(roots != np.arange(len(roots)))
        members = members[np.argsort(roots[members], kind="stable")]
        firsts, starts = np.unique(roots[members], return_index=True)
        ends = np.cumsum([file.rows for file in files])

        def place(document: int) -> list[Any]:
            number = int(np.searchsorted(ends, document, side="right"))
            return [files[number].path, int(document - (ends[number] - files[number].rows)) + 1]

        with atomic_io.atomic_file(self.folder / CLUSTERS) as fd:
            groups = np.split(members, starts[1:]) if len(starts) else []
            for first, group in zip(firsts.tolist(), groups, strict=True):
                line = {"kept": place(first), "removed": [place(document) for document in group.tolist()]}
                atomic_io.write_all(fd, (json.dumps(line) + "\n").encode())
        return len(firsts)


def _roots(parents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The first document of the group of each."""
    while not np.array_equal(above := parents[parents], parents):
        parents = above
    return parents
