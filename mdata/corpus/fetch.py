"""Copies a corpus from object storage to a folder on a disk, checking every file against the manifest.

The .bin comes in blocks of 4 MiB, several at once, and each block is compared with its hash before it is written. A
fetch that was stopped or killed continues: blocks of the temporary file that have their hashes are kept, so no journal
is needed. The manifest has a temporary name meanwhile; if the corpus in storage is another one when the fetch goes on,
that tells which temporary files to remove. Each .idx gets its name last, after the manifest, so that no pair can be
opened before the corpus is there.
Existing files that differ are never replaced. Blends, and parts of a corpus, are not fetched.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from blake3 import blake3

from mdata.corpus.paths import BARE_ENDINGS
from mdata.errors import DamageError, UsageError, counted, few, os_errors_named
from mdata.indexed.blocks import BlockFile
from mdata.indexed.mapped_files import hash_file
from mdata.indexed.pair_format import BLOCK_BYTES, bin_path, idx_path
from mdata.manifest.contained_paths import path_inside
from mdata.manifest.io import parse_manifest
from mdata.manifest.types import BlockHashes, CorpusManifest, Shard, TokenizerFacts
from mdata.object_storage.address import Address, address_of, is_address, neither, parse_address, refuse_output_address
from mdata.object_storage.reading import blocks_ahead, list_objects, look_at_object, object_there, read_range
from mdata.object_storage.stores import open_store
from mdata.progress import SILENT, Progress
from mdata.tokenizers.base.tokenizer_folder import folder_name, write_folder
from mdata.util import atomic_io, file_lock

_THREADS = 8
_HASH_BYTES = 32


def fetch(corpus: str, folder: str | Path, *, progress: Progress = SILENT) -> Path:
    """Copy a corpus to a folder and return the path of its manifest; existing files are checked and kept.

    Args:
        corpus: the address of its manifest, of the folder or dataset that has only this one, or the prefix of its pair.
        folder: created if missing.
        progress: receives bytes.

    Raises:
        UsageError: no corpus is there, no access, an object changed meanwhile, or other files are in the folder.
        DamageError: an object does not match the manifest. ResourceError: the storage or the disk fails.
    """
    refuse_output_address(folder)
    folder = Path(folder)
    address = _manifest_address(corpus)
    text = manifest_text(address)
    manifest = parse_manifest(text, str(address))
    if not isinstance(manifest, CorpusManifest):
        raise UsageError(
            f"{address} is a blend",
            expected="the manifest of a corpus",
            fix="fetch each of its corpora, and blend the copies with mdata blend",
        )
    with os_errors_named(f"writing to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / address.name
        with file_lock.hold(folder / f".{address.name}.lock", remove=True):
            if target.exists() and target.read_bytes() != text:
                raise _other_file(target)
            progress.begin(f"fetching {target.stem}", sum(shard.bytes for shard in manifest.shards), unit="B")
            is_new = not target.exists()
            if is_new:
                _begin(target, text, manifest)
            copy = CorpusCopy(address, target, progress=progress)
            try:
                copy.files_of(manifest, hide_indexes=True)
            finally:
                progress.end()
            if is_new:
                atomic_io.rename(atomic_io.partial_path(target), target)
                atomic_io.sync_folder(folder)
            copy.show_indexes(manifest)
    return target


def _begin(target: Path, text: bytes, manifest: CorpusManifest) -> None:
    """Write the manifest under its temporary name; if a stopped fetch left another there, remove what it left."""
    partial = atomic_io.partial_path(target)
    if partial.exists() and (earlier := partial.read_bytes()) != text:
        left: list[Path] = []
        with suppress(UsageError, DamageError):  # cut off by a kill, or refused because it names files outside
            stopped = parse_manifest(earlier, str(partial))
            names = _file_names(stopped) - _file_names(manifest) if isinstance(stopped, CorpusManifest) else ()
            left = [path_inside(target, name) for name in names]
        for path in left:
            atomic_io.partial_path(path).unlink(missing_ok=True)
    atomic_io.write_partial(target, text)


def _file_names(manifest: CorpusManifest) -> set[str]:
    """The files of a corpus, without its manifest and its tokenizer."""
    pairs = [name(Path(shard.path)).as_posix() for shard in manifest.shards for name in (bin_path, idx_path)]
    blocks = [shard.blocks.path for shard in manifest.shards if shard.blocks]
    origins = manifest.provenance and manifest.provenance.origins
    return {*pairs, *blocks, *([origins.path] if origins else ())}


class CorpusCopy:
    """The files that a manifest names, copied beside the copy of the manifest.

    Args:
        source: the manifest in storage.
        target: the manifest on the disk; it need not exist yet.
        progress: receives bytes of .bin.
        ours: replace files in the folder that differ, instead of refusing.
    """

    def __init__(self, source: Address, target: Path, *, progress: Progress = SILENT, ours: bool = False) -> None:
        self._folder = source.key.removesuffix(source.name)
        self._source, self._target, self._progress, self._ours = source, target, progress, ours
        self._store = open_store(source)

    def files_of(self, manifest: CorpusManifest, *, hide_indexes: bool = False) -> None:
        """Copy everything but the manifest; `hide_indexes`: each .idx keeps a temporary name."""
        if manifest.tokenizer and manifest.tokenizer.folder:
            self._tokenizer(manifest.tokenizer.folder, manifest.tokenizer)
        self.origins_of(manifest)
        self.indexes_of(manifest, hide=hide_indexes)
        for shard in manifest.shards:
            assert shard.blocks is not None, "looked at with its index"
            self._blocks(shard, shard.blocks)

    def indexes_of(self, manifest: CorpusManifest, *, hide: bool = False) -> None:
        """Copy the .idx and the block hashes of each pair; `hide`: the .idx gets a temporary name."""
        if any(shard.blocks is None for shard in manifest.shards):
            raise UsageError(
                f"{self._source} has no block hashes, so its .bin files cannot be checked",
                fix="run mdata adopt --full on the files on a disk, and upload what it writes",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            deque(pool.map(lambda shard: self._index(shard, hide), manifest.shards), maxlen=0)

    def show_indexes(self, manifest: CorpusManifest) -> None:
        """Give every hidden .idx its name."""
        paths = [self._path(idx_path(Path(shard.path)).as_posix()) for shard in manifest.shards]
        hidden = [path for path in paths if not path.exists()]
        for path in hidden:
            atomic_io.rename(atomic_io.partial_path(path), path)
        for folder in sorted({path.parent for path in hidden}):
            atomic_io.sync_folder(folder)

    def _index(self, shard: Shard, hide: bool) -> None:
        assert shard.blocks is not None, "looked at before"
        self._file(idx_path(Path(shard.path)).as_posix(), shard.idx_hash, hide=hide)
        self._file(shard.blocks.path, shard.blocks.hash)

    def origins_of(self, manifest: CorpusManifest) -> None:
        """Copy the origins, if the corpus has them."""
        if manifest.provenance and (origins := manifest.provenance.origins):
            self._file(origins.path, origins.hash)

    def tokenizer_of(self, manifest: CorpusManifest) -> None:
        """Copy the tokenizer's files, if the corpus has them; a complete copy is not fetched again."""
        facts = manifest.tokenizer
        if facts is None or facts.folder is None:
            return
        there = {file.name: file.read_bytes() for file in self._path(facts.folder).glob("[!.]*") if file.is_file()}
        if folder_name(there) != facts.folder:
            self._tokenizer(facts.folder, facts)

    def _at(self, name: str) -> Address:
        return self._source.with_key(self._folder + name)

    def _path(self, name: str) -> Path:
        path = path_inside(self._target, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _file(self, name: str, expected: str, *, hide: bool = False) -> Path:
        """Copy a file of known hash; `hide`: to its temporary name, unless it is there."""
        path = self._path(name)
        if path.exists():
            if hash_file(path) == expected:
                return path
            if not self._ours:
                raise _other_file(path)
        if hide:
            path = atomic_io.partial_path(path)
            if path.exists() and hash_file(path) == expected:
                return path
        facts, hasher = look_at_object(self._at(name)), blake3()
        with atomic_io.atomic_file(path) as fd:
            for block in blocks_ahead(facts):
                hasher.update(block)
                atomic_io.write_all(fd, block)
            if hasher.hexdigest() != expected:
                raise _not_as_written(f"{facts.address}: its hash", hasher.hexdigest(), expected)
        return path

    def _blocks(self, shard: Shard, sidecar: BlockHashes) -> None:
        """Copy a .bin, except blocks that the temporary file of an earlier fetch already has."""
        hashes = self._path(sidecar.path).read_bytes()
        name = bin_path(Path(shard.path)).as_posix()
        path, facts = self._path(name), look_at_object(self._at(name))
        if facts.size_bytes != shard.bytes or len(hashes) != -(-shard.bytes // BLOCK_BYTES) * _HASH_BYTES:
            raise _not_as_written(f"{facts.address}: its size", f"{facts.size_bytes} bytes", f"{shard.bytes} bytes")
        is_there = path.exists()
        with _sized(path if is_there else atomic_io.partial_path(path), shard.bytes, is_there) as (file, fd):

            def look(number: int) -> int:
                expected = hashes[number * _HASH_BYTES :][:_HASH_BYTES]
                block = file.read(number)
                if blake3(block).digest() != expected:
                    if fd is None:
                        raise _other_file(path)
                    start = number * BLOCK_BYTES
                    data = read_range(facts, start, stop=start + len(block), store=self._store)
                    if (digest := blake3(data)).digest() != expected:
                        raise _not_as_written(f"{facts.address}: block {number}", digest.hexdigest(), expected.hex())
                    _write_at(fd, data, start)
                return len(block)

            for count in file.each(look, threads=_THREADS):
                self._progress.advance(count)
            if fd is not None:
                atomic_io.sync(fd)
                atomic_io.rename(atomic_io.partial_path(path), path)
                atomic_io.sync_folder(path.parent)

    def _tokenizer(self, name: str, facts: TokenizerFacts) -> None:
        """Copy the folder of the tokenizer's files, whose name is the hash of its content."""
        path, inside = self._path(name), self._at(f"{name}/")
        objects = [
            facts_of_file
            for facts_of_file in list_objects(inside)
            if "/" not in facts_of_file.address.key.removeprefix(inside.key)
        ]
        files = {
            facts_of_file.address.name: read_range(facts_of_file, 0, stop=facts_of_file.size_bytes, store=self._store)
            for facts_of_file in objects
        }
        if folder_name(files) != name:
            raise _not_as_written(f"{inside}: the files of the tokenizer {facts.type}", folder_name(files), name)
        write_folder(path, files)


def _manifest_address(corpus: str) -> Address:
    if not is_address(corpus):
        if meant := address_of(corpus):
            raise neither(corpus, meant)
        raise UsageError(f"{corpus} is a path", expected="a corpus at s3://, gs:// or az://, which is copied to a disk")
    address = parse_address(corpus)
    if address.scheme in ("http", "https"):
        raise UsageError(
            f"{address}: a web server does not list the files of a corpus' tokenizer",
            expected="s3://, gs://, az:// or hf://",
        )
    return manifest_address(address)


def _manifest_in(folder: Address) -> Address:
    """The only manifest in a folder, such as a dataset of the hub that is a corpus."""
    below = [facts.address for facts in list_objects(folder)]
    names = [address.name for address in below if address.key == f"{folder.key}{address.name}"]
    manifests = [name for name in names if name.endswith(".json")]
    if len(manifests) != 1:
        raise UsageError(
            f"{folder} does not name one corpus",
            found=few(manifests) if manifests else f"no .json among {counted(len(names), 'file')}",
            expected="one manifest, whose name ends in .json",
            fix=f"{folder}{manifests[0]}, or another of them" if manifests else "check the address",
        )
    return folder.with_key(folder.key + manifests[0])


def manifest_address(address: Address) -> Address:
    """The address of a corpus' manifest, from that of the pair with or without an ending, or of the folder/ it is in.

    Raises:
        UsageError: a folder with no manifest, or with several.
    """
    if not address.key or address.key.endswith("/"):
        return _manifest_in(address)
    if address.key.endswith(".json"):
        return address
    stem = address.key[:-4] if address.key.endswith(BARE_ENDINGS) else address.key
    return address.with_key(f"{stem}.json")


def manifest_text(address: Address) -> bytes:
    """The bytes of a manifest in storage.

    Raises:
        UsageError: no such object, no access, or a pair without a manifest. ResourceError: the storage does not answer.
    """
    facts = object_there(address)
    if facts is None:
        index = address.with_key(f"{address.key.removesuffix('.json')}.idx")
        if object_there(index) is None:
            facts = look_at_object(address)  # raises
        else:
            raise UsageError(
                f"{index} has no manifest beside it",
                expected=f"{address.name}, with the hashes by which the .bin is checked",
                fix="run mdata adopt --full on the files on a disk, and upload what it writes",
            )
    return read_range(facts, 0, stop=facts.size_bytes)


@contextmanager
def _sized(path: Path, size: int, is_there: bool) -> Iterator[tuple[BlockFile, int | None]]:
    """A reader of a file of `size` bytes, and a descriptor for writing it; None if it is complete."""
    if is_there:
        if path.stat().st_size != size:
            raise _other_file(path)
        with BlockFile(path, size) as file:
            yield file, None
        return
    fd = file_lock.open_locked(path, keep_bytes=None)
    try:
        os.ftruncate(fd, size)
        with BlockFile(path, size) as file:
            yield file, fd
    finally:
        os.close(fd)


def _write_at(fd: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count


def _other_file(path: Path) -> UsageError:
    return UsageError(
        f"{path} already exists and differs from the corpus in storage", fix="name another folder, or remove the file"
    )


def _not_as_written(subject: str, found: str, expected: str) -> DamageError:
    return DamageError(
        f"{subject} does not match the manifest", found=found, expected=expected, fix="upload the corpus again"
    )
