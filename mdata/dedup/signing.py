"""The first stage of `dedup`: a part's documents as sorted runs of (key, number of the document in the part).

Each run is one file for about half a million documents: the BLAKE3s of their normal forms (16 bytes), then the keys of
each band. A run is complete before the state says so, and an interrupted task continues after the last one. A part may
begin and end inside a file of lines; files of rows, such as parquet, are never divided, so that the hash of a file does
not depend on parts.
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata import _core
from mdata.dedup import plan
from mdata.dedup.plan import DedupJob, Keys
from mdata.dedup.runs import SortedRun, with_offsets
from mdata.errors import DamageError
from mdata.progress import Progress
from mdata.sources.chunk import Chunk, chunk_digest, chunks, read_chunk
from mdata.sources.input_files import SourceFile, check_unchanged
from mdata.sources.parse import parse
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io
from mdata.util.machine_limits import usable_cores

T = TypeVar("T")
RUN_DOCUMENTS = 1 << 19  # of a sorted run: files of 130 MB with 14 bands
_CHUNKS_AHEAD = 2  # for each thread


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


@dataclass
class PartFile:
    """A file, or a section of one, as far as a part has read it.

    Args:
        number: among the files of the job. section: bytes [start, stop); None: the whole file.
        chunk_rows: of each chunk that was read, bad rows included. digests: of these chunks, as one hexadecimal text.
        is_whole: whether it was read to its end.
    """

    number: int
    section: list[int] | None
    chunk_rows: list[int] = field(default_factory=list)
    digests: str = ""
    is_whole: bool = False

    @property
    def rows(self) -> int:
        """Rows that were read."""
        return sum(self.chunk_rows)

    def digest(self, chunk: int) -> str:
        """The hash of a chunk."""
        return self.digests[64 * chunk : 64 * (chunk + 1)]


@dataclass(frozen=True)
class SignedPart:
    """The content of a part's done-file.

    Attributes:
        base: rows of earlier results, and of the parts before it. rows, texts: of the part.
        runs: paths, and the counts of their hashes and bands.
        files_path: where `files` are listed.
    """

    task: PartNumber
    base: int
    rows: int
    texts: int
    runs: tuple[tuple[Path, tuple[int, ...]], ...]
    files_path: Path

    def files(self) -> list[PartFile]:
        """The files that the part read.

        Raises:
            DamageError: the list is missing or damaged.
        """
        try:
            return [PartFile(**file) for file in json.loads(self.files_path.read_bytes())]
        except (OSError, ValueError, TypeError) as error:
            fix = f"remove {self.files_path.parent.parent}, and run the same command again"
            raise DamageError(f"{self.files_path} is damaged", found=str(error), fix=fix) from error

    def of_section(self, section: int) -> list[SortedRun]:
        """The runs of hashes (section 0) or of band `section` - 1, with numbers over all parts."""
        return [_section(path, counts, section, added=self.base) for path, counts in self.runs]


def runs_of_earlier(job: DedupJob, section: int) -> list[SortedRun]:
    """The runs of a section of earlier results."""
    runs, before = list[SortedRun](), 0
    for result in job.earlier:
        for path, base, counts in result.runs:
            runs.append(replace(_section(path, counts, section, added=before + base), repair=result.repair))
        before += result.rows
    return runs


def _section(path: Path, counts: Sequence[int], section: int, *, added: int) -> SortedRun:
    return replace(with_offsets(path, counts, lambda place: 2 if place else 3)[section], added=added)


def signed_parts(job: DedupJob) -> list[SignedPart]:
    """All parts.

    Raises:
        UsageError: some are not done. DamageError: a done-file is damaged.
    """
    all_facts = job.done("sign", job.options.parts)
    parts, base = [], job.earlier_rows
    for place, facts in enumerate(all_facts, 1):
        task = PartNumber(place, len(all_facts))
        runs = tuple((job.data_path("sign", task, name), tuple(counts)) for name, counts in facts["runs"])
        files_path = job.data_path("sign", task, "files.json")
        parts.append(SignedPart(task, base, facts["rows"], facts["texts"], runs, files_path))
        base += facts["rows"]
    return parts


def sign(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Sign a part, from where an earlier attempt stopped."""
    _Signing(job, task, progress).run()


class _Signing:
    """See `sign`."""

    def __init__(self, job: DedupJob, task: PartNumber, progress: Progress) -> None:
        self.job, self.task, self.progress = job, task, progress
        self.numbered = job.files_of(task)
        self.sources = [file for _, file in self.numbered]
        self.folder = job.data_path("sign", task, "")
        self.files: list[PartFile] = []
        self.runs: list[tuple[str, list[int]]] = []
        self.texts = 0

    def run(self) -> None:
        """Read the part, write its runs, and the done-file."""
        state = self.folder / "state.json"
        if state.exists():
            self._load(plan.read_facts(state))
            self.progress.note("continuing an interrupted run")
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
        self._read_all()
        facts = self._facts()
        files = json.dumps(facts.pop("files")).encode()
        atomic_io.atomic_write(self.folder / "files.json", files)
        facts["files_hash"] = blake3(files).hexdigest()
        atomic_io.atomic_write(self.job.done_path("sign", self.task), json.dumps(facts).encode())
        state.unlink(missing_ok=True)

    def _load(self, facts: dict[str, Any]) -> None:
        self.files = [PartFile(**file) for file in facts["files"]]
        self.runs = [(name, counts) for name, counts in facts["runs"]]
        self.texts = facts["texts"]

    def _facts(self) -> dict[str, Any]:
        files = [vars(file) for file in self.files]
        return {"rows": sum(file.rows for file in self.files), "texts": self.texts, "files": files, "runs": self.runs}

    def _read_all(self) -> None:
        done = sum(source.disk_bytes for source in self.sources[: max(0, len(self.files) - 1)])
        self.progress.begin("signing", sum(source.disk_bytes for source in self.sources), unit="B", done=done)
        start = (0, 0)
        if self.files:
            last = self.files[-1]
            start = (len(self.files), 0) if last.is_whole else (len(self.files) - 1, len(last.chunk_rows))
        rows = sum(file.rows for file in self.files)
        signed, count = list[tuple[int, Signed]](), 0
        for chunk, part in in_threads(self.job, self.sources, start, self._signed):
            self._open(chunk.file_number + 1)
            signed.append((rows, part))
            rows, count = rows + part.rows, count + len(part.kept)
            self.files[-1].chunk_rows.append(part.rows)
            self.files[-1].digests += part.digest.hex()
            self.progress.advance(chunk.file_bytes, documents=rows)
            if count >= RUN_DOCUMENTS:
                self._write_run(signed)
                signed, count = [], 0
        self._open(len(self.sources))
        self._close_last()
        if signed:
            self._write_run(signed)
        self.progress.end()

    def _open(self, count: int) -> None:
        """Begin the files up to number `count`; those before the last are complete."""
        while len(self.files) < count:
            self._close_last()
            number, source = self.numbered[len(self.files)]
            self.files.append(PartFile(number, list(source.section[:2]) if source.section else None))

    def _close_last(self) -> None:
        if self.files and not self.files[-1].is_whole:
            check_unchanged(self.sources[len(self.files) - 1])
            self.files[-1].is_whole = True

    def _signed(self, chunk: Chunk) -> Signed:
        job = self.job
        data = read_chunk(chunk, job.spec)
        batch = parse(chunk.source.format, data, spec=job.spec)
        rows = np.arange(batch.rows) if batch.kept is None else np.array(batch.kept, np.int64) - 1
        return Signed(batch.rows, rows, chunk_digest(data), *sign_texts(batch.columns[0].sentences, job.signer))

    def _write_run(self, signed: Sequence[tuple[int, Signed]]) -> None:
        """A sorted run; then the state that counts it."""
        documents = np.concatenate([part.kept + before for before, part in signed]).astype(np.uint64)
        hashes = np.concatenate([part.hashes for _, part in signed])
        sections = [np.column_stack((hashes, documents))]
        keys = np.concatenate([part.keys for _, part in signed])
        has_ngram = np.concatenate([part.has_ngram for _, part in signed])
        name, counts = f"{len(self.runs):05}.run", []
        with atomic_io.atomic_file(self.folder / name) as fd:
            for band in range(-1, self.job.options.bands):
                records = sections[0] if band < 0 else np.column_stack((keys[has_ngram, band], documents[has_ngram]))
                _core.sort_records(records)
                atomic_io.write_all(fd, records.data)
                counts.append(len(records))
        self.runs.append((name, counts))
        self.texts += len(documents)
        atomic_io.atomic_write(self.folder / "state.json", json.dumps(self._facts()).encode())


def in_threads(
    job: DedupJob, sources: Sequence[SourceFile], start: tuple[int, int], work: Callable[[Chunk], T]
) -> Iterator[tuple[Chunk, T]]:
    """Each chunk from `start` on with the result of `work`, computed in threads, in order."""
    workers = job.options.workers or usable_cores()
    waiting = deque[tuple[Chunk, Future[T]]]()
    with (
        ThreadPoolExecutor(workers) as pool,
        closing(chunks(sources, plan.BLOCK_BYTES, spec=job.spec, start=start)) as read,
    ):
        try:
            for chunk in read:
                waiting.append((replace(chunk, data=None), pool.submit(work, chunk)))
                if len(waiting) > _CHUNKS_AHEAD * workers:
                    following, future = waiting.popleft()
                    yield following, future.result()
            while waiting:
                following, future = waiting.popleft()
                yield following, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
