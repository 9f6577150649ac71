"""The reader of manifests: a manifest, UsageError or DamageError, whatever the text.

The first byte chooses: the text as it comes, or a sound manifest (1: a corpus, 2: a blend) with the fields of a JSON
object put over its own, and sealed where that can be done, so that id and checksum fit and all that lies behind them is
reached. What is read is written again to the same bytes, and has the same id.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from fuzz.record_lines import check_message
from mdata.errors import DamageError, UsageError
from mdata.manifest.ids import manifest_id, sealed, text_of
from mdata.manifest.io import parse_manifest
from mdata.manifest.types import Manifest

HASH = "0123456789abcdef" * 4
SHARD = {
    "path": "x", "documents": 2, "sequences": 3, "tokens": 9, "bytes": 18, "contiguous": True, "largest_id": 7,
    "idx_hash": HASH, "blocks": {"path": "x.bin.blake3", "hash": HASH},
}  # fmt: skip
TOKENIZER = {
    "type": "GPT2BPETokenizer", "fingerprint": HASH, "vocab_size": 8, "eod": 7, "special_ids": {"eod": 7},
    "options": {}, "folder": "tokenizer-0",
}  # fmt: skip
INPUT = {"path": "a.jsonl", "bytes": 9, "modified_ns": 1, "hash": HASH, "block_bytes": 4, "rows": 2}
PROVENANCE = {
    "program": "mdata 0", "options": {"append_eod": True}, "inputs": [INPUT], "records": 2, "skipped": {"text": 1},
    "special_in_text": None, "origins": {"path": "x.origins", "hash": HASH},
}  # fmt: skip
ENVELOPE = {"format": "mdata-manifest", "version": 1, "id": "", "checksum": ""}
CORPUS: dict[str, Any] = {
    **ENVELOPE, "kind": "corpus", "dtype": "uint16", "level": "document", "verified": True, "tokenizer": TOKENIZER,
    "shards": [SHARD], "provenance": PROVENANCE, "statistics": {"document_lengths": [0, 2], "text_bytes": 9},
}  # fmt: skip
PART = {"path": "a.json", "id": HASH, "name": "a", "share": "0.7", "group": None, "cap": None}
BLEND: dict[str, Any] = {
    **ENVELOPE, "kind": "blend", "algorithm": "native", "components": [PART, {**PART, "name": "b", "share": "3"}],
    "phases": [], "parent": None, "valid": [],
}  # fmt: skip


def check(data: bytes) -> None:
    """One manifest."""
    text = data[1:]
    if data[:1] and (base := {1: CORPUS, 2: BLEND}.get(data[0] & 3)):
        text = built(base, text)
    try:
        found = parse_manifest(text, "x.json")
    except (UsageError, DamageError) as error:
        check_message(str(error))
        return
    again = text_of(found)
    assert parse_manifest(again, "x.json") == found
    assert text_of(parse_manifest(again, "x.json")) == again
    assert manifest_id(found) == found.id


def built(base: dict[str, Any], fields: bytes) -> bytes:
    """A sound manifest with other fields, sealed where a reader could get as far as the seal."""
    try:
        given = json.loads(fields)
        value = put_over(base, given) if isinstance(given, dict) else base
        text = json.dumps(value).encode()
    except (ValueError, RecursionError):
        return fields
    try:
        return text_of(sealed(msgspec.convert(value, Manifest)))
    except (TypeError, ValueError, RecursionError):  # what `parse` has to refuse
        return text


def put_over(base: Any, given: Any) -> Any:
    """Objects are merged; anything else takes the place of what was there."""
    if isinstance(base, dict) and isinstance(given, dict):
        return {**base, **{name: put_over(base.get(name), value) for name, value in given.items()}}
    return given
