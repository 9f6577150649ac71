"""Checks that files match their manifest.

`verify` reads manifests, indexes and sidecars: format, checksum, id, structure, counts, the hashes of each .idx, of the
block hashes and of the origins, and the tokenizer's files. With `full` it also reads every .bin with several threads
and names the 4 MiB blocks that differ and the documents they touch. It collects every problem instead of stopping at
the first. A file that cannot be read is reported as such, not as damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from blake3 import blake3

from mdata.corpus.corpus import Corpus, open_corpus
from mdata.corpus.open_part import beside
from mdata.corpus.origins import open_origins
from mdata.corpus.paths import manifest_of, refuse_unfinished
from mdata.errors import DamageError, MdataError, ResourceError, UsageError, counted, os_errors_named, wanted_by
from mdata.indexed.blocks import BlockFile
from mdata.indexed.index_tables import IndexTables, read_tables
from mdata.indexed.mapped_files import hash_file
from mdata.indexed.pair_format import BLOCK_BYTES, bin_path, idx_path
from mdata.manifest.contained_paths import file_inside, shards_inside
from mdata.manifest.io import load_manifest
from mdata.manifest.types import BlendManifest, CorpusManifest, Shard
from mdata.progress import SILENT, Progress

_HASH_BYTES = 32
_RUNS_SHOWN = 5


@dataclass(frozen=True)
class DamagedBlocks:
    """A run of consecutive 4 MiB blocks of one .bin that differ from what was written.

    Attributes:
        path: the .bin.
        first, last: numbers of the blocks.
        start, stop: their byte range, cut at the end of the file as it was written.
        documents: runs (first, last) of the corpus' documents with a token in them; None if the .idx is damaged too.
        reason: what is wrong: other content, or the error of the file system.
    """

    path: str
    first: int
    last: int
    start: int
    stop: int
    documents: tuple[tuple[int, int], ...] | None
    reason: str

    def as_error(self) -> MdataError:
        """Names blocks, bytes and documents."""
        blocks = f"block {self.first} is" if self.first == self.last else f"blocks {self.first} to {self.last} are"
        kind = DamageError if self.reason == _ALTERED else ResourceError
        return kind(
            f"{self.path}: {blocks} {self.reason} (bytes {self.start} to {self.stop}){_documents_text(self.documents)}",
            fix=_REMEDY,
        )


_ALTERED = "not what was written"
_REMEDY = "copy it again from where it is intact, or make the corpus again"


@dataclass(frozen=True)
class Verified:
    """The result of `verify`.

    Attributes:
        checked: manifests or pairs.
        bin_bytes: bytes of .bin that were read.
        problems: all errors found.
        damaged: the damaged blocks among them.
        unhashed: prefixes of pairs whose .bin has no block hashes to compare with.
    """

    checked: tuple[str, ...] = ()
    bin_bytes: int = 0
    problems: tuple[MdataError, ...] = ()
    damaged: tuple[DamagedBlocks, ...] = ()
    unhashed: tuple[str, ...] = ()

    def merged(self, other: Verified) -> Verified:
        """Two results as one."""
        return Verified(
            self.checked + other.checked,
            self.bin_bytes + other.bin_bytes,
            problems=self.problems + other.problems,
            damaged=self.damaged + other.damaged,
            unhashed=self.unhashed + other.unhashed,
        )


@dataclass
class _Check:
    """The check of one corpus, and the problems found so far."""

    manifest: Path
    full: bool
    threads: int | None
    progress: Progress
    allow_outside: bool
    problems: list[MdataError] = field(default_factory=list)
    damaged: list[DamagedBlocks] = field(default_factory=list)
    unhashed: list[str] = field(default_factory=list)
    bin_bytes: int = 0

    def note(self, error: MdataError) -> None:
        """Add a problem if it is new."""
        if str(error) not in map(str, self.problems):
            self.problems.append(error)

    @property
    def folder(self) -> Path:
        """The folder of the corpus."""
        return self.manifest.parent

    def sidecar(self, name: str, expected: str) -> Path | None:
        """The path of a sidecar; None, and a problem, if it cannot be read or differs from what was written."""
        try:
            path = file_inside(self.manifest, name, allow_outside=self.allow_outside)
        except MdataError as error:
            self.problems.append(error)
            return None
        return path if self.has_hash(path, expected) else None

    def has_hash(self, path: Path, expected: str) -> bool:
        """Whether a file has the recorded hash; adds a problem if not, or if it cannot be read."""
        try:
            with os_errors_named("reading"):
                computed = hash_file(path)
        except MdataError as error:
            self.problems.append(error)
            return False
        if computed != expected:
            problem = f"{path}: its content was changed"
            self.problems.append(DamageError(problem, found=computed, expected=expected, fix=_REMEDY))
        return computed == expected


def verify(
    path: str | Path,
    *,
    full: bool = False,
    threads: int | None = None,
    allow_outside: bool = False,
    progress: Progress = SILENT,
) -> Verified:
    """Check a corpus, a bare pair, or a blend and all its corpora.

    Args:
        path: manifest or prefix.
        full: also read every .bin that has block hashes.
        threads: for reading blocks (default: all available cores).
        allow_outside: as for `open_corpus`; without it, a manifest that names files outside its folder is a problem.
        progress: receives the bytes read.

    Raises:
        UsageError: nothing exists at the path.
    """
    manifest = manifest_of(Path(path))
    if manifest is None:
        return _verify_bare(Path(path))
    try:
        content = load_manifest(manifest)
    except MdataError as error:
        if not manifest.exists():
            raise
        return Verified((str(manifest),), problems=(error,))
    check = _Check(manifest, full, threads=threads, progress=progress, allow_outside=allow_outside)
    if isinstance(content, CorpusManifest):
        return _verify_corpus(manifest, content, check=check)
    return _verify_blend(manifest, content, check=check)


def _verify_blend(path: Path, blend: BlendManifest, *, check: _Check) -> Verified:
    result = Verified((str(path),))
    for part in blend.components:
        place = beside(path.parent, part.path)
        verified = Verified()
        try:
            verified = verify(
                place,
                full=check.full,
                threads=check.threads,
                progress=check.progress,
                allow_outside=check.allow_outside,
            )
            if (corpus_id := open_corpus(place, allow_outside=check.allow_outside).id) != part.id:
                problem_text = f"{place} is not the corpus that was blended"
                verified = verified.merged(
                    Verified(problems=(DamageError(problem_text, found=corpus_id, expected=part.id),))
                )
        except MdataError as error:
            known_problems = {str(problem) for problem in verified.problems}
            verified = verified if str(error) in known_problems else verified.merged(Verified(problems=(error,)))
        who = f"{path}: component {part.name}"
        result = result.merged(
            replace(verified, problems=tuple(wanted_by(who, problem) for problem in verified.problems))
        )
    return result


def _verify_bare(path: Path) -> Verified:
    """A pair without a manifest: only its structure can be checked."""
    try:
        open_corpus(path)
    except MdataError as error:
        return Verified((str(path),), problems=(error,))
    return Verified((str(path),), unhashed=(str(path),))


def _verify_corpus(path: Path, corpus: CorpusManifest, *, check: _Check) -> Verified:
    try:
        for shard in corpus.shards:
            (prefix,) = shards_inside(path, [shard.path], allow_outside=check.allow_outside)
            refuse_unfinished(prefix)
    except UsageError as error:  # files outside the folder are not read, not even to compare them
        return Verified((str(path),), problems=(error,))
    hashed = [check.has_hash(idx_path(check.folder / shard.path), shard.idx_hash) for shard in corpus.shards]
    try:
        opened = open_corpus(path, checked=False, allow_outside=check.allow_outside)
    except MdataError as error:
        check.note(error)
    else:
        _check_structure(check, opened)
        _check_tokenizer(check, opened)
    _check_origins(check, corpus)
    first_document = 0
    for shard, idx_is_sound in zip(corpus.shards, hashed, strict=True):
        expected = _block_hashes(check, shard)
        if check.full and expected is not None:
            _check_blocks(check, shard, expected, first_document=first_document if idx_is_sound else None)
        first_document += shard.documents
    return Verified(
        (str(path),),
        check.bin_bytes,
        problems=tuple(check.problems),
        damaged=tuple(check.damaged),
        unhashed=tuple(check.unhashed),
    )


def _check_structure(check: _Check, corpus: Corpus) -> None:
    """Problems inside an .idx, apart from its hash."""
    for reader in corpus.readers:
        try:
            reader.check_structure()
        except MdataError as error:
            check.note(error)


def _check_tokenizer(check: _Check, corpus: Corpus) -> None:
    """Check the tokenizer's files: their content by the folder's name, the resulting tokenizer by the fingerprint."""
    try:
        corpus.load_tokenizer()
    except MdataError as error:
        check.problems.append(error)


def _check_origins(check: _Check, corpus: CorpusManifest) -> None:
    provenance = corpus.provenance
    if provenance is None or provenance.origins is None:
        return
    path = check.sidecar(provenance.origins.path, provenance.origins.hash)
    if path is None:
        return
    try:
        origins = open_origins(path)
    except MdataError as error:
        check.problems.append(error)
        return
    documents, inputs = sum(shard.documents for shard in corpus.shards), len(provenance.inputs)
    runs = origins.runs
    if len(runs) and (int(runs[-1, 0]) >= documents or int(runs[:, 1].max()) >= inputs):
        problem = f"{origins.path}: refers to documents or inputs that do not exist"
        check.problems.append(DamageError(problem, expected=f"{counted(documents, 'document')} of {inputs} inputs"))


def _block_hashes(check: _Check, shard: Shard) -> bytes | None:
    """The content of the sidecar; None if it is missing or unusable, which is a problem if the manifest names one."""
    if shard.blocks is None:
        check.unhashed.append(shard.path)
        return None
    path = check.sidecar(shard.blocks.path, shard.blocks.hash)
    if path is None:
        return None
    with os_errors_named("reading"):
        size = path.stat().st_size
        wanted = -(-shard.bytes // BLOCK_BYTES) * _HASH_BYTES
        if size == wanted:
            return path.read_bytes()
    check.problems.append(DamageError(f"{path}: bad size", found=f"{size} bytes", expected=f"{wanted}"))
    return None


def _check_blocks(check: _Check, shard: Shard, expected: bytes, *, first_document: int | None) -> None:
    """Read a .bin and name every run of blocks whose hashes differ.

    `first_document` is the corpus' number of the shard's first document, None if the .idx is damaged.
    """
    path = bin_path(check.folder / shard.path)
    tables = None if first_document is None else read_tables(idx_path(check.folder / shard.path))
    check.progress.begin(f"verifying {path.name}", shard.bytes, unit="B")
    try:
        with os_errors_named("reading"), BlockFile(path, shard.bytes) as file:
            for first, last, reason in _bad_runs(_reasons(check, file, expected)):
                start, stop = first * BLOCK_BYTES, min((last + 1) * BLOCK_BYTES, shard.bytes)
                documents = _documents(shard, tables, (start, stop), first_document=first_document or 0)
                blocks = DamagedBlocks(
                    str(path), first, last=last, start=start, stop=stop, documents=documents, reason=reason
                )
                check.damaged.append(blocks)
                check.problems.append(blocks.as_error())
    except MdataError as error:
        check.problems.append(error)
    check.progress.end()


def _reasons(check: _Check, file: BlockFile, expected: bytes) -> Iterator[str | None]:
    """What is wrong with each block."""

    def look(number: int) -> tuple[str | None, int]:
        try:
            block = file.read(number)
        except OSError as error:
            return f"unreadable: {error.strerror}", 0
        wanted = expected[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]
        return (None if blake3(block).digest() == wanted else _ALTERED), len(block)

    for reason, num_bytes in file.each(look, threads=check.threads):
        check.bin_bytes += num_bytes
        check.progress.advance(num_bytes)
        yield reason


def _bad_runs(reasons: Iterator[str | None]) -> Iterator[tuple[int, int, str]]:
    """(first, last, reason) of runs of blocks with the same reason."""
    begun: tuple[int, str] | None = None
    number = -1
    for number, reason in enumerate(reasons):
        if begun is not None and reason != begun[1]:
            yield begun[0], number - 1, begun[1]
            begun = None
        if reason is not None and begun is None:
            begun = number, reason
    if begun is not None:
        yield begun[0], number, begun[1]


def _documents(
    shard: Shard, tables: IndexTables | None, span: tuple[int, int], *, first_document: int
) -> tuple[tuple[int, int], ...] | None:
    if tables is None:
        return None
    runs = tables.documents_touching(*span, contiguous=shard.contiguous)
    return tuple((first_document + first, first_document + last) for first, last in runs)


def _documents_text(runs: tuple[tuple[int, int], ...] | None) -> str:
    if runs is None:
        return "; its documents are not known because the .idx is damaged too"
    shown = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs[:_RUNS_SHOWN]]
    more = f" and {len(runs) - _RUNS_SHOWN} more runs" if len(runs) > _RUNS_SHOWN else ""
    many = "s" if len(runs) > 1 or any(first != last for first, last in runs) else ""
    return f"; document{many} {', '.join(shown)}{more}"
