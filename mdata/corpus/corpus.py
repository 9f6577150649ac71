"""A corpus: the shards of one manifest, or one bare .bin/.idx pair, as a single stream of sequences and tokens.

A path is a manifest (`x.json`) or a prefix (also written as `x.bin` or `x.idx`), whose manifest `x.json` is used if it
exists. Of a bare pair only the .idx is read: its id comes from the .idx and the size of .bin; tokenizer, end of
document and largest id are None. Opening checks counts, and the hash and tables of each .idx; a dataset checks tables
when they are first used, so that the time to open it does not grow with its documents. `mdata verify` checks the hashes
of .bin. A corpus can be pickled: a process that sees the same unchanged files opens none.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import numpy.typing as npt

from mdata.corpus.paths import manifest_of, prefix_of, refuse_unfinished
from mdata.corpus.shard_readers import open_shards
from mdata.errors import DamageError, UsageError, counted, os_errors_named
from mdata.indexed.gather import Gatherer
from mdata.indexed.mapped_files import explain, hash_file
from mdata.indexed.reader import Described, IndexedReader, Mode, PairFacts, compare_all
from mdata.manifest.contained_paths import files_inside
from mdata.manifest.ids import sealed
from mdata.manifest.io import load_manifest
from mdata.manifest.sidecars import level_named
from mdata.manifest.types import FORMAT, VERSION, CorpusManifest, Level, Manifest, Shard, TokenDtype, TokenizerFacts
from mdata.util.arrays import Int64s, locate, offsets_of

if TYPE_CHECKING:
    from mdata.tokenizers.base.tokenizer import Tokenizer


def open_corpus(
    path: str | Path,
    *,
    mode: Mode = "mmap",
    checked: bool = True,
    allow_outside: bool = False,
    content: Manifest | None = None,
) -> Corpus:
    """Open a corpus by its manifest, or by the prefix of a .bin/.idx pair.

    Args:
        path: the manifest, or the prefix.
        mode: "mmap", or "pread" where the file system or the memory limit rules out maps, and above 20,000 shards.
        checked: check the tables of each .idx now. If false, or above 1,000 shards, tables that a manifest describes
            are checked when they are first used.
        allow_outside: its manifest may name files outside its folder; only for manifests that you trust.
        content: the manifest, if it was just read.

    Raises:
        UsageError: nothing there, an unfinished corpus, a blend, or a manifest that names files elsewhere.
        DamageError: a manifest or pair that is altered, truncated or inconsistent.
    """
    path = Path(path)
    manifest_file = manifest_of(path)
    if manifest_file is None:
        return _open_bare(prefix_of(path), mode)
    content = load_manifest(manifest_file) if content is None else content
    if not isinstance(content, CorpusManifest):
        raise UsageError(f"{manifest_file} is a blend", expected="one corpus")
    try:
        readers = open_shards(manifest_file, content, mode=mode, checked=checked, allow_outside=allow_outside)
    except UsageError:
        for shard in content.shards:
            refuse_unfinished(manifest_file.parent / shard.path)
        raise
    return Corpus(manifest_file, content, readers=readers, allow_outside=allow_outside)


class Corpus:
    """One stream of tokens; see `open_corpus`.

    Args:
        path: the manifest, or the prefix of a bare pair.
        manifest: the facts about the content.
        readers: one per shard.
        complete: false: the manifest lacks its provenance, which is read from the file when it is needed.
        allow_outside: the manifest may name files outside its folder.

    Attributes:
        id: identity of the content. name: for messages, from the path.
        document_offsets, sequence_offsets, token_offsets: how many lie before each shard, and in all.
        dtype: of the tokens on disk. eod, largest_id, tokenizer_fingerprint: None if unknown.
        address: where it is, if it is in object storage.
    """

    address: str | None = None

    def __init__(
        self,
        path: Path,
        manifest: CorpusManifest,
        *,
        readers: list[IndexedReader],
        complete: bool = True,
        allow_outside: bool = False,
    ) -> None:
        self.path = path
        self.allow_outside = allow_outside
        self._known, self._complete = manifest, complete
        self.readers = tuple(readers)
        self.id = manifest.id
        self.name = _name(path)
        self.dtype: np.dtype[np.generic] = np.dtype(manifest.dtype)
        self.document_offsets = offsets_of(reader.num_documents for reader in readers)
        self.sequence_offsets = offsets_of(reader.num_sequences for reader in readers)
        self.token_offsets = offsets_of(reader.num_tokens for reader in readers)
        totals = self.document_offsets[-1], self.sequence_offsets[-1], self.token_offsets[-1]
        self.num_documents, self.num_sequences, self.num_tokens = totals
        self.contiguous = all(reader.contiguous for reader in readers)
        self.mode = self.readers[0].mode

    def __repr__(self) -> str:
        size = f"{counted(self.num_documents, 'document')}, {counted(self.num_tokens, 'token')} of {self.dtype}"
        return f"<mdata.Corpus {str(self.path)!r}, {size}, id {self.id[:12]}>"

    @property
    def place(self) -> str:
        """Where it is, for users: its address in object storage, whose files here are copies, otherwise its path."""
        return self.address or str(self.path)

    @cached_property
    def manifest(self) -> CorpusManifest:
        """The facts about the content.

        Raises:
            DamageError: the file was replaced since the corpus was opened.
        """
        return self._known if self._complete else _load(self.path, self.id)

    @cached_property
    def gatherer(self) -> Gatherer:
        """Reads many rows of tokens at once."""
        return Gatherer(self.readers)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """int32[n], tokens of every sequence; all tables are checked first.

        Raises:
            DamageError: an .idx does not have its recorded hash, or its tables are inconsistent.
        """
        compare_all(self.readers)
        parts = [reader.lengths for reader in self.readers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def tokenizer(self) -> TokenizerFacts | None:
        """The recorded facts about the tokenizer; None if there are none."""
        return self._known.tokenizer

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Hash of the content that decided the ids."""
        return self.tokenizer.fingerprint if self.tokenizer else None

    @property
    def eod(self) -> int | None:
        """The end-of-document id."""
        return self.tokenizer.eod if self.tokenizer else None

    @property
    def largest_id(self) -> int | None:
        """The largest token id; None if unknown or without tokens."""
        largest_ids = [shard.largest_id for shard in self._known.shards if shard.largest_id is not None]
        return max(largest_ids, default=None)

    @property
    def text_bytes(self) -> int | None:
        """Size of all texts in UTF-8."""
        return self._known.statistics.text_bytes if self._known.statistics else None

    def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files beside the corpus; empty if the tokenizer is unknown.

        Raises:
            UsageError: the folder is gone, or it or a file in it lies outside the manifest's folder.
        """
        if self.tokenizer is None or self.tokenizer.folder is None:
            return {}
        folder = self.tokenizer.folder
        with os_errors_named(f"{self.name}: reading its tokenizer"):
            try:
                return files_inside(self.path, folder, allow_outside=self.allow_outside)
            except FileNotFoundError as error:
                where = "beside the manifest, from where the corpus was made"
                raise UsageError(
                    f"{self.name}: its tokenizer is missing", found=f"no folder {folder}", fix=f"copy it {where}"
                ) from error

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made this corpus, from the files beside it; None if unknown.

        Raises:
            DamageError: the files beside the corpus are not those that made it.
        """
        from mdata.tokenizers.base.tokenizer_folder import folder_name
        from mdata.tokenizers.registry import WITHOUT_FILES, build_tokenizer

        if self.tokenizer is None or (self.tokenizer.folder is None and self.tokenizer.type not in WITHOUT_FILES):
            return None
        files = self.tokenizer_files()
        if self.tokenizer.folder is not None and folder_name(files) != Path(self.tokenizer.folder).name:
            raise DamageError(
                f"{self.path.parent / self.tokenizer.folder}: its files were changed",
                found=folder_name(files),
                fix="put the original files back",
            )
        tokenizer = build_tokenizer(self.tokenizer.type, files, options=self.tokenizer.options)
        if tokenizer.fingerprint != self.tokenizer.fingerprint:
            raise DamageError(
                f"{self.path.parent / str(self.tokenizer.folder)} is not the tokenizer of {self.name}",
                found=f"fingerprint {tokenizer.fingerprint}",
                expected=self.tokenizer.fingerprint,
                fix="put the original files back",
            )
        return tokenizer

    def token_bounds(self, first_sequence: int, last_sequence: int) -> tuple[int, int]:
        """The stream's token numbers [start, stop) of sequences [first_sequence, last_sequence).

        Raises:
            UsageError: the sequences are not contiguous on disk, so there is no such stream.
        """
        if not self.contiguous:
            raise UsageError(
                f"{self.name}: its sequences are not contiguous in .bin",
                fix="rewrite the pair; the native order reads a contiguous stream of tokens",
            )
        assert 0 <= first_sequence <= last_sequence <= self.num_sequences, (
            f"sequences {first_sequence} to {last_sequence} of {self.num_sequences}"
        )
        return self._token_of_sequence(first_sequence), self._token_of_sequence(last_sequence)

    def file_position(self, token: int) -> tuple[Path, int]:
        """The .bin that holds a token of the stream, and the token's byte there; nothing is read for it."""
        assert 0 <= token < self.num_tokens, f"token {token} of {self.num_tokens}"
        shard, inside = locate(self.token_offsets, token)
        return self.readers[shard].bin_path, inside * self.dtype.itemsize

    def read(self, start: int, count: int, *, out: Int64s | None = None) -> Int64s:
        """Tokens [start, start + count) of the stream, across shards: int64[count], into `out` if given.

        Raises:
            DamageError: a file is shorter than when it was opened (mode "pread").
        """
        assert start >= 0 and 0 <= count <= self.num_tokens - start, (
            f"tokens {start} to {start + count} of {self.num_tokens}"
        )
        target = np.empty(count, np.int64) if out is None else out
        if count:
            self.gatherer.gather(np.array([start]), np.array([count]), out=target.reshape(1, -1))
        return target

    def document(self, number: int) -> Int64s:
        """All tokens of one document: int64[n]; negative numbers count from the last document, as in a list.

        Raises:
            IndexError: no such document.
        """
        return np.concatenate([np.empty(0, np.int64), *self.document_sequences(number)])

    def document_sequences(self, number: int) -> list[Int64s]:
        """The tokens of each sequence of a document; none for an empty one."""
        shard, inside = self._locate_document(number)
        reader = self.readers[shard]
        first, last = reader.boundaries[inside : inside + 2].tolist()
        return [reader.sequence(i).astype(np.int64) for i in range(first, last)]

    def locate_sequence(self, sequence: int) -> tuple[int, int]:
        """(number of the shard, sequence inside it)."""
        assert 0 <= sequence < self.num_sequences, f"sequence {sequence} of {self.num_sequences}"
        return locate(self.sequence_offsets, sequence)

    def document_of(self, sequence: int) -> int:
        """The document that a sequence belongs to."""
        shard, inside = self.locate_sequence(sequence)
        return self.document_offsets[shard] + bisect_right(self.readers[shard].tables.boundaries, inside) - 1

    def sequences_of(self, document: int) -> tuple[int, int]:
        """The sequences [first, last) of a document."""
        shard, inside = self._locate_document(document)
        first, last = self.readers[shard].tables.boundaries[inside : inside + 2].tolist()
        return self.sequence_offsets[shard] + first, self.sequence_offsets[shard] + last

    def length_of(self, sequence: int) -> int:
        """Tokens of a sequence."""
        shard, inside = self.locate_sequence(sequence)
        return int(self.readers[shard].tables.lengths[inside])

    def _token_of_sequence(self, sequence: int) -> int:
        """The first token of a sequence; for the number of sequences, the number of tokens."""
        shard, inside = locate(self.sequence_offsets, sequence)
        before = self.token_offsets[shard]
        return before + self.readers[shard].first_token(inside) if shard < len(self.readers) else before

    def _locate_document(self, number: int) -> tuple[int, int]:
        if not -self.num_documents <= number < self.num_documents:
            raise IndexError(f"document {number} of {self.num_documents}")
        return locate(self.document_offsets, number % self.num_documents)

    def __reduce__(self) -> tuple[object, ...]:
        # Provenance may list more files than there are documents, and no reader needs it.
        manifest = msgspec.structs.replace(self._known, provenance=None)
        complete = self._complete and self._known.provenance is None
        facts = tuple(reader.facts for reader in self.readers)
        return _reopen, (self.path.absolute(), self.mode, (manifest, complete), facts, self.allow_outside)


def _reopen(
    path: Path, mode: Mode, manifest: tuple[CorpusManifest, bool], facts: tuple[PairFacts, ...], allow_outside: bool
) -> Corpus:
    described, complete = manifest
    pairs = zip(described.shards, facts, strict=True)
    readers = [
        IndexedReader(
            path.parent / shard.path, mode=mode, described=Described(path, shard.idx_hash), known_facts=pair_facts
        )
        for shard, pair_facts in pairs
    ]
    if all(reader.unchanged() for reader in readers):
        return Corpus(path, described, readers=readers, complete=complete, allow_outside=allow_outside)
    corpus = open_corpus(path, mode=mode, checked=False, allow_outside=allow_outside)
    _check_id(path, corpus.id, expected=described.id)
    return corpus


def _load(path: Path, id: str) -> CorpusManifest:
    content = load_manifest(path)
    _check_id(path, content.id, expected=id)
    assert isinstance(content, CorpusManifest), f"{path} has the id of a corpus"
    return content


def _check_id(path: Path, corpus_id: str, *, expected: str) -> None:
    if corpus_id != expected:
        raise DamageError(f"{path} was replaced while it was in use", found=corpus_id, expected=expected)


def _open_bare(prefix: Path, mode: Mode) -> Corpus:
    """A pair without a manifest: what its .idx contains.

    Raises:
        UsageError: the pair belongs to an unfinished run, whose manifest still has its temporary name.
    """
    refuse_unfinished(prefix)
    reader = IndexedReader(prefix, mode=mode)
    manifest = describe_pair(prefix, reader, level=level_named(prefix))
    reader.described = Described(prefix, manifest.shards[0].idx_hash)  # of what is found there later
    return Corpus(prefix, sealed(manifest), readers=[reader])


def describe_pair(prefix: Path, reader: IndexedReader, *, level: Level) -> CorpusManifest:
    """What the .idx of a pair says, as a manifest without id and checksum.

    Raises:
        UsageError: the values are not token ids. DamageError, ResourceError: the .idx cannot be read.
    """
    check_integers(prefix, reader.dtype)
    try:
        idx_hash = hash_file(reader.idx_path, reader.facts.idx)
    except OSError as error:
        raise explain(error, reader.idx_path) from error
    shard = Shard(
        path=prefix.name,
        documents=reader.num_documents,
        sequences=reader.num_sequences,
        tokens=reader.num_tokens,
        bytes=reader.bin_bytes,
        contiguous=reader.contiguous,
        largest_id=None,
        idx_hash=idx_hash,
        blocks=None,
    )
    return CorpusManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        dtype=cast(TokenDtype, reader.dtype.name),
        level=level,
        verified=False,
        tokenizer=None,
        shards=[shard],
        provenance=None,
        statistics=None,
    )


def check_integers(prefix: Path, dtype: np.dtype[np.generic]) -> None:
    """Refuse pairs that hold no token ids.

    Raises:
        UsageError: names the type.
    """
    if dtype.kind not in "iu":
        raise UsageError(f"{prefix} holds {dtype.name} values", expected="token ids, which are integers")


def _name(path: Path) -> str:
    stem = path.name.removesuffix(".json")
    return (
        stem.removesuffix("_document")
        .removesuffix("_sentence")
        .removesuffix("_chat")
        .removesuffix("_pairs")
        .removesuffix("_text")
        or stem
    )
