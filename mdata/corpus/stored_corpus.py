"""A corpus in object storage, opened for reading: small files are copied to the node's cache, blocks when needed.

The cache has a folder for each manifest, named by its checksum. Manifest, .idx, block hashes and tokenizer are copied
there completely. They are trusted while another process uses the folder; the first user compares them with their
hashes, and from then on every block is compared before its first read. Samples, ids and names are the same as those of
a corpus on a disk. Origins are not copied, so `mdata trace` shows documents without files and rows.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from mdata.array_cache.cache import VARIABLE
from mdata.block_cache.block_layout import layout_of
from mdata.block_cache.block_table import BlockTable, make_table
from mdata.block_cache.cache_room import CachePlace, most_blocks
from mdata.block_cache.cached_reads import CachedGatherer, CachedReader
from mdata.block_cache.corpus_blocks import BlockSource, CorpusBlocks
from mdata.corpus.corpus import Corpus
from mdata.corpus.fetch import CorpusCopy, manifest_address, manifest_text
from mdata.corpus.shard_readers import MOST_MAPPED, MOST_OPENED
from mdata.errors import UsageError, os_errors_named
from mdata.indexed.mapped_files import Identity, look_at
from mdata.indexed.pair_format import bin_path, dtype_code, idx_path
from mdata.indexed.reader import Described, Mode, PairFacts
from mdata.manifest.contained_paths import path_inside
from mdata.manifest.ids import text_of
from mdata.manifest.io import parse_manifest
from mdata.manifest.types import CorpusManifest, Manifest, Shard
from mdata.object_storage.address import Address, address_of, parse_address, refuse_output_address
from mdata.util import atomic_io, file_lock

_FOLDER = "blocks"


def stored_manifest(path: str | Path, cache: CachePlace) -> Manifest:
    """The manifest at an address, or of the pair with that prefix.

    Raises:
        UsageError: no cache is given, no such object, or no access. DamageError: the manifest is damaged.
        ResourceError: the storage does not answer.
    """
    _cache_folder(path, cache)
    address = _address(path)
    return parse_manifest(manifest_text(address), str(address))


def open_stored(
    path: str | Path, cache: CachePlace, *, mode: Mode = "mmap", checked: bool = True, content: Manifest | None = None
) -> StoredCorpus:
    """Open a corpus at an address.

    Args:
        path: address of its manifest or prefix, or of the folder/ with this manifest alone.
        cache: where its blocks are kept; the default folder is the environment's MDATA_CACHE.
        mode: how its .idx is read.
        checked: the tables of up to 1,000 shards are checked now.
        content: the manifest, if it was just read.

    Raises:
        UsageError: no cache is given, no such object, no access, or a blend. DamageError: a file does not match the
            manifest. ResourceError: the storage does not answer, or the disk is full.
    """
    folder, address = _cache_folder(path, cache), _address(path)
    manifest = parse_manifest(manifest_text(address), str(address)) if content is None else content
    if not isinstance(manifest, CorpusManifest):
        raise UsageError(f"{address} is a blend", expected="one corpus")
    corpus = _open(address, manifest, (folder, cache[1]), mode=mode)
    if checked and len(corpus.readers) <= MOST_OPENED:
        for reader in corpus.readers:
            reader.check()
    return corpus


class StoredCorpus(Corpus):
    """A corpus whose tokens are in storage; see `open_stored`.

    Args:
        path: of the manifest's copy in the cache.
        manifest, complete: as for `Corpus`.
        readers: one per shard.
        blocks: with their tokens.
        source: address of the manifest, and the cache.
    """

    def __init__(
        self,
        path: Path,
        manifest: CorpusManifest,
        *,
        readers: list[CachedReader],
        blocks: CorpusBlocks,
        source: tuple[Address, CachePlace],
        complete: bool = True,
    ) -> None:
        super().__init__(path, manifest, readers=list(readers), complete=complete)
        self.blocks, self._source, self._cached = blocks, source, readers
        self.address = str(source[0])

    @cached_property
    def gatherer(self) -> CachedGatherer:
        """Reads many rows of tokens at once."""
        return CachedGatherer(self._cached, self.blocks)

    def __reduce__(self) -> tuple[object, ...]:
        # As for Corpus, but the process that unpickles opens the cache itself.
        manifest = msgspec.structs.replace(self._known, provenance=None)
        complete = self._complete and self._known.provenance is None
        return _reopen, (*self._source, self.mode, manifest, complete)


def _reopen(address: Address, cache: CachePlace, mode: Mode, manifest: CorpusManifest, complete: bool) -> StoredCorpus:
    return _open(address, manifest, cache, mode=mode, complete=complete)


def _cache_folder(path: str | Path, cache: CachePlace) -> str:
    folder = cache[0] or os.environ.get(VARIABLE)
    if not folder:
        address = address_of(path)
        raise UsageError(
            f"{address} is in object storage, and reading it needs a cache folder",
            expected="a folder on a local disk: data.cache of a run, cache= of mdata.open_dataset, or MDATA_CACHE",
            fix=f"name a folder, or copy the corpus to a disk: mdata fetch {address} --output FOLDER",
        )
    refuse_output_address(folder)
    return folder


def _address(path: str | Path) -> Address:
    text = address_of(path)
    assert text is not None, f"{path} is a path"
    return manifest_address(parse_address(text))


def _open(
    address: Address, manifest: CorpusManifest, cache: CachePlace, *, mode: Mode, complete: bool = True
) -> StoredCorpus:
    room = Path(str(cache[0])).absolute() / _FOLDER
    folder = room / f"corpus-{manifest.checksum[:32]}"
    path = folder / "files" / address.name
    prefixes = [path_inside(path, shard.path) for shard in manifest.shards]
    layout = layout_of(np.dtype(manifest.dtype).itemsize, [shard.bytes for shard in manifest.shards])
    with os_errors_named(f"keeping {address} in {room}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        user = _begin_use(address, manifest, path, num_blocks=layout.num_blocks)
        source = BlockSource(
            layout,
            [_beside(address, bin_path(Path(shard.path)).as_posix()) for shard in manifest.shards],
            [path.parent / shard.blocks.path for shard in manifest.shards if shard.blocks],
        )
        blocks = CorpusBlocks(folder, source, most=most_blocks(cache[1]), user=user)
    how: Mode = "pread" if len(prefixes) > MOST_MAPPED else mode
    readers = [
        CachedReader(
            prefix,
            blocks,
            shard=number,
            mode=how,
            described=Described(path, shard.idx_hash),
            known_facts=_facts(prefix, shard, manifest.dtype),
        )
        for number, (prefix, shard) in enumerate(zip(prefixes, manifest.shards, strict=True))
    ]
    return StoredCorpus(path, manifest, readers=readers, blocks=blocks, source=(address, cache), complete=complete)


def _facts(prefix: Path, shard: Shard, dtype: str) -> PairFacts:
    """The facts of a pair whose .idx was compared by the first user of the cache."""
    index, tokens = look_at(idx_path(prefix)), Identity(0, 0, shard.bytes, 0)
    sizes = shard.sequences, shard.documents
    return PairFacts(dtype_code(np.dtype(dtype)), *sizes, shard.contiguous, index, tokens, compared=True)


def _beside(address: Address, name: str) -> Address:
    return address.with_key(address.key.removesuffix(address.name) + name)


class _User:
    """Marks a folder as used while this object, or its copy in a forked process, lives."""

    def __init__(self, fd: int) -> None:
        weakref.finalize(self, os.close, fd)


def _begin_use(address: Address, manifest: CorpusManifest, path: Path, *, num_blocks: int) -> _User:
    """Become a user of the manifest's folder; the first user checks it."""
    folder = path.parent.parent
    with file_lock.wait_for(folder.with_name(f".{folder.name}.lock")):
        fd = atomic_io.open_no_link(folder / "users", os.O_RDWR | os.O_CREAT)
        try:
            if _is_first(fd):
                _prepare(address, manifest, path, num_blocks=num_blocks)
            if not path.exists():
                atomic_io.atomic_write(path, text_of(manifest))
            fcntl.flock(fd, fcntl.LOCK_SH)
        except BaseException:
            os.close(fd)
            raise
    return _User(fd)


def _is_first(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prepare(address: Address, manifest: CorpusManifest, path: Path, *, num_blocks: int) -> None:
    """Compare the small files with their hashes, fetch those that differ, and mark the blocks as not compared."""
    copy, folder = CorpusCopy(address, path, ours=True), path.parent.parent
    copy.indexes_of(manifest)
    if address.scheme not in ("http", "https"):  # which do not list the tokenizer's files
        copy.tokenizer_of(manifest)
    make_table(folder, max(1, num_blocks))
    BlockTable(folder).begin_use()
