"""Text in, text out: rows of the input are kept, changed, divided or removed by a piece of work on texts.

Each input file becomes a file of lines of JSON in the output folder, in the order of its rows. A row that is kept as it
is stays byte for byte if it was a line of JSON; other rows of jsonl keep their other fields, and rows of other formats
become {"text": ...}. Compressed output is one frame for each chunk of the input.

Chunks are worked on by preprocess's workers; their results come in order, so files do not depend on workers. Everything
is written below `.work`; a record there says how far the files on disk go, and an interrupted command continues from
it. At the end the files get their names in the output folder, which the record announces first, and the report is
written last: a folder with a report is complete.

If the work only removes rows, nothing need be copied: `rows_only` writes the removed rows for `preprocess --skip-rows`.
"""

from __future__ import annotations

import gzip
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import orjson
import zstandard
from blake3 import blake3

from mdata.dedup.plan import read_facts, refuse_other_result
from mdata.dedup.row_set import CHUNK, FACTS, ReadFile, footer_hash, path_of, write_row_set
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.indexed.append_file import AppendFile, SyncPoint
from mdata.preprocessing.bad_rows import BadRowPolicy, check_bad_row_options
from mdata.preprocessing.parts import parse_shard, part_folder, part_name
from mdata.preprocessing.plan import printable_path
from mdata.preprocessing.worker_pool import WorkerPool
from mdata.progress import SILENT, Progress
from mdata.sources.chunk import Chunk, chunk_digest, chunks, read_chunk
from mdata.sources.folder_files import PathFilter
from mdata.sources.input_files import (
    ENDINGS,
    STDIN,
    TEXT_FORMATS,
    Format,
    SourceFile,
    check_unchanged,
    find_inputs,
)
from mdata.sources.json_rows import dump_row, load_row
from mdata.sources.jsonl import split_lines
from mdata.sources.parse import parse
from mdata.sources.record_batch import BadRow, ReadSpec, in_members
from mdata.sources.row_filter import parse_filter
from mdata.sources.sections import files_of_part
from mdata.util import atomic_io, file_lock
from mdata.util.machine_limits import usable_cores
from mdata.version import __version__

WORK, LOCK = ".work", ".lock"
BLOCK_BYTES = 1 << 22  # of a chunk, as in preprocess, so that its hashes of files are the same
_CHECKPOINT_S = 5.0
_ENDING = {"none": "", "gzip": ".gz", "zstd": ".zst"}
_ZSTD_LEVEL, _GZIP_LEVEL = 3, 6


@dataclass(frozen=True, kw_only=True)
class TextJobOptions:
    """The input and output of a job, and its options.

    Args:
        input: files, folders or patterns of texts, as for `preprocess`.
        output: a folder for the result.
        include, exclude: patterns for files in folders.
        json_key: the key or column that holds the text. input_format: "auto" decides by name and content.
        text_documents: a document of plain text is a file, or a paragraph.
        where: a filter on the rows to read, as in `preprocess`.
        compression: of the output.
        removed: a file for removed rows, as lines of JSON with file, row, reason and text.
        rows_only: write only which rows are removed, no texts.
        on_error, quarantine, max_errors, max_record_bytes: bad rows, as in `preprocess`.
        shard: "3/64": do the third of 64 parts of the job, in a folder of its own below the output. Rows count from the
            beginning of the part's section of a file.
        workers: processes; the result is the same.
    """

    input: str | Path | Sequence[str | Path]
    output: str | Path
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    json_key: str = "text"
    input_format: Any = "auto"
    text_documents: Any = "file"
    where: str | None = None
    compression: Literal["none", "gzip", "zstd"] = "none"
    removed: str | None = None
    rows_only: bool = False
    on_error: Literal["stop", "skip", "quarantine"] = "stop"
    quarantine: str | None = None
    max_errors: str | None = None
    max_record_bytes: int = 64 << 20
    shard: str | None = None
    workers: int = 0

    def __post_init__(self) -> None:
        if self.compression not in _ENDING:
            raise UsageError(f"compression={self.compression}", expected=", ".join(_ENDING))
        if self.workers < 0:
            raise UsageError(f"workers is {self.workers}", expected="at least 1, or 0 for all cores")
        if self.max_record_bytes < 1:
            raise UsageError(f"max_record_bytes is {self.max_record_bytes}", expected="at least 1")
        check_bad_row_options(self)
        if self.rows_only and self.where is not None:
            raise UsageError("rows_only counts all rows", fix="leave where out, and give it to preprocess")
        if self.shard is not None and self.rows_only:
            raise UsageError(
                "rows_only counts the rows of whole files, which shard divides", fix="leave one of them out"
            )
        for name in ("removed", "quarantine"):
            path = getattr(self, name)
            if path is not None and Path(self.output).resolve() in Path(path).resolve().parents:
                raise UsageError(f"{name}={path} would be an input of what reads {self.output}", fix="another folder")

    @cached_property
    def inputs(self) -> tuple[str | Path, ...]:
        """`input` as a sequence."""
        return (self.input,) if isinstance(self.input, str | Path) else tuple(self.input)

    @property
    def content(self) -> dict[str, Any]:
        """The options that decide the result, besides the work and the files."""
        names: tuple[str, ...] = (
            "json_key",
            "input_format",
            "text_documents",
            "where",
            "rows_only",
            "max_record_bytes",
            "on_error",
        )
        names += ("compression", "removed", "quarantine", *(["shard"] if self.shard else []))
        return {name: getattr(self, name) for name in names}


class Edit(NamedTuple):
    """The result for a row.

    Args:
        reason: why it is removed; "": it stays.
        texts: those that replace it; None: unchanged.
        lines: the lines to write for it; None: the job makes them.
        about: fields of a removed record, for the file of removed ones.
    """

    reason: str = ""
    texts: Sequence[str] | None = None
    lines: Sequence[bytes] | None = None
    about: Mapping[str, Any] | None = None


KEEP = Edit()


class TextWork(Protocol):
    """Work on the texts of a chunk; it is pickled for the workers."""

    @property
    def name(self) -> str:
        """The command, and the name of its report."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Further keys or columns that it needs."""

    @property
    def writes(self) -> bool:
        """Whether it writes texts."""

    def record(self) -> dict[str, Any]:
        """Its options and versions, which decide the result, as JSON.

        Raises:
            UsageError: something that it needs is missing.
        """

    def prepare(self) -> None:
        """Load what the worker needs."""

    def edit(self, batch: TextBatch) -> tuple[list[Edit], Counter[str]]:
        """The result for each row, and counts for the report."""

    def summary(self, counts: Counter[str]) -> dict[str, Any]:
        """The counts of all chunks, for the report."""


class RecordEdits(NamedTuple):
    """The results for the records of a chunk, as (number from 1, edit), and the records that cannot be read.

    Records that are in neither were left out and count as filtered.
    """

    rows: int
    edits: Sequence[tuple[int, Edit]]
    bad_rows: Sequence[BadRow]


@runtime_checkable
class RecordWork(TextWork, Protocol):
    """Work on records that are not yet texts; its edits have lines."""

    @property
    def formats(self) -> tuple[Format, ...]:
        """The formats that it reads."""

    def edit_records(self, chunk: Chunk, data: bytes, spec: ReadSpec) -> RecordEdits:
        """The result for each record of a chunk."""


class TextBatch(NamedTuple):
    """The good rows of a chunk.

    Args:
        num_rows: of the chunk, bad ones included. rows: numbers of the good ones, from 1. key: of the texts. others:
            the texts of `TextWork.keys`. fields: all fields of good row i.
    """

    chunk: Chunk
    num_rows: int
    key: str
    rows: Sequence[int]
    texts: list[str]
    others: Sequence[list[str]]
    fields: Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class TextJobResult:
    """The counts of a finished job.

    Args:
        folder: the output. rows: of the input. kept: rows that stay, changed or not. changed: changed ones among these.
        removed: rows, by reason. bad, filtered: rows that were not processed. summary: of the work.
    """

    folder: Path
    rows: int
    kept: int
    changed: int
    removed: Mapping[str, int]
    bad: int
    filtered: int
    summary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _RemovedLines:
    """The lines of removed rows as arrays, which leave a worker without being copied.

    Args:
        content: uint8, the lines one after the other, each without its beginning.
        ends, rows: int64[lines], where each ends in `content`, and its row from 1.
    """

    content: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]

    @classmethod
    def packed(cls, lines: list[bytes], rows: list[int]) -> _RemovedLines:
        """Pack lines and their rows."""
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
        return cls(np.frombuffer(b"".join(lines), np.uint8), ends, np.array(rows, np.int64))

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Each row and its line."""
        content, begin = self.content.tobytes(), 0
        for row, end in zip(self.rows.tolist(), self.ends.tolist(), strict=True):
            yield row, content[begin:end]
            begin = end


@dataclass(frozen=True)
class _Edited:
    """The result of a chunk.

    Args:
        rows: of the chunk. digest: its hash. gone: bool[rows], the removed ones.
        output: uint8, bytes for the output file. removed: the lines of removed rows, if requested.
        bad_rows: in order. filtered, changed: rows. reasons: of the removed rows. counts: of the work.
    """

    rows: int
    digest: bytes
    gone: npt.NDArray[np.bool_]
    output: npt.NDArray[np.uint8]
    removed: _RemovedLines
    bad_rows: tuple[BadRow, ...]
    filtered: int
    changed: int
    reasons: Counter[str]
    counts: Counter[str]


class _RowEdits:
    """Collects the results for the rows of a chunk."""

    def __init__(self, num_rows: int, options: TextJobOptions) -> None:
        self.options = options
        self.lines = list[bytes]()
        self.changed = 0
        self._gone = np.zeros(num_rows, np.bool_)
        self._reasons = Counter[str]()
        self._removed, self._removed_rows = list[bytes](), list[int]()

    def remove(self, row: int, reason: str, about: Mapping[str, Any]) -> None:
        """Remove a row, counted from 1; `about` is for the file of removed ones."""
        self._gone[row - 1] = True
        self._reasons[reason] += 1
        if self.options.removed:
            self._removed_rows.append(row)
            self._removed.append(orjson.dumps({"reason": reason, **about})[1:] + b"\n")

    def result(self, data: bytes, bad_rows: Sequence[BadRow], *, num_edited: int, counts: Counter[str]) -> _Edited:
        """The result of a chunk with this content, of which `num_edited` rows were worked on."""
        num_rows = len(self._gone)
        content = b"\n".join((*self.lines, b"")) if self.lines else b""
        return _Edited(
            num_rows,
            chunk_digest(data),
            self._gone,
            np.frombuffer(_compressed(content, self.options.compression), np.uint8),
            _RemovedLines.packed(self._removed, self._removed_rows),
            tuple(bad_rows),
            num_rows - num_edited - len(bad_rows),
            self.changed,
            self._reasons,
            counts,
        )


@dataclass(frozen=True)
class _OnChunks:
    """A `ChunkWork` for workers (mdata/preprocessing/fork_server.py) that does some `TextWork`."""

    work: TextWork
    spec: ReadSpec
    options: TextJobOptions

    def prepare(self) -> None:
        self.work.prepare()

    def __call__(self, chunk: Chunk) -> _Edited:
        data = read_chunk(chunk, self.spec)
        if isinstance(self.work, RecordWork):
            return self._edited_records(chunk, data, self.work)
        batch = parse(chunk.source.format, data, spec=self.spec)
        lines = split_lines(data) if chunk.source.format in ("jsonl", "tar") else None
        rows = list(range(1, batch.rows + 1)) if batch.kept is None else batch.kept
        texts, *others = (column.sentences for column in batch.columns)

        def fields(number: int) -> dict[str, Any]:
            if lines is None:
                return {key: column[number] for key, column in zip(self.spec.json_keys, (texts, *others), strict=True)}
            return load_row(lines[rows[number] - 1])

        edits, counts = self.work.edit(
            TextBatch(chunk, batch.rows, self.spec.json_keys[0], rows, texts, others, fields)
        )
        row_edits = _RowEdits(batch.rows, self.options)
        for number, (row, edit) in enumerate(zip(rows, edits, strict=True)):
            if edit.reason:
                row_edits.remove(row, edit.reason, {"text": texts[number]})
                continue
            row_edits.changed += edit.texts is not None
            if self.options.rows_only or not self.work.writes:
                continue
            if edit.lines is not None:
                row_edits.lines += edit.lines
            elif edit.texts is None:
                row_edits.lines.append(dump_row(fields(number)) if lines is None else lines[row - 1])
            else:
                key = self.spec.json_keys[0]
                row_edits.lines += [dump_row(_with_text(fields(number), key, text)) for text in edit.texts]
        bad_rows = in_members(batch.bad_rows, chunk.members)
        return row_edits.result(data, bad_rows, num_edited=len(rows), counts=counts)

    def _edited_records(self, chunk: Chunk, data: bytes, work: RecordWork) -> _Edited:
        records = work.edit_records(chunk, data, self.spec)
        row_edits = _RowEdits(records.rows, self.options)
        for row, edit in records.edits:
            row_edits.lines += edit.lines or ()
            if edit.reason:
                row_edits.remove(row, edit.reason, edit.about or {})
            else:
                row_edits.changed += 1
        return row_edits.result(data, records.bad_rows, num_edited=len(records.edits), counts=Counter())


def _with_text(record: dict[str, Any], key: str, text: str) -> dict[str, Any]:
    """The record with another text; a dotted key that is not a key itself is a path through objects."""
    inner = record
    *levels, last = [key] if key in record else key.split(".")
    for level in levels:
        inner = inner[level]
    inner[last] = text
    return record


def _compressed(content: bytes, compression: str) -> bytes:
    if not content or compression == "none":
        return content
    if compression == "gzip":
        return gzip.compress(content, _GZIP_LEVEL, mtime=0)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(content)


@dataclass
class _State:
    """How far the files on disk go.

    Args:
        files: those begun; the last may be incomplete. digests: of the chunks of the last. placing: whether files are
            getting their final names. The sync points are those of the last output and of the other files.
    """

    files: list[ReadFile] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    bad: int = 0
    filtered: int = 0
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    placing: bool = False
    output: SyncPoint | None = None
    removed: SyncPoint | None = None
    rows: SyncPoint | None = None
    chunks: SyncPoint | None = None
    quarantine: SyncPoint | None = None


def run_text_job(options: TextJobOptions, work: TextWork, progress: Progress = SILENT) -> TextJobResult:
    """Do the work on all rows; an interrupted command continues.

    Raises:
        UsageError: unusable options or input, or the folder holds a result of other options.
        BadInputError: a bad row, compressed data or parquet is damaged.
        ResourceError: the disk or memory ran out; run again to continue.
    """
    files = _inputs(options, work, progress)
    if options.shard is not None:
        options, files = _part_of(options, files)
    folder = Path(options.output)
    inside = [file for file in files if isinstance(file.path, Path) and folder.resolve() in file.path.resolve().parents]
    if inside:
        raise UsageError(f"{inside[0].path} is in the output folder", fix="give another --output")
    with os_errors_named(f"writing {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        held = f"another mdata {work.name} writes to this folder", "wait for it to end"
        with file_lock.hold(folder / LOCK, remove=True, held=held):
            job = _TextJob(options, work, files, folder, progress)
            return job.finished() or job.run()


def check_parts(options: TextJobOptions, work: TextWork, count: int, progress: Progress = SILENT) -> int:
    """Check a job that is divided into parts; returns the bytes of all inputs.

    Raises:
        UsageError: a part would be refused, or a finished part is of other input or options.
    """
    files = _inputs(options, work, progress)
    for number in range(1, count + 1):
        part = replace(options, shard=f"{number}/{count}")
        of_part, sources = _part_of(part, files)
        folder = Path(of_part.output)
        if number == 1 or (folder / f"{work.name}.report").exists():
            _TextJob(of_part, work, sources, folder, progress).report_facts()
    return sum(file.size_bytes for file in files)


def join_reports(
    options: TextJobOptions,
    work: TextWork,
    num_parts: int,
    join: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    progress: Progress = SILENT,
) -> TextJobResult:
    """Write the report of a job of finished parts beside their folders; `join` makes one summary of theirs.

    Raises:
        UsageError: a part is not finished, is of other input or options, or the folder holds another result.
    """
    job = _TextJob(options, work, files := _inputs(options, work, progress), Path(options.output), progress)
    job.made_of["parts"] = num_parts
    job.report_facts()
    results, outputs = list[dict[str, Any]](), list[dict[str, Any]]()
    for number in range(1, num_parts + 1):
        of_part, sources = _part_of(replace(options, shard=f"{number}/{num_parts}"), files)
        part = _TextJob(of_part, work, sources, Path(of_part.output), progress)
        facts = part.report_facts()
        if facts is None:
            raise UsageError(
                f"part {number} of {num_parts} is not finished", found=f"no {part.report}", fix="run it first"
            )
        results.append(facts["result"])
        outputs += [file | {"output": f"{part.folder.name}/{file['output']}"} for file in facts["files"]]
    removed = sum((Counter(result["removed"]) for result in results), Counter[str]())
    counted = {name: sum(result[name] for result in results) for name in ("rows", "kept", "changed", "bad", "filtered")}
    summary = join([result["summary"] for result in results])
    joined = {**counted, "removed": dict(sorted(removed.items())), "summary": summary}
    job.write_report(joined, outputs)
    return TextJobResult(job.folder, **joined)


def _inputs(options: TextJobOptions, work: TextWork, progress: Progress) -> Sequence[SourceFile]:
    formats = work.formats if isinstance(work, RecordWork) else TEXT_FORMATS
    chosen = PathFilter(options.include, options.exclude)
    files = find_inputs(
        options.inputs, format=options.input_format, filter=chosen, progress=progress, formats=formats
    ).files
    if any(file.path == STDIN for file in files):
        raise UsageError(f"mdata {work.name} cannot read standard input", fix="give files")
    return files


def _part_of(options: TextJobOptions, files: Sequence[SourceFile]) -> tuple[TextJobOptions, Sequence[SourceFile]]:
    """The options and files, or sections of files, of the part that `options.shard` names."""
    assert options.shard is not None, "the job is not divided"
    part = parse_shard(options.shard)
    text_is_whole = options.text_documents == "file"

    def of_part(path: str | None) -> str | None:
        return path and f"{Path(path).with_suffix('')}-{part_name(part)}{Path(path).suffix}"

    return (
        replace(
            options,
            shard=f"{part.number}/{part.count}",
            output=part_folder(options.output, part),
            removed=of_part(options.removed),
            quarantine=of_part(options.quarantine),
        ),
        files_of_part(files, part, chunk_bytes=BLOCK_BYTES, text_is_whole=text_is_whole),
    )


class _TextJob:
    """See `run_text_job`."""

    def __init__(
        self,
        options: TextJobOptions,
        work: TextWork,
        files: Sequence[SourceFile],
        folder: Path,
        progress: Progress,
    ) -> None:
        self.options, self.work, self.files = options, work, files
        self.folder, self.progress = folder, progress
        self.scratch, self.report = folder / WORK, folder / f"{work.name}.report"
        where = None if options.where is None else parse_filter(options.where)
        self.spec = ReadSpec(
            json_keys=(options.json_key, *(key for key in work.keys if key != options.json_key)),
            text_documents=options.text_documents,
            max_record_bytes=options.max_record_bytes,
            keep_bad_lines=options.on_error == "quarantine",
            sentence_lists=False,
            where=where,
            key_option="--json-key",
            keep_torn=isinstance(work, RecordWork),
        )
        made_of = {
            **options.content,
            work.name: work.record(),
            "inputs": [[path_of(file), file.size_bytes, file.modified_ns, *(file.section or ())] for file in files],
        }
        self.made_of = json.loads(json.dumps(made_of))
        self.writes = work.writes and not options.rows_only
        self.names = _output_names(files, _ENDING[options.compression])

    def report_facts(self) -> dict[str, Any] | None:
        """The report, if the result exists; refuses one of another job."""
        if not self.report.exists():
            return None
        facts = read_facts(self.report)
        refuse_other_result(self.folder, facts, self.made_of)
        return facts

    def finished(self) -> TextJobResult | None:
        """The result, if it exists; refuses one of another job."""
        facts = self.report_facts()
        if facts is None:
            return None
        self.progress.note("this result is finished and made of the same input; nothing is left to do")
        shutil.rmtree(self.scratch, ignore_errors=True)
        return TextJobResult(self.folder, **facts["result"])

    def run(self) -> TextJobResult:
        """Process the remaining input, then give the files their names."""
        state = self._resumed()
        if not state.placing:
            with closing(_Writer(self, state)) as writer:
                writer.run()
        return self._placed(state)

    def _resumed(self) -> _State:
        """The state of an interrupted run of this job; a new one otherwise."""
        path = self.scratch / "state.json"
        if path.exists():
            record = read_facts(path)
            if record.pop("made_of") == self.made_of:
                self.progress.note("continuing an interrupted run")
                record["files"] = [ReadFile(**file) for file in record["files"]]
                record |= {name: Counter(record[name]) for name in ("reasons", "counts")}
                for name in ("output", "removed", "rows", "chunks", "quarantine"):
                    record[name] = record[name] and SyncPoint(*record[name])
                return _State(**record)
            self.progress.note("the interrupted run in this folder was of other input or options; starting over")
        self._refuse_existing()
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        return _State()

    def _refuse_existing(self) -> None:
        """Refuse to replace files that this job did not make: they may be anything, such as the input or a device."""
        given = [Path(name) for name in (self.options.removed, self.options.quarantine) if name]
        in_folder = []
        if not self.scratch.exists():  # otherwise an interrupted run may have placed them
            in_folder = [self.folder / name for name in (self.names if self.writes else [])]
            in_folder += [self.folder / FACTS] if self.options.rows_only else []
        for target in (*given, *in_folder):
            if target.exists() or target.is_symlink():
                other = "another --output" if target in in_folder else "another file"
                fix = f"{other}; or remove it, if an earlier command wrote it"
                raise UsageError(f"{target} already exists, and is not replaced", fix=fix)

    def save(self, state: _State) -> None:
        """Write the state to disk."""
        record = {**vars(state), "files": [asdict(file) for file in state.files], "made_of": self.made_of}
        atomic_io.atomic_write(self.scratch / "state.json", json.dumps(record).encode())

    def _placed(self, state: _State) -> TextJobResult:
        """Give the files their names and write the report."""
        if not state.placing:
            state.placing = True
            self.save(state)
        moves = {}
        if self.writes:
            moves = {self.scratch / name: self.folder / name for name in self.names}
        for name in (self.options.removed, self.options.quarantine):
            if name is not None:
                moves[Path(name)] = Path(name)
        for path, target in moves.items():
            partial = atomic_io.partial_path(path)
            if partial.exists():
                atomic_io.rename(partial, target)
            elif not target.exists():
                shutil.rmtree(self.scratch)
                raise DamageError(f"{partial} was removed while it was being written", fix="run again")
        for parent in {target.parent for target in moves.values()}:
            atomic_io.sync_folder(parent)
        rows = sum(file.rows for file in state.files)
        removed = sum(state.reasons.values())
        result: dict[str, Any] = {
            "rows": rows,
            "kept": rows - removed - state.bad - state.filtered,
            "changed": state.changed,
            "removed": dict(sorted(state.reasons.items())),
            "bad": state.bad,
            "filtered": state.filtered,
            "summary": self.work.summary(state.counts),
        }
        if self.options.rows_only:
            gone = np.fromfile(atomic_io.partial_path(self.scratch / "rows"), np.uint8).view(np.bool_)
            read = np.fromfile(atomic_io.partial_path(self.scratch / "chunks"), CHUNK)
            write_row_set(self.folder, state.files, gone, chunks=read, chunk_bytes=BLOCK_BYTES, facts=self.facts)
        outputs = self.names if self.writes else []
        files = [asdict(file) | {"output": name} for file, name in zip(state.files, outputs, strict=False)]
        self.write_report(result, files)
        shutil.rmtree(self.scratch)
        return TextJobResult(self.folder, **result)

    @property
    def facts(self) -> dict[str, Any]:
        """The program, options and inputs that made the result."""
        return {"made_by": f"mdata {__version__}", "made_of": self.made_of}

    def write_report(self, result: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> None:
        """Write the report, which makes the folder complete."""
        text = json.dumps({**self.facts, "result": result, "files": files}, indent=1) + "\n"
        atomic_io.atomic_write(self.report, text.encode())


class _Writer:
    """Appends the results of chunks to files, and records how far they are."""

    def __init__(self, job: _TextJob, state: _State) -> None:
        self.job, self.state = job, state
        options = job.options
        self.policy = BadRowPolicy(options, job.progress, key_option=job.spec.key_option, resume=state.quarantine)
        self.removed = AppendFile(Path(options.removed), state.removed) if options.removed else None
        self.rows = AppendFile(job.scratch / "rows", state.rows) if options.rows_only else None
        self.chunks = AppendFile(job.scratch / "chunks", state.chunks) if options.rows_only else None
        self.output: AppendFile | None = None
        if state.files and not state.files[-1].hash and job.writes:
            self.output = AppendFile(job.scratch / job.names[len(state.files) - 1], state.output)
        self.due = time.monotonic() + _CHECKPOINT_S

    def run(self) -> None:
        job, state, options = self.job, self.state, self.job.options
        done = sum(file.disk_bytes for file in job.files[: max(0, len(state.files) - 1)])
        job.progress.begin(job.work.name, sum(file.disk_bytes for file in job.files), unit="B", done=done)
        start = (len(state.files) - 1, len(state.digests)) if state.files else (0, 0)
        if state.files and state.files[-1].hash:
            start = len(state.files), 0
        workers = options.workers or usable_cores()
        if not any(file.streamed for file in job.files):
            workers = min(workers, -(-sum(file.disk_bytes for file in job.files) // BLOCK_BYTES))
        work = _OnChunks(job.work, job.spec, options)
        with (
            WorkerPool(workers) as pool,
            closing(chunks(job.files, BLOCK_BYTES, spec=job.spec, start=start)) as read,
        ):
            for result in pool.run(read, work):
                self._begin(result.chunk.file_number + 1)
                self._append(result.encoded)
                result.release()
                job.progress.advance(result.chunk.file_bytes, documents=sum(file.rows for file in state.files))
                if time.monotonic() >= self.due:
                    self._checkpoint()
        self._begin(len(job.files))
        self._end_last()
        self.policy.check_share(state.bad, sum(file.rows for file in state.files))
        self._checkpoint()
        job.progress.end()

    def close(self) -> None:
        for file in (self.output, self.removed, self.rows, self.chunks):
            if file is not None:
                file.close()
        self.policy.close(keep=True)

    def _begin(self, count: int) -> None:
        """Begin the files up to number `count`; those before the last are complete."""
        state = self.state
        while len(state.files) < count:
            self._end_last()
            file = self.job.files[len(state.files)]
            footer = footer_hash(file) if self.job.options.rows_only else ""
            state.files.append(ReadFile(path_of(file), file.size_bytes, 0, "", footer=footer))
            if self.job.writes:
                self.output = AppendFile(self.job.scratch / self.job.names[len(state.files) - 1])

    def _end_last(self) -> None:
        state = self.state
        if not state.files or state.files[-1].hash:
            return
        check_unchanged(self.job.files[len(state.files) - 1])
        digest = blake3(b"".join(map(bytes.fromhex, state.digests))).hexdigest()
        state.files[-1], state.digests = replace(state.files[-1], hash=digest), []
        if self.output is not None:
            state.output = self.output.sync()
            self.output.close()

    def _append(self, edited: _Edited) -> None:
        state, file = self.state, self.state.files[-1]
        path = printable_path(file.path)
        for bad_row in edited.bad_rows:
            if not self.job.options.rows_only:
                self.policy.handle(bad_row, path, rows_before=file.rows, bad_before=state.bad)
            state.bad += 1
        if self.output is not None:
            self.output.append(edited.output)
        if self.rows is not None and self.chunks is not None:
            self.rows.append(edited.gone.view(np.uint8))
            self.chunks.append(np.array([(edited.rows, edited.digest)], CHUNK))
        if self.removed is not None:
            self.removed.append(b"".join(self._removed_lines(edited, path)))
        removed = file.removed + sum(edited.reasons.values())
        state.files[-1] = replace(file, rows=file.rows + edited.rows, removed=removed, chunks=file.chunks + 1)
        state.digests.append(edited.digest.hex())
        state.filtered += edited.filtered
        state.changed += edited.changed
        state.reasons.update(edited.reasons)
        state.counts.update(edited.counts)

    def _removed_lines(self, edited: _Edited, path: str) -> Iterator[bytes]:
        for row, line in edited.removed:
            place = orjson.dumps({"file": path, "row": self.state.files[-1].rows + row})
            yield place[:-1] + b"," + line

    def _checkpoint(self) -> None:
        state = self.state
        if self.output is not None and not state.files[-1].hash:
            state.output = self.output.sync()
        state.removed = self.removed.sync() if self.removed else None
        state.rows = self.rows.sync() if self.rows else None
        state.chunks = self.chunks.sync() if self.chunks else None
        state.quarantine = self.policy.quarantine.sync() if self.policy.quarantine else None
        self.job.save(state)
        self.due = time.monotonic() + _CHECKPOINT_S


def _output_names(files: Sequence[SourceFile], ending: str) -> list[str]:
    """A name for the output of each input; numbered if inputs of several folders share one."""
    endings = sorted((known_ending for names in ENDINGS.values() for known_ending in names), key=len, reverse=True)
    stems = []
    for file in files:
        name = Path(str(file.path)).name
        stems.append(
            next((name.removesuffix(known_ending) for known_ending in endings if name.endswith(known_ending)), name)
        )
    if len(set(stems)) < len(stems):
        stems = [f"{number:05}-{stem}" for number, stem in enumerate(stems)]
    return [f"{stem}.jsonl{ending}" for stem in stems]
