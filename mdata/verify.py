"""Checking that files are what their manifest says.

`verify` reads manifests and indexes: format, checksum, id, structure, counts, the hash of each .idx, the
hash of the block sidecar and the tokenizer's fingerprint. With `full` it also reads every .bin and names
the 4 MiB blocks that differ. It collects every problem instead of stopping at the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from mdata import manifest as manifests
from mdata.corpus import Corpus, manifest_of, open_corpus
from mdata.errors import DamageError, MdataError, os_errors_named
from mdata.indexed.format import BLOCK_BYTES, bin_path, idx_path
from mdata.manifest import BlendManifest, Shard
from mdata.progress import SILENT, Progress

_HASH_BYTES = 32


@dataclass(frozen=True)
class Verified:
    """What was checked: manifests or pairs, bytes of .bin that were read, and every problem found."""

    checked: tuple[str, ...]
    bin_bytes: int
    problems: tuple[MdataError, ...]


def verify(path: str | Path, *, full: bool = False, progress: Progress = SILENT) -> Verified:
    """Check a corpus, a bare pair, or a blend and all its corpora.

    Args:
        path: manifest or prefix.
        full: also read every .bin that has block hashes.
        progress: hears of the bytes read.

    Raises:
        UsageError: nothing is there.
    """
    path = Path(path)
    found = manifest_of(path)
    try:
        content = manifests.load(found) if found else None
    except DamageError as error:
        return Verified((str(path),), 0, (error,))
    if not isinstance(content, BlendManifest) or found is None:
        return _verify_corpus(path, None, full=full, progress=progress)
    parts = [
        _verify_corpus(found.parent / part.path, part.id, full=full, progress=progress) for part in content.components
    ]
    return Verified(
        (str(found), *(name for part in parts for name in part.checked)),
        sum(part.bin_bytes for part in parts),
        tuple(problem for part in parts for problem in part.problems),
    )


def _verify_corpus(path: Path, expected_id: str | None, *, full: bool, progress: Progress) -> Verified:
    problems: list[MdataError] = []
    bin_bytes = 0
    try:
        corpus = open_corpus(path)
    except MdataError as error:
        return Verified((str(path),), 0, (error,))
    if expected_id not in (None, corpus.id):
        what = f"{path} is not the corpus that was blended"
        problems.append(DamageError(what, found=corpus.id, expected=expected_id))
    try:
        corpus.load_tokenizer()
    except MdataError as error:
        problems.append(error)
    for shard in corpus.manifest.shards:
        prefix = corpus.path.parent / shard.path
        problems += _check_index(prefix, shard)
        expected = _block_hashes(corpus, shard, problems)
        if full and expected is not None:
            problems += _check_blocks(bin_path(prefix), expected, progress)
            bin_bytes += shard.bytes
    return Verified((str(path),), bin_bytes, tuple(problems))


def _check_index(prefix: Path, shard: Shard) -> Iterator[MdataError]:
    with os_errors_named("reading"):
        found = blake3().update_mmap(idx_path(prefix)).hexdigest()
    if found != shard.idx_hash:
        yield DamageError(
            f"{idx_path(prefix)}: its content is not what was written", found=found, expected=shard.idx_hash
        )


def _block_hashes(corpus: Corpus, shard: Shard, problems: list[MdataError]) -> bytes | None:
    """The sidecar's content; None, and a problem if there should be one, where it cannot be used."""
    if shard.blocks is None:
        return None
    path = corpus.path.parent / shard.blocks.path
    try:
        with os_errors_named("reading block hashes"):
            content = path.read_bytes()
    except MdataError as error:
        problems.append(error)
        return None
    if (found := blake3(content).hexdigest()) != shard.blocks.hash:
        what = f"{path}: the block hashes are not what was written"
        problems.append(DamageError(what, found=found, expected=shard.blocks.hash))
        return None
    return content


def _check_blocks(path: Path, expected: bytes, progress: Progress) -> Iterator[MdataError]:
    """Read a .bin and name every block whose hash differs."""
    progress.begin(f"verifying {path.name}", path.stat().st_size, unit="B")
    with os_errors_named("reading"), path.open("rb") as file:
        for number in range(len(expected) // _HASH_BYTES):
            block = file.read(BLOCK_BYTES)
            wanted = expected[number * _HASH_BYTES : (number + 1) * _HASH_BYTES]
            if blake3(block).digest() != wanted:
                start = number * BLOCK_BYTES
                yield DamageError(
                    f"{path}: block {number} is not what was written (bytes {start} to {start + len(block)})",
                    found=blake3(block).hexdigest(),
                    expected=wanted.hex(),
                )
            progress.advance(len(block))
    progress.end()
