"""Manifests for tests, and the check that every manifest written by a test fits the shipped schema."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec

import mdata
from mdata.manifest import types
from mdata.manifest.io import save_manifest
from mdata.manifest.types import (
    FORMAT,
    VERSION,
    BlendComponent,
    BlendManifest,
    BlockHashes,
    CorpusManifest,
    InputFile,
    Origins,
    Provenance,
    Shard,
    Statistics,
    TokenizerFacts,
)


def assert_valid(path: Path) -> None:
    """Check that the file conforms to mdata/manifest/schema.json."""
    schema = json.loads((Path(types.__file__).parent / "schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(json.loads(path.read_text()))


def some_corpus() -> CorpusManifest:
    return CorpusManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        dtype="uint16",
        level="document",
        verified=True,
        tokenizer=TokenizerFacts(
            type="HuggingFaceTokenizer",
            fingerprint="34" * 32,
            vocab_size=300,
            eod=0,
            special_ids={"<|endoftext|>": 0},
            options={"include_special_tokens": True},
            folder="tokenizer-1",
        ),
        shards=[
            Shard(
                path="x_text_document",
                documents=2,
                sequences=2,
                tokens=9,
                bytes=18,
                contiguous=True,
                largest_id=299,
                idx_hash="56" * 32,
                blocks=BlockHashes(path="x_text_document.bin.blake3", hash="78" * 32),
            )
        ],
        provenance=Provenance(
            program="mdata test",
            options={"json_key": "text", "append_eod": True},
            inputs=[InputFile(path="x.jsonl", bytes=40, modified_ns=1, hash="9a" * 32, block_bytes=1 << 22, rows=3)],
            records=2,
            skipped={"blank": 1},
            special_in_text=0,
            origins=Origins(path="x_text_document.origins", hash="9b" * 32),
        ),
        statistics=Statistics(document_lengths=[0, 0, 0, 2], text_bytes=30),
    )


def some_blend() -> BlendManifest:
    parts = [("code", "0.7", "bc" * 32), ("prose", "0.3", "de" * 32)]
    return BlendManifest(
        format=FORMAT,
        version=VERSION,
        id="",
        checksum="",
        algorithm="native",
        components=[
            BlendComponent(path=f"{name}_text_document.json", id=id, name=name, share=share, group=None, cap=None)
            for name, share, id in parts
        ],
        phases=[],
        parent=None,
    )


def corpus_of_pairs(path: Path, names: list[str], **changes: object) -> CorpusManifest:
    """Write a manifest for pairs beside it, like that of an adopted foreign corpus."""
    shards = []
    for name in names:
        pair = mdata.open_corpus(path.parent / f"{name}.idx")
        shards.append(pair.manifest.shards[0])
    facts = {"tokenizer": None, "verified": False, "provenance": None, "statistics": None, **changes}
    made = msgspec.structs.replace(some_corpus(), dtype=pair.manifest.dtype, shards=shards, **facts)
    saved = save_manifest(made, path)
    assert_valid(path)
    return saved
