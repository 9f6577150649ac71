"""`estimate`: what a run would give and take, from a sample of its input; nothing is written.

Pieces are taken at even distances over all inputs and tokenized in this process; rates and ratios of the
sample stand for the whole. Of packed files only the beginning is seen, because they cannot be entered in the
middle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

from mdata.cores import usable_cores
from mdata.errors import UsageError
from mdata.preprocess.encode import EncodedPiece, encode_piece
from mdata.preprocess.job import Job, plan_job
from mdata.preprocess.options import PreprocessOptions, check_options
from mdata.progress import SILENT, Progress
from mdata.sources import STDIN, Piece, find_files, pieces

_SAMPLE_PIECES = 16
_SAMPLE_S = 10.0
# What starting an interpreter, its imports and a tokenizer took in a worker process (half a second, measured).
_WORKER_START_S = 0.5


@dataclass(frozen=True)
class Estimate:
    """What a sample says of the whole.

    Attributes:
        input_bytes: of all inputs, as they lie on disk.
        sampled_bytes: of them, seen.
        documents, tokens, bad_rows: expected in all.
        output_bytes: expected size of all .bin and .idx.
        work_s: expected work of all workers together, in seconds.
        wall_s: expected time with `workers` workers.
        workers: as asked.
        best_workers: beyond which more would not help here.
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


def estimate(options: PreprocessOptions, progress: Progress = SILENT) -> Estimate:
    """Predict size and time of `preprocess` with these options.

    Raises:
        UsageError: options, input or tokenizer that cannot be used, or nothing to sample.
    """
    check_options(options)
    files = find_files(options.input, format=options.input_format)
    if STDIN in (file.path for file in files):
        raise UsageError("standard input is read once only and cannot be sampled", fix="name files")
    job = plan_job(options, files, progress=progress)
    chosen = list(_sample(job))
    progress.begin("sampling", len(chosen), unit="blocks")
    seen: list[tuple[Piece, EncodedPiece]] = []
    begun = time.monotonic()
    for piece in chosen:
        seen.append((piece, encode_piece(piece, job.tokenizer, spec=job.spec)))
        progress.advance(1)
        if time.monotonic() - begun > _SAMPLE_S:
            break
    progress.end()
    return _scaled(job, seen)


def _sample(job: Job) -> Iterator[Piece]:
    """Pieces at even distances; of each stream that is met its first."""
    unit = job.options.unit_bytes
    total = job.input_bytes
    wanted = [total * number // _SAMPLE_PIECES for number in range(_SAMPLE_PIECES)]
    before = 0
    for file in job.files:
        inside = sorted({(place - before) // unit for place in wanted if before <= place < before + file.size_bytes})
        before += file.size_bytes
        for piece in inside[:1] if file.streamed else inside:
            start = (0, 0 if file.streamed else piece)
            with closing(pieces([file], unit, spec=job.spec.read, start=start)) as found:
                yield from islice(found, 1)


def _scaled(job: Job, seen: list[tuple[Piece, EncodedPiece]]) -> Estimate:
    sampled = sum(piece.file_bytes for piece, _ in seen)
    scale = job.input_bytes / sampled if sampled else 0.0
    parts = [part for _, encoded in seen for part in encoded.parts]
    tokens = sum(len(part.tokens) for part in parts)
    index_bytes = sum(12 * len(part.lengths) + 8 * len(part.document_ends) for part in parts)
    bin_bytes = sum(part.tokens.nbytes for part in parts)
    work_s = sum(sum(encoded.seconds) for _, encoded in seen) * scale
    useful = max(1, min(usable_cores(), int(work_s / _WORKER_START_S)))
    if not any(file.streamed for file in job.files):
        useful = max(1, min(useful, -(-job.input_bytes // job.options.unit_bytes)))
    workers = job.options.workers
    return Estimate(
        input_bytes=job.input_bytes,
        sampled_bytes=sampled,
        documents=round(sum(len(encoded.kept) for _, encoded in seen) * scale),
        tokens=round(tokens * scale),
        bad_rows=round(sum(len(encoded.problems) for _, encoded in seen) * scale),
        output_bytes=round((bin_bytes + index_bytes) * scale * (2 if job.routes.partitions > 1 else 1)),
        work_s=work_s,
        wall_s=work_s / min(workers, useful) + (_WORKER_START_S if workers > 1 else 0),
        workers=workers,
        best_workers=useful,
    )
