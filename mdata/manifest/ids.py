"""Ids and checksums: canonical JSON, hashed with BLAKE3.

Each hash answers one question. The id answers "is it the same data?": it covers only what decides the samples, so
names, folders, options and times do not change it. The checksum answers "is this the text that was written?": it covers
every field except itself. Both hash a canonical text, so white space and the order of keys do not matter.
Floating-point numbers are refused, because their text differs between programs.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

from mdata.errors import UsageError
from mdata.manifest.types import FORMAT, VERSION, BlendManifest, CorpusManifest, Manifest
from mdata.mixing.shares import integer_weights
from mdata.util.canonical_json import hash_of, refuse_floats

M = TypeVar("M", CorpusManifest, BlendManifest)


def text_of(manifest: Manifest) -> bytes:
    """The text of the file: the canonical content, indented for reading."""
    value = msgspec.to_builtins(manifest)
    refuse_floats(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, indent=1)
    return (text + "\n").encode()


def manifest_id(manifest: Manifest) -> str:
    """The id of a manifest, computed from its content."""
    if isinstance(manifest, CorpusManifest):
        return corpus_id(manifest)
    return blend_id(manifest)


def corpus_id(corpus: CorpusManifest) -> str:
    """hash(dtype, level, shard hashes, tokenizer fingerprint); sizes replace unknown hashes."""
    return _identity(
        "corpus",
        dtype=corpus.dtype,
        level=corpus.level,
        shards=[[shard.idx_hash, shard.blocks.hash if shard.blocks else shard.bytes] for shard in corpus.shards],
        tokenizer=corpus.tokenizer.fingerprint if corpus.tokenizer else None,
    )


def blend_id(blend: BlendManifest) -> str:
    """hash(algorithm, components, shares in lowest terms, phases).

    Names, paths, validation sets and headings are not covered. Blends with weights only are hashed in the form that was
    used before phases and amounts existed.
    """
    if blend.is_plain:
        return _identity(
            "blend",
            algorithm=blend.algorithm,
            components=[[part.id, part.group, part.cap] for part in blend.components],
            shares=integer_weights([p.share for p in blend.components], [p.name for p in blend.components]),
            phases=[],
        )
    from mdata.manifest.blend_schedule import caps_of, schedules_of
    from mdata.mixing.schedule import canonical

    return _identity(
        "blend",
        algorithm=blend.algorithm,
        components=[
            [part.id, None if cap is None else str(cap)]
            for part, cap in zip(blend.components, caps_of(blend), strict=True)
        ],
        schedules=[[part.until, [canonical(phase) for phase in part.phases]] for part in schedules_of(blend)],
    )


def checksum(manifest: Manifest) -> str:
    """Hash of every field of a manifest, with an empty checksum."""
    return hash_of(msgspec.to_builtins(msgspec.structs.replace(manifest, checksum="")))


def sealed(manifest: M) -> M:
    """The manifest with its id and checksum filled in.

    Raises:
        UsageError: it names a file whose name is not UTF-8.
    """
    try:
        named = msgspec.structs.replace(manifest, id=manifest_id(manifest))
        return msgspec.structs.replace(named, checksum=checksum(named))
    except UnicodeEncodeError as error:
        text, at = error.object, error.start
        name = text[text.rfind('"', 0, at) + 1 : text.find('"', at)]
        raise UsageError(
            "a manifest cannot hold a name that is not UTF-8",
            found=name.encode(errors="backslashreplace").decode(),
            fix="rename the file or folder",
        ) from error


def _identity(kind: str, **content: Any) -> str:
    return hash_of({"format": FORMAT, "version": VERSION, "kind": kind, **content})
