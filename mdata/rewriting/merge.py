"""Parts of a job joined into the corpus of the whole job: by reference, or as a copy.

By reference the manifest names the pairs of the parts, and no token is read. A copy is one pair: its files, its
manifest and its id are those of one run of the whole job. In both cases rows of sections become rows of their files,
all results of the job get their names in one transaction, and the parts are not changed.

The sections of an input must be contiguous from its beginning to its end; then their rows add up, their pieces give the
hash that a single run would have computed, and the rows of each part become rows of the file. Inputs that parts found
with different modification times are read again: if the size is the same, a file may only have been touched, or one row
may have been corrected and one part made again. The times cannot decide this, so the pieces that each part recorded are
compared with the file as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3
from msgspec import UNSET

from mdata.corpus.corpus import open_corpus
from mdata.corpus.origins import OriginsWriter, check_origins, open_origins
from mdata.errors import UsageError, os_errors_named
from mdata.manifest.contained_paths import files_inside
from mdata.manifest.io import stage_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest, InputFile, Origins, Provenance, Statistics
from mdata.object_storage.address import Address
from mdata.preprocessing.bad_rows import check_manifest, check_max_errors
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter, origins_path
from mdata.preprocessing.finished import first_damage
from mdata.preprocessing.joining import add_statistics, document_runs
from mdata.preprocessing.placing import Staged
from mdata.progress import SILENT, Progress
from mdata.rewriting.found_parts import FoundPart, FoundResult, check_pairs, find_parts, max_errors_of
from mdata.rewriting.rewritten import Rewriting, write_results
from mdata.sources.chunk import chunk_digest, chunks, read_chunk
from mdata.sources.input_files import Section, find_inputs
from mdata.sources.record_batch import ReadSpec
from mdata.sources.row_filter import parse_filter
from mdata.sources.text_template import parse_template
from mdata.util.canonical_json import hash_of


@dataclass(frozen=True)
class MergeResult:
    """A merged corpus: its manifest and path or address, the number of its parts, and whether it existed before."""

    manifest: CorpusManifest
    path: Path | Address
    num_parts: int
    there_before: bool


def merge(
    output_prefix: str,
    *,
    copy: bool = False,
    overwrite: bool = False,
    parts: int | None = None,
    max_errors: str | None = None,
    progress: Progress = SILENT,
) -> list[MergeResult]:
    """Join the parts that `mdata preprocess --shard` wrote under this prefix, for every result of the job.

    Args:
        output_prefix: as it was given to preprocess.
        copy: write one pair instead of naming the pairs of the parts.
        overwrite: replace another corpus that has the name of a result.
        parts: which division of the job, if there are several.
        max_errors: refuse more bad rows in all parts: "100" or "0.5%"; None: the limit of the parts.
        progress: receives the tokens copied.

    Raises:
        UsageError: a part is missing, or they are not parts of one job; no file was changed.
        BadInputError: too many bad rows. DamageError: a part is damaged. ResourceError: a file operation failed.
    """
    check_max_errors(max_errors)
    results = find_parts(output_prefix, count=parts)
    check_pairs(output_prefix, results, size_of=lambda file: file.stat().st_size if file.is_file() else None)
    return join(results, copy=copy, overwrite=overwrite, max_errors=max_errors, progress=progress)


def join(
    results: Sequence[FoundResult],
    *,
    copy: bool,
    overwrite: bool,
    max_errors: str | None,
    progress: Progress,
    damage: Callable[[Path], str | None] = first_damage,
) -> list[MergeResult]:
    """`merge` of parts whose pairs are known to be there; `damage` checks the files of an existing result."""
    planned = [(result, *_planned(result, copy, progress)) for result in results]
    for result, content, _ in planned:
        limit = max_errors or max_errors_of(result)
        check_manifest(limit, msgspec.structs.replace(result.parts[0].manifest, provenance=content.provenance))
    by_prefix = {result.prefix: (result, content, inputs) for result, content, inputs in planned}

    def make(prefix: Path) -> Staged:
        return _copy(*by_prefix[prefix], progress) if copy else _refer(*by_prefix[prefix])

    def differs(prefix: Path, existing: CorpusManifest) -> str | None:
        result, content, _ = by_prefix[prefix]
        same = _is_same(existing, result, content, copy=copy)
        return None if same else f"corpus {existing.id[:16]}, made in another way"

    parts = {result.prefix: len(result.parts) for result, _, _ in planned}
    parts_hash = hash_of([[part.manifest.id for part in result.parts] for result in results])
    words = f"merge of {max(parts.values())} parts ({parts_hash[:16]}){' --copy' if copy else ''}"
    written = write_results(
        Rewriting(
            words,
            "the merged corpus of these parts",
            [*parts],
            make=make,
            differs=differs,
            overwrite=overwrite,
            damage=damage,
        ),
        progress,
    )
    return [
        MergeResult(corpus.manifest, manifest_path(prefix), parts[prefix], corpus.there_before)
        for prefix, corpus in written.items()
    ]


def _planned(result: FoundResult, copy: bool, progress: Progress) -> tuple[CorpusContent, JoinedInputs]:
    """The new manifest, without the counts that are made while files are written."""
    read = with_times_now([part.made_by.inputs for part in result.parts], result.options, progress=progress)
    inputs = join_inputs(read)
    first, made_by = result.parts[0].manifest, [part.made_by for part in result.parts]
    kinds = sorted({kind for each in made_by for kind in each.skipped})
    filtered = sum(each.filtered or 0 for each in made_by)
    special = [each.special_in_text for each in made_by if each.special_in_text is not None]
    provenance = Provenance(
        program=made_by[0].program,
        options=result.options if copy else {**result.options, "parts": len(result.parts)},
        inputs=inputs.files,
        records=sum(each.records for each in made_by),
        skipped={kind: sum(each.skipped.get(kind, 0) for each in made_by) for kind in kinds},
        special_in_text=sum(special) if special else None,
        origins=None,
        filtered=filtered or msgspec.UNSET,
    )
    files = {}
    if first.tokenizer and first.tokenizer.folder:
        with os_errors_named("reading the tokenizer of a part"):
            files = files_inside(manifest_path(result.parts[0].prefix), first.tokenizer.folder)
    same_notes = all(part.manifest.notes == first.notes for part in result.parts)
    notes = first.notes if same_notes else {}
    return CorpusContent(first.level, first.tokenizer, files, provenance, _statistics(result.parts), notes), inputs


def _statistics(parts: Sequence[FoundPart]) -> Statistics | None:
    all_statistics = [part.manifest.statistics for part in parts]
    return (
        add_statistics([of_part for of_part in all_statistics if of_part is not None]) if all(all_statistics) else None
    )


def _is_same(existing: CorpusManifest, result: FoundResult, content: CorpusContent, *, copy: bool) -> bool:
    made_by = existing.provenance
    if made_by is None or content.provenance is None or made_by.origins is None:
        return False
    shards = [part.manifest.shards[0] for part in result.parts if part.manifest.shards[0].documents]
    totals = [sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens")]
    same_pairs = (
        len(existing.shards) == 1 and [existing.shards[0].documents, existing.shards[0].tokens] == totals
        if copy
        else [(shard.path, shard.idx_hash) for shard in existing.shards]
        == [(shard.path, shard.idx_hash) for shard in shards or [result.parts[0].manifest.shards[0]]]
    )
    expected = msgspec.structs.replace(content.provenance, program=made_by.program, origins=made_by.origins)
    return same_pairs and made_by == expected and existing.tokenizer == content.tokenizer


def _refer(result: FoundResult, content: CorpusContent, inputs: JoinedInputs) -> Staged:
    """Write origins and a manifest that names the pairs of the parts; parts without documents are left out."""
    prefix, assumed = result.prefix, content.provenance
    assert assumed is not None, "parts have a provenance"
    origins = OriginsWriter(origins_path(prefix), step=1)
    try:
        for part, placed in zip(result.parts, inputs.placed, strict=True):
            _append_origins(origins, part, placed)
        sidecar = Origins(path=origins_path(prefix).name, hash=origins.stage())
    finally:
        origins.close()
    shards = [shard for part in result.parts for shard in part.manifest.shards]
    manifest = msgspec.structs.replace(
        result.parts[0].manifest,
        shards=[shard for shard in shards if shard.documents] or shards[:1],
        provenance=msgspec.structs.replace(assumed, origins=sidecar),
        statistics=content.statistics,
        notes=dict(content.notes),
    )
    path = manifest_path(prefix)
    return Staged(prefix, stage_manifest(manifest, path), (origins_path(prefix), path))


def _copy(result: FoundResult, content: CorpusContent, inputs: JoinedInputs, progress: Progress) -> Staged:
    """Write one pair with the documents of all parts."""
    parts = result.parts
    progress.begin(f"merging {result.prefix.name}", sum(p.manifest.shards[0].bytes for p in parts), unit="B")
    writer = CorpusWriter(result.prefix, parts[0].manifest.dtype, step=1)
    try:
        for part, placed in zip(parts, inputs.placed, strict=True):
            (reader,) = open_corpus(manifest_path(part.prefix)).readers
            for tokens, lengths, document_ends in document_runs(part.prefix, reader):
                writer.pair.append(tokens, lengths, document_ends=document_ends)
                progress.advance(tokens.nbytes)
            _append_origins(writer.origins, part, placed)
        staged = writer.stage(content)
    finally:
        writer.close(keep=True)
    progress.end()
    return staged


def _append_origins(writer: OriginsWriter, part: FoundPart, placed: Placed) -> None:
    """Append the origins of a part, with files and rows as counted over the whole job."""
    path, documents = origins_path(part.prefix), part.manifest.shards[0].documents
    if part.made_by.origins:
        check_origins(path, part.made_by.origins.hash)
    for runs, count in _blocks(open_origins(path).runs, documents):
        numbers = np.array(placed.numbers, np.int64)[runs[:, 1]]
        rows = runs[:, 2] + np.array(placed.rows_before, np.int64)[runs[:, 1]]
        writer.append_runs(np.column_stack((runs[:, 0] - runs[0, 0], numbers, rows)), count)


def _blocks(runs: npt.NDArray[np.int64], documents: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Bounded blocks of runs, and the documents of each."""
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        block = np.array(runs[first : first + _RUNS_AT_ONCE])
        after = first + len(block)
        end = int(runs[after, 0]) if after < len(runs) else documents
        yield block, end - int(block[0, 0])


_RUNS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Placed:
    """The position of one part's inputs among those of the job: for each, its number and the rows before it."""

    numbers: list[int] = field(default_factory=list)
    rows_before: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class JoinedInputs:
    """The inputs of a job, and the position of each part's inputs among them."""

    files: list[InputFile]
    placed: list[Placed]


class _OpenFile:
    """A file whose sections are being joined."""

    def __init__(self, first: InputFile) -> None:
        self.input = first
        self.rows = self.reached = 0
        self._hasher = blake3()

    def take(self, file: InputFile, part: int) -> None:
        """Add the next section."""
        assert file.section, "a section is joined to sections"
        if (file.path, file.bytes, file.section.start) != (self.input.path, self.input.bytes, self.reached):
            raise _gap(self, f"part {part} continues with {file.name}")
        self._hasher.update(bytes.fromhex(file.section.pieces))
        self.rows += file.rows
        self.reached = file.section.stop

    @property
    def is_whole(self) -> bool:
        return bool(self.input.section) and self.reached == self.input.section.total  # type: ignore[union-attr]

    def joined(self) -> InputFile:
        return msgspec.structs.replace(self.input, rows=self.rows, hash=self._hasher.hexdigest(), section=UNSET)


def join_inputs(parts: Sequence[Sequence[InputFile]]) -> JoinedInputs:
    """Join the inputs that the parts of a job read, in order.

    Raises:
        UsageError: a section is missing.
    """
    files: list[InputFile] = []
    placed = []
    opened: _OpenFile | None = None
    for number, inputs in enumerate(parts, 1):
        here = Placed()
        for file in inputs:
            if opened is None and file.section:
                opened = _OpenFile(file)
            here.numbers.append(len(files))
            here.rows_before.append(opened.rows if opened else 0)
            if opened is None:
                files.append(file)
                continue
            if not file.section:
                raise _gap(opened, f"part {number} continues with {file.path}")
            opened.take(file, number)
            if opened.is_whole:
                files.append(opened.joined())
                opened = None
        placed.append(here)
    if opened is not None:
        raise _gap(opened, "the last part ends")
    return JoinedInputs(files, placed)


def _gap(opened: _OpenFile, then: str) -> UsageError:
    section = opened.input.section
    return UsageError(
        f"{opened.input.path}: the parts do not cover this input",
        found=f"read up to {opened.reached}, then {then}",
        expected=f"sections up to {section.total if section else opened.input.bytes}",
        fix="make the parts again, from one and the same input",
    )


def with_times_now(
    parts: Sequence[Sequence[InputFile]], options: dict[str, Any], *, progress: Progress
) -> list[list[InputFile]]:
    """The inputs of the parts, with one modification time for each file that they share.

    Args:
        parts: the inputs of each part, in order.
        options: as the parts record them.
        progress: receives a note on each file that is read again.

    Raises:
        UsageError: a file differs from what a part read; names the part.
    """
    times: dict[str, set[int]] = {}
    for inputs in parts:
        for file in inputs:
            times.setdefault(file.path, set()).add(file.modified_ns)
    now = {}
    for path in (path for path, modified in times.items() if len(modified) > 1):
        progress.note(f"reading {path} again: the parts recorded different modification times")
        now[path] = _compared(path, _sections(parts, path), options)
    return [
        [msgspec.structs.replace(file, modified_ns=now.get(file.path, file.modified_ns)) for file in inputs]
        for inputs in parts
    ]


def _sections(parts: Sequence[Sequence[InputFile]], path: str) -> Iterator[tuple[int, InputFile]]:
    return ((number, file) for number, inputs in enumerate(parts, 1) for file in inputs if file.path == path)


def _compared(path: str, read: Iterator[tuple[int, InputFile]], options: dict[str, Any]) -> int:
    """The present modification time of the file."""
    (source,) = find_inputs([path], format=options["input_format"]).files
    spec = ReadSpec(
        json_keys=tuple(options["json_keys"]),
        text_documents=options["text_documents"],
        max_record_bytes=options["max_record_bytes"],
        template=parse_template(options["text_template"]) if "text_template" in options else None,
        where=parse_filter(options["where"]) if "where" in options else None,
    )
    for number, file in read:
        section = file.section or None
        assert section is not None, "a whole file is read by one part"
        part = replace(source, section=Section(section.start, section.stop, section.total, 0))
        section_chunks = chunks([part], file.block_bytes, spec=spec)
        pieces = "".join(chunk_digest(read_chunk(chunk, spec)).hex() for chunk in section_chunks)
        if source.size_bytes != file.bytes or pieces != section.pieces:
            raise UsageError(
                f"{path} is not what part {number} read",
                found=f"{source.size_bytes} bytes, with other text in {file.name}",
                expected=f"{file.bytes} bytes, as part {number} found it",
                fix=f"make part {number} again, with --overwrite; nothing was changed",
            )
    return source.modified_ns
