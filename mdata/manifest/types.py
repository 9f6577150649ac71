"""The fields of a manifest, version 1. docs/reference/formats.md is the page for readers.

There are two kinds with common fields: a corpus (written by `preprocess`) and a blend (corpora with shares). Counts are
integers of 64 bits, hashes are BLAKE3 in lower-case hex, paths are relative to the manifest's folder with `/`. There
are no floating-point numbers: a share is stored as the text that was given. Unknown fields are refused, except under
`notes`, which are for humans: no id covers them. Fields added later are left out if unused (UNSET), so that older
manifests keep their checksums and ids.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from mdata.mixing.shares import SetBy, Unit

FORMAT: Literal["mdata-manifest"] = "mdata-manifest"
VERSION: Literal[1] = 1

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Hash = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
RelativePath = Annotated[str, Meta(pattern=r"^[^/\0][^\0]*$")]
ShareText = Annotated[
    str,
    Meta(pattern=r"^([0-9]{1,30}(/[0-9]{1,30}|\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,2})?$", max_length=64),
]
TokenDtype = Literal["uint8", "int8", "uint16", "int16", "int32", "int64"]
Level = Literal["document", "sentence", "chat", "labelled", "pairs"]


def section_name(path: str, start: int, stop: int) -> str:
    """The name of a section of a file in messages and origins: its bytes, or row groups, [start, stop)."""
    return f"{path} [{start}:{stop}]"


class TokenizerFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer that made the ids; `folder` has its files, so that the corpus can be read offline.

    `bos`, the id that begins a text, is absent where the tokenizer has none, and in older manifests; it is not part of
    the corpus' id.
    """

    type: str
    fingerprint: Hash
    vocab_size: Count
    eod: Count | None
    special_ids: dict[str, Count]
    options: dict[str, Any]
    folder: RelativePath | None
    bos: Count | UnsetType = UNSET


class BlockHashes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sidecar with one 32-byte hash per 4 MiB block of .bin, and the hash of that sidecar."""

    path: RelativePath
    hash: Hash


class Shard(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One .bin/.idx pair. `path` is the prefix; `bytes` is the size of .bin."""

    path: RelativePath
    documents: Count
    sequences: Count
    tokens: Count
    bytes: Count
    contiguous: bool
    largest_id: Count | None
    idx_hash: Hash
    blocks: BlockHashes | None


class InputSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section of a file that a part of a job read: bytes [start, stop) of its text, or row groups, of `total`.

    `pieces`: the concatenated hashes of its pieces, in hex, from which the hash of the whole file can be computed.
    """

    start: Count
    stop: Count
    total: Count
    pieces: Annotated[str, Meta(pattern="^([0-9a-f]{64})*$")]


class InputFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file that was read: the path as given, and its state at that time.

    `hash` is that of its decompressed text: BLAKE3 over the BLAKE3s of its pieces, a piece being the records that begin
    within a block of `block_bytes`. `rows` counts lines or rows, including skipped ones. If a part of a job read a
    `section` of the file, hash and rows are those of the section.
    """

    path: str
    bytes: Count
    modified_ns: Count
    hash: Hash
    block_bytes: Count
    rows: Count
    section: InputSection | UnsetType = UNSET

    @property
    def name(self) -> str:
        """The path, with the section if only a section was read."""
        return section_name(self.path, self.section.start, self.section.stop) if self.section else self.path


class Origins(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sidecar with the input file and row of each document, and the hash of that sidecar."""

    path: RelativePath
    hash: Hash


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a corpus was made.

    `records` counts the records under this key, `skipped` the bad rows by reason, `filtered` the rows that `where` and
    `skip_rows` left out and the WARC records that are not text (absent: none), `special_in_text` the special tokens
    that occurred in the texts as plain text (null: the tokenizer has none).
    """

    program: str
    options: dict[str, Any]
    inputs: list[InputFile]
    records: Count
    skipped: dict[str, Count]
    special_in_text: Count | None
    origins: Origins | None
    filtered: Count | UnsetType = UNSET


class Statistics(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`document_lengths[0]` counts documents without tokens, [k] those of 2^(k-1) to 2^k - 1 tokens.

    `text_bytes` is the size of all texts in UTF-8, for bits per byte.
    """

    document_lengths: list[Count]
    text_bytes: Count | None


class CorpusManifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="corpus", tag_field="kind"):
    """Shards tokenized with one tokenizer. `verified` is false where only an .idx was read."""

    format: Literal["mdata-manifest"]
    version: Literal[1]
    id: str
    checksum: str
    dtype: TokenDtype
    level: Level
    verified: bool
    tokenizer: TokenizerFacts | None
    shards: Annotated[list[Shard], Meta(min_length=1)]
    provenance: Provenance | None
    statistics: Statistics | None
    notes: dict[str, Any] = field(default_factory=dict)


class StoredShare(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The share of a component, or of a group, whose members divide it by their weights.

    `unit` is what the share counts (absent: weight). `set_by` "user": the user gave the share, and it is stored as
    written; "tokens": it was computed from the sizes of corpora; absent: the manifest is older than this field.
    """

    share: ShareText
    unit: Unit | UnsetType = UNSET
    set_by: SetBy | UnsetType = UNSET


class BlendComponent(StoredShare, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One corpus of a blend: the path of its manifest (or bare prefix), its id, and its share.

    `cap` is its maximum number of epochs in the whole training.
    """

    path: RelativePath
    id: Hash
    name: str
    group: str | None
    cap: ShareText | None


class StoredPhase(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A span of training with its own shares, one per component; "0": not read.

    Its length is `samples` or `tokens`; without either it ends with its amounts, or never. `units`: of the shares
    (absent: weights), `set_by`: who set each. `groups`: shares of groups. `ramp`: weights change linearly from those of
    the previous phase to these.
    """

    samples: Count | None
    shares: list[ShareText]
    tokens: Count | UnsetType = UNSET
    units: list[Unit] | UnsetType = UNSET
    groups: dict[str, StoredShare] | UnsetType = UNSET
    ramp: bool | UnsetType = UNSET
    set_by: list[SetBy] | UnsetType = UNSET


class EarlierPhases(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The earlier phases of a changed blend, in force until sample `until`; `id` of the blend that had them last."""

    until: Count
    phases: Annotated[list[StoredPhase], Meta(min_length=1)]
    id: Hash | UnsetType = UNSET


class NamedSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A validation or test set: a corpus or blend manifest, or a bare prefix, and its id."""

    name: str
    path: RelativePath
    id: Hash


class BlendManifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="blend", tag_field="kind"):
    """Corpora and their shares. No phases: one phase with the components' shares.

    `groups` belong to the components' shares. `parent` is the id of the blend that this one continues from the last
    `until` of `earlier`. `tokenizer_unknown`: corpora that do not record their tokenizer were mixed with others, and
    the user allowed it.
    """

    format: Literal["mdata-manifest"]
    version: Literal[1]
    id: str
    checksum: str
    algorithm: Literal["native"]
    components: Annotated[list[BlendComponent], Meta(min_length=1)]
    phases: list[StoredPhase]
    parent: Hash | None
    notes: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, StoredShare] | UnsetType = UNSET
    earlier: list[EarlierPhases] | UnsetType = UNSET
    valid: list[NamedSet] | UnsetType = UNSET
    test: list[NamedSet] | UnsetType = UNSET
    tokenizer_unknown: Literal["ok"] | UnsetType = UNSET

    @property
    def is_plain(self) -> bool:
        """Whether it has only weights of components, as in the first manifests."""
        later = (self.groups, self.earlier, *(part.unit for part in self.components))
        return not self.phases and all(isinstance(value, UnsetType) for value in later)


Manifest = CorpusManifest | BlendManifest
