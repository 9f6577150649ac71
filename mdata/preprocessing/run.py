"""`preprocess`: plan, tokenize in worker processes, write in order with a journal, then commit and write manifests.

The parent process gives chunks of the input to workers and collects the results in the order of the input, so the files
do not depend on the number of workers or on interruptions. No file has its final name until everything is tokenized.
How an interrupted run is continued: mdata/preprocessing/resume.py.

The main loop appends documents in a separate thread (mdata/util/background.py) and checkpoints in between: a journal
record follows an fsync of every temporary file. Nothing is guaranteed between two records: a run that continues
truncates the files to the last one. Unusual: an exception may arrive anywhere (Ctrl-C, SIGTERM), so a flag tells
whether files and counts agree; only then is a last record written on exit.

At the end results are completed with their manifests and get their final names in one transaction. Partitions are
joined afterwards, which is a second transaction: a run that is killed between the two finds the partitions finished. A
merge that was interrupted starts over.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from mdata.corpus.corpus import open_corpus
from mdata.errors import DamageError, MdataError, UsageError, os_errors_named
from mdata.manifest.sidecars import manifest_path, tokenizer_facts
from mdata.manifest.types import CorpusManifest, InputFile, InputSection, Provenance, Statistics
from mdata.object_storage.address import is_address
from mdata.preprocessing.bad_rows import BadRowPolicy
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter
from mdata.preprocessing.encode import Encoded, EncodedChunk, chosen_records, divide
from mdata.preprocessing.finished import (
    PreprocessResult,
    check_replaced,
    finished_before,
    is_finished,
    stale_partitions,
)
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import (
    Staged,
    beginning,
    complete_all,
    discard_run,
    nothing_begins,
    place,
    remove_leftovers,
)
from mdata.preprocessing.plan import JobPlan, input_name, plan_job, printable_path, useful_workers
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options
from mdata.preprocessing.resume import EarlierRun, StartPoint, read_earlier_run, resume_or_restart, start_over
from mdata.preprocessing.run_state import InputState, JobState
from mdata.preprocessing.worker_pool import Result, WorkerPool
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk, chunk_digest, chunks
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import STDIN, SourceFile, check_unchanged, find_inputs
from mdata.util import atomic_io, file_lock
from mdata.util.background import BackgroundWorker, map_files
from mdata.version import __version__

_ALREADY_FINISHED = "these results are finished and made of the same input; nothing is tokenized again"
_PLACED = "an earlier run had written everything; its results have their final names now, and nothing is left to do"


def preprocess(options: PreprocessOptions, progress: Progress = SILENT) -> PreprocessResult:
    """Turn text into token files and manifests, with Megatron's definition of a document.

    An interrupted run is continued from its journal, a hidden file beside the results.

    Raises:
        UsageError: unusable options, input or tokenizer; another run writes to this prefix; or results of another job
            that must not be replaced.
        BadInputError: a bad row; names file and row; correct it and run again to continue.
        ResourceError: the disk or memory ran out, or a worker died; run again to continue.
        StoppedError: stopped on request; run again to continue.
    """
    check_options(options)
    if not is_address(options.output_prefix):
        return _preprocess(options, progress)
    from mdata.preprocessing.uploads import Uploads

    uploads = Uploads(options, progress)
    return uploads.publish(_preprocess(uploads.local_options, progress, elsewhere=uploads.finished))


def _preprocess(
    options: PreprocessOptions,
    progress: Progress,
    elsewhere: Callable[[JobPlan], PreprocessResult | None] | None = None,
) -> PreprocessResult:
    """A run with results at a path; `elsewhere` says which results of the job are finished in object storage."""
    chosen = PathFilter(options.include, options.exclude)
    files = find_inputs(options.inputs, format=options.input_format, filter=chosen, progress=progress).files
    if options.shard is not None:
        from mdata.preprocessing.parts import part_of_job

        options, files = part_of_job(options, files)
    with os_errors_named("making the output folder"):
        Path(options.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with os_errors_named(f"writing {options.output_prefix}"), ExitStack() as stack:
        # Start the processes first: they import modules while the tokenizer is loaded here.
        pool = stack.enter_context(WorkerPool(useful_workers(options, files)))
        job = plan_job(options, files, progress=progress, on_files_read=pool.preload)
        # If nothing is left to do, nothing is written, not even a lock: the folder may be read-only. Leftovers of a run
        # that died at its very end are removed under the lock.
        result = (elsewhere and elsewhere(job)) or finished_before(job)
        if result and not any(job.beside(ending).exists() for ending in ("journal", "lock")):
            nothing_begins(job.beside("lock").parent)
            progress.note(_ALREADY_FINISHED)
            return result
        with os_errors_named("taking the run's lock"):
            stack.enter_context(file_lock.hold(job.beside("lock"), remove=True))
        journal = Journal(job.beside("journal"))
        has_results = any(path.is_file() for path in job.manifests.values())
        if options.verify_input and not journal.records and not has_results:
            progress.note("--verify-input has no effect: there is no earlier run whose input could be compared")
        stack.callback(lambda: journal.close(keep=journal.resumable))
        earlier = EarlierRun(None) if result else _completed(job, journal)
        if earlier.placed and (result := finished_before(job)):
            result = replace(result, finished_before=False, resumed=True)
        if result:
            # The run that made the results died just before its end, or another job was started and abandoned.
            discard_run(journal)
            journal.remove()
            nothing_begins(job.beside("lock").parent)
            progress.note(_PLACED if result.resumed else _ALREADY_FINISHED)
        else:
            result = _run(job, journal, pool, earlier=earlier)
        for line in stale_partitions(job):
            progress.note(line)
        return result


def _completed(job: JobPlan, journal: Journal) -> EarlierRun:
    """The earlier run of this journal; if it had begun to rename its results, the renames are completed."""
    earlier = read_earlier_run(job, journal)
    same = earlier.state is not None
    placed = complete_all(journal, job.description()["outputs"], job.progress, may_replace=same)
    quarantine = job.options.quarantine
    if placed and earlier.state and earlier.state.bad and quarantine and not Path(quarantine).is_file():
        return EarlierRun(None, f"the quarantine file {quarantine} is missing")
    return replace(earlier, placed=placed and same) if journal.records else EarlierRun(None)


def _run(job: JobPlan, journal: Journal, pool: WorkerPool, *, earlier: EarlierRun) -> PreprocessResult:
    if not earlier.placed:  # its results may be replaced, and some may still be missing
        check_replaced(job)
    with beginning(journal.path.parent):
        start = resume_or_restart(job, journal, earlier=earlier)
    try:
        loop = WriteLoop(job, journal, start=start)
    except DamageError as error:
        reason = str(error).splitlines()[0]
        job.progress.note(f"an earlier run cannot be continued ({reason}); starting from the beginning")
        loop = WriteLoop(job, journal, start=start_over(job, journal))
    with loop:
        loop.run(pool)
        manifests = finalize_all(job, loop.state, journal=journal, writers=loop.writers, policy=loop.policy)
    journal.remove()
    return PreprocessResult(manifests, job.manifests, resumed=start.resumed)


# An fsync may be slow on shared storage: it takes at most a tenth of the time, but a record is never older than this.
_LONGEST_INTERVAL_S = 25.0
_LEAST_RESULTS_AHEAD = 2
# Of each, five files are open. Where there are more results, files are closed after each use.
_MOST_OPEN_WRITERS = 100


class WriteLoop:
    """All open files of a run. A context manager: leaving it with an error keeps what can be continued.

    Attributes:
        state: the work that is done.
        writers: the writer of each result by name; None if an earlier run finished it.
        policy: handles bad rows.
    """

    def __init__(self, job: JobPlan, journal: Journal, *, start: StartPoint) -> None:
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
        self.policy = BadRowPolicy(options, job.progress, key_option=job.spec.read.key_option, resume=start.quarantine)
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

    def run(self, pool: WorkerPool) -> None:
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
            self._close_input()
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
            self.job.progress.note(f"rows kept for the next run: {self.state.rows:,}")
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
        with closing(chunks(job.files, job.options.chunk_bytes, spec=job.spec.read, start=start)) as from_start:
            for chunk in from_start:
                if chunk.file_number == first_file and chunk.number < first_chunk:
                    assert chunk.data is not None, "a stream carries its data"
                    if chunk_digest(chunk.data) != self.state.inputs[first_file].digests[chunk.number]:
                        how = f"differs from what was read of it before (chunk {chunk.number})"
                        raise self._changed(chunk.source.path, how)
                    compared += 1
                    continue
                if compared < first_chunk:
                    break
                # Chunks that are on their way behind the last row are dropped where they are written.
                if self._is_behind_limit():
                    return
                yield chunk
        if compared < first_chunk:
            raise self._changed(job.files[first_file].path, "is shorter than what was read of it before")

    def _changed(self, path: os.PathLike[str], how: str) -> UsageError:
        journal = self.job.beside("journal")
        return UsageError(
            f"{printable_path(path)} {how}", fix=f"give the same input as before, or remove {journal} to start over"
        )

    def _append(self, result: Result[EncodedChunk]) -> None:
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
        if self._is_behind_limit():
            return
        self._open_inputs(chunk.file_number + 1)
        state, job = self.state, self.job
        rows_before = state.inputs[-1].rows
        path = state.inputs[-1].path
        encoded = self._in_range(encoded)
        if encoded.bad_rows and job.options.on_error == "stop":
            self.policy.handle(encoded.bad_rows[0], path, rows_before=rows_before, bad_before=state.bad)
        self._consistent = False
        for bad_row in encoded.bad_rows:
            self.policy.handle(bad_row, path, rows_before=rows_before, bad_before=state.bad)
            state.count_bad_row(bad_row.kind)
        encoded = self._without_skipped(encoded, rows_before)
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

    def _without_skipped(self, encoded: EncodedChunk, rows_before: int) -> EncodedChunk:
        """The records that `skip_rows` does not name."""
        if self.job.skipped is None:
            return encoded
        removed = self.job.skipped[1][len(self.state.inputs) - 1].removed
        places = rows_before + encoded.kept - 1
        # A file that has become longer is refused at its end.
        is_removed = np.array([place < len(removed) and bool(removed[place]) for place in places.tolist()], np.bool_)
        return chosen_records(encoded, ~is_removed) if is_removed.any() else encoded

    def _is_behind_limit(self) -> bool:
        limit = self.job.options.limit
        return limit is not None and self.state.rows >= self.job.options.skip + limit

    def _in_range(self, encoded: EncodedChunk) -> EncodedChunk:
        """The records and bad rows among the rows that `skip` and `limit` leave."""
        options, rows = self.job.options, self.state.rows
        end = rows + encoded.rows if options.limit is None else options.skip + options.limit
        if options.skip <= rows and rows + encoded.rows <= end:
            return encoded
        first, last = options.skip - rows, end - rows
        bad_rows = tuple(bad_row for bad_row in encoded.bad_rows if first < bad_row.row <= last)
        chosen = (encoded.kept > first) & (encoded.kept <= last)
        return chosen_records(replace(encoded, bad_rows=bad_rows), chosen)

    def _parts(
        self, documents: Encoded, partition_of: npt.NDArray[np.int64]
    ) -> Iterator[tuple[int, npt.NDArray[np.int64] | slice, Encoded]]:
        """`divide`, without a copy if all documents belong to one partition."""
        if len(partition_of) and (partition_of == partition_of[0]).all():
            return iter([(int(partition_of[0]), slice(None), documents)])
        return divide(documents, partition_of)

    def _close_input(self) -> None:
        """Check that the last file is what it was when it was planned, or read by `dedup`."""
        number = len(self.state.inputs) - 1
        check_unchanged(self.job.files[number])
        self.state.close_input()
        if self.job.skipped is not None:
            rows, of_files = self.job.skipped
            rows.check(of_files[number], self.state.inputs[number].hash or "")

    def _open_inputs(self, count: int) -> None:
        """Open the files up to number `count`, including empty ones; all before the last are fully read."""
        while len(self.state.inputs) < count:
            if self.state.inputs:
                self._close_input()
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


def finalize_all(
    job: JobPlan, state: JobState, *, journal: Journal, writers: dict[str, CorpusWriter | None], policy: BadRowPolicy
) -> dict[str, CorpusManifest]:
    """Finish every result; returns the manifests by name. A writer that is None was finished by an earlier run.

    Raises:
        ResourceError, UsageError: a file operation failed; the same command continues from here.
    """
    prefixes = job.prefixes
    done = {name for name, writer in writers.items() if writer is None}
    done |= {name for name in prefixes.keys() - writers.keys() if is_finished(job, state, name=name)}
    made = {name: open_corpus(manifest_path(prefixes[name])).manifest for name in done}
    merges = [name for name in prefixes if name not in writers and name not in done]
    open_writers = {name: writer for name, writer in writers.items() if writer}
    contents = {name: _content(job, state, name, writer.statistics()) for name, writer in open_writers.items()}
    results = map_files(lambda name: open_writers[name].stage(contents[name]), [*open_writers])
    if results:
        if policy.quarantine:
            policy.quarantine.sync()
            policy.quarantine.check_name()
        # The quarantine file belongs to all results, so it is renamed after the old manifests are removed.
        quarantine = [policy.quarantine.path] if policy.quarantine else []
        place(journal, results, replaced=[prefixes[name] for name in merges], also=quarantine)
    made |= {name: staged.manifest for name, staged in zip(open_writers, results, strict=True)}
    for name, writer in open_writers.items():
        writer.close(keep=False)
        writers[name] = None
    if merges:
        joined = [_merge(job, state, name, made=made) for name in merges]
        place(journal, joined)
        made |= {name: staged.manifest for name, staged in zip(merges, joined, strict=True)}
    map_files(remove_leftovers, [*prefixes.values()])
    return {name: made[name] for name in prefixes}


def _merge(job: JobPlan, state: JobState, key: str, *, made: Mapping[str, CorpusManifest]) -> Staged:
    from mdata.preprocessing.joining import add_statistics, merge_partitions

    prefixes = job.prefixes
    names = [job.partitions.name(key, number) for number in range(job.partitions.count)]
    writer = CorpusWriter(prefixes[key], job.spec.dtype, step=job.partitions.step)
    keep = False
    try:
        merge_partitions([prefixes[name] for name in names], writer)
        statistics = add_statistics([counts for name in names if (counts := made[name].statistics) is not None])
        staged = writer.stage(_content(job, state, key, statistics))
        keep = True
        return staged
    finally:
        writer.close(keep=keep)


def _content(job: JobPlan, state: JobState, name: str, statistics: Statistics) -> CorpusContent:
    tokenizer = job.tokenizer
    facts = tokenizer_facts(tokenizer)
    provenance = _provenance(job, state, name=name)
    # A note, not an option: all engines give the same ids, so the corpus does not depend on the engine.
    notes = {"engine": tokenizer.engine}
    return CorpusContent(job.options.level, facts, tokenizer.files, provenance, statistics, notes)


def _provenance(job: JobPlan, state: JobState, *, name: str) -> Provenance:
    """What decided the content of a result; the number of workers does not."""
    return Provenance(
        program=f"mdata {__version__}",
        options=job.recorded_options(name),
        inputs=[_input_file(job, file, source) for file, source in zip(state.inputs, job.files, strict=True)],
        records=0,
        skipped=dict(sorted(state.skipped.items())),
        special_in_text=state.special[job.options.json_keys.index(name.partition("/")[0])],
        origins=None,
        filtered=state.filtered or UNSET,
    )


def _input_file(job: JobPlan, file: InputState, source: SourceFile) -> InputFile:
    assert file.hash is not None, f"{file.path} was not read to its end"
    part = source.section
    pieces = b"".join(file.digests).hex()
    return InputFile(
        path=printable_path(source.path),
        bytes=file.size_bytes,
        modified_ns=file.modified_ns,
        hash=file.hash,
        block_bytes=job.options.chunk_bytes,
        rows=file.rows,
        section=InputSection(start=part.start, stop=part.stop, total=part.total, pieces=pieces) if part else UNSET,
    )
