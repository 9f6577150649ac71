"""`dedup`: which documents repeat earlier ones, exactly or nearly, in bounded memory.

1. Sign. Each document becomes a normal form of words (mdata_cpp/minhash.hpp), its BLAKE3, and a key for each band of
   the MinHash signature of its n-grams (Broder 1997). Records (key, number of the document) become sorted runs.
2. Match. The runs of a band are merged; documents with equal keys are pairs, and so are those with equal hashes. Two
   documents with a Jaccard similarity J share a band with probability 1 - (1 - J^r)^b. With `verify` they are compared.
3. Group. Pairs are joined into groups. The first document of each group stays, so the result depends only on the texts
   and their order, not on parts, machines or threads.

Each stage reads the files of the one before, in parts that may run anywhere; `dedup` runs all of them here, and with
`write_text` a last one that writes the rows that stay. Documents with fewer words than an n-gram are compared by hash
only. Bad rows and rows without a text are never removed. Documents are numbered by row over all files.
Slow twin: tests/reference/dedup.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdata.dedup.dropping import drop
from mdata.dedup.grouping import group, result_counts
from mdata.dedup.matching import match, verify, write_sets
from mdata.dedup.plan import LOCK, SIGNATURES, SIGNED, SUBSTRING, DedupJob, DedupOptions, Stage, text_path
from mdata.dedup.signing import sign
from mdata.dedup.substrings import cut_substrings
from mdata.errors import UsageError, os_errors_named
from mdata.progress import SILENT, Progress
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io, file_lock

_TASKS = {"sign": sign, "match": match, "sets": write_sets, "verify": verify}


@dataclass(frozen=True)
class DedupResult:
    """The counts of a finished job.

    Args:
        folder: for `preprocess --skip-rows`. rows: of the input. removed: rows that repeat earlier ones.
        exact: those with the normal form of an earlier document. clusters: groups of at least two documents.
    """

    folder: Path
    rows: int
    removed: int
    exact: int
    clusters: int


def dedup(options: DedupOptions, progress: Progress = SILENT) -> DedupResult:
    """Find the documents that repeat earlier ones; an interrupted command continues.

    Writes to the folder: dedup.json, removed.bits and chunks.bin (mdata/dedup/row_set.py), and clusters.jsonl, whose
    lines are groups: the document that stays and those that repeat it, each as [file, row], rows from 1.

    Raises:
        UsageError: unusable options or input, or the folder holds a result of other options.
        BadInputError: compressed data or parquet is damaged.
        DamageError: files of an interrupted run are damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    if options.substring:
        raise UsageError("substrings have no groups", fix="cut_substrings of mdata.dedup.dedup")
    job = DedupJob(options, progress)
    with _writing(job):
        if job.is_finished():
            _say_finished(job, progress)
        else:
            others = [path for path in job.work.parent.glob("*") if path != job.work]
            if others:
                progress.note("the interrupted run in this folder was of other input or options; starting over")
            for path in others:
                shutil.rmtree(path)
            _begin(job)
            for stage in options.stages:
                if stage != "drop":
                    _run_task(job, stage, PartNumber(1, 1), progress)
        shutil.rmtree(job.work.parent, ignore_errors=True)
        if options.write_text:
            drop(job, PartNumber(1, 1), progress)
    return DedupResult(job.folder, **result_counts(job.folder))


def run_stage(options: DedupOptions, stage: Stage, progress: Progress = SILENT) -> DedupResult | None:
    """Run task `options.shard` of a stage unless it is done; returns the job's result once it exists.

    Raises:
        UsageError: as `dedup`, or tasks of an earlier stage are not done, or another process runs this one.
        BadInputError, DamageError, ResourceError: as `dedup`.
    """
    if stage not in options.stages:
        option = {"drop": "--write-text", "substring": "--substring"}.get(stage, "--verify")
        raise UsageError(f"there is no stage {stage} without {option}", fix=f"give {option}, or leave this stage out")
    if stage == "group" and options.shard.count > 1:
        raise UsageError("group has one task", found=f"--shard {options.shard.number}/{options.shard.count}")
    job = DedupJob(options, progress)
    with os_errors_named(f"writing {job.folder}"):
        if stage == "substring":
            path = text_path(job.folder, options.shard)
            path.parent.mkdir(parents=True, exist_ok=True)
            job.is_finished()
            _say_once(job.folder / SUBSTRING, {"job": job.name, "made_of": job.identity})
            with file_lock.hold(path.with_suffix(".lock"), remove=True):
                cut_substrings(job, options.shard, progress)
            return None
        if stage == "drop":
            drop(job, options.shard, progress)
            return DedupResult(job.folder, **result_counts(job.folder))
        if job.is_finished():
            _say_finished(job, progress)
            _remove_work(job)
            return DedupResult(job.folder, **result_counts(job.folder))
        _begin(job)
        if stage == "group":
            with _writing(job):
                group(job, progress)
                _remove_work(job)
            return DedupResult(job.folder, **result_counts(job.folder))
        held = f"another process runs this task of {stage}", "wait for it to end"
        with file_lock.hold(job.done_path(stage, options.shard).with_suffix(".lock"), remove=True, held=held):
            _run_task(job, stage, options.shard, progress)
    return None


@contextmanager
def _writing(job: DedupJob) -> Iterator[None]:
    """Lock the output folder."""
    with os_errors_named(f"writing {job.folder}"):
        job.folder.mkdir(parents=True, exist_ok=True)
        held = "another mdata dedup writes to this folder", "wait for it to end"
        with file_lock.hold(job.folder / LOCK, remove=True, held=held):
            yield


def _say_finished(job: DedupJob, progress: Progress) -> None:
    if job.options.keep_signatures and not (job.folder / SIGNATURES / SIGNED).exists():
        raise UsageError(
            f"{job.folder} is finished and kept no signatures", fix="remove it, and run this command again"
        )
    progress.note("this result is finished and made of the same input; nothing is left to do")


def _begin(job: DedupJob) -> None:
    """Make the job's folder, with a file that describes the job."""
    job.work.mkdir(parents=True, exist_ok=True)
    _say_once(job.work / "job.json", job.identity)


def _say_once(path: Path, facts: Mapping[str, Any]) -> None:
    """Write a file that every task writes, unless it exists: tasks may begin at the same time."""
    if not path.exists():
        with file_lock.wait_for(path.with_suffix(".lock")):
            if not path.exists():
                atomic_io.atomic_write(path, json.dumps(facts).encode())


def _remove_work(job: DedupJob) -> None:
    """Remove the files that stages left for each other, but not those of other jobs."""
    shutil.rmtree(job.work, ignore_errors=True)
    with suppress(OSError):
        job.work.parent.rmdir()


def _run_task(job: DedupJob, stage: Stage, task: PartNumber, progress: Progress) -> None:
    if stage == "group":
        group(job, progress)
    elif not job.done_path(stage, task).exists():
        _TASKS[stage](job, task, progress)
