"""From the words of a command to a job in parts: whatever would fail in every part fails here, once.

Inputs, options and tokenizer are checked as a part would check them, before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from mdata.cleaning.text_job import TextJobOptions, TextWork, check_parts
from mdata.dedup.plan import ALL, DedupJob, DedupOptions
from mdata.errors import UsageError
from mdata.launching.job_folder import DedupStages, Job, MergeHow
from mdata.object_storage.address import is_address
from mdata.preprocessing.partitions import Partitions
from mdata.preprocessing.parts import MOST_PARTS, check_divisible
from mdata.preprocessing.plan import plan_job
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options
from mdata.preprocessing.uploads import Uploads
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import find_inputs


def plan_launch(
    words: Sequence[str], options: PreprocessOptions, *, num_parts: int, merge: MergeHow, progress: Progress = SILENT
) -> Job:
    """The job of `preprocess` in parts.

    Args:
        words: of the command line, "preprocess" first.
        options: what they mean.
        num_parts: how many parts.
        merge: how they are joined.
        progress: receives notes on inputs and tokenizer.

    Raises:
        UsageError: options, inputs or a tokenizer that a part could not use.
    """
    _check_count("parts", num_parts)
    if options.shard is not None:
        raise UsageError(f"--shard {options.shard}: the launcher gives each part its number", fix="leave it out")
    check_options(options)
    planned = Uploads(options, progress).local_options if is_address(options.output_prefix) else options
    chosen = PathFilter(options.include, options.exclude)
    files = find_inputs(options.inputs, format=options.input_format, filter=chosen, progress=progress).files
    check_divisible(replace(options, shard=f"1/{num_parts}"), files)
    plan_job(replace(planned, workers=1), files, progress=progress)
    held_out = Fraction(options.holdout) > 0
    prefixes = Partitions(1, None, held_out).prefixes(replace(options, output_prefix="x"))
    return Job(
        words=tuple(words),
        cwd=str(Path.cwd()),
        num_parts=num_parts,
        merge=merge,
        output_prefix=options.output_prefix,
        results=tuple(prefix.name.removeprefix("x_") for prefix in prefixes.values()),
        input_bytes=sum(file.size_bytes for file in files),
        work_folder=options.work_folder,
    )


def plan_dedup(
    words: Sequence[str], options: DedupOptions, *, num_parts: int, ranges: int = 0, progress: Progress = SILENT
) -> Job:
    """The job of the stages of `dedup`, see mdata/dedup/dedup.py.

    Args:
        words: of the command line, "dedup" first.
        options: what they mean.
        num_parts: tasks of the stages that read the input. ranges: tasks of `match`; 0: one for each band and one for
            equal texts.
        progress: receives notes on inputs.

    Raises:
        UsageError: options or inputs that a task could not use, or the output folder holds another result.
    """
    ranges = ranges or 1 + options.bands
    _check_count("parts", num_parts)
    _check_count("ranges", ranges)
    if options.shard != ALL or options.parts or options.ranges:
        raise UsageError("the launcher gives each task its number", fix="leave --shard, --parts and --ranges out")
    job = DedupJob(options, progress)
    job.is_finished()
    return Job(
        words=tuple(words),
        cwd=str(Path.cwd()),
        num_parts=num_parts,
        merge="none",
        output_prefix=str(options.output),
        results=(),
        input_bytes=sum(file.size_bytes for file in job.files),
        dedup=DedupStages(job.name, options.stages, ranges),
    )


def plan_text_job(
    words: Sequence[str], options: TextJobOptions, work: TextWork, *, num_parts: int, progress: Progress = SILENT
) -> Job:
    """The job of a command on texts in parts, each with its own folder below the output.

    Args:
        words: of the command line, one of TEXT_JOBS first.
        options, work: what they mean.
        num_parts: how many parts.
        progress: receives notes on inputs.

    Raises:
        UsageError: options or inputs that a part could not use, or a part of another job is finished there.
    """
    _check_count("parts", num_parts)
    if options.shard is not None:
        raise UsageError(f"--shard {options.shard}: the launcher gives each part its number", fix="leave it out")
    return Job(
        words=tuple(words),
        cwd=str(Path.cwd()),
        num_parts=num_parts,
        merge="none",
        output_prefix=str(options.output),
        results=(),
        input_bytes=check_parts(options, work, num_parts, progress),
    )


def _check_count(name: str, count: int) -> None:
    if not 1 <= count <= MOST_PARTS:
        raise UsageError(f"{name}={count}", expected=f"1 to {MOST_PARTS}")
