"""`estimate`: what a run would give and take, from a sample of its input; nothing is written.

Pieces are taken at even distances over all inputs and tokenized in this process; rates and ratios of the
sample stand for the whole. Of packed files only the beginning is seen, because they cannot be entered in the
middle.
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
from mdata.preprocessing.encode import EncodedPiece, encode_piece
from mdata.preprocessing.plan import Job, plan_job, printable_path
from mdata.preprocessing.preprocess_options import PreprocessOptions, check_options, input_filter
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Piece, pieces
from mdata.sources.input_files import STDIN, SourceFile, find_inputs
from mdata.util.cpu_limit import usable_cores

_SAMPLE_PIECES = 16
_SAMPLE_S = 10.0
_STREAM_BYTES = 16 << 20
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
        files: the inputs, in the order in which they would be read: path, bytes, format, how they are packed.
        left_out: names in folders that would not be read: how many for each reason.
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
    files: tuple[tuple[str, int, str, str], ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)


def estimate(options: PreprocessOptions, progress: Progress = SILENT) -> Estimate:
    """Predict size and time of `preprocess` with these options.

    Raises:
        UsageError: options, input or tokenizer that cannot be used, or nothing to sample.
    """
    check_options(options)
    inputs = find_inputs(options.input, format=options.input_format, chosen=input_filter(options), progress=progress)
    files = inputs.files
    if STDIN in (file.path for file in files):
        raise UsageError("standard input is read once only and cannot be sampled", fix="name files")
    job = plan_job(options, files, progress=progress)
    progress.begin("sampling", None, unit="pieces")
    seen: list[_Seen] = []
    begun = time.monotonic()
    for piece, stands_for, file_bytes in _sample(job):
        seen.append(_Seen(stands_for, file_bytes, encode_piece(piece, job.tokenizer, spec=job.spec)))
        progress.advance(1)
        if time.monotonic() - begun > _SAMPLE_S:
            break
    progress.end()
    listed = tuple((printable_path(file.path), file.size_bytes, file.format, file.compression) for file in files)
    return replace(
        _scaled(job, seen),
        files=listed,
        left_out={str(reason): count for reason, count in inputs.left_out.counts.items()},
    )


class _Seen(NamedTuple):
    """A piece that was tokenized, the bytes of input that it stands for, and its own."""

    stands_for: float
    file_bytes: float
    encoded: EncodedPiece


def _sample(job: Job) -> Iterator[tuple[Piece, float, float]]:
    """Pieces, the bytes of the input that each stands for, and its own; all of a small input, else evenly."""
    unit, total = job.options.piece_bytes, job.input_bytes
    small = total <= _SAMPLE_PIECES * unit
    share = unit if small else total / _SAMPLE_PIECES
    before = 0
    for file in job.files:
        after = before + file.size_bytes
        # Places at even distances over all inputs, and the pieces in which they lie.
        if small:
            places = list(range(0, file.size_bytes, unit))
        else:
            first = math.ceil(before / share)
            places = [int(n * share) - before for n in range(first, math.ceil(after / share))]
        before = after
        found = Counter(0 if file.streamed else place // unit for place in places)
        for number, times in found.items():
            piece, file_bytes = _piece(job, file, number=number)
            if piece is not None:
                own = file.size_bytes if file.streamed else file_bytes
                yield piece, own if small else times * share, file_bytes


def _piece(job: Job, file: SourceFile, *, number: int) -> tuple[Piece | None, float]:
    """A piece, and the bytes on disk that it takes up.

    A stream is unpacked a good way beyond its first piece, because how much of it was read from disk is known
    only coarsely.
    """
    first: Piece | None = None
    text_bytes = file_bytes = 0
    with closing(pieces([file], job.options.piece_bytes, spec=job.spec.read, start=(0, number))) as found:
        for piece in found:
            if not file.streamed:
                return piece, piece.file_bytes
            first = first or piece
            text_bytes += len(piece.data or b"")
            file_bytes += piece.file_bytes
            if text_bytes >= _STREAM_BYTES:
                break
    share = len(first.data or b"") / text_bytes if first and text_bytes else 1.0
    return first, file_bytes * share


def _scaled(job: Job, seen: list[_Seen]) -> Estimate:
    covered = sum(one.stands_for for one in seen)
    whole = job.input_bytes / covered if covered else 0.0

    def total(amount: Callable[[EncodedPiece], float]) -> float:
        return whole * sum(amount(one.encoded) * one.stands_for / max(one.file_bytes, 1) for one in seen)

    def index_bytes(encoded: EncodedPiece) -> int:
        return sum(12 * len(part.lengths) + 8 * len(part.document_ends) for part in encoded.parts)

    work_s = total(lambda encoded: sum(encoded.seconds))
    useful = max(1, min(usable_cores(), int(work_s / _WORKER_START_S)))
    if not any(file.streamed for file in job.files):
        useful = max(1, min(useful, -(-job.input_bytes // job.options.piece_bytes)))
    workers = job.options.workers
    output = total(lambda encoded: index_bytes(encoded) + sum(part.tokens.nbytes for part in encoded.parts))
    return Estimate(
        input_bytes=job.input_bytes,
        sampled_bytes=min(job.input_bytes, round(sum(one.file_bytes for one in seen))),
        documents=round(total(lambda encoded: len(encoded.kept))),
        tokens=round(total(lambda encoded: sum(len(part.tokens) for part in encoded.parts))),
        bad_rows=round(total(lambda encoded: len(encoded.problems))),
        output_bytes=round(output * (2 if job.routes.partitions > 1 else 1)),
        work_s=work_s,
        wall_s=work_s / min(workers, useful) + (_WORKER_START_S if workers > 1 else 0),
        workers=workers,
        best_workers=useful,
    )
