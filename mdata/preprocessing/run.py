"""`preprocess`: plan, tokenize in worker processes, write in order with a journal, then commit and write manifests.

The parent process gives chunks of the input to workers and collects the results in the order of the input, so the files
do not depend on the number of workers or on interruptions. No file has its final name until everything is tokenized.
How an interrupted run is continued: mdata/preprocessing/resume.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from mdata.errors import DamageError, os_errors_named
from mdata.manifest.sidecars import manifest_path
from mdata.object_storage.address import is_address
from mdata.preprocessing.finalize import finalize_all
from mdata.preprocessing.finished import PreprocessResult, check_replaced, finished_before, stale_partitions
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.placing import beginning, complete_all, discard_run, nothing_begins
from mdata.preprocessing.plan import Job, plan_job, useful_workers
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options
from mdata.preprocessing.resume import EarlierRun, read_earlier_run, resume_or_restart, start_over
from mdata.preprocessing.worker_pool import Pool
from mdata.preprocessing.write_loop import WriteLoop
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import find_inputs
from mdata.util import file_lock

_ALREADY_FINISHED = "these results are finished and made of the same input; nothing is left to do"
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
    options: PreprocessOptions, progress: Progress, elsewhere: Callable[[Job], PreprocessResult | None] | None = None
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
        pool = stack.enter_context(Pool(useful_workers(options, files)))
        job = plan_job(options, files, progress=progress, on_files_read=pool.preload)
        # If nothing is left to do, nothing is written, not even a lock: the folder may be read-only. Leftovers of a run
        # that died at its very end are removed under the lock.
        found = (elsewhere and elsewhere(job)) or finished_before(job)
        if found and not any(job.beside(ending).exists() for ending in ("journal", "lock")):
            nothing_begins(job.beside("lock").parent)
            progress.note(_ALREADY_FINISHED)
            return found
        with os_errors_named("taking the run's lock"):
            stack.enter_context(file_lock.hold(job.beside("lock"), remove=True))
        journal = Journal(job.beside("journal"))
        has_results = any(path.is_file() for path in _manifests(job).values())
        if options.verify_input and not journal.records and not has_results:
            progress.note("--verify-input has no effect: there is no earlier run whose input could be compared")
        stack.callback(lambda: journal.close(keep=journal.resumable))
        earlier = EarlierRun(None) if found else _completed(job, journal)
        if earlier.placed and (found := finished_before(job)):
            found = replace(found, finished_before=False, resumed=True)
        if found:
            # The run that made the results died just before its end, or another job was started and abandoned.
            discard_run(journal)
            journal.remove()
            progress.note(_PLACED if found.resumed else _ALREADY_FINISHED)
        else:
            found = _run(job, journal, pool, earlier=earlier)
        for line in stale_partitions(job):
            progress.note(line)
        return found


def _manifests(job: Job) -> dict[str, Path]:
    return {name: manifest_path(prefix) for name, prefix in job.prefixes.items()}


def _completed(job: Job, journal: Journal) -> EarlierRun:
    """The earlier run of this journal; if it had begun to rename its results, the renames are completed."""
    earlier = read_earlier_run(job, journal)
    same = earlier.state is not None
    placed = complete_all(journal, job.description()["outputs"], job.progress, may_replace=same)
    return replace(earlier, placed=placed and same) if journal.records else EarlierRun(None)


def _run(job: Job, journal: Journal, pool: Pool, *, earlier: EarlierRun) -> PreprocessResult:
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
    return PreprocessResult(manifests, _manifests(job), resumed=start.resumed)
