"""Parts of a job joined into the corpus of the whole job: by reference, or as a copy.

By reference the manifest names the pairs of the parts, and no token is read. A copy is one pair: its files, its
manifest and its id are those of one run of the whole job. In both cases rows of sections become rows of their files,
all results of the job get their names in one transaction, and the parts are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import Corpus, open_corpus
from mdata.corpus.origins import OriginsWriter, open_origins
from mdata.errors import os_errors_named
from mdata.manifest.contained_paths import files_inside
from mdata.manifest.io import stage_manifest
from mdata.manifest.sidecars import manifest_path
from mdata.manifest.types import CorpusManifest, Origins, Provenance, Statistics
from mdata.object_storage.address import Address
from mdata.preprocessing.bad_rows import check_manifest
from mdata.preprocessing.corpus_writer import CorpusContent, CorpusWriter, origins_path
from mdata.preprocessing.finished import first_damage
from mdata.preprocessing.joining import add_statistics, document_runs
from mdata.preprocessing.placing import Staged
from mdata.progress import SILENT, Progress
from mdata.rewriting.found_parts import FoundPart, FoundResult, check_pairs, find_parts, max_errors_of
from mdata.rewriting.joined_inputs import JoinedInputs, Placed, join_inputs
from mdata.rewriting.reread import with_times_now
from mdata.rewriting.rewritten import Rewriting, write_results
from mdata.util.canonical_json import hash_of


@dataclass(frozen=True)
class Merged:
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
) -> list[Merged]:
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
    found = find_parts(output_prefix, count=parts)
    check_pairs(output_prefix, found, size_of=lambda file: file.stat().st_size if file.is_file() else None)
    return join(found, copy=copy, overwrite=overwrite, max_errors=max_errors, progress=progress)


def join(
    found: Sequence[FoundResult],
    *,
    copy: bool,
    overwrite: bool,
    max_errors: str | None,
    progress: Progress,
    damage: Callable[[Path], str | None] = first_damage,
) -> list[Merged]:
    """`merge` of parts whose pairs are known to be there; `damage` checks the files of an existing result."""
    planned = [(result, *_planned(result, copy, progress)) for result in found]
    for result, content, _ in planned:
        limit = max_errors or max_errors_of(result)
        check_manifest(limit, msgspec.structs.replace(result.parts[0].manifest, provenance=content.provenance))
    by_prefix = {result.prefix: (result, content, inputs) for result, content, inputs in planned}

    def make(prefix: Path) -> Staged:
        return _copy(*by_prefix[prefix], progress) if copy else _refer(*by_prefix[prefix])

    def differs(prefix: Path, known: CorpusManifest) -> str | None:
        result, content, _ = by_prefix[prefix]
        return None if _is_same(known, result, content, copy=copy) else f"corpus {known.id[:16]}, made in another way"

    parts = {result.prefix: len(result.parts) for result, _, _ in planned}
    parts_hash = hash_of([[part.manifest.id for part in result.parts] for result in found])
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
        Merged(one.manifest, manifest_path(prefix), parts[prefix], one.there_before) for prefix, one in written.items()
    ]


def _planned(result: FoundResult, copy: bool, progress: Progress) -> tuple[CorpusContent, JoinedInputs]:
    """The new manifest, without the counts that are made while files are written."""
    read = with_times_now([part.made_by.inputs for part in result.parts], result.options, progress=progress)
    inputs = join_inputs(read)
    first, made_by = result.parts[0].manifest, [part.made_by for part in result.parts]
    kinds = sorted({kind for one in made_by for kind in one.skipped})
    filtered = sum(one.filtered or 0 for one in made_by)
    special = [one.special_in_text for one in made_by if one.special_in_text is not None]
    provenance = Provenance(
        program=made_by[0].program,
        options=result.options if copy else {**result.options, "parts": len(result.parts)},
        inputs=inputs.files,
        records=sum(one.records for one in made_by),
        skipped={kind: sum(one.skipped.get(kind, 0) for one in made_by) for kind in kinds},
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
    known = [part.manifest.statistics for part in parts]
    return add_statistics([one for one in known if one is not None]) if all(known) else None


def _is_same(known: CorpusManifest, result: FoundResult, content: CorpusContent, *, copy: bool) -> bool:
    made_by = known.provenance
    if made_by is None or content.provenance is None or made_by.origins is None:
        return False
    shards = [part.manifest.shards[0] for part in result.parts if part.manifest.shards[0].documents]
    totals = [sum(getattr(shard, name) for shard in shards) for name in ("documents", "tokens")]
    same_pairs = (
        len(known.shards) == 1 and [known.shards[0].documents, known.shards[0].tokens] == totals
        if copy
        else [(shard.path, shard.idx_hash) for shard in known.shards]
        == [(shard.path, shard.idx_hash) for shard in shards or [result.parts[0].manifest.shards[0]]]
    )
    expected = msgspec.structs.replace(content.provenance, program=made_by.program, origins=made_by.origins)
    return same_pairs and made_by == expected and known.tokenizer == content.tokenizer


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
            (reader,) = _opened(part).readers
            for tokens, lengths, document_ends in document_runs(part.prefix, reader):
                writer.pair.append(tokens, lengths, document_ends=document_ends)
                progress.advance(tokens.nbytes)
            _append_origins(writer.origins, part, placed)
        staged = writer.stage(content)
    finally:
        writer.close(keep=True)
    progress.end()
    return staged


def _opened(part: FoundPart) -> Corpus:
    return open_corpus(manifest_path(part.prefix))


def _append_origins(writer: OriginsWriter, part: FoundPart, placed: Placed) -> None:
    """Append the origins of a part, with files and rows as counted over the whole job."""
    documents = part.manifest.shards[0].documents
    for runs, count in _blocks(open_origins(origins_path(part.prefix)).runs, documents):
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
