"""`preprocess`: plan, workers, ordered writers with a journal, manifests last.

The parent hands pieces of the input to workers and takes the results back in the order of the input, so the
files do not depend on the number of workers or on how often the job was killed. Nothing has a final name
until everything is tokenized. What one run takes over from another: mdata/preprocessing/resume.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from mdata.errors import DamageError, os_errors_named
from mdata.manifest.sidecars import manifest_path
from mdata.preprocessing.finished import PreprocessResult, check_replaced, finish_all, finished_before, stale_parts
from mdata.preprocessing.journal import Journal
from mdata.preprocessing.plan import Job, plan_job, useful_workers
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options, input_filter
from mdata.preprocessing.resume import begin_anew, give_up, look_back, take_up
from mdata.preprocessing.worker_pool import Pool
from mdata.preprocessing.write_loop import Filling
from mdata.progress import SILENT, Progress
from mdata.sources.input_files import find_inputs
from mdata.util import file_lock


def preprocess(options: PreprocessOptions, progress: Progress = SILENT) -> PreprocessResult:
    """Turn text into token files and manifests, with Megatron's rules for what a document is.

    A run that was cut off is continued from its journal, a hidden file beside the results.

    Raises:
        UsageError: options, input or tokenizer that cannot be used, another run onto this prefix, or results of
            another job that may not be replaced.
        BadInputError: a record that cannot be taken, by file and row; mend it and run again to continue.
        ResourceError: disk, memory or a worker was lost; run again to continue.
        StoppedError: stopped on request; run again to continue.
    """
    check_options(options)
    files = find_inputs(
        options.input, format=options.input_format, chosen=input_filter(options), progress=progress
    ).files
    with os_errors_named("making the output folder"):
        Path(options.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    with os_errors_named(f"writing {options.output_prefix}"), ExitStack() as stack:
        # Processes start first: they import while the tokenizer is loaded here.
        pool = stack.enter_context(Pool(useful_workers(options, files)))
        job = plan_job(options, files, progress=progress, announce=pool.expect)
        # Nothing is written where nothing is to do, not even a lock: the folder may be read-only. What a run left
        # that died in its last moments is cleared away under the lock.
        found = finished_before(job)
        if found and not any(job.beside(ending).exists() for ending in ("journal", "lock")):
            progress.note(_NOTHING_LEFT)
            return found
        with os_errors_named("taking the run's lock"):
            stack.enter_context(file_lock.hold(job.beside("lock"), remove=True))
        journal = Journal(job.beside("journal"))
        if options.verify_input and not journal.records and not any(path.is_file() for path in _results(job)):
            progress.note("without effect here: --verify-input (there is no earlier run whose input could be compared)")
        stack.callback(lambda: journal.close(keep=journal.worth_keeping))
        result = _nothing_left(job, journal, found) if found else _run(job, journal, pool)
        for line in stale_parts(job):
            progress.note(line)
        return result


_NOTHING_LEFT = "these results are finished and made of the same input; nothing is left to do"


def _nothing_left(job: Job, journal: Journal, found: PreprocessResult) -> PreprocessResult:
    """The run that made the results died before its last word, or another job was begun and given up."""
    give_up(journal)
    journal.remove()
    job.progress.note(_NOTHING_LEFT)
    return found


def _results(job: Job) -> list[Path]:
    return [manifest_path(prefix) for prefix in job.prefixes().values()]


def _run(job: Job, journal: Journal, pool: Pool) -> PreprocessResult:
    earlier = look_back(job, journal)
    if not earlier.may_place:
        check_replaced(job, earlier.placing)
    taken = take_up(job, journal, earlier=earlier)
    try:
        filling = Filling(job, journal, taken=taken)
    except DamageError as error:
        reason = str(error).splitlines()[0]
        job.progress.note(f"an earlier run cannot be continued ({reason}); starting from the beginning")
        filling = Filling(job, journal, taken=begin_anew(job, journal))
    with filling:
        filling.fill(pool)
        filling.begin_placing()
        manifests = finish_all(job, filling.ledger, sinks=filling.sinks)
    journal.remove()
    paths = dict(zip(job.prefixes(), _results(job), strict=True))
    return PreprocessResult(manifests, paths, resumed=taken.resumed)
