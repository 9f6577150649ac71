"""Ids and checksums: canonical JSON, hashed with BLAKE3.

Two hashes answer two questions. The id answers "is it the same data?": it covers only what decides the
samples, so names, folders, options and times do not change it. The checksum answers "is this the text that
was written?": it covers every field except itself. Both hash a canonical text, so that white space and the
order of keys are free. Floating-point numbers are refused, because their text is not the same everywhere.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from mdata.blend.schedule import canonical as canonical_phase
from mdata.blend.shares import integer_weights
from mdata.manifest.schedules import caps_of, is_plain, schedules
from mdata.manifest.structs import FORMAT, VERSION, BlendManifest, CorpusManifest, Manifest

M = TypeVar("M", CorpusManifest, BlendManifest)


def canonical(value: object) -> bytes:
    """The one text of a JSON value: UTF-8, sorted keys, no blanks.

    Raises:
        TypeError: there is a float in it.
    """
    _refuse_floats(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def text_of(manifest: Manifest) -> bytes:
    """What stands in the file: the canonical content, indented for people."""
    value = msgspec.to_builtins(manifest)
    _refuse_floats(value)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, indent=1)
    return (text + "\n").encode()


def hash_of(value: object) -> str:
    """BLAKE3 of the canonical text of a JSON value, in hex."""
    return blake3(canonical(value)).hexdigest()


def manifest_id(manifest: Manifest) -> str:
    """The id that the content of a manifest gives it."""
    if isinstance(manifest, CorpusManifest):
        return corpus_id(manifest)
    return blend_id(manifest)


def corpus_id(corpus: CorpusManifest) -> str:
    """hash(dtype, level, shard hashes, tokenizer fingerprint); sizes stand in for hashes not known."""
    return _identity(
        "corpus",
        dtype=corpus.dtype,
        level=corpus.level,
        shards=[[shard.idx_hash, shard.blocks.hash if shard.blocks else shard.bytes] for shard in corpus.shards],
        tokenizer=corpus.tokenizer.fingerprint if corpus.tokenizer else None,
    )


def blend_id(blend: BlendManifest) -> str:
    """hash(algorithm, components, shares in lowest terms, phases); never names, paths, validation sets, nor headings.

    Blends of weights alone keep the form that they had before there was anything else.
    """
    if is_plain(blend):
        return _identity(
            "blend",
            algorithm=blend.algorithm,
            components=[[part.id, part.group, part.cap] for part in blend.components],
            shares=integer_weights([p.share for p in blend.components], [p.name for p in blend.components]),
            phases=[],
        )
    return _identity(
        "blend",
        algorithm=blend.algorithm,
        components=[
            [part.id, None if cap is None else str(cap)]
            for part, cap in zip(blend.components, caps_of(blend), strict=True)
        ],
        schedules=[[part.until, [canonical_phase(phase) for phase in part.phases]] for part in schedules(blend)],
    )


def checksum(manifest: Manifest) -> str:
    """Hash of every field of a manifest, the checksum itself emptied."""
    return hash_of(msgspec.to_builtins(msgspec.structs.replace(manifest, checksum="")))


def sealed(manifest: M) -> M:
    """The manifest with its id and checksum filled in."""
    named = msgspec.structs.replace(manifest, id=manifest_id(manifest))
    return msgspec.structs.replace(named, checksum=checksum(named))


def _identity(kind: str, **content: Any) -> str:
    return hash_of({"format": FORMAT, "version": VERSION, "kind": kind, **content})


_PLAIN = frozenset({str, int, bool, type(None)})


def _refuse_floats(value: object) -> None:
    if _has_float(value):
        raise TypeError(f"a float at {_float_in(value, '$')}: its text is not the same everywhere; keep it as a string")


def _has_float(value: object) -> bool:
    # A manifest has hundreds of values, a blend thousands of manifests: no place is named before it is asked for.
    if type(value) in _PLAIN:
        return False
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_float, value))
    return isinstance(value, float)


def _float_in(value: object, path: str) -> str | None:
    """The place of the first float, for people."""
    if isinstance(value, float):
        return path
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    return next((found for place, item in items if (found := _float_in(item, place))), None)
