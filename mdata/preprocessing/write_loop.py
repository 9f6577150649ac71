"""The main loop of a run: takes results from workers, appends documents in input order, and checkpoints in between.

A journal record follows an fsync of every temporary file. Nothing is guaranteed between two records: a run that
continues truncates the files to the last one. What is unusual: an exception may arrive anywhere (Ctrl-C, SIGTERM), so a
flag says whether files and counts agree; only then is a last record written on exit. Appending happens in a separate
thread (mdata/util/background.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mdata.errors import MdataError, UsageError
from mdata.preprocessing.bad_rows import BadRowPolicy
from mdata.preprocessing.corpus_writer import CorpusWriter
from mdata.preprocessing.encode import Encoded, EncodedChunk, divide
from mdata.preprocessing.finished import is_finished
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import remove_leftovers
from mdata.preprocessing.plan import Job, input_name, printable_path
from mdata.preprocessing.resume import StartPoint
from mdata.preprocessing.worker_pool import Pool, Result
from mdata.sources.chunk import Chunk, chunk_digest, chunks
from mdata.sources.input_files import STDIN, check_unchanged
from mdata.util import atomic_io
from mdata.util.background import BackgroundWorker, map_files

# An fsync may be slow on shared storage: it takes at most a tenth of the time, but a record is never older than this.
_LONGEST_INTERVAL_S = 25.0
_LEAST_RESULTS_AHEAD = 2
# Of each, five files are open. Where there are more results, files are closed after each use.
_MOST_OPEN_WRITERS = 100


class WriteLoop:
    """All open files of a run. A context manager: leaving it with an error keeps what can be continued.

    Args:
        job: the plan.
        journal: receives checkpoints.
        start: where to begin.

    Attributes:
        state: the work that is done.
        writers: the writer of each result by name; None if an earlier run finished it.
        policy: handles bad rows.
    """

    def __init__(self, job: Job, journal: Journal, *, start: StartPoint) -> None:
        self.job = job
        self.state = start.state
        self.writers: dict[str, CorpusWriter | None] = {}
        self._journal = journal
        self._recorded = start.resumed
        self._consistent = True
        self._all_written = False
        self._due = 0.0
        self._seconds = {"read": 0.0, "parse": 0.0, "encode": 0.0, "write": 0.0}
        # Results with their final names are not written again, nor is their quarantine file.
        options = replace(job.options, quarantine=None) if start.placed else job.options
        self.policy = BadRowPolicy(options, job.progress, resume=start.quarantine)
        try:
            for number in job.partitions.numbers:
                for key in job.options.json_keys:
                    name = job.partitions.name(key, number)
                    self.writers[name] = self._open(name, number, start=start)
                    self._used(self.writers[name])
            # The names of temporary files must be synced to disk before the journal refers to them.
            folders = {writer.prefix.parent for writer in self.writers.values() if writer}
            folders |= {self.policy.quarantine.path.parent} if self.policy.quarantine else set()
            for folder in sorted(folders):
                atomic_io.sync_folder(folder)
        except BaseException:
            self._close(keep=start.resumed)
            raise

    def run(self, pool: Pool) -> None:
        """Tokenize and write all remaining input.

        Raises:
            BadInputError: a bad row, if the policy does not skip it.
            UsageError: an input that changed. ResourceError: the disk or memory ran out, or a worker died.
        """
        job = self.job
        done = sum(file.disk_bytes for file in job.files[: self.state.next_chunk[0]])
        # Standard input has no size.
        total = None if any(file.path == STDIN for file in job.files) else job.input_bytes
        job.progress.begin("tokenizing", total, unit="B", done=done)
        self._due = time.monotonic() + job.options.checkpoint_s
        # After a slow chunk many results come at once; sending out work should not wait until they are written.
        with BackgroundWorker(self._append, limit=max(_LEAST_RESULTS_AHEAD, pool.num_processes)) as writer:
            for result in pool.encode(self._remaining_chunks(), job.tokenizer, spec=job.spec):
                writer.put(result)
        self._open_inputs(len(job.files))
        if job.files:
            check_unchanged(job.files[-1])
        self.state.close_input()
        self.policy.check_share(self.state.bad, self.state.rows)
        self._checkpoint()
        self._all_written = True
        job.progress.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._close(keep=False)
            return
        if self._consistent and not self._all_written and self.state.rows:
            with suppress(MdataError, OSError):
                self._checkpoint()
        if self._recorded:
            self.job.progress.note(f"rows kept: {self.state.rows:,}; the same command continues after them")
        self._close(keep=self._recorded)

    def _open(self, name: str, number: int, *, start: StartPoint) -> CorpusWriter | None:
        job = self.job
        prefix = job.prefixes[name]
        if start.resumed and is_finished(job, self.state, name=name):
            remove_leftovers(prefix)
            return None
        step = 1 if number == job.partitions.count else job.partitions.step
        return CorpusWriter(prefix, job.spec.dtype, step=step, resume=start.writers.get(name))

    def _used(self, writer: CorpusWriter | None) -> None:
        """Close the files of a writer until they are used again, if there are too many writers to keep all open."""
        if writer and len(self.job.prefixes) > _MOST_OPEN_WRITERS:
            writer.rest()

    def _close(self, *, keep: bool) -> None:
        for writer in self.writers.values():
            if writer:
                writer.close(keep=keep)
        self.policy.close(keep=keep)

    def _remaining_chunks(self) -> Iterator[Chunk]:
        """The remaining chunks; finished chunks of a stream are read again and compared."""
        job = self.job
        first_file, first_chunk = self.state.next_chunk
        again = bool(first_chunk) and job.files[first_file].streamed
        start = (first_file, 0 if again else first_chunk)
        compared = 0 if again else first_chunk
        with closing(chunks(job.files, job.options.chunk_bytes, spec=job.spec.read, start=start)) as found:
            for chunk in found:
                if chunk.file_number == first_file and chunk.number < first_chunk:
                    assert chunk.data is not None, "a stream carries its data"
                    if chunk_digest(chunk.data) != self.state.inputs[first_file].digests[chunk.number]:
                        how = f"differs from what was read of it before (chunk {chunk.number})"
                        raise self._changed(chunk.source.path, how)
                    compared += 1
                    continue
                if compared < first_chunk:
                    break
                yield chunk
        if compared < first_chunk:
            raise self._changed(job.files[first_file].path, "is shorter than what was read of it before")

    def _changed(self, path: os.PathLike[str], how: str) -> UsageError:
        journal = self.job.beside("journal")
        return UsageError(
            f"{printable_path(path)} {how}", fix=f"give the same input as before, or remove {journal} to start over"
        )

    def _append(self, result: Result) -> None:
        """Process one result, in the writing thread."""
        begun = time.perf_counter()
        self._write(result.chunk, result.encoded)
        result.release()
        if time.monotonic() >= self._due:
            self._checkpoint()
            # The time of the next record depends on how long this one took.
            spent_s, wanted_s = time.perf_counter() - begun, self.job.options.checkpoint_s
            interval_s = max(wanted_s, min(10 * spent_s, _LONGEST_INTERVAL_S)) if wanted_s else 0
            self._due = time.monotonic() + interval_s
        for name, seconds in zip(self._seconds, (*result.encoded.seconds, time.perf_counter() - begun), strict=True):
            self._seconds[name] += seconds
        tokens = sum(writer.num_tokens for writer in self.writers.values() if writer)
        counts = {"tokens": tokens, "documents": self.state.records, "skipped": self.state.bad}
        self.job.progress.advance(result.chunk.file_bytes, **counts)
        self.job.progress.stages(**self._seconds)

    def _write(self, chunk: Chunk, encoded: EncodedChunk) -> None:
        """Append one chunk's documents to their writers, and count them."""
        self._open_inputs(chunk.file_number + 1)
        state, job = self.state, self.job
        rows_before = state.inputs[-1].rows
        path = state.inputs[-1].path
        if encoded.bad_rows and job.options.on_error == "stop":
            self.policy.handle(encoded.bad_rows[0], path, rows_before=rows_before, bad_before=state.bad)
        self._consistent = False
        for bad_row in encoded.bad_rows:
            self.policy.handle(bad_row, path, rows_before=rows_before, bad_before=state.bad)
            state.count_bad_row(bad_row.kind)
        partition_of = job.partitions.of_rows(state.rows + encoded.kept - 1, encoded.held)
        for key, documents in zip(job.options.json_keys, encoded.by_key, strict=True):
            for number, chosen, part in self._parts(documents, partition_of):
                writer = self.writers[job.partitions.name(key, number)]
                assert writer is not None, "a result was finished before its last chunk"
                writer.append(part, chunk.file_number, rows=rows_before + encoded.kept[chosen])
                self._used(writer)
        special = [documents.special_in_text for documents in encoded.by_key]
        state.count_chunk(encoded.rows, encoded.digest, records=len(encoded.kept), special=special)
        self._consistent = True

    def _parts(
        self, documents: Encoded, partition_of: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice, Encoded]]:
        """`divide`, without a copy if all documents belong to one partition."""
        if len(partition_of) and (partition_of == partition_of[0]).all():
            return iter([(int(partition_of[0]), slice(None), documents)])
        return divide(documents, partition_of)

    def _open_inputs(self, count: int) -> None:
        """Open the files up to number `count`, including empty ones; all before the last are fully read."""
        while len(self.state.inputs) < count:
            if self.state.inputs:
                check_unchanged(self.job.files[len(self.state.inputs) - 1])
            file = self.job.files[len(self.state.inputs)]
            section = file.section is not None
            facts = input_name(file), file.size_bytes
            self.state.open_input(*facts, modified_ns=file.modified_ns, is_section=section)

    def _checkpoint(self) -> None:
        if self._all_written or any(writer is None for writer in self.writers.values()):
            return
        writers = {name: writer for name, writer in self.writers.items() if writer}

        def checkpoint(name: str) -> dict[str, Any]:
            state = writers[name].checkpoint()
            self._used(writers[name])
            return state

        states = map_files(checkpoint, [*writers])
        record = {
            "kind": "state",
            "sinks": dict(zip(writers, states, strict=True)),
            "quarantine": self.policy.quarantine.sync() if self.policy.quarantine else None,
            **self.state.new_record(),
        }
        self._journal.append(record)
        self.state.mark_recorded()
        self._recorded = self._journal.resumable = True
