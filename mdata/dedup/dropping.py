"""Writes the rows that stay as lines of JSON, for programs that cannot skip rows themselves.

A line of JSON is kept byte for byte, bad ones included; rows of other formats become {"text": ...}, without their other
columns. A part is one file, a zstd frame for each chunk, so that its bytes do not depend on threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import orjson
import zstandard

from mdata.dedup.plan import DedupJob, text_path
from mdata.dedup.row_set import RowSet
from mdata.dedup.signing import in_threads
from mdata.errors import UsageError
from mdata.progress import Progress
from mdata.sources.chunk import Chunk, chunk_digest, read_chunk
from mdata.sources.jsonl import split_lines
from mdata.sources.parse import parse
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io, file_lock

_LEVEL = 3


def drop(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Write the rows of a part that stay, unless its file exists.

    Raises:
        UsageError: the result does not exist, the input has changed, there are parts of another division, or another
            process writes this one.
    """
    if not job.is_finished():
        raise UsageError(f"{job.folder} has no result yet", fix="mdata dedup group comes first, with the same options")
    path = text_path(job.folder, task)
    path.parent.mkdir(exist_ok=True)
    if others := [other.name for other in path.parent.glob("*.jsonl.zst") if not other.name.endswith(path.name[5:])]:
        fix = f"remove {path.parent}, or give the same number of parts"
        raise UsageError(f"{path.parent} has parts of another division", found=sorted(others)[0], fix=fix)
    held = "another process writes this part", "wait for it to end"
    with file_lock.hold(path.with_suffix(".lock"), remove=True, held=held):
        if not path.exists():
            _write(job, task, path, progress)


def _write(job: DedupJob, task: PartNumber, path: Path, progress: Progress) -> None:
    rows = RowSet.open(job.folder)
    sources = [file for number, file in job.files_of(task) if number >= job.num_known]
    removed = [rows.rows_of(file).removed for file in sources]
    firsts, digests = list[Sequence[int]](), list[Sequence[bytes]]()
    for file in sources:
        chunks = rows.chunks_of(rows.number_of(file))
        begin, end = (file.section[0], file.section[1]) if file.section else (0, len(chunks) * rows.chunk_bytes)
        chunks = chunks[begin // rows.chunk_bytes : -(-end // rows.chunk_bytes)]
        firsts.append(np.cumsum([0, *chunks["rows"].tolist()]).tolist())
        digests.append([digest.tobytes() for digest in chunks["digest"]])

    def kept(chunk: Chunk) -> bytes:
        data = read_chunk(chunk, job.spec)
        if chunk_digest(data) != digests[chunk.file_number][chunk.number]:
            raise UsageError(f"{chunk.source.path} has changed since mdata dedup read it", fix="run mdata dedup again")
        first, stop = firsts[chunk.file_number][chunk.number : chunk.number + 2]
        stays = ~removed[chunk.file_number][first:stop]
        if chunk.source.format in ("jsonl", "tar"):
            lines = [line for line, is_kept in zip(split_lines(data), stays.tolist(), strict=True) if is_kept]
        else:
            batch = parse(chunk.source.format, data, spec=job.spec)
            numbers = range(1, batch.rows + 1) if batch.kept is None else batch.kept
            texts = zip(numbers, batch.columns[0].sentences, strict=True)
            lines = [orjson.dumps({"text": text}) for number, text in texts if stays[number - 1]]
        text = b"".join(line + b"\n" for line in lines)
        return zstandard.ZstdCompressor(_LEVEL).compress(text) if text else b""

    progress.begin("writing what stays", sum(file.disk_bytes for file in sources), unit="B")
    with atomic_io.atomic_file(path) as fd:
        for chunk, packed in in_threads(job, sources, (0, 0), kept):
            atomic_io.write_all(fd, packed)
            progress.advance(chunk.file_bytes)
    progress.end()
