"""`estimate` predicts the size and time of a run from a sample of its input; nothing is written.

Chunks at equal distances over all inputs are tokenized in this process, and the results are scaled to the whole.
Compressed files are sampled only at their beginning, because reading cannot start in the middle.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mdata.errors import UsageError
from mdata.preprocessing.encode import EncodedChunk, encode_chunk
from mdata.preprocessing.plan import JobPlan, plan_job, printable_path
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk, chunks
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import STDIN, SourceFile, find_inputs
from mdata.util.machine_limits import usable_cores

_SAMPLE_CHUNKS = 16
_SAMPLE_S = 10.0
_STREAM_BYTES = 16 << 20
# The time to start a worker process: interpreter, imports and tokenizer (measured).
_WORKER_START_S = 0.5


class SampledFile(NamedTuple):
    """A file that would be read; `path` is printable."""

    path: str
    size_bytes: int
    format: str
    compression: str


@dataclass(frozen=True)
class Estimate:
    """The expected size and time of a run.

    Attributes:
        input_bytes: of all inputs on disk.
        sampled_bytes: how many of them were sampled.
        documents, tokens, bad_rows, filtered_rows: expected numbers.
        output_bytes: expected size of all .bin and .idx.
        work_s: expected time of all workers together, in seconds.
        wall_s: expected time with `workers` workers.
        workers: as in the options.
        best_workers: more than these would not help on this machine.
        files: the inputs, in the order in which they would be read.
        left_out: the number of names in folders that would be skipped, by reason.
    """

    input_bytes: int
    sampled_bytes: int
    documents: int
    tokens: int
    bad_rows: int
    output_bytes: int
    work_s: float
    wall_s: float
    workers: int
    best_workers: int
    filtered_rows: int = 0
    files: tuple[SampledFile, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def estimate(options: PreprocessOptions, progress: Progress = SILENT) -> Estimate:
    """Predict size and time of `preprocess` with these options.

    Raises:
        UsageError: unusable options, input or tokenizer, or standard input, which cannot be sampled.
    """
    check_options(options)
    if options.shard is not None:
        raise UsageError(
            f"--dry-run cannot be combined with --shard {options.shard}",
            expected="the whole job: the estimate samples all of its input",
            fix="leave --shard out; each of N parts takes about an N-th of the time",
        )
    chosen = PathFilter(options.include, options.exclude)
    inputs = find_inputs(options.inputs, format=options.input_format, filter=chosen, progress=progress)
    files = inputs.files
    if STDIN in (file.path for file in files):
        raise UsageError("standard input can be read only once, so it cannot be sampled", fix="name files")
    job = plan_job(options, files, progress=progress)
    if options.skip or options.limit is not None:
        progress.note("the estimate is that of all rows, without skip and limit")
    progress.begin("sampling", None, unit="chunks")
    sampled: list[_Sampled] = []
    begun = time.monotonic()
    for chunk, represents, file_bytes in _sample(job):
        sampled.append(_Sampled(represents, file_bytes, encode_chunk(chunk, job.tokenizer, spec=job.spec)))
        progress.advance(1)
        if time.monotonic() - begun > _SAMPLE_S:
            break
    progress.end()
    listed = tuple(
        SampledFile(printable_path(file.path), file.size_bytes, file.format, file.compression) for file in files
    )
    return replace(
        _scaled(job, sampled),
        files=listed,
        left_out={str(reason): count for reason, count in inputs.skipped.counts.items()},
    )


class _Sampled(NamedTuple):
    """A tokenized chunk, the bytes of input that it represents, and its own bytes."""

    represents: float
    file_bytes: float
    encoded: EncodedChunk


def _sample(job: JobPlan) -> Iterator[tuple[Chunk, float, float]]:
    """Chunks, the bytes of input that each represents, and its own; all of a small input, otherwise evenly spread."""
    unit, total = job.options.chunk_bytes, job.input_bytes
    small = total <= _SAMPLE_CHUNKS * unit
    share = unit if small else total / _SAMPLE_CHUNKS
    before = 0
    for file in job.files:
        after = before + file.size_bytes
        # Offsets at equal distances over all inputs, and the chunks that contain them.
        if small:
            offsets = list(range(0, file.size_bytes, unit))
        else:
            first = math.ceil(before / share)
            offsets = [int(n * share) - before for n in range(first, math.ceil(after / share))]
        before = after
        times_by_chunk = Counter(0 if file.streamed else offset // unit for offset in offsets)
        for number, times in times_by_chunk.items():
            chunk, file_bytes = _chunk(job, file, number=number)
            if chunk is not None:
                own = file.size_bytes if file.streamed else file_bytes
                yield chunk, own if small else times * share, file_bytes


def _chunk(job: JobPlan, file: SourceFile, *, number: int) -> tuple[Chunk | None, float]:
    """A chunk, and its bytes on disk.

    A stream is decompressed well beyond its first chunk, because the number of bytes read from disk is only known
    roughly.
    """
    first: Chunk | None = None
    text_bytes = file_bytes = 0
    with closing(chunks([file], job.options.chunk_bytes, spec=job.spec.read, start=(0, number))) as remaining:
        for chunk in remaining:
            if not file.streamed:
                return chunk, chunk.file_bytes
            first = first or chunk
            text_bytes += len(chunk.data or b"")
            file_bytes += chunk.file_bytes
            if text_bytes >= _STREAM_BYTES:
                break
    share = len(first.data or b"") / text_bytes if first and text_bytes else 1.0
    return first, file_bytes * share


def _scaled(job: JobPlan, sampled: list[_Sampled]) -> Estimate:
    covered = sum(sample.represents for sample in sampled)
    scale = job.input_bytes / covered if covered else 0.0

    def total(amount: Callable[[EncodedChunk], float]) -> float:
        return scale * sum(amount(sample.encoded) * sample.represents / max(sample.file_bytes, 1) for sample in sampled)

    def index_bytes(encoded: EncodedChunk) -> int:
        return sum(12 * len(part.lengths) + 8 * len(part.document_ends) for part in encoded.by_key)

    work_s = total(lambda encoded: sum(encoded.seconds))
    useful = max(1, min(usable_cores(), int(work_s / _WORKER_START_S)))
    if not any(file.streamed for file in job.files):
        useful = max(1, min(useful, -(-job.input_bytes // job.options.chunk_bytes)))
    workers = job.options.workers
    output = total(lambda encoded: index_bytes(encoded) + sum(part.tokens.nbytes for part in encoded.by_key))
    return Estimate(
        input_bytes=job.input_bytes,
        sampled_bytes=min(job.input_bytes, round(sum(sample.file_bytes for sample in sampled))),
        documents=round(total(lambda encoded: len(encoded.kept))),
        tokens=round(total(lambda encoded: sum(len(part.tokens) for part in encoded.by_key))),
        bad_rows=round(total(lambda encoded: len(encoded.bad_rows))),
        output_bytes=round(output * (2 if job.partitions.count > 1 else 1)),
        work_s=work_s,
        wall_s=work_s / min(workers, useful) + (_WORKER_START_S if workers > 1 else 0),
        workers=workers,
        best_workers=useful,
        filtered_rows=round(total(lambda encoded: encoded.rows - len(encoded.kept) - len(encoded.bad_rows))),
    )
