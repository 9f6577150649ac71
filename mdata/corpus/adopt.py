"""Writes a manifest for a .bin/.idx pair of another program, so that it can be blended, verified and trained on.

The pair is read and never changed. Without `full` only the index is read, and the manifest says `verified: false`; with
it every token is checked: the hashes of .bin's blocks, the largest id, and that each id belongs to the tokenizer. An
existing manifest is never contradicted, only completed: missing hashes and a missing tokenizer are filled in. Sidecar
and tokenizer folder are written first, the manifest last. Which tokenizer made the ids is not detected: the caller
names it, and ids that it cannot produce are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from mdata.corpus.corpus import check_integers, describe_pair
from mdata.corpus.paths import manifest_of, prefix_of
from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.indexed.blocks import BlockFile
from mdata.indexed.mapped_files import lies_at
from mdata.indexed.pair_format import BLOCK_BYTES, bin_path, idx_path, smallest_dtype
from mdata.indexed.reader import IndexedReader
from mdata.indexed.writer import ShardFacts
from mdata.manifest.contained_paths import path_inside
from mdata.manifest.ids import sealed
from mdata.manifest.io import load_manifest, save_manifest
from mdata.manifest.sidecars import hashes_path, level_named, manifest_path, tokenizer_facts
from mdata.manifest.types import BlockHashes, CorpusManifest, Level, Shard, Statistics, TokenizerFacts
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.tokenizer import Tokenizer
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.util import atomic_io, file_lock
from mdata.util.arrays import Int64s

_DOCUMENTS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Adopted:
    """The manifest, its path, and whether the same manifest existed before."""

    manifest: CorpusManifest
    path: Path
    there_before: bool


@dataclass(frozen=True)
class _Content:
    """Facts from reading every token; block hashes are concatenated, 32 bytes each."""

    block_hashes: bytes
    largest_id: int | None


class _BlockFacts(NamedTuple):
    hash: bytes
    smallest_id: int
    largest_id: int
    num_bytes: int


def adopt(
    prefix: str | Path,
    tokenizer: Tokenizer | None,
    *,
    level: Level | None = None,
    full: bool = False,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> Adopted:
    """Write the manifest for a pair that another program wrote.

    Args:
        prefix: of the pair; `x.bin`, `x.idx` and `x.json` work too.
        tokenizer: the one that made the ids; None if unknown.
        level: default "sentence" or "chat" for a prefix with that ending (as Megatron's tool names them), else
            "document".
        full: read every token.
        threads: for reading (default: all available cores).
        progress: receives the bytes read, and notes.

    Raises:
        UsageError: no such pair, values that are not token ids, a contradicting manifest, or ids that the tokenizer
            does not have.
        DamageError: the pair is damaged.
    """
    prefix = prefix_of(Path(prefix))
    if prefix.suffix == ".json" and idx_path(prefix.with_suffix("")).is_file():
        prefix = prefix.with_suffix("")
    manifest_of(prefix)
    reader = IndexedReader(prefix)
    check_integers(prefix, reader.dtype)
    there = _load_existing(manifest_path(prefix))
    if tokenizer is not None:
        _note_unusual_dtype(reader, tokenizer, prefix, progress=progress)
    content = _read_content(prefix, reader, threads=threads, progress=progress) if full else None
    level = level or (there.level if there else level_named(prefix))
    return _write_manifest(
        prefix, _manifest(prefix, reader, tokenizer, content=content, level=level), tokenizer, content, progress
    )


def adopt_written(
    prefix: Path, tokenizer: Tokenizer | None, *, level: Level, facts: ShardFacts, progress: Progress = SILENT
) -> Adopted:
    """As `adopt` with `full`, for a pair that was just written, so that nothing is read again."""
    content = _Content(b"".join(facts.block_hashes), facts.largest_id)
    made = _manifest(prefix, IndexedReader(prefix), tokenizer, content=content, level=level)
    return _write_manifest(prefix, made, tokenizer, content, progress)


def check_largest_id(prefix: Path, largest: int | None, *, tokenizer: TokenizerFacts) -> None:
    """Refuse ids that a tokenizer does not have.

    Raises:
        UsageError: names the id.
    """
    # A vocabulary with gaps has fewer entries than its largest id; special ids often lie beyond the gap.
    largest_known = max(tokenizer.vocab_size - 1, tokenizer.eod or 0, *tokenizer.special_ids.values(), 0)
    if largest is not None and largest > largest_known:
        raise UsageError(
            f"{prefix} was not made by this tokenizer",
            found=f"id {largest}",
            expected=f"at most {largest_known} from {tokenizer.type} with {tokenizer.vocab_size:,} entries",
            fix="give the tokenizer that made it",
        )


def length_histogram(lengths: npt.NDArray[np.int32], boundaries: Int64s) -> list[int]:
    """Documents by length: [0] without tokens, [k] with 2^(k-1) to 2^k - 1 tokens; memory is bounded."""
    counts = np.zeros(65, np.int64)
    for documents in document_lengths(lengths, boundaries):
        # frexp's exponent is the number of binary digits, exact below 2^53.
        counts += np.bincount(np.frexp(documents.astype(np.float64))[1], minlength=65)
    return [int(count) for count in np.trim_zeros(counts, "b")]


def document_lengths(lengths: npt.NDArray[np.int32], boundaries: Int64s) -> Iterator[Int64s]:
    """Tokens of the documents of a pair, in bounded parts: int64[n] each."""
    for first in range(0, len(boundaries) - 1, _DOCUMENTS_AT_ONCE):
        ends = np.array(boundaries[first : first + _DOCUMENTS_AT_ONCE + 1], np.int64)
        tokens_before = np.concatenate(([0], np.cumsum(lengths[ends[0] : ends[-1]], dtype=np.int64)))
        yield np.diff(tokens_before[ends - ends[0]])


def _note_unusual_dtype(reader: IndexedReader, tokenizer: Tokenizer, prefix: Path, *, progress: Progress) -> None:
    expected = smallest_dtype(tokenizer.vocab_size)
    if reader.dtype != expected:
        progress.note(
            f"{prefix} is {reader.dtype.name}; with {tokenizer.vocab_size:,} entries Megatron's tool would have"
            f" written {expected.name}: is this the tokenizer that made it?"
        )


def _read_content(prefix: Path, reader: IndexedReader, *, threads: int | None, progress: Progress) -> _Content:
    path, identity = bin_path(prefix), reader.facts.bin  # of the file that was compared with the .idx
    changed = UsageError(f"{path} changed while it was read", fix="wait until nothing writes to it any more")
    hashes: list[bytes] = []
    extremes: list[tuple[int, int]] = []
    with os_errors_named("reading"), BlockFile(path, identity.size_bytes) as file:

        def block_facts(number: int) -> _BlockFacts:
            block = file.read(number)
            if len(block) < min(BLOCK_BYTES, identity.size_bytes - number * BLOCK_BYTES):
                raise changed
            ids = np.frombuffer(block, reader.dtype)
            return _BlockFacts(blake3(block).digest(), int(ids.min()), int(ids.max()), len(block))

        progress.begin(f"reading {path.name}", identity.size_bytes, unit="B")
        for facts in file.each(block_facts, threads=threads):
            hashes.append(facts.hash)
            extremes.append((facts.smallest_id, facts.largest_id))
            progress.advance(facts.num_bytes)
        progress.end()
    if not lies_at(path, identity):
        raise changed
    if extremes and min(smallest for smallest, _ in extremes) < 0:
        raise UsageError(f"{prefix} holds negative values", expected="token ids")
    return _Content(b"".join(hashes), max((largest for _, largest in extremes), default=None))


def _manifest(
    prefix: Path, reader: IndexedReader, tokenizer: Tokenizer | None, *, content: _Content | None, level: Level
) -> CorpusManifest:
    described = describe_pair(prefix, reader, level=level)
    shard = described.shards[0]
    if content is not None:
        blocks = BlockHashes(path=hashes_path(prefix).name, hash=blake3(content.block_hashes).hexdigest())
        shard = msgspec.structs.replace(shard, largest_id=content.largest_id, blocks=blocks)
    return msgspec.structs.replace(
        described,
        verified=content is not None,
        tokenizer=tokenizer_facts(tokenizer) if tokenizer else None,
        shards=[shard],
        statistics=Statistics(document_lengths=length_histogram(reader.lengths, reader.boundaries), text_bytes=None),
    )


def _load_existing(path: Path) -> CorpusManifest | None:
    """Read the existing manifest."""
    if not path.exists():
        return None
    try:
        there = load_manifest(path)
    except DamageError as error:
        raise UsageError(f"{path} already exists and is damaged", fix="remove it, and adopt again") from error
    if not isinstance(there, CorpusManifest):
        raise UsageError(f"{path} already exists and is a blend", fix="give the blend another name")
    return there


def _write_manifest(
    prefix: Path, made: CorpusManifest, tokenizer: Tokenizer | None, content: _Content | None, progress: Progress
) -> Adopted:
    """Write the new facts, merged with those of an existing manifest, one process at a time."""
    path = manifest_path(prefix)
    with os_errors_named(f"adopting {prefix}"), file_lock.wait_for(path.with_name(f".{path.name}.lock")):
        return _merge_and_write(path, prefix, made, tokenizer, content, progress)


def _merge_and_write(
    path: Path,
    prefix: Path,
    made: CorpusManifest,
    tokenizer: Tokenizer | None,
    content: _Content | None,
    progress: Progress,
) -> Adopted:
    there = _load_existing(path)
    if there is not None:
        made = _with_sidecars_of(there, made)
    manifest = sealed(_merged(path, there, made) if there else made)
    if manifest.tokenizer is not None:
        for shard in manifest.shards:
            check_largest_id(prefix, shard.largest_id, tokenizer=manifest.tokenizer)
    _write_sidecars(prefix, tokenizer, content=content, shard=manifest.shards[0])
    if there == manifest:
        return Adopted(manifest, path, there_before=True)
    if there is not None:
        progress.note(
            f"{path}: completed; its id was {there.id[:16]} and is {manifest.id[:16]}: remake the blends that use it"
        )
    save_manifest(manifest, path)
    return Adopted(manifest, path, there_before=False)


def _with_sidecars_of(there: CorpusManifest, made: CorpusManifest) -> CorpusManifest:
    """The new facts, with the existing names of sidecars of the same content: older corpora use other names."""
    shards = [
        msgspec.structs.replace(shard, blocks=old.blocks)
        if old.blocks and shard.blocks and old.blocks.hash == shard.blocks.hash
        else shard
        for old, shard in zip(there.shards, made.shards, strict=False)
    ]
    return msgspec.structs.replace(made, shards=shards + made.shards[len(shards) :])


def _merged(path: Path, there: CorpusManifest, made: CorpusManifest) -> CorpusManifest:
    """Merge two manifests of one pair, with the notes of the first; they must not contradict each other."""
    completed = _completed(there, made)
    if _without_notes(completed) != _without_notes(_completed(made, there)):
        ours = sealed(made)
        raise UsageError(
            f"{path} already exists with other content",
            found=f"id {there.id[:16]}",
            expected=f"id {ours.id[:16]}, or no manifest",
            fix="keep it; or remove it, adopt again, and remake the blends that use it",
        )
    return completed


def _completed(manifest: CorpusManifest, other: CorpusManifest) -> CorpusManifest:
    """The first, completed with fields of the second that the first lacks."""
    shards = [
        msgspec.structs.replace(
            shard,
            blocks=shard.blocks or more.blocks,
            largest_id=more.largest_id if shard.largest_id is None else shard.largest_id,
        )
        for shard, more in zip(manifest.shards, other.shards, strict=False)
    ]
    return msgspec.structs.replace(
        manifest,
        verified=manifest.verified or other.verified,
        tokenizer=manifest.tokenizer or other.tokenizer,
        shards=shards + manifest.shards[len(shards) :],
    )


def _without_notes(manifest: CorpusManifest) -> CorpusManifest:
    return msgspec.structs.replace(manifest, notes={}, id="", checksum="")


def _write_sidecars(prefix: Path, tokenizer: Tokenizer | None, *, content: _Content | None, shard: Shard) -> None:
    if content is not None and shard.blocks:
        atomic_io.atomic_write(path_inside(manifest_path(prefix), shard.blocks.path), content.block_hashes)
    if tokenizer is not None and tokenizer.files:
        write_folder(prefix.parent / folder_name(tokenizer.files), tokenizer.files)
